//! Enrichment: what endpoints did with new tasks.

use std::time::Duration;

use ::metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use super::label::label;

pub const ENRICHMENT_TASKS: &str = "taskd_enrichment_tasks_total";
pub const ENRICHMENT_OPEN: &str = "taskd_enrichment_open_breakers";
pub const ENRICHMENT_CALL_DURATION: &str = "taskd_enrichment_call_duration_seconds";

label! {
    /// Why tasks were not enriched.
    Skipped { TimedOut = "timed_out", Failed = "failed", Wrong = "wrong", Busy = "busy", Open = "open" }
}

pub(super) fn describe() {
    describe_counter!(
        ENRICHMENT_TASKS,
        Unit::Count,
        "New tasks by queue and what the enrichment made of them"
    );
    describe_gauge!(
        ENRICHMENT_OPEN,
        Unit::Count,
        "Open breakers: the endpoint fails, and nobody waits for it"
    );
    describe_histogram!(
        ENRICHMENT_CALL_DURATION,
        Unit::Seconds,
        "Calls of the endpoint"
    );
}

/// An endpoint answered about tasks of `queue`.
pub fn enrichment_done(queue: &str, enriched: usize, rejected: usize) {
    for (outcome, count) in [("enriched", enriched), ("rejected", rejected)] {
        counter!(ENRICHMENT_TASKS, "queue" => queue.to_owned(), "outcome" => outcome)
            .increment(count as u64);
    }
}

/// Tasks of `queue` continued without enrichment.
pub fn enrichment_skipped(queue: &str, why: Skipped, count: usize) {
    counter!(ENRICHMENT_TASKS, "queue" => queue.to_owned(), "outcome" => why.as_str())
        .increment(count as u64);
}

/// Calls of an endpoint begin: none of its breakers is open yet.
pub fn enrichment_begins(endpoint: &str) {
    gauge!(ENRICHMENT_OPEN, "endpoint" => endpoint.to_owned()).set(0.0);
}

/// A breaker of an endpoint opened or closed. Queues with different settings have one each.
pub fn enrichment_turned(endpoint: &str, is_open: bool) {
    let open = gauge!(ENRICHMENT_OPEN, "endpoint" => endpoint.to_owned());
    if is_open {
        open.increment(1.0)
    } else {
        open.decrement(1.0)
    }
}

/// A call of an endpoint ended.
pub fn enrichment_call(endpoint: &str, elapsed: Duration) {
    histogram!(ENRICHMENT_CALL_DURATION, "endpoint" => endpoint.to_owned()).record(elapsed);
}
