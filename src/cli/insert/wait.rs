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

/// The tasks that taskd has stored, as later calls name them: a deadline that passes meanwhile is no mistake of theirs.
pub(super) fn stored(sent: &[(u64, pb::NewTask)], results: &[pb::InsertResult]) -> Vec<(u64, pb::NewTask)> {
    let is_stored = |status| matches!(status, pb::InsertStatus::Created | pb::InsertStatus::Duplicate);
    let stored = sent.iter().zip(results).filter(|(_, result)| is_stored(result.status()));
    stored.map(|((number, task), _)| (*number, pb::NewTask { deadline: None, ..task.clone() })).collect()
}

/// Waits for tasks that taskd has, by their lines, and prints each when it is final, or when the time is over.
///
/// An insert of a task that is there is answered `DUPLICATE`, and waits for it as the first one did.
pub(super) async fn wait(
    mut client: DiscoveryClient<Taskd>,
    mut open: Vec<(u64, pb::NewTask)>,
    until: Instant,
    progress: &Progress<'_>,
) -> anyhow::Result<()> {
    let (mut waits, mut in_vain) = (WAITS.build(), 0);
    while !open.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        let tasks = open.iter().map(|(_, task)| task.clone()).collect();
        let wait = prost_types::Duration::try_from(left.min(OF_A_CALL)).ok();
        let asked = Instant::now();
        match client.insert_tasks(pb::InsertTasksRequest { tasks, wait, max_bytes: u64::MAX }).await {
            Ok(answer) => {
                progress.heard();
                let (before, is_last) = (open.len(), in_vain == MOST_IN_VAIN);
                let answers = open.into_iter().zip(answer.into_inner().results);
                let mut asks = still_open(answers, left.is_zero(), is_last, progress)?;
                in_vain = if asks.has_unfinished || asks.open.len() < before { 0 } else { in_vain + 1 };
                if in_vain > 0 {
                    // The results of one task may be too large for an answer: those of the others come without it.
                    asks.open.rotate_left(1);
                }
                open = asks.open;
                // taskd may answer early with what it knows: it had no place for a watch, or the task was removed.
                if asked.elapsed() > SOON || open.len() < before {
                    waits = WAITS.build();
                }
                if asked.elapsed() <= SOON && !open.is_empty() {
                    tokio::time::sleep(waits.next().unwrap_or_default()).await;
                }
            }
            Err(status) if is_transient(&status) && !left.is_zero() => {
                progress.failed(&status);
                tokio::time::sleep(waits.next().unwrap_or_default()).await;
            }
            Err(status) => anyhow::bail!("taskd does not say what became of the tasks: {}", client::said(&status)),
        }
    }
    Ok(())
}

/// The tasks to ask for again.
struct Open {
    open: Vec<(u64, pb::NewTask)>,
    has_unfinished: bool,
}

/// Prints the tasks that need no further call. Completed tasks whose results had no room in the answer are asked for
/// again, except at the last time.
fn still_open(
    answers: impl Iterator<Item = ((u64, pb::NewTask), pb::InsertResult)>,
    is_over: bool,
    is_last: bool,
    progress: &Progress<'_>,
) -> anyhow::Result<Open> {
    let (mut still, mut seen) = (Open { open: Vec::new(), has_unfinished: false }, HashSet::new());
    for ((number, task), result) in answers {
        let status = task_status(result.task_status);
        // taskd had stored it.
        let is_rejected = result.status() == pb::InsertStatus::Rejected;
        // Of several tasks with one key only the first has results.
        let is_first = seen.insert(result.id.clone());
        let lacks_results = status == Some(TaskStatus::Completed) && is_first && result.results.is_empty();
        if is_rejected {
            progress.say(&format!("line {number}: {}", result.error));
        } else if !is_over && !status.is_some_and(TaskStatus::is_final) {
            still.has_unfinished = true;
            still.open.push((number, task));
            continue;
        } else if lacks_results && !is_last {
            still.open.push((number, task));
            continue;
        } else if lacks_results {
            let id = &result.id;
            progress.say(&format!("line {number}: taskd left out the results; GET /v1/tasks/{id}/results has them"));
        }
        tell(number, &task, &result, status)?;
        progress.ended(status == Some(TaskStatus::Completed));
    }
    Ok(still)
}

fn tell(number: u64, task: &pb::NewTask, result: &pb::InsertResult, status: Option<TaskStatus>) -> anyhow::Result<()> {
    let results: Vec<Value> = result.results.iter().map(shown).collect();
    let line = json!({
        "line": number,
        "id": result.id,
        "queue": task.queue,
        "key": String::from_utf8_lossy(&task.key),
        "status": status.map(TaskStatus::as_str),
        "results": results,
    });
    // A reader of stdout that is gone is no error: the rest is to be inserted all the same.
    Ok(print(line)?)
}

/// JSON as JSON, text as text, bytes in base64.
fn shown(result: &pb::TaskResult) -> Value {
    let text = std::str::from_utf8(&result.result);
    let json = text.ok().and_then(|text| serde_json::from_str::<&RawValue>(text).ok());
    match (result.result_encoding(), json, text) {
        (pb::Encoding::Json, Some(json), _) => json!({"worker": result.worker, "result": json}),
        (pb::Encoding::Text, _, Ok(text)) => json!({"worker": result.worker, "result": text}),
        _ => json!({"worker": result.worker, "result_base64": BASE64.encode(&result.result)}),
    }
}
