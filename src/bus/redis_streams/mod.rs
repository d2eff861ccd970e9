//! The bus on Redis Streams.
//!
//! - `<prefix>:{bus}:<topic>:<partition>`: a stream per partition. Field `v` of an entry is its
//!   record.
//! - `…:committed`: for ordered reading, the committed id. For shared reading a consumer group has
//!   it.
//! - `<prefix>:{bus}:readers:<topic>`: the live readers, each with its deadline.
//! - `<prefix>:{bus}:owners:<topic>`: for ordered reading, the owner of each partition
//!   (`lua/bus_own.lua`).
//! - `<prefix>:{bus}:generation`: a random name, written once. If it is gone, Redis has lost
//!   everything.
//! - `<prefix>:{bus}:partitions`: topic → its number of partitions.
//! - `<prefix>:{bus}:waited`: publishers that wait for replicas write it. Nobody reads it.
//!
//! The braces keep all keys in one cluster slot. So one exchange with one node publishes to or
//! waits for many partitions, and compares the generation in the same step. In a cluster, too, the
//! bus is as fast as one node; Kafka is faster.
//!
//! Redis makes ids from its clock. A Redis that was set back to its last fsync continues above the
//! ids that it has lost.

mod apart;
mod blocking;
mod buffer;
mod consumer;
mod failure;
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
use super::{Apart, Bus, Error, Keep, Reading, Record, Result, Subscription, Topic};
use crate::{model::Offset, redis_pool::Redis, runtime::Clock};

const TAKE_OVER_AFTER: Duration = Duration::from_secs(30);

pub struct RedisStreams {
    streams: Arc<Streams>,
    take_over_after: Duration,
    /// The name of this process among the readers.
    process: String,
}

impl RedisStreams {
    /// Opens the bus. `partitions` counts for new topics; the others keep theirs, because records
    /// are there.
    pub async fn open(redis: Redis, topic_prefix: &str, partitions: u32) -> Result<Self> {
        Self::with_clock(redis, topic_prefix, partitions, Clock::of_this_machine()).await
    }

    /// Opens the bus. Readers live and die by Redis's own clock, until a test moves `clock`.
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

    /// The topics of these that do not exist. It makes none.
    pub async fn missing(
        redis: &Redis,
        topic_prefix: &str,
        topics: &[Topic],
    ) -> Result<Vec<Topic>> {
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
            .filter_map(|(topic, found)| found.is_none().then_some(*topic))
            .collect())
    }

    /// How long a shared record may stay unacknowledged with one reader before another takes it
    /// over. The default is 30 s.
    ///
    /// A time below that of the slowest batch makes readers process batches twice.
    pub fn take_over_after(self, take_over_after: Duration) -> Self {
        Self {
            take_over_after,
            ..self
        }
    }

    /// The name of this process, which no other live process may have. The default is a random one.
    ///
    /// A process with the name of a dead one gets at once what that one had, without a wait for its
    /// deadline.
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
        // Entries leave once taskd has dealt with them.
        false
    }

    async fn publish(&self, topic: Topic, records: &[Record]) -> Result<Vec<Offset>> {
        super::check_partitions(topic, records, self.partitions(topic))?;
        let mut offsets = Vec::with_capacity(records.len());
        for chunk in publish::chunks(records) {
            offsets.extend(self.streams.publish_chunk(topic, chunk).await?);
        }
        Ok(offsets)
    }

    async fn subscribe(&self, topic: Topic, reading: Reading) -> Result<Box<dyn Subscription>> {
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

    /// The first part of a stream's id is the time.
    fn published_at(&self, offset: Offset) -> Option<i64> {
        i64::try_from(offset.major).ok()
    }

    async fn read_apart(&self, topic: Topic, after: Vec<Option<Offset>>) -> Result<Box<dyn Apart>> {
        let streams = Arc::clone(&self.streams);
        Ok(Box::new(apart::ApartReader::new(streams, topic, after)))
    }

    async fn starts(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        let extents = self.streams.extents(topic).await?;
        Ok(extents.iter().map(|extent| extent.first).collect())
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

    /// For shared reading, the offset before the first record.
    ///
    /// Acknowledged records are gone. So everything before the first record is committed, and some
    /// behind it may be too.
    async fn committed(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        Ok(self
            .streams
            .extents(topic)
            .await?
            .iter()
            .map(Extent::committed)
            .collect())
    }

    /// Processed records are deleted, so that all others count.
    async fn backlog(&self, topic: Topic) -> Result<u64> {
        let mut pipe = redis::pipe();
        for key in self.streams.keys(topic) {
            pipe.cmd("XLEN").arg(key);
        }
        let lengths = pipe.query_async(&mut self.streams.redis.conn()).await;
        let lengths: Vec<u64> = lengths.map_err(Error::read::<RedisError>(topic))?;
        Ok(lengths.iter().sum())
    }

    /// Trims topics that taskd does not read: the others lose their records with the commit.
    async fn trim(&self, topic: Topic, keep: Keep) -> Result<u64> {
        if topic.is_read() {
            return Ok(0);
        }
        let failed = Error::trim::<RedisError>(topic);
        let mut conn = self.streams.redis.conn();
        // Redis makes ids from its clock.
        let (secs, micros): (u64, u64) = redis::cmd("TIME")
            .query_async(&mut conn)
            .await
            .map_err(&failed)?;
        let oldest_ms =
            u128::from(secs * 1000 + micros / 1000).saturating_sub(keep.age.as_millis());
        let mut pipe = redis::pipe();
        for key in self.streams.keys(topic) {
            pipe.cmd("XTRIM")
                .arg(&key)
                .arg("MAXLEN")
                .arg("=")
                .arg(keep.records);
            pipe.cmd("XTRIM")
                .arg(&key)
                .arg("MINID")
                .arg("=")
                .arg(oldest_ms.to_string());
        }
        let trimmed: Vec<u64> = pipe.query_async(&mut conn).await.map_err(&failed)?;
        Ok(trimmed.iter().sum())
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
        for topic in Topic::ALL.into_iter().filter(|topic| topic.is_read()) {
            let mut ask = redis::cmd("HGET");
            ask.arg(partitions_key(&self.streams.redis))
                .arg(self.streams.field(topic));
            let found = ask.query_async(&mut self.streams.redis.conn()).await;
            let found = found.map_err(Error::read::<RedisError>(topic))?;
            super::check_grown(topic, self.partitions(topic), found)?;
        }
        Ok(())
    }

    /// Releases what the readers of this process have, so that others need not wait for their
    /// deadlines.
    async fn close(&self) {
        let readers = self.streams.readers.lock().clone();
        for (topic, reader) in readers {
            if let Err(error) = self.streams.own(topic, &reader, Duration::ZERO).await {
                tracing::debug!("{reader} did not release what it has of {topic}: {error}");
            }
        }
    }
}
