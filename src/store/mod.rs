//! The store: which tasks there are, what became of them, and what is still to be published (the outbox).
//!
//! SQL decides what is new: `tasks.key_hash` is unique. Every method is one transaction, and each may be called again with
//! the same arguments after an error or a crash: the second call changes nothing that the first one did.

pub mod mysql;
pub mod sql;
pub mod sqlite;

use std::{collections::HashSet, io, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use sqlx::{error::DatabaseError, mysql::MySqlDatabaseError};

use crate::{
    model::{Encoding, KeyHash, LeaseNumber, Offset, QueueName, ShardId, StoredStatus, TaskId, TaskRow, WorkerName},
    runtime::LoopError,
};

/// What a caller can do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server is away, busy, or chose us as a deadlock's victim: the same call may go through later.
    #[error("{0}")]
    Transient(#[source] sqlx::Error),
    /// Tried again and again, in vain: the same call may go through later.
    #[error("gave up after {} s: {cause}", after.as_secs())]
    GaveUp { after: Duration, cause: String },
    /// There was no connection to be had, although the server gives them.
    #[error("all {connections} connections to the database have been in use for {} s; {hint}", waited.as_secs())]
    Busy { connections: u32, waited: Duration, hint: &'static str },
    /// No room left on the device or in the database.
    #[error("the database is full: {0}")]
    Full(#[source] sqlx::Error),
    /// Because of what stands in a row: the same call fails again, and one without that row goes through.
    #[error("{0}")]
    Refused(#[source] sqlx::Error),
    /// Its certificate, or ours, is not what it should be.
    #[error("no TLS connection to the database: {0}; see ssl-mode and ssl-ca in its URL")]
    Tls(#[source] sqlx::Error),
    #[error("cannot read {name}, the {parameter} of the database's URL: {cause}")]
    File { parameter: String, name: String, cause: std::io::Error },
    #[error("{0}")]
    Other(#[source] sqlx::Error),
    /// A newer taskd has migrated it, and an older one would not understand what stands there now.
    #[error(
        "the database has schema {schema}, which needs a taskd that knows schema {needs} or later; \
         this one knows {knows}"
    )]
    TooNew { schema: i64, needs: i64, knows: i64 },
    #[error("cannot migrate the database: {0}")]
    Migrate(#[from] sqlx::migrate::MigrateError),
}

/// SQLite's primary result codes.
mod sqlite_code {
    pub(super) const BUSY: i32 = 5;
    pub(super) const LOCKED: i32 = 6;
    pub(super) const FULL: i32 = 13;
    pub(super) const TOOBIG: i32 = 18;
    pub(super) const CONSTRAINT: i32 = 19;
    pub(super) const MISMATCH: i32 = 20;
}

/// Errors of MySQL and MariaDB after which the same statement may go through on another try.
const MYSQL_TRANSIENT: &[u16] = &[
    1020, // the record has changed since it was read (MariaDB)
    1040, // too many connections
    1047, // a node that is not ready yet (Galera)
    1053, // server shutdown in progress
    1077, // normal shutdown
    1079, // shutdown complete
    1158, // network errors
    1159, 1160, 1161, //
    1184, // aborted connection
    1203, // the user has too many connections
    1205, // lock wait timeout
    1213, // deadlock
    1290, // read only: the primary has moved
    1317, // query interrupted
    1412, // the table's definition has changed
    1615, // a prepared statement is to be prepared again
    1836, // read only mode
    1927, // connection killed (MariaDB)
    1969, // statement took too long (MariaDB)
    2006, 2013, // a proxy has lost the server
    3024, // statement took too long (MySQL)
    4031, // disconnected for being idle
];

/// Disk full, table full.
const MYSQL_FULL: &[u16] = &[1021, 1114];

/// What is wrong is a row. Not everything that is no transient error: a missing table or right is no report's fault.
const MYSQL_REFUSED: &[u16] = &[
    1048, // null
    1062, // duplicate key
    1118, // row too large
    1153, // packet too large
    1264, // out of range
    1292, 1366, // no such value
    1406, // too long
    1644, // a trigger says so
    3819, 4025, // check constraint (MySQL, MariaDB)
];

impl LoopError for Error {}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        match &error {
            // So says rustls what it does not like about a certificate.
            sqlx::Error::Io(cause) if cause.kind() == io::ErrorKind::InvalidData => Self::Tls(error),
            sqlx::Error::Tls(_) => Self::Tls(error),
            sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::PoolTimedOut | sqlx::Error::WorkerCrashed => {
                Self::Transient(error)
            }
            sqlx::Error::Database(database) => match class(&**database) {
                Class::Transient => Self::Transient(error),
                Class::Full => Self::Full(error),
                Class::Refused => Self::Refused(error),
                Class::Other => Self::Other(error),
            },
            _ => Self::Other(error),
        }
    }
}

enum Class {
    Transient,
    Full,
    Refused,
    Other,
}

fn class(error: &dyn DatabaseError) -> Class {
    if let Some(error) = error.try_downcast_ref::<MySqlDatabaseError>() {
        return match error.number() {
            code if MYSQL_TRANSIENT.contains(&code) => Class::Transient,
            code if MYSQL_FULL.contains(&code) => Class::Full,
            code if MYSQL_REFUSED.contains(&code) => Class::Refused,
            _ => Class::Other,
        };
    }
    // The low byte of an extended code is the primary one.
    match error.code().and_then(|code| code.parse::<i32>().ok()).map(|code| code & 0xff) {
        Some(sqlite_code::BUSY | sqlite_code::LOCKED) => Class::Transient,
        Some(sqlite_code::FULL) => Class::Full,
        Some(sqlite_code::TOOBIG | sqlite_code::CONSTRAINT | sqlite_code::MISMATCH) => Class::Refused,
        _ => Class::Other,
    }
}

impl Error {
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Transient(_) | Self::GaveUp { .. } | Self::Busy { .. } | Self::Full(_))
    }

    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_))
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The answer to one row of an insert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    New,
    /// The (queue, key) is taken, by this task.
    Duplicate {
        id: TaskId,
        status: StoredStatus,
    },
}

