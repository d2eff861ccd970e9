//! Finished tasks that become unfinished again: dead and cancelled ones that are sent again, and
//! completed ones that get more replicas.

use std::collections::BTreeMap;

use crate::{
    model::{QueueName, StoredStatus, TaskId},
    store::{
        Result, Retried, Unpublished,
        sql::{
            outbox::entries,
            rows::{columns, number, queue_name, status, task_id, worker_name},
            session::Session,
            statement::{Statement, lists},
            tasks::{
                belongs::{BELONGS_COLUMNS, Belongs, BelongsColumns},
                pending,
                steps::Steps,
            },
        },
    },
};

/// Makes dead and cancelled tasks unfinished again, in their next epoch, and puts them into the
/// outbox.
///
/// Completions that arrived after the end count now, because their workers have done their replicas
/// and do not get second ones. With NUM of them, the task is completed.
///
/// With `as_of_ms`, tasks that have changed since a count stay as they are.
pub(crate) async fn retry<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    now_ms: i64,
    as_of_ms: Option<i64>,
    steps: &mut Steps,
) -> Result<Vec<Retried>> {
    let ended = ended_tasks(session, ids, "(2, 3)", as_of_ms).await?;
    let ids: Vec<TaskId> = ended.iter().map(|task| task.id).collect();
    let retried = begin_again(session, ended, now_ms, steps).await?;
    for ids in lists(&ids) {
        session
            .execute(Statement::new("DELETE FROM letters WHERE id IN ").list(ids))
            .await?;
        pending::remove(session, ids).await?;
    }
    Ok(retried)
}

/// Makes these tasks unfinished in their next epoch, except those that late completions complete.
async fn begin_again<S: Session>(
    session: &mut S,
    ended: Vec<EndedTask>,
    now_ms: i64,
    steps: &mut Steps,
) -> Result<Vec<Retried>> {
    let ids: Vec<TaskId> = ended.iter().map(|task| task.id).collect();
    let mut late = late_workers(session, &ids).await?;
    let (mut done, mut due, mut scheduled, mut retried) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for EndedTask {
        id,
        queue,
        missing,
        not_before_ms,
        status: before,
        belongs,
    } in ended
    {
        let mut workers = late.remove(&id).unwrap_or_default();
        workers.truncate(missing);
        credit(session, &id, &workers).await?;
        let status = match workers.len() == missing {
            true => StoredStatus::Completed,
            false => StoredStatus::Unfinished,
        };
        match status {
            StoredStatus::Completed => &mut done,
            // The queue assumes that a due time beyond the horizon comes from a different clock.
            _ if not_before_ms > now_ms => &mut scheduled,
            _ => &mut due,
        }
        .push(id);
        steps.moved(id, &queue, before, status, &belongs, now_ms);
        retried.push(Retried { id, status });
    }
    let era = session.era();
    for done in lists(&done) {
        let end = Statement::new("UPDATE tasks SET status = 1, on_bus = 0, updated_ms = ?, era = ")
            .sql(S::ERA)
            .sql(" WHERE id IN ")
            .bind(now_ms)
            .bind_era(era);
        session.execute(end.list(done)).await?;
    }
    let again = [&due[..], &scheduled].concat();
    for again in lists(&again) {
        const AGAIN: &str = "UPDATE tasks SET status = 0, epoch = epoch + 1, attempts = 0, reason = '', \
             on_bus = 0, updated_ms = ?, era = ";
        let reopen = Statement::new(AGAIN)
            .sql(S::ERA)
            .sql(" WHERE id IN ")
            .bind(now_ms)
            .bind_era(era);
        session.execute(reopen.list(again)).await?;
    }
    // Some of these tasks may be the next of their sequences.
    let behind = steps.sequences(session, &[], None).await?;
    // A reopened task may be on the bus, or waiting to be published.
    entries::remove(session, &done).await?;
    due.retain(|id| !behind.contains(id));
    scheduled.retain(|id| !behind.contains(id));
    entries::unpublish(session, &due, Unpublished::Missing, 0).await?;
    entries::unpublish(session, &scheduled, Unpublished::Scheduled, 0).await?;
    Ok(retried)
}

