//! The bus on Redis Streams.
//!
//! - `<prefix>:{bus}:<topic>:<partition>`: the stream of a partition. Field `v` of an entry holds
//!   the record.
//! - `…:committed`: the committed id of ordered reading. For shared reading, the consumer group
//!   keeps it.
//! - `<prefix>:{bus}:readers:<topic>`: the live readers with their deadlines.
//! - `<prefix>:{bus}:owners:<topic>`: the owner of each partition in ordered reading
//!   (`lua/bus_own.lua`).
//! - `<prefix>:{bus}:generation`: a random name that is written once. If it is gone, Redis has lost
//!   all its data.
//! - `<prefix>:{bus}:partitions`: topic → number of partitions.
//! - `<prefix>:{bus}:<report>:0`: the stream of `expirations`, `dead-letters` and `events`.
//! - `<prefix>:{topic:<topic>:<partition>}:log`: a partition of another log, in a slot of its own.
//! - `<prefix>:{bus}:waited`: written by publishers that wait for replicas. Nobody reads it.
//!
//! The braces keep all keys of the bus in one cluster slot, so that one round trip to one node can publish to
//! or read from many partitions and check the generation in the same step. As a consequence, even
//! in a cluster the bus is limited to the speed of one node; Kafka is faster.
//!
//! Redis creates ids from its clock. A Redis that was set back to its last fsync therefore
//! continues above the ids that it lost.

mod blocking;
mod buffer;
mod consumer;
mod failure;
mod logs;
mod ordered;
mod publish;
mod reply;
mod shared;
mod streams;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use redis::RedisError;
use uuid::Uuid;

use self::streams::{Extent, Streams, partitions_key};
use super::{Bus, Error, Keep, Logs, Reader, Reading, Record, Result, Topic};
use crate::{model::Offset, redis_pool::Redis, runtime::Clock};

const TAKE_OVER_AFTER: Duration = Duration::from_secs(30);

pub struct RedisStreams {
    streams: Arc<Streams>,
    take_over_after: Duration,
    /// The prefix of this process's reader names.
    process: String,
}

impl RedisStreams {
    /// Opens the bus. `partitions` applies to new topics; existing topics keep their number,
    /// because they hold records.
    pub async fn open(redis: Redis, topic_prefix: &str, partitions: u32) -> Result<Self> {
        Self::with_clock(redis, topic_prefix, partitions, Clock::of_this_machine()).await
    }

    /// Opens the bus. Readers' deadlines follow the clock of Redis, unless a test moves `clock`.
    pub async fn with_clock(
        redis: Redis,
        topic_prefix: &str,
        partitions: u32,
        clock: Clock,
    ) -> Result<Self> {
        let streams = Streams::open(redis, topic_prefix, partitions, clock).await?;
        Ok(Self {
            streams,
            take_over_after: TAKE_OVER_AFTER,
            process: Uuid::new_v4().to_string(),
        })
    }

    /// Returns those of `topics` that do not exist. Creates nothing.
    pub async fn missing(
        redis: &Redis,
        topic_prefix: &str,
        topics: &[&str],
    ) -> Result<Vec<String>> {
        let mut ask = redis::cmd("HMGET");
        ask.arg(partitions_key(redis)).arg(
            topics
                .iter()
                .map(|topic| format!("{topic_prefix}{topic}"))
                .collect::<Vec<_>>(),
        );
        let found: Vec<Option<u32>> = ask
            .query_async(&mut redis.conn())
            .await
            .map_err(Error::setup::<RedisError>)?;
        Ok(topics
            .iter()
            .zip(found)
            .filter(|(_, found)| found.is_none())
            .map(|(topic, _)| (*topic).to_owned())
            .collect())
    }

    /// How long a record in shared reading may stay unacknowledged before another reader takes it
    /// over. The default is 30 s.
    ///
    /// If this is shorter than the slowest batch takes, readers process batches twice.
    pub fn take_over_after(self, take_over_after: Duration) -> Self {
        Self {
            take_over_after,
            ..self
        }
    }

