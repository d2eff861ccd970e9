//! `taskd insert --wait`: waits until the tasks are final or their trees have ended, and prints a
//! line for each.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use backon::BackoffBuilder as _;
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use clap::ValueEnum;
use serde_json::{Value, json, value::RawValue};

use super::progress::Progress;
use crate::{
    cli::{
        client::{self, Taskd, WAITS, is_transient},
        print::print,
        tree::state_of,
    },
    model::TaskStatus,
    wire::{
        pb::{self, discovery_client::DiscoveryClient},
        task_status,
    },
};

/// The longest wait in one call. It must be shorter than the timeout for an answer.
const OF_A_CALL: Duration = Duration::from_secs(30);
/// If an answer comes sooner than this and some tasks are still open, wait before asking again.
const SOON: Duration = Duration::from_secs(1);
/// After more calls in a row without progress, give up on the results that taskd left out.
const MOST_IN_VAIN: u32 = 7;

const UNKNOWN: &str = "taskd does not say what became of the tasks";

/// What `--wait` waits for.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(super) enum Awaited {
    Task,
    Tree,
}

impl From<Awaited> for pb::WaitFor {
    fn from(awaited: Awaited) -> Self {
        match awaited {
            Awaited::Task => Self::Task,
            Awaited::Tree => Self::Tree,
        }
    }
}

/// Returns the tasks that taskd has stored, for the calls that wait for them. Their deadlines are
/// left out, because taskd would reject one that has passed, and their trees unless the calls wait
/// for these: taskd would reject a tree that retention has removed.
pub(super) fn stored(
    sent: &[(u64, pb::NewTask)],
    results: &[pb::InsertResult],
    wait_for: Awaited,
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
                    tree: task.tree.clone().filter(|_| wait_for == Awaited::Tree),
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

/// Waits for tasks that taskd has stored, and prints each one when it is final or its tree has
/// ended, or all when the time is over. Each task comes with the number of its line.
///
/// This inserts the tasks again: taskd answers `DUPLICATE` for them, and waits as for new ones.
pub(super) async fn wait(
    mut client: DiscoveryClient<Taskd>,
    tasks: Vec<(u64, pb::NewTask)>,
    wait_for: Awaited,
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
                wait_for: pb::WaitFor::from(wait_for).into(),
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
                // Give up on missing results only if no task is unfinished: until then there are
                // further calls anyway.
                in_vain = if brought || open.iter().any(|one| one.completed.is_none()) {
                    0
                } else {
                    in_vain + 1
                };
                if !brought {
                    // The results of the first task may be too large for an answer. Put it last, so
                    // that those of the others come without it.
                    open.rotate_left(1);
                }
                // taskd may answer early, because it has no capacity for another watch or because
                // the task was removed. Then back off.
                if asked.elapsed() > SOON || brought {
                    waits = WAITS.build();
                }
                if asked.elapsed() <= SOON && !open.is_empty() {
                    tokio::time::sleep(waits.next().unwrap_or_default()).await;
                }
            }
            Err(status) if is_transient(&status) => {
                if left.is_zero() {
                    // If all open tasks are completed, only their results are missing. Otherwise
                    // fail.
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

/// Prints the tasks that need no further call, and returns the others. These include completed
/// tasks whose results did not fit into the answer.
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
        // Keep what is known if the answer has no status, for example because SQL is away.
        let completed = match status {
            Some(status) => (status == TaskStatus::Completed).then(|| result.id.clone()),
            None => completed,
        };
        // If several tasks have the same key, only the first one gets results.
        let is_first = result.id.is_empty() || seen.insert(result.id.clone());
        let is_rejected = result.status() == pb::InsertStatus::Rejected;
        let tree_state = result.tree_state();
        if tree_state == pb::TreeState::Open && !is_over {
            still.push(Open {
                number,
                task,
                completed: None,
            });
            continue;
        }
        if completed.is_some() && is_first && result.results.is_empty() {
            still.push(Open {
                number,
                task,
                completed,
            });
            continue;
        } else if is_rejected {
            // taskd had stored this task, so say why it is rejected now.
            progress.say(&format!("line {number}: {}", result.error));
        } else if !is_over && !status.is_some_and(TaskStatus::is_final) {
            still.push(Open {
                number,
                task,
                completed: None,
            });
            continue;
        }
        let mut line = line_of(number, &task, &result.id, status, &result.results);
        if tree_state != pb::TreeState::Unspecified {
            line["tree"] = result.tree.into();
            line["tree_state"] = state_of(tree_state).into();
        }
        // A closed stdout is not an error: the remaining lines are inserted all the same.
        print(line)?;
        progress.ended(match tree_state {
            pb::TreeState::Unspecified => status == Some(TaskStatus::Completed),
            state => state == pb::TreeState::Done,
        });
    }
    Ok(still)
}

/// Prints the open tasks, all of them completed, without their results.
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
        print(line_of(*number, task, id, Some(TaskStatus::Completed), &[]))?;
        progress.ended(true);
    }
    Ok(())
}

/// What is printed of a task.
fn line_of(
    number: u64,
    task: &pb::NewTask,
    id: &str,
    status: Option<TaskStatus>,
    results: &[pb::TaskResult],
) -> Value {
    json!({
        "line": number,
        "id": id,
        "queue": task.queue,
        "key": String::from_utf8_lossy(&task.key),
        "status": status.map(TaskStatus::as_str),
        "results": results.iter().map(shown).collect::<Vec<_>>(),
    })
}

/// Formats a result: JSON as JSON, text as text, bytes in base64.
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
