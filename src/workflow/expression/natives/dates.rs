//! Dates, in UTC only. Nothing here reads a clock.

use jaq_core::RunPtr;
use jaq_core::native::{Filter, bome, unary, v};

use super::signatures::Data;
use crate::workflow::expression::meter;
use crate::workflow::expression::number::Number;
use crate::workflow::expression::value::{Failure, Val, ValR};

const DAY: i64 = 86_400;
/// The years from 0 to 9999, in seconds since 1970.
const SECONDS: std::ops::RangeInclusive<i64> = -62_167_219_200..=253_402_300_799;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

pub(super) fn all() -> Vec<Filter<RunPtr<Data>>> {
    vec![
        ("fromdateiso8601", v(0), |cv| bome(from_iso(&cv.1))),
        ("todateiso8601", v(0), |cv| {
            bome(Date::of(&cv.1).map(|date| Val::text(date.format("%Y-%m-%dT%H:%M:%SZ"))))
        }),
        ("gmtime", v(0), |cv| {
            bome(Date::of(&cv.1).map(|date| date.broken_down()))
        }),
        ("mktime", v(0), |cv| {
            bome(Date::of(&cv.1).map(|date| Val::from(date.seconds() as isize)))
        }),
        ("strftime", v(1), |cv| {
            unary(cv, |date, format| {
                Ok(Val::text(Date::of(&date)?.format(format.as_text()?)))
            })
        }),
    ]
}

struct Date {
    year: i64,
    /// From 1.
    month: i64,
    /// From 1.
    day: i64,
    /// Of the day, whole ones.
    second: i64,
    fraction: f64,
}

impl Date {
    /// Reads seconds since 1970, or what `gmtime` gives.
    fn of(value: &Val) -> Result<Date, Failure> {
        if let Val::Num(number) = value {
            let seconds = number.as_f64();
            let whole = number.floor();
            if !SECONDS.contains(&whole) || number.is_nan() {
                return Err(Failure::str(format_args!("{number} is not a date")));
            }
            return Ok(Date::from_seconds(whole, seconds - seconds.floor()));
        }
        let parts = value.as_array()?;
        let fail = || Failure::str(format_args!("{value} is not a broken down time"));
        let part = |index: usize| parts.get(index).ok_or_else(fail)?.as_number();
        let year = part(0)?.floor();
        let month = part(1)?.floor();
        let small = |value: i64| (-100_000..=100_000).contains(&value);
        let rest = [
            part(2)?.floor(),
            part(3)?.floor(),
            part(4)?.floor(),
            part(5)?.floor(),
        ];
        if !(0..=9_999).contains(&year) || !(0..12).contains(&month) || !rest.into_iter().all(small)
        {
            return Err(fail());
        }
        let [day, hour, minute, second] = rest;
        let days = days_since_1970(year, month + 1, 1) + day - 1;
        let seconds = days * DAY + hour * 3_600 + minute * 60 + second;
        if !SECONDS.contains(&seconds) {
            return Err(fail());
        }
        Ok(Date::from_seconds(seconds, 0.0))
    }

