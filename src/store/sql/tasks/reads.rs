//! Queries about tasks and their results.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    model::{
        Encoding, LeaseNumber, OwnedTask, Priority, QueueName, ShardId, TaskId, TaskResult,
        TaskRow, WorkerName,
    },
    store::{
        QueueCount, Result, StateFor, TaskDetail, TaskState,
        sql::{
            backend::Backend,
            dialect::Dialect,
            queue_counts::{self, CountColumns},
            rows::{
                TASK_COLUMNS, TaskColumns, TaskDetailColumns, number, queue_name, status, task_id,
                worker_name,
            },
            runner::Runner,
            statement::{Statement, lists},
            tasks::retention,
        },
    },
};

/// Removes repetitions, because an id in two lists would return its workers twice.
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

pub(crate) async fn states<DB: Backend>(
    sql: &Runner<DB>,
    ids: &[TaskId],
) -> Result<Vec<TaskState>> {
    type Columns = (Vec<u8>, i64, i64, i64, i64, i64, Option<Vec<u8>>);
    let mut states: BTreeMap<TaskId, TaskState> = BTreeMap::new();
    for ids in lists(&distinct(ids)) {
        let credited = Statement::new(
            "SELECT id, status, epoch, replicas, priority, \
             CASE WHEN COALESCE(sequence, '') = '' THEN 0 ELSE \
             (SELECT COUNT(*) FROM outbox WHERE outbox.task_id = tasks.id AND outbox.state = 5) END AS is_behind, \
             worker FROM tasks LEFT JOIN results ON ",
        )
        .sql(DB::Connection::IS_RESULT_OF)
        .sql(" AND surplus = 0 WHERE id IN ")
        .list(ids);
        for (id, stored, epoch, replicas, priority, behind, worker) in
            sql.read::<Columns>("states", credited).await?
        {
            let (id, status, epoch) = (task_id(&id)?, status(stored)?, number(epoch)?);
            let (replicas, priority) = (number(replicas)?, Priority::from_number(priority));
            let new = TaskState {
                id,
                status,
                workers: Vec::new(),
                epoch,
                is_behind: behind != 0,
                replicas,
                priority,
            };
            let state = states.entry(id).or_insert(new);
            state.workers.extend(worker.map(worker_name).transpose()?);
        }
    }
    Ok(states.into_values().collect())
}

