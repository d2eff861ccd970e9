//! The bus: partitioned topics, which keep records in order until their readers have read them.
//! Next to them the server of the bus keeps [logs](Logs), which anybody reads from any offset.
//!
//! Delivery is at least once: after an error or a crash a record may appear twice, and readers must
//! tolerate that.

mod error;
pub mod kafka;
mod logs;
pub mod redis_streams;
mod topic;
mod uncommitted;
mod watch;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;

use self::error::NoPartition;
pub use self::{
    error::{Cause, Error, Result},
    logs::{Log, LogEnd, LogMessage, LogRecord, Logs, PAGE_BYTES, Retention, own_topics},
    topic::{Topic, TopicName},
    uncommitted::Uncommitted,
    watch::watch_partitions,
};
use crate::model::Offset;

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

/// What a trim keeps: of each partition the last `records` records, unless they are older than
/// `age`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    pub age: Duration,
    pub records: u64,
}

/// A way to read a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Each partition is read in order, starting after the committed offset, by one reader at a
    /// time.
    Ordered,
    /// Each record goes to any free reader of the group. Uncommitted records of a dead reader are
    /// delivered again, out of order.
    Shared,
}

/// The bus. `redis_streams` and `kafka` are its backends; `tests/support/bus_contract.rs` runs on
/// both.
#[async_trait]
pub trait Bus: Send + Sync {
    /// The generation of the topics. Offsets from another generation are meaningless.
    fn generation(&self) -> &str;

    /// The actual number of partitions of `topic`, whatever is configured.
    fn partitions(&self, topic: Topic) -> u32;

    /// True if programs other than taskd may read the topics. In that case every record must be
    /// published, even if taskd itself could do without it.
    fn has_other_readers(&self) -> bool {
        true
    }

    /// The logs on the same server.
    fn logs(&self) -> Arc<dyn Logs>;

    /// Appends all records, in order within a partition. Returns one offset per record, in the
    /// given order.
    ///
    /// Once this returns `Ok`, the records are as durable as the bus makes them. After an `Err`,
    /// any of them may or may not have been written: publish all of them again.
    async fn publish(&self, topic: Topic, records: &[Record]) -> Result<Vec<Offset>>;

    /// Like [`Self::publish`], with the traceparents of some records by index. Kafka writes them
    /// into headers for its tools; taskd reads the traceparents inside the records instead.
    async fn publish_traced(
        &self,
        topic: Topic,
        records: &[Record],
        _traceparents: &BTreeMap<usize, String>,
    ) -> Result<Vec<Offset>> {
        self.publish(topic, records).await
    }

    /// Opens a reader in the consumer group that all taskd processes share for this topic.
    async fn subscribe(&self, topic: Topic, reading: Reading) -> Result<Box<dyn Reader>>;

    /// Returns the offset of the last record of each partition; `None`: the partition is empty.
    async fn ends(&self, topic: Topic) -> Result<Vec<Option<Offset>>>;

    /// When the record at this offset was published, by the bus's clock, in unix ms. `None` if the
    /// offsets of this bus contain no time.
    fn published_at(&self, _offset: Offset) -> Option<i64> {
        None
    }

    /// Returns the offset that the group has committed in each partition.
    async fn committed(&self, topic: Topic) -> Result<Vec<Option<Offset>>>;

    /// True if a partition that once held this offset now ends before it, because the topic was
    /// recreated or the partition has lost its last records. The bus then assigns old offsets
    /// again.
    ///
    /// Always false on a bus that never assigns an offset twice.
    async fn lies_beyond(&self, _topic: Topic, _partition: u32, _offset: Offset) -> Result<bool> {
        Ok(false)
    }

    /// Roughly how many records of a topic are not processed yet.
    async fn backlog(&self, topic: Topic) -> Result<u64>;

    /// Deletes the committed records that `keep` does not cover. Returns roughly how many. Does
    /// nothing on a bus that deletes records when they are committed.
    async fn trim(&self, topic: Topic, keep: Keep) -> Result<u64>;

    /// Raises the number of partitions of a topic to `count`. The new ones are used only after the
    /// bus is opened again.
    async fn raise_partitions(&self, topic: Topic, count: u32) -> Result<()>;

    /// Checks whether the topics have changed since the bus was opened.
    ///
    /// Returns [`Error::Resized`] if a topic has more or fewer partitions now, and [`Error::Gone`]
    /// if it no longer exists.
    async fn check_partitions(&self) -> Result<()>;

    /// Checks that the bus responds; waits a few seconds at most. `None` if the bus has no server
    /// of its own.
    async fn ping(&self) -> Option<Result<()>> {
        None
    }

    /// Sends buffered records and closes the connections.
    async fn close(&self);
}

/// A reader of one topic. Drop it after an error; a new one starts after the committed offsets.
#[async_trait]
pub trait Reader: Send {
    /// Returns the available records, at most `max`. Waits while there are none.
    ///
    /// Cancel safe: if the future is dropped before it completes, no record is lost.
    async fn next(&mut self, max: usize) -> Result<Vec<Message>>;

    /// `Ordered` only: keeps the reader in its group for up to a second without taking records.
    ///
    /// A reader calls this while it cannot take more records. Otherwise the group would give its
    /// partitions to other readers, or wait for it. Cancel safe.
    async fn stay(&mut self) -> Result<()>;

    /// Commits processed messages. `Ordered`: also all messages before them in their partitions.
    async fn commit(&mut self, messages: &[Message]) -> Result<()>;

    /// `Ordered` only: a number that grows each time this reader is assigned the partition; 0: it
    /// never was.
    ///
    /// If the number has grown, other readers may have read the partition in between.
    fn tenure(&self, partition: u32) -> u64;

    /// `Ordered` only: continues reading `partition` after the offset `after`, or from the
    /// beginning if that is `None`.
    async fn seek(&mut self, partition: u32, after: Option<Offset>) -> Result<()>;
}

/// Whether the group has read a topic up to these earlier [`Bus::ends`].
pub async fn has_read(bus: &dyn Bus, topic: Topic, ends: &[Option<Offset>]) -> Result<bool> {
    // A bus that has fallen back meanwhile never reaches those ends, so its present ones count.
    let now = bus.ends(topic).await?;
    let committed = bus.committed(topic).await?;
    let mut partitions = ends.iter().zip(now).zip(committed);
    Ok(partitions.all(|((then, now), committed)| committed >= now.min(*then)))
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
        Some(found) => Err(Error::Resized {
            topic: topic.into(),
            known,
            found,
        }),
        None => Ok(()),
    }
}

fn check_partitions(
    topic: impl Into<TopicName>,
    mut partitions: impl Iterator<Item = u32>,
    count: u32,
) -> Result<()> {
    match partitions.find(|partition| *partition >= count) {
        Some(partition) => Err(Error::publish(topic)(NoPartition { partition, count })),
        None => Ok(()),
    }
}
