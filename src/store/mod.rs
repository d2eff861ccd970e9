//! The store: which tasks exist, what became of them, and what is still to be published (the
//! outbox).
//!
//! SQL decides what is new: `tasks.key_hash` is unique. Every method is one transaction. After an
//! error or a crash a caller may repeat it with the same arguments: the second call changes nothing
//! that the first one did.

mod access;
mod error;
mod executions;
mod feeds;
pub mod mysql;
mod operators;
mod outbox;
mod sequences;
pub mod sql;
pub mod sqlite;
mod subscriptions;
mod tasks;
mod topics;
mod topologies;
mod trees;
mod types;

use async_trait::async_trait;

pub use self::{
    access::{ACTS_STAY, Access, AddedToken, MOST_TOKENS},
    error::{Cause, Error, Result},
    executions::{
        Append, Appended, Deleted, ExecutionCounts, Executions, Happening, InboxPage, InboxRow,
        KeptDefinition, ListedDefinition, ListedExecution, NewExecution, OpenExecution,
        StartedExecution, StoredDefinition, StoredEntry, StoredExecution, Timer,
    },
    feeds::{Feeds, StoredFeed},
    operators::{
        AddedBulk, Attempts, BULK_CHANGES_STAY, CLEARED_LIMITS_STAY, ChangeEnd, Decided,
        EndedChange, FAILURES_STAY, KeptChange, KeptChanges, KeptEvents, KeptPages, LimitSetting,
        MOST_BULK_CHANGES, MOST_HOLDS, MOST_OWN_LIMITS, MOST_PAUSED, OffBusCounts, Operators,
        Pausing, TurnedAway, TurnedAwayCounts, Wanted, WrongCount,
    },
    outbox::{
        BroughtForward, DUE_LOOKED_AT, Opening, Outbox, PAGE_BYTES, Published, RebuildPage,
        Rebuilding, Rebuilt, StoredShard, Stretch, Walked, WalkedPage,
    },
    sequences::{
        BEFORE_COUNTED, BrokenSequence, SequenceCursor, SequencePage, SequencePlace, Sequences,
    },
    subscriptions::{KeptSubscription, Sought, Subscriptions},
    tasks::{
        CompletedPage, DueDeadlines, ListedTask, Overdue, RemovedPage, TaskPage, TaskSearch, Tasks,
    },
    topics::{KeptTopic, Topics},
    topologies::{KeptTopology, Leaving, StoredTopology, Topologies},
    trees::{ComparedTrees, TREE_LOOKED_AT, TreeCount, Trees, WrongTree},
    types::{
        Inserted, NewRow, OutboxRow, Place, PublishedTask, QueueCount, Retried, Settled,
        SettledTask, Settlement, StateFor, Stored, TaskDetail, TaskState, Turn, Unpublished,
    },
};

/// The store. Its backends are `sqlite` and `mysql`; `tests/support/store_contract.rs` runs on
/// both.
#[async_trait]
pub trait Store:
    Tasks
    + Outbox
    + Operators
    + Access
    + Topics
    + Subscriptions
    + Sequences
    + Trees
    + Topologies
    + Feeds
    + Executions
{
    /// The random name that the database got when it was created. Redis stores it to remember whose
    /// tasks it holds.
    async fn store_id(&self) -> Result<String>;

    /// The partitions among which tasks with limit keys are spread: as many as there were when this
    /// was first called. More would split keys between shards, and each part would have its limits.
    async fn limit_partitions(&self, present: u32) -> Result<u32>;

    /// Checks once whether the database responds. Waits a few seconds at most.
    ///
    /// After a ping has failed, new calls give up after 5 seconds instead of 20 or more, until a
    /// ping succeeds.
    async fn ping(&self) -> Result<()>;

    /// Ends running calls and closes the connections.
    async fn close(&self);
}
