//! The store: which tasks exist, what became of them, and what is still to be published (the outbox).
//!
//! SQL decides what is new: `tasks.key_hash` is unique. Every method is one transaction. After an error or a crash a
//! caller may repeat it with the same arguments: the second call changes nothing that the first one did.

mod books;
mod changes;
mod check;
mod deadlines;
mod error;
mod events;
mod history;
mod holder;
mod idempotency;
mod jobs;
pub mod mysql;
mod owned;
mod pauses;
mod search;
pub mod sql;
pub mod sqlite;
mod types;

use std::{collections::HashSet, time::Duration};

use async_trait::async_trait;
use uuid::Uuid;

pub use self::{
    books::{BookStore, OffBusCounts, TurnedAway, TurnedAwayCounts},
    changes::{ChangeEnd, Changes, Decided, EndedChange, KeptChange, KeptChanges, KeptPages, Wanted},
    check::{CheckStore, WrongCount},
    deadlines::{Deadlines, DueDeadlines, Overdue},
    error::{Cause, Error, Result},
    events::{Events, KeptEvents},
    history::{Attempts, FAILURES_STAY, History},
    holder::Holders,
    idempotency::IdempotencyKeys,
    jobs::{JOBS_STAY, Jobs, MOST_JOBS},
    owned::KeyOwners,
    pauses::{MOST_PAUSED, Pauses, Pausing},
    search::{ListedTask, Search, TaskPage, TaskSearch},
    types::{
        ACTS_STAY, AddedToken, BroughtForward, DUE_LOOKED_AT, Inserted, MOST_TOKENS, NewRow, Opening, OutboxRow,
        PAGE_BYTES, Place, Published, PublishedTask, QueueCount, RebuildPage, Rebuilding, Rebuilt, Retried, Settled,
        SettledTask, Settlement, StateFor, Stored, StoredShard, TaskDetail, TaskState, Turn, Unpublished,
    },
};
use crate::model::{
    AccessToken, Act, DeadLetter, LetterId, LetterKind, LetterPage, LetterPages, QueueName, SecretHash, ShardId,
    StoredLetter, TaskId, TaskResult, TaskRow, WorkerName,
};

