//! Every metric: its name, unit and labels. Names are `taskd_<subject>_<what>_<unit>[_total]`.
//!
//! One function per event records everything that the event means, so that related numbers never
//! disagree. Label values are enums or names of queues, scripts and operations. Ids go into logs,
//! never here.

mod changes;
mod discovery;
mod enrichment;
mod events;
mod fanout;
mod feeds;
mod history;
mod label;
mod latency;
mod limits;
mod process;
mod servers;
mod sessions;
mod topics;
mod traces;
mod trees;
mod watchdog;
mod workers;
mod workflows;

use std::time::Duration;

use ::metrics::gauge;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder};

pub use self::{
    changes::*, discovery::*, enrichment::*, events::*, fanout::*, feeds::*, history::*,
    latency::*, limits::*, process::*, servers::*, sessions::*, topics::*, traces::*, trees::*,
    watchdog::*, workers::*, workflows::*,
};
pub use super::series::Handle;
use super::{error::Error, logging, openmetrics, series::Recorders};

/// The interval of [`upkeep`].
const UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// Only rendering drops old series, so the metrics are rendered at every upkeep of this number.
const RENDER_AT: u64 = 12;

/// Installs the recorder, once per process. What was recorded before is lost.
///
/// The series of a queue are dropped when nothing was recorded for it for `forget_queues_after`
/// (zero: never).
pub fn install(forget_queues_after: Duration) -> Result<Handle, Error> {
    latency::forget_after(forget_queues_after);
    let recorders = Recorders::new(builder()?, builder()?, forget_queues_after);
    let handle = recorders.handle();
    recorders.install()?;
    describe();
    metrics_process::Collector::default().describe();
    gauge!(
        BUILD_INFO,
        "version" => env!("CARGO_PKG_VERSION"),
        "commit" => env!("BUILD_COMMIT"),
    )
    .set(1.0);
    Ok(handle)
}

/// Renders the metrics as OpenMetrics, with exemplars.
pub fn openmetrics(handle: &Handle) -> String {
    openmetrics::openmetrics(&handle.render(), latency::add_exemplar)
}

/// Moves what histograms have gathered into their buckets, and drops old series, for ever.
///
/// Without it both grow until somebody scrapes.
pub async fn upkeep(handle: Handle) {
    let mut ticks = tokio::time::interval(UPKEEP_EVERY);
    for tick in 0_u64.. {
        ticks.tick().await;
        process::dropped_log_lines(logging::dropped_lines());
        handle.run_upkeep();
        if tick % RENDER_AT == 0 {
            drop(handle.render());
        }
    }
}

fn builder() -> Result<PrometheusBuilder, BuildError> {
    // Above the 60 s of `max_wait`, since a get that waits for that long ends a little later.
    const SECONDS: [f64; 16] = [
        0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 4.0, 16.0,
        32.0, 64.0,
    ];
    const SIZES: [f64; 10] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_duration_seconds".into()), &SECONDS)
        .and_then(|builder| {
            builder.set_buckets_for_metric(Matcher::Full(TASKS_LATENCY.into()), &latency::BUCKETS)
        })
        .and_then(|builder| {
            builder.set_buckets_for_metric(Matcher::Full(TREES_SECONDS.into()), &latency::BUCKETS)
        })
        .and_then(|builder| {
            builder.set_buckets_for_metric(Matcher::Full(WORKFLOW_LATENESS.into()), &SECONDS)
        })
        .and_then(|builder| {
            builder.set_buckets_for_metric(Matcher::Suffix("_size_tasks".into()), &SIZES)
        })
        .and_then(|builder| {
            builder.set_buckets_for_metric(Matcher::Suffix("_size_records".into()), &SIZES)
        })
        .and_then(|builder| {
            builder.set_buckets_for_metric(Matcher::Suffix("_size_items".into()), &SIZES)
        })
}

fn describe() {
    changes::describe();
    discovery::describe();
    enrichment::describe();
    events::describe();
    topics::describe();
    fanout::describe();
    feeds::describe();
    workers::describe();
    latency::describe();
    watchdog::describe();
    history::describe();
    limits::describe();
    servers::describe();
    sessions::describe();
    traces::describe();
    trees::describe();
    workflows::describe();
    process::describe();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_recorded_is_rendered_with_its_name_unit_and_buckets() {
        let recorder = builder().unwrap().build_recorder();
        let handle = recorder.handle();
        ::metrics::with_local_recorder(&recorder, || {
            describe();
            discovery_batch(Source::Api, 10, 7, 3, Duration::from_millis(3));
            fanout_batch(
                FanoutBatch {
                    records: 4,
                    enqueued: 3,
                    repeated: 1,
                    ..Default::default()
                },
                Duration::from_millis(1),
            );
            tasks_call(Method::Get, CallResult::Empty, Duration::from_millis(1));
            queue_depth(
                "crawl",
                QueueDepth {
                    waiting: 5,
                    oldest: Duration::from_secs(2),
                    ..Default::default()
                },
            );
        });
        let text = handle.render();
        let lines = [
            "taskd_discovery_in_tasks_total{source=\"api\"} 10",
            "taskd_discovery_created_tasks_total 7",
            "taskd_discovery_dropped_tasks_total{reason=\"duplicate\"} 3",
            "taskd_discovery_batch_duration_seconds_bucket{le=\"0.004\"} 1",
            "taskd_discovery_batch_size_tasks_bucket{le=\"10\"} 1",
            "taskd_fanout_dropped_records_total{reason=\"repeated\"} 1",
            "taskd_tasks_calls_total{method=\"get\",result=\"empty\"} 1",
            "taskd_queue_depth_tasks{queue=\"crawl\",state=\"waiting\"} 5",
            "taskd_queue_oldest_waiting_seconds{queue=\"crawl\"} 2",
            "# HELP taskd_discovery_created_tasks_total Tasks stored as new",
        ];
        for line in lines {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
