//! Spans that are exported to the collector.

use ::metrics::{Unit, counter, describe_counter};

use super::label::label;

pub const TRACES_SPANS: &str = "taskd_traces_spans_total";

label! {
    /// What became of a span. Dropped: the queue of the exporter was full. Failed: the collector
    /// did not accept it.
    SpanOutcome { Exported = "exported", Dropped = "dropped", Failed = "failed" }
}

pub(super) fn describe() {
    describe_counter!(
        TRACES_SPANS,
        Unit::Count,
        "Spans, by what became of them: exported, dropped, failed"
    );
}

/// Spans left the process, or were lost.
pub fn traces_spans(outcome: SpanOutcome, count: usize) {
    counter!(TRACES_SPANS, "outcome" => outcome.as_str()).increment(count as u64);
}
