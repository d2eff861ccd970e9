//! The store in SQL: everything that both databases have in common.
//!
//! - `tasks`: a task, its status, and the offset of its last record on the bus, if that is not its batch's. `on_bus`
//!   says that it is unfinished and not in the outbox: Redis knows it, or will when its batch is published.
//! - `batches`: the fresh tasks of one insert; whether they are published, and where.
//! - `outbox`: narrow, one row for each other unfinished task that is not on the bus: scheduled, parked, missing.
//! - `results`: what each worker reported, by (task, worker): no worker gets two credits. In SQLite the task is a
//!   number there, which groups tasks of a shard (ADR 56).
//! - `history`: the attempts that failed.
//! - `seen`: the keys of removed tasks. In SQLite also of stored ones, but for the latest: those are in `new_keys`.
//! - `letters`: dead letters; that of a dead task has its id.
//! - `shards`: the shards that ever were, each with its generation, whether it is closed, whether it is being rebuilt,
//!   and the offset at which the last rebuild published its tasks.
//! - `idempotency_keys`: the idempotency keys of inserts, until the end of their windows.
//! - `jobs`: changes of all tasks of a filter, and how far they have come.
//! - `kept_events`: events until topic `events` has them.
//! - `turned_away`: how many tasks came in and were not stored.
//! - `changes`: what somebody wants of unfinished tasks, until the queue has it; and the deadlines of tasks.
//! - `paused_queues`: the queues of which no worker gets anything.
//! - `tokens`, `acts`: who may do what, and what operators did.
//! - `queue_counts`: each transaction keeps it up to date, in its last step, so that it holds the few rows briefly.
//!
//! A transaction that settles or moves tasks locks their rows first, in the order of ids. Keys are inserted in the
//! order of their hashes. When two transactions conflict nevertheless, a deadlock ends one of them, and it is repeated.

mod access;
mod backend;
mod batches;
mod books;
mod changes;
mod check;
mod columns;
mod counts;
mod deadlines;
mod dialect;
mod events;
mod expired_keys;
mod groups;
mod happened;
mod history;
mod holder;
mod idempotency;
mod insert;
mod jobs;
mod keys;
mod letters;
mod meta;
mod migrate;
mod outbox;
mod owned;
mod pages;
mod pauses;
mod place;
#[cfg(test)]
pub(super) mod plans;
mod progress;
mod rebuild;
mod retention;
mod retry;
mod rows;
mod runner;
mod search;
mod session;
mod settle;
mod shards;
mod statement;
mod tasks;
mod wishes;

