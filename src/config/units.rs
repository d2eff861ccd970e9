//! Values as people write them: `30s`, `64MiB`, `discovery,fanout`. Flags, environment and file use
//! the same format.

use std::{fmt, net::SocketAddr, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::settings::Pipeline;
use crate::model::Priority;

/// `250ms`, `30s`, `1h 30m`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Time(pub Duration);

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            |error| format!("{text:?} is not a duration ({error}); write 250ms, 30s or 1h 30m");
        humantime::parse_duration(text).map(Self).map_err(wrong)
    }
}

/// Prints units of fixed length. humantime's months and years are not a whole number of days.
impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DAY: u128 = 24 * 3600 * 1_000_000_000;
        let units = [
            ("h", DAY / 24),
            ("m", DAY / 1440),
            ("s", 1_000_000_000),
            ("ms", 1_000_000),
            ("us", 1000),
            ("ns", 1),
        ];
        let days = self.0.as_nanos() / DAY;
        let mut rest = self.0.as_nanos() % DAY;
        let mut parts: Vec<String> = match days {
            0 => Vec::new(),
            1 => vec!["1day".to_owned()],
            _ => vec![format!("{days}days")],
        };
        for (unit, length) in units {
            if rest >= length {
                parts.push(format!("{}{unit}", rest / length));
                rest %= length;
            }
        }
        if parts.is_empty() {
            return f.write_str("0s");
        }
        f.write_str(&parts.join(" "))
    }
}

/// `1048576`, `1MiB` or `1MB`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ByteSize(pub u64);

/// The larger first, so that a size is printed in the largest unit that fits.
const UNITS: [(&str, u64); 6] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not a size; write bytes (65536) or a unit (64KiB, 1MiB, 2GiB, 1MB)"
            )
        };
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
        let unit = text[digits..].trim();
        let factor = match UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
        {
            Some((_, factor)) => *factor,
            None if unit.is_empty() || unit.eq_ignore_ascii_case("b") => 1,
            None => return Err(wrong()),
        };
        number.checked_mul(factor).map(Self).ok_or_else(wrong)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = UNITS[..3]
            .iter()
            .find(|(_, factor)| self.0 > 0 && self.0.is_multiple_of(*factor));
        match binary {
            Some((name, factor)) => write!(f, "{}{name}", self.0 / factor),
            None => self.0.fmt(f),
        }
    }
}

/// `127.0.0.1:7600`. A name is not allowed, because it may have several addresses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Address(pub SocketAddr);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            |_| format!("{text:?} is not an address; write IP:PORT, for example 127.0.0.1:7600");
        text.parse().map(Self).map_err(wrong)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// `all`, or a comma-separated list of pipelines.
#[derive(Clone, Debug, PartialEq)]
pub struct Pipelines(pub Vec<Pipeline>);

impl FromStr for Pipelines {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim() == "all" {
            return Ok(Self(Pipeline::ALL.to_vec()));
        }
        let (all, others): (Vec<&str>, Vec<&str>) = text
            .split(',')
            .map(str::trim)
            .partition(|name| *name == "all");
        // Report an unknown name first, even if `all` is misplaced, too.
        let names = others.into_iter().chain(all);
        let mut pipelines = names
            .map(str::parse)
            .collect::<Result<Vec<Pipeline>, _>>()?;
        pipelines.sort();
        pipelines.dedup();
        Ok(Self(pipelines))
    }
}

impl fmt::Display for Pipelines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == Pipeline::ALL {
            return f.write_str("all");
        }
        f.write_str(
            &self
                .0
                .iter()
                .map(|p| p.as_str())
                .collect::<Vec<_>>()
                .join(","),
        )
    }
}

/// A comma-separated list of host names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hosts(pub Vec<String>);

impl FromStr for Hosts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let hosts = text.split(',').map(str::trim).filter(|host| !host.is_empty()).map(|host| {
            let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            if host == "*" || host.chars().all(legal) {
                return Ok(host.trim_end_matches('.').to_ascii_lowercase());
            }
            Err(format!("{host:?} is not a host; write a name without scheme and port, .name for all below it, or *"))
        });
        Ok(Self(hosts.collect::<Result<_, _>>()?))
    }
}

impl fmt::Display for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(","))
    }
}

/// A [`Priority`] by its name.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PriorityName {
    High,
    Medium,
    Low,
}

impl From<PriorityName> for Priority {
    fn from(name: PriorityName) -> Self {
        match name {
            PriorityName::High => Self::High,
            PriorityName::Medium => Self::Medium,
            PriorityName::Low => Self::Low,
        }
    }
}

