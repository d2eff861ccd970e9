//! Operators' changes of unfinished tasks.

use ::metrics::{Unit, counter, describe_counter};

pub const TASKS_CHANGED: &str = "taskd_changes_tasks_total";

pub(super) fn describe() {
    describe_counter!(
        TASKS_CHANGED,
        Unit::Count,
        "Unfinished tasks that somebody changed, by what and by outcome"
    );
}

/// A pending change of a task was decided, with this outcome.
pub fn task_changed(what: &'static str, outcome: &'static str) {
    counter!(TASKS_CHANGED, "what" => what, "outcome" => outcome).increment(1);
}
