//! The keys of the bus, and the state that all readers and publishers of a process share.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    num::ParseIntError,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use redis::{Cmd, RedisError, RedisResult, Value};
use uuid::Uuid;

use super::{failure::Failure, reply};
use crate::{
    bus::{Error, Message, Result, Topic, TopicName},
    model::Offset,
    redis_pool::{Batch, Call, Redis, scripts},
    runtime::Clock,
};

pub(super) struct Streams {
    pub(super) redis: Redis,
    pub(super) clock: Clock,
    topic_prefix: String,
    pub(super) generation: String,
    pub(super) partitions: HashMap<Topic, u32>,
    /// The consumer numbers in use.
    pub(super) consumers: Mutex<HashSet<(Topic, u32)>>,
    /// Readers of this process that other processes may consider alive.
    pub(super) readers: Mutex<HashSet<(Topic, String)>>,
}

impl Streams {
    /// `partitions` applies to new topics; existing topics keep their number, because they hold
    /// records.
    pub(super) async fn open(
        redis: Redis,
        topic_prefix: &str,
        partitions: u32,
        clock: Clock,
    ) -> Result<Arc<Self>> {
        let (generation, partitions) = begin(&redis, topic_prefix, partitions).await?;
        Ok(Arc::new(Self {
            redis,
            clock,
            topic_prefix: topic_prefix.to_owned(),
            generation,
            partitions,
            consumers: Mutex::default(),
            readers: Mutex::default(),
        }))
    }
}

/// Reads the values that all processes must agree on, and writes those that are missing.
async fn begin(
    redis: &Redis,
    topic_prefix: &str,
    partitions: u32,
) -> Result<(String, HashMap<Topic, u32>)> {
    if partitions == 0 {
        return Err(Error::setup(Failure::NoPartitions));
    }
    let mut begin = scripts::BUS_BEGIN.call(&[generation_key(redis), partitions_key(redis)]);
    begin.arg(Uuid::new_v4().simple().to_string());
    for topic in Topic::ALL {
        begin.arg(format!("{topic_prefix}{topic}")).arg(partitions);
    }
    let began = begin.run(&mut redis.conn()).await.map_err(Error::setup)?;
    let began: Vec<String> = redis::from_redis_value(began).map_err(Error::setup)?;
    let mut answers = began.into_iter();
    let generation = answers
        .next()
        .ok_or_else(|| Error::setup(Failure::NoGeneration))?;
    let counts = Topic::ALL
        .into_iter()
        .zip(answers)
        .map(|(topic, count)| Ok((topic, count.parse()?)));
    let counts: Result<HashMap<Topic, u32>, ParseIntError> = counts.collect();
    Ok((
        generation,
        counts.map_err(|e| Error::setup(Failure::Partitions(e)))?,
    ))
}

pub(super) fn generation_key(redis: &Redis) -> String {
    format!("{}:{{bus}}:generation", redis.prefix())
}

pub(super) fn partitions_key(redis: &Redis) -> String {
    format!("{}:{{bus}}:partitions", redis.prefix())
}

pub(super) fn committed_key(stream: &str) -> String {
    format!("{stream}:committed")
}

/// Parses a stored position. Without one, returns the position before all records.
pub(super) fn position(id: Option<&str>) -> Result<Offset, ParseIntError> {
    id.map_or(Ok(Offset::default()), str::parse)
}

/// Converts entries of the partition to messages, skipping deleted entries.
pub(super) fn messages(partition: usize, entries: Vec<reply::Entry>) -> Vec<Message> {
    let partition = u32::try_from(partition).expect("partitions are counted in u32");
    let message = |entry: reply::Entry| {
        Some(Message {
            partition,
            offset: entry.offset,
            value: entry.value?,
        })
    };
    entries.into_iter().filter_map(message).collect()
}

impl Streams {
    pub(super) fn key(&self, topic: impl fmt::Display, partition: u32) -> String {
        format!(
            "{}:{{bus}}:{}{topic}:{partition}",
            self.redis.prefix(),
            self.topic_prefix
        )
    }

    /// The topic's field in the hash of partitions.
    pub(super) fn field(&self, topic: Topic) -> String {
        format!("{}{topic}", self.topic_prefix)
    }

    /// The key of each partition.
    pub(super) fn keys(&self, topic: Topic) -> Vec<String> {
        (0..self.partitions[&topic])
            .map(|partition| self.key(topic, partition))
            .collect()
    }

    pub(super) fn ask_generation(&self) -> Cmd {
        let mut get = redis::cmd("GET");
        get.arg(generation_key(&self.redis));
        get
    }

    pub(super) fn readers_key(&self, topic: Topic) -> String {
        format!(
            "{}:{{bus}}:readers:{}{topic}",
            self.redis.prefix(),
            self.topic_prefix
        )
    }

    fn owners_key(&self, topic: Topic) -> String {
        format!(
            "{}:{{bus}}:owners:{}{topic}",
            self.redis.prefix(),
            self.topic_prefix
        )
    }

