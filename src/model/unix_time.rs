//! Times in milliseconds since 1970.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serializer;

/// The present time of this machine's clock. Times that other processes compare come from
/// `runtime::Clock`.
pub fn now_unix_ms() -> i64 {
    millis(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default(),
    )
}

/// A duration in milliseconds, saturating.
pub fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// Formats a time as `1970-01-01T00:00:01.500Z`. Works for any time.
pub fn to_rfc_3339(unix_ms: i64) -> String {
    const DAY: i64 = 24 * 3600;
    let seconds = unix_ms.div_euclid(1000);
    let [year, month, day] = date(seconds.div_euclid(DAY));
    let of_day = seconds.rem_euclid(DAY);
    let [hour, minute, second] = [of_day / 3600, of_day / 60 % 60, of_day % 60];
    let mut text = match year {
        0..=9999 => format!("{year:04}"),
        ..0 => format!("{year:05}"),
        _ => format!("+{year}"),
    };
    text += &format!("-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}");
    let ms = unix_ms.rem_euclid(1000);
    if ms > 0 {
        text += &format!(".{ms:03}");
    }
    text.push('Z');
    text
}

/// Converts a number of days since 1970 to year, month and day of the Gregorian calendar.
/// Internally years begin in March, so that a leap day is the last day of its year.
fn date(days: i64) -> [i64; 3] {
    /// The days from 1 March of year 0 to 1970, and the days in 400 years.
    const TO_1970: i64 = 719_468;
    const CYCLE: i64 = 146_097;
    let days = days + TO_1970;
    let day = days.rem_euclid(CYCLE);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    // Counted from March. Five months have 153 days.
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + 400 * days.div_euclid(CYCLE) + i64::from(month <= 2);
    [year, month, day]
}

/// Stands in for the schema of a time in answers.
pub struct Rfc3339;

/// Serializes a time in the format of answers.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
pub(super) fn rfc_3339<S: Serializer>(unix_ms: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&to_rfc_3339(*unix_ms))
}

/// Serializes a time that may be absent.
#[expect(clippy::ref_option, reason = "serde calls it so")]
pub(super) fn some_rfc_3339<S: Serializer>(
    unix_ms: &Option<i64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match unix_ms {
        Some(unix_ms) => rfc_3339(unix_ms, serializer),
        None => serializer.serialize_none(),
    }
}
