//! Executions of workflows.

use std::time::Duration;

use ::metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

pub const WORKFLOW_EXECUTIONS: &str = "taskd_workflow_executions_total";
pub const WORKFLOW_OPEN: &str = "taskd_workflow_open_executions";
pub const WORKFLOW_TIMERS: &str = "taskd_workflow_timers_armed";
pub const WORKFLOW_CONFLICTS: &str = "taskd_workflow_conflicts_total";
pub const WORKFLOW_APPEND_SECONDS: &str = "taskd_workflow_append_duration_seconds";

pub const WORKFLOW_STEPS: &str = "taskd_workflow_steps_total";
pub const WORKFLOW_LATENESS: &str = "taskd_workflow_timer_lateness_seconds";
pub const WORKFLOW_REFUSED: &str = "taskd_workflow_expression_refused_total";

pub(super) fn describe() {
    describe_counter!(
        WORKFLOW_STEPS,
        Unit::Count,
        "Ends of steps, by what they are and how they ended"
    );
    describe_histogram!(
        WORKFLOW_LATENESS,
        Unit::Seconds,
        "Time from when a timer was due until it fired"
    );
    describe_counter!(
        WORKFLOW_REFUSED,
        Unit::Count,
        "Evaluations of expressions that went beyond a bound"
    );
    describe_counter!(
        WORKFLOW_EXECUTIONS,
        Unit::Count,
        "Ends of executions, by status"
    );
    describe_gauge!(
        WORKFLOW_OPEN,
        Unit::Count,
        "Executions that have not ended, by SQL"
    );
    describe_gauge!(WORKFLOW_TIMERS, Unit::Count, "Timers of executions, by SQL");
    describe_counter!(
        WORKFLOW_CONFLICTS,
        Unit::Count,
        "Appends that were lost because somebody else had stepped the execution"
    );
    describe_histogram!(
        WORKFLOW_APPEND_SECONDS,
        Unit::Seconds,
        "Transaction that stores what executions do next"
    );
}

/// SQL has this many open executions and timers.
pub fn workflow_open(open: u64, timers: u64) {
    gauge!(WORKFLOW_OPEN).set(open as f64);
    gauge!(WORKFLOW_TIMERS).set(timers as f64);
}

/// An execution has ended, and SQL has it.
pub fn workflow_ended(status: &'static str) {
    counter!(WORKFLOW_EXECUTIONS, "status" => status).increment(1);
}

/// A step has ended, and its execution knows it.
pub fn workflow_step(kind: &'static str, outcome: &'static str) {
    counter!(WORKFLOW_STEPS, "kind" => kind, "outcome" => outcome).increment(1);
}

/// A timer has fired so long after it was due.
pub fn workflow_timer(late: Duration) {
    histogram!(WORKFLOW_LATENESS).record(late);
}

/// Evaluations went beyond a bound.
pub fn workflow_refused(reason: &'static str, evaluations: u64) {
    counter!(WORKFLOW_REFUSED, "reason" => reason).increment(evaluations);
}

/// An append was lost.
pub fn workflow_conflict() {
    counter!(WORKFLOW_CONFLICTS).increment(1);
}

/// Appends were stored, or not, in one transaction.
pub fn workflow_append(took: Duration) {
    histogram!(WORKFLOW_APPEND_SECONDS).record(took);
}
