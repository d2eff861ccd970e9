//! Changes of live work, in SQL.

use async_trait::async_trait;

use super::{Result, Turn};
use crate::model::{
    Change, ChangeKind, ChangingTask, KeyHash, OwnedTask, Priority, QueueName, StoredStatus,
    TaskAct, TaskId,
};

/// The answer to a wish to change a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    Unknown,
    /// The task is final: nothing was stored.
    Final(StoredStatus),
    /// The task was completed, and has more replicas now.
    Reopened,
    /// SQL keeps the wish until [`Changes::end_changes`].
    Kept(KeptChange),
}

/// A wish that SQL keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptChange {
    pub task: ChangingTask,
    pub kind: ChangeKind,
    /// A later wish about the task has another one.
    pub turn: Turn,
    pub at_unix_ms: i64,
    /// The wish has replaced an earlier one, which a process may be carrying out.
    pub is_second: bool,
}

/// Which wishes to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptPages {
    pub kind: ChangeKind,
    /// Only the wishes that were stored until then.
    pub upto_unix_ms: i64,
    pub after: Option<(i64, TaskId)>,
    pub limit: u32,
}

/// A part of the wishes that SQL keeps, the earliest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptChanges {
    pub changes: Vec<KeptChange>,
    /// Where the next page begins.
    pub next: Option<(i64, TaskId)>,
}

/// The end of a wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedChange {
    pub id: TaskId,
    /// `None`: the queue has cancelled the task, and perhaps nobody remembers the wish.
    pub turn: Option<Turn>,
    pub end: Decided,
}

/// A decision of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decided {
    /// The task is cancelled in this epoch of it, by a record of this generation of its shard.
    Cancelled { epoch: u32, generation: u64 },
    /// The queue has these values. If SQL has others since, it keeps a wish that the queue gets
    /// them. A task whose credits reach NUM becomes Completed.
    Updated { replicas: u32, priority: Priority },
    /// The queue had completed the task in this epoch of it, with so many credits, before it had a
    /// higher NUM. The task is reopened, if SQL has as many credits; otherwise the wish stays.
    CompletedBefore { epoch: u32, credited: u32 },
    /// The queue ends the reservation of the task at this time: the wish is for then.
    ReservedUntil(i64),
    /// Nothing is left to do.
    Over,
}

/// The state of a task behind [`Changes::end_changes`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeEnd {
    /// `None`: there is no such task.
    pub status: Option<StoredStatus>,
    /// The key that must leave the filter, because its task is dead or cancelled.
    pub key: Option<(QueueName, KeyHash)>,
}

/// The store of changes. Every method is one transaction, and may be repeated as those of `Store`.
#[async_trait]
pub trait Changes: Send + Sync {
    /// The queues of the stored tasks among `ids`, in any order.
    async fn queues_of(&self, ids: &[TaskId]) -> Result<Vec<OwnedTask>>;

    /// Stores new values of tasks. Keeps a wish about each unfinished task, in place of an earlier
    /// one of its kind, and the acts about these. Answers per id, in order.
    ///
    /// Of two ends of a reservation the earlier one stays, because the queue may have either:
    /// [`Decided::ReservedUntil`] moves it.
    async fn want(
        &self,
        ids: &[TaskId],
        change: &Change,
        at_unix_ms: i64,
        acts: &[TaskAct],
    ) -> Result<Vec<Wanted>>;

    /// Wishes of a kind. Removes those about tasks that are final, or that are not there any more.
    async fn kept_changes(&self, pages: &KeptPages) -> Result<KeptChanges>;

    /// Removes wishes in their turns. Answers per change, in order.
    ///
    /// A task becomes Cancelled if it is unfinished in that epoch, and its shard is still in that
    /// generation: the tasks of a shard that was rebuilt since are published again. Otherwise its
    /// wish stays.
    async fn end_changes(&self, ended: &[EndedChange], at_unix_ms: i64) -> Result<Vec<ChangeEnd>>;
}
