//! Failed attempts, and operators' acts on tasks.
//!
//! The id of a failed attempt is its time followed by a hash of the task and the lease. So a
//! repeated report is recognised, and the oldest attempts come first by id. A transaction that adds
//! attempts locks their tasks, so that removing a task removes all of its attempts.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::{
    model::{Act, Attempt, AttemptState, FailedAttempt, TaskId, began, millis},
    store::{
        Attempts, FAILURES_STAY, Result,
        sql::{
            access::tokens::{self, ActColumns},
            backend::Backend,
            dialect::Dialect,
            rows::{corrupt, number, worker_name},
            runner::Runner,
            session::Session,
            statement::{Statement, lists, pieces},
        },
    },
};

/// How many attempts of one task a transaction removes at most if there are more than
/// [`FAILURES_STAY`].
const TRIMMED: u32 = 1000;

/// The id of a failed attempt.
type AttemptId = TaskId;

fn id_of(failure: &FailedAttempt) -> AttemptId {
    let hash = Sha256::new()
        .chain_update(failure.id.as_bytes())
        .chain_update(failure.lease.generation.to_be_bytes())
        .chain_update(failure.lease.grant.to_be_bytes())
        .finalize();
    let mut id = first_at(failure.at_unix_ms).0.into_bytes();
    id[6..].copy_from_slice(&hash[..10]);
    TaskId(Uuid::from_bytes(id))
}

/// The smallest id of an attempt at this time.
fn first_at(unix_ms: i64) -> AttemptId {
    let ms = unix_ms.clamp(0, (1 << 48) - 1).to_be_bytes();
    let mut id = [0; 16];
    id[..6].copy_from_slice(&ms[2..]);
    TaskId(Uuid::from_bytes(id))
}

pub(crate) async fn keep_failures<DB: Backend>(
    sql: &Runner<DB>,
    failures: &[FailedAttempt],
) -> Result<()> {
    let keep = sql.run("keep_failures", failures.to_vec(), |session, failures| {
        Box::pin(async move {
            // An attempt that appears twice in one call counts once.
            let by_id: BTreeMap<AttemptId, &FailedAttempt> = failures
                .iter()
                .map(|failure| (id_of(failure), failure))
                .collect();
            keep(session, &by_id).await
        })
    });
    keep.await
}

pub(crate) async fn attempts<DB: Backend>(
    sql: &Runner<DB>,
    id: TaskId,
    limit: u32,
) -> Result<Attempts> {
    const NAME: &str = "attempts";
    let failed =
        Statement::new("SELECT state, leased_ms, at_ms, attempt, worker, reason FROM history ")
            .sql(&DB::Connection::by_index("history_task"))
            .sql(" WHERE task_id = ? ORDER BY id DESC LIMIT ?")
            .bind(&id)
            .bind(FAILURES_STAY);
    let failed = sql.read::<FailedColumns>(NAME, failed).await?;
    let of_task = std::slice::from_ref(&id);
    let completed = Statement::new(
        "SELECT worker, attempt, leased_ms, completed_ms, surplus FROM results WHERE ",
    )
    .append(DB::Connection::of_tasks(of_task))
    .sql(" ORDER BY completed_ms DESC, worker DESC LIMIT ?")
    .bind(limit);
    let completed = sql.read::<CompletedColumns>(NAME, completed).await?;
    let count = Statement::new("SELECT COUNT(*) FROM results WHERE ")
        .append(DB::Connection::of_tasks(of_task));
    let count: Vec<(i64,)> = sql.read(NAME, count).await?;
    Ok(Attempts {
        failed: failed
            .into_iter()
            .rev()
            .map(failed_attempt)
            .collect::<Result<_>>()?,
        completed: completed
            .into_iter()
            .rev()
            .map(completed_attempt)
            .collect::<Result<_>>()?,
        results: count.first().map_or(Ok(0), |(count,)| number(*count))?,
    })
}

pub(crate) async fn remove_old_failures<DB: Backend>(
    sql: &Runner<DB>,
    age: Duration,
    limit: u32,
) -> Result<u64> {
    const NAME: &str = "remove_old_failures";
    let now: Vec<(i64,)> = sql
        .read(
            NAME,
            Statement::new(format!("SELECT {}", DB::Connection::NOW_MS)),
        )
        .await?;
    let now = now
        .first()
        .map(|(now,)| *now)
        .ok_or_else(|| corrupt("no time"))?;
    let young = first_at(now.saturating_sub(millis(age)));
    let old = Statement::new("SELECT id FROM history ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE id < ? ORDER BY id LIMIT ?")
        .bind(&young)
        .bind(limit);
    let old = sql.ids(NAME, old).await?;
    if old.is_empty() {
        return Ok(0);
    }
    sql.run(NAME, old, |session, old| Box::pin(remove(session, old)))
        .await
}

