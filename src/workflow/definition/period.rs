//! Lengths of time: objects with units, and ISO 8601.

use serde_json::Value;

use super::Period;

/// The longest: ten years, as for a deadline of a task.
const LONGEST_MS: u64 = 3650 * DAY_MS;

const SECOND_MS: u64 = 1000;
const MINUTE_MS: u64 = 60 * SECOND_MS;
const HOUR_MS: u64 = 60 * MINUTE_MS;
const DAY_MS: u64 = 24 * HOUR_MS;
const WEEK_MS: u64 = 7 * DAY_MS;

/// The units of an object.
const UNITS: [(&str, u64); 5] = [
    ("days", DAY_MS),
    ("hours", HOUR_MS),
    ("minutes", MINUTE_MS),
    ("seconds", SECOND_MS),
    ("milliseconds", 1),
];

/// Whether an object may have this unit.
pub(super) fn is_unit(name: &str) -> bool {
    UNITS.iter().any(|(known, _)| *known == name)
}

const ISO: &str = "write it in ISO 8601, such as PT30S or P1DT12H";

impl Period {
    /// Reads the result of an expression. Returns milliseconds.
    pub fn read(value: &Value) -> Result<u64, String> {
        match value {
            Value::String(text) => iso_8601(text),
            Value::Object(units) => {
                let mut sum = 0;
                for (name, number) in units {
                    sum += unit(name, number)?;
                }
                total(sum, !units.is_empty())
            }
            _ => Err(
                "a duration must be a text such as PT30S, or an object such as { seconds: 30 }"
                    .to_owned(),
            ),
        }
    }
}

/// Milliseconds of one unit of an object.
pub(super) fn unit(name: &str, number: &Value) -> Result<u128, String> {
    let Some((_, ms)) = UNITS.iter().find(|(known, _)| *known == name) else {
        let unit = crate::model::shorten(name, crate::model::ECHO);
        return Err(format!(
            "unknown unit {unit:?}; expected days, hours, minutes, seconds, milliseconds"
        ));
    };
    let number = number
        .as_u64()
        .ok_or_else(|| format!("{name} must be a whole number, 0 or more"))?;
    Ok(u128::from(number) * u128::from(*ms))
}

/// Checks a sum of units.
pub(super) fn total(ms: u128, has_units: bool) -> Result<u64, String> {
    if !has_units {
        return Err("a duration needs a unit: { seconds: 30 }".to_owned());
    }
    u64::try_from(ms)
        .ok()
        .filter(|ms| *ms <= LONGEST_MS)
        .ok_or_else(|| "a duration must be at most 3650 days".to_owned())
}

/// Reads a text of ISO 8601. Any number may have a fraction; a part of a millisecond counts as a
/// whole one, so that no wait is shorter than it says.
pub(super) fn iso_8601(text: &str) -> Result<u64, String> {
    let shown = crate::model::shorten(text, crate::model::ECHO);
    let wrong = || format!("{shown:?} is no duration: {ISO}");
    let mut rest = text.strip_prefix('P').ok_or_else(wrong)?;
    let mut is_time = false;
    let mut parts = 0;
    // The units come from large to small, each once.
    let mut next = 0;
    let mut sum: u128 = 0;
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('T')
            && !is_time
        {
            is_time = true;
            rest = after;
            // Something must follow.
            parts = 0;
            continue;
        }
        let end = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .ok_or_else(wrong)?;
        let (number, after) = rest.split_at(end);
        let mut letters = after.chars();
        let letter = letters.next().ok_or_else(wrong)?;
        rest = letters.as_str();
        let (place, ms) = match (is_time, letter) {
            (false, 'Y') => (0, None),
            (false, 'M') => (1, None),
            (false, 'W') => (2, Some(WEEK_MS)),
            (false, 'D') => (3, Some(DAY_MS)),
            (true, 'H') => (4, Some(HOUR_MS)),
            (true, 'M') => (5, Some(MINUTE_MS)),
            (true, 'S') => (6, Some(SECOND_MS)),
            _ => return Err(wrong()),
        };
        if place < next {
            return Err(wrong());
        }
        next = place + 1;
        parts += 1;
        let Some(ms) = ms else {
            return Err(format!(
                "{shown:?} has years or months, whose length varies: write days, such as P30D"
            ));
        };
        sum = sum.saturating_add(fraction(number, ms).ok_or_else(wrong)?);
    }
    if parts == 0 {
        return Err(wrong());
    }
    total(sum, true)
}

/// Milliseconds of a decimal number of units, rounded up.
fn fraction(number: &str, ms: u64) -> Option<u128> {
    let (whole, part) = match number.split_once('.') {
        Some((_, "")) => return None,
        Some((whole, part)) => (whole, part),
        None => (number, ""),
    };
    if whole.is_empty() || part.contains('.') {
        return None;
    }
    // More digits than these are too long anyway, or make no difference.
    let whole: u128 = match whole.trim_start_matches('0') {
        "" => 0,
        digits if digits.len() > 18 => return Some(u128::from(u64::MAX)),
        digits => digits.parse().ok()?,
    };
    let ms = u128::from(ms);
    let digits = part.get(..part.len().min(18))?;
    let mut sum = whole * ms;
    if !digits.is_empty() {
        let scale = 10_u128.pow(u32::try_from(digits.len()).ok()?);
        let numerator: u128 = digits.parse().ok()?;
        sum += (numerator * ms).div_ceil(scale);
    }
    Some(sum)
}
