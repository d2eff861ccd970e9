//! Logs: topics that are only appended to, and that anybody reads from an offset of their own.
//!
//! No groups read them: what a log keeps depends only on its bounds. The reports of taskd itself
//! (`expirations`, `dead-letters`, `events`) and the topics of users are logs.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::{Result, TopicName};
use crate::model::{self, Offset, OwnTopic, Topic, TopicSettings};

/// A log, and the bounds that apply to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// Public, prefixed with `Settings::topic_prefix` where other programs use the same server.
    pub name: TopicName,
    /// The number of partitions to make it with. One that exists keeps its own.
    pub partitions: u32,
    pub keep: Retention,
    /// True for the reports of taskd, whose names on the server are older than other logs.
    pub is_report: bool,
    /// Somebody else has made it, and nothing is made, trimmed or deleted.
    pub is_attached: bool,
}

/// What a log keeps. The oldest records leave first. The numbers of records and bytes are shared by
/// the partitions; the last record of a partition stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// [`Duration::MAX`]: no bound.
    pub age: Duration,
    pub records: u64,
    pub bytes: u64,
}

impl Retention {
    /// What each of so many partitions keeps.
    pub fn of_each(self, partitions: u32) -> Self {
        let share = u64::from(partitions.max(1));
        Self {
            age: self.age,
            records: (self.records / share).max(1),
            bytes: (self.bytes / share).max(1),
        }
    }
}

impl Log {
    pub const EXPIRATIONS: Self = Self::report("expirations", 100_000);
    pub const DEAD_LETTERS: Self = Self::report("dead-letters", 100_000);
    /// Its records are small and many.
    pub const EVENTS: Self = Self::report("events", 500_000);
    pub const REPORTS: [Self; 3] = [Self::EXPIRATIONS, Self::DEAD_LETTERS, Self::EVENTS];

    /// The bounds are those in Redis. On Kafka the settings decide.
    const fn report(name: &'static str, records: u64) -> Self {
        let keep = Retention {
            age: Duration::MAX,
            records,
            bytes: 64 << 20,
        };
        Self {
            name: TopicName::Borrowed(name),
            partitions: 1,
            keep,
            is_report: true,
            is_attached: false,
        }
    }
}

/// The log of a topic.
impl From<&Topic> for Log {
    fn from(topic: &Topic) -> Self {
        match OwnTopic::of(topic.name.as_str()) {
            Some(OwnTopic::DeadLetters) => return Self::DEAD_LETTERS,
            Some(OwnTopic::Events) => return Self::EVENTS,
            None => {}
        }
        let settings = &topic.settings;
        Self {
            name: topic.name.to_string().into(),
            partitions: settings.partitions,
            keep: Retention {
                age: settings.retention_age,
                records: settings.retention_records,
                bytes: settings.retention_bytes,
            },
            is_report: false,
            is_attached: settings.is_attached,
        }
    }
}

/// A record to append.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogRecord {
    pub partition: u32,
    pub value: Bytes,
    /// Empty: none.
    pub key: Bytes,
    /// In the order given; a name may have several values.
    pub attributes: Vec<(String, String)>,
    /// Empty: none.
    pub id: String,
}

impl LogRecord {
    pub fn bytes(&self) -> usize {
        let attributes = self
            .attributes
            .iter()
            .map(|(name, value)| name.len() + value.len());
        self.value.len() + self.key.len() + self.id.len() + attributes.sum::<usize>()
    }
}

/// A record that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogMessage {
    pub offset: Offset,
    /// By the clock of the server.
    pub published_unix_ms: i64,
    /// How many records were appended to the partition before this one, also those that have left.
    pub number: u64,
    pub record: LogRecord,
}

/// The end of a partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogEnd {
    /// The last record; `None`: there never was one. If all have left, it may be either.
    pub last: Option<Offset>,
    /// How many records were appended, also those that have left.
    pub count: u64,
}

/// The logs on the server of a bus. `tests/support/logs_contract.rs` runs on both backends.
#[async_trait]
pub trait Logs: Send + Sync {
    /// Whether other programs see the log now, made by whomever.
    async fn exists(&self, log: &Log) -> Result<bool>;