impl From<Priority> for PriorityName {
    fn from(priority: Priority) -> Self {
        match priority {
            Priority::High => Self::High,
            Priority::Medium => Self::Medium,
            Priority::Low => Self::Low,
        }
    }
}

/// Deserializes a value from text.
struct Text<T>(&'static str, std::marker::PhantomData<T>);

impl<T: FromStr<Err = String>> de::Visitor<'_> for Text<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

/// Deserializes a size from text or from a whole number.
struct Number;

impl de::Visitor<'_> for Number {
    type Value = ByteSize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size such as 65536 or \"64KiB\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<ByteSize, E> {
        u64::try_from(number)
            .map(ByteSize)
            .map_err(|_| E::custom(format!("{number} is not a size; it is negative")))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<ByteSize, E> {
        Ok(ByteSize(number))
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Text("a duration such as \"30s\"", Default::default()))
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Text(
            "IP:PORT, such as \"127.0.0.1:7600\"",
            Default::default(),
        ))
    }
}

impl<'de> Deserialize<'de> for Pipelines {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Text(
            "\"all\" or a comma list of pipelines",
            Default::default(),
        ))
    }
}

impl<'de> Deserialize<'de> for Hosts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Text("a comma list of names", Default::default()))
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Number)
    }
}

macro_rules! serialize_as_text {
    ($($type:ty)*) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
    )*};
}
serialize_as_text!(Time ByteSize Address Pipelines Hosts);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        let cases = [
            ("0", 0),
            ("65536", 65_536),
            ("64KiB", 65_536),
            ("1 MiB", 1 << 20),
            ("2gib", 2 << 30),
            ("3MB", 3_000_000),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for bad in ["", "MiB", "1.5MiB", "-1", "1 parsec", "99999999999GiB"] {
            let error = bad.parse::<ByteSize>().unwrap_err();
            assert!(
                error.contains("64KiB"),
                "{error:?} should show how a size is written"
            );
        }
        assert_eq!(ByteSize(32 << 20).to_string(), "32MiB");
        assert_eq!(ByteSize(1500).to_string(), "1500");
    }

    #[test]
    fn pipelines_are_all_or_a_list_in_any_order() {
        let read = |text: &str| text.parse::<Pipelines>().map(|list| list.to_string());
        assert_eq!(read("all").unwrap(), "all");
        assert_eq!(read("tasks, discovery,tasks").unwrap(), "discovery,tasks");
        let error = read("discovery,fnout").unwrap_err();
        assert_eq!(
            error,
            "unknown pipeline \"fnout\"; expected all, discovery, fanout, watchdog, tasks, workflow"
        );
        assert!(
            read("all,foo")
                .unwrap_err()
                .starts_with("unknown pipeline \"foo\"")
        );
        let alone = "\"all\" stands alone; write all, or a list of discovery, fanout, watchdog, tasks, workflow";
        assert_eq!(read("all,tasks").unwrap_err(), alone);
    }

    #[test]
    fn hosts_are_names_without_ports() {
        let read = |text: &str| text.parse::<Hosts>().map(|hosts| hosts.to_string());
        assert_eq!(
            read(" Taskd, .example.org.,*").unwrap(),
            "taskd,.example.org,*"
        );
        assert_eq!(read("").unwrap(), "");
        assert!(
            read("http://taskd")
                .unwrap_err()
                .starts_with("\"http://taskd\" is not a host")
        );
        assert!(read("taskd:7600").is_err());
    }

    #[test]
    fn durations_are_shown_in_units_of_a_fixed_length() {
        let cases = [
            ("0s", "0s"),
            ("31days", "31days"),
            ("744h", "31days"),
            ("3650days", "3650days"),
            ("24h", "1day"),
            ("90m", "1h 30m"),
            ("1500ms", "1s 500ms"),
            ("1day 1us 3ns", "1day 1us 3ns"),
        ];
        for (text, shown) in cases {
            let time: Time = text.parse().unwrap();
            assert_eq!(time.to_string(), shown);
            assert_eq!(shown.parse(), Ok(time));
        }
        Time(Duration::MAX).to_string().parse::<Time>().unwrap();
    }

    #[test]
    fn a_duration_without_a_unit_is_told_how_to_write_one() {
        let error = "30".parse::<Time>().unwrap_err();
        assert!(error.contains("30s"), "{error}");
    }
}
