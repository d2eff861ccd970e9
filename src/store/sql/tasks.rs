//! Queries about tasks and their results.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;

use super::{
    SqlStore,
    backend::Backend,
    batches,
    counts::{self, CountColumns},
    dialect::Dialect,
    place,
    rows::{
        TASK_COLUMNS, TaskColumns, TaskDetailColumns, number, queue_name, status, task_id,
        worker_name,
    },
    runner::Runner,
    shards,
    statement::{Statement, lists},
    walk::{QUEUES, Walk},
};
use crate::model::{
    Encoding, LeaseNumber, Offset, Priority, QueueName, ShardId, TaskId, TaskResult, TaskRow,
    WorkerName,
};
use crate::store::{
    Place, PublishedTask, QueueCount, Result, StateFor, Stretch, TaskDetail, TaskReads, TaskState,
    Turn, WalkedPage,
};

/// Each id once: an id in two lists would bring its workers twice.
fn distinct(ids: &[TaskId]) -> Vec<TaskId> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    ids
}

const RESULTS: &str =
    "SELECT worker, result, result_encoding, attempt, completed_ms, surplus FROM results WHERE ";
const RESULTS_IN_ORDER: &str = " ORDER BY completed_ms, surplus, worker";

type ResultColumns = (Vec<u8>, Vec<u8>, i64, i64, i64, i64);

fn results_in_order(rows: Vec<ResultColumns>) -> Result<Vec<TaskResult>> {
    let result =
        |(worker, result, encoding, attempt, completed_unix_ms, surplus): ResultColumns| {
            Ok(TaskResult {
                worker: worker_name(worker)?,
                result: result.into(),
                encoding: Encoding::from_number(encoding),
                attempt: number(attempt)?,
                completed_unix_ms,
                surplus: surplus != 0,
            })
        };
    rows.into_iter().map(result).collect()
}

#[async_trait]
impl<DB: Backend> TaskReads for SqlStore<DB> {
    async fn states(&self, ids: &[TaskId]) -> Result<Vec<TaskState>> {
        type Columns = (Vec<u8>, i64, i64, i64, i64, Option<Vec<u8>>);
        let mut states: BTreeMap<TaskId, TaskState> = BTreeMap::new();
        for ids in lists(&distinct(ids)) {
            let credited =
                Statement::new("SELECT id, status, epoch, replicas, priority, worker FROM tasks LEFT JOIN results ON ")
                    .sql(DB::Connection::IS_RESULT_OF)
                    .sql(" AND surplus = 0 WHERE id IN ")
                    .list(ids);
            for (id, stored, epoch, replicas, priority, worker) in
                self.sql.read::<Columns>("states", credited).await?
            {
                let (id, status, epoch) = (task_id(&id)?, status(stored)?, number(epoch)?);
                let (replicas, priority) = (number(replicas)?, Priority::from_number(priority));
                let new = TaskState {
                    id,
                    status,
                    workers: Vec::new(),
                    epoch,
                    replicas,
                    priority,
                };
                let state = states.entry(id).or_insert(new);
                state.workers.extend(worker.map(worker_name).transpose()?);
            }
        }
        Ok(states.into_values().collect())
    }

    async fn states_for(&self, worker: &WorkerName, ids: &[TaskId]) -> Result<Vec<StateFor>> {
        type Columns = (Vec<u8>, String, i64, i64, Option<i64>, Option<i64>);
        let mut states = Vec::new();
        for ids in lists(&distinct(ids)) {
            let found = Statement::new(
                "SELECT id, queue, shard, status, lease_generation, lease_grant FROM tasks LEFT JOIN results ON ",
            )
            .sql(DB::Connection::IS_RESULT_OF)
            .sql(" AND worker = ? WHERE id IN ")
            .bind(worker.as_str())
            .list(ids);
            for (id, queue, shard, stored, generation, grant) in
                self.sql.read::<Columns>("states_for", found).await?
            {
                let completed_under = match generation.zip(grant) {
                    Some((generation, grant)) => Some(LeaseNumber {
                        generation: number(generation)?,
                        grant: number(grant)?,
                    }),
                    None => None,
                };
                let shard = ShardId {
                    queue: queue_name(&queue)?,
                    number: number(shard)?,
                };
                states.push(StateFor {
                    id: task_id(&id)?,
                    shard,
                    status: status(stored)?,
                    completed_under,
                });
            }
        }
        Ok(states)
    }