    /// Makes the log unless it exists, and adds partitions that it lacks. Returns the number of its
    /// partitions.
    async fn make(&self, log: &Log) -> Result<u32>;

    /// Applies the bounds of the log to one that exists.
    async fn change(&self, _log: &Log) -> Result<()> {
        Ok(())
    }

    /// Deletes the log with its records, if it exists.
    async fn delete(&self, log: &Log) -> Result<()>;

    /// Appends all records, in order within a partition, and makes the log if it does not exist.
    /// Returns one offset per record, in the given order. Records above the bounds of the log leave
    /// in the same step, or are left to the server.
    ///
    /// After an `Err`, any of the records may or may not have been written.
    async fn append(&self, log: &Log, records: &[LogRecord]) -> Result<Vec<Offset>>;

    /// Returns the records of a partition after an offset (`None`: from the first one), at most
    /// `max`, and roughly at most [`PAGE_BYTES`]. Empty if there are none; does
    /// not wait for new ones.
    async fn read(
        &self,
        log: &Log,
        partition: u32,
        after: Option<Offset>,
        max: usize,
    ) -> Result<Vec<LogMessage>>;

    /// Returns the offset of the first record of each partition; `None`: the partition is empty.
    async fn first(&self, log: &Log) -> Result<Vec<Option<Offset>>>;

    /// Returns the offset of the last record of each partition; `None`: it never had any. A
    /// partition whose records have left may be either.
    async fn ends(&self, log: &Log) -> Result<Vec<Option<Offset>>>;

    /// As [`Self::ends`], of one partition. It must exist.
    async fn end(&self, log: &Log, partition: u32) -> Result<Option<Offset>> {
        Ok(self.counted_end(log, partition).await?.last)
    }

    /// As [`Self::counted_ends`], of one partition. It must exist.
    async fn counted_end(&self, log: &Log, partition: u32) -> Result<LogEnd> {
        let ends = self.counted_ends(log).await?;
        Ok(ends.get(partition as usize).copied().unwrap_or_default())
    }

    /// Returns the end of each partition.
    async fn counted_ends(&self, log: &Log) -> Result<Vec<LogEnd>>;

    /// Returns an offset for each partition that lies before all records published at this time or
    /// later, and not before any earlier one, but never after the last record; `None`: before all
    /// records.
    async fn at_time(&self, log: &Log, unix_ms: i64) -> Result<Vec<Option<Offset>>>;

    /// Roughly how many bytes of memory the log has at the server; 0 if nobody needs to know.
    async fn size(&self, _log: &Log) -> Result<u64> {
        Ok(0)
    }

    /// Deletes most records of a partition up to this one. Returns how many.
    async fn trim_to(&self, _log: &Log, _partition: u32, _up_to: Offset) -> Result<u64> {
        Ok(0)
    }

    /// Deletes the records that `keep` does not cover. Returns roughly how many.
    ///
    /// On a server that other programs use, too, nothing of `events` is deleted, because the topic
    /// may be somebody else's: its retention is set when taskd makes it.
    async fn trim(&self, log: &Log, keep: Retention) -> Result<u64>;
}

/// The topics of taskd itself among those that subscriptions name. SQL does not have them.
pub async fn own_topics(
    logs: &dyn Logs,
    names: impl IntoIterator<Item = &str> + Send,
) -> Result<Vec<Topic>> {
    let mut named: Vec<OwnTopic> = Vec::new();
    for own in names.into_iter().filter_map(OwnTopic::of) {
        if !named.contains(&own) {
            named.push(own);
        }
    }
    let mut topics = Vec::new();
    for own in named {
        let Ok(name) = model::TopicName::new(own.as_str()) else {
            continue;
        };
        let mut topic = Topic {
            name,
            settings: TopicSettings::default(),
            created_unix_ms: 0,
            is_deleting: false,
        };
        topic.settings.partitions = logs.make(&Log::from(&topic)).await?;
        topics.push(topic);
    }
    Ok(topics)
}

/// Roughly the most bytes of a page that [`Logs::read`] returns. One record may be larger.
pub const PAGE_BYTES: usize = 2 << 20;
