//! Finished tasks that become unfinished again: dead and cancelled ones that are sent again, and
//! completed ones that get more replicas.

use std::collections::BTreeMap;

use crate::{
    model::{QueueName, StoredStatus, TaskId},
    store::{
        Result, Retried, Unpublished,
        sql::{
            outbox::entries,
            rows::{number, queue_name, status, task_id, worker_name},
            session::Session,
            statement::{Statement, lists},
            tasks::{pending, steps::Steps},
        },
    },
};

/// Makes dead and cancelled tasks unfinished again, in their next epoch, and puts them into the
/// outbox.
///
/// Completions that arrived after the end count now, because their workers have done their replicas
/// and do not get second ones. With NUM of them, the task is completed.
pub(crate) async fn retry<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    now_ms: i64,
    steps: &mut Steps,
) -> Result<Vec<Retried>> {
    let mut retried = Vec::new();
    for ids in lists(ids) {
        let ended = ended_tasks(session, ids, "(2, 3)").await?;
        let ids: Vec<TaskId> = ended.iter().map(|task| task.id).collect();
        retried.extend(begin_again(session, ended, now_ms, steps).await?);
        if !ids.is_empty() {
            session
                .execute(Statement::new("DELETE FROM letters WHERE id IN ").list(&ids))
                .await?;
            pending::remove(session, &ids).await?;
        }
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
        steps.moved(id, &queue, before, status);
        retried.push(Retried { id, status });
    }
    if !done.is_empty() {
        // A reopened task may be on the bus, or waiting to be published.
        let end =
            Statement::new("UPDATE tasks SET status = 1, on_bus = 0, updated_ms = ? WHERE id IN ");
        session.execute(end.bind(now_ms).list(&done)).await?;
        entries::remove(session, &done).await?;
    }
    let again = [&due[..], &scheduled].concat();
    if !again.is_empty() {
        const AGAIN: &str = "UPDATE tasks SET status = 0, epoch = epoch + 1, attempts = 0, reason = '', \
             on_bus = 0, updated_ms = ? WHERE id IN ";
        session
            .execute(Statement::new(AGAIN).bind(now_ms).list(&again))
            .await?;
        entries::unpublish(session, &due, Unpublished::Missing, 0).await?;
        entries::unpublish(session, &scheduled, Unpublished::Scheduled, 0).await?;
    }
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
    for ids in lists(ids) {
        let ended = ended_tasks(session, ids, "(0, 1)").await?;
        begin_again(session, ended, now_ms, steps).await?;
    }
    Ok(())
}

struct EndedTask {
    id: TaskId,
    queue: QueueName,
    /// The number of replicas without a credit.
    missing: usize,
    not_before_ms: i64,
    status: StoredStatus,
}

/// Those of `ids` that have one of these statuses, locked.
async fn ended_tasks<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    statuses: &str,
) -> Result<Vec<EndedTask>> {
    let ended =
        Statement::new("SELECT id, queue, replicas - completed, not_before_ms, status FROM tasks ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(&format!(" WHERE status IN {statuses} AND id IN "))
            .list(ids)
            .sql(" ORDER BY id")
            .sql(S::FOR_UPDATE);
    let read = |(id, queue, missing, not_before_ms, stored): (Vec<u8>, String, i64, i64, i64)| {
        let (queue, missing) = (queue_name(&queue)?, number(missing.max(0))?);
        Ok(EndedTask {
            id: task_id(&id)?,
            queue,
            missing,
            not_before_ms,
            status: status(stored)?,
        })
    };
    session.fetch(ended).await?.into_iter().map(read).collect()
}

/// The workers with a surplus result, for each task.
async fn late_workers<S: Session>(
    session: &mut S,
    ids: &[TaskId],
) -> Result<BTreeMap<TaskId, Vec<Vec<u8>>>> {
    let mut workers: BTreeMap<TaskId, Vec<Vec<u8>>> = BTreeMap::new();
    if ids.is_empty() {
        return Ok(workers);
    }
    let late = Statement::new("SELECT task_id, worker FROM results WHERE surplus = 1 AND ")
        .append(S::of_tasks(ids));
    for (id, worker) in session.fetch::<(Vec<u8>, Vec<u8>)>(late).await? {
        workers.entry(task_id(&id)?).or_default().push(worker);
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
