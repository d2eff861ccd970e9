//! Limits per key: which tasks of a queue share a limit key, and how many of them may start.

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use url::Url;

use super::{KeyHash, NewTask, QueueName};

/// The longest limit key.
pub const MAX_LIMIT_KEY_BYTES: usize = 255;

/// The bytes of a limit key's hash that name it in Redis.
pub const LIMIT_HASH_BYTES: usize = 8;

/// The name of a limit key of a queue in Redis.
pub type LimitHash = [u8; LIMIT_HASH_BYTES];

/// The first bytes of the hash of a limit key.
pub fn limit_hash(queue: &QueueName, limit_key: &str) -> LimitHash {
    let mut first = [0; LIMIT_HASH_BYTES];
    first.copy_from_slice(&KeyHash::new(queue, limit_key.as_bytes()).0[..LIMIT_HASH_BYTES]);
    first
}

/// The partition of `pipeline` of all tasks with a limit key, and so their shard, among those of
/// limited tasks.
pub fn limit_partition(hash: &LimitHash, partitions: u32) -> u32 {
    let mut whole = KeyHash([0; 32]);
    whole.0[..LIMIT_HASH_BYTES].copy_from_slice(hash);
    whole.partition(partitions)
}

/// A limit key of which nothing starts for a while, because a worker said so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitHold {
    pub hash: LimitHash,
    /// 0: an operator has ended the hold.
    pub until_unix_ms: i64,
}

impl LimitHold {
    /// Reads a text of limit keys, each with the end of its hold in eight bytes, big-endian.
    pub fn read_all(text: &[u8]) -> Option<Vec<Self>> {
        let (items, []) = text.as_chunks::<{ LIMIT_HASH_BYTES + 8 }>() else {
            return None;
        };
        let read = |item: &[u8; LIMIT_HASH_BYTES + 8]| {
            let (hash, until) = item.split_at(LIMIT_HASH_BYTES);
            Some(Self {
                hash: hash.try_into().ok()?,
                until_unix_ms: i64::from_be_bytes(until.try_into().ok()?),
            })
        };
        items.iter().map(read).collect()
    }
}

/// Where the limit key of a task comes from, as `limit_by` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LimitBy {
    /// The tasks of the queue have no limit keys.
    #[default]
    Nothing,
    /// The host of the URL that is the task's key.
    Host,
    /// The host and the port of that URL.
    HostPort,
    /// The value of this header.
    Header(Arc<str>),
    /// The insert gives it, or the task has none.
    Given,
}

impl FromStr for LimitBy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" => Ok(Self::Nothing),
            "host" => Ok(Self::Host),
            "host_port" => Ok(Self::HostPort),
            "given" => Ok(Self::Given),
            _ => match text.strip_prefix("header:") {
                Some(name) if !name.is_empty() => Ok(Self::Header(name.into())),
                _ => Err(format!(
                    "limit_by {text:?} is unknown; expected host, host_port, header:NAME or given"
                )),
            },
        }
    }
}

impl fmt::Display for LimitBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => Ok(()),
            Self::Host => f.write_str("host"),
            Self::HostPort => f.write_str("host_port"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Given => f.write_str("given"),
        }
    }
}

impl LimitBy {
    /// The limit key of a task; empty: it has none. An error is one line for the sender of the
    /// task.
    pub fn key_of(&self, task: &NewTask) -> Result<String, String> {
        if *self == Self::Nothing {
            if task.limit_key.is_empty() {
                return Ok(String::new());
            }
            return Err(
                "limit_key is given, and the queue has no limit_by: tasks there have no limit keys"
                    .into(),
            );
        }
        if !task.limit_key.is_empty() {
            return checked(task.limit_key.clone());
        }
        match self {
            Self::Nothing | Self::Given => Ok(String::new()),
            Self::Host => checked(host(&task.key, false)?),
            Self::HostPort => checked(host(&task.key, true)?),
            Self::Header(name) => match task.headers.get(&**name) {
                Some(value) if !value.is_empty() => checked(value.clone()),
                _ => Err(format!(
                    "header {name:?} is missing: the limit_by of the queue takes the limit key from it"
                )),
            },
        }
    }
}

