//! The bus: topics with partitions, in which records stand in order until everybody concerned has read them.
//!
//! At least once: after an error or a crash a record may stand twice. Who reads must not mind.

pub mod kafka;
pub mod redis_streams;
mod watch;

use std::{collections::BTreeMap, fmt, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;

pub use self::watch::watch_partitions;
use crate::{model::Offset, runtime::LoopError};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to publish to {topic}: {reason}")]
    Publish { topic: Topic, reason: String },
    /// A record is larger than the bus takes: without it the others go.
    #[error("failed to publish to {topic}: {reason}")]
    TooLarge { topic: Topic, reason: String },
    #[error("failed to read {topic}: {reason}")]
    Read { topic: Topic, reason: String },
    #[error("failed to acknowledge in {topic}: {reason}")]
    Commit { topic: Topic, reason: String },
    #[error("failed to trim {topic}: {reason}")]
    Trim { topic: Topic, reason: String },
    #[error("cannot set up the bus: {0}")]
    Setup(String),
    /// Trying again does not help: the user has to change something.
    #[error("{0}")]
    Misconfigured(String),
    /// Trying again does not help: offsets mean nothing any more, the bus has to be opened anew.
    #[error("the bus has lost its records: generation {generation} is gone")]
    Lost { generation: String },
    /// Somebody has deleted a topic: opening the bus anew creates it again.
    #[error("topic {topic} is gone")]
    Gone { topic: Topic },
    /// Somebody has given a topic more partitions: the bus has to be opened anew to reach them.
    #[error("topic {topic} has {found} partitions now, no longer {known}")]
    Grown { topic: Topic, known: u32, found: u32 },
}

impl Error {
    /// Only opening the bus anew helps.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::Gone { .. } | Self::Grown { .. })
    }
}

impl LoopError for Error {
    fn ends_round(&self) -> bool {
        self.is_lost()
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The topics. Names are public; `Settings::topic_prefix` stands before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Topic {
    Pipeline,
    TaskResults,
    Expirations,
    DeadLetters,
}

impl Topic {
    pub const ALL: [Self; 4] = [Self::Pipeline, Self::TaskResults, Self::Expirations, Self::DeadLetters];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pipeline => "pipeline",
            Self::TaskResults => "task-results",
            Self::Expirations => "expirations",
            Self::DeadLetters => "dead-letters",
        }
    }

    /// Whether taskd reads it. The others are reports for people.
    pub fn is_read(self) -> bool {
        matches!(self, Self::Pipeline | Self::TaskResults)
    }

    /// The reports for people have one partition, the others as many as configured.
    pub fn partitions(self, configured: u32) -> u32 {
        if self.is_read() { configured } else { 1 }
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A record to publish.
#[derive(Clone, Debug)]
pub struct Record {
    pub partition: u32,
    pub value: Bytes,
}

/// A record that was read.
#[derive(Clone, Debug)]
pub struct Message {
    pub partition: u32,
    pub offset: Offset,
    pub value: Bytes,
}

/// What stays of a topic when it is trimmed: of each partition its last `records`, as far as they are not older than `age`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    pub age: Duration,
    pub records: u64,
}

/// How a topic is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Each partition in order, from behind what was committed; one reader at a time per partition.
    Ordered,
    /// By whoever of the group is free. What a dead reader had not committed comes again, so order is not kept.
    Shared,
}

/// The bus. `redis_streams.rs` and `kafka.rs` are its backends; `tests/support/bus_contract.rs` runs on both.
#[async_trait]
pub trait Bus: Send + Sync {
    /// Names this life of the topics: offsets of another generation mean nothing.
    fn generation(&self) -> &str;

    /// Partitions of `topic`, as they are (not as configured).
    fn partitions(&self, topic: Topic) -> u32;

    /// Appends all, in order within a partition; one offset per record, in the order given. When it answers, the records are as
    /// durable as the bus makes them. On `Err` any of them may stand there or not: publish all again.
    async fn publish(&self, topic: Topic, records: &[Record]) -> Result<Vec<Offset>>;

    /// A reader in the group that all taskd processes share for this topic.
    async fn subscribe(&self, topic: Topic, reading: Reading) -> Result<Box<dyn Subscription>>;

    /// Where each partition ends: (offset of the last record, or `None` when it is empty), by partition.
    async fn ends(&self, topic: Topic) -> Result<Vec<Option<Offset>>>;

    /// Up to where the group has committed, by partition.
    async fn committed(&self, topic: Topic) -> Result<Vec<Option<Offset>>>;

    /// Whether a partition that once held this offset ends before it now. Somebody has made the topic anew, or the
    /// partition has lost its last records, so the bus gives offsets a second time. Always false on a bus that never
    /// does.
    async fn lies_beyond(&self, _topic: Topic, _partition: u32, _offset: Offset) -> Result<bool> {
        Ok(false)
    }

    /// How many records of a topic that taskd reads are not dealt with yet, about.
    async fn backlog(&self, topic: Topic) -> Result<u64>;

    /// Deletes what `keep` does not ask for; of a topic that taskd reads, nothing that the group has not committed. How many went, about.
    async fn trim(&self, topic: Topic, keep: Keep) -> Result<u64>;

    /// Gives a topic that taskd reads `count` partitions, more than it has. This opening does not reach them: open anew.
    async fn raise_partitions(&self, topic: Topic, count: u32) -> Result<()>;

    /// Asks anew which topics and partitions there are; [`Error::Grown`] when a topic has more partitions than this
    /// opening knows, [`Error::Gone`] when one is not there any more.
    async fn check_partitions(&self) -> Result<()>;

    /// Sends what is buffered, and closes.
    async fn close(&self);
}

/// A reader of one topic. After an error it is dropped: the next one begins behind what was committed.
#[async_trait]
pub trait Subscription: Send {
    /// Up to `max` records: those that are there; waits while there is none. Cancel safe: dropped before it answers, no record is lost.
    async fn next(&mut self, max: usize) -> Result<Vec<Message>>;

    /// Everything of these was dealt with. `Ordered`: also all before them in their partitions.
    async fn commit(&mut self, messages: &[Message]) -> Result<()>;

    /// `Ordered` only: grows each time that the partition is given to this reader; until then others may have read it. 0: not given yet.
    fn tenure(&self, partition: u32) -> u64;

    /// `Ordered` only: the next records of `partition` are those behind `after` (`None`: from its beginning).
    async fn seek(&mut self, partition: u32, after: Option<Offset>) -> Result<()>;
}

/// The highest offset of each partition.
fn highest(messages: &[Message]) -> BTreeMap<u32, Offset> {
    let mut highest = BTreeMap::new();
    for message in messages {
        let offset = highest.entry(message.partition).or_insert(message.offset);
        *offset = message.offset.max(*offset);
    }
    highest
}

fn check_grown(topic: Topic, known: u32, found: Option<u32>) -> Result<()> {
    match found.filter(|found| *found > known) {
        Some(found) => Err(Error::Grown { topic, known, found }),
        None => Ok(()),
    }
}

fn check_partitions(topic: Topic, records: &[Record], partitions: u32) -> Result<()> {
    match records.iter().find(|record| record.partition >= partitions) {
        Some(Record { partition, .. }) => {
            Err(Error::Publish { topic, reason: format!("no partition {partition}: there are {partitions}") })
        }
        None => Ok(()),
    }
}
