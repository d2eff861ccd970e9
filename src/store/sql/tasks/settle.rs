//! Settles reports: locks their tasks, decides in order, and stores the changes.

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
                insert::{self, OldKeys},
                letters::{self, NewLetter},
                progress::{self, Progress},
                steps::Steps,
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

/// A transaction that settles reports. Collects the changes until they are stored.
struct Settling<'a> {
    /// The tasks of the reports, locked.
    tasks: BTreeMap<TaskId, Progress>,
    results: Vec<NewResult<'a>>,
    letters: Vec<NewLetter>,
    /// The events and the counts.
    steps: Steps,
}

/// Settles reports in one transaction. Their discovered tasks become this batch.
pub(crate) async fn settle<S: Session>(
    session: &mut S,
    reports: &[Settlement],
    batch: Turn,
    old_keys: &OldKeys,
    events: &Arc<EventQueues>,
) -> Result<Vec<Settled>> {
    let ids = reports.iter().map(|report| *report.id()).collect();
    let mut settling = Settling {
        tasks: progress::lock(session, ids).await?,
        results: Vec::new(),
        letters: Vec::new(),
        steps: Steps::new(events),
    };
    let mut settled = Vec::with_capacity(reports.len());
    for report in reports {
        settled.push(settling.decide(report));
    }
    let Settling {
        tasks,
        mut results,
        letters,
        mut steps,
    } = settling;
    store_results(session, &mut results).await?;
    progress::store(session, &tasks, &mut steps).await?;
    letters::add(session, &letters).await?;
    store_discovered(session, reports, batch, &mut settled, &mut steps, old_keys).await?;
    steps.store(session).await?;
    Ok(settled)
}

impl<'a> Settling<'a> {
    /// Decides what a report changes.
    fn decide(&mut self, report: &'a Settlement) -> Settled {
        let Some(task) = self.tasks.get_mut(report.id()) else {
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
                    self.results.push(NewResult {
                        task: id,
                        number: task.number,
                        worker,
                        lease: *lease,
                        result,
                        encoding: *encoding,
                        attempt: *attempt,
                        leased_ms: began(*leased_unix_ms, *at_unix_ms).unwrap_or(0),
                        at_ms: *at_unix_ms,
                        surplus,
                    });
                }
                if !repeated && !surplus {
                    task.credit(*attempt, *at_unix_ms);
                    if task.status.is_final() {
                        self.steps.completed_by(*id, &task.queue, worker, *attempt);
                    }
                }
                (repeated, surplus)
            }
            // The task has been sent again since then.
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
                    self.letters.push(NewLetter::from(&letter));
                }
                (repeated, false)
            }
        };
        let about = SettledTask {
            queue: task.queue.clone(),
            priority: task.priority,
        };
        Settled {
            repeated,
            surplus,
            status: Some(task.status),
            key: task.freed_key(),
            task: Some(about),
            ..Settled::default()
        }
    }
}

async fn store_results<S: Session>(session: &mut S, results: &mut [NewResult<'_>]) -> Result<()> {
    // Sorted by primary key, so that neighbouring rows share the pages that a statement changes.
    results.sort_unstable_by_key(|result| (result.number, result.task, result.worker));
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

/// The values of a result, followed by the number and the group of its task.
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

/// Stores the discovered tasks of all reports as one batch. If two have the same key, the first one
/// is stored.
async fn store_discovered<S: Session>(
    session: &mut S,
    reports: &[Settlement],
    batch: Turn,
    settled: &mut [Settled],
    steps: &mut Steps,
    old_keys: &OldKeys,
) -> Result<()> {
    let taken = |settled: &Settled| !settled.repeated && !settled.unknown;
    let pairs = reports.iter().zip(settled.iter());
    let rows: Vec<&NewRow> = pairs
        .filter(|(_, settled)| taken(settled))
        .flat_map(|(report, _)| report.discovered())
        .collect();
    let mut answers = insert::insert(session, &rows, batch, steps, old_keys)
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
