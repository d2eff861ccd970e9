//! Records of taskd's own topics as JSON, for subscriptions and commands.

use std::collections::HashMap;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json, value::RawValue};

use super::{read_dead_letter, read_event_record};
use crate::model::{
    DeadLetter, Encoding, EventRecord, Failure, NewTask, OWN_QUEUE, OwnTopic, to_rfc_3339,
};

/// A record of one of taskd's own topics, for a task.
#[derive(Debug)]
pub struct OwnRecord {
    pub value: Bytes,
    /// The id of the task that it is about, if any.
    pub key: Bytes,
    pub attributes: Vec<(String, String)>,
}

/// Reads a record. The error says why it is none.
pub fn own_record(topic: OwnTopic, value: &Bytes) -> Result<OwnRecord, String> {
    match topic {
        OwnTopic::Events => event(value),
        OwnTopic::DeadLetters => letter(value),
    }
}

fn event(value: &Bytes) -> Result<OwnRecord, String> {
    let (number, event) = read_event_record(value)?;
    let (name, status) = match event.tree {
        Some(state) => ("tree_state", state.as_str()),
        None => ("status", event.status.as_str()),
    };
    Ok(OwnRecord {
        value: event_json(number, &event).to_string().into(),
        key: event.id.to_string().into(),
        attributes: vec![
            (OWN_QUEUE.to_owned(), event.queue.to_string()),
            (name.to_owned(), status.to_owned()),
        ],
    })
}

/// An event as JSON.
pub fn event_json(number: u64, event: &EventRecord) -> Value {
    let at = to_rfc_3339(event.at_unix_ms);
    if let Some(state) = event.tree {
        return json!({
            "number": number, "id": event.id, "queue": event.queue, "tree_state": state.as_str(), "at": at,
            "epoch": event.epoch,
        });
    }
    json!({
        "number": number, "id": event.id, "queue": event.queue, "key": String::from_utf8_lossy(&event.key),
        "status": event.status.as_str(), "at": at, "epoch": event.epoch, "worker": event.worker,
        "attempt": event.attempt, "attempts": event.attempts, "reason": event.reason,
    })
}

/// A dead letter, with the names of `GET /v1/dead-letters`.
#[derive(Serialize)]
struct Letter<'a> {
    id: String,
    kind: &'static str,
    queue: &'a str,
    reason: &'a str,
    at: String,
    attempts: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    task_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tree: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    task: Option<Task<'a>>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    history: &'a [Failure],
    /// Where a record was that cannot be processed.
    #[serde(skip_serializing_if = "Option::is_none")]
    record: Option<Value>,
}

#[derive(Serialize)]
struct Task<'a> {
    key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
    headers: &'a HashMap<String, String>,
}

impl<'a> From<&'a NewTask> for Task<'a> {
    fn from(task: &'a NewTask) -> Self {
        let text = std::str::from_utf8(&task.payload).ok();
        let payload = match task.payload_encoding {
            Encoding::Json => text.and_then(|text| RawValue::from_string(text.to_owned()).ok()),
            Encoding::Text => text.and_then(|text| serde_json::value::to_raw_value(text).ok()),
            Encoding::Bytes | Encoding::Unknown => None,
        };
        let payload_base64 = payload.is_none().then(|| BASE64.encode(&task.payload));
        Self {
            key: String::from_utf8_lossy(&task.key).into_owned(),
            payload,
            payload_base64,
            headers: &task.headers,
        }
    }
}

fn letter(value: &Bytes) -> Result<OwnRecord, String> {
    let letter: DeadLetter = read_dead_letter(value).map_err(|error| error.to_string())?;
    let kind = letter.kind().as_str();
    let record = (!letter.topic.is_empty()).then(|| {
        json!({
            "topic": letter.topic, "partition": letter.partition, "offset": letter.offset,
            "value_base64": BASE64.encode(&letter.value),
        })
    });
    let id = letter.id();
    let shown = Letter {
        id: id.to_string(),
        kind,
        queue: &letter.queue,
        reason: &letter.reason,
        at: to_rfc_3339(letter.at_unix_ms),
        attempts: letter.attempts,
        task_id: letter.task_id.map(|id| id.to_string()),
        tree: letter.tree.map(|id| id.to_string()),
        task: letter.task.as_ref().map(Task::from),
        history: &letter.history,
        record,
    };
    let value = serde_json::to_vec(&shown).map_err(|error| error.to_string())?;
    Ok(OwnRecord {
        value: value.into(),
        key: id.to_string().into(),
        attributes: vec![
            (OWN_QUEUE.to_owned(), letter.queue.clone()),
            ("kind".to_owned(), kind.to_owned()),
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{model::TaskId, wire};

    #[test]
    fn a_letter_is_json_with_its_task() {
        let of = |payload: &'static [u8], encoding| DeadLetter {
            reason: "too bad".to_owned(),
            queue: "q".to_owned(),
            task_id: TaskId::from_slice(&[7; 16]),
            attempts: 3,
            task: Some(NewTask {
                queue: "q".to_owned(),
                key: "k".into(),
                payload: payload.into(),
                payload_encoding: encoding,
                ..NewTask::default()
            }),
            ..DeadLetter::default()
        };
        for (payload, encoding, name, shown) in [
            (
                &b"{\"n\": 1e400}"[..],
                Encoding::Json,
                "payload",
                "{\"n\": 1e400}",
            ),
            (b"a\"b", Encoding::Text, "payload", "\"a\\\"b\""),
            (b"\xff", Encoding::Bytes, "payload_base64", "\"/w==\""),
        ] {
            let letter = of(payload, encoding);
            let record = own_record(OwnTopic::DeadLetters, &wire::dead_letter(&letter)).unwrap();
            let text = std::str::from_utf8(&record.value).unwrap();
            assert!(text.contains(&format!("\"{name}\":{shown}")), "{text}");
            assert!(text.contains("\"reason\":\"too bad\",\"at\":"), "{text}");
            let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
            assert_eq!(
                record.attributes,
                [pair("queue", "q"), pair("kind", "task")]
            );
            assert_eq!(record.key, letter.id().to_string());
        }
        assert!(own_record(OwnTopic::Events, &Bytes::from_static(b"\xff")).is_err());
    }
}
