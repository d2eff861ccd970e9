//! Arguments and answers of the store.

use bytes::Bytes;

use crate::model::{
    Encoding, Failure, KeyHash, LeaseNumber, Offset, Priority, QueueName, ShardId, StoredStatus,
    TaskId, TaskRow,
};

/// The answer to one row of an insert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    New,
    /// This task has the queue and key already.
    Duplicate {
        id: TaskId,
        status: StoredStatus,
    },
    /// An earlier insert with this idempotency key stored this task.
    Repeated {
        id: TaskId,
    },
    /// The idempotency key belongs to another task.
    KeyReused,
}

/// Why a task is not on the bus. SQL stores the discriminants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Unpublished {
    /// The inserter is about to publish the task. After `republish_after` the watchdog does it. A
    /// fresh task is in its batch; one that was put off has a row of its own.
    Fresh = 0,
    /// The queue is full: the row waits for room.
    Parked = 1,
    /// The task is due later than the horizon.
    Scheduled = 2,
    /// The task was published, and Redis lost it.
    Missing = 3,
}

/// A task to insert, and when it goes to the bus.
#[derive(Clone, Debug, PartialEq)]
pub struct NewRow {
    pub task: TaskRow,
    pub unpublished: Unpublished,
    /// When the watchdog may publish it (not used for `Parked`). A batch is due when the last of
    /// its tasks is.
    pub due_unix_ms: i64,
}

/// The number of a task's stay off the bus: of its batch, or of its row in the outbox.
///
/// A fanout may park a task before its publisher has marked it. The late mark must not remove the
/// parked row, because the bus has no record of it. So each `Outbox::unpublish` chooses a new turn,
/// which is not negative. The turn of a batch is negative: it is the batch's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Turn(pub i64);

impl Turn {
    /// The turn of a task that was inserted with a row in the outbox.
    pub const FIRST: Self = Self(0);

    pub fn is_batch(self) -> bool {
        self.0 < 0
    }
}

/// The answers of a call that may store new tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored<T> {
    /// In order.
    pub answers: Vec<T>,
    /// The batch of the new tasks that were `Fresh`.
    pub batch: Turn,
}

impl<T> Stored<T> {
    /// The turn of a row that was new.
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
        /// When the lease was given. 0: unknown.
        leased_unix_ms: i64,
        at_unix_ms: i64,
        discovered: Vec<NewRow>,
    },
    Died {
        id: TaskId,
        reason: String,
        attempts: u32,
        /// The last failures, the earliest first.
        history: Vec<Failure>,
        /// The epoch of the task that died; `None`: the present one.
        epoch: Option<u32>,
        at_unix_ms: i64,
    },
}

/// The outcome of a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settled {
    /// The report was settled before: the call changed nothing and ignored its discovered tasks.
    pub repeated: bool,
    /// SQL does not have the task (any more), or it was sent again since it died: the call changed
    /// nothing.
    pub unknown: bool,
    /// The task had NUM completions already: the result is surplus, and the discovered tasks were
    /// stored.
    pub surplus: bool,
    /// The present status of the task.
    pub status: Option<StoredStatus>,
    /// The key that must leave the filter, because its task is dead or cancelled.
    pub key: Option<(QueueName, KeyHash)>,
    /// One answer per discovered row, in order; empty when `repeated` or `unknown`.
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
    /// An operator may have changed these since the task was published.
    pub replicas: u32,
    pub priority: Priority,
}

/// A dead or cancelled task that was sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retried {
    pub id: TaskId,
    /// Unfinished, or Completed by workers whose completions came late.
    pub status: StoredStatus,
}

/// A stored task and one worker's completion of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateFor {
    pub id: TaskId,
    pub shard: ShardId,
    pub status: StoredStatus,
    /// The lease of the worker's completion.
    pub completed_under: Option<LeaseNumber>,
}

/// A published task that is unfinished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedTask {
    pub id: TaskId,
    pub shard: ShardId,
    /// The task is at or before this offset of its partition; `None`: in another generation of the
    /// topic.
    pub offset: Option<Offset>,
}

/// Where SQL says that an unfinished task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Not on the bus. The watchdog publishes it when it is due; `None`: when its queue has room.
    /// `came_back`: it was published before, or sent again.
    Off {
        why: Unpublished,
        due_unix_ms: Option<i64>,
        came_back: bool,
    },
    /// On the bus, at or before this offset of its partition; `None`: in another generation of the
    /// topic.
    On(Option<Offset>),
}

/// A task as its reader sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskDetail {
    pub task: TaskRow,
    pub status: StoredStatus,
    pub completed: u32,
    /// Failures that reports have mentioned.
    pub attempts: u32,
    pub reason: String,
    /// How often it was sent again.
    pub epoch: u32,
    pub updated_unix_ms: i64,
    /// The task is in the outbox, or in a batch that is not published.
    pub unpublished: bool,
}

/// The number of a queue's tasks with a status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueCount {
    pub queue: QueueName,
    pub status: StoredStatus,
    pub count: u64,
}
