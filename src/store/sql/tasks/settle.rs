//! Settling: lock the tasks of the reports, decide in order, write the changes.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    config::EventQueues,
    model::{DeadLetter, Encoding, LeaseNumber, StoredStatus, TaskId, began},
    store::{
        NewRow, Result, Settled, SettledTask, Settlement, Turn,
        sql::{
            session::Session,
            statement::{Statement, Value, pieces},
            tasks::{
                counts::Counts,
                insert::{self, OldKeys},
                letters::{self, NewLetter},
                progress::{self, Progress},
            },
        },
    },
};

/// A result to store.
struct NewResult<'a> {
    task: &'a TaskId,
    /// [`crate::store::sql::Dialect::NUMBER`]
    number: i64,
    worker: &'a str,
    lease: LeaseNumber,
    result: &'a [u8],
    encoding: Encoding,
    attempt: u32,
    leased_ms: i64,
    at_ms: i64,
    surplus: bool,
}

impl Settlement {
    fn id(&self) -> &TaskId {
        match self {
            Self::Completed { id, .. } | Self::Died { id, .. } => id,
        }
    }

    fn discovered(&self) -> &[NewRow] {
        match self {
            Self::Completed { discovered, .. } => discovered,
            Self::Died { .. } => &[],
        }
    }
}

pub(crate) async fn settle<S: Session>(
    session: &mut S,
    reports: &[Settlement],
    batch: Turn,
    old_keys: &OldKeys,
    events: &Arc<EventQueues>,
) -> Result<Vec<Settled>> {
    let mut tasks =
        progress::lock(session, reports.iter().map(|report| *report.id()).collect()).await?;
    let (mut results, mut letters) = (Vec::new(), Vec::new());
    let mut counts = Counts::with_events(events);
    let decide = |report| decide(report, &mut tasks, &mut results, &mut letters, &mut counts);
    let mut settled: Vec<Settled> = reports.iter().map(decide).collect();

    // In the order of the primary key, so that neighbours share the pages that a statement touches.
    results.sort_unstable_by_key(|result| (result.number, result.task, result.worker));
    store_results(session, &results).await?;
    progress::store(session, &tasks, &mut counts).await?;
    letters::add(session, &letters).await?;
    store_discovered(session, reports, batch, &mut settled, &mut counts, old_keys).await?;
    counts.store(session).await?;
    Ok(settled)
}

/// Decides what a report changes in its task.
fn decide<'a>(
    report: &'a Settlement,
    tasks: &mut BTreeMap<TaskId, Progress>,
    results: &mut Vec<NewResult<'a>>,
    letters: &mut Vec<NewLetter>,
    counts: &mut Counts,
) -> Settled {
    let Some(task) = tasks.get_mut(report.id()) else {
        return Settled {
            unknown: true,
            ..Settled::default()
        };
    };
    let (repeated, surplus) = match report {
        Settlement::Completed {
            id,
            worker,
            lease,
            result,
            encoding,
            attempt,
            leased_unix_ms,
            at_unix_ms,
            ..
        } => {
            let repeated = !task.workers.insert(worker.clone());
            let surplus = !repeated && task.status.is_final();
            if !repeated {
                let (lease, encoding, attempt, at_ms) = (*lease, *encoding, *attempt, *at_unix_ms);
                let leased_ms = began(*leased_unix_ms, at_ms).unwrap_or(0);
                let (number, task, worker) = (task.number, id, &worker[..]);
                results.push(NewResult {
                    task,
                    number,
                    worker,
                    lease,
                    result,
                    encoding,
                    attempt,
                    leased_ms,
                    at_ms,
                    surplus,
                });
            }
            if !repeated && !surplus {
                task.credit(*attempt, *at_unix_ms);
                // The event of a completion names the worker of the last credit.
                if task.status.is_final() && counts.events.are_kept_of(&task.queue) {
                    counts.events.credited(*id, worker, *attempt);
                }
            }
            (repeated, surplus)
        }
        // The task was sent again since.
        Settlement::Died {
            epoch: Some(epoch), ..
        } if *epoch < task.epoch => {
            return Settled {
                unknown: true,
                ..Settled::default()
            };
        }
        Settlement::Died {
            id,
            reason,
            attempts,
            history,
            at_unix_ms,
            ..
        } => {
            let repeated = task.status == StoredStatus::Dead;
            if !task.status.is_final() {
                task.die(reason, *attempts, *at_unix_ms);
                let letter = DeadLetter {
                    task_id: Some(*id),
                    queue: task.queue.as_str().to_owned(),
                    at_unix_ms: *at_unix_ms,
                    history: history.clone(),
                    ..Default::default()
                };
                letters.push(NewLetter::from(&letter));
            }
            (repeated, false)
        }
    };
    let about = SettledTask {
        queue: task.queue.clone(),
        priority: task.priority,
    };
    let (status, key) = (Some(task.status), task.freed_key());
    Settled {
        repeated,
        surplus,
        status,
        key,
        task: Some(about),
        ..Settled::default()
    }
}

async fn store_results<S: Session>(session: &mut S, results: &[NewResult<'_>]) -> Result<()> {
    for piece in pieces(results, |result| result.result.len()) {
        let insert = Statement::new(S::INSERT).sql(
            " INTO results (task_id, worker, lease_generation, lease_grant, attempt, leased_ms, completed_ms, surplus, \
             result_encoding, result",
        );
        let insert = match S::NUMBER {
            Some(_) => insert
                .sql(", task, ")
                .sql(&S::group("task_id"))
                .sql(")")
                .values(piece.iter().map(numbered::<S>)),
            None => insert.sql(")").values(piece.iter().map(result_values)),
        };
        session.execute(insert).await?;
    }
    Ok(())
}

fn result_values<'a>(result: &NewResult<'a>) -> [Value<'a>; 10] {
    let NewResult {
        task,
        worker,
        lease,
        result: bytes,
        encoding,
        attempt,
        leased_ms,
        at_ms,
        surplus,
        ..
    } = *result;
    [
        task.into(),
        worker.into(),
        lease.generation.into(),
        lease.grant.into(),
        attempt.into(),
        leased_ms.into(),
        at_ms.into(),
        surplus.into(),
        encoding.into(),
        bytes.into(),
    ]
}

/// The values of a result, and the number and the group of its task.
fn numbered<'a, S: Session>(result: &NewResult<'a>) -> [Value<'a>; 12] {
    let [a, b, c, d, e, f, g, h, i, j] = result_values(result);
    [
        a,
        b,
        c,
        d,
        e,
        f,
        g,
        h,
        i,
        j,
        result.number.into(),
        S::group_of(result.task),
    ]
}

/// Stores the discovered tasks of all reports as one batch. Of two with the same key the first
/// wins.
async fn store_discovered<S: Session>(
    session: &mut S,
    reports: &[Settlement],
    batch: Turn,
    settled: &mut [Settled],
    counts: &mut Counts,
    old_keys: &OldKeys,
) -> Result<()> {
    let taken = |settled: &Settled| !settled.repeated && !settled.unknown;
    let pairs = reports.iter().zip(settled.iter());
    let rows: Vec<&NewRow> = pairs
        .filter(|(_, settled)| taken(settled))
        .flat_map(|(report, _)| report.discovered())
        .collect();
    let mut answers = insert::insert(session, &rows, batch, counts, old_keys)
        .await?
        .into_iter();
    for (report, settled) in reports
        .iter()
        .zip(settled)
        .filter(|(_, settled)| taken(settled))
    {
        settled.discovered = answers.by_ref().take(report.discovered().len()).collect();
    }
    Ok(())
}