/// Why a row stands in the outbox. The discriminants stand in SQL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Unpublished {
    /// Just inserted, its inserter is about to publish it; after `republish_after` somebody else may.
    Fresh = 0,
    /// Its queue is full: waits for room.
    Parked = 1,
    /// Due later than the horizon.
    Scheduled = 2,
    /// Published before, found missing in Redis.
    Missing = 3,
}

/// A row to insert, and what its outbox row says.
#[derive(Clone, Debug, PartialEq)]
pub struct NewRow {
    pub task: TaskRow,
    pub unpublished: Unpublished,
    /// From when on the watchdog may publish it (not used for `Parked`).
    pub due_unix_ms: i64,
}

/// A page of the outbox ends with the row that takes it to so many bytes of tasks: a thousand rows may have a gigabyte.
pub const PAGE_BYTES: usize = 16 << 20;

/// How many due rows [`Store::oldest_waiting`] looks at.
pub const DUE_LOOKED_AT: u64 = 1000;

/// A row of the outbox with its task.
#[derive(Clone, Debug, PartialEq)]
pub struct OutboxRow {
    pub task: TaskRow,
    pub unpublished: Unpublished,
    pub turn: Turn,
}

/// Which time it is that a task stands in the outbox: chosen anew by each [`Store::unpublish`]. Who publishes a task may be overtaken by a
/// fanout that parks it: the late mark must not remove the parked row, of which nothing is on the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn(pub i64);

impl Turn {
    /// Of a task that was just inserted.
    pub const FIRST: Self = Self(0);
}

/// Tasks that now stand on the bus: at or before `offset` of their partition.
#[derive(Clone, Debug)]
pub struct Published {
    pub partition: u32,
    pub offset: Offset,
    pub tasks: Vec<(TaskId, Turn)>,
}

/// One report out of `task-results`.
#[derive(Clone, Debug)]
pub enum Settlement {
    Completed {
        id: TaskId,
        worker: String,
        lease: LeaseNumber,
        result: Bytes,
        encoding: Encoding,
        attempt: u32,
        at_unix_ms: i64,
        discovered: Vec<NewRow>,
    },
    Died {
        id: TaskId,
        reason: String,
        attempts: u32,
        at_unix_ms: i64,
    },
}

