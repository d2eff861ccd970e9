//! Limit keys of a queue, as operators see and change them.

use std::{fmt, str::FromStr, time::Duration};

use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use super::{
    ALL_LIMIT_KEYS, MAX_LIMIT_KEY_BYTES, OwnLimits, OwnValues, Pace, QueueName, Rfc3339, rfc_3339,
    some_rfc_3339,
};

/// The longest hold that an operator may set.
const MAX_OWN_HOLD: Duration = Duration::from_secs(366 * 24 * 3600);
pub const MOST_AT_A_TIME: u32 = 1000;
const MOST_BURST: u32 = 1000;
const LONGEST_PACE: Duration = Duration::from_secs(24 * 3600);

/// Which limit keys a list has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKeyState {
    /// Those with leases.
    Running,
    /// Those with tasks that wait.
    Waiting,
    /// Those of which nothing starts before some time.
    Held,
    /// Those with own limits.
    Own,
}

impl LimitKeyState {
    pub const ALL: [Self; 4] = [Self::Running, Self::Waiting, Self::Held, Self::Own];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Held => "held",
            Self::Own => "own",
        }
    }
}

impl fmt::Display for LimitKeyState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reads a state; the empty text is [`LimitKeyState::Own`].
impl FromStr for LimitKeyState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self::Own);
        }
        let known = Self::ALL.into_iter().find(|state| state.as_str() == text);
        known.ok_or_else(|| {
            format!("unknown state {text:?}; expected running, waiting, held or own")
        })
    }
}

/// A request for a page of limit keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitKeyPages {
    pub queue: String,
    /// As it was given.
    pub state: String,
    pub limit: u32,
    /// Empty: the first page.
    pub cursor: String,
}

/// A request to give a limit key own limits, which replace those that it had.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetLimits {
    pub queue: String,
    pub limit_key: String,
    pub at_a_time: Option<u32>,
    /// As it was given; empty: as the queue's.
    pub pace: String,
    pub burst: Option<u32>,
    pub hold: Option<Duration>,
}

impl SetLimits {
    /// Checks the values, or says in one line what is wrong. `has_pace`: the queue has a pace.
    pub fn values(&self, has_pace: bool, now_unix_ms: i64) -> Result<OwnValues, String> {
        let pace = match self.pace.as_str() {
            "" => None,
            pace => Some(checked_pace(pace)?),
        };
        if self.at_a_time.is_none() && pace.is_none() && self.burst.is_none() && self.hold.is_none()
        {
            return Err(
                "no limit is given; give at_a_time, pace, burst or hold, or clear them".into(),
            );
        }
        if let Some(at_a_time) = self.at_a_time.filter(|number| *number > MOST_AT_A_TIME) {
            return Err(format!(
                "at_a_time is {at_a_time}; must be 0 (nothing starts) to {MOST_AT_A_TIME}"
            ));
        }
        if let Some(burst) = self.burst {
            if burst == 0 || burst > MOST_BURST {
                return Err(format!("burst is {burst}; must be 1 to {MOST_BURST}"));
            }
            if pace.is_none() && !has_pace {
                return Err("burst needs a pace, such as 10/1m: the queue has none".into());
            }
        }
        if let Some(hold) = self.hold.filter(|hold| *hold > MAX_OWN_HOLD) {
            return Err(format!(
                "hold is {}; at most 366days",
                humantime::format_duration(hold)
            ));
        }
        let until = |hold: Duration| {
            let ms = i64::try_from(hold.as_millis()).unwrap_or(i64::MAX);
            now_unix_ms.saturating_add(ms)
        };
        Ok(OwnValues {
            at_a_time: self.at_a_time,
            pace,
            burst: self.burst,
            hold_until_unix_ms: self.hold.map(until),
        })
    }
}

fn checked_pace(text: &str) -> Result<Pace, String> {
    let pace: Pace = text.parse()?;
    let within = Duration::from_millis(1)..=LONGEST_PACE;
    if pace.starts == 0 || !within.contains(&pace.within) {
        return Err(format!(
            "pace is {text:?}; must be at least one start within 1ms to 1day"
        ));
    }
    Ok(pace)
}

/// Checks the name of a limit key, or says in one line what is wrong.
pub fn check_limit_key(key: &str) -> Result<(), String> {
    if key.is_empty() {
        return Err(format!(
            "the limit key is empty; {ALL_LIMIT_KEYS} stands for all of the queue"
        ));
    }
    if key.len() > MAX_LIMIT_KEY_BYTES {
        return Err(format!(
            "the limit key has {} bytes; at most {MAX_LIMIT_KEY_BYTES}",
            key.len()
        ));
    }
    if key.chars().any(char::is_control) {
        return Err("the limit key contains a control character".into());
    }
    Ok(())
}

