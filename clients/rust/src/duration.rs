//! Durations as protobuf has them.

use std::time::Duration;

/// A duration as protobuf has it. One that protobuf cannot hold becomes the longest that it can.
pub(crate) fn proto(duration: Duration) -> prost_types::Duration {
    let longest = prost_types::Duration {
        seconds: i64::MAX,
        nanos: 999_999_999,
    };
    duration.try_into().unwrap_or(longest)
}