use std::{collections::HashSet, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::RwLock;
use uuid::Uuid;

use self::{
    access::{ActColumns, TokenColumns},
    counts::{CountColumns, Counts},
    insert::OldKeys,
    runner::Runner,
    shards::ShardColumns,
    statement::lists,
};
pub(super) use self::{
    backend::{Backend, Work},
    columns::FromRow,
    dialect::Dialect,
    migrate::{MigrationFile, migration_files, run as migrate},
    session::{Columns, Recent, Session},
    statement::{Statement, Value},
};
use super::{
    AddedToken, BroughtForward, Inserted, NewRow, Opening, OutboxRow, Place, Published, PublishedTask, QueueCount,
    RebuildPage, Rebuilding, Rebuilt, Result, Retried, Settled, Settlement, StateFor, Store, Stored, StoredShard,
    TaskDetail, TaskState, Turn, Unpublished,
};
use crate::config::EventQueues;
use crate::model::{
    AccessToken, Act, DeadLetter, LetterId, LetterKind, LetterPage, LetterPages, QueueName, SecretHash, ShardId,
    StoredLetter, TaskId, TaskResult, TaskRow, WorkerName,
};

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
        Self { sql: Runner(database), migrated, old_keys: Arc::default(), events: RwLock::default() }
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

    async fn insert(&self, rows: &[NewRow]) -> Result<Stored<Inserted>> {
        let input = (rows.to_vec(), Arc::clone(&self.old_keys), self.event_queues());
        let insert = self.sql.run("insert", input, |session, (rows, old_keys, events)| {
            Box::pin(async move {
                // Each attempt has a number of its own, which tells what it inserted from what another did.
                let (batch, mut counts) = (batches::new_batch(), Counts::with_events(events));
                let rows: Vec<&NewRow> = rows.iter().collect();
                let answers = insert::insert(session, &rows, batch, &mut counts, old_keys).await?;
                counts.store(session).await?;
                Ok(Stored { answers, batch })
            })
        });
        insert.await
    }

    async fn settle(&self, reports: &[Settlement]) -> Result<Stored<Settled>> {
        let input = (reports.to_vec(), Arc::clone(&self.old_keys), self.event_queues());
        let settle = self.sql.run("settle", input, |session, (reports, old_keys, events)| {
            Box::pin(async move {
                let batch = batches::new_batch();
                let answers = settle::settle(session, reports, batch, old_keys, events).await?;
                Ok(Stored { answers, batch })
            })
        });
        settle.await
    }

    async fn mark_published(&self, generation: &str, published: &[Published]) -> Result<()> {
        let mark = self.sql.run("mark_published", (generation.to_owned(), published.to_vec()), |session, input| {
            Box::pin(outbox::mark_published(session, &input.0, &input.1))
        });
        mark.await
    }

    async fn unpublish(&self, ids: &[TaskId], why: Unpublished) -> Result<()> {
        let unpublish = self.sql.run("unpublish", (ids.to_vec(), why), |session, (ids, why)| {
            Box::pin(outbox::unpublish(session, ids, *why, 0))
        });
        unpublish.await
    }

    async fn put_off(&self, ids: &[TaskId], until_unix_ms: i64) -> Result<()> {
        let put_off = self.sql.run("put_off", (ids.to_vec(), until_unix_ms), |session, (ids, until)| {
            Box::pin(outbox::unpublish(session, ids, Unpublished::Fresh, *until))
        });
        put_off.await
    }

    async fn due(&self, now_unix_ms: i64, limit: usize, without: &HashSet<TaskId>) -> Result<Vec<OutboxRow>> {
        pages::page(&self.sql, pages::Of::Due(now_unix_ms), limit, without).await
    }

    async fn bring_forward(
        &self,
        later_than_unix_ms: i64,
        to_unix_ms: i64,
        after: Option<(i64, TaskId)>,
        limit: usize,
    ) -> Result<BroughtForward> {
        pages::bring_forward(&self.sql, later_than_unix_ms, to_unix_ms, after, limit).await
    }

    async fn oldest_waiting(&self, now_unix_ms: i64) -> Result<Vec<(QueueName, i64)>> {
        pages::oldest_waiting(&self.sql, now_unix_ms).await
    }

    async fn parked_queues(&self) -> Result<Vec<QueueName>> {
        pages::parked_queues(&self.sql).await
    }

    async fn parked(&self, queue: &QueueName, limit: usize, without: &HashSet<TaskId>) -> Result<Vec<OutboxRow>> {
        pages::page(&self.sql, pages::Of::Parked(queue), limit, without).await
    }

    async fn states(&self, ids: &[TaskId]) -> Result<Vec<TaskState>> {
        tasks::states(&self.sql, ids).await
    }

    async fn states_for(&self, worker: &WorkerName, ids: &[TaskId]) -> Result<Vec<StateFor>> {
        tasks::states_for(&self.sql, worker, ids).await
    }

    async fn published(&self, generation: &str, after: Option<TaskId>, limit: u32) -> Result<Vec<PublishedTask>> {
        tasks::published(&self.sql, generation, after, limit).await
    }

    async fn remove_batches(&self, after: Option<Turn>, limit: u32) -> Result<Option<Turn>> {
        pages::remove_settled_batches(&self.sql, after, limit).await
    }

    async fn remove_finished(&self, age: Duration, limit: u32) -> Result<u64> {
        let ids = self.sql.ids("remove_finished", retention::finished::<DB::Connection>(age, limit)).await?;
        if ids.is_empty() {
            return Ok(0);
        }
        let remove = self.sql.run("remove_finished", (ids, age), |session, (ids, age)| {
            Box::pin(retention::remove(session, ids, retention::Which::Old(*age)))
        });
        remove.await
    }

    async fn keep_letters(&self, letters: &[DeadLetter]) -> Result<()> {
        let letters: Vec<letters::NewLetter> = letters.iter().map(Into::into).collect();
        let keep = self.sql.run("keep_letters", letters, |session, letters| Box::pin(letters::add(session, letters)));
        keep.await
    }

    async fn letters(&self, pages: &LetterPages) -> Result<LetterPage> {
        letters::list(&self.sql, pages).await
    }

    async fn letter(&self, id: LetterId) -> Result<Option<StoredLetter>> {
        letters::one(&self.sql, id).await
    }

    async fn letter_kinds(&self, ids: &[LetterId]) -> Result<Vec<(LetterId, LetterKind)>> {
        letters::kinds(&self.sql, ids).await
    }

    async fn retry(&self, ids: &[TaskId], now_unix_ms: i64) -> Result<Vec<Retried>> {
        let input = (ids.to_vec(), now_unix_ms, self.event_queues());
        let retry = self
            .sql
            .run("retry", input, |session, (ids, now, events)| Box::pin(letters::retry(session, ids, *now, events)));
        retry.await
    }

    async fn purge(&self, ids: &[LetterId]) -> Result<u64> {
        self.sql.run("purge", ids.to_vec(), |session, ids| Box::pin(letters::purge(session, ids))).await
    }

    async fn remove_old_letters(&self, age: Duration, limit: u32) -> Result<u64> {
        const NAME: &str = "remove_old_letters";
        let ids = self.sql.ids(NAME, letters::old::<DB::Connection>(age, limit)).await?;
        if ids.is_empty() {
            return Ok(0);
        }
        self.sql.run(NAME, ids, |session, ids| Box::pin(letters::purge(session, ids))).await
    }

    async fn rows(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>> {
        tasks::rows(&self.sql, ids).await
    }

    async fn task(&self, id: TaskId) -> Result<Option<TaskDetail>> {
        tasks::task(&self.sql, id).await
    }

    async fn place(&self, generation: &str, id: TaskId) -> Result<Option<Place>> {
        place::of(&self.sql, generation, id).await
    }

    async fn results(&self, id: TaskId) -> Result<Vec<TaskResult>> {
        tasks::results(&self.sql, id).await
    }

    async fn results_bytes(&self, id: TaskId) -> Result<usize> {
        tasks::results_bytes(&self.sql, id).await
    }

    async fn counts(&self, queues: Option<&[QueueName]>) -> Result<Vec<QueueCount>> {
        let mut counts = Vec::new();
        // All queues are one part, and an empty list of queues is none.
        let parts: Vec<Option<&[QueueName]>> = queues.map_or(vec![None], |queues| lists(queues).map(Some).collect());
        for part in parts {
            counts.extend(self.sql.read::<CountColumns>("counts", counts::of(part)).await?);
        }
        counts.into_iter().map(QueueCount::try_from).collect()
    }

    async fn unfinished(&self) -> Result<Vec<(QueueName, u64)>> {
        let unfinished = self.sql.read::<CountColumns>("unfinished", counts::unfinished::<DB::Connection>()).await?;
        let count = |columns| QueueCount::try_from(columns).map(|count| (count.queue, count.count));
        unfinished.into_iter().map(count).collect()
    }

    async fn shards(&self, changed_after: Option<u64>) -> Result<Vec<StoredShard>> {
        let statement = changed_after.map_or_else(shards::all_open, shards::changed::<DB::Connection>);
        self.sql.read::<ShardColumns>("shards", statement).await?.into_iter().map(StoredShard::try_from).collect()
    }

    async fn open_shards(&self, shards: &[ShardId]) -> Result<Vec<Opening>> {
        let open =
            self.sql.run("open_shards", shards.to_vec(), |session, shards| Box::pin(shards::open(session, shards)));
        open.await
    }

    async fn close_shard(&self, shard: &ShardId, generation: u64) -> Result<bool> {
        let close = self.sql.run("close_shard", (shard.clone(), generation), |session, (shard, generation)| {
            Box::pin(shards::close(session, shard, *generation))
        });
        close.await
    }

    async fn begin_rebuild(&self, lost: &[(ShardId, u64)]) -> Result<Vec<u64>> {
        let begin =
            self.sql.run("begin_rebuild", lost.to_vec(), |session, lost| Box::pin(rebuild::begin(session, lost)));
        begin.await
    }

    async fn rebuilding(&self) -> Result<Rebuilding> {
        rebuild::rebuilding(&self.sql).await
    }

    async fn rebuild_page(&self, of: &Rebuilding, after: Option<TaskId>, limit: u32) -> Result<RebuildPage> {
        rebuild::page(&self.sql, of, after, limit).await
    }

    async fn end_rebuild(&self, generation: &str, rebuilt: &[Rebuilt]) -> Result<()> {
        let input = (generation.to_owned(), rebuilt.to_vec());
        let end = self.sql.run("end_rebuild", input, |session, (generation, rebuilt)| {
            Box::pin(rebuild::end(session, generation, rebuilt))
        });
        end.await
    }

    async fn tokens_version(&self) -> Result<u64> {
        meta::read(&self.sql, access::VERSION, access::VERSION).await
    }

    async fn tokens(&self) -> Result<Vec<(SecretHash, AccessToken)>> {
        let tokens = self.sql.read::<TokenColumns>("tokens", access::tokens()).await?;
        Ok(tokens.into_iter().filter_map(access::token_or_none).collect())
    }

    async fn add_token(&self, hash: SecretHash, token: &AccessToken, act: &Act) -> Result<AddedToken> {
        let add = self.sql.run("add_token", (hash, token.clone(), act.clone()), |session, (hash, token, act)| {
            Box::pin(access::add(session, hash, token, act))
        });
        add.await
    }

    async fn revoke_token(&self, name: &str, act: &Act) -> Result<bool> {
        let revoke = self.sql.run("revoke_token", (name.to_owned(), act.clone()), |session, (name, act)| {
            Box::pin(access::revoke(session, name, act))
        });
        revoke.await
    }

    async fn acts(&self, before: Option<Uuid>, limit: u32) -> Result<Vec<Act>> {
        let acts = self.sql.read::<ActColumns>("acts", access::acts(before.as_ref(), limit)).await?;
        acts.into_iter().map(access::act).collect()
    }

    async fn close(&self) {
        self.sql.0.close().await;
    }
}
