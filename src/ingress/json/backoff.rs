//! The backoff of a task, in requests and answers.

use std::{borrow::Cow, str::FromStr, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de};

use super::{item, text::Time};
use crate::model::{self, BackoffKind};

/// The waits of a task between its attempts, in place of those of its queue. Without a `kind`,
/// those of the queue are kept.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a backoff")]
pub(super) struct Backoff {
    /// Constant: always `initial`. Linear: `initial` more after each failure. Exponential: twice as
    /// long after each.
    kind: Option<Kind>,
    /// The wait after the first failure.
    initial: Option<Time>,
    /// The longest wait, at most and by default a day.
    maximum: Option<Time>,
    /// The share by which a wait may be longer or shorter. A fifth by default.
    #[schemars(range(min = 0, max = 1))]
    jitter: Option<f64>,
    /// The task is dead when its next attempt would begin later than this after its insert, or
    /// after `not_before`.
    give_up_after: Option<Time>,
}

/// A kind such as `"exponential"`, in upper or lower case.
pub(super) struct Kind(BackoffKind);

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = BackoffKind::OWN
            .into_iter()
            .find(|known| known.as_str().eq_ignore_ascii_case(text));
        let unknown = || format!("unknown kind {text:?}; expected constant, linear or exponential");
        known.map(Self).ok_or_else(unknown)
    }
}

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Cow::<'de, str>::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

/// Reads a backoff from a text that contains nothing else.
pub fn read(text: &str) -> Result<model::NewBackoff, String> {
    item::<Backoff>(text, "a backoff").map(Into::into)
}

impl From<Backoff> for model::NewBackoff {
    fn from(backoff: Backoff) -> Self {
        let time = |time: Option<Time>| time.map(|time| time.0);
        Self {
            kind: backoff.kind.map(|kind| kind.0).unwrap_or_default(),
            initial: time(backoff.initial),
            maximum: time(backoff.maximum),
            jitter: backoff.jitter,
            give_up_after: time(backoff.give_up_after),
        }
    }
}

/// The backoff of a stored task.
#[derive(JsonSchema, Serialize)]
pub(super) struct OwnBackoff {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Kind>")]
    kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Time>")]
    initial: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Time>")]
    maximum: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    jitter: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Time>")]
    give_up_after: Option<String>,
}

impl From<&model::NewBackoff> for OwnBackoff {
    fn from(backoff: &model::NewBackoff) -> Self {
        let time =
            |time: Option<Duration>| time.map(|time| humantime::format_duration(time).to_string());
        Self {
            kind: (backoff.kind != BackoffKind::Queue).then(|| backoff.kind.as_str()),
            initial: time(backoff.initial),
            maximum: time(backoff.maximum),
            jitter: backoff.jitter,
            give_up_after: time(backoff.give_up_after),
        }
    }
}
