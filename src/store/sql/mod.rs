//! What both backends have in common, which is nearly everything: the statements and what they mean.
//!
//! - `tasks`: a task, its status, and where on the bus it was published last. `on_bus` says that it is unfinished,
//!   published and not in the outbox: Redis should know of it.
//! - `outbox`: narrow, one row for each unfinished task that is not on the bus.
//! - `results`: what each worker reported, by (task, worker): nobody is credited twice.
//! - `seen`: the keys of tasks that were removed.
//! - `queue_counts`: kept up to date by the same transactions, which touch it last, so that they hold its few rows briefly.
//!
//! Whatever settles or moves a task locks its row first, in the order of ids; keys are inserted in the order of their hashes.
//! Two transactions that run into each other nevertheless end as a deadlock, and the loser is repeated.

mod insert;
mod outbox;
#[cfg(test)]
mod plans;
mod retention;
mod retry;
mod rows;
mod settle;
mod statement;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use async_trait::async_trait;
use sqlx::{ConnectOptions, Connection, Pool, Transaction, migrate::Migrate};

use self::{
    insert::OldKeys,
    outbox::Listed,
    retry::repeating,
    rows::{TASK_COLUMNS, TaskColumns, number, queue_name, status, task_id, worker_name},
    statement::{Session, Statement, lists},
};
use super::{
    Error, Inserted, NewRow, OutboxRow, PAGE_BYTES, Published, PublishedTask, QueueCount, Result, ResultRow, Settled,
    Settlement, Store, TakenBack, TaskDetail, TaskState, Unpublished,
};
use crate::model::{Encoding, Offset, QueueName, ShardId, StoredStatus, TaskId, TaskRow};

/// How long one attempt to connect may take, where we ask why there is no connection.
const ONE_CONNECT: Duration = Duration::from_secs(2);

/// What the two databases write differently. Connections have it.
pub trait Dialect {
    /// Opens a transaction that may write.
    const BEGIN: &'static str;

    /// Behind a select: locks what it found. SQLite has one writer at a time.
    const FOR_UPDATE: &'static str;

    /// Behind a select: reads what is there now, and nobody changes it until the end of the transaction.
    const FOR_SHARE: &'static str;

    /// The server's clock, in milliseconds.
    const NOW_MS: &'static str;

    /// What to do when all connections are in use.
    const BUSY_HINT: &'static str;

    /// A task's id where nothing says which type the question mark has.
    const ID: &'static str;

    /// Behind an insert: rows whose unique keys are taken are left out. `column` is any one of the table.
    fn keep_first(column: &str) -> String;

    /// Such an insert says how many rows it inserted: when all were, nothing needs to be read back.
    const COUNTS_INSERTED: bool;

    /// Behind an insert: where `key` is taken, `column = new value` for each of `columns`.
    fn replace(key: &str, columns: &[&str]) -> String;

    /// Behind an insert: where `key` is taken, the number in `column` is added.
    fn add(key: &str, column: &str) -> String;

    /// Behind a table's name: this index or an error. No query here may scan a table, whatever the planner believes.
    fn by_index(index: &str) -> String;

    /// The same for the primary key, where the planner may take a small table for a cheap scan and lock all of it.
    const BY_PRIMARY_KEY: &'static str;

