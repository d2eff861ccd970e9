//! Every metric: its name, unit and labels. Names are `taskd_<subject>_<what>_<unit>[_total]`.
//!
//! One function per event records all that the event means, so that numbers that belong together never drift apart.
//! Label values are enums, queue names or script names; ids go into logs, never here.

use std::time::Duration;

use ::metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use anyhow::Context;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};

pub use super::series::Handle;
use super::series::Recorders;

/// How often [`upkeep`] is due.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// Old series leave when they are rendered: at every so manyth upkeep.
const RENDER_AT: u64 = 12;

pub const DISCOVERY_IN: &str = "taskd_discovery_in_tasks_total";
pub const DISCOVERY_CREATED: &str = "taskd_discovery_created_tasks_total";
pub const DISCOVERY_DROPPED: &str = "taskd_discovery_dropped_tasks_total";
pub const DISCOVERY_LETTERED: &str = "taskd_discovery_lettered_tasks_total";
pub const DISCOVERY_BATCH_SIZE: &str = "taskd_discovery_batch_size_tasks";
pub const DISCOVERY_BATCH_DURATION: &str = "taskd_discovery_batch_duration_seconds";

pub const DISCOVERY_INSERT_DURATION: &str = "taskd_discovery_insert_duration_seconds";

pub const DISCOVERY_DEPTH: &str = "taskd_discovery_depth_tasks";

pub const OUTBOX_PUBLISHED: &str = "taskd_outbox_published_tasks_total";
pub const OUTBOX_REPUBLISHED: &str = "taskd_outbox_republished_tasks_total";

pub const FANOUT_IN: &str = "taskd_fanout_in_records_total";
pub const FANOUT_ENQUEUED: &str = "taskd_fanout_enqueued_tasks_total";
pub const FANOUT_DROPPED: &str = "taskd_fanout_dropped_records_total";
pub const FANOUT_PARKED: &str = "taskd_fanout_parked_tasks_total";
pub const FANOUT_POISON: &str = "taskd_fanout_poison_records_total";
pub const FANOUT_BATCH_SIZE: &str = "taskd_fanout_batch_size_records";
pub const FANOUT_BATCH_DURATION: &str = "taskd_fanout_batch_duration_seconds";

pub const FANOUT_OLDEST: &str = "taskd_fanout_oldest_seconds";

pub const BUS_BACKLOG: &str = "taskd_bus_backlog_records";

pub const TASKS_CALLS: &str = "taskd_tasks_calls_total";
pub const TASKS_CALL_DURATION: &str = "taskd_tasks_call_duration_seconds";
pub const TASKS_ITEMS: &str = "taskd_tasks_items_total";
pub const TASKS_REJECTED: &str = "taskd_tasks_rejected_total";
pub const TASKS_CLAIMED: &str = "taskd_tasks_claimed_tasks_total";

pub const QUEUE_DEPTH: &str = "taskd_queue_depth_tasks";
pub const QUEUE_OLDEST: &str = "taskd_queue_oldest_waiting_seconds";

pub const WATCHDOG_HANDLED: &str = "taskd_watchdog_handled_tasks_total";
pub const WATCHDOG_LEADS: &str = "taskd_watchdog_leading_processes";
pub const WATCHDOG_STEP_DURATION: &str = "taskd_watchdog_step_duration_seconds";

pub const RESULTS_FORWARDED: &str = "taskd_results_forwarded_reports_total";
pub const RESULTS_BATCH_SIZE: &str = "taskd_results_batch_size_items";
pub const RESULTS_BATCH_DURATION: &str = "taskd_results_batch_duration_seconds";
pub const RESULTS_DEPTH: &str = "taskd_results_depth_entries";

pub const REDIS_USED: &str = "taskd_redis_memory_used_bytes";
pub const REDIS_LIMIT: &str = "taskd_redis_memory_limit_bytes";
pub const HTTP_DURATION: &str = "taskd_http_request_duration_seconds";
pub const GRPC_DURATION: &str = "taskd_grpc_call_duration_seconds";
pub const GRPC_OVERSIZED: &str = "taskd_grpc_oversized_answers_total";
pub const REQUESTS_HELD: &str = "taskd_requests_held_bytes";

pub const BUILD_INFO: &str = "taskd_build_info";

pub const SCRIPT_DURATION: &str = "taskd_redis_script_duration_seconds";
pub const SCRIPT_BATCH_SIZE: &str = "taskd_redis_script_batch_size_items";

