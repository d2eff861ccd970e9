//! Values that JSON has as text: durations, times, priorities.

use std::{borrow::Cow, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, de};

use crate::{model, wire::time::from_rfc_3339};

/// `"30s"`
pub(in crate::ingress) struct Time(pub(super) Duration);

impl From<Time> for Duration {
    fn from(time: Time) -> Self {
        time.0
    }
}

/// `"2030-01-02T03:04:05Z"`, as milliseconds since 1970.
pub(in crate::ingress) struct Instant(pub(super) i64);

/// `"high"`, in any case.
pub(super) struct Priority(pub(super) model::Priority);

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is not a duration; write \"250ms\", \"30s\" or \"1h 30m\"");
        let duration = humantime::parse_duration(text).map_err(|_| wrong())?;
        // A duration in a gRPC message cannot be longer.
        if i64::try_from(duration.as_secs()).is_ok() {
            Ok(Self(duration))
        } else {
            Err(wrong())
        }
    }
}

impl FromStr for Instant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is not a time; write it as RFC 3339: \"2030-01-31T12:00:00Z\"");
        from_rfc_3339(text).map(Self).ok_or_else(wrong)
    }
}

impl FromStr for Priority {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = model::Priority::ALL
            .into_iter()
            .find(|known| known.as_str().eq_ignore_ascii_case(text));
        let unknown = || format!("unknown priority {text:?}; expected high, medium or low");
        known.map(Self).ok_or_else(unknown)
    }
}

macro_rules! deserialize_from_text {
    ($($type:ty)*) => {$(
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Cow::<'de, str>::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    )*};
}
deserialize_from_text!(Time Instant Priority);
