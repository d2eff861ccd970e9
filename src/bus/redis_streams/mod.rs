//! The bus on Redis Streams.
//!
//! - `<prefix>:{bus}:<topic>:<partition>`: a stream per partition; an entry has its record in field `v`.
//! - `…:committed`: for ordered reading, the id up to which everything was dealt with. For shared reading a consumer group does it.
//! - `<prefix>:{bus}:readers:<topic>`: the living readers, each with its deadline.
//! - `<prefix>:{bus}:owners:<topic>`: for ordered reading, the owner of each partition (`lua/bus_own.lua`).
//! - `<prefix>:{bus}:generation`: a random name, written once. When it is gone, Redis has lost everything.
//! - `<prefix>:{bus}:partitions`: topic → how many partitions it was begun with.
//! - `<prefix>:{bus}:waited`: written by publishers that wait for replicas, and read by nobody.
//!
//! The braces keep all keys in one cluster slot: one exchange with one node publishes to or waits for many partitions, and compares the
//! generation in the same step. So in a cluster, too, the bus is as fast as one node; who needs more uses Kafka.
//!
//! Ids are given by Redis from its clock, so a Redis that fell back to its last fsync goes on above the ids that it has forgotten.

mod buffer;
mod consumer;
mod line;
mod ordered;
mod publish;
mod reply;
mod shared;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    num::ParseIntError,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use redis::{Cmd, RedisError, RedisResult, Value};
use uuid::Uuid;

use super::{Bus, Error, Keep, Message, Reading, Record, Result, Subscription, Topic};
use crate::{
    model::Offset,
    redis_pool::{Batch, Redis, scripts},
    runtime::Clock,
};

const TAKE_OVER_AFTER: Duration = Duration::from_secs(30);

pub struct RedisStreams {
    streams: Arc<Streams>,
    take_over_after: Duration,
    /// Names this process among the readers.
    process: String,
}

struct Streams {
    redis: Redis,
    clock: Clock,
    topic_prefix: String,
    generation: String,
    partitions: HashMap<Topic, u32>,
    /// The consumer numbers in use.
    consumers: Mutex<HashSet<(Topic, u32)>>,
    /// Readers of this process that others take for alive.
    readers: Mutex<HashSet<(Topic, String)>>,
}

impl RedisStreams {
    /// `partitions` counts for topics that do not exist yet; the others keep theirs, since records stand in them.
    pub async fn open(redis: Redis, topic_prefix: &str, partitions: u32) -> Result<Self> {
        Self::with_clock(redis, topic_prefix, partitions, Clock::of_this_machine()).await
    }

    /// Readers live and die by Redis's own clock, until a test moves `clock`.
    pub async fn with_clock(redis: Redis, topic_prefix: &str, partitions: u32, clock: Clock) -> Result<Self> {
        let (generation, partitions) = begin(&redis, topic_prefix, partitions).await?;
        let streams = Arc::new(Streams {
            redis,
            clock,
            topic_prefix: topic_prefix.to_owned(),
            generation,
            partitions,
            consumers: Mutex::default(),
            readers: Mutex::default(),
        });
        Ok(Self { streams, take_over_after: TAKE_OVER_AFTER, process: Uuid::new_v4().to_string() })
    }

    /// How long a shared record may stay unacknowledged with one reader before another gets it, 30 s unless set. Should be longer
    /// than any batch takes, else batches are done twice.
    pub fn take_over_after(self, take_over_after: Duration) -> Self {
        Self { take_over_after, ..self }
    }

    /// Under a name that no other living process has, a random one unless set. Who comes again under the name of a dead process has at once
    /// what that one had, and need not wait until others see that it is dead.
    pub fn process(self, name: &str) -> Self {
        Self { process: name.to_owned(), ..self }
    }
}

/// Reads, and writes where it is missing, what all processes must agree on.
async fn begin(redis: &Redis, topic_prefix: &str, partitions: u32) -> Result<(String, HashMap<Topic, u32>)> {
    if partitions == 0 {
        return Err(Error::Setup("a topic needs at least one partition".into()));
    }
    let mut begin = scripts::BUS_BEGIN.call(&[generation_key(redis), partitions_key(redis)]);
    begin.arg(Uuid::new_v4().simple().to_string());
    for topic in Topic::ALL {
        begin.arg(format!("{topic_prefix}{topic}")).arg(topic.partitions(partitions));
    }
    let setup = |reason: String| Error::Setup(reason);
    let began = begin.run(&mut redis.conn()).await.map_err(|e| setup(e.to_string()))?;
    let began: Vec<String> = redis::from_redis_value(began).map_err(|e| setup(e.to_string()))?;
    let mut answers = began.into_iter();
    let generation = answers.next().ok_or_else(|| setup("no generation".into()))?;
    let counts = Topic::ALL.into_iter().zip(answers).map(|(topic, count)| Ok((topic, count.parse()?)));
    let counts: Result<HashMap<Topic, u32>, ParseIntError> = counts.collect();
    Ok((generation, counts.map_err(|e| setup(format!("not a number of partitions: {e}")))?))
}