pub const SQL_DURATION: &str = "taskd_sql_operation_duration_seconds";
pub const SQL_RETRIES: &str = "taskd_sql_operation_retries_total";

/// Label values: a closed set of names.
macro_rules! label {
    ($(#[$doc:meta])* $name:ident { $($variant:ident = $text:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($variant),* }

        impl $name {
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),* }
            }
        }
    };
}

label! {
    /// Where discovery got a task from.
    Source { Api = "api", Results = "results" }
}
label! {
    /// Why discovery did not make a task of it. Duplicates are counted with their batch.
    Dropped { Duplicate = "duplicate", Rejected = "rejected", MaxQueues = "max_queues", Busy = "busy" }
}
label! {
    /// Why a discovered task went to dead-letters.
    Lettered { MaxUnfinished = "max_unfinished", MaxQueues = "max_queues", Invalid = "invalid" }
}
label! {
    /// Why a stored task was published by the watchdog.
    Republished { Unpublished = "unpublished", Scheduled = "scheduled", Unparked = "unparked", Missing = "missing" }
}
label! {
    /// Why the fanout did not enqueue a record.
    FanoutDropped { Repeated = "repeated", AgainFinal = "again_final" }
}
label! {
    /// A call of the tasks service.
    Method { Get = "get", Complete = "complete", Reject = "reject", Extend = "extend" }
}
label! {
    /// How a call as a whole ended.
    CallResult { Ok = "ok", Empty = "empty", Invalid = "invalid", Unavailable = "unavailable" }
}
label! {
    /// What a rejection made of a task.
    Rejected { Retried = "retried", Dead = "dead" }
}
label! {
    /// What the watchdog did with a task. Undelivered: its lease ran out before its worker had it.
    Watched {
        Expired = "expired",
        Retried = "retried",
        Dead = "dead",
        Promoted = "promoted",
        Republished = "republished",
        Settled = "settled",
        Removed = "removed",
        Undelivered = "undelivered",
    }
}

/// What became of one batch of records in the fanout.
#[derive(Clone, Copy, Debug, Default)]
pub struct FanoutBatch {
    pub records: usize,
    pub enqueued: usize,
    pub repeated: usize,
    pub again_final: usize,
    pub parked: usize,
    pub poison: usize,
}

/// A queue at one moment, all shards together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueDepth {
    pub pending: u64,
    pub waiting: u64,
    pub leased: u64,
    pub delayed: u64,
    /// How long the oldest waiting task has waited; zero when none waits.
    pub oldest: Duration,
}

/// Installs the process's recorder; once per process. What is recorded before is lost. Series of a queue go when
/// nothing was recorded for it for so long (zero: never).
pub fn install(forget_queues_after: Duration) -> anyhow::Result<Handle> {
    let recorders = Recorders::new(builder()?, forget_queues_after);
    let handle = recorders.handle();
    recorders.install()?;
    describe();
    metrics_process::Collector::default().describe();
    gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    Ok(handle)
}

/// Moves what histograms have gathered to where it is rendered from, for ever. Without it they grow until somebody
/// scrapes; so does the number of series that are not needed any more.
pub async fn upkeep(handle: Handle) {
    let mut ticks = tokio::time::interval(UPKEEP_EVERY);
    for tick in 0_u64.. {
        ticks.tick().await;
        handle.run_upkeep();
        if tick % RENDER_AT == 0 {
            drop(handle.render());
        }
    }
}

fn builder() -> anyhow::Result<PrometheusBuilder> {
    // A poll that has waited for the 60 seconds of `max_wait` ends a little later.
    const SECONDS: [f64; 16] =
        [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 4.0, 16.0, 32.0, 64.0];
    const SIZES: [f64; 10] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];
    let builder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_duration_seconds".into()), &SECONDS)
        .and_then(|builder| builder.set_buckets_for_metric(Matcher::Suffix("_size_tasks".into()), &SIZES))
        .and_then(|builder| builder.set_buckets_for_metric(Matcher::Suffix("_size_records".into()), &SIZES))
        .and_then(|builder| builder.set_buckets_for_metric(Matcher::Suffix("_size_items".into()), &SIZES));
    builder.context("cannot set up histogram buckets")
}