/// What a report changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settled {
    /// The report had been settled before: nothing was changed, its discoveries were not looked at.
    pub repeated: bool,
    /// The report is of a task that SQL does not know, or not any more; nothing was changed.
    pub unknown: bool,
    /// The task had its NUM completions already: kept as surplus, its discoveries were taken.
    pub surplus: bool,
    /// The status that the task has now.
    pub status: Option<StoredStatus>,
    /// For a task that is dead or cancelled now: whose key must leave the filter.
    pub key: Option<(QueueName, KeyHash)>,
    /// One answer per discovered row, in order; empty when `repeated` or `unknown`.
    pub discovered: Vec<Inserted>,
}

/// What the fanout and the settler ask about a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskState {
    pub id: TaskId,
    pub status: StoredStatus,
    /// Who has been credited.
    pub workers: Vec<String>,
}

/// A stored task, as one worker has completed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateFor {
    pub id: TaskId,
    pub status: StoredStatus,
    /// The lease under which the worker completed it.
    pub completed_under: Option<LeaseNumber>,
}

/// An unfinished task that was published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedTask {
    pub id: TaskId,
    pub shard: ShardId,
    /// At or before this offset of the shard's partition; `None`: of another generation of the topic.
    pub offset: Option<Offset>,
}

/// A task as its reader sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskDetail {
    pub task: TaskRow,
    pub status: StoredStatus,
    pub completed: u32,
    /// Failures, as far as reports have told.
    pub attempts: u32,
    pub reason: String,
    pub updated_unix_ms: i64,
    /// It stands in the outbox.
    pub unpublished: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResultRow {
    pub worker: String,
    pub result: Bytes,
    pub encoding: Encoding,
    pub attempt: u32,
    pub completed_unix_ms: i64,
    /// Came when NUM others had been credited.
    pub surplus: bool,
}

/// How many tasks of a queue have a status.
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
    /// The number of its present life, or of its last one.
    pub life: u64,
    pub is_open: bool,
    /// Of the change that made it so.
    pub version: u64,
}

/// The outcome of [`Store::open_shards`] for one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    pub life: u64,
    /// This call has opened it: in Redis there is nothing of this life yet. Otherwise it was open before.
    pub is_new: bool,
}

/// The outcome of [`Store::bring_forward`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BroughtForward {
    pub rows: u64,
    /// Where the next page begins.
    pub next: Option<(i64, TaskId)>,
}

/// A page of a shard's tasks that went back into the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakenBack {
    pub last: TaskId,
    pub tasks: u64,
    /// Replicas of theirs that are credited, and stay so.
    pub credited: u64,
}

/// The store. `sqlite.rs` and `mysql.rs` are its backends; `tests/support/store_contract.rs` runs on both.
#[async_trait]
pub trait Store: Send + Sync {
    /// A random name, made when the database was: Redis remembers whose tasks it holds.
    async fn store_id(&self) -> Result<String>;

    /// Stores what is new with its outbox row, and counts it; answers per row, in order. Of two rows with one key the first is new.
    /// A row whose id is stored already is answered `New` again and left as it is.
    async fn insert(&self, rows: &[NewRow]) -> Result<Vec<Inserted>>;

    /// Stores results, statuses and discoveries in one transaction; one answer per report, in order. A report that comes twice, also
    /// within one call, is `repeated`. A task with NUM credited workers becomes Completed; the first final status stays.
    async fn settle(&self, reports: &[Settlement]) -> Result<Vec<Settled>>;

    /// Removes the outbox rows of `published`, unless they have another turn by now, and keeps where the tasks stand. `generation` is the
    /// topic's.
    async fn mark_published(&self, generation: &str, published: &[Published]) -> Result<()>;

    /// Puts published tasks back into the outbox (unless they are final), in a new turn also those that are in it.
    async fn unpublish(&self, ids: &[TaskId], why: Unpublished) -> Result<()>;

    /// Outbox rows (not parked ones) whose time has come, the earliest first, but for those of `without`. At most `limit`, and fewer when
    /// they weigh [`PAGE_BYTES`]. Removes those it meets whose task is final.
    async fn due(&self, now_unix_ms: i64, limit: usize, without: &HashSet<TaskId>) -> Result<Vec<OutboxRow>>;