fn checked(key: String) -> Result<String, String> {
    if key.len() > MAX_LIMIT_KEY_BYTES {
        return Err(format!(
            "limit_key has {} bytes; at most {MAX_LIMIT_KEY_BYTES}",
            key.len()
        ));
    }
    if key.chars().any(char::is_control) {
        return Err("limit_key contains a control character".into());
    }
    Ok(key)
}

/// The host of a URL as the URL standard writes it, with the port if asked.
fn host(key: &[u8], with_port: bool) -> Result<String, String> {
    let wrong = || {
        let shown: String = String::from_utf8_lossy(key).chars().take(64).collect();
        format!(
            "key {shown:?} is no URL with a host: the limit_by of the queue takes the limit key from it"
        )
    };
    let text = std::str::from_utf8(key).map_err(|_| wrong())?;
    let url = Url::parse(text).map_err(|_| wrong())?;
    let host = url.host_str().filter(|host| !host.is_empty());
    let host = host.ok_or_else(wrong)?;
    match url.port_or_known_default().filter(|_| with_port) {
        Some(port) => Ok(format!("{host}:{port}")),
        None => Ok(host.to_owned()),
    }
}

/// So many starts within a time, written `10/1m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    pub starts: u32,
    pub within: Duration,
}

impl Pace {
    /// The time between two starts in whole milliseconds, rounded up.
    pub fn interval_ms(self) -> u64 {
        let ms = u64::try_from(self.within.as_millis()).unwrap_or(u64::MAX);
        ms.div_ceil(u64::from(self.starts.max(1)))
    }
}

impl FromStr for Pace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no pace; write starts/time, such as 10/1m");
        let (starts, within) = text.split_once('/').ok_or_else(wrong)?;
        let starts = starts.trim().parse().map_err(|_| wrong())?;
        let within = humantime::parse_duration(within.trim()).map_err(|_| wrong())?;
        Ok(Self { starts, within })
    }
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let within = humantime::format_duration(self.within);
        write!(f, "{}/{within}", self.starts)
    }
}

/// How many tasks of a limit key may be leased at a time; 0: no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtATime(pub u32);

/// A pace, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaybePace(pub Option<Pace>);

/// From when the time between two starts counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LimitFrom {
    #[default]
    Start,
    /// From the end of the lease.
    End,
}

/// The limits of each limit key of a queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeyLimits {
    pub at_a_time: u32,
    pub pace: Option<Pace>,
    pub burst: u32,
    /// The share, 0 to 1, by which the time between two starts may be longer.
    pub jitter: f64,
    pub from: LimitFrom,
}

impl Default for KeyLimits {
    fn default() -> Self {
        Self {
            at_a_time: 0,
            pace: None,
            burst: 1,
            jitter: 0.0,
            from: LimitFrom::Start,
        }
    }
}

/// Stands for all limit keys of a queue, in the name of own limits.
pub const ALL_LIMIT_KEYS: &str = "*";

/// The limits that an operator gave one limit key. What is `None` is as the queue's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnValues {
    /// 0: nothing starts.
    pub at_a_time: Option<u32>,
    pub pace: Option<Pace>,
    pub burst: Option<u32>,
    /// Nothing starts before.
    pub hold_until_unix_ms: Option<i64>,
}

/// The own limits of a limit key, and who set them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnLimits {
    pub queue: QueueName,
    /// [`ALL_LIMIT_KEYS`]: those of all limit keys that have none of their own.
    pub limit_key: String,
    pub values: OwnValues,
    pub at_unix_ms: i64,
    pub who: String,
}

/// Own limits as they were last changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedLimits {
    /// Later changes have higher versions.
    pub version: u64,
    pub limits: OwnLimits,
    /// They were removed: the limits of the queue count again.
    pub is_cleared: bool,
}

