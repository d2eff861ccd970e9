//! A task with its payload and its history, as its readers see it.

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::Serialize;
use uuid::Uuid;

use super::{
    backoff::OwnBackoff,
    read::Task,
    text::Instant,
    value::{EncodingName, Shown, Value},
};
use crate::{
    model::{self, AttemptState},
    wire::time::to_rfc_3339,
};

/// A task with its payload, its attempts and the acts of operators on it.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct TaskFile<'a> {
    #[serde(flatten)]
    task: Task<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Value<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("contentEncoding" = "base64"))]
    payload_base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<EncodingName>")]
    payload_encoding: Option<&'static str>,
    headers: &'a HashMap<String, String>,
    traceparent: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    backoff: Option<OwnBackoff>,
    history: Vec<Attempt<'a>>,
    acts: Vec<Act<'a>>,
    results: u32,
}

impl<'a> From<&'a model::TaskFile> for TaskFile<'a> {
    fn from(file: &'a model::TaskFile) -> Self {
        let Shown {
            value,
            base64,
            encoding,
        } = Shown::of(&file.payload, file.payload_encoding);
        Self {
            task: (&file.task).into(),
            payload: value,
            payload_base64: base64,
            payload_encoding: encoding,
            headers: &file.headers,
            traceparent: &file.traceparent,
            backoff: file.backoff.as_ref().map(Into::into),
            history: file.history.iter().map(Into::into).collect(),
            acts: file.acts.iter().map(Into::into).collect(),
            results: file.results,
        }
    }
}

/// An attempt of a worker.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "TaskAttempt")]
struct Attempt<'a> {
    worker: &'a str,
    state: AttemptState,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Instant>")]
    from: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Instant>")]
    until: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Instant>")]
    lease_expires_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<u32>,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'a str,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    surplus: bool,
}

impl<'a> From<&'a model::Attempt> for Attempt<'a> {
    fn from(one: &'a model::Attempt) -> Self {
        Self {
            worker: &one.worker,
            state: one.state,
            from: one.from_unix_ms.map(to_rfc_3339),
            until: one.until_unix_ms.map(to_rfc_3339),
            lease_expires_at: one.expires_unix_ms.map(to_rfc_3339),
            attempt: (one.attempt > 0).then_some(one.attempt),
            reason: &one.reason,
            surplus: one.surplus,
        }
    }
}

/// An operator's act on the task.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "TaskAct")]
struct Act<'a> {
    id: Uuid,
    #[schemars(with = "Instant")]
    at: String,
    who: &'a str,
    what: &'a str,
}

impl<'a> From<&'a model::Act> for Act<'a> {
    fn from(act: &'a model::Act) -> Self {
        Self {
            id: act.id,
            at: to_rfc_3339(act.at_unix_ms()),
            who: &act.who,
            what: &act.what,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::testing::shown, *};

    #[test]
    fn an_attempt_has_what_is_known_of_it() {
        let expired = model::Attempt {
            worker: "w".into(),
            state: AttemptState::Expired,
            from_unix_ms: None,
            until_unix_ms: Some(1_500),
            expires_unix_ms: None,
            attempt: 2,
            reason: "lease expired".into(),
            surplus: false,
        };
        let expected = json!({
            "worker": "w", "state": "EXPIRED", "until": "1970-01-01T00:00:01.500Z", "attempt": 2,
            "reason": "lease expired",
        });
        assert_eq!(shown(Attempt::from(&expired)), expected);
        let leased = model::Attempt {
            state: AttemptState::Leased,
            from_unix_ms: Some(500),
            until_unix_ms: None,
            expires_unix_ms: Some(1_500),
            attempt: 0,
            reason: String::new(),
            ..expired
        };
        let expected = json!({
            "worker": "w", "state": "LEASED", "from": "1970-01-01T00:00:00.500Z",
            "lease_expires_at": "1970-01-01T00:00:01.500Z",
        });
        assert_eq!(shown(Attempt::from(&leased)), expected);
    }
}
