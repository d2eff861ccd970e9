//! Calls shared by several benchmarks.

use std::time::Duration;

use anyhow::{Context, ensure};
use taskd::wire::pb::{self, tasks_client::TasksClient};
use tonic::transport::Channel;

const PAYLOAD: [u8; 100] = [b'x'; 100];
/// Long enough that no call times out and has to be repeated.
pub(crate) const WAIT: Option<prost_types::Duration> = Some(prost_types::Duration {
    seconds: 20,
    nanos: 0,
});

/// The pause between single tasks. It is long enough that everything becomes idle, and varies so
/// that it does not synchronize with taskd's loops.
pub(crate) fn pause(sample: usize) -> Duration {
    Duration::from_micros(5_000 + (sample as u64 * 2_654_435_761) % 10_000)
}

pub(crate) fn new_task(queue: &str, number: usize) -> pb::NewTask {
    let key = format!("https://www.example.org/pages/{number:012}").into();
    pb::NewTask {
        queue: queue.to_owned(),
        key,
        payload: PAYLOAD.to_vec().into(),
        ..Default::default()
    }
}

/// Completes tasks; returns their ids, and fails unless all are answered with OK.
pub(crate) async fn complete(
    client: &mut TasksClient<Channel>,
    worker: &str,
    tasks: Vec<pb::LeasedTask>,
) -> anyhow::Result<Vec<String>> {
    let completions = tasks.into_iter().map(|task| pb::Completion {
        id: task.id,
        lease_token: task.lease_token,
        result: br#"{"ok":true}"#.to_vec().into(),
        ..Default::default()
    });
    let request = pb::CompleteTasksRequest {
        worker: worker.to_owned(),
        completions: completions.collect(),
        next: None,
    };
    let results = client
        .complete_tasks(request)
        .await
        .context("complete")?
        .into_inner()
        .results;
    let wrong = results
        .iter()
        .find(|result| result.status() != pb::ItemStatus::Ok);
    ensure!(wrong.is_none(), "a completion was answered {wrong:?}");
    Ok(results.into_iter().map(|result| result.id).collect())
}