/// The store. `sqlite.rs` and `mysql.rs` are its backends; `tests/support/store_contract.rs` runs on both.
#[async_trait]
pub trait Store:
    BookStore
    + Changes
    + CheckStore
    + Deadlines
    + Events
    + History
    + Holders
    + IdempotencyKeys
    + Jobs
    + KeyOwners
    + Pauses
    + Search
    + Send
    + Sync
{
    /// The random name that the database got when it was made. Redis remembers whose tasks it holds.
    async fn store_id(&self) -> Result<String>;

    /// Stores new rows and counts them. Answers per row, in order.
    ///
    /// The fresh ones of a call are one batch; others get rows in the outbox. Of two rows with one key the first is
    /// new. A row whose id is stored already is `New` again and stays as it is. The first row with an idempotency key
    /// takes it until its window ends: the others are `Repeated`, or `KeyReused` if they are another task.
    async fn insert(&self, rows: &[NewRow]) -> Result<Stored<Inserted>>;

    /// Stores results, statuses and discovered tasks in one transaction. One answer per report, in order.
    ///
    /// A report that comes twice, also within one call, is `repeated`. A task with NUM credited workers becomes
    /// Completed. The first final status stays. A task that dies gets its letter. A death of an earlier epoch is
    /// `unknown`.
    async fn settle(&self, reports: &[Settlement]) -> Result<Stored<Settled>>;

    /// Keeps the offsets of `published`. Removes their outbox rows, unless they have another turn by now. `generation`
    /// is the topic's.
    ///
    /// A batch that is published as a whole, in one call, costs one row. Of any other, each task gets an offset of its
    /// own.
    async fn mark_published(&self, generation: &str, published: &[Published]) -> Result<()>;

    /// Puts tasks into the outbox again, unless they are final. A task that is in it already gets a new turn.
    async fn unpublish(&self, ids: &[TaskId], why: Unpublished) -> Result<()>;

    /// Puts tasks into the outbox as fresh ones that are due later, unless they are final.
    async fn put_off(&self, ids: &[TaskId], until_unix_ms: i64) -> Result<()>;

    /// Due tasks of the outbox and of batches, without parked ones and those of `without`, the earliest first.
    ///
    /// A page ends at `limit` rows or at [`PAGE_BYTES`]. Removes the rows on its way whose task is final, and the
    /// batches in which no task waits.
    async fn due(&self, now_unix_ms: i64, limit: usize, without: &HashSet<TaskId>) -> Result<Vec<OutboxRow>>;

    /// Makes fresh tasks due at `to_unix_ms`, because the clock stepped back after they were stored.
    ///
    /// Looks at a page of at most `limit` outbox rows that are due later than `later_than_unix_ms`, without parked
    /// ones. The page begins behind `after`; the first one takes all batches with it.
    async fn bring_forward(
        &self,
        later_than_unix_ms: i64,
        to_unix_ms: i64,
        after: Option<(i64, TaskId)>,
        limit: usize,
    ) -> Result<BroughtForward>;

    /// The insert time of the oldest task per queue that waits in SQL: parked, or due and not published.
    ///
    /// Looks at the first [`DUE_LOOKED_AT`] due rows, and at as many due tasks of batches.
    async fn oldest_waiting(&self, now_unix_ms: i64) -> Result<Vec<(QueueName, i64)>>;

    /// The queues with parked rows.
    async fn parked_queues(&self) -> Result<Vec<QueueName>>;

    /// Parked rows of a queue by priority, then by age; otherwise as [`Self::due`].
    async fn parked(&self, queue: &QueueName, limit: usize, without: &HashSet<TaskId>) -> Result<Vec<OutboxRow>>;

    /// The states of the stored tasks among `ids`, in any order; one for an id that is named twice.
    async fn states(&self, ids: &[TaskId]) -> Result<Vec<TaskState>>;

    /// The states of the stored tasks among `ids`, each with the worker's completion, credited or surplus.
    async fn states_for(&self, worker: &WorkerName, ids: &[TaskId]) -> Result<Vec<StateFor>>;

    /// Published tasks that are unfinished and have an id beyond `after`, by id.
    async fn published(&self, generation: &str, after: Option<TaskId>, limit: u32) -> Result<Vec<PublishedTask>>;

    /// Removes the published batches that no task needs, among `limit` batches behind `after`. Answers where the next
    /// page begins.
    ///
    /// A task needs its batch until it is final or in the outbox.
    async fn remove_batches(&self, after: Option<Turn>, limit: u32) -> Result<Option<Turn>>;

    /// Removes at most `limit` tasks that finished `age` or longer ago. Answers how many.
    ///
    /// Results, letters and histories go with them. The database's clock decides, and the first to finish goes first.
    /// The keys stay duplicates with the tasks' last status; `counts` stays.
    async fn remove_finished(&self, age: Duration, limit: u32) -> Result<u64>;

    /// Keeps letters about records, and about tasks that are not stored. One that is kept already stays as it is.
    async fn keep_letters(&self, letters: &[DeadLetter]) -> Result<()>;

    /// A page of letters without payloads and values, the newest first. It looks at `limit` letters, and leaves out
    /// those with another reason.
    async fn letters(&self, pages: &LetterPages) -> Result<LetterPage>;

    /// A letter with all that it has.
    async fn letter(&self, id: LetterId) -> Result<Option<StoredLetter>>;

    /// The letters among `ids`, in any order.
    async fn letter_kinds(&self, ids: &[LetterId]) -> Result<Vec<(LetterId, LetterKind)>>;

    /// Sends dead and cancelled tasks again, and removes their letters. Answers those among `ids` that were one.
    ///
    /// The task is unfinished in its next epoch, has no failures, keeps its credits, and is in the outbox as `Missing`.
    /// Completions that came after its end become credits; with NUM of them it is Completed.
    async fn retry(&self, ids: &[TaskId], now_unix_ms: i64) -> Result<Vec<Retried>>;

    /// Removes letters, and dead tasks with them: their keys stay. Answers how many letters.
    async fn purge(&self, ids: &[LetterId]) -> Result<u64>;

    /// Removes at most `limit` letters that are at least `age` old, except those of dead tasks. Answers how many.
    async fn remove_old_letters(&self, age: Duration, limit: u32) -> Result<u64>;

    /// The stored tasks among `ids`, in any order.
    async fn rows(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>>;

    async fn task(&self, id: TaskId) -> Result<Option<TaskDetail>>;

    /// Where the task is. `None`: it is finished, or there is no such task. `generation` is the topic's.
    async fn place(&self, generation: &str, id: TaskId) -> Result<Option<Place>>;

    /// The results of a task, the earliest first.
    async fn results(&self, id: TaskId) -> Result<Vec<TaskResult>>;

    /// The bytes of all results of a task.
    async fn results_bytes(&self, id: TaskId) -> Result<usize>;

    /// Counts per queue and status, of `queues` or of every queue that ever was. May leave out zeros.
    async fn counts(&self, queues: Option<&[QueueName]>) -> Result<Vec<QueueCount>>;

    /// The number of unfinished tasks of each queue that has some. Queues without any cost nothing.
    async fn unfinished(&self) -> Result<Vec<(QueueName, u64)>>;

    /// The open shards; or all shards with a change after that version, in the order of versions.
    async fn shards(&self, changed_after: Option<u64>) -> Result<Vec<StoredShard>>;

    /// Opens the shards that are not open, in their first or next generation. Answers per shard, in order.
    async fn open_shards(&self, shards: &[ShardId]) -> Result<Vec<Opening>>;

    /// Closes a shard that is in this generation, which it never has again. Answers whether it is closed in it now.
    async fn close_shard(&self, shard: &ShardId, generation: u64) -> Result<bool>;

    /// Begins to rebuild shards that Redis lost: raises each one's generation from the given one, and opens it.
    ///
    /// Answers the present generation per shard, in order, also when another process was first.
    async fn begin_rebuild(&self, lost: &[(ShardId, u64)]) -> Result<Vec<u64>>;

    /// The shards that are open and being rebuilt.
    async fn rebuilding(&self) -> Result<Rebuilding>;

    /// Unfinished tasks of these shards that are not in the outbox, among `limit` tasks beyond `after`.
    ///
    /// A page ends at [`PAGE_BYTES`], too. It may be empty and have a next one.
    async fn rebuild_page(&self, of: &Rebuilding, after: Option<TaskId>, limit: u32) -> Result<RebuildPage>;

    /// Ends the rebuild of the shards that are in the given generation still. `generation` is the topic's.
    ///
    /// From now on every unfinished task of such a shard that is not in the outbox counts as published at the offset,
    /// or at its own one if that is later.
    async fn end_rebuild(&self, generation: &str, rebuilt: &[Rebuilt]) -> Result<()>;

    /// A number that each change of the tokens raises.
    async fn tokens_version(&self) -> Result<u64>;

    /// All access tokens, by name. There are at most [`MOST_TOKENS`].
    async fn tokens(&self) -> Result<Vec<(SecretHash, AccessToken)>>;

    /// Adds a token, and records the act.
    async fn add_token(&self, hash: SecretHash, token: &AccessToken, act: &Act) -> Result<AddedToken>;

    /// Removes the token of that name, and records the act. Answers whether there was one.
    async fn revoke_token(&self, name: &str, act: &Act) -> Result<bool>;

    /// Acts before `before`, the latest first. They stay for [`ACTS_STAY`].
    async fn acts(&self, before: Option<Uuid>, limit: u32) -> Result<Vec<Act>>;

    /// Ends running calls and closes the connections.
    async fn close(&self);
}
