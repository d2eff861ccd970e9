//! Arguments and results of the store.

use std::collections::HashSet;

use bytes::Bytes;

use crate::model::{
    Encoding, Failure, Join, Joining, KeyHash, LeaseNumber, Offset, Priority, QueueName, ShardId,
    StoredStatus, TaskId, TaskRow,
};

/// The answer to one row of an insert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    New,
    /// This task already has the queue and key.
    Duplicate {
        id: TaskId,
        status: StoredStatus,
    },
    /// An earlier insert stored this task: one with the same idempotency key, or one of the same
    /// task without a key.
    Repeated {
        id: TaskId,
    },
    /// The idempotency key belongs to a different task.
    KeyReused,
    /// The tree that the task joins has ended, or is being cancelled. Nothing was stored.
    TreeClosed,
}

/// Why a task is not on the bus. SQL stores the discriminants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Unpublished {
    /// The inserter is about to publish the task. If it does not, the watchdog does after
    /// `republish_after`. A fresh task is in its batch; one that was put off has its own row.
    Fresh = 0,
    /// The queue is full, and the row waits until it has room.
    Parked = 1,
    /// The task is due later than the horizon.
    Scheduled = 2,
    /// The task was published, but Redis lost it.
    Missing = 3,
    /// Enough tasks of its limit key are in Redis, and the row waits until few are left there.
    Crowded = 4,
    /// The task waits until those before it in its sequence have ended.
    Behind = 5,
}

/// A task to insert, and when it is to be published.
#[derive(Clone, Debug, PartialEq)]
pub struct NewRow {
    pub task: TaskRow,
    pub unpublished: Unpublished,
    /// When the watchdog may publish it (not used for `Parked` and `Crowded`). A batch is due when the last of
    /// its tasks is.
    pub due_unix_ms: i64,
}

/// How far the time of a task's id may be from the time of its insert, in a batch.
const BATCHED_WITHIN_MS: i64 = 60_000;

impl NewRow {
    /// Whether it is published with the batch of its insert.
    ///
    /// The tasks of a batch are found by the range of their ids. The id of a record's task has the
    /// time of the record, which may be long ago; in a batch, such a task would make the range cover
    /// all tasks that were inserted since.
    pub fn is_batched(&self) -> bool {
        let age_ms = self.task.created_unix_ms - self.task.id.created_unix_ms();
        let is_old = age_ms > BATCHED_WITHIN_MS;
        // Only a record of Kafka may have a time in the future.
        let is_ahead = age_ms < -BATCHED_WITHIN_MS && !self.task.has_key();
        self.unpublished == Unpublished::Fresh && !is_old && !is_ahead
    }
}

/// Identifies a task's stay off the bus: the number of its batch, or of its row in the outbox.
///
/// A fanout may park a task before its publisher has marked it as published. The late mark must not
/// remove the parked row, because the bus has no record of it. So each `Outbox::unpublish` chooses
/// a new turn, which is not negative. The turn of a batch is negative, and is the batch's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Turn(pub i64);

impl Turn {
    /// The turn of a task that was inserted with its own row in the outbox.
    pub const FIRST: Self = Self(0);

    pub fn is_batch(self) -> bool {
        self.0 < 0
    }
}

/// A row of the outbox, or a task of an unpublished batch.
#[derive(Clone, Debug, PartialEq)]
pub struct OutboxRow {
    pub task: TaskRow,
    /// No worker has completed the task, and nobody has sent it again, so for the queue it is like
    /// a new one.
    pub is_as_new: bool,
    pub unpublished: Unpublished,
    pub turn: Turn,
}

/// The result of a call that may store new tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored<T> {
    /// One answer per row or report, in order.
    pub answers: Vec<T>,
    /// The batch of those new tasks that were `Fresh`.
    pub batch: Turn,
    /// The new tasks that the caller must not publish: they wait behind others of their sequences.
    /// If an earlier attempt stored them, they may also have ended since.
    pub behind: HashSet<TaskId>,
    /// The tasks whose turn in their sequences has come, because the call ended those before them,
    /// and the tasks of the ends of trees. Leaves out those that are not as new, and those beyond
    /// [`PAGE_BYTES`](super::PAGE_BYTES): the outbox has them all.
    pub released: Vec<OutboxRow>,
}