pub(crate) async fn acts_on<DB: Backend>(
    sql: &Runner<DB>,
    target: &str,
    limit: u32,
) -> Result<Vec<Act>> {
    let acts = Statement::new("SELECT id, who, what, target FROM acts ")
        .sql(&DB::Connection::by_index("acts_target"))
        .sql(" WHERE target = ? ORDER BY id DESC LIMIT ?")
        .bind(target)
        .bind(limit);
    sql.read::<ActColumns>("acts_on", acts)
        .await?
        .into_iter()
        .rev()
        .map(tokens::act)
        .collect()
}

/// State, when it was leased, when it ended, attempt, worker, reason.
type FailedColumns = (i64, i64, i64, i64, Vec<u8>, String);

fn failed_attempt(
    (state, leased_ms, at_ms, attempt, worker, reason): FailedColumns,
) -> Result<Attempt> {
    Ok(Attempt {
        worker: worker_name(worker)?,
        state: AttemptState::from_number(state)
            .ok_or_else(|| corrupt(format!("an attempt's state {state}")))?,
        from_unix_ms: began(leased_ms, at_ms),
        until_unix_ms: Some(at_ms),
        expires_unix_ms: None,
        attempt: number(attempt)?,
        reason,
        surplus: false,
    })
}

/// Worker, attempt, when it was leased, when it was completed, whether it is surplus.
type CompletedColumns = (Vec<u8>, i64, i64, i64, i64);

fn completed_attempt(
    (worker, attempt, leased_ms, completed_ms, surplus): CompletedColumns,
) -> Result<Attempt> {
    Ok(Attempt {
        worker: worker_name(worker)?,
        state: AttemptState::Completed,
        from_unix_ms: began(leased_ms, completed_ms),
        until_unix_ms: Some(completed_ms),
        expires_unix_ms: None,
        attempt: number(attempt)?,
        reason: String::new(),
        surplus: surplus != 0,
    })
}

async fn keep<S: Session>(
    session: &mut S,
    failures: &BTreeMap<AttemptId, &FailedAttempt>,
) -> Result<()> {
    let tasks = stored_tasks(
        session,
        failures.values().map(|failure| failure.id).collect(),
    )
    .await?;
    let failures: Vec<_> = failures
        .iter()
        .filter(|(_, failure)| tasks.contains(&failure.id))
        .collect();
    for piece in pieces(&failures, |(_, failure)| failure.reason.len()) {
        let rows = piece.iter().map(|(id, failure)| {
            let FailedAttempt {
                id: task,
                worker,
                state,
                leased_unix_ms,
                at_unix_ms,
                attempt,
                reason,
                ..
            } = failure;
            [
                (*id).into(),
                task.into(),
                (*state as i64).into(),
                began(*leased_unix_ms, *at_unix_ms).unwrap_or(0).into(),
                (*at_unix_ms).into(),
                (*attempt).into(),
                worker.as_str().into(),
                reason.as_str().into(),
            ]
        });
        const INSERT: &str =
            "INSERT INTO history (id, task_id, state, leased_ms, at_ms, attempt, worker, reason)";
        session
            .execute(
                Statement::new(INSERT)
                    .values(rows)
                    .sql(&S::keep_first("state")),
            )
            .await?;
    }
    trim(session, &Vec::from_iter(tasks)).await
}

/// Those of `ids` that are stored. Nobody can remove them before the transaction ends.
async fn stored_tasks<S: Session>(
    session: &mut S,
    ids: BTreeSet<TaskId>,
) -> Result<BTreeSet<TaskId>> {
    let (ids, mut stored) = (Vec::from_iter(ids), BTreeSet::new());
    for ids in lists(&ids) {
        let found = Statement::new("SELECT id FROM tasks ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids);
        stored.extend(
            session
                .ids(found.sql(" ORDER BY id").sql(S::FOR_SHARE))
                .await?,
        );
    }
    Ok(stored)
}

/// Removes the oldest failed attempts of tasks that have too many.
async fn trim<S: Session>(session: &mut S, tasks: &[TaskId]) -> Result<()> {
    for tasks in lists(tasks) {
        let many = Statement::new("SELECT task_id FROM history ")
            .sql(&S::by_index("history_task"))
            .sql(" WHERE task_id IN ")
            .list(tasks)
            .sql(" GROUP BY task_id HAVING COUNT(*) > ?")
            .bind(FAILURES_STAY);
        for task in session.ids(many).await? {
            let beyond = Statement::new("SELECT id FROM history ")
                .sql(&S::by_index("history_task"))
                .sql(" WHERE task_id = ? ORDER BY id DESC LIMIT ? OFFSET ?")
                .bind(&task)
                .bind(TRIMMED)
                .bind(FAILURES_STAY);
            let beyond = session.ids(beyond).await?;
            remove(session, &beyond).await?;
        }
    }
    Ok(())
}

async fn remove<S: Session>(session: &mut S, ids: &[AttemptId]) -> Result<u64> {
    let mut removed = 0;
    for ids in lists(ids) {
        removed += session
            .execute(Statement::new("DELETE FROM history WHERE id IN ").list(ids))
            .await?;
    }
    Ok(removed)
}