    /// Remembers a reader, so that [`Bus::close`](crate::bus::Bus::close) releases its partitions
    /// and records.
    ///
    /// Call this before the request to Redis, which may be executed even if its caller has given
    /// up.
    pub(super) fn note_reader(&self, topic: Topic, reader: &str) {
        self.readers.lock().insert((topic, reader.to_owned()));
    }

    /// Renews the deadline of an ordered reader. Returns its partitions with their tenures.
    pub(super) async fn own(
        &self,
        topic: Topic,
        reader: &str,
        lives: Duration,
    ) -> RedisResult<BTreeMap<u32, u64>> {
        let keys = [self.readers_key(topic), self.owners_key(topic)];
        let mut call = scripts::BUS_OWN.call(&keys).now(self.clock.moved_unix_ms());
        call.arg(reader)
            .arg(lives.as_millis() as u64)
            .arg(self.partitions[&topic]);
        self.note_reader(topic, reader);
        let owned: Vec<(u32, u64)> =
            redis::from_redis_value(call.run(&mut self.redis.conn()).await?)?;
        Ok(owned.into_iter().collect())
    }

    pub(super) fn check_generation(&self, found: Option<&str>) -> Result<()> {
        if found == Some(self.generation.as_str()) {
            return Ok(());
        }
        Err(Error::Lost {
            generation: self.generation.clone(),
        })
    }

    /// Takes the answer to [`Self::ask_generation`] from the end of a batch's answers, and checks
    /// it.
    pub(super) fn pop_generation(&self, answers: &mut Vec<Value>) -> Result<()> {
        let answer = answers.pop();
        let generation: Option<String> =
            answer.and_then(|value| redis::from_redis_value(value).ok());
        self.check_generation(generation.as_deref())
    }

    pub(super) async fn extents(&self, topic: Topic) -> Result<Vec<Extent>> {
        self.extents_of(topic.into(), &self.keys(topic)).await
    }

    /// The extents of the streams with these keys, which are in the slot of the bus.
    pub(super) async fn extents_of(
        &self,
        topic: TopicName,
        keys: &[String],
    ) -> Result<Vec<Extent>> {
        let mut batch = Batch::default();
        for key in keys {
            batch.script(ask_extent(key));
        }
        // Read after the extents, so that offsets of another generation are detected.
        batch.command(self.ask_generation());
        let answered = batch.run_all(&mut self.redis.conn()).await;
        let mut answers: Vec<Value> = answered.map_err(Error::read::<RedisError>(topic.clone()))?;
        self.pop_generation(&mut answers)?;
        let extents = answers.into_iter().map(|answer| extent(&topic, answer));
        extents.collect()
    }
}

pub(super) fn ask_extent(key: &str) -> Call {
    scripts::BUS_EXTENT.call(&[key, &committed_key(key)])
}

pub(super) fn extent(topic: &TopicName, answer: Value) -> Result<Extent> {
    let row: ExtentRow = redis::from_redis_value(answer).map_err(Error::read(topic.clone()))?;
    Extent::new(&row).map_err(|e| Error::read(topic.clone())(Failure::Id(e)))
}

/// The response of `bus_extent.lua`.
type ExtentRow = (String, Option<String>, String, Option<String>, u64);

/// The first and the last offset of a partition, and the committed one.
pub(super) struct Extent {
    /// The last record ever appended.
    pub(super) last: Option<Offset>,
    /// The first record that still exists.
    pub(super) first: Option<Offset>,
    /// True if a shared reader has ever acknowledged a record.
    acknowledged: bool,
    /// The committed offset of ordered reading.
    committed: Option<Offset>,
    /// How many records were ever appended.
    pub(super) appended: u64,
}

impl Extent {
    fn new((last, first, deleted, committed, appended): &ExtentRow) -> Result<Self, ParseIntError> {
        let some = |id: &str| {
            id.parse()
                .map(|offset| (offset != Offset::default()).then_some(offset))
        };
        Ok(Self {
            last: some(last)?,
            first: first.as_deref().map_or(Ok(None), some)?,
            acknowledged: some(deleted)?.is_some(),
            committed: committed.as_deref().map_or(Ok(None), some)?,
            appended: *appended,
        })
    }

    pub(super) fn committed(&self) -> Option<Offset> {
        match (self.committed, self.first) {
            (Some(committed), _) => Some(committed),
            (None, _) if !self.acknowledged => None,
            (None, Some(first)) => Some(before(first)),
            (None, None) => self.last,
        }
    }
}

/// The highest offset below `offset`.
fn before(offset: Offset) -> Offset {
    match offset.minor.checked_sub(1) {
        Some(minor) => Offset { minor, ..offset },
        None => Offset {
            major: offset.major.saturating_sub(1),
            minor: u64::MAX,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_before() {
        assert_eq!(
            before(Offset { major: 5, minor: 1 }),
            Offset { major: 5, minor: 0 }
        );
        assert_eq!(
            before(Offset { major: 5, minor: 0 }),
            Offset {
                major: 4,
                minor: u64::MAX
            }
        );
    }
}