    /// Looks at rows of the outbox (not parked ones) that are due later than that, from the one behind `after` on, at
    /// most `limit`. Fresh ones among them become due at `to_unix_ms`: the clock has stepped back since they were
    /// stored.
    async fn bring_forward(
        &self,
        later_than_unix_ms: i64,
        to_unix_ms: i64,
        after: Option<(i64, TaskId)>,
        limit: usize,
    ) -> Result<BroughtForward>;

    /// Per queue, when the oldest task came that waits in the outbox: parked, or due and not published. Of what is due
    /// the first [`DUE_LOOKED_AT`] rows are looked at.
    async fn oldest_waiting(&self, now_unix_ms: i64) -> Result<Vec<(QueueName, i64)>>;

    /// Queues with parked rows.
    async fn parked_queues(&self) -> Result<Vec<QueueName>>;

    /// Parked rows of a queue: by priority, then the oldest first; otherwise like [`Self::due`].
    async fn parked(&self, queue: &QueueName, limit: usize, without: &HashSet<TaskId>) -> Result<Vec<OutboxRow>>;

    /// The states of those of `ids` that are stored, in any order; one of an id that is named twice.
    async fn states(&self, ids: &[TaskId]) -> Result<Vec<TaskState>>;

    /// Like [`Self::states`], with what the worker has completed, counted or surplus.
    async fn states_for(&self, worker: &WorkerName, ids: &[TaskId]) -> Result<Vec<StateFor>>;

    /// Unfinished, published tasks with an id beyond `after`, by id.
    async fn published(&self, generation: &str, after: Option<TaskId>, limit: u32) -> Result<Vec<PublishedTask>>;

    /// Puts every unfinished, published task of the shard with an id beyond `after` into the outbox as `Missing`, at most `limit`;
    /// `None` when there were no more.
    async fn unpublish_shard(&self, shard: &ShardId, after: Option<TaskId>, limit: u32) -> Result<Option<TakenBack>>;

    /// Removes tasks, the first to finish first, that have been finished for `age` or longer by the database's clock, with their results, at
    /// most `limit`; answers how many. Their keys stay duplicates, with the status they had; `counts` stays.
    async fn remove_finished(&self, age: Duration, limit: u32) -> Result<u64>;

    /// Those of these tasks that are stored, in any order.
    async fn rows(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>>;

    /// The owners of these keys, among tasks that are stored, or were. In any order; a key that nobody has is left out.
    async fn owners(&self, keys: &[KeyHash]) -> Result<Vec<(KeyHash, TaskId)>>;

    async fn task(&self, id: TaskId) -> Result<Option<TaskDetail>>;

    /// Results of a task, the earliest first.
    async fn results(&self, id: TaskId) -> Result<Vec<ResultRow>>;

    /// The bytes of all results of a task.
    async fn results_bytes(&self, id: TaskId) -> Result<usize>;

    /// Counts per queue and status, of these queues or of every queue that ever was; zero counts may be left out.
    async fn counts(&self, queues: Option<&[QueueName]>) -> Result<Vec<QueueCount>>;

    /// The queues that have unfinished tasks, and how many. Costs nothing for names that have none.
    async fn unfinished(&self) -> Result<Vec<(QueueName, u64)>>;

    /// The shards that are open; or all that were opened, closed or brought back after the change of that version, in
    /// the order of versions.
    async fn shards(&self, changed_after: Option<u64>) -> Result<Vec<StoredShard>>;

    /// Opens those that are not open, in one transaction: in their first life, or in the one after that in which they
    /// were closed. Answers per shard, in order.
    async fn open_shards(&self, shards: &[ShardId]) -> Result<Vec<Opening>>;

    /// Closes a shard that is in this life; whether it is closed in it now. Its life is never used again.
    async fn close_shard(&self, shard: &ShardId, life: u64) -> Result<bool>;

    /// Raises the shard's life number from `from` (0: first life, adds the shard) and answers the number it has now,
    /// also when somebody else was first. A closed shard is open then.
    async fn next_life(&self, shard: &ShardId, from: u64) -> Result<u64>;

    /// Finishes what is running and closes the connections.
    async fn close(&self);
}