    /// Around a select that has a `task_id`: sets the columns of each such task from its row.
    fn update_tasks(set: &str) -> [String; 2];
}

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
        migrator: sqlx::migrate::Migrator,
        writers: Pool<DB>,
        readers: Pool<DB>,
    ) -> Result<Self> {
        let before = applied_migrations(&mut *writers.acquire().await?).await?;
        migrator.run(&writers).await?;
        let after = applied_migrations(&mut *writers.acquire().await?).await?;
        Ok(Self { writers, readers, migrated: after - before, old_keys: OldKeys::default() })
    }

    /// How many migrations were applied when it was opened.
    pub fn migrated(&self) -> usize {
        self.migrated
    }

    async fn begin(&self) -> Result<Transaction<'static, DB>> {
        match self.writers.begin_with(DB::Connection::BEGIN).await {
            Err(sqlx::Error::PoolTimedOut) => Err(why_none(&self.writers).await),
            begun => Ok(begun?),
        }
    }

    /// Runs one statement that changes nothing.
    async fn read<T: statement::Columns>(&self, statement: Statement<'_>) -> Result<Vec<T>> {
        repeating(|| async {
            let mut connection = match self.readers.acquire().await {
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

async fn applied_migrations(connection: &mut impl Migrate) -> Result<usize> {
    const TABLE: &str = "_sqlx_migrations";
    connection.ensure_migrations_table(TABLE).await?;
    Ok(connection.list_applied_migrations(TABLE).await?.len())
}

/// Where a page starts: no task has the id of zeros.
fn beyond(after: Option<TaskId>) -> TaskId {
    after.unwrap_or(TaskId(uuid::Uuid::nil()))
}

/// What a transaction changes in `queue_counts`.
#[derive(Default)]
struct Counts(BTreeMap<(QueueName, StoredStatus), i64>);

impl Counts {
    fn added(&mut self, queue: &QueueName) {
        *self.0.entry((queue.clone(), StoredStatus::Unfinished)).or_default() += 1;
    }

    fn moved(&mut self, queue: &QueueName, from: StoredStatus, to: StoredStatus) {
        *self.0.entry((queue.clone(), from)).or_default() -= 1;
        *self.0.entry((queue.clone(), to)).or_default() += 1;
    }

    /// The last step of a transaction.
    async fn store<S: Session>(self, session: &mut S) -> Result<()> {
        let changed: Vec<_> = self.0.into_iter().filter(|(_, change)| *change != 0).collect();
        for changed in statement::pieces(&changed, |_| 0) {
            let rows =
                changed.iter().map(|((queue, status), change)| [queue.into(), (*status).into(), (*change).into()]);
            let statement = Statement::new("INSERT INTO queue_counts (queue, status, count)")
                .values(rows)
                .sql(&S::add("queue, status", "count"));
            session.execute(statement).await?;
        }
        Ok(())
    }
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

    async fn settle(&self, reports: Vec<Settlement>) -> Result<Vec<Settled>> {
        repeating(|| async {
            let mut tx = self.begin().await?;
            let settled = settle::settle(&mut *tx, &reports, &self.old_keys).await?;
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

    async fn counts(&self) -> Result<Vec<QueueCount>> {
        let counts =
            Statement::new("SELECT queue, status, count FROM queue_counts WHERE count <> 0 ORDER BY queue, status");
        let count = |(queue, n, count): (String, i64, i64)| {
            Ok(QueueCount { queue: queue_name(&queue)?, status: status(n)?, count: number(count)? })
        };
        self.read(counts).await?.into_iter().map(count).collect()
    }

    async fn shards(&self) -> Result<Vec<(ShardId, u64)>> {
        let shards = Statement::new("SELECT queue, shard, life FROM shards ORDER BY queue, shard");
        let shard = |(queue, shard, life): (String, i64, i64)| {
            Ok((ShardId { queue: queue_name(&queue)?, number: number(shard)? }, number(life)?))
        };
        self.read(shards).await?.into_iter().map(shard).collect()
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
            let life = next_life(&mut *tx, shard, from).await?;
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

impl<DB: Backend> SqlStore<DB> {
    /// A page of the outbox without what is final, or has no task any more, which is removed.
    async fn outbox_page<'a>(
        &self,
        list: impl Fn(usize) -> Statement<'a> + Send + Sync,
        limit: usize,
        without: &HashSet<TaskId>,
    ) -> Result<Vec<OutboxRow>> {
        loop {
            let listed: Vec<outbox::ListedColumns> = self.read(list(limit + without.len())).await?;
            let listed = listed.into_iter().map(Listed::try_from).collect::<Result<Vec<_>>>()?;
            let page = first_of(listed, limit, without);
            let mut tasks = self.unfinished(&page).await?;
            let (mut rows, mut over) = (Vec::with_capacity(page.len()), Vec::new());
            for row in page {
                match tasks.remove(&row.task) {
                    Some(task) => rows.push(row.with(task)),
                    None => over.push((row.task, row.turn)),
                }
            }
            if !over.is_empty() {
                repeating(|| async {
                    let mut tx = self.begin().await?;
                    outbox::remove_over(&mut *tx, &over).await?;
                    Ok(tx.commit().await?)
                })
                .await?;
            }
            if !rows.is_empty() || over.is_empty() {
                return Ok(rows);
            }
        }
    }

    /// Those tasks of a page that are unfinished.
    async fn unfinished(&self, page: &[Listed]) -> Result<HashMap<TaskId, TaskRow>> {
        let ids: Vec<TaskId> = page.iter().map(|row| row.task).collect();
        let mut tasks = HashMap::with_capacity(ids.len());
        for ids in lists(&ids) {
            for columns in self.read::<outbox::UnfinishedColumns>(outbox::tasks(ids)).await? {
                if !columns.is_final() {
                    let task: TaskRow = columns.task.try_into()?;
                    tasks.insert(task.id, task);
                }
            }
        }
        Ok(tasks)
    }
}

/// The rows up to the one that makes it [`PAGE_BYTES`].
fn first_of(listed: Vec<Listed>, limit: usize, without: &HashSet<TaskId>) -> Vec<Listed> {
    let mut bytes = 0;
    let wanted = listed.into_iter().filter(|row| !without.contains(&row.task)).take(limit);
    let fits = |row: &Listed| {
        let is_room = bytes < PAGE_BYTES;
        bytes += row.bytes;
        is_room
    };
    wanted.take_while(fits).collect()
}

async fn next_life<S: Session>(session: &mut S, shard: &ShardId, from: u64) -> Result<u64> {
    let next = from + 1;
    let add = Statement::new("INSERT INTO shards (queue, shard, life) VALUES (?, ?, ?)")
        .bind(&shard.queue)
        .bind(shard.number)
        .bind(next)
        .sql(&S::keep_first("life"));
    session.execute(add).await?;
    let raise = Statement::new("UPDATE shards SET life = ? WHERE queue = ? AND shard = ? AND life = ?")
        .bind(next)
        .bind(&shard.queue)
        .bind(shard.number)
        .bind(from);
    session.execute(raise).await?;
    let now =
        Statement::new("SELECT life FROM shards WHERE queue = ? AND shard = ?").bind(&shard.queue).bind(shard.number);
    let lives: Vec<(i64,)> = session.fetch(now).await?;
    let (life,) = lives.into_iter().next().ok_or(sqlx::Error::RowNotFound)?;
    number(life)
}

#[derive(sqlx::FromRow)]
struct TaskDetailColumns {
    #[sqlx(flatten)]
    task: TaskColumns,
    status: i64,
    completed: i64,
    attempts: i64,
    reason: String,
    updated_ms: i64,
    unpublished: i64,
}

impl TryFrom<TaskDetailColumns> for TaskDetail {
    type Error = Error;

    fn try_from(columns: TaskDetailColumns) -> Result<Self> {
        Ok(Self {
            task: columns.task.try_into()?,
            status: status(columns.status)?,
            completed: number(columns.completed)?,
            attempts: number(columns.attempts)?,
            reason: columns.reason,
            updated_unix_ms: columns.updated_ms,
            unpublished: columns.unpublished != 0,
        })
    }
}
