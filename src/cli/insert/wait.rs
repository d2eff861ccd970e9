//! `taskd insert --wait`: waits for the ends of the tasks, and prints a line for each.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use backon::BackoffBuilder as _;
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Value, json, value::RawValue};

use super::progress::Progress;
use crate::{
    cli::{
        client::{self, Taskd, WAITS, is_transient},
        print::print,
    },
    model::TaskStatus,
    wire::{
        pb::{self, discovery_client::DiscoveryClient},
        task_status,
    },
};

/// The longest wait of one call, which is shorter than the patience with an answer.
const OF_A_CALL: Duration = Duration::from_secs(30);
/// An answer that comes sooner than this, and not with all ends, is asked for again after a pause.
const SOON: Duration = Duration::from_secs(1);
/// The calls in a row that ask in vain for results which taskd left out.
const MOST_IN_VAIN: u32 = 7;

const UNKNOWN: &str = "taskd does not say what became of the tasks";

/// The tasks that taskd has stored, as later calls name them: a deadline that passes meanwhile is
/// no mistake of theirs.
pub(super) fn stored(
    sent: &[(u64, pb::NewTask)],
    results: &[pb::InsertResult],
) -> Vec<(u64, pb::NewTask)> {
    let is_stored = |status| {
        matches!(
            status,
            pb::InsertStatus::Created | pb::InsertStatus::Duplicate
        )
    };
    let stored = sent
        .iter()
        .zip(results)
        .filter(|(_, result)| is_stored(result.status()));
    stored
        .map(|((number, task), _)| {
            (
                *number,
                pb::NewTask {
                    deadline: None,
                    ..task.clone()
                },
            )
        })
        .collect()
}

/// A task that needs a further call.
struct Open {
    number: u64,
    task: pb::NewTask,
    /// Its id, once taskd has said that it is completed: only its results are missing.
    completed: Option<String>,
}

/// Waits for tasks that taskd has, by their lines, and prints each when it is final, or when the
/// time is over.
///
/// An insert of a task that is there is answered `DUPLICATE`, and waits for it as the first one
/// did.
pub(super) async fn wait(
    mut client: DiscoveryClient<Taskd>,
    tasks: Vec<(u64, pb::NewTask)>,
    until: Instant,
    progress: &Progress<'_>,
) -> anyhow::Result<()> {
    let mut open: Vec<Open> = tasks
        .into_iter()
        .map(|(number, task)| Open {
            number,
            task,
            completed: None,
        })
        .collect();
    let mut waits = WAITS.build();
    let mut in_vain = 0;
    while !open.is_empty() {
        if in_vain > MOST_IN_VAIN {
            return give_up(&open, progress);
        }
        let left = until.saturating_duration_since(Instant::now());
        let tasks = open.iter().map(|one| one.task.clone()).collect();
        let wait = prost_types::Duration::try_from(left.min(OF_A_CALL)).ok();
        let asked = Instant::now();
        match client
            .insert_tasks(pb::InsertTasksRequest {
                tasks,
                wait,
                max_bytes: u64::MAX,
            })
            .await
        {
            Ok(answer) => {
                progress.heard();
                let before = open.len();
                open = still_open(
                    open.into_iter().zip(answer.into_inner().results),
                    left.is_zero(),
                    progress,
                )?;
                let brought = open.len() < before;
                // While tasks are unfinished, there is time for the results of others.
                in_vain = if brought || open.iter().any(|one| one.completed.is_none()) {
                    0
                } else {
                    in_vain + 1
                };
                if !brought {
                    // The results of one task may be too large for an answer: those of the others
                    // come without it.
                    open.rotate_left(1);
                }
                // taskd may answer early with what it knows: it had no place for a watch, or the
                // task was removed.
                if asked.elapsed() > SOON || brought {
                    waits = WAITS.build();
                }
                if asked.elapsed() <= SOON && !open.is_empty() {
                    tokio::time::sleep(waits.next().unwrap_or_default()).await;
                }
            }
            Err(status) if is_transient(&status) => {
                if left.is_zero() {
                    // The ends of completed tasks are known, and only their results are missing.
                    let all_completed = open.iter().all(|one| one.completed.is_some());
                    anyhow::ensure!(all_completed, "{UNKNOWN}: {}", client::said(&status));
                    in_vain += 1;
                }
                progress.failed(&status);
                tokio::time::sleep(waits.next().unwrap_or_default()).await;
            }
            Err(status) => anyhow::bail!("{UNKNOWN}: {}", client::said(&status)),
        }
    }
    Ok(())
}

