//! The results side: what workers reported becomes results, statuses and new tasks.

use std::{sync::Arc, time::Instant};

use prost::Message as _;
use tokio_util::sync::CancellationToken;

use super::Parts;
use crate::{
    bus::{Message, Reading, Topic},
    model::{self, QueueName, TaskId, TaskRow, validate},
    pb,
    store::{Inserted, Settled, Settlement},
    supervise::{Beat, Supervisor},
    telemetry::metrics::{self, Dropped, Source},
};

/// Records of `task-results` read at once; each has up to a thousand reports.
const RECORDS: usize = 64;

pub(super) fn start(parts: &Parts, supervisor: &Supervisor) {
    let (parts, stop) = (parts.clone(), supervisor.stop_token());
    let beat = Arc::new(supervisor.progress().register("discovery/results"));
    supervisor.spawn("discovery/results", move || consume(parts.clone(), Arc::clone(&beat), stop.clone()));
}

async fn consume(parts: Parts, beat: Arc<Beat>, stop: CancellationToken) -> anyhow::Result<()> {
    let mut subscription = parts.outbox.bus.subscribe(Topic::TaskResults, Reading::Shared).await?;
    loop {
        let messages = tokio::select! {
            messages = beat.idle(subscription.next(RECORDS)) => messages?,
            () = stop.cancelled() => return Ok(()),
        };
        handle(&parts, &messages).await?;
        subscription.commit(&messages).await?;
        beat.beat();
    }
}

async fn handle(parts: &Parts, messages: &[Message]) -> anyhow::Result<()> {
    let started = Instant::now();
    let (mut settlements, mut poison) = (Vec::new(), Vec::new());
    for message in messages {
        match pb::ReportBatch::decode(message.value.clone()) {
            Ok(batch) => {
                for report in batch.reports {
                    match settlement(parts, report) {
                        Ok(settlement) => settlements.push(settlement),
                        Err(reason) => poison.push((message.clone(), reason)),
                    }
                }
            }
            Err(error) => poison.push((message.clone(), error.to_string())),
        }
    }
    parts.outbox.bury(Topic::TaskResults, &poison).await?;
    let discovered: Vec<Vec<TaskRow>> = settlements.iter().map(discovered).collect();
    let settled = parts.outbox.store.settle(settlements).await?;
    let (new, duplicates) = new_tasks(discovered, &settled);
    metrics::discovery_batch(Source::Results, new.len() + duplicates, new.len(), duplicates, started.elapsed());
    let publish: Vec<_> = new.iter().filter(|row| parts.outbox.goes_out_now(row, &parts.settings)).cloned().collect();
    parts.publish(&publish).await?;
    parts.mark(&new).await;
    let closed: Vec<(QueueName, model::KeyHash)> = settled.into_iter().filter_map(|one| one.key).collect();
    if let Err(error) = parts.filter.forget(&closed).await {
        tracing::debug!("could not take {} keys out of the filter: {error}", closed.len());
    }
    Ok(())
}

fn settlement(parts: &Parts, report: pb::Report) -> Result<Settlement, String> {
    let id = TaskId::from_slice(&report.task_id).ok_or("a report whose task_id has not 16 bytes")?;
    let at_unix_ms = report.at_unix_ms;
    match report.what {
        Some(pb::report::What::Completed(done)) => {
            let rows = done.discovered.into_iter().enumerate().filter_map(|(index, task)| {
                let index = u32::try_from(index).ok()?;
                row(parts, task, TaskId::derived(id, &done.worker, index, at_unix_ms))
            });
            let discovered = rows.map(|row| parts.outbox.new_row(row, &parts.settings)).collect();
            let (worker, result, attempt) = (done.worker, done.result, done.attempt);
            Ok(Settlement::Completed { id, worker, result, attempt, at_unix_ms, discovered })
        }
        Some(pb::report::What::Died(died)) => {
            Ok(Settlement::Died { id, reason: died.reason, attempts: died.attempts, at_unix_ms })
        }
        None => Err("a report of a kind that this version does not know".into()),
    }
}

/// A discovered task. The tasks service has checked it before it answered OK; settings may have changed since.
fn row(parts: &Parts, task: pb::NewTask, id: TaskId) -> Option<TaskRow> {
    let settings = &parts.settings;
    let queue = QueueName::new(&task.queue);
    let of_queue = queue.as_ref().map_or(&settings.queues.default, |queue| settings.queues.get(queue));
    let partitions = parts.outbox.bus.partitions(Topic::Pipeline);
    match validate::task_row(task, id, of_queue, &settings.limits, partitions, model::now_unix_ms()) {
        Ok(row) => Some(row),
        Err(error) => {
            tracing::warn!("dropped a discovered task: {error}");
            metrics::discovery_dropped(Dropped::Rejected, 1);
            None
        }
    }
}

fn discovered(settlement: &Settlement) -> Vec<TaskRow> {
    match settlement {
        Settlement::Completed { discovered, .. } => discovered.iter().map(|new| new.task.clone()).collect(),
        Settlement::Died { .. } => Vec::new(),
    }
}

/// The rows that were new, and how many were not.
fn new_tasks(discovered: Vec<Vec<TaskRow>>, settled: &[Settled]) -> (Vec<TaskRow>, usize) {
    let (mut new, mut duplicates) = (Vec::new(), 0);
    for (rows, settled) in discovered.into_iter().zip(settled) {
        for (row, inserted) in rows.into_iter().zip(&settled.discovered) {
            match inserted {
                Inserted::New => new.push(row),
                Inserted::Duplicate { .. } => duplicates += 1,
            }
        }
    }
    (new, duplicates)
}
