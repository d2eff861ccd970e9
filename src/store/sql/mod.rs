//! The store in SQL: everything that both databases have in common.
//!
//! - `tasks`: each task with its status, and the offset of its last record on the bus, unless that
//!   is the offset of its batch. `on_bus` means that the task is unfinished and not in the outbox:
//!   Redis has it, or will have it once its batch is published.
//! - `batches`: the fresh tasks of one insert, with whether they are published, and where.
//! - `outbox`: a narrow table with one row for each other unfinished task that is not on the bus:
//!   scheduled, parked, missing, crowded, behind others of their sequences.
//! - `sequences`: those that have an unfinished task, each with its head. The others of its tasks are
//!   in the outbox.
//! - `results`: what each worker reported, by (task, worker), so that no worker gets two credits.
//!   In SQLite a number stands for the task, so that results of tasks of the same shard are stored
//!   together (docs/internals/measurements.md).
//! - `history`: failed attempts.
//! - `seen`: the keys of removed tasks. In SQLite also those of stored tasks, except the latest,
//!   which are in `new_keys`.
//! - `letters`: dead letters. The letter of a dead task has the task's id.
//! - `shards`: all shards that ever existed, each with its generation, whether it is closed,
//!   whether it is being rebuilt, and the offset at which the last rebuild published its tasks.
//! - `idempotency_keys`: the idempotency keys of inserts, until the end of their windows.
//! - `bulk`: bulk changes, with their progress.
//! - `kept_events`: events that topic `events` does not have yet.
//! - `turned_away`: the number of inserted or discovered tasks that were not stored.
//! - `changes`: pending changes of unfinished tasks, until the queue has applied them, and the
//!   deadlines of tasks.
//! - `paused_queues`: the queues whose tasks no worker gets.
//! - `tokens`, `acts`: who may do what, and what operators did.
//! - `topics`, `subscriptions`, `positions`: the topics of users, and how far each subscription has
//!   read them.
//! - `topologies`: the files of topologies.
//! - `trees`: trees of tasks, each with its counts. `tree_tasks` lists the tasks of each.
//! - `definitions`, `executions`: workflows, and what runs of them. `execution_events` has the log of
//!   each execution; `execution_inbox` and `execution_timers`, what makes it go on.
//! - `queue_counts`: the number of tasks by queue and status. Each transaction updates it in its
//!   last step, so that it locks these few rows only briefly.
//!
//! A transaction that inserts, settles or moves tasks locks the [era](tasks::era) first, then their
//! rows, sorted by id. Keys are inserted sorted by hash. If two transactions conflict nevertheless, a deadlock ends one of them,
//! which is then repeated.

mod access;
mod backend;
mod columns;
mod dialect;
mod executions;
mod feeds;
mod meta;
mod migrate;
mod operators;
mod outbox;
mod pages;
#[cfg(test)]
pub(super) mod plans;
mod queue_counts;
mod retry;
mod rows;
mod runner;
mod sequences;
mod session;
mod statement;
mod subscriptions;
mod tasks;
mod topics;
mod topologies;
mod trees;

use std::sync::{Arc, atomic::AtomicI64};

use async_trait::async_trait;
use parking_lot::RwLock;

pub(super) use self::{
    backend::{Backend, Work},
    columns::FromRow,
    dialect::Dialect,
    migrate::{MigrationFile, migration_files, run as migrate},
    session::{Columns, Recent, Session},
    statement::{Statement, Value},
};
use self::{retry::Outage, runner::Runner, tasks::insert::OldKeys};
use super::{Result, Store};
use crate::config::EventQueues;

/// The store in an SQL database.
pub struct SqlStore<DB> {
    sql: Runner<DB>,
    migrated: usize,
    old_keys: Arc<OldKeys>,
    /// Where the next page of finished tasks begins, in Unix milliseconds.
    finished_from: AtomicI64,
    events: RwLock<Arc<EventQueues>>,
}

impl<DB: Backend> SqlStore<DB> {
    /// A store in a database to which `migrated` migrations have just been applied.
    pub(super) fn new(database: DB, migrated: usize) -> Self {
        Self {
            sql: Runner(database, Outage::default()),
            migrated,
            old_keys: Arc::default(),
            finished_from: AtomicI64::new(0),
            events: RwLock::default(),
        }
    }

    /// The queues whose events are stored.
    fn event_queues(&self) -> Arc<EventQueues> {
        Arc::clone(&self.events.read())
    }

    #[cfg(test)]
    pub(super) fn database(&self) -> &DB {
        &self.sql.0
    }

    /// The number of migrations that were applied when the store was opened.
    pub fn migrated(&self) -> usize {
        self.migrated
    }
}

#[async_trait]
impl<DB: Backend> Store for SqlStore<DB> {
    async fn store_id(&self) -> Result<String> {
        meta::read(&self.sql, "store_id", "store_id").await
    }

    async fn limit_partitions(&self, present: u32) -> Result<u32> {
        const NAME: &str = "limit_partitions";
        self.sql
            .run(NAME, present.to_string(), |session, present| {
                Box::pin(async move {
                    meta::set_once(session, NAME, "0", present).await?;
                    meta::value(session, NAME).await
                })
            })
            .await
    }

    async fn ping(&self) -> Result<()> {
        self.sql.ping().await
    }

    async fn close(&self) {
        self.sql.0.close().await;
    }
}