    /// Sets the name of this process, which no other live process may use. The default is random.
    ///
    /// A process that reuses the name of a dead one takes over its partitions and records
    /// immediately, without waiting for its deadline.
    pub fn process(self, name: &str) -> Self {
        Self {
            process: name.to_owned(),
            ..self
        }
    }
}

#[async_trait]
impl Bus for RedisStreams {
    fn generation(&self) -> &str {
        &self.streams.generation
    }

    fn partitions(&self, topic: Topic) -> u32 {
        self.streams.partitions[&topic]
    }

    fn has_other_readers(&self) -> bool {
        // Entries are deleted as soon as taskd has processed them.
        false
    }

    fn logs(&self) -> Arc<dyn Logs> {
        Arc::new(logs::StreamLogs::new(Arc::clone(&self.streams)))
    }

    async fn publish(&self, topic: Topic, records: &[Record]) -> Result<Vec<Offset>> {
        let asked = records.iter().map(|record| record.partition);
        super::check_partitions(topic, asked, self.partitions(topic))?;
        let mut offsets = Vec::with_capacity(records.len());
        for chunk in publish::chunks(records, |record| record.value.len()) {
            offsets.extend(self.streams.publish_chunk(topic, chunk).await?);
        }
        Ok(offsets)
    }

    async fn subscribe(&self, topic: Topic, reading: Reading) -> Result<Box<dyn Reader>> {
        Ok(match reading {
            Reading::Ordered => {
                Box::new(ordered::Ordered::open(self.streams.clone(), topic, &self.process).await?)
            }
            Reading::Shared => {
                let streams = self.streams.clone();
                let after = self.take_over_after;
                Box::new(shared::Shared::open(streams, topic, &self.process, after).await?)
            }
        })
    }

    /// The first part of a stream id is its time.
    fn published_at(&self, offset: Offset) -> Option<i64> {
        i64::try_from(offset.major).ok()
    }

    async fn ends(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        Ok(self
            .streams
            .extents(topic)
            .await?
            .iter()
            .map(|extent| extent.last)
            .collect())
    }

    /// For shared reading, this is the offset before the first record.
    ///
    /// Acknowledged records are deleted. So everything before the first record is committed, and
    /// some records after it may be, too.
    async fn committed(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        Ok(self
            .streams
            .extents(topic)
            .await?
            .iter()
            .map(Extent::committed)
            .collect())
    }

    /// Processed records are deleted, so every remaining record counts.
    async fn backlog(&self, topic: Topic) -> Result<u64> {
        let mut pipe = redis::pipe();
        for key in self.streams.keys(topic) {
            pipe.cmd("XLEN").arg(key);
        }
        let lengths = pipe.query_async(&mut self.streams.redis.conn()).await;
        let lengths: Vec<u64> = lengths.map_err(Error::read::<RedisError>(topic))?;
        Ok(lengths.iter().sum())
    }

    /// Committing a record deletes it.
    async fn trim(&self, _topic: Topic, _keep: Keep) -> Result<u64> {
        Ok(0)
    }

    async fn raise_partitions(&self, topic: Topic, count: u32) -> Result<()> {
        let mut raise = redis::cmd("HSET");
        raise
            .arg(partitions_key(&self.streams.redis))
            .arg(self.streams.field(topic))
            .arg(count);
        let raised: Result<(), RedisError> =
            raise.query_async(&mut self.streams.redis.conn()).await;
        raised.map_err(Error::setup)
    }

    async fn check_partitions(&self) -> Result<()> {
        for topic in Topic::ALL {
            let mut ask = redis::cmd("HGET");
            ask.arg(partitions_key(&self.streams.redis))
                .arg(self.streams.field(topic));
            let found = ask.query_async(&mut self.streams.redis.conn()).await;
            let found = found.map_err(Error::read::<RedisError>(topic))?;
            super::check_grown(topic, self.partitions(topic), found)?;
        }
        Ok(())
    }

    /// Releases the partitions and records of this process's readers, so that others need not wait
    /// for their deadlines.
    async fn close(&self) {
        let readers = self.streams.readers.lock().clone();
        for (topic, reader) in readers {
            if let Err(error) = self.streams.own(topic, &reader, Duration::ZERO).await {
                tracing::debug!("{reader} did not release what it has of {topic}: {error}");
            }
        }
    }
}
