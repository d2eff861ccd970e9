//! What both backends have in common, which is nearly everything: the statements and what they mean.
//!
//! - `tasks`: a task, its status, and where on the bus it was published last. `on_bus` says that it is unfinished,
//!   published and not in the outbox: Redis should know of it.
//! - `outbox`: narrow, one row for each unfinished task that is not on the bus.
//! - `results`: what each worker reported, by (task, worker): nobody is credited twice.
//! - `seen`: the keys of tasks that were removed.
//! - `shards`: which there are, in which life, and which are closed.
//! - `queue_counts`: kept up to date by the same transactions, which touch it last, so that they hold its few rows briefly.
//!
//! Whatever settles or moves a task locks its row first, in the order of ids; keys are inserted in the order of their hashes.
//! Two transactions that run into each other nevertheless end as a deadlock, and the loser is repeated.

mod counts;
mod dialect;
mod insert;
mod migrate;
mod outbox;
mod pages;
#[cfg(test)]
mod plans;
mod pooled;
mod retention;
mod retry;
mod rows;
mod settle;
mod shards;
mod statement;

use std::{
    collections::{BTreeMap, HashSet},
    time::Duration,
};

use async_trait::async_trait;
use sqlx::{ConnectOptions, Connection, Pool, migrate::Migrate};

pub use self::dialect::Dialect;
pub(super) use self::migrate::{MigrationFile, migration_files};
use self::{
    counts::{CountColumns, Counts},
    insert::OldKeys,
    pooled::{Pooled, Tx},
    retry::repeating,
    rows::{TASK_COLUMNS, TaskColumns, TaskDetailColumns, key_hash, number, queue_name, status, task_id, worker_name},
    shards::ShardColumns,
    statement::{Session, Statement, lists},
};
use super::{
    BroughtForward, Error, Inserted, NewRow, Opening, OutboxRow, Published, PublishedTask, QueueCount, Result,
    ResultRow, Settled, Settlement, StateFor, Store, StoredShard, TakenBack, TaskDetail, TaskState, Unpublished,
};
use crate::model::{Encoding, KeyHash, LeaseNumber, Offset, QueueName, ShardId, TaskId, TaskRow, WorkerName};

/// How long one attempt to connect may take, where we ask why there is no connection.
const ONE_CONNECT: Duration = Duration::from_secs(2);

/// A store in SQL.
pub struct SqlStore<DB: sqlx::Database> {
    writers: Pool<DB>,
    readers: Pool<DB>,
    migrated: usize,
    old_keys: OldKeys,
}

/// A database that the store can live in.
pub trait Backend: sqlx::Database<Connection: Session + Migrate> {}
impl<DB> Backend for DB where DB: sqlx::Database<Connection: Session + Migrate> {}

impl<DB: Backend> SqlStore<DB> {
    /// Brings the database up to date.
    pub(super) async fn migrate(
        migrations: &'static [MigrationFile],
        writers: Pool<DB>,
        readers: Pool<DB>,
    ) -> Result<Self> {
        let migrated = migrate::run(migrations, &writers).await?;
        Ok(Self { writers, readers, migrated, old_keys: OldKeys::default() })
    }

    /// How many migrations were applied when it was opened.
    pub fn migrated(&self) -> usize {
        self.migrated
    }

    async fn begin(&self) -> Result<Tx<DB>> {
        match Tx::begin(&self.writers).await {
            Err(sqlx::Error::PoolTimedOut) => Err(why_none(&self.writers).await),
            begun => Ok(begun?),
        }
    }

    /// Runs one statement that changes nothing.
    async fn read<T: statement::Columns>(&self, statement: Statement<'_>) -> Result<Vec<T>> {
        repeating(|| async {
            let mut connection = match Pooled::of(&self.readers).await {
                Err(sqlx::Error::PoolTimedOut) => return Err(why_none(&self.readers).await),
                acquired => acquired?,
            };
            Ok(connection.fetch(statement.clone()).await?)
        })
        .await
    }
}

/// Why the pool had no connection to give. It does not say, so one beside it is tried.
async fn why_none<DB: Backend>(pool: &Pool<DB>) -> Error {
    let options = pool.connect_options();
    match tokio::time::timeout(ONE_CONNECT, options.connect()).await {
        Ok(Ok(connection)) => {
            // Half a second's guest: how it leaves does not matter.
            drop(connection.close().await);
            let (connections, waited) = (pool.options().get_max_connections(), pool.options().get_acquire_timeout());
            Error::Busy { connections, waited, hint: DB::Connection::BUSY_HINT }
        }
        Ok(Err(error)) => error.into(),
        Err(_) => Error::Transient(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())),
    }
}

/// No task has it.
const LAST_ID: TaskId = TaskId(uuid::Uuid::max());