fn generation_key(redis: &Redis) -> String {
    format!("{}:{{bus}}:generation", redis.prefix())
}

fn partitions_key(redis: &Redis) -> String {
    format!("{}:{{bus}}:partitions", redis.prefix())
}

fn committed_key(stream: &str) -> String {
    format!("{stream}:committed")
}

/// A position as it is stored; before everything when none is.
fn position(id: Option<&str>) -> Result<Offset, ParseIntError> {
    id.map_or(Ok(Offset::default()), str::parse)
}

/// Entries of the partition as messages; those that were deleted are left out.
fn messages(partition: usize, entries: Vec<reply::Entry>) -> Vec<Message> {
    let partition = u32::try_from(partition).expect("partitions are counted in u32");
    let message = |entry: reply::Entry| Some(Message { partition, offset: entry.offset, value: entry.value? });
    entries.into_iter().filter_map(message).collect()
}

impl Streams {
    fn key(&self, topic: Topic, partition: u32) -> String {
        format!("{}:{{bus}}:{}{topic}:{partition}", self.redis.prefix(), self.topic_prefix)
    }

    /// Of the hash of partitions.
    fn field(&self, topic: Topic) -> String {
        format!("{}{topic}", self.topic_prefix)
    }

    /// By partition.
    fn keys(&self, topic: Topic) -> Vec<String> {
        (0..self.partitions[&topic]).map(|partition| self.key(topic, partition)).collect()
    }

    fn ask_generation(&self) -> Cmd {
        let mut get = redis::cmd("GET");
        get.arg(generation_key(&self.redis));
        get
    }

    fn readers_key(&self, topic: Topic) -> String {
        format!("{}:{{bus}}:readers:{}{topic}", self.redis.prefix(), self.topic_prefix)
    }

    fn owners_key(&self, topic: Topic) -> String {
        format!("{}:{{bus}}:owners:{}{topic}", self.redis.prefix(), self.topic_prefix)
    }

    /// Call it before Redis is told: Redis may carry out a call whose caller has given up.
    fn note_reader(&self, topic: Topic, reader: &str) {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner).insert((topic, reader.to_owned()));
    }

    /// What the ordered reader of that name owns now, and will for another while: partition and tenure.
    async fn own(&self, topic: Topic, reader: &str, lives: Duration) -> RedisResult<BTreeMap<u32, u64>> {
        let keys = [self.readers_key(topic), self.owners_key(topic)];
        let mut call = scripts::BUS_OWN.call(&keys).now(self.clock.moved_unix_ms());
        call.arg(reader).arg(lives.as_millis() as u64).arg(self.partitions[&topic]);
        self.note_reader(topic, reader);
        let owned: Vec<(u32, u64)> = redis::from_redis_value(call.run(&mut self.redis.conn()).await?)?;
        Ok(owned.into_iter().collect())
    }

    fn check_generation(&self, found: Option<&str>) -> Result<()> {
        if found == Some(self.generation.as_str()) {
            return Ok(());
        }
        Err(Error::Lost { generation: self.generation.clone() })
    }

    async fn extents(&self, topic: Topic) -> Result<Vec<Extent>> {
        let mut batch = Batch::default();
        for key in self.keys(topic) {
            batch.script(scripts::BUS_EXTENT.call(&[&key, &committed_key(&key)]));
        }
        // Read behind them: offsets of another life must not be taken for those of ours.
        batch.command(self.ask_generation());
        let failed = |reason: String| Error::Read { topic, reason };
        let answered = batch.run_all(&mut self.redis.conn()).await;
        let mut answers: Vec<Value> = answered.map_err(|e: RedisError| failed(e.to_string()))?;
        let generation: Option<String> = answers.pop().and_then(|value| redis::from_redis_value(value).ok());
        self.check_generation(generation.as_deref())?;
        let rows = answers.into_iter().map(redis::from_redis_value).collect::<Result<Vec<ExtentRow>, _>>();
        let rows = rows.map_err(|e| failed(e.to_string()))?;
        rows.iter().map(Extent::new).collect::<Result<_, _>>().map_err(|e| failed(format!("not a stream id: {e}")))
    }
}

/// The answer of `bus_extent.lua`.
type ExtentRow = (String, Option<String>, String, Option<String>);

/// Where a partition begins and ends.
struct Extent {
    /// The last record that was ever appended.
    last: Option<Offset>,
    /// The first that is still there.
    first: Option<Offset>,
    /// Whether a shared reader has ever acknowledged one.
    acknowledged: bool,
    /// What an ordered reader has committed.
    committed: Option<Offset>,
}

