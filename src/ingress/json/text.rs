//! Values that JSON has as text: durations, times, priorities.

use std::{borrow::Cow, str::FromStr};

use serde::{Deserialize, Deserializer, de};

use crate::wire::pb;

/// `"30s"`
pub(super) struct Time(pub(super) prost_types::Duration);

/// `"2030-01-02T03:04:05Z"`
pub(super) struct Instant(pub(super) prost_types::Timestamp);

/// `"high"`, in any case.
pub(super) struct Priority(pub(super) pb::Priority);

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a duration; write \"250ms\", \"30s\" or \"1h 30m\"");
        let duration = humantime::parse_duration(text).map_err(|_| wrong())?;
        prost_types::Duration::try_from(duration).map(Self).map_err(|_| wrong())
    }
}

impl FromStr for Instant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a time; write it as RFC 3339: \"2030-01-31T12:00:00Z\"");
        if !is_rfc_3339(text) {
            return Err(wrong());
        }
        text.parse().map(Self).map_err(|_| wrong())
    }
}

/// Whether `text` has the form `2030-01-31T12:00:00[.5](Z|+02:00)`. The parser behind it takes more: days without a
/// time, times without an offset, years with a sign.
fn is_rfc_3339(text: &str) -> bool {
    let like = |text: &str, form: &str| {
        let fits = |(byte, form): (u8, u8)| if form == b'0' { byte.is_ascii_digit() } else { byte == form };
        text.len() == form.len() && text.bytes().zip(form.bytes()).all(fits)
    };
    let Some((time, rest)) = text.split_at_checked("0000-00-00T00:00:00".len()) else { return false };
    let time = time.to_ascii_uppercase();
    let fraction = rest.strip_prefix('.').unwrap_or_default();
    let digits = fraction.len() - fraction.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let offset = if digits > 0 { &fraction[digits..] } else { rest };
    let is_offset = offset.eq_ignore_ascii_case("z")
        || (like(offset, "+00:00") || like(offset, "-00:00")) && offset[1..3] <= *"23" && offset[4..6] <= *"59";
    // A leap second would be read as the second after it.
    like(&time, "0000-00-00T00:00:00") && time[17..] <= *"59" && is_offset
}

impl FromStr for Priority {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = crate::model::Priority::ALL.into_iter().find(|known| known.as_str().eq_ignore_ascii_case(text));
        let unknown = || format!("unknown priority {text:?}; expected high, medium or low");
        known.map(|known| Self(known.to_pb())).ok_or_else(unknown)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc_3339_and_nothing_else() {
        let read = |text: &str| text.parse::<Instant>().map(|instant| instant.0.to_string());
        for (text, want) in [
            ("2030-01-31T12:00:00+02:00", "2030-01-31T10:00:00Z"),
            ("2030-01-31t12:00:00z", "2030-01-31T12:00:00Z"),
            ("2030-01-31T12:00:00.5-00:30", "2030-01-31T12:30:00.500Z"),
        ] {
            assert_eq!(read(text).unwrap(), want, "{text}");
        }
        for text in [
            "2030-01-01",
            "2030-01-01T00:00:00",
            "2030-01-01T00:00",
            "2030-01-01 00:00:00Z",
            "+99999-01-01T00:00:00Z",
            "-0001-01-01T00:00:00Z",
            "2030-01-01T00:00:60Z",
            "2030-02-30T00:00:00Z",
            "2030-01-01T00:00:00.Z",
            "2030-01-01T00:00:00+99:99",
            "2030-01-01T00:00:00+2:00",
            "٢030-01-01T00:00:00Z",
            "",
        ] {
            let error = read(text).unwrap_err();
            assert!(
                error.ends_with("is not a time; write it as RFC 3339: \"2030-01-31T12:00:00Z\""),
                "{text}: {error}"
            );
        }
    }
}