/// Where a page starts: no task has the id of zeros.
fn beyond(after: Option<TaskId>) -> TaskId {
    after.unwrap_or(TaskId(uuid::Uuid::nil()))
}

#[async_trait]
impl<DB: Backend> Store for SqlStore<DB> {
    async fn store_id(&self) -> Result<String> {
        let rows = self.read(Statement::new("SELECT value FROM meta WHERE name = 'store_id'")).await?;
        let (id,) = rows.into_iter().next().ok_or_else(|| rows::corrupt("no store_id".into()))?;
        Ok(id)
    }

    async fn insert(&self, rows: &[NewRow]) -> Result<Vec<Inserted>> {
        let rows: Vec<&NewRow> = rows.iter().collect();
        repeating(|| async {
            let mut tx = self.begin().await?;
            let mut counts = Counts::default();
            let inserted = insert::insert(&mut *tx, &rows, &mut counts, &self.old_keys).await?;
            counts.store(&mut *tx).await?;
            tx.commit().await?;
            Ok(inserted)
        })
        .await
    }

    async fn settle(&self, reports: &[Settlement]) -> Result<Vec<Settled>> {
        repeating(|| async {
            let mut tx = self.begin().await?;
            let settled = settle::settle(&mut *tx, reports, &self.old_keys).await?;
            tx.commit().await?;
            Ok(settled)
        })
        .await
    }

    async fn mark_published(&self, generation: &str, published: &[Published]) -> Result<()> {
        repeating(|| async {
            let mut tx = self.begin().await?;
            for published in published {
                outbox::mark_published(&mut *tx, generation, published).await?;
            }
            Ok(tx.commit().await?)
        })
        .await
    }

    async fn unpublish(&self, ids: &[TaskId], why: Unpublished) -> Result<()> {
        repeating(|| async {
            let mut tx = self.begin().await?;
            outbox::unpublish(&mut *tx, ids, why).await?;
            Ok(tx.commit().await?)
        })
        .await
    }

    async fn due(&self, now_unix_ms: i64, limit: usize, without: &HashSet<TaskId>) -> Result<Vec<OutboxRow>> {
        let page = |listed| outbox::due::<DB::Connection>(now_unix_ms, listed);
        self.outbox_page(page, limit, without).await
    }

    async fn bring_forward(
        &self,
        later_than_unix_ms: i64,
        to_unix_ms: i64,
        after: Option<(i64, TaskId)>,
        limit: usize,
    ) -> Result<BroughtForward> {
        let (due, task) = after.unwrap_or((later_than_unix_ms, LAST_ID));
        let page = self.read(outbox::later::<DB::Connection>(due, &task, limit)).await?;
        let page = page.into_iter().map(outbox::later_row).collect::<Result<Vec<_>>>()?;
        let next = (page.len() == limit).then(|| page.last().map(|row| (row.due_unix_ms, row.task))).flatten();
        let fresh = page.iter().filter(|row| row.unpublished == Unpublished::Fresh).map(|row| row.task);
        let fresh: Vec<TaskId> = fresh.collect();
        if fresh.is_empty() {
            return Ok(BroughtForward { rows: 0, next });
        }
        repeating(|| async {
            let mut tx = self.begin().await?;
            let rows = outbox::bring_forward(&mut *tx, &fresh, later_than_unix_ms, to_unix_ms).await?;
            tx.commit().await?;
            Ok(BroughtForward { rows, next })
        })
        .await
    }

    async fn oldest_waiting(&self, now_unix_ms: i64) -> Result<Vec<(QueueName, i64)>> {
        let mut oldest: BTreeMap<QueueName, TaskId> = BTreeMap::new();
        let mut waits = |queue: QueueName, id: TaskId| {
            oldest.entry(queue).and_modify(|oldest| *oldest = id.min(*oldest)).or_insert(id);
        };
        for (queue, id) in self.read::<(String, Vec<u8>)>(outbox::oldest_due::<DB::Connection>(now_unix_ms)).await? {
            waits(queue_name(&queue)?, task_id(&id)?);
        }
        for queue in self.parked_queues().await? {
            for (id,) in self.read::<(Option<Vec<u8>>,)>(outbox::oldest_parked::<DB::Connection>(&queue)).await? {
                if let Some(id) = id {
                    waits(queue.clone(), task_id(&id)?);
                }
            }
        }
        Ok(oldest.into_iter().map(|(queue, id)| (queue, id.created_unix_ms())).collect())
    }

    async fn parked_queues(&self) -> Result<Vec<QueueName>> {
        let mut queues: Vec<QueueName> = Vec::new();
        // From one queue to the next: a queue may have millions of rows.
        while let [(Some(queue),)] =
            &self.read::<(Option<String>,)>(outbox::next_parked_queue::<DB::Connection>(queues.last())).await?[..]
        {
            queues.push(queue_name(queue)?);
        }
        Ok(queues)
    }

