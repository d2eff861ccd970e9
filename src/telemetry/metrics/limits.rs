//! Limits per key. No series has a label per limit key.

use std::time::Duration;

use ::metrics::{Unit, describe_gauge, describe_histogram, gauge, histogram};

pub const LIMITS_KEYS: &str = "taskd_limits_keys";
pub const LIMITS_WAITING: &str = "taskd_limits_waiting_tasks";
pub const LIMITS_LATE: &str = "taskd_limits_late_duration_seconds";
pub const SEQUENCES_WAITING: &str = "taskd_sequences_waiting_tasks";

/// What the limit keys of a queue have at one moment, all shards together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitsDepth {
    /// Limit keys with a lease, a task that waits, or a time that is not over.
    pub keys: u64,
    /// Limit keys of which tasks wait in SQL, because enough wait in Redis.
    pub crowded: u64,
    /// Tasks that wait behind their limit keys in Redis.
    pub waiting: u64,
}

pub(super) fn describe() {
    describe_gauge!(
        LIMITS_KEYS,
        Unit::Count,
        "Limit keys by queue and state: busy (leased, waiting, or resting), crowded (tasks of it wait in SQL)"
    );
    describe_gauge!(
        LIMITS_WAITING,
        Unit::Count,
        "Tasks that wait behind their limit keys in Redis, by queue"
    );
    describe_gauge!(
        SEQUENCES_WAITING,
        Unit::Count,
        "Tasks that wait in SQL behind others of their sequences, by queue"
    );
    describe_histogram!(
        LIMITS_LATE,
        Unit::Seconds,
        "How long after its time a process looked at limit keys that wait for a time"
    );
}

/// What the limit keys of `queue` have now.
pub fn limits_depth(queue: &str, depth: LimitsDepth) {
    for (state, count) in [("busy", depth.keys), ("crowded", depth.crowded)] {
        gauge!(LIMITS_KEYS, "queue" => queue.to_owned(), "state" => state).set(count as f64);
    }
    gauge!(LIMITS_WAITING, "queue" => queue.to_owned()).set(depth.waiting as f64);
}

/// How many tasks of `queue` wait behind others of their sequences now.
pub fn sequences_waiting(queue: &str, tasks: u64) {
    gauge!(SEQUENCES_WAITING, "queue" => queue.to_owned()).set(tasks as f64);
}

/// Limit keys whose time has come were promoted.
pub fn limits_promoted(late: Duration) {
    histogram!(LIMITS_LATE).record(late);
}
