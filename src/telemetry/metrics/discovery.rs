//! Discovery: from insert to SQL and the bus.

use std::time::Duration;

use ::metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use super::label::label;

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

label! {
    /// Where discovery got a task from.
    Source { Api = "api", Results = "results" }
}

label! {
    /// Why discovery did not store a task. Duplicates are counted with their batch.
    Dropped {
        Duplicate = "duplicate",
        Rejected = "rejected",
        MaxQueues = "max_queues",
        Busy = "busy",
        Unavailable = "unavailable",
    }
}

label! {
    /// Why a discovered task became a dead letter.
    Lettered {
        MaxUnfinished = "max_unfinished",
        MaxQueues = "max_queues",
        Invalid = "invalid",
        Enrichment = "enrichment",
    }
}

label! {
    /// Why a stored task was published by the watchdog.
    Republished { Unpublished = "unpublished", Scheduled = "scheduled", Unparked = "unparked", Refilled = "refilled", Missing = "missing" }
}

pub(super) fn describe() {
    describe_counter!(
        DISCOVERY_IN,
        Unit::Count,
        "Tasks that came in, by source: the insert API or workers' results"
    );
    describe_counter!(DISCOVERY_CREATED, Unit::Count, "Tasks stored as new");
    describe_counter!(
        DISCOVERY_DROPPED,
        Unit::Count,
        "Tasks not stored, by reason"
    );
    describe_counter!(
        DISCOVERY_LETTERED,
        Unit::Count,
        "Discovered tasks sent to dead-letters instead of being stored, by reason"
    );
    describe_histogram!(DISCOVERY_BATCH_SIZE, Unit::Count, "Tasks per batch");
    describe_histogram!(
        DISCOVERY_BATCH_DURATION,
        Unit::Seconds,
        "From taking a batch to its SQL commit"
    );
    describe_histogram!(
        DISCOVERY_INSERT_DURATION,
        Unit::Seconds,
        "From an insert's call to its answers"
    );
    describe_gauge!(
        DISCOVERY_DEPTH,
        Unit::Count,
        "Tasks of callers that wait to be stored"
    );
    describe_counter!(
        OUTBOX_PUBLISHED,
        Unit::Count,
        "Tasks published right after they were stored"
    );
    describe_counter!(
        OUTBOX_REPUBLISHED,
        Unit::Count,
        "Tasks published by the watchdog, by reason"
    );
}

/// A batch was stored: `taken` = created + duplicates.
pub fn discovery_batch(
    source: Source,
    taken: usize,
    created: usize,
    duplicates: usize,
    elapsed: Duration,
) {
    counter!(DISCOVERY_IN, "source" => source.as_str()).increment(taken as u64);
    counter!(DISCOVERY_CREATED).increment(created as u64);
    counter!(DISCOVERY_DROPPED, "reason" => Dropped::Duplicate.as_str())
        .increment(duplicates as u64);
    histogram!(DISCOVERY_BATCH_SIZE).record(taken as f64);
    histogram!(DISCOVERY_BATCH_DURATION).record(elapsed);
}

/// Tasks came in and were not stored.
pub fn discovery_dropped(source: Source, reason: Dropped, count: usize) {
    counter!(DISCOVERY_IN, "source" => source.as_str()).increment(count as u64);
    counter!(DISCOVERY_DROPPED, "reason" => reason.as_str()).increment(count as u64);
}

/// Discovered tasks became dead letters.
pub fn discovery_lettered(reason: Lettered, count: usize) {
    counter!(DISCOVERY_LETTERED, "reason" => reason.as_str()).increment(count as u64);
}

/// A caller's tasks were answered.
pub fn discovery_insert(elapsed: Duration) {
    histogram!(DISCOVERY_INSERT_DURATION).record(elapsed);
}

/// Tasks of a caller wait to be stored.
pub fn discovery_waits(tasks: usize) {
    gauge!(DISCOVERY_DEPTH).increment(tasks as f64);
}

/// Tasks of a caller wait no longer.
pub fn discovery_waited(tasks: usize) {
    gauge!(DISCOVERY_DEPTH).decrement(tasks as f64);
}

/// New tasks were published right after they were stored.
pub fn outbox_published(count: usize) {
    counter!(OUTBOX_PUBLISHED).increment(count as u64);
}

/// The watchdog published tasks from the outbox.
pub fn outbox_republished(reason: Republished, count: usize) {
    counter!(OUTBOX_REPUBLISHED, "reason" => reason.as_str()).increment(count as u64);
}
