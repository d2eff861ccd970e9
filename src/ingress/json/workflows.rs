//! Workflows and their executions.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    Unread, object,
    query::{not_a_number, parameters},
    text::{Instant, Time},
};
use crate::{
    api::{ECHO, shorten},
    model::{ExecutionId, ExecutionPages, ExecutionStatus, to_rfc_3339},
    workflow::definition,
};

/// A definition of the Open Workflow Specification, DSL 1.0.
#[derive(JsonSchema)]
#[schemars(rename = "WorkflowDefinition")]
#[allow(dead_code, reason = "only the document of the API has this type")]
pub(in crate::ingress) struct Written(Map<String, Value>);

/// A mistake in a definition.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "WorkflowMistake")]
pub(in crate::ingress) struct Mistake {
    line: usize,
    column: usize,
    /// A JSON pointer to the value that is wrong.
    pointer: String,
    message: String,
}

impl From<definition::Mistake> for Mistake {
    fn from(mistake: definition::Mistake) -> Self {
        Self {
            line: mistake.line,
            column: mistake.column,
            pointer: mistake.pointer,
            message: mistake.says,
        }
    }
}

/// An execution to start.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(
    default,
    deny_unknown_fields,
    expecting = "an object with input, id and wait"
)]
#[schemars(rename = "StartExecution")]
pub(in crate::ingress) struct Start {
    /// The input of the workflow: any JSON.
    pub(in crate::ingress) input: Value,
    /// Your own id, at most 128 bytes: a start with it again is the same execution. Empty: none.
    pub(in crate::ingress) id: String,
    /// The answer comes when the execution has ended, at the latest after this time, which is at most
    /// `max_wait`. Needs the role `read`, too.
    pub(in crate::ingress) wait: Option<Time>,
}

pub(in crate::ingress) fn start(body: &Bytes) -> Result<Start, Unread> {
    object(body)
}

