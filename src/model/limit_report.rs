//! What workers report about limit keys.

use std::time::Duration;

/// The longest hold and the longest time between two starts that a worker may report.
pub const MAX_LIMIT_REPORT: Duration = Duration::from_secs(3600);

/// What a worker has learnt about the limit key of a task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitReport {
    /// Nothing of the limit key starts for this long.
    pub hold: Duration,
    /// Starts are at least so far apart.
    pub pace: Duration,
}

impl LimitReport {
    pub fn is_empty(self) -> bool {
        self.hold.is_zero() && self.pace.is_zero()
    }

    /// Checks it, or says what is wrong in one line.
    pub fn check(self) -> Result<(), String> {
        for (what, time) in [("hold", self.hold), ("pace", self.pace)] {
            if time > MAX_LIMIT_REPORT {
                return Err(format!(
                    "limit.{what} is {}; at most 1h",
                    humantime::format_duration(time)
                ));
            }
        }
        Ok(())
    }
}
