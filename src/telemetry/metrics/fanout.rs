//! The fanout, and the bus that it reads.

use std::time::Duration;

use ::metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use super::label::label;

pub const FANOUT_IN: &str = "taskd_fanout_in_records_total";
pub const FANOUT_ENQUEUED: &str = "taskd_fanout_enqueued_tasks_total";
pub const FANOUT_DROPPED: &str = "taskd_fanout_dropped_records_total";
pub const FANOUT_PARKED: &str = "taskd_fanout_parked_tasks_total";
pub const FANOUT_POISON: &str = "taskd_fanout_poison_records_total";
pub const FANOUT_BATCH_SIZE: &str = "taskd_fanout_batch_size_records";
pub const FANOUT_BATCH_DURATION: &str = "taskd_fanout_batch_duration_seconds";
pub const FANOUT_OLDEST: &str = "taskd_fanout_oldest_seconds";
pub const BUS_BACKLOG: &str = "taskd_bus_backlog_records";
pub const BUS_LEFT_OUT: &str = "taskd_bus_left_out_reports_total";

label! {
    /// Why the fanout did not enqueue a record.
    FanoutDropped { Repeated = "repeated", AgainFinal = "again_final" }
}

/// The outcome of one batch of records in the fanout.
#[derive(Clone, Copy, Debug, Default)]
pub struct FanoutBatch {
    pub records: usize,
    pub enqueued: usize,
    pub repeated: usize,
    pub again_final: usize,
    pub parked: usize,
    pub poison: usize,
}

pub(super) fn describe() {
    describe_counter!(FANOUT_IN, Unit::Count, "Records read from the bus");
    describe_counter!(FANOUT_ENQUEUED, Unit::Count, "Tasks put into their queue");
    describe_counter!(
        FANOUT_DROPPED,
        Unit::Count,
        "Records that needed no enqueuing, by reason"
    );
    describe_counter!(
        FANOUT_PARKED,
        Unit::Count,
        "Tasks sent back to the outbox because their queue is full, or their limit key is crowded"
    );
    describe_counter!(
        FANOUT_POISON,
        Unit::Count,
        "Records that could not be decoded, sent to dead-letters"
    );
    describe_histogram!(FANOUT_BATCH_SIZE, Unit::Count, "Records per batch");
    describe_histogram!(
        FANOUT_BATCH_DURATION,
        Unit::Seconds,
        "From reading a batch to its enqueuing"
    );
    describe_gauge!(
        FANOUT_OLDEST,
        Unit::Seconds,
        "How long ago the oldest record of the last batch was published"
    );
    describe_gauge!(
        BUS_BACKLOG,
        Unit::Count,
        "Records that nobody has dealt with yet, by topic"
    );
    describe_counter!(
        BUS_LEFT_OUT,
        Unit::Count,
        "Reports that their topic did not take, by topic"
    );
}

/// A batch of records was handled.
pub fn fanout_batch(batch: FanoutBatch, elapsed: Duration) {
    fanout_done(batch);
    histogram!(FANOUT_BATCH_SIZE).record(batch.records as f64);
    histogram!(FANOUT_BATCH_DURATION).record(elapsed);
}

/// Records were handled.
pub fn fanout_done(batch: FanoutBatch) {
    counter!(FANOUT_IN).increment(batch.records as u64);
    counter!(FANOUT_ENQUEUED).increment(batch.enqueued as u64);
    counter!(FANOUT_PARKED).increment(batch.parked as u64);
    counter!(FANOUT_POISON).increment(batch.poison as u64);
    let dropped = [
        (FanoutDropped::Repeated, batch.repeated),
        (FanoutDropped::AgainFinal, batch.again_final),
    ];
    for (reason, count) in dropped {
        counter!(FANOUT_DROPPED, "reason" => reason.as_str()).increment(count as u64);
    }
}

/// Tasks came from SQL, without the bus.
pub fn fanout_took(added: usize, repeated: usize, parked: usize) {
    counter!(FANOUT_ENQUEUED).increment(added as u64);
    counter!(FANOUT_PARKED).increment(parked as u64);
    counter!(FANOUT_DROPPED, "reason" => FanoutDropped::Repeated.as_str())
        .increment(repeated as u64);
}

/// How long the oldest record of a batch waited on the bus.
pub fn fanout_oldest(age: Duration) {
    gauge!(FANOUT_OLDEST).set(age.as_secs_f64());
}

/// How many records of `topic` have not been handled yet.
pub fn bus_backlog(topic: &'static str, records: u64) {
    gauge!(BUS_BACKLOG, "topic" => topic).set(records as f64);
}

/// `topic` did not accept some reports, and they will not be published again.
pub fn reports_left_out(topic: &str, count: usize) {
    counter!(BUS_LEFT_OUT, "topic" => topic.to_owned()).increment(count as u64);
}