fn describe() {
    describe_counter!(DISCOVERY_IN, Unit::Count, "Tasks that came in, by source: the insert API or workers' results");
    describe_counter!(DISCOVERY_CREATED, Unit::Count, "Tasks stored as new");
    describe_counter!(DISCOVERY_DROPPED, Unit::Count, "Tasks not stored, by reason");
    describe_counter!(
        DISCOVERY_LETTERED,
        Unit::Count,
        "Discovered tasks sent to dead-letters instead of being stored, by reason"
    );
    describe_histogram!(DISCOVERY_BATCH_SIZE, Unit::Count, "Tasks per batch");
    describe_histogram!(DISCOVERY_BATCH_DURATION, Unit::Seconds, "From taking a batch to its SQL commit");
    describe_histogram!(DISCOVERY_INSERT_DURATION, Unit::Seconds, "From an insert's call to the answers, by caller");
    describe_gauge!(DISCOVERY_DEPTH, Unit::Count, "Tasks of callers that wait to be stored");
    describe_counter!(OUTBOX_PUBLISHED, Unit::Count, "Tasks published right after they were stored");
    describe_counter!(OUTBOX_REPUBLISHED, Unit::Count, "Tasks published by the watchdog, by reason");
    describe_counter!(FANOUT_IN, Unit::Count, "Records read from the bus");
    describe_counter!(FANOUT_ENQUEUED, Unit::Count, "Tasks put into their queue");
    describe_counter!(FANOUT_DROPPED, Unit::Count, "Records that needed no enqueuing, by reason");
    describe_counter!(FANOUT_PARKED, Unit::Count, "Tasks sent back to the outbox because their queue is full");
    describe_counter!(FANOUT_POISON, Unit::Count, "Records that could not be decoded, sent to dead-letters");
    describe_histogram!(FANOUT_BATCH_SIZE, Unit::Count, "Records per batch");
    describe_histogram!(FANOUT_BATCH_DURATION, Unit::Seconds, "From reading a batch to its enqueuing");
    describe_gauge!(FANOUT_OLDEST, Unit::Seconds, "How long ago the oldest record of the last batch was published");
    describe_gauge!(BUS_BACKLOG, Unit::Count, "Records that nobody has dealt with yet, by topic");
    describe_counter!(TASKS_CALLS, Unit::Count, "Workers' calls, by method and result");
    describe_histogram!(TASKS_CALL_DURATION, Unit::Seconds, "Workers' calls, by method; get includes its wait");
    describe_counter!(TASKS_ITEMS, Unit::Count, "Answers to single items, by method and status");
    describe_counter!(TASKS_REJECTED, Unit::Count, "Tasks that workers gave back, by what became of them");
    describe_counter!(TASKS_CLAIMED, Unit::Count, "Tasks handed out, by queue");
    describe_gauge!(
        QUEUE_DEPTH,
        Unit::Count,
        "Tasks by queue and state: pending (in SQL alone), waiting, leased, delayed"
    );
    describe_gauge!(QUEUE_OLDEST, Unit::Seconds, "Age of the oldest waiting task, by queue");
    describe_counter!(WATCHDOG_HANDLED, Unit::Count, "Tasks the watchdog dealt with, by what it did");
    describe_gauge!(WATCHDOG_LEADS, "1 in the one process that does the watchdog's work now");
    describe_histogram!(WATCHDOG_STEP_DURATION, Unit::Seconds, "One step of one of its loops, by loop");
    describe_counter!(RESULTS_FORWARDED, Unit::Count, "Reports moved from Redis to task-results");
    describe_histogram!(RESULTS_BATCH_SIZE, Unit::Count, "Reports moved at once");
    describe_histogram!(RESULTS_BATCH_DURATION, Unit::Seconds, "From reading a batch in Redis to its removal there");
    describe_gauge!(
        RESULTS_DEPTH,
        Unit::Count,
        "Entries in Redis that are not on the bus yet: completions of one call, deaths, expiries"
    );
    describe_gauge!(REDIS_USED, Unit::Bytes, "Memory that counts for the limit, by server");
    describe_gauge!(
        REDIS_LIMIT,
        Unit::Bytes,
        "maxmemory or redis_max_memory, by server; 0 is none. At 80 % inserts are refused"
    );
    describe_histogram!(
        HTTP_DURATION,
        Unit::Seconds,
        "HTTP requests, by route and class of status, until the answer begins; a get includes its wait"
    );
    describe_histogram!(
        GRPC_DURATION,
        Unit::Seconds,
        "gRPC calls, by method and code, until the answer begins; a get includes its wait"
    );
    describe_counter!(
        GRPC_OVERSIZED,
        Unit::Count,
        "Answers with a single task above the 4 MiB that gRPC clients take by default: see max_decoding_message_size"
    );
    describe_gauge!(
        REQUESTS_HELD,
        Unit::Bytes,
        "Bytes of the request_budget that requests in hand and answers on their way take"
    );
    describe_gauge!(BUILD_INFO, Unit::Count, "1, with the version of this taskd");
    describe_histogram!(SCRIPT_DURATION, Unit::Seconds, "Round trips of Redis scripts, by script");
    describe_histogram!(SCRIPT_BATCH_SIZE, Unit::Count, "Items combined into one script call, by script");
}

