//! Trees of tasks.

use std::time::Duration;

use ::metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use crate::model::{TreeEnd, TreeState};

pub const TREES_OPEN: &str = "taskd_trees_open";
pub const TREES_ENDED: &str = "taskd_trees_ended_total";
pub const TREES_SECONDS: &str = "taskd_trees_seconds";
pub const TREES_LATE: &str = "taskd_trees_late_total";

pub(super) fn describe() {
    describe_gauge!(TREES_OPEN, Unit::Count, "Trees that are open, by SQL");
    describe_counter!(TREES_ENDED, Unit::Count, "Ends of trees, by state");
    describe_histogram!(
        TREES_SECONDS,
        Unit::Seconds,
        "From the beginning of a tree to its end"
    );
    describe_counter!(
        TREES_LATE,
        Unit::Count,
        "Surplus reports about tasks of trees, whose discoveries are outside of the tree"
    );
}

/// SQL has this many open trees.
pub fn trees_open(count: u64) {
    gauge!(TREES_OPEN).set(count as f64);
}

/// A tree has ended, and SQL has it.
pub fn tree_ended(end: &TreeEnd) {
    let state = match end.state {
        // An end is never open.
        TreeState::Open | TreeState::Done => "done",
        TreeState::Failed => "failed",
    };
    counter!(TREES_ENDED, "state" => state).increment(1);
    let took_ms = end.ended_unix_ms.saturating_sub(end.opened_unix_ms).max(0);
    histogram!(TREES_SECONDS).record(Duration::from_millis(took_ms.unsigned_abs()));
}

/// Surplus reports came from tasks of trees.
pub fn trees_late(count: usize) {
    if count > 0 {
        counter!(TREES_LATE).increment(count as u64);
    }
}