macro_rules! as_text {
    ($($type:ty: $read:expr, $write:expr;)*) => {
        $(impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                $read(&text).map_err(de::Error::custom)
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&$write(self))
            }
        })*
    };
}

as_text! {
    LimitBy: str::parse::<LimitBy>, ToString::to_string;
    MaybePace: |text: &str| match text {
        "" => Ok(MaybePace(None)),
        _ => text.parse().map(|pace| MaybePace(Some(pace))),
    }, |pace: &MaybePace| pace.0.map(|pace| pace.to_string()).unwrap_or_default();
}

impl<'de> Deserialize<'de> for AtATime {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a number of tasks, or \"none\"")]
        enum Written {
            Number(u32),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(number @ 1..=1000) => Ok(Self(number)),
            Written::Text(text) if text == "none" => Ok(Self(0)),
            Written::Number(number) => Err(de::Error::custom(format!(
                "{number} tasks at a time; must be 1 to 1000, or \"none\""
            ))),
            Written::Text(text) => Err(de::Error::custom(format!(
                "{text:?} is no number of tasks; must be 1 to 1000, or \"none\""
            ))),
        }
    }
}

impl Serialize for AtATime {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            0 => serializer.serialize_str("none"),
            number => serializer.serialize_u32(number),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn task(key: &str, limit_key: &str) -> NewTask {
        NewTask {
            key: key.to_owned().into(),
            limit_key: limit_key.into(),
            headers: HashMap::from([("tenant".into(), "acme".into())]),
            ..NewTask::default()
        }
    }

    #[test]
    fn a_limit_key_comes_from_where_the_queue_says() {
        let url = "https://EXAMPLE.org:8443/a?b";
        for (by, key, given, expected) in [
            ("", "k", "", ""),
            ("given", "k", "", ""),
            ("given", "k", "g", "g"),
            ("host", url, "", "example.org"),
            ("host", url, "10.0.0.1", "10.0.0.1"),
            ("host_port", url, "", "example.org:8443"),
            ("host_port", "http://example.org/", "", "example.org:80"),
            ("header:tenant", "k", "", "acme"),
        ] {
            let by: LimitBy = by.parse().unwrap();
            assert_eq!(
                by.key_of(&task(key, given)).unwrap(),
                expected,
                "{by} {key}"
            );
        }
    }

    #[test]
    fn a_task_without_its_limit_key_is_refused_in_one_line() {
        let long = "k".repeat(256);
        for (by, key, given, why) in [
            (
                "",
                "k",
                "g",
                "limit_key is given, and the queue has no limit_by",
            ),
            (
                "host",
                "example.org/",
                "",
                "key \"example.org/\" is no URL with a host",
            ),
            (
                "host",
                "mailto:a@b",
                "",
                "key \"mailto:a@b\" is no URL with a host",
            ),
            ("header:account", "k", "", "header \"account\" is missing"),
            ("given", "k", &long, "limit_key has 256 bytes; at most 255"),
            (
                "given",
                "k",
                "a\nb",
                "limit_key contains a control character",
            ),
        ] {
            let by: LimitBy = by.parse().unwrap();
            let error = by.key_of(&task(key, given)).unwrap_err();
            assert!(
                error.starts_with(why) && error.lines().count() == 1,
                "{error}"
            );
        }
    }

    #[test]
    fn a_pace_is_rounded_up_to_milliseconds() {
        for (text, ms) in [
            ("10/1m", 6000),
            ("1/1s", 1000),
            ("7/1s", 143),
            ("5000/1s", 1),
        ] {
            let pace: Pace = text.parse().unwrap();
            assert_eq!(pace.interval_ms(), ms);
            assert_eq!(pace.to_string(), text);
        }
        assert!("10".parse::<Pace>().is_err() && "a/1s".parse::<Pace>().is_err());
    }
}
