//! Workers' calls, the queues that they work on, and the reports of completed and dead tasks.

use std::time::Duration;

use ::metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use super::label::label;

pub const TASKS_CALLS: &str = "taskd_tasks_calls_total";
pub const TASKS_CALL_DURATION: &str = "taskd_tasks_call_duration_seconds";
pub const TASKS_ITEMS: &str = "taskd_tasks_items_total";
pub const TASKS_REJECTED: &str = "taskd_tasks_rejected_total";
pub const TASKS_CLAIMED: &str = "taskd_tasks_claimed_tasks_total";
pub const QUEUE_DEPTH: &str = "taskd_queue_depth_tasks";
pub const QUEUE_OLDEST: &str = "taskd_queue_oldest_waiting_seconds";
pub const RESULTS_FORWARDED: &str = "taskd_results_forwarded_reports_total";
pub const RESULTS_BATCH_SIZE: &str = "taskd_results_batch_size_items";
pub const RESULTS_BATCH_DURATION: &str = "taskd_results_batch_duration_seconds";
pub const RESULTS_DEPTH: &str = "taskd_results_depth_entries";

label! {
    /// A call of the tasks service.
    Method { Get = "get", Complete = "complete", Reject = "reject", Extend = "extend" }
}

label! {
    /// How a call as a whole ended.
    CallResult { Ok = "ok", Empty = "empty", Invalid = "invalid", Unavailable = "unavailable" }
}

label! {
    /// What became of a rejected task.
    Rejected { Retried = "retried", Dead = "dead", Returned = "returned" }
}

/// The size of a queue at one moment, all shards together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueDepth {
    pub pending: u64,
    pub waiting: u64,
    pub leased: u64,
    pub delayed: u64,
    /// The time since the oldest waiting task was inserted; zero if none waits.
    pub oldest: Duration,
}

pub(super) fn describe() {
    describe_counter!(
        TASKS_CALLS,
        Unit::Count,
        "Workers' calls, by method and result"
    );
    describe_histogram!(
        TASKS_CALL_DURATION,
        Unit::Seconds,
        "Workers' calls, by method; get includes its wait"
    );
    describe_counter!(
        TASKS_ITEMS,
        Unit::Count,
        "Answers to single items, by method and status"
    );
    describe_counter!(
        TASKS_REJECTED,
        Unit::Count,
        "Tasks that workers gave back, by what became of them"
    );
    describe_counter!(TASKS_CLAIMED, Unit::Count, "Tasks handed out, by queue");
    describe_gauge!(
        QUEUE_DEPTH,
        Unit::Count,
        "Tasks by queue and state: pending (in SQL alone), waiting, leased, delayed"
    );
    describe_gauge!(
        QUEUE_OLDEST,
        Unit::Seconds,
        "Time since the insert of the oldest waiting task, by queue; its delay and its earlier attempts count, too"
    );
    describe_counter!(
        RESULTS_FORWARDED,
        Unit::Count,
        "Reports moved from Redis to task-results"
    );
    describe_histogram!(RESULTS_BATCH_SIZE, Unit::Count, "Reports moved at once");
    describe_histogram!(
        RESULTS_BATCH_DURATION,
        Unit::Seconds,
        "From reading a batch in Redis to its publication"
    );
    describe_gauge!(
        RESULTS_DEPTH,
        Unit::Count,
        "Entries in Redis that are not on the bus yet: completions of one call, deaths, expiries"
    );
}

/// A worker's call was answered.
pub fn tasks_call(method: Method, result: CallResult, elapsed: Duration) {
    counter!(TASKS_CALLS, "method" => method.as_str(), "result" => result.as_str()).increment(1);
    histogram!(TASKS_CALL_DURATION, "method" => method.as_str()).record(elapsed);
}

/// Single items were answered with `status` (the wire's name without its prefix: `OK`,
/// `LEASE_LOST`, …).
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

/// How many tasks `queue` has in each state now.
pub fn queue_depth(queue: &str, depth: QueueDepth) {
    let states = [
        ("pending", depth.pending),
        ("waiting", depth.waiting),
        ("leased", depth.leased),
        ("delayed", depth.delayed),
    ];
    for (state, count) in states {
        gauge!(QUEUE_DEPTH, "queue" => queue.to_owned(), "state" => state).set(count as f64);
    }
    gauge!(QUEUE_OLDEST, "queue" => queue.to_owned()).set(depth.oldest.as_secs_f64());
}

/// Reports were moved from Redis to the bus.
pub fn results_forwarded(count: usize, elapsed: Duration) {
    counter!(RESULTS_FORWARDED).increment(count as u64);
    histogram!(RESULTS_BATCH_SIZE).record(count as f64);
    histogram!(RESULTS_BATCH_DURATION).record(elapsed);
}

/// How many entries wait to be moved to the bus, in all shards.
pub fn results_depth(entries: u64) {
    gauge!(RESULTS_DEPTH).set(entries as f64);
}
