//! `taskd insert --wait`: waits for the ends of the tasks, and prints a line for each.

use std::time::{Duration, Instant};

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

/// Waits for tasks that taskd has, by their lines, and prints each when it is final, or when the time is over.
///
/// An insert of a task that is there is answered `DUPLICATE`, and waits for it as the first one did.
pub(super) async fn wait(
    mut client: DiscoveryClient<Taskd>,
    mut open: Vec<(u64, pb::NewTask)>,
    until: Instant,
    progress: &Progress<'_>,
) -> anyhow::Result<()> {
    let mut waits = WAITS.build();
    while !open.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        let tasks = open.iter().map(|(_, task)| task.clone()).collect();
        let wait = prost_types::Duration::try_from(left.min(OF_A_CALL)).ok();
        let asked = Instant::now();
        match client.insert_tasks(pb::InsertTasksRequest { tasks, wait }).await {
            Ok(answer) => {
                progress.heard();
                let mut still = Vec::new();
                for ((number, task), result) in open.into_iter().zip(answer.into_inner().results) {
                    // The line of a rejected task is reported already.
                    if result.status() == pb::InsertStatus::Rejected {
                        continue;
                    }
                    let status = task_status(result.task_status);
                    if !left.is_zero() && !status.is_some_and(TaskStatus::is_final) {
                        still.push((number, task));
                        continue;
                    }
                    tell(number, &task, &result, status)?;
                    progress.ended(status == Some(TaskStatus::Completed));
                }
                open = still;
                // taskd may answer early with what it knows: it had no place for a watch, or the task was removed.
                if asked.elapsed() > SOON {
                    waits = WAITS.build();
                } else if !open.is_empty() {
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