// A limit key of a queue: how many of its tasks run and wait, and its limits.
#[derive(Clone, Debug, JsonSchema, PartialEq, Serialize)]
#[schemars(rename = "LimitKey")]
pub struct LimitKeyView {
    pub queue: QueueName,
    /// `*`: all limit keys of the queue. Empty: Redis has no task of it that tells the name.
    pub limit_key: String,
    /// Leases.
    pub running: u64,
    /// Tasks that wait for a worker or behind the limit key.
    pub waiting: u64,
    /// How many may run; 0: nothing starts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_a_time: Option<u64>,
    /// The time between two starts, or 0.
    pub pace_ms: u64,
    pub burst: u32,
    // When time lets the next task start, if that is not now.
    #[serde(
        rename = "next_start_at",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub next_start_unix_ms: Option<i64>,
    // Nothing starts before.
    #[serde(
        rename = "held_until",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub held_until_unix_ms: Option<i64>,
    // What an operator set for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own: Option<OwnLimitsView>,
}

// Own limits of a limit key. What is absent is as the queue's.
#[derive(Clone, Debug, JsonSchema, PartialEq, Serialize)]
#[schemars(rename = "OwnLimits")]
pub struct OwnLimitsView {
    /// 0: nothing starts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_a_time: Option<u32>,
    // Starts within a time: `10/1m`.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "some_pace")]
    #[schemars(with = "Option<String>")]
    pub pace: Option<Pace>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u32>,
    // Nothing starts before.
    #[serde(
        rename = "hold_until",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub hold_until_unix_ms: Option<i64>,
    // When they were set.
    #[serde(rename = "at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub at_unix_ms: i64,
    /// Who set them.
    pub who: String,
}

fn some_pace<S: Serializer>(pace: &Option<Pace>, serializer: S) -> Result<S::Ok, S::Error> {
    match pace {
        Some(pace) => serializer.serialize_str(&pace.to_string()),
        None => serializer.serialize_none(),
    }
}

impl From<OwnLimits> for OwnLimitsView {
    fn from(limits: OwnLimits) -> Self {
        let OwnValues {
            at_a_time,
            pace,
            burst,
            hold_until_unix_ms,
        } = limits.values;
        Self {
            at_a_time,
            pace,
            burst,
            hold_until_unix_ms,
            at_unix_ms: limits.at_unix_ms,
            who: limits.who,
        }
    }
}

/// A page of limit keys.
#[derive(Clone, Debug, Default, JsonSchema, PartialEq, Serialize)]
pub struct LimitKeyPage {
    pub limits: Vec<LimitKeyView>,
    /// Where the next page begins. Absent: this is the last one. A page may be empty and have one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

/// The outcome of clearing own limits.
#[derive(Clone, Debug, JsonSchema, PartialEq, Serialize)]
pub struct LimitsCleared {
    pub queue: QueueName,
    pub limit_key: String,
    /// False if there were none.
    pub changed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_own_limits_get_one_line() {
        let set = SetLimits::default;
        let wrong = [
            (set(), "no limit is given"),
            (
                SetLimits {
                    at_a_time: Some(1001),
                    ..set()
                },
                "at_a_time is 1001",
            ),
            (
                SetLimits {
                    pace: "0/1s".into(),
                    ..set()
                },
                "pace is \"0/1s\"",
            ),
            (
                SetLimits {
                    pace: "often".into(),
                    ..set()
                },
                "\"often\" is no pace",
            ),
            (
                SetLimits {
                    burst: Some(2),
                    ..set()
                },
                "burst needs a pace",
            ),
            (
                SetLimits {
                    hold: Some(MAX_OWN_HOLD + Duration::from_secs(1)),
                    ..set()
                },
                "hold is 1year",
            ),
        ];
        for (set, why) in wrong {
            let error = set.values(false, 0).unwrap_err();
            assert!(error.starts_with(why) && !error.contains('\n'), "{error}");
        }
        let values = SetLimits {
            burst: Some(2),
            hold: Some(Duration::from_secs(1)),
            ..set()
        };
        let values = values.values(true, 5).unwrap();
        assert_eq!(values.hold_until_unix_ms, Some(1005));
    }
}
