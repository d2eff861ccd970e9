//! The part of the store that the books need: what was turned away, and what waits off the bus.

use std::collections::BTreeMap;

use async_trait::async_trait;

use super::{Result, Unpublished};
use crate::model::QueueName;

/// The reason why a task that came in was not stored. SQL stores the discriminants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum TurnedAway {
    /// The queue has, or had, a task with this key.
    Duplicate = 1,
    /// The task is not valid, or will never have room.
    Rejected = 2,
}

impl TurnedAway {
    pub const ALL: [Self; 2] = [Self::Duplicate, Self::Rejected];
}

/// How many tasks were turned away, by queue and reason. `None`: their queue is not known here.
pub type TurnedAwayCounts = BTreeMap<(Option<QueueName>, TurnedAway), u64>;

/// How many unfinished tasks wait off the bus, by queue and reason.
pub type OffBusCounts = BTreeMap<(QueueName, Unpublished), u64>;

/// The rows of the outbox that one statement counts, at most.
pub(super) const COUNTED_AT_ONCE: u64 = 100_000;
/// The tasks of unpublished batches that [`BookStore::off_bus`] looks at. A batch is about to be
/// published, so an exact number would be old at once.
pub(super) const FRESH_COUNTED: usize = 100_000;

#[async_trait]
pub trait BookStore: Send + Sync {
    /// Adds to the counts of what was turned away. A repeat adds again.
    async fn add_turned_away(&self, counts: &TurnedAwayCounts) -> Result<()>;

    /// The counts of `queues`, and of tasks without a known queue.
    async fn turned_away(&self, queues: &[QueueName]) -> Result<TurnedAwayCounts>;

    /// The unfinished tasks in the outbox and in batches that are not published.
    ///
    /// Reads the whole outbox, in pieces of [`COUNTED_AT_ONCE`] rows, so it is slow where millions
    /// wait. A row that moves meanwhile may count twice or not at all.
    async fn off_bus(&self) -> Result<OffBusCounts>;
}