/// Prints the tasks that need no further call. Completed tasks whose results had no room in the
/// answer stay.
fn still_open(
    answers: impl Iterator<Item = (Open, pb::InsertResult)>,
    is_over: bool,
    progress: &Progress<'_>,
) -> anyhow::Result<Vec<Open>> {
    let mut still = Vec::new();
    let mut seen = HashSet::new();
    for (one, result) in answers {
        let Open {
            number,
            task,
            completed,
        } = one;
        let status = task_status(result.task_status);
        // An answer without a status (SQL is away, say) takes nothing back.
        let completed = match status {
            Some(status) => (status == TaskStatus::Completed).then(|| result.id.clone()),
            None => completed,
        };
        // Of several tasks with one key only the first has results.
        let is_first = result.id.is_empty() || seen.insert(result.id.clone());
        let is_rejected = result.status() == pb::InsertStatus::Rejected;
        if completed.is_some() && is_first && result.results.is_empty() {
            still.push(Open {
                number,
                task,
                completed,
            });
            continue;
        } else if is_rejected {
            // taskd had stored it.
            progress.say(&format!("line {number}: {}", result.error));
        } else if !is_over && !status.is_some_and(TaskStatus::is_final) {
            still.push(Open {
                number,
                task,
                completed: None,
            });
            continue;
        }
        tell(number, &task, &result.id, status, &result.results)?;
        progress.ended(status == Some(TaskStatus::Completed));
    }
    Ok(still)
}

/// Prints completed tasks without their results.
fn give_up(open: &[Open], progress: &Progress<'_>) -> anyhow::Result<()> {
    for Open {
        number,
        task,
        completed,
    } in open
    {
        let id = completed.as_deref().unwrap_or_default();
        progress.say(&format!(
            "line {number}: taskd left out the results; GET /v1/tasks/{id}/results has them"
        ));
        tell(*number, task, id, Some(TaskStatus::Completed), &[])?;
        progress.ended(true);
    }
    Ok(())
}

fn tell(
    number: u64,
    task: &pb::NewTask,
    id: &str,
    status: Option<TaskStatus>,
    results: &[pb::TaskResult],
) -> anyhow::Result<()> {
    let line = json!({
        "line": number,
        "id": id,
        "queue": task.queue,
        "key": String::from_utf8_lossy(&task.key),
        "status": status.map(TaskStatus::as_str),
        "results": results.iter().map(shown).collect::<Vec<_>>(),
    });
    // A reader of stdout that is gone is no error: the rest is to be inserted all the same.
    Ok(print(line)?)
}

/// JSON as JSON, text as text, bytes in base64.
fn shown(result: &pb::TaskResult) -> Value {
    let text = std::str::from_utf8(&result.result);
    let json = text
        .ok()
        .and_then(|text| serde_json::from_str::<&RawValue>(text).ok());
    match (result.result_encoding(), json, text) {
        (pb::Encoding::Json, Some(json), _) => json!({"worker": result.worker, "result": json}),
        (pb::Encoding::Text, _, Ok(text)) => json!({"worker": result.worker, "result": text}),
        _ => json!({"worker": result.worker, "result_base64": BASE64.encode(&result.result)}),
    }
}