    async fn unfinished_among(&self, ids: &[TaskId]) -> Result<Vec<TaskId>> {
        let mut unfinished = Vec::new();
        for ids in lists(&distinct(ids)) {
            let found = Statement::new("SELECT id FROM tasks ")
                .sql(DB::Connection::BY_PRIMARY_KEY)
                .sql(" WHERE status = 0 AND id IN ")
                .list(ids);
            unfinished.extend(self.sql.ids("unfinished_among", found).await?);
        }
        Ok(unfinished)
    }

    async fn on_bus(&self, stretch: Stretch<'_>, limit: u32) -> Result<WalkedPage> {
        const NAME: &str = "walk_on_bus";
        let Stretch { queue, after, upto } = stretch;
        let queues = match queue {
            Some(queue) => vec![(queue.clone(), 0)],
            None => {
                let first = after.map_or("", |after| after.queue.as_str());
                let found = counts::queues_from::<DB::Connection>(first, QUEUES + 1);
                let found: Vec<CountColumns> = self.sql.read(NAME, found).await?;
                let counted = |(queue, _, count): CountColumns| {
                    Ok((queue_name(&queue)?, count.max(0) as u64))
                };
                found.into_iter().map(counted).collect::<Result<_>>()?
            }
        };
        let walk = Walk {
            name: NAME,
            queues: &queues,
            after,
            upto: &upto,
        };
        let page = walk
            .page::<_, WalkedColumns>(&self.sql, WALKED, limit as usize, |row| (&row.0, &row.1))
            .await?;
        let mut tasks = BTreeMap::<ShardId, Vec<TaskId>>::new();
        for of_queue in page.rows.chunk_by(|row, next| row.0 == next.0) {
            let queue = queue_name(&of_queue[0].0)?;
            for (_, id, _, shard) in of_queue.iter().filter(|row| row.2 != 0) {
                let shard = ShardId {
                    queue: queue.clone(),
                    number: number(*shard)?,
                };
                tasks.entry(shard).or_default().push(task_id(id)?);
            }
        }
        Ok(WalkedPage {
            tasks,
            next: page.next,
        })
    }

    async fn last_id(&self) -> Result<Option<TaskId>> {
        let last = Statement::new("SELECT id FROM tasks ")
            .sql(DB::Connection::BY_PRIMARY_KEY)
            .sql(" WHERE id <= ? ORDER BY id DESC LIMIT 1")
            .bind(&TaskId::LAST);
        Ok(self.sql.ids("last_id", last).await?.first().copied())
    }

