//! The store: which tasks exist, what became of them, and what is still to be published (the
//! outbox).
//!
//! SQL decides what is new: `tasks.key_hash` is unique. Every method is one transaction. After an
//! error or a crash a caller may repeat it with the same arguments: the second call changes nothing
//! that the first one did.

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
mod letters;
pub mod mysql;
mod outbox;
mod owned;
mod pauses;
mod search;
mod shards;
pub mod sql;
pub mod sqlite;
mod tasks;
mod tokens;
mod types;
mod walked;

use std::time::Duration;

use async_trait::async_trait;

pub use self::{
    books::{BookStore, OffBusCounts, TurnedAway, TurnedAwayCounts},
    changes::{
        ChangeEnd, Changes, Decided, EndedChange, KeptChange, KeptChanges, KeptPages, Wanted,
    },
    check::{CheckStore, WrongCount},
    deadlines::{Deadlines, DueDeadlines, Overdue},
    error::{Cause, Error, Result},
    events::{Events, KeptEvents},
    history::{Attempts, FAILURES_STAY, History},
    holder::Holders,
    idempotency::IdempotencyKeys,
    jobs::{AddedJob, JOBS_STAY, Jobs, MOST_JOBS},
    letters::Letters,
    outbox::{BroughtForward, DUE_LOOKED_AT, Outbox, OutboxRow, PAGE_BYTES, Published},
    owned::KeyOwners,
    pauses::{MOST_PAUSED, Pauses, Pausing},
    search::{ListedTask, Search, TaskPage, TaskSearch},
    shards::{Opening, RebuildPage, Rebuilding, Rebuilds, Rebuilt, Shards, StoredShard},
    tasks::TaskReads,
    tokens::{ACTS_STAY, AddedToken, MOST_TOKENS, Tokens},
    types::{
        Inserted, NewRow, Place, PublishedTask, QueueCount, Retried, Settled, SettledTask,
        Settlement, StateFor, Stored, TaskDetail, TaskState, Turn, Unpublished,
    },
    walked::{Stretch, Walked, WalkedPage},
};

/// The store. `sqlite` and `mysql` are its backends; `tests/support/store_contract.rs` runs on
/// both.
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
    + Letters
    + Outbox
    + Pauses
    + Rebuilds
    + Search
    + Shards
    + TaskReads
    + Tokens
    + Send
    + Sync
{
    /// The random name that the database got when it was made. Redis remembers whose tasks it
    /// holds.
    async fn store_id(&self) -> Result<String>;

    /// Stores new rows and counts them. Answers per row, in order.
    ///
    /// The fresh ones of a call are one batch; others get rows in the outbox. Of two rows with one
    /// key the first is new. A row whose id is stored already is `New` again and stays as it is.
    /// The first row with an idempotency key takes it until its window ends: the others are
    /// `Repeated`, or `KeyReused` if they are another task.
    async fn insert(&self, rows: &[NewRow]) -> Result<Stored<Inserted>>;

    /// Stores results, statuses and discovered tasks in one transaction. One answer per report, in
    /// order.
    ///
    /// A report that comes twice, also within one call, is `repeated`. A task with NUM credited
    /// workers becomes Completed. The first final status stays. A task that dies gets its letter. A
    /// death of an earlier epoch is `unknown`.
    async fn settle(&self, reports: &[Settlement]) -> Result<Stored<Settled>>;

    /// Removes at most `limit` tasks that finished `age` or longer ago. Answers how many.
    ///
    /// Results, letters and histories go with them. The database's clock decides, and the first to
    /// finish goes first. The keys stay duplicates with the tasks' last status, except those of
    /// dead tasks, which are free; `counts` stays.
    async fn remove_finished(&self, age: Duration, limit: u32) -> Result<u64>;

    /// Asks once whether the database answers, and waits some seconds at most.
    ///
    /// Calls that begin while the last answer was an error give up after a few seconds instead of
    /// half a minute.
    async fn ping(&self) -> Result<()>;

    /// Ends running calls and closes the connections.
    async fn close(&self);
}
