//! The store in SQL: everything that both databases have in common.
//!
//! - `tasks`: a task, its status, and the offset of its last record on the bus, if that is not its
//!   batch's. `on_bus` says that it is unfinished and not in the outbox: Redis knows it, or will
//!   when its batch is published.
//! - `batches`: the fresh tasks of one insert; whether they are published, and where.
//! - `outbox`: narrow, one row for each other unfinished task that is not on the bus: scheduled,
//!   parked, missing.
//! - `results`: what each worker reported, by (task, worker): no worker gets two credits. In SQLite
//!   the task is a number there, which groups tasks of a shard (docs/internals/measurements.md).
//! - `history`: the attempts that failed.
//! - `seen`: the keys of removed tasks. In SQLite also of stored ones, but for the latest: those
//!   are in `new_keys`.
//! - `letters`: dead letters; that of a dead task has its id.
//! - `shards`: the shards that ever were, each with its generation, whether it is closed, whether
//!   it is being rebuilt, and the offset at which the last rebuild published its tasks.
//! - `idempotency_keys`: the idempotency keys of inserts, until the end of their windows.
//! - `bulk`: changes of all tasks of a filter, and how far they have come.
//! - `kept_events`: events until topic `events` has them.
//! - `turned_away`: how many tasks came in and were not stored.
//! - `changes`: what somebody wants of unfinished tasks, until the queue has it; and the deadlines
//!   of tasks.
//! - `paused_queues`: the queues of which no worker gets anything.
//! - `tokens`, `acts`: who may do what, and what operators did.
//! - `queue_counts`: each transaction keeps it up to date, in its last step, so that it holds the
//!   few rows briefly.
//!
//! A transaction that settles or moves tasks locks their rows first, in the order of ids. Keys are
//! inserted in the order of their hashes. When two transactions conflict nevertheless, a deadlock
//! ends one of them, and it is repeated.

mod access;
mod backend;
mod columns;
mod dialect;
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
mod session;
mod statement;
mod tasks;

use std::sync::Arc;

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

/// A store in SQL.
pub struct SqlStore<DB> {
    sql: Runner<DB>,
    migrated: usize,
    old_keys: Arc<OldKeys>,
    events: RwLock<Arc<EventQueues>>,
}

impl<DB: Backend> SqlStore<DB> {
    /// A store in a database that `migrated` migrations have just brought up to date.
    pub(super) fn new(database: DB, migrated: usize) -> Self {
        Self {
            sql: Runner(database, Outage::default()),
            migrated,
            old_keys: Arc::default(),
            events: RwLock::default(),
        }
    }

    /// The queues whose events are kept.
    fn event_queues(&self) -> Arc<EventQueues> {
        Arc::clone(&self.events.read())
    }

    #[cfg(test)]
    pub(super) fn database(&self) -> &DB {
        &self.sql.0
    }

    /// The number of migrations that the opening applied.
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