/// A batch was stored: `taken` = created + duplicates.
pub fn discovery_batch(source: Source, taken: usize, created: usize, duplicates: usize, elapsed: Duration) {
    counter!(DISCOVERY_IN, "source" => source.as_str()).increment(taken as u64);
    counter!(DISCOVERY_CREATED).increment(created as u64);
    counter!(DISCOVERY_DROPPED, "reason" => Dropped::Duplicate.as_str()).increment(duplicates as u64);
    histogram!(DISCOVERY_BATCH_SIZE).record(taken as f64);
    histogram!(DISCOVERY_BATCH_DURATION).record(elapsed);
}

/// Tasks came in and were turned away before they reached a batch.
pub fn discovery_dropped(source: Source, reason: Dropped, count: usize) {
    counter!(DISCOVERY_IN, "source" => source.as_str()).increment(count as u64);
    counter!(DISCOVERY_DROPPED, "reason" => reason.as_str()).increment(count as u64);
}

/// Discovered tasks went to dead-letters.
pub fn discovery_lettered(reason: Lettered, count: usize) {
    counter!(DISCOVERY_LETTERED, "reason" => reason.as_str()).increment(count as u64);
}

/// Fresh tasks stand on the bus.
pub fn outbox_published(count: usize) {
    counter!(OUTBOX_PUBLISHED).increment(count as u64);
}

/// The watchdog published what stood in the outbox.
pub fn outbox_republished(reason: Republished, count: usize) {
    counter!(OUTBOX_REPUBLISHED, "reason" => reason.as_str()).increment(count as u64);
}

/// A batch of records was dealt with.
pub fn fanout_batch(batch: FanoutBatch, elapsed: Duration) {
    counter!(FANOUT_IN).increment(batch.records as u64);
    counter!(FANOUT_ENQUEUED).increment(batch.enqueued as u64);
    counter!(FANOUT_PARKED).increment(batch.parked as u64);
    counter!(FANOUT_POISON).increment(batch.poison as u64);
    let dropped = [(FanoutDropped::Repeated, batch.repeated), (FanoutDropped::AgainFinal, batch.again_final)];
    for (reason, count) in dropped {
        counter!(FANOUT_DROPPED, "reason" => reason.as_str()).increment(count as u64);
    }
    histogram!(FANOUT_BATCH_SIZE).record(batch.records as f64);
    histogram!(FANOUT_BATCH_DURATION).record(elapsed);
}

/// A worker's call was answered.
pub fn tasks_call(method: Method, result: CallResult, elapsed: Duration) {
    counter!(TASKS_CALLS, "method" => method.as_str(), "result" => result.as_str()).increment(1);
    histogram!(TASKS_CALL_DURATION, "method" => method.as_str()).record(elapsed);
}

/// Single items were answered with `status` (the wire's name without its prefix: `OK`, `LEASE_LOST`, …).
pub fn tasks_items(method: Method, status: &'static str, count: usize) {
    counter!(TASKS_ITEMS, "method" => method.as_str(), "status" => status).increment(count as u64);
}

/// Tasks of `queue` were handed out.
pub fn tasks_claimed(queue: &str, count: usize) {
    counter!(TASKS_CLAIMED, "queue" => queue.to_owned()).increment(count as u64);
}

/// Workers gave tasks back.
pub fn tasks_rejected(outcome: Rejected, count: usize) {
    counter!(TASKS_REJECTED, "outcome" => outcome.as_str()).increment(count as u64);
}

/// How `queue` stands.
pub fn queue_depth(queue: &str, depth: QueueDepth) {
    let states =
        [("pending", depth.pending), ("waiting", depth.waiting), ("leased", depth.leased), ("delayed", depth.delayed)];
    for (state, count) in states {
        gauge!(QUEUE_DEPTH, "queue" => queue.to_owned(), "state" => state).set(count as f64);
    }
    gauge!(QUEUE_OLDEST, "queue" => queue.to_owned()).set(depth.oldest.as_secs_f64());
}