    async fn parked(&self, queue: &QueueName, limit: usize, without: &HashSet<TaskId>) -> Result<Vec<OutboxRow>> {
        let page = |listed| outbox::parked::<DB::Connection>(queue, listed);
        self.outbox_page(page, limit, without).await
    }

    async fn states(&self, ids: &[TaskId]) -> Result<Vec<TaskState>> {
        let mut states: BTreeMap<TaskId, TaskState> = BTreeMap::new();
        // An id in two lists would bring its workers twice.
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        for ids in lists(&ids) {
            let credited = Statement::new(
                "SELECT id, status, worker FROM tasks LEFT JOIN results ON task_id = id AND surplus = 0 WHERE id IN ",
            )
            .list(ids);
            for (id, number, worker) in self.read::<(Vec<u8>, i64, Option<Vec<u8>>)>(credited).await? {
                let (id, status) = (task_id(&id)?, status(number)?);
                let state = states.entry(id).or_insert(TaskState { id, status, workers: Vec::new() });
                state.workers.extend(worker.map(worker_name).transpose()?);
            }
        }
        Ok(states.into_values().collect())
    }

    async fn states_for(&self, worker: &WorkerName, ids: &[TaskId]) -> Result<Vec<StateFor>> {
        let mut states = Vec::new();
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        for ids in lists(&ids) {
            let found = Statement::new(
                "SELECT id, status, lease_generation, lease_grant \
                 FROM tasks LEFT JOIN results ON task_id = id AND worker = ? WHERE id IN ",
            )
            .bind(worker.as_str())
            .list(ids);
            for (id, number, generation, grant) in self.read::<(Vec<u8>, i64, Option<i64>, Option<i64>)>(found).await? {
                let completed_under = match generation.zip(grant) {
                    Some((generation, grant)) => {
                        Some(LeaseNumber { generation: rows::number(generation)?, grant: rows::number(grant)? })
                    }
                    None => None,
                };
                states.push(StateFor { id: task_id(&id)?, status: status(number)?, completed_under });
            }
        }
        Ok(states)
    }

    async fn published(&self, generation: &str, after: Option<TaskId>, limit: u32) -> Result<Vec<PublishedTask>> {
        let after = beyond(after);
        let page = Statement::new("SELECT id, queue, shard, pub_generation, pub_major, pub_minor FROM tasks ")
            .sql(&DB::Connection::by_index("tasks_on_bus"))
            .sql(" WHERE on_bus = 1 AND id > ? ORDER BY id LIMIT ?")
            .bind(&after)
            .bind(limit);
        let published = |(id, queue, shard, at, major, minor): (Vec<u8>, String, i64, String, i64, i64)| {
            let shard = ShardId { queue: queue_name(&queue)?, number: number(shard)? };
            let offset = Offset { major: number(major)?, minor: number(minor)? };
            Ok(PublishedTask { id: task_id(&id)?, shard, offset: (at == generation).then_some(offset) })
        };
        self.read(page).await?.into_iter().map(published).collect()
    }

    async fn unpublish_shard(&self, shard: &ShardId, after: Option<TaskId>, limit: u32) -> Result<Option<TakenBack>> {
        let after = beyond(after);
        let page = Statement::new("SELECT id, completed FROM tasks ")
            .sql(&DB::Connection::by_index("tasks_on_bus"))
            .sql(" WHERE on_bus = 1 AND id > ? AND queue = ? AND shard = ? ORDER BY id LIMIT ?")
            .bind(&after)
            .bind(&shard.queue)
            .bind(shard.number)
            .bind(limit);
        let page: Vec<(Vec<u8>, i64)> = self.read(page).await?;
        let ids = page.iter().map(|(id, _)| task_id(id)).collect::<Result<Vec<_>>>()?;
        // Whatever became of them since is seen again under the lock.
        self.unpublish(&ids, Unpublished::Missing).await?;
        let credited = page.iter().map(|(_, completed)| u64::try_from(*completed).unwrap_or(0)).sum();
        Ok(ids.last().map(|last| TakenBack { last: *last, tasks: ids.len() as u64, credited }))
    }