impl<T> Stored<T> {
    /// The turn of a row that was stored as new, or `None` if it must not be published.
    pub fn turn_of(&self, row: &NewRow) -> Option<Turn> {
        if self.behind.contains(&row.task.id) {
            None
        } else if row.is_batched() {
            Some(self.batch)
        } else {
            Some(Turn::FIRST)
        }
    }
}

/// One report from `task-results`.
#[derive(Clone, Debug)]
pub enum Settlement {
    Completed {
        id: TaskId,
        worker: String,
        lease: LeaseNumber,
        result: Bytes,
        encoding: Encoding,
        attempt: u32,
        /// When the lease was granted, or 0 if unknown.
        leased_unix_ms: i64,
        at_unix_ms: i64,
        discovered: Vec<NewRow>,
        /// What it says of the joins of a topology.
        joining: Option<Box<Joining<Join>>>,
    },
    Died {
        id: TaskId,
        reason: String,
        attempts: u32,
        /// The most recent failures, oldest first.
        history: Vec<Failure>,
        /// The epoch of the task when it died, or `None` for the present one.
        epoch: Option<u32>,
        at_unix_ms: i64,
    },
}

/// The outcome of a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settled {
    /// The report had already been settled. The call changed nothing and ignored its discovered
    /// tasks.
    pub repeated: bool,
    /// SQL does not have the task (any more), or the task was sent again after it died. The call
    /// changed nothing.
    pub unknown: bool,
    /// The task was already final, so the result is surplus. The discovered tasks were stored.
    pub surplus: bool,
    /// The present status of the task.
    pub status: Option<StoredStatus>,
    /// The key to remove from the filter, because the task is dead or cancelled.
    pub key: Option<(QueueName, KeyHash)>,
    /// One answer per discovered row, in order. Empty if `repeated` or `unknown`, or if the task's
    /// tree is being cancelled, which drops what is discovered.
    pub discovered: Vec<Inserted>,
    /// The task, unless it is unknown.
    pub task: Option<SettledTask>,
    /// The deadline of the tree that the discovered tasks are in: they have none that is later. 0 if
    /// there is none.
    pub tree_deadline_unix_ms: i64,
}

/// A task that a report was about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettledTask {
    pub queue: QueueName,
    pub priority: Priority,
    /// It is a step of an execution.
    pub is_step: bool,
}

/// The state of a task, for the fanout and the settler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskState {
    pub id: TaskId,
    pub status: StoredStatus,
    /// The workers with a credit.
    pub workers: Vec<String>,
    /// How often the task was sent again.
    pub epoch: u32,
    /// It waits behind others of its sequence, so it is not to be in the queue.
    pub is_behind: bool,
    /// Operators may have changed `replicas` and `priority` since the task was published.
    pub replicas: u32,
    pub priority: Priority,
}

/// A dead or cancelled task that was sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retried {
    pub id: TaskId,
    /// Unfinished, or Completed if late completions were enough.
    pub status: StoredStatus,
}

/// A stored task, and one worker's completion of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateFor {
    pub id: TaskId,
    pub shard: ShardId,
    pub status: StoredStatus,
    /// The lease under which the worker completed the task, or `None` if it has not.
    pub completed_under: Option<LeaseNumber>,
}

/// An unfinished task that has been published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedTask {
    pub id: TaskId,
    pub shard: ShardId,
    /// The task is at or before this offset of its partition. `None` if it was published in another
    /// generation of the topic.
    pub offset: Option<Offset>,
}

/// Where an unfinished task is, according to SQL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Not on the bus. The watchdog publishes the task when it is due, or, if `due_unix_ms` is
    /// `None`, when its queue has room. `came_back` means that it was published before, or sent
    /// again.
    Off {
        why: Unpublished,
        due_unix_ms: Option<i64>,
        came_back: bool,
    },
    /// On the bus, at or before this offset of its partition. `None` if it was published in another
    /// generation of the topic.
    On(Option<Offset>),
}

/// A task with its details, as readers see it.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskDetail {
    pub task: TaskRow,
    pub status: StoredStatus,
    pub completed: u32,
    /// Failures that reports have mentioned so far.
    pub attempts: u32,
    pub reason: String,
    /// How often it was sent again.
    pub epoch: u32,
    pub updated_unix_ms: i64,
    /// The task is in the outbox, or in an unpublished batch.
    pub unpublished: bool,
    pub tree: Option<TaskId>,
}

/// The number of tasks of a queue that have this status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueCount {
    pub queue: QueueName,
    pub status: StoredStatus,
    pub count: u64,
}
