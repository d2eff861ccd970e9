//! The watchdog.

use std::time::Duration;

use ::metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use super::label::label;

pub const WATCHDOG_HANDLED: &str = "taskd_watchdog_handled_tasks_total";
pub const WATCHDOG_LEADS: &str = "taskd_watchdog_leading_processes";
pub const INVARIANT_VIOLATIONS: &str = "taskd_invariant_violations";
pub const FSCK_UNCHECKED: &str = "taskd_fsck_unchecked_tasks";
pub const FSCK_UNCHECKED_SHARDS: &str = "taskd_fsck_unchecked_shards";
pub const WATCHDOG_STEP_DURATION: &str = "taskd_watchdog_step_duration_seconds";

label! {
    /// What the watchdog did with a task. Undelivered: the lease expired before the worker had
    /// received the task.
    Watched {
        Expired = "expired",
        Retried = "retried",
        Dead = "dead",
        Promoted = "promoted",
        Republished = "republished",
        Settled = "settled",
        Removed = "removed",
        Undelivered = "undelivered",
        Changed = "changed",
        Overdue = "overdue",
    }
}

pub(super) fn describe() {
    describe_counter!(
        WATCHDOG_HANDLED,
        Unit::Count,
        "Tasks the watchdog dealt with, by what it did"
    );
    describe_gauge!(
        WATCHDOG_LEADS,
        "1 in the one process that does the watchdog's work now"
    );
    describe_gauge!(
        INVARIANT_VIOLATIONS,
        "Differences that the watchdog's last round of checks found, by kind"
    );
    describe_gauge!(
        FSCK_UNCHECKED,
        Unit::Count,
        "Suspected tasks that the last round could not look at again"
    );
    describe_gauge!(
        FSCK_UNCHECKED_SHARDS,
        Unit::Count,
        "Shards that failed in the last round of checks"
    );
    describe_histogram!(
        WATCHDOG_STEP_DURATION,
        Unit::Seconds,
        "One step of one of its loops, by loop"
    );
}

/// The watchdog handled tasks.
pub fn watchdog_handled(what: Watched, count: usize) {
    counter!(WATCHDOG_HANDLED, "what" => what.as_str()).increment(count as u64);
}

/// Whether this process holds the leader lease now.
pub fn watchdog_leads(leads: bool) {
    gauge!(WATCHDOG_LEADS).set(if leads { 1.0 } else { 0.0 });
}

/// A round of checks found this many differences of a kind.
pub fn invariant_violations(kind: &'static str, count: u64) {
    gauge!(INVARIANT_VIOLATIONS, "kind" => kind).set(count as f64);
}

/// A round of checks could not look again at this many suspected tasks, and failed for this many
/// shards.
pub fn fsck_unchecked(tasks: u64, shards: usize) {
    gauge!(FSCK_UNCHECKED).set(tasks as f64);
    gauge!(FSCK_UNCHECKED_SHARDS).set(shards as f64);
}

/// A loop of the watchdog finished a step. The time excludes its waits.
pub fn watchdog_step(name: &'static str, elapsed: Duration) {
    histogram!(WATCHDOG_STEP_DURATION, "loop" => name).record(elapsed);
}
