//! The outbox: tasks to publish, and the offsets of those that were published.

use std::collections::HashSet;

use async_trait::async_trait;

use super::{Result, Turn, Unpublished};
use crate::model::{Offset, QueueName, TaskId, TaskRow};

/// The bytes of tasks at which a page of the outbox ends: a thousand rows may weigh a gigabyte.
pub const PAGE_BYTES: usize = 16 << 20;

/// How many due rows [`Outbox::oldest_waiting`] looks at.
pub const DUE_LOOKED_AT: u64 = 1000;

/// A row of the outbox, or a task of a batch that is not published.
#[derive(Clone, Debug, PartialEq)]
pub struct OutboxRow {
    pub task: TaskRow,
    /// No worker has completed it, and nobody has sent it again: for the queue it is as new.
    pub is_as_new: bool,
    pub unpublished: Unpublished,
    pub turn: Turn,
}

/// Tasks that are on the bus now, at or before `offset` of their partition.
#[derive(Clone, Debug)]
pub struct Published {
    pub partition: u32,
    pub offset: Offset,
    pub tasks: Vec<(TaskId, Turn)>,
}

/// The outcome of [`Outbox::bring_forward`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BroughtForward {
    pub rows: u64,
    /// Where the next page begins.
    pub next: Option<(i64, TaskId)>,
}

/// The part of the store that says what is to be published, and what was.
#[async_trait]
pub trait Outbox: Send + Sync {
    /// Keeps the offsets of `published`. Removes their outbox rows, unless they have another turn
    /// by now. `generation` is the topic's.
    ///
    /// A batch that is published as a whole, in one call, costs one row. Of any other, each task
    /// gets an offset of its own.
    async fn mark_published(&self, generation: &str, published: &[Published]) -> Result<()>;

    /// Puts tasks into the outbox again, unless they are final. A task that is in it already gets a
    /// new turn.
    async fn unpublish(&self, ids: &[TaskId], why: Unpublished) -> Result<()>;

    /// Puts tasks into the outbox as fresh ones that are due later, unless they are final.
    async fn put_off(&self, ids: &[TaskId], until_unix_ms: i64) -> Result<()>;

    /// Due tasks of the outbox and of batches, without parked ones and those of `without`, the
    /// earliest first.
    ///
    /// A page ends at `limit` rows or at [`PAGE_BYTES`]. Removes the rows on its way whose task is
    /// final, and the batches in which no task waits.
    async fn due(
        &self,
        now_unix_ms: i64,
        limit: usize,
        without: &HashSet<TaskId>,
    ) -> Result<Vec<OutboxRow>>;

    /// Makes fresh tasks due at `to_unix_ms`, because the clock stepped back after they were
    /// stored.
    ///
    /// Looks at a page of at most `limit` outbox rows that are due later than `later_than_unix_ms`,
    /// without parked ones. The page begins behind `after`; the first one takes all batches with
    /// it.
    async fn bring_forward(
        &self,
        later_than_unix_ms: i64,
        to_unix_ms: i64,
        after: Option<(i64, TaskId)>,
        limit: usize,
    ) -> Result<BroughtForward>;

    /// The insert time of the oldest task per queue that waits in SQL: parked, or due and not
    /// published.
    ///
    /// Looks at the first [`DUE_LOOKED_AT`] due rows, and at as many due tasks of batches.
    async fn oldest_waiting(&self, now_unix_ms: i64) -> Result<Vec<(QueueName, i64)>>;

    /// The queues with parked rows.
    async fn parked_queues(&self) -> Result<Vec<QueueName>>;

    /// Parked rows of a queue by priority, then by age; otherwise as [`Self::due`].
    async fn parked(
        &self,
        queue: &QueueName,
        limit: usize,
        without: &HashSet<TaskId>,
    ) -> Result<Vec<OutboxRow>>;

    /// Removes the published batches that no task needs, among `limit` batches behind `after`.
    /// Answers where the next page begins.
    ///
    /// A task needs its batch until it is final or in the outbox.
    async fn remove_batches(&self, after: Option<Turn>, limit: u32) -> Result<Option<Turn>>;
}