    async fn rows(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>> {
        let mut rows = Vec::with_capacity(ids.len());
        for ids in lists(ids) {
            let statement =
                Statement::new(format!("SELECT {TASK_COLUMNS} FROM tasks WHERE id IN ")).list(ids);
            for columns in self.sql.read::<TaskColumns>("rows", statement).await? {
                rows.push(columns.try_into()?);
            }
        }
        Ok(rows)
    }

    async fn task(&self, id: TaskId) -> Result<Option<TaskDetail>> {
        let task = Statement::new(format!(
            "SELECT {TASK_COLUMNS}, status, completed, attempts, reason, epoch, updated_ms, \
                 (EXISTS (SELECT 1 FROM outbox WHERE task_id = id) OR (on_bus = 1 AND pub_generation = '' AND EXISTS \
                 (SELECT 1 FROM batches WHERE batch = insertion AND generation = ''))) AS unpublished \
             FROM tasks WHERE id = ?"
        ))
        .bind(&id);
        let found: Option<TaskDetailColumns> =
            self.sql.read("task", task).await?.into_iter().next();
        found.map(TryInto::try_into).transpose()
    }

    async fn place(&self, generation: &str, id: TaskId) -> Result<Option<Place>> {
        place::of(&self.sql, generation, id).await
    }

    async fn results(&self, id: TaskId) -> Result<Vec<TaskResult>> {
        let results =
            Statement::new(RESULTS).append(DB::Connection::of_tasks(std::slice::from_ref(&id)));
        results_in_order(
            self.sql
                .read("results", results.sql(RESULTS_IN_ORDER))
                .await?,
        )
    }

    async fn result_sizes(&self, id: TaskId) -> Result<Vec<(String, usize)>> {
        let sizes = Statement::new("SELECT worker, LENGTH(result) FROM results WHERE ")
            .append(DB::Connection::of_tasks(std::slice::from_ref(&id)))
            .sql(RESULTS_IN_ORDER);
        let sizes: Vec<(Vec<u8>, i64)> = self.sql.read("result_sizes", sizes).await?;
        let size = |(worker, bytes)| Ok((worker_name(worker)?, number(bytes)?));
        sizes.into_iter().map(size).collect()
    }

    async fn results_of(&self, id: TaskId, workers: &[String]) -> Result<Vec<TaskResult>> {
        let workers: Vec<&str> = workers.iter().map(String::as_str).collect();
        let results = Statement::new(RESULTS)
            .append(DB::Connection::of_tasks(std::slice::from_ref(&id)))
            .sql(" AND worker IN ")
            .list(&workers)
            .sql(RESULTS_IN_ORDER);
        results_in_order(self.sql.read("results_of", results).await?)
    }

    async fn counts(&self, queues: Option<&[QueueName]>) -> Result<Vec<QueueCount>> {
        let mut counts = Vec::new();
        // All queues are one part, and an empty list of queues is none.
        let parts: Vec<Option<&[QueueName]>> =
            queues.map_or(vec![None], |queues| lists(queues).map(Some).collect());
        for part in parts {
            counts.extend(
                self.sql
                    .read::<CountColumns>("counts", counts::of(part))
                    .await?,
            );
        }
        counts.into_iter().map(QueueCount::try_from).collect()
    }

    async fn unfinished(&self) -> Result<Vec<(QueueName, u64)>> {
        let unfinished = self
            .sql
            .read::<CountColumns>("unfinished", counts::unfinished::<DB::Connection>())
            .await?;
        let count = |columns| QueueCount::try_from(columns).map(|count| (count.queue, count.count));
        unfinished.into_iter().map(count).collect()
    }
}

/// Id, queue, shard, batch, and the place of the task itself.
type PublishedColumns = (Vec<u8>, String, i64, i64, String, i64, i64);

/// The index of unfinished tasks on SQLite has these columns.
const WALKED: &str = "queue, id, on_bus, shard";
type WalkedColumns = (String, Vec<u8>, i64, i64);

const PUBLISHED_NAME: &str = "published";
const PUBLISHED: &str = "id, queue, shard, insertion, pub_generation, pub_major, pub_minor";

/// The condition that a task is on the bus and waits in no batch.
fn published_sql<DB: Backend>() -> String {
    let by_key = DB::Connection::BY_PRIMARY_KEY;
    // No EXISTS, which MariaDB might turn into a join that reads all batches.
    let of_batch = format!("(SELECT generation FROM batches {by_key} WHERE batch = insertion)");
    format!("on_bus = 1 AND (pub_generation <> '' OR COALESCE({of_batch}, 'none') <> '')")
}

pub(super) async fn published_among<DB: Backend>(
    sql: &Runner<DB>,
    generation: &str,
    ids: &[TaskId],
) -> Result<Vec<PublishedTask>> {
    let mut found = Vec::new();
    for ids in lists(ids) {
        let (by_key, published_sql) = (DB::Connection::BY_PRIMARY_KEY, published_sql::<DB>());
        let some =
            format!("SELECT {PUBLISHED} FROM tasks {by_key} WHERE {published_sql} AND id IN ");
        let some = Statement::new(some).list(ids);
        found.extend(sql.read(PUBLISHED_NAME, some).await?);
    }
    with_places(sql, generation, found).await
}

async fn with_places<DB: Backend>(
    sql: &Runner<DB>,
    generation: &str,
    page: Vec<PublishedColumns>,
) -> Result<Vec<PublishedTask>> {
    const NAME: &str = PUBLISHED_NAME;
    let batches: BTreeSet<Turn> = page
        .iter()
        .map(|columns| Turn(columns.3))
        .filter(|turn| turn.is_batch())
        .collect();
    let batches = batches::places_of(sql, NAME, generation, &Vec::from_iter(batches)).await?;
    let published = |(id, queue, shard, batch, at, major, minor): PublishedColumns| {
        let shard = ShardId {
            queue: queue_name(&queue)?,
            number: number(shard)?,
        };
        let own = Offset {
            major: number(major)?,
            minor: number(minor)?,
        };
        let own = (at == generation).then_some(own);
        let of_batch = batches
            .get(&Turn(batch))
            .and_then(|places| places.get(&shard.number))
            .copied();
        Ok(PublishedTask {
            id: task_id(&id)?,
            shard,
            offset: own.max(of_batch),
        })
    };
    let mut page = page
        .into_iter()
        .map(published)
        .collect::<Result<Vec<_>>>()?;
    let of_page: BTreeSet<&ShardId> = page.iter().map(|task| &task.shard).collect();
    let rebuilt = shards::rebuilt_places(sql, NAME, generation, &of_page).await?;
    // A task that came back may have several places. The latest one holds: the task stands at or
    // before it.
    page.iter_mut()
        .for_each(|task| task.offset = task.offset.max(rebuilt.get(&task.shard).copied()));
    Ok(page)
}
