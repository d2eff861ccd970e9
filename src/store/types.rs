//! Arguments and answers of the store.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;

use crate::model::{
    Encoding, Failure, KeyHash, LeaseNumber, Offset, Priority, QueueName, ShardId, StoredStatus, TaskId, TaskRow,
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
    /// The inserter is about to publish the task. After `republish_after` the watchdog does it. A fresh task is in its
    /// batch; only those of an older taskd have a row of their own.
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
    /// When the watchdog may publish it (not used for `Parked`). A batch is due when the last of its tasks is.
    pub due_unix_ms: i64,
}

/// The bytes of tasks at which a page of the outbox ends: a thousand rows may weigh a gigabyte.
pub const PAGE_BYTES: usize = 16 << 20;

/// How many due rows `Store::oldest_waiting` looks at.
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

/// The number of a task's stay off the bus: of its batch, or of its row in the outbox.
///
/// A fanout may park a task before its publisher has marked it. The late mark must not remove the parked row, because
/// the bus has no record of it. So each `Store::unpublish` chooses a new turn, which is not negative. The turn of a
/// batch is negative: it is the batch's number.
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
        if row.unpublished == Unpublished::Fresh { self.batch } else { Turn::FIRST }
    }
}

/// Tasks that are on the bus now, at or before `offset` of their partition.
#[derive(Clone, Debug)]
pub struct Published {
    pub partition: u32,
    pub offset: Offset,
    pub tasks: Vec<(TaskId, Turn)>,
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
    /// SQL does not have the task (any more), or it was sent again since it died: the call changed nothing.
    pub unknown: bool,
    /// The task had NUM completions already: the result is surplus, and the discovered tasks were stored.
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
    /// The task is at or before this offset of its partition; `None`: in another generation of the topic.
    pub offset: Option<Offset>,
}

/// Where SQL says that an unfinished task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Not on the bus. The watchdog publishes it when it is due; `None`: when its queue has room. `came_back`: it was
    /// published before, or sent again.
    Off { why: Unpublished, due_unix_ms: Option<i64>, came_back: bool },
    /// On the bus, at or before this offset of its partition; `None`: in another generation of the topic.
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

/// A shard as SQL remembers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredShard {
    pub id: ShardId,
    /// The present generation of the shard, or the last one if it is closed.
    pub generation: u64,
    pub is_open: bool,
    /// The version of its last change.
    pub version: u64,
}

/// The outcome of `Store::open_shards` for one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    pub generation: u64,
    /// This call opened it: Redis has nothing of this generation yet. Otherwise it was open before.
    pub is_new: bool,
}

/// The outcome of `Store::bring_forward`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BroughtForward {
    pub rows: u64,
    /// Where the next page begins.
    pub next: Option<(i64, TaskId)>,
}

/// The shards that are being rebuilt: not all of their tasks are published again since Redis lost them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rebuilding {
    /// Each with its present generation.
    pub shards: BTreeMap<ShardId, u64>,
    /// The greatest id of a task that is not in the outbox. A task that is stored later is published later, too.
    pub upto: Option<TaskId>,
}

/// A page of the tasks of shards that are being rebuilt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RebuildPage {
    /// By id.
    pub tasks: Vec<TaskRow>,
    /// Their credited replicas, which stay credited.
    pub credited: u64,
    /// Where the next page begins; `None`: this is the last one.
    pub next: Option<TaskId>,
}

/// A shard whose tasks are published again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rebuilt {
    pub shard: ShardId,
    /// The generation of the shard that they are published for.
    pub generation: u64,
    /// They are at or before this offset of the shard's partition; `None`: none was published.
    pub offset: Option<Offset>,
}

/// The most access tokens. Each process keeps all of them in memory.
pub const MOST_TOKENS: u32 = 10_000;

/// How long an operator's act can be read.
pub const ACTS_STAY: Duration = Duration::from_secs(400 * 24 * 3600);

/// The answer to a new access token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddedToken {
    Yes,
    /// Another token has the name.
    NameTaken,
    /// There are [`MOST_TOKENS`].
    NoRoom,
}
