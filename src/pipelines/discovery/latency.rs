//! Measures how long completed tasks took, from their insert.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    model::{Priority, QueueName, StoredStatus, TraceContext, TraceId},
    store::{Settled, Settlement},
    telemetry::metrics,
};

/// The time of a completed task, and its trace if it is sampled.
type Done = (Duration, Option<TraceId>);

/// Measures the tasks that these reports have completed. Leaves out reports that were settled
/// before.
///
/// The time of the insert is part of the id. Both times come from Redis's clock.
pub(super) fn completed(
    reports: &[Settlement],
    traces: impl Iterator<Item = Option<TraceContext>>,
    answers: &[Settled],
) {
    let mut done: BTreeMap<(&QueueName, Priority), Vec<Done>> = BTreeMap::new();
    for ((report, trace), settled) in reports.iter().zip(traces).zip(answers) {
        let (Settlement::Completed { id, at_unix_ms, .. }, Some(task)) = (report, &settled.task)
        else {
            continue;
        };
        if settled.repeated || settled.surplus || settled.status != Some(StoredStatus::Completed) {
            continue;
        }
        let took = u64::try_from(at_unix_ms.saturating_sub(id.created_unix_ms())).unwrap_or(0);
        let of_series = done.entry((&task.queue, task.priority)).or_default();
        of_series.push((Duration::from_millis(took), trace.map(|trace| trace.trace)));
    }
    for ((queue, priority), tasks) in done {
        metrics::tasks_completed(queue.as_str(), priority, tasks);
    }
}