/// The watchdog dealt with tasks.
pub fn watchdog_handled(what: Watched, count: usize) {
    counter!(WATCHDOG_HANDLED, "what" => what.as_str()).increment(count as u64);
}

/// Reports moved from Redis to the bus.
pub fn results_forwarded(count: usize, elapsed: Duration) {
    counter!(RESULTS_FORWARDED).increment(count as u64);
    histogram!(RESULTS_BATCH_SIZE).record(count as f64);
    histogram!(RESULTS_BATCH_DURATION).record(elapsed);
}

/// Entries wait to be moved to the bus, in all shards.
pub fn results_depth(entries: u64) {
    gauge!(RESULTS_DEPTH).set(entries as f64);
}

/// Whether this process does the watchdog's work now.
pub fn watchdog_leads(leads: bool) {
    gauge!(WATCHDOG_LEADS).set(if leads { 1.0 } else { 0.0 });
}

/// A loop of the watchdog went round once; its waits do not count.
pub fn watchdog_step(name: &'static str, elapsed: Duration) {
    histogram!(WATCHDOG_STEP_DURATION, "loop" => name).record(elapsed);
}

/// Callers' tasks wait to be stored.
pub fn discovery_depth(tasks: usize) {
    gauge!(DISCOVERY_DEPTH).set(tasks as f64);
}

/// The oldest record of a batch waited so long on the bus.
pub fn fanout_oldest(age: Duration) {
    gauge!(FANOUT_OLDEST).set(age.as_secs_f64());
}

/// How much of `topic` is not dealt with.
pub fn bus_backlog(topic: &'static str, records: u64) {
    gauge!(BUS_BACKLOG, "topic" => topic).set(records as f64);
}

/// The memory of a Redis server, and its limit (0: none).
pub fn redis_memory(server: &str, used: u64, limit: u64) {
    gauge!(REDIS_USED, "server" => server.to_owned()).set(used as f64);
    gauge!(REDIS_LIMIT, "server" => server.to_owned()).set(limit as f64);
}

/// A caller's tasks were answered.
pub fn discovery_insert(elapsed: Duration) {
    histogram!(DISCOVERY_INSERT_DURATION).record(elapsed);
}

/// An HTTP request was answered. `route` is one of the router's.
pub fn http_request(route: &str, status: u16, elapsed: Duration) {
    let class = match status / 100 {
        1 => "1xx",
        2 => "2xx",
        3 => "3xx",
        4 => "4xx",
        _ => "5xx",
    };
    histogram!(HTTP_DURATION, "route" => route.to_owned(), "status" => class).record(elapsed);
}

/// A gRPC call was answered.
pub fn grpc_request(method: &'static str, code: &'static str, elapsed: Duration) {
    histogram!(GRPC_DURATION, "method" => method, "code" => code).record(elapsed);
}

/// A worker that set no `max_bytes` was sent more than clients take by default.
pub fn grpc_oversized_answer() {
    counter!(GRPC_OVERSIZED).increment(1);
}

/// Bytes of the request budget that are taken.
pub fn requests_held(bytes: usize) {
    gauge!(REQUESTS_HELD).set(bytes as f64);
}

/// The system's figures of this process: memory, CPU, descriptors.
pub fn process() {
    metrics_process::Collector::default().collect();
}

/// A script was called for `items` callers' items at once.
pub fn redis_script(script: &'static str, items: usize, elapsed: Duration) {
    histogram!(SCRIPT_DURATION, "script" => script).record(elapsed);
    histogram!(SCRIPT_BATCH_SIZE, "script" => script).record(items as f64);
}

/// An operation on the database ended, with all its retries.
pub fn sql_operation(operation: &'static str, elapsed: Duration) {
    histogram!(SQL_DURATION, "operation" => operation).record(elapsed);
}

/// An operation on the database is repeated.
pub fn sql_retry(operation: &'static str) {
    counter!(SQL_RETRIES, "operation" => operation).increment(1);
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
                FanoutBatch { records: 4, enqueued: 3, repeated: 1, ..Default::default() },
                Duration::from_millis(1),
            );
            tasks_call(Method::Get, CallResult::Empty, Duration::from_millis(1));
            queue_depth("crawl", QueueDepth { waiting: 5, oldest: Duration::from_secs(2), ..Default::default() });
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