    async fn rows(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>> {
        let mut rows = Vec::with_capacity(ids.len());
        for ids in lists(ids) {
            let statement = Statement::new(format!("SELECT {TASK_COLUMNS} FROM tasks WHERE id IN ")).list(ids);
            for columns in self.read::<TaskColumns>(statement).await? {
                rows.push(columns.try_into()?);
            }
        }
        Ok(rows)
    }

    async fn owners(&self, keys: &[KeyHash]) -> Result<Vec<(KeyHash, TaskId)>> {
        let mut owners = Vec::new();
        for keys in lists(keys) {
            for text in [
                "SELECT key_hash, id FROM tasks WHERE key_hash IN ",
                "SELECT key_hash, task_id FROM seen WHERE key_hash IN ",
            ] {
                for (hash, id) in self.read::<(Vec<u8>, Vec<u8>)>(Statement::new(text).list(keys)).await? {
                    owners.push((key_hash(&hash)?, task_id(&id)?));
                }
            }
        }
        Ok(owners)
    }

    async fn task(&self, id: TaskId) -> Result<Option<TaskDetail>> {
        let task = Statement::new(format!(
            "SELECT {TASK_COLUMNS}, status, completed, attempts, reason, updated_ms, \
                 EXISTS (SELECT 1 FROM outbox WHERE task_id = id) AS unpublished FROM tasks WHERE id = ?"
        ))
        .bind(&id);
        let found: Option<TaskDetailColumns> = self.read(task).await?.into_iter().next();
        found.map(TryInto::try_into).transpose()
    }

    async fn results(&self, id: TaskId) -> Result<Vec<ResultRow>> {
        let results = Statement::new(
            "SELECT worker, result, result_encoding, attempt, completed_ms, surplus FROM results WHERE task_id = ? \
                 ORDER BY completed_ms, surplus, worker",
        )
        .bind(&id);
        type Columns = (Vec<u8>, Vec<u8>, i64, i64, i64, i64);
        let result = |(worker, result, encoding, attempt, completed_unix_ms, surplus): Columns| {
            Ok(ResultRow {
                worker: worker_name(worker)?,
                result: result.into(),
                encoding: Encoding::from_number(encoding),
                attempt: number(attempt)?,
                completed_unix_ms,
                surplus: surplus != 0,
            })
        };
        self.read(results).await?.into_iter().map(result).collect()
    }

    async fn results_bytes(&self, id: TaskId) -> Result<usize> {
        let lengths = Statement::new("SELECT LENGTH(result) FROM results WHERE task_id = ?").bind(&id);
        let lengths: Vec<(i64,)> = self.read(lengths).await?;
        lengths.into_iter().map(|(length,)| number::<usize>(length)).sum()
    }

    async fn counts(&self, queues: Option<&[QueueName]>) -> Result<Vec<QueueCount>> {
        let mut counts = Vec::new();
        // None is one list, and no queue is none.
        let parts: Vec<Option<&[QueueName]>> = queues.map_or(vec![None], |queues| lists(queues).map(Some).collect());
        for part in parts {
            counts.extend(self.read::<CountColumns>(counts::of(part)).await?);
        }
        counts.into_iter().map(QueueCount::try_from).collect()
    }

    async fn unfinished(&self) -> Result<Vec<(QueueName, u64)>> {
        let unfinished: Vec<CountColumns> = self.read(counts::unfinished::<DB::Connection>()).await?;
        let count = |columns| QueueCount::try_from(columns).map(|count| (count.queue, count.count));
        unfinished.into_iter().map(count).collect()
    }

    async fn shards(&self, changed_after: Option<u64>) -> Result<Vec<StoredShard>> {
        let statement = changed_after.map_or_else(shards::all_open, shards::changed::<DB::Connection>);
        self.read::<ShardColumns>(statement).await?.into_iter().map(StoredShard::try_from).collect()
    }

    async fn open_shards(&self, shards: &[ShardId]) -> Result<Vec<Opening>> {
        repeating(|| async {
            let mut tx = self.begin().await?;
            let opened = shards::open(&mut *tx, shards).await?;
            tx.commit().await?;
            Ok(opened)
        })
        .await
    }

    async fn close_shard(&self, shard: &ShardId, life: u64) -> Result<bool> {
        repeating(|| async {
            let mut tx = self.begin().await?;
            let closed = shards::close(&mut *tx, shard, life).await?;
            tx.commit().await?;
            Ok(closed)
        })
        .await
    }

    async fn remove_finished(&self, age: Duration, limit: u32) -> Result<u64> {
        let page = self.read(retention::finished::<DB::Connection>(age, limit)).await?;
        let ids = page.into_iter().map(|(id,): (Vec<u8>,)| task_id(&id)).collect::<Result<Vec<_>>>()?;
        if ids.is_empty() {
            return Ok(0);
        }
        repeating(|| async {
            let mut tx = self.begin().await?;
            let removed = retention::remove(&mut *tx, &ids, age).await?;
            tx.commit().await?;
            Ok(removed)
        })
        .await
    }

    async fn next_life(&self, shard: &ShardId, from: u64) -> Result<u64> {
        repeating(|| async {
            let mut tx = self.begin().await?;
            let life = shards::next_life(&mut *tx, shard, from).await?;
            tx.commit().await?;
            Ok(life)
        })
        .await
    }

    async fn close(&self) {
        self.readers.close().await;
        self.writers.close().await;
    }
}
