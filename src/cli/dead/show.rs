//! Formats letters as a table and as JSON.

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Map, Value, json};

use crate::{
    cli::{ask::cell, print},
    model::{LetterKind, Priority},
    wire::pb,
};

fn kind(letter: &pb::Letter) -> &'static str {
    LetterKind::from_number(letter.kind.into()).map_or("unknown", LetterKind::as_str)
}

fn at(letter: &pb::Letter) -> String {
    letter.at.map(|at| at.to_string()).unwrap_or_default()
}

pub(super) fn table(letters: &[pb::Letter]) -> String {
    let mut table = print::table([
        "ID",
        "AT",
        "KIND",
        "QUEUE",
        "KEY OR PLACE",
        "FAILURES",
        "REASON",
    ]);
    for letter in letters {
        let what = match &letter.task {
            Some(task) => cell(&String::from_utf8_lossy(&task.key)),
            None => format!("{}/{} {}", letter.topic, letter.partition, letter.offset),
        };
        let reason = cell(&letter.reason);
        let attempts = letter.attempts.to_string();
        table.add_row([
            &letter.id,
            &at(letter),
            kind(letter),
            &letter.queue,
            &what,
            &attempts,
            &reason,
        ]);
    }
    table.to_string()
}

/// Adds a payload to `object`: JSON and text as they are, anything else in base64.
fn bytes(name: &str, bytes: &[u8], encoding: i32, object: &mut Map<String, Value>) {
    let json = pb::Encoding::Json as i32;
    match std::str::from_utf8(bytes) {
        Ok("") => {}
        Ok(text) if encoding == json => {
            object.insert(
                name.into(),
                serde_json::from_str(text).unwrap_or_else(|_| text.into()),
            );
        }
        Ok(text) => drop(object.insert(name.into(), text.into())),
        Err(_) => drop(object.insert(format!("{name}_base64"), BASE64.encode(bytes).into())),
    }
}

pub(super) fn json(letter: &pb::Letter) -> Value {
    let mut object = Map::new();
    let mut set = |name: &str, value: Value| drop(object.insert(name.into(), value));
    set("id", letter.id.as_str().into());
    set("kind", kind(letter).into());
    set("at", at(letter).into());
    set("reason", letter.reason.as_str().into());
    for (name, text) in [("queue", &letter.queue), ("parent_id", &letter.parent_id)] {
        if !text.is_empty() {
            set(name, text.as_str().into());
        }
    }
    if letter.attempts > 0 {
        set("attempts", letter.attempts.into());
    }
    if !letter.history.is_empty() {
        let attempt = |one: &pb::LetterAttempt| {
            let at = one.at.map(|at| at.to_string());
            json!({ "at": at, "worker": one.worker, "error": one.error })
        };
        set("history", letter.history.iter().map(attempt).collect());
    }
    if !letter.topic.is_empty() {
        set("topic", letter.topic.as_str().into());
        set("partition", letter.partition.into());
        set("offset", letter.offset.as_str().into());
        bytes("value", &letter.value, 0, &mut object);
    }
    if let Some(task) = &letter.task {
        bytes("key", &task.key, 0, &mut object);
        bytes("payload", &task.payload, task.payload_encoding, &mut object);
        let encoding = match task.payload_encoding() {
            pb::Encoding::Unspecified => None,
            pb::Encoding::Bytes => Some("bytes"),
            pb::Encoding::Text => Some("text"),
            pb::Encoding::Json => Some("json"),
        };
        let priority = Priority::from_number(task.priority.into()).as_str();
        let priority = (task.priority != pb::Priority::Unspecified as i32).then(|| priority.into());
        let values = [
            ("payload_encoding", encoding.map(Value::from)),
            ("replicas", task.replicas.map(Value::from)),
            ("priority", priority),
            ("max_attempts", task.max_attempts.map(Value::from)),
        ];
        for (name, value) in values {
            if let Some(value) = value {
                object.insert(name.into(), value);
            }
        }
        if !task.headers.is_empty() {
            object.insert("headers".into(), json!(task.headers));
        }
        if !task.traceparent.is_empty() {
            object.insert("traceparent".into(), task.traceparent.as_str().into());
        }
    }
    object.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_letter_is_shown_as_what_it_is() {
        let task = pb::NewTask {
            key: "k".into(),
            payload: "{\"a\":1}".into(),
            payload_encoding: pb::Encoding::Json.into(),
            replicas: Some(3),
            priority: pb::Priority::Low.into(),
            ..Default::default()
        };
        let letter = pb::Letter {
            kind: 1,
            attempts: 2,
            task: Some(task),
            ..Default::default()
        };
        let shown = json(&letter);
        assert_eq!(
            (&shown["kind"], &shown["key"], &shown["payload"]["a"]),
            (&json!("task"), &json!("k"), &json!(1))
        );
        assert_eq!(
            (
                &shown["replicas"],
                &shown["priority"],
                &shown["payload_encoding"]
            ),
            (&json!(3), &json!("low"), &json!("json"))
        );
        assert!(shown.get("max_attempts").is_none(), "the queue's own");
        let record = pb::Letter {
            kind: 3,
            topic: "pipeline".into(),
            value: vec![0xff].into(),
            ..Default::default()
        };
        assert_eq!(json(&record)["value_base64"], "/w==");
        assert!(table(&[letter, record]).contains("pipeline/0"));
        let task = Some(pb::NewTask {
            key: "k\x1b[31m".into(),
            ..Default::default()
        });
        let hostile = pb::Letter {
            task,
            reason: "no\x07".into(),
            ..Default::default()
        };
        let shown = table(&[hostile]);
        assert!(
            shown.contains("k\\u{1b}[31m") && shown.contains("no\\u{7}"),
            "{shown}"
        );
    }
}