/// An event of a history, with the fields of its kind.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "HistoryEvent")]
pub(in crate::ingress) struct HistoryEvent {
    /// Counts from 1.
    seq: u64,
    /// In RFC 3339.
    at: String,
    /// What happened: `started`, `task_started`, `step_issued` and so on.
    kind: String,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

impl HistoryEvent {
    /// Reads an entry of a log. `None`: it is none.
    pub(in crate::ingress) fn read(seq: u64, entry: &[u8]) -> Option<Self> {
        let mut fields: Map<String, Value> = serde_json::from_slice(entry).ok()?;
        let at = to_rfc_3339(fields.remove("at")?.as_i64()?);
        let kind = match fields.remove("kind")? {
            Value::String(kind) => kind,
            _ => return None,
        };
        // When a timer is due.
        if let Some(due) = fields.get_mut("due")
            && let Some(unix_ms) = due.as_i64()
        {
            *due = to_rfc_3339(unix_ms).into();
        }
        Some(Self {
            seq,
            at,
            kind,
            fields,
        })
    }
}

/// Whether the query of a deployment asks for a dry run.
pub(in crate::ingress) fn is_dry_run(text: &str) -> Result<bool, String> {
    for (name, value) in parameters(text)? {
        if name == "dry_run" {
            return match value.as_str() {
                "true" => Ok(true),
                "false" | "" => Ok(false),
                other => Err(format!(
                    "dry_run is {:?}; expected true or false",
                    shorten(other, ECHO)
                )),
            };
        }
    }
    Ok(false)
}

/// A page of workflows to list.
#[derive(Debug, Default, PartialEq)]
pub(in crate::ingress) struct WorkflowPages {
    pub(in crate::ingress) namespace: String,
    pub(in crate::ingress) cursor: String,
    pub(in crate::ingress) limit: u32,
}

pub(in crate::ingress) fn workflow_pages(text: &str) -> Result<WorkflowPages, String> {
    let mut pages = WorkflowPages::default();
    for (name, value) in parameters(text)? {
        // As in JSON, an empty value counts as absent.
        if value.is_empty() {
            continue;
        }
        match &*name {
            "namespace" => pages.namespace = value,
            "cursor" => pages.cursor = value,
            "limit" => pages.limit = value.parse().map_err(|_| not_a_number(&name, &value))?,
            // The route has refused other names.
            _ => {}
        }
    }
    Ok(pages)
}

/// Reads the query of a list of executions.
pub(in crate::ingress) fn execution_pages(text: &str) -> Result<ExecutionPages, String> {
    let mut pages = ExecutionPages::default();
    for (name, value) in parameters(text)? {
        if value.is_empty() {
            continue;
        }
        match &*name {
            "workflow" => match value.split_once('/') {
                Some((namespace, name)) if !name.contains('/') => {
                    pages.workflow = Some((namespace.to_owned(), name.to_owned()));
                }
                _ => {
                    let value = shorten(&value, ECHO);
                    return Err(format!("workflow is {value:?}; expected NAMESPACE/NAME"));
                }
            },
            "status" => {
                let known = ExecutionStatus::ALL;
                let status = known.into_iter().find(|known| known.as_str() == value);
                pages.status = Some(status.ok_or_else(|| {
                    let known = known.map(ExecutionStatus::as_str).join(", ");
                    let value = shorten(&value, ECHO);
                    format!("status is {value:?}; expected one of {known}")
                })?);
            }
            "since" => pages.since_unix_ms = Some(value.parse::<Instant>()?.0),
            "until" => pages.until_unix_ms = Some(value.parse::<Instant>()?.0),
            "limit" => pages.limit = value.parse().map_err(|_| not_a_number(&name, &value))?,
            "cursor" => {
                let after = ExecutionId::parse(&value);
                pages.after = Some(after.ok_or_else(|| {
                    let value = shorten(&value, ECHO);
                    format!("{value:?} is not a cursor; send that of the answer before")
                })?);
            }
            _ => {}
        }
    }
    Ok(pages)
}

/// The number of the event after which a history begins.
pub(in crate::ingress) fn after(text: &str) -> Result<u64, String> {
    for (name, value) in parameters(text)? {
        if name == "after" && !value.is_empty() {
            return value.parse().map_err(|_| not_a_number(&name, &value));
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_about_executions_are_read() {
        let text = "workflow=shop/order&status=waiting&since=1970-01-01T00:00:01Z&limit=7";
        let pages = ExecutionPages {
            workflow: Some(("shop".to_owned(), "order".to_owned())),
            status: Some(ExecutionStatus::Waiting),
            since_unix_ms: Some(1_000),
            limit: 7,
            ..ExecutionPages::default()
        };
        assert_eq!(execution_pages(text), Ok(pages));
        for (text, why) in [
            ("workflow=order", "expected NAMESPACE/NAME"),
            ("status=gone", "expected one of pending, running"),
            ("cursor=7", "is not a cursor"),
            ("limit=x", "is not a whole number"),
        ] {
            let error = execution_pages(text).unwrap_err();
            assert!(error.contains(why), "{error:?} should say {why:?}");
        }
        assert_eq!(is_dry_run("dry_run=true"), Ok(true));
        assert_eq!(is_dry_run(""), Ok(false));
        assert!(is_dry_run("dry_run=1").is_err());
        assert_eq!(after("after=12"), Ok(12));
    }

    #[test]
    fn events_of_a_history_have_times_that_people_read() {
        let entry = br#"{"at":1000,"kind":"timer_armed","timer":1,"path":"/do/0/a","due":2000}"#;
        let event = HistoryEvent::read(3, entry).unwrap();
        assert_eq!(
            serde_json::to_string(&event).unwrap(),
            r#"{"seq":3,"at":"1970-01-01T00:00:01Z","kind":"timer_armed","due":"1970-01-01T00:00:02Z","path":"/do/0/a","timer":1}"#
        );
        assert!(HistoryEvent::read(1, b"[]").is_none());
    }
}