impl Extent {
    fn new((last, first, deleted, committed): &ExtentRow) -> Result<Self, ParseIntError> {
        let some = |id: &str| id.parse().map(|offset| (offset != Offset::default()).then_some(offset));
        Ok(Self {
            last: some(last)?,
            first: first.as_deref().map_or(Ok(None), some)?,
            acknowledged: some(deleted)?.is_some(),
            committed: committed.as_deref().map_or(Ok(None), some)?,
        })
    }

    fn committed(&self) -> Option<Offset> {
        match (self.committed, self.first) {
            (Some(committed), _) => Some(committed),
            (None, _) if !self.acknowledged => None,
            (None, Some(first)) => Some(before(first)),
            (None, None) => self.last,
        }
    }
}

/// The highest offset below it.
fn before(offset: Offset) -> Offset {
    match offset.minor.checked_sub(1) {
        Some(minor) => Offset { minor, ..offset },
        None => Offset { major: offset.major.saturating_sub(1), minor: u64::MAX },
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
            Reading::Ordered => Box::new(ordered::Ordered::open(self.streams.clone(), topic, &self.process).await?),
            Reading::Shared => {
                let (streams, after) = (self.streams.clone(), self.take_over_after);
                Box::new(shared::Shared::open(streams, topic, &self.process, after).await?)
            }
        })
    }

    async fn ends(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        Ok(self.streams.extents(topic).await?.iter().map(|extent| extent.last).collect())
    }

    /// Where the reading is shared, acknowledged records are gone. So what counts is the first one that is still there: everything
    /// before it is committed, and some behind it may be too.
    async fn committed(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        Ok(self.streams.extents(topic).await?.iter().map(Extent::committed).collect())
    }

    /// What was dealt with is deleted.
    async fn backlog(&self, topic: Topic) -> Result<u64> {
        let mut pipe = redis::pipe();
        for key in self.streams.keys(topic) {
            pipe.cmd("XLEN").arg(key);
        }
        let lengths: Vec<u64> = pipe
            .query_async(&mut self.streams.redis.conn())
            .await
            .map_err(|e: RedisError| Error::Read { topic, reason: e.to_string() })?;
        Ok(lengths.iter().sum())
    }

    /// Of what taskd reads, that is done with the commit.
    async fn trim(&self, topic: Topic, keep: Keep) -> Result<u64> {
        if topic.is_read() {
            return Ok(0);
        }
        let failed = |e: RedisError| Error::Trim { topic, reason: e.to_string() };
        let mut conn = self.streams.redis.conn();
        // Ids are made of Redis's clock.
        let (secs, micros): (u64, u64) = redis::cmd("TIME").query_async(&mut conn).await.map_err(failed)?;
        let oldest_ms = u128::from(secs * 1000 + micros / 1000).saturating_sub(keep.age.as_millis());
        let mut pipe = redis::pipe();
        for key in self.streams.keys(topic) {
            pipe.cmd("XTRIM").arg(&key).arg("MAXLEN").arg("=").arg(keep.records);
            pipe.cmd("XTRIM").arg(&key).arg("MINID").arg("=").arg(oldest_ms.to_string());
        }
        let trimmed: Vec<u64> = pipe.query_async(&mut conn).await.map_err(failed)?;
        Ok(trimmed.iter().sum())
    }

    async fn raise_partitions(&self, topic: Topic, count: u32) -> Result<()> {
        let mut raise = redis::cmd("HSET");
        raise.arg(partitions_key(&self.streams.redis)).arg(self.streams.field(topic)).arg(count);
        let raised: Result<(), RedisError> = raise.query_async(&mut self.streams.redis.conn()).await;
        raised.map_err(|e| Error::Setup(e.to_string()))
    }

    async fn check_partitions(&self) -> Result<()> {
        for topic in Topic::ALL.into_iter().filter(|topic| topic.is_read()) {
            let mut ask = redis::cmd("HGET");
            ask.arg(partitions_key(&self.streams.redis)).arg(self.streams.field(topic));
            let found = ask.query_async(&mut self.streams.redis.conn()).await;
            let found = found.map_err(|e: RedisError| Error::Read { topic, reason: e.to_string() })?;
            super::check_grown(topic, self.partitions(topic), found)?;
        }
        Ok(())
    }

    /// Others need not wait until our readers are taken for dead.
    async fn close(&self) {
        let readers = self.streams.readers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (topic, reader) in readers {
            if let Err(error) = self.streams.own(topic, &reader, Duration::ZERO).await {
                tracing::debug!("{reader} did not give back what it has of {topic}: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_before() {
        assert_eq!(before(Offset { major: 5, minor: 1 }), Offset { major: 5, minor: 0 });
        assert_eq!(before(Offset { major: 5, minor: 0 }), Offset { major: 4, minor: u64::MAX });
    }
}
