//! The histories of tasks.

use ::metrics::{Unit, counter, describe_counter};

use super::label::label;

pub const HISTORY_ATTEMPTS: &str = "taskd_history_attempts_total";
pub const HISTORY_REMOVED: &str = "taskd_history_removed_attempts_total";

label! {
    /// How a failed attempt ended, or `Refused` if SQL did not accept it.
    Ended { Rejected = "rejected", Expired = "expired", Refused = "refused" }
}

pub(super) fn describe() {
    describe_counter!(
        HISTORY_ATTEMPTS,
        Unit::Count,
        "Failed attempts written into histories of tasks, by end"
    );
    describe_counter!(
        HISTORY_REMOVED,
        Unit::Count,
        "Failed attempts that left histories after history_retention"
    );
}

/// Failed attempts were written into SQL, or were refused.
pub fn history_attempts(ended: Ended, count: usize) {
    counter!(HISTORY_ATTEMPTS, "ended" => ended.as_str()).increment(count as u64);
}

/// Old failed attempts were removed.
pub fn history_removed(count: u64) {
    counter!(HISTORY_REMOVED).increment(count);
}