    /// The algorithm `civil_from_days` of Howard Hinnant: years begin in March.
    fn from_seconds(seconds: i64, fraction: f64) -> Date {
        let days = seconds.div_euclid(DAY) + 719_468;
        let era = days.div_euclid(146_097);
        let day_of_era = days.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * day_of_year + 2) / 153;
        let month = if shifted < 10 {
            shifted + 3
        } else {
            shifted - 9
        };
        Date {
            year: era * 400 + year_of_era + i64::from(month <= 2),
            month,
            day: day_of_year - (153 * shifted + 2) / 5 + 1,
            second: seconds.rem_euclid(DAY),
            fraction,
        }
    }

    fn days(&self) -> i64 {
        days_since_1970(self.year, self.month, self.day)
    }

    fn seconds(&self) -> i64 {
        self.days() * DAY + self.second
    }

    /// From Sunday, which is 0.
    fn day_of_week(&self) -> i64 {
        (self.days() + 4).rem_euclid(7)
    }

    /// From 0.
    fn day_of_year(&self) -> i64 {
        self.days() - days_since_1970(self.year, 1, 1)
    }

    fn broken_down(&self) -> Val {
        let int = |value: i64| Val::Num(Number::Int(value.into()));
        let second = self.second % 60;
        let second = if self.fraction == 0.0 {
            int(second)
        } else {
            Val::Num(Number::Float(second as f64 + self.fraction))
        };
        Val::array([
            int(self.year),
            int(self.month - 1),
            int(self.day),
            int(self.second / 3_600),
            int(self.second / 60 % 60),
            second,
            int(self.day_of_week()),
            int(self.day_of_year()),
        ])
    }

    /// Follows C's `strftime`. A conversion that it does not know stays as it is.
    fn format(&self, format: &str) -> String {
        meter::work(format.len() * 64);
        let mut text = String::new();
        let mut rest = format.chars();
        while let Some(c) = rest.next() {
            if c != '%' {
                text.push(c);
                continue;
            }
            let Some(conversion) = rest.next() else {
                text.push('%');
                break;
            };
            let hour = self.second / 3_600;
            let month = MONTHS
                .get(self.month as usize - 1)
                .copied()
                .unwrap_or_default();
            let day = DAYS
                .get(self.day_of_week() as usize)
                .copied()
                .unwrap_or_default();
            let piece = match conversion {
                'Y' => self.year.to_string(),
                'C' => format!("{:02}", self.year / 100),
                'y' => format!("{:02}", self.year % 100),
                'm' => format!("{:02}", self.month),
                'd' => format!("{:02}", self.day),
                'e' => format!("{:2}", self.day),
                'H' => format!("{hour:02}"),
                'I' => format!("{:02}", (hour + 11) % 12 + 1),
                'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
                'M' => format!("{:02}", self.second / 60 % 60),
                'S' => format!("{:02}", self.second % 60),
                'j' => format!("{:03}", self.day_of_year() + 1),
                'u' => ((self.day_of_week() + 6) % 7 + 1).to_string(),
                'w' => self.day_of_week().to_string(),
                'A' => day.to_owned(),
                'a' => day[..3.min(day.len())].to_owned(),
                'B' => month.to_owned(),
                'b' | 'h' => month[..3.min(month.len())].to_owned(),
                's' => self.seconds().to_string(),
                'Z' => "UTC".to_owned(),
                'z' => "+0000".to_owned(),
                'F' => self.format("%Y-%m-%d"),
                'T' => self.format("%H:%M:%S"),
                'D' => self.format("%m/%d/%y"),
                'R' => self.format("%H:%M"),
                'c' => self.format("%a %b %e %H:%M:%S %Y"),
                'n' => "\n".to_owned(),
                't' => "\t".to_owned(),
                '%' => "%".to_owned(),
                other => format!("%{other}"),
            };
            text.push_str(&piece);
        }
        text
    }
}

/// The algorithm `days_from_civil` of Howard Hinnant.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let shifted = (month + 9) % 12;
    let day_of_year = (153 * shifted + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// Reads a time of RFC 3339 in UTC. Parts of a second are kept.
fn from_iso(value: &Val) -> ValR {
    let text = value.as_text()?;
    let fail = || {
        Failure::str(format_args!(
            "{value} is not a date such as 2015-03-05T23:51:47Z"
        ))
    };
    let time = humantime::parse_rfc3339(text).map_err(|_| fail())?;
    let since = time
        .duration_since(std::time::UNIX_EPOCH)
        .map_err(|_| fail())?;
    Ok(Val::Num(if since.subsec_nanos() == 0 {
        Number::Int(since.as_secs().into())
    } else {
        Number::Float(since.as_secs_f64())
    }))
}
