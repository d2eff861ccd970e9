//! Arguments and results of the store.

use bytes::Bytes;

use crate::model::{
    Encoding, Failure, KeyHash, LeaseNumber, Offset, Priority, QueueName, ShardId, StoredStatus,
    TaskId, TaskRow,
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
    /// An earlier insert with the same idempotency key stored this task.
    Repeated {
        id: TaskId,
    },
    /// The idempotency key belongs to a different task.
    KeyReused,
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

/// The result of a call that may store new tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored<T> {
    /// One answer per row or report, in order.
    pub answers: Vec<T>,
    /// The batch of those new tasks that were `Fresh`.
    pub batch: Turn,
}

impl<T> Stored<T> {
    /// The turn of a row that was stored as new.
    pub fn turn_of(&self, row: &NewRow) -> Turn {
        if row.unpublished == Unpublished::Fresh {
            self.batch
        } else {
            Turn::FIRST
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
    /// One answer per discovered row, in order. Empty if `repeated` or `unknown`.
    pub discovered: Vec<Inserted>,
    /// The task, unless it is unknown.
    pub task: Option<SettledTask>,
}

/// A task that a report was about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettledTask {
    pub queue: QueueName,
    pub priority: Priority,
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
}

/// The number of tasks of a queue that have this status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueCount {
    pub queue: QueueName,
    pub status: StoredStatus,
    pub count: u64,
}