pub(crate) async fn states_for<DB: Backend>(
    sql: &Runner<DB>,
    worker: &WorkerName,
    ids: &[TaskId],
) -> Result<Vec<StateFor>> {
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
            sql.read::<Columns>("states_for", found).await?
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

pub(crate) async fn unfinished_among<DB: Backend>(
    sql: &Runner<DB>,
    ids: &[TaskId],
) -> Result<Vec<TaskId>> {
    let mut unfinished = Vec::new();
    for ids in lists(&distinct(ids)) {
        let found = Statement::new("SELECT id FROM tasks ")
            .sql(DB::Connection::BY_PRIMARY_KEY)
            .sql(" WHERE status = 0 AND id IN ")
            .list(ids);
        unfinished.extend(sql.ids("unfinished_among", found).await?);
    }
    Ok(unfinished)
}

pub(crate) async fn lately_final<DB: Backend>(
    sql: &Runner<DB>,
    ids: &[TaskId],
    age: Duration,
) -> Result<Vec<TaskId>> {
    let mut lately = Vec::new();
    for ids in lists(ids) {
        let statement = Statement::new("SELECT id FROM tasks WHERE status <> 0 AND updated_ms > ")
            .append(retention::before::<DB::Connection>(age))
            .sql(" AND id IN ")
            .list(ids);
        lately.extend(sql.ids("lately_final", statement).await?);
    }
    Ok(lately)
}

pub(crate) async fn queues_of<DB: Backend>(
    sql: &Runner<DB>,
    ids: &[TaskId],
) -> Result<Vec<OwnedTask>> {
    let mut owned = Vec::with_capacity(ids.len());
    for ids in lists(ids) {
        let found = Statement::new("SELECT id, queue FROM tasks WHERE id IN ").list(ids);
        for (id, queue) in sql.read::<(Vec<u8>, String)>("queues_of", found).await? {
            owned.push((task_id(&id)?, queue_name(&queue)?));
        }
    }
    Ok(owned)
}

pub(crate) async fn rows<DB: Backend>(sql: &Runner<DB>, ids: &[TaskId]) -> Result<Vec<TaskRow>> {
    let mut rows = Vec::with_capacity(ids.len());
    for ids in lists(ids) {
        let statement =
            Statement::new(format!("SELECT {TASK_COLUMNS} FROM tasks WHERE id IN ")).list(ids);
        for columns in sql.read::<TaskColumns>("rows", statement).await? {
            rows.push(columns.try_into()?);
        }
    }
    Ok(rows)
}

pub(crate) async fn task<DB: Backend>(sql: &Runner<DB>, id: TaskId) -> Result<Option<TaskDetail>> {
    detail(sql, id, TASK_COLUMNS).await
}

pub(crate) async fn brief_task<DB: Backend>(
    sql: &Runner<DB>,
    id: TaskId,
) -> Result<Option<TaskDetail>> {
    let columns = TASK_COLUMNS
        .replace(" payload, ", " X'' AS payload, ")
        .replace(" headers, ", " '[]' AS headers, ");
    detail(sql, id, &columns).await
}

async fn detail<DB: Backend>(
    sql: &Runner<DB>,
    id: TaskId,
    columns: &str,
) -> Result<Option<TaskDetail>> {
    let task = Statement::new(format!(
        "SELECT {columns}, status, completed, attempts, reason, epoch, updated_ms, \
             (EXISTS (SELECT 1 FROM outbox WHERE task_id = id) OR (on_bus = 1 AND pub_generation = '' AND EXISTS \
             (SELECT 1 FROM batches WHERE batch = insertion AND generation = ''))) AS unpublished, \
         tree AS in_tree \
         FROM tasks WHERE id = ?"
    ))
    .bind(&id);
    let found: Option<TaskDetailColumns> = sql.read("task", task).await?.into_iter().next();
    found.map(TryInto::try_into).transpose()
}

pub(crate) async fn results<DB: Backend>(sql: &Runner<DB>, id: TaskId) -> Result<Vec<TaskResult>> {
    let results =
        Statement::new(RESULTS).append(DB::Connection::of_tasks(std::slice::from_ref(&id)));
    results_in_order(sql.read("results", results.sql(RESULTS_IN_ORDER)).await?)
}

pub(crate) async fn result_sizes<DB: Backend>(
    sql: &Runner<DB>,
    id: TaskId,
) -> Result<Vec<(String, usize)>> {
    let sizes = Statement::new("SELECT worker, LENGTH(result) FROM results WHERE ")
        .append(DB::Connection::of_tasks(std::slice::from_ref(&id)))
        .sql(RESULTS_IN_ORDER);
    let sizes: Vec<(Vec<u8>, i64)> = sql.read("result_sizes", sizes).await?;
    let size = |(worker, bytes)| Ok((worker_name(worker)?, number(bytes)?));
    sizes.into_iter().map(size).collect()
}

pub(crate) async fn results_of<DB: Backend>(
    sql: &Runner<DB>,
    id: TaskId,
    workers: &[String],
) -> Result<Vec<TaskResult>> {
    let workers: Vec<&str> = workers.iter().map(String::as_str).collect();
    let results = Statement::new(RESULTS)
        .append(DB::Connection::of_tasks(std::slice::from_ref(&id)))
        .sql(" AND worker IN ")
        .list(&workers)
        .sql(RESULTS_IN_ORDER);
    results_in_order(sql.read("results_of", results).await?)
}

pub(crate) async fn counts<DB: Backend>(
    sql: &Runner<DB>,
    queues: Option<&[QueueName]>,
) -> Result<Vec<QueueCount>> {
    let mut counts = Vec::new();
    // All queues are a single query, whereas an empty list of queues needs none.
    let parts: Vec<Option<&[QueueName]>> =
        queues.map_or(vec![None], |queues| lists(queues).map(Some).collect());
    for part in parts {
        counts.extend(
            sql.read::<CountColumns>("counts", queue_counts::of(part))
                .await?,
        );
    }
    counts.into_iter().map(QueueCount::try_from).collect()
}

pub(crate) async fn queue_names<DB: Backend>(
    sql: &Runner<DB>,
    beginning: &str,
    limit: u32,
) -> Result<Vec<QueueName>> {
    let names: Vec<(String,)> = sql
        .read("queue_names", queue_counts::names(beginning, limit))
        .await?;
    names.iter().map(|(name,)| queue_name(name)).collect()
}

pub(crate) async fn unfinished<DB: Backend>(sql: &Runner<DB>) -> Result<Vec<(QueueName, u64)>> {
    let unfinished = sql
        .read::<CountColumns>("unfinished", queue_counts::unfinished::<DB::Connection>())
        .await?;
    let count = |columns| QueueCount::try_from(columns).map(|count| (count.queue, count.count));
    unfinished.into_iter().map(count).collect()
}
