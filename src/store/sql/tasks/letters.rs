//! Dead letters: what is kept of them, and how a dead task is sent again.
//!
//! A dead task has its letter from the transaction in which it died. The letter goes with the task,
//! or when the task is sent again. A transaction locks tasks first, then their letters.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;

use super::{
    counts::Counts,
    pending,
    retention::{self, Which},
};
use crate::store::sql::{
    outbox::entries,
    rows::{number, queue_name, status, task_id, worker_name},
    session::Session,
    statement::{Statement, lists, pieces},
};
use crate::{
    model::{DeadLetter, LetterId, LetterKind, QueueName, StoredStatus, TaskId},
    store::{Result, Retried, Unpublished},
    wire,
};

/// A row to write.
#[derive(Clone)]
pub(crate) struct NewLetter {
    id: LetterId,
    queue: String,
    kind: LetterKind,
    at_ms: i64,
    summary: Bytes,
    content: Bytes,
}

impl From<&DeadLetter> for NewLetter {
    fn from(letter: &DeadLetter) -> Self {
        let kind = letter.kind();
        let mut brief = letter.clone();
        brief.value.clear();
        if let Some(task) = &mut brief.task {
            task.payload.clear();
            task.headers.clear();
        }
        // A discovered task may name a queue that cannot be one.
        let queue = QueueName::new(&letter.queue)
            .map_or_else(|_| String::new(), |queue| queue.as_str().to_owned());
        Self {
            id: letter.id(),
            queue,
            kind,
            at_ms: letter.at_unix_ms,
            summary: wire::dead_letter(&brief),
            content: if kind == LetterKind::Task {
                Bytes::new()
            } else {
                wire::dead_letter(letter)
            },
        }
    }
}

/// Adds letters. One that is there already stays as it is, unless it is about a task: that one has
/// died again.
pub(crate) async fn add<S: Session>(session: &mut S, letters: &[NewLetter]) -> Result<()> {
    const INSERT: &str = "INSERT INTO letters (id, queue, kind, at_ms, summary, content)";
    let mut letters: Vec<&NewLetter> = letters.iter().collect();
    letters.sort_unstable_by_key(|letter| letter.id);
    let (tasks, others): (Vec<_>, Vec<_>) = letters
        .into_iter()
        .partition(|letter| letter.kind == LetterKind::Task);
    for (letters, suffix) in [
        (tasks, S::replace("id", &["at_ms", "summary"])),
        (others, S::keep_first("kind")),
    ] {
        for piece in pieces(&letters, |letter| {
            letter.summary.len() + letter.content.len()
        }) {
            let rows = piece.iter().map(|letter| {
                let NewLetter {
                    id,
                    queue,
                    kind,
                    at_ms,
                    summary,
                    content,
                } = letter;
                let (summary, content) = (&summary[..], &content[..]);
                [
                    id.into(),
                    queue.as_str().into(),
                    (*kind).into(),
                    (*at_ms).into(),
                    summary.into(),
                    content.into(),
                ]
            });
            session
                .execute(Statement::new(INSERT).values(rows).sql(&suffix))
                .await?;
        }
    }
    Ok(())
}

/// Makes dead and cancelled tasks unfinished again, in their next epoch, and puts them into the
/// outbox.
///
/// A completion that came late, behind the end, counts now: its worker has done its replica, and no
/// worker gets a second one. With NUM of them the task is completed.
pub(crate) async fn retry<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    now_ms: i64,
    counts: &mut Counts,
) -> Result<Vec<Retried>> {
    let mut retried = Vec::new();
    for ids in lists(ids) {
        let ended = ended_tasks(session, ids, "(2, 3)").await?;
        let ids: Vec<TaskId> = ended.iter().map(|task| task.id).collect();
        retried.extend(begin_again(session, ended, now_ms, counts).await?);
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
    counts: &mut Counts,
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
            // A queue takes a time farther away than the horizon for one of another clock.
            _ if not_before_ms > now_ms => &mut scheduled,
            _ => &mut due,
        }
        .push(id);
        counts.moved(id, &queue, before, status);
        retried.push(Retried { id, status });
    }
    if !done.is_empty() {
        // One that is reopened may be on the bus, or wait to go there.
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

/// Reopens tasks that have more replicas than credits now, whether SQL has their completion or only
/// the queue.
pub(crate) async fn reopen<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    now_ms: i64,
    counts: &mut Counts,
) -> Result<()> {
    for ids in lists(ids) {
        let ended = ended_tasks(session, ids, "(0, 1)").await?;
        begin_again(session, ended, now_ms, counts).await?;
    }
    Ok(())
}

struct EndedTask {
    id: TaskId,
    queue: QueueName,
    /// Replicas without credit.
    missing: usize,
    not_before_ms: i64,
    status: StoredStatus,
}

/// The tasks among `ids` in one of these statuses, locked.
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

/// The workers with a surplus result, by task.
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

/// Removes letters. A dead task goes with its letter, and its key stays. Answers how many.
pub(crate) async fn purge<S: Session>(session: &mut S, ids: &[LetterId]) -> Result<u64> {
    let mut removed = retention::remove(session, ids, Which::Dead).await?;
    for ids in lists(ids) {
        // An older taskd may have removed a dead task without its letter.
        let others = "DELETE FROM letters WHERE (kind <> 1 OR NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.id = \
                      letters.id)) AND letters.id IN ";
        removed += session.execute(Statement::new(others).list(ids)).await?;
    }
    Ok(removed)
}

/// The oldest letters that are not about stored tasks, at least `age` old by the database's clock.
pub(crate) fn old<'a, S: Session>(age: Duration, limit: u32) -> Statement<'a> {
    let of_kind = |kind: LetterKind| {
        Statement::new("SELECT * FROM (SELECT id FROM letters ")
            .sql(&S::by_index("letters_kind"))
            .sql(" WHERE kind = ? AND at_ms <= ")
            .bind(kind)
            .append(retention::before::<S>(age))
            .sql(" ORDER BY at_ms LIMIT ?) AS page")
            .bind(limit)
    };
    let others = LetterKind::ALL
        .into_iter()
        .filter(|kind| *kind != LetterKind::Task)
        .map(of_kind);
    let all = others
        .reduce(|all, kind| all.sql(" UNION ALL ").append(kind))
        .expect("there are other kinds");
    all.sql(" LIMIT ?").bind(limit)
}
