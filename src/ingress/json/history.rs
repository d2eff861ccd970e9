//! A task with its payload and its history, as its readers see it.

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::Serialize;
use uuid::Uuid;

use super::{backoff::OwnBackoff, text::Instant, value::Payload};
use crate::model::{self, Attempt, TaskView, to_rfc_3339};

/// A task with its payload, its attempts and the acts of operators on it.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct TaskFile<'a> {
    #[serde(flatten)]
    task: &'a TaskView,
    #[serde(flatten)]
    payload: Payload<'a>,
    headers: &'a HashMap<String, String>,
    traceparent: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    backoff: Option<OwnBackoff>,
    history: &'a [Attempt],
    acts: Vec<Act<'a>>,
    results: u32,
}

impl<'a> From<&'a model::TaskFile> for TaskFile<'a> {
    fn from(file: &'a model::TaskFile) -> Self {
        Self {
            task: &file.task,
            payload: Payload::of(&file.payload, file.payload_encoding),
            headers: &file.headers,
            traceparent: &file.traceparent,
            backoff: file.backoff.as_ref().map(Into::into),
            history: &file.history,
            acts: file.acts.iter().map(Into::into).collect(),
            results: file.results,
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
    use crate::model::AttemptState;

    #[test]
    fn an_attempt_has_what_is_known_of_it() {
        let expired = Attempt {
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
        assert_eq!(shown(&expired), expected);
        let leased = Attempt {
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
        assert_eq!(shown(&leased), expected);
    }
}