/// Reopens tasks that now have more replicas than credits, no matter whether SQL or only the queue
/// has recorded their completion.
pub(crate) async fn reopen<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    now_ms: i64,
    steps: &mut Steps,
) -> Result<()> {
    let ended = ended_tasks(session, ids, "(0, 1)", None).await?;
    begin_again(session, ended, now_ms, steps).await?;
    Ok(())
}

struct EndedTask {
    id: TaskId,
    queue: QueueName,
    /// The number of replicas without a credit.
    missing: usize,
    not_before_ms: i64,
    status: StoredStatus,
    belongs: Belongs,
}

columns! {
    struct EndedColumns {
        #[flatten]
        belongs: BelongsColumns,
        id: Vec<u8>,
        queue: String,
        missing: i64,
        not_before_ms: i64,
        status: i64,
    }
}

impl EndedColumns {
    fn into_task(self) -> Result<EndedTask> {
        let queue = queue_name(&self.queue)?;
        Ok(EndedTask {
            id: task_id(&self.id)?,
            missing: number(self.missing.max(0))?,
            not_before_ms: self.not_before_ms,
            status: status(self.status)?,
            belongs: self.belongs.of(&queue)?,
            queue,
        })
    }
}

/// The part of a condition that leaves out tasks that have changed since a count began.
pub(crate) fn unchanged_since<'a>(as_of_ms: Option<i64>) -> Statement<'a> {
    match as_of_ms {
        Some(as_of_ms) => Statement::new(" AND era < ? AND updated_ms <= ?")
            .bind(as_of_ms)
            .bind(as_of_ms),
        None => Statement::new(""),
    }
}

/// Those of `ids`, which are sorted, that have one of these statuses. All are locked before the rows
/// of their sequences are.
async fn ended_tasks<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    statuses: &str,
    as_of_ms: Option<i64>,
) -> Result<Vec<EndedTask>> {
    let mut tasks = Vec::with_capacity(ids.len());
    for ids in lists(ids) {
        let ended = Statement::new(format!(
            "SELECT id, queue, replicas - completed AS missing, not_before_ms, status, {BELONGS_COLUMNS} FROM tasks "
        ))
        .sql(S::BY_PRIMARY_KEY)
        .sql(&format!(" WHERE status IN {statuses} AND id IN "))
        .list(ids)
        .append(unchanged_since(as_of_ms))
        .sql(" ORDER BY id")
        .sql(S::FOR_UPDATE);
        for columns in session.fetch::<EndedColumns>(ended).await? {
            tasks.push(columns.into_task()?);
        }
    }
    Ok(tasks)
}

/// The workers with a surplus result, for each task.
async fn late_workers<S: Session>(
    session: &mut S,
    ids: &[TaskId],
) -> Result<BTreeMap<TaskId, Vec<Vec<u8>>>> {
    let mut workers: BTreeMap<TaskId, Vec<Vec<u8>>> = BTreeMap::new();
    for ids in lists(ids) {
        let late = Statement::new("SELECT task_id, worker FROM results WHERE surplus = 1 AND ")
            .append(S::of_tasks(ids));
        for (id, worker) in session.fetch::<(Vec<u8>, Vec<u8>)>(late).await? {
            workers.entry(task_id(&id)?).or_default().push(worker);
        }
    }
    Ok(workers)
}

async fn credit<S: Session>(session: &mut S, id: &TaskId, workers: &[Vec<u8>]) -> Result<()> {
    for worker in workers {
        let worker = worker_name(worker.clone())?;
        let credit =
            Statement::new("UPDATE results SET surplus = 0 WHERE worker = ? AND ").bind(worker);
        session
            .execute(credit.append(S::of_tasks(std::slice::from_ref(id))))
            .await?;
    }
    if !workers.is_empty() {
        let count = Statement::new("UPDATE tasks SET completed = completed + ? WHERE id = ?")
            .bind(workers.len() as u64);
        session.execute(count.bind(id)).await?;
    }
    Ok(())
}
