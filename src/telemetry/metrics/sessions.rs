//! The sessions of workers.

use ::metrics::{Unit, counter, describe_counter, describe_gauge, gauge};

use super::label::label;

pub const SESSIONS_OPEN: &str = "taskd_sessions_open_sessions";
pub const SESSIONS_ENDED: &str = "taskd_sessions_ended_total";
pub const SESSIONS_LEASES: &str = "taskd_sessions_ended_leases_total";

label! {
    /// How a session ended.
    SessionEnd {
        Closed = "closed",
        Silent = "silent",
        Away = "away",
        TakenOver = "taken_over",
        Denied = "denied",
    }
}

pub(super) fn describe() {
    describe_gauge!(
        SESSIONS_OPEN,
        Unit::Count,
        "Sessions of workers with streams in this process"
    );
    describe_counter!(
        SESSIONS_ENDED,
        Unit::Count,
        "Sessions that ended, by the reason"
    );
    describe_counter!(
        SESSIONS_LEASES,
        Unit::Count,
        "Leases that ended with their session, by what became of them"
    );
}

/// How many sessions this process has now.
pub fn sessions(open: usize) {
    gauge!(SESSIONS_OPEN).set(open as f64);
}

/// A session ended.
pub fn session_ended(why: SessionEnd) {
    counter!(SESSIONS_ENDED, "reason" => why.as_str()).increment(1);
}

/// Leases ended with their session: their tasks are offered again, have failed and wait for their
/// backoff, or are dead.
pub fn session_leases(offered: usize, failed: usize, dead: usize) {
    for (outcome, count) in [("offered", offered), ("failed", failed), ("dead", dead)] {
        counter!(SESSIONS_LEASES, "outcome" => outcome).increment(count as u64);
    }
}
