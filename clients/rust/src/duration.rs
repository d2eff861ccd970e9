//! Conversion of durations to protobuf.

use std::time::Duration;

/// Converts a duration to protobuf. A duration that is too long becomes the longest possible one.
pub(crate) fn proto(duration: Duration) -> prost_types::Duration {
    let longest = prost_types::Duration {
        seconds: i64::MAX,
        nanos: 999_999_999,
    };
    duration.try_into().unwrap_or(longest)
}
