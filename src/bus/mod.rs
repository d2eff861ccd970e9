//! The bus: topics with partitions, which keep records in order until their readers have read them.
//!
//! At least once: after an error or a crash a record may be there twice. Readers must tolerate
//! that.

mod error;
pub mod kafka;
pub mod redis_streams;
mod topic;
mod uncommitted;
mod watch;

use std::{collections::BTreeMap, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;

use self::error::NoPartition;
pub use self::{
    error::{Cause, Error, Result},
    topic::Topic,
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

/// The records that a trim keeps: the last `records` of each partition that are not older than
/// `age`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    pub age: Duration,
    pub records: u64,
}

/// A way to read a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Each partition in order, from behind the committed offset, with one reader at a time per
    /// partition.
    Ordered,
    /// Any reader of the group that is free. Uncommitted records of a dead reader come again, out
    /// of order.
    Shared,
}

/// The bus. `redis_streams` and `kafka` are its backends; `tests/support/bus_contract.rs` runs on
/// both.
#[async_trait]
pub trait Bus: Send + Sync {
    /// The topics' generation: offsets of another one mean nothing.
    fn generation(&self) -> &str;

    /// The actual number of partitions of `topic`, whatever is configured.
    fn partitions(&self, topic: Topic) -> u32;

    /// True if programs other than taskd may read the topics. Then no record may be left out.
    fn has_other_readers(&self) -> bool {
        true
    }

    /// Makes sure that a topic is there which the opening leaves out unless the settings need it:
    /// `events`.
    async fn ensure(&self, _topic: Topic) -> Result<()> {
        Ok(())
    }

    /// Appends all records, in order within a partition. Answers one offset per record, in the
    /// given order.
    ///
    /// After the answer the records are as durable as the bus makes them. On `Err` any of them may
    /// be there or not: publish all again.
    async fn publish(&self, topic: Topic, records: &[Record]) -> Result<Vec<Offset>>;

    /// Publishes as [`Self::publish`] does, with the traceparents of some records, by their places.
    /// Kafka writes them into headers for its tools. taskd reads those in the records.
    async fn publish_traced(
        &self,
        topic: Topic,
        records: &[Record],
        _traceparents: &BTreeMap<usize, String>,
    ) -> Result<Vec<Offset>> {
        self.publish(topic, records).await
    }

    /// Publishes as [`Self::publish`] does; record n has the key n. A bus whose records have no
    /// keys leaves them out.
    async fn publish_keyed(
        &self,
        topic: Topic,
        records: &[Record],
        _keys: &[String],
    ) -> Result<Vec<Offset>> {
        self.publish(topic, records).await
    }

    /// A reader in the group that all taskd processes share for this topic.
    async fn subscribe(&self, topic: Topic, reading: Reading) -> Result<Box<dyn Subscription>>;

    /// A reader that is in no group and commits nothing. It begins in each partition behind this
    /// offset; `None`: with the first record that is there.
    async fn read_apart(&self, topic: Topic, after: Vec<Option<Offset>>) -> Result<Box<dyn Apart>>;

    /// The offset of the first record that is still there by partition; `None`: there is none.
    async fn starts(&self, topic: Topic) -> Result<Vec<Option<Offset>>>;

    /// The offset of the last record by partition; `None`: the partition is empty.
    async fn ends(&self, topic: Topic) -> Result<Vec<Option<Offset>>>;

    /// When the record at this offset was published, by the bus's clock; `None`: its offsets do not
    /// say.
    fn published_at(&self, _offset: Offset) -> Option<i64> {
        None
    }

    /// The offset that the group has committed, by partition.
    async fn committed(&self, topic: Topic) -> Result<Vec<Option<Offset>>>;

    /// True if a partition that once held this offset ends before it now, so that the bus assigns
    /// offsets again.
    ///
    /// The topic was made anew, or the partition has lost its last records. Always false on a bus
    /// that never assigns an offset twice.
    async fn lies_beyond(&self, _topic: Topic, _partition: u32, _offset: Offset) -> Result<bool> {
        Ok(false)
    }

    /// Roughly how many records of a topic that taskd reads are not processed yet.
    async fn backlog(&self, topic: Topic) -> Result<u64>;

    /// Deletes the records that `keep` does not cover. Answers roughly how many.
    ///
    /// If taskd reads the topic, the group's uncommitted records stay. A bus that others use, too,
    /// deletes nothing of `events`, a name that others may have chosen: it bounds the topic when it
    /// makes it.
    async fn trim(&self, topic: Topic, keep: Keep) -> Result<u64>;

    /// Raises the partitions of a topic that taskd reads to `count`. Only a new opening of the bus
    /// reaches the new ones.
    async fn raise_partitions(&self, topic: Topic, count: u32) -> Result<()>;

    /// Looks for changes of topics since this opening.
    ///
    /// [`Error::Resized`]: a topic has more partitions now, or fewer. [`Error::Gone`]: a topic does not exist any more.
    async fn check_partitions(&self) -> Result<()>;

    /// Asks the bus whether it answers, and waits some seconds at most. `None`: it is no server of
    /// its own.
    async fn ping(&self) -> Option<Result<()>> {
        None
    }

    /// Sends buffered records and closes the connections.
    async fn close(&self);
}

/// A reader of one topic for people: it is in no group.
#[async_trait]
pub trait Apart: Send {
    /// The available records, at most some `max`, those of a partition in order. Waits up to about
    /// a second if there are none, and then answers none.
    async fn next(&mut self, max: usize) -> Result<Vec<Message>>;
}

/// A reader of one topic. Drop it after an error: the next one begins behind the committed offsets.
#[async_trait]
pub trait Subscription: Send {
    /// The available records, at most `max`. Waits while there are none.
    ///
    /// Cancel safe: if the future is dropped before it answers, no record is lost.
    async fn next(&mut self, max: usize) -> Result<Vec<Message>>;

    /// `Ordered` only: keeps the reader's place in the group for up to a second, and takes no
    /// records.
    ///
    /// For a reader that has no room: the group would give its partitions to others, or wait for
    /// it. Cancel safe.
    async fn stay(&mut self) -> Result<()>;

    /// Commits processed messages. `Ordered`: also all messages before them in their partitions.
    async fn commit(&mut self, messages: &[Message]) -> Result<()>;

    /// `Ordered` only: a number that grows each time that this reader gets the partition; 0: never
    /// yet.
    ///
    /// In between other readers may have read it.
    fn tenure(&self, partition: u32) -> u64;

    /// `Ordered` only: continues `partition` behind `after` (`None`: at its beginning).
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
            topic,
            known,
            found,
        }),
        None => Ok(()),
    }
}

fn check_partitions(topic: Topic, records: &[Record], count: u32) -> Result<()> {
    match records.iter().find(|record| record.partition >= count) {
        Some(Record { partition, .. }) => Err(Error::publish(topic)(NoPartition {
            partition: *partition,
            count,
        })),
        None => Ok(()),
    }
}
