//! Times and durations in the forms of protobuf and RFC 3339.

use std::time::Duration;

use prost_types::Timestamp;

/// Converts milliseconds since 1970 to a timestamp.
pub fn timestamp(unix_ms: i64) -> Timestamp {
    let nanos = i32::try_from(unix_ms.rem_euclid(1000) * 1_000_000).unwrap_or(0);
    Timestamp {
        seconds: unix_ms.div_euclid(1000),
        nanos,
    }
}

/// Converts a timestamp to milliseconds since 1970; 0 for earlier times.
pub fn unix_ms(at: Timestamp) -> i64 {
    at.seconds
        .saturating_mul(1000)
        .saturating_add(i64::from(at.nanos) / 1_000_000)
        .max(0)
}

/// Reads the duration in field `what`, which must not be negative.
pub fn read_duration(what: &str, duration: prost_types::Duration) -> Result<Duration, String> {
    Duration::try_from(duration).map_err(|_| format!("{what} is negative or out of range"))
}

/// Converts a duration to a message; `None` if it is too long for one.
pub(super) fn duration(duration: Duration) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(duration).ok()
}

/// Parses a text like `2030-01-31T12:00:00[.5](Z|+02:00)` to milliseconds since 1970. Returns
/// `None` for any other form.
pub fn from_rfc_3339(text: &str) -> Option<i64> {
    // `unix_ms` takes a `Timestamp`, so that is what `parse` returns.
    is_rfc_3339(text).then(|| text.parse().ok().map(unix_ms))?
}

/// True for the form `2030-01-31T12:00:00[.5](Z|+02:00)`. The parser accepts more: days without a
/// time, times without an offset, years with a sign.
fn is_rfc_3339(text: &str) -> bool {
    // Whether the text has the form, in which each 0 stands for any digit.
    let like = |text: &str, form: &str| {
        let fits = |(byte, form): (u8, u8)| {
            if form == b'0' {
                byte.is_ascii_digit()
            } else {
                byte == form
            }
        };
        text.len() == form.len() && text.bytes().zip(form.bytes()).all(fits)
    };
    let Some((time, rest)) = text.split_at_checked("0000-00-00T00:00:00".len()) else {
        return false;
    };
    let time = time.to_ascii_uppercase();
    let fraction = rest.strip_prefix('.').unwrap_or_default();
    let digits = fraction.len()
        - fraction
            .trim_start_matches(|c: char| c.is_ascii_digit())
            .len();
    let offset = if digits > 0 {
        &fraction[digits..]
    } else {
        rest
    };
    // Pairs of digits can be compared as text.
    let is_offset = offset.eq_ignore_ascii_case("z")
        || (like(offset, "+00:00") || like(offset, "-00:00"))
            && offset[1..3] <= *"23"
            && offset[4..6] <= *"59";
    // No second 60: the parser would read a leap second as the second after it.
    like(&time, "0000-00-00T00:00:00") && time[17..] <= *"59" && is_offset
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::to_rfc_3339;

    #[test]
    fn a_time_is_written_as_protobuf_writes_it() {
        let mut at: i64 = 1;
        for step in 0..5000 {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Times of all lengths.
            let at = at >> (step % 40);
            assert_eq!(to_rfc_3339(at), timestamp(at).to_string(), "{at}");
        }
        for at in [
            0,
            1,
            -1,
            999,
            1000,
            951_782_400_000,
            951_868_799_999,
            253_402_300_800_000,
        ] {
            assert_eq!(to_rfc_3339(at), timestamp(at).to_string(), "{at}");
        }
    }

    #[test]
    fn times_are_rfc_3339_and_nothing_else() {
        for (text, want) in [
            ("2030-01-31T12:00:00+02:00", "2030-01-31T10:00:00Z"),
            ("2030-01-31t12:00:00z", "2030-01-31T12:00:00Z"),
            ("2030-01-31T12:00:00.5-00:30", "2030-01-31T12:30:00.500Z"),
        ] {
            assert_eq!(
                from_rfc_3339(text).map(to_rfc_3339).as_deref(),
                Some(want),
                "{text}"
            );
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
            assert_eq!(from_rfc_3339(text), None, "{text}");
        }
    }
}
