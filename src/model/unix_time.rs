//! Times in milliseconds since 1970.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// This machine's clock. Times that other processes compare come from `runtime::Clock`.
pub fn now_unix_ms() -> i64 {
    millis(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default(),
    )
}

/// A duration, as the difference of two such times is.
pub fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
