//! The request to an endpoint, and its answer.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::model::{Encoding, Priority, QueueName, TaskId, TaskRow};

/// The longest reason of a rejection, in characters.
const MAX_REASON: usize = 500;

#[derive(Serialize)]
struct Request<'a> {
    queue: &'a QueueName,
    tasks: Vec<Task<'a>>,
}

#[derive(Serialize)]
struct Task<'a> {
    id: TaskId,
    key: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Payload<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
    headers: BTreeMap<&'a str, &'a str>,
    priority: Priority,
    traceparent: Cow<'a, str>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Payload<'a> {
    Json(&'a RawValue),
    Text(&'a str),
}

impl<'a> From<&'a TaskRow> for Task<'a> {
    fn from(row: &'a TaskRow) -> Self {
        let text = std::str::from_utf8(&row.payload).ok();
        let payload = match row.payload_encoding {
            Encoding::Text => text.map(Payload::Text),
            Encoding::Json => text
                .and_then(|text| serde_json::from_str(text).ok())
                .map(Payload::Json),
            Encoding::Bytes | Encoding::Unknown => None,
        };
        let is_left_over = payload.is_none() && !row.payload.is_empty();
        Self {
            id: row.id,
            key: String::from_utf8_lossy(&row.key),
            key_base64: std::str::from_utf8(&row.key)
                .is_err()
                .then(|| BASE64.encode(&row.key)),
            payload,
            payload_base64: is_left_over.then(|| BASE64.encode(&row.payload)),
            headers: row
                .headers
                .iter()
                .map(|(name, value)| (&name[..], &value[..]))
                .collect(),
            priority: row.priority,
            traceparent: row.context(),
        }
    }
}

pub(super) fn request(queue: &QueueName, rows: &[&TaskRow]) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(&Request {
        queue,
        tasks: rows.iter().map(|row| Task::from(*row)).collect(),
    })
}

/// The endpoint's decision about a task.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    Change(Change),
    Reject(String),
}

/// The new values of a task; absent ones stay as they are.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Change {
    /// Headers to add or to replace.
    pub headers: HashMap<String, String>,
    pub priority: Option<Priority>,
    pub payload: Option<(Bytes, Encoding)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer<'a> {
    #[serde(borrow)]
    tasks: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Item<'a> {
    #[serde(default)]
    headers: HashMap<String, String>,
    priority: Option<String>,
    #[serde(borrow)]
    payload: Option<&'a RawValue>,
    payload_base64: Option<String>,
    reject: Option<String>,
}

/// The verdict about one task, or one line that says what is wrong with it.
pub(super) type ReadVerdict = Result<Verdict, String>;

/// Reads an answer about `count` tasks, each on its own, since the sender of a task may have caused
/// what is wrong about it.
///
/// Returns an error, in one line, if the answer as a whole cannot be read.
pub(super) fn answer(body: &[u8], count: usize) -> Result<Vec<ReadVerdict>, String> {
    // The name of an unknown field may contain any characters.
    let one_line = |why: String| in_one_line(&why).collect::<String>();
    let Answer { tasks } = serde_json::from_slice(body)
        .map_err(|error| one_line(format!("the answer is wrong: {error}")))?;
    if tasks.len() != count {
        return Err(format!(
            "the answer has {} tasks; {count} were asked about",
            tasks.len()
        ));
    }
    let read = |(place, item): (usize, &RawValue)| {
        verdict(item).map_err(|why| one_line(format!("tasks[{place}]: {why}")))
    };
    Ok(tasks.into_iter().enumerate().map(read).collect())
}

fn in_one_line(text: &str) -> impl Iterator<Item = char> {
    text.chars().map(|c| if c.is_control() { ' ' } else { c })
}

fn verdict(item: &RawValue) -> Result<Verdict, String> {
    let item: Item<'_> = serde_json::from_str(item.get()).map_err(|error| error.to_string())?;
    if let Some(reason) = item.reject {
        let reason: String = in_one_line(&reason).take(MAX_REASON).collect();
        return Ok(Verdict::Reject(reason));
    }
    let known = |name: String| {
        let priority = Priority::ALL
            .into_iter()
            .find(|known| known.as_str() == name);
        priority.ok_or_else(|| format!("unknown priority {name:?}; expected high, medium or low"))
    };
    let payload = match (item.payload, item.payload_base64) {
        (Some(_), Some(_)) => {
            return Err("payload and payload_base64 are both given; use one".into());
        }
        (None, None) => None,
        (Some(json), None) if json.get().starts_with('"') => {
            let text: String =
                serde_json::from_str(json.get()).map_err(|error| error.to_string())?;
            Some((text.into(), Encoding::Text))
        }
        (Some(json), None) => Some((
            Bytes::copy_from_slice(json.get().as_bytes()),
            Encoding::Json,
        )),
        (None, Some(text)) => {
            let bytes = BASE64
                .decode(text)
                .map_err(|error| format!("payload_base64 is not base64: {error}"))?;
            Some((bytes.into(), Encoding::Bytes))
        }
    };
    Ok(Verdict::Change(Change {
        headers: item.headers,
        priority: item.priority.map(known).transpose()?,
        payload,
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        config::Settings,
        model::{NewTask, validate},
    };

    #[test]
    fn a_request_has_what_an_endpoint_may_change() {
        let row = |key: &'static [u8], payload: &'static [u8], payload_encoding| {
            let headers = [("h".to_owned(), "v".to_owned())].into();
            let task = NewTask {
                queue: "q".into(),
                key: key.into(),
                payload: payload.into(),
                payload_encoding,
                headers,
                ..NewTask::default()
            };
            validate::task_row(
                task,
                TaskId::new(),
                &Settings::default().task_rules("q"),
                1,
                1,
            )
            .unwrap()
        };
        let rows = [
            row(b"k", b"{\"n\": 1.50}", Encoding::Json),
            row(b"\xff", b"text", Encoding::Text),
            row(b"b", b"\xff", Encoding::Bytes),
            row(b"none", b"", Encoding::Unknown),
        ];
        let request = request(&rows[0].queue, &rows.iter().collect::<Vec<_>>()).unwrap();
        assert!(
            String::from_utf8_lossy(&request).contains("{\"n\": 1.50}"),
            "byte for byte"
        );
        let request: Value = serde_json::from_slice(&request).unwrap();
        let id = rows[0].id.to_string();
        let first = json!({
            "id": id, "key": "k", "payload": {"n": 1.5}, "headers": {"h": "v"}, "priority": "medium",
            "traceparent": rows[0].context(),
        });
        assert_eq!(
            (&request["queue"], &request["tasks"][0]),
            (&json!("q"), &first)
        );
        assert_eq!(
            (
                &request["tasks"][1]["key_base64"],
                &request["tasks"][1]["payload"]
            ),
            (&json!("/w=="), &json!("text"))
        );
        assert_eq!(request["tasks"][2]["payload_base64"], "/w==");
        assert_eq!(
            request["tasks"][3]
                .as_object()
                .unwrap()
                .keys()
                .filter(|key| key.starts_with("payload"))
                .count(),
            0
        );
    }

    #[test]
    fn an_answer_changes_or_rejects_each_task() {
        let body = json!({"tasks": [
            {},
            {"headers": {"a": "b"}, "priority": "high", "payload": {"n": 1}},
            {"payload": "text"},
            {"payload_base64": "/w=="},
            {"reject": "not\nthis"},
        ]});
        let change = Verdict::Change;
        let headers = [("a".to_owned(), "b".to_owned())].into();
        let payload = |bytes: &'static [u8], encoding| Some((bytes.into(), encoding));
        let want = [
            change(Change::default()),
            change(Change {
                headers,
                priority: Some(Priority::High),
                payload: payload(b"{\"n\":1}", Encoding::Json),
            }),
            change(Change {
                payload: payload(b"text", Encoding::Text),
                ..Change::default()
            }),
            change(Change {
                payload: payload(b"\xff", Encoding::Bytes),
                ..Change::default()
            }),
            Verdict::Reject("not this".into()),
        ];
        assert_eq!(
            answer(body.to_string().as_bytes(), 5).unwrap(),
            want.map(Ok)
        );
    }

    #[test]
    fn what_is_wrong_with_an_answer_is_named() {
        let cases = [
            ("garbage", "the answer is wrong: expected value"),
            ("[]", "the answer is wrong: "),
            (
                r#"{"tasks": [{}, {}, {}]}"#,
                "the answer has 3 tasks; 2 were asked about",
            ),
            (
                r#"{"no\nluck": []}"#,
                "the answer is wrong: unknown field `no luck`",
            ),
        ];
        for (body, want) in cases {
            let error = answer(body.as_bytes(), 2).unwrap_err();
            assert!(error.contains(want), "{error:?} should say {want:?}");
        }
    }

    #[test]
    fn a_mistake_about_one_task_leaves_the_verdicts_about_others() {
        let cases = [
            (r#"{"prio": "high"}"#, "tasks[0]: unknown field `prio`"),
            (
                r#"{"no\nluck": "high"}"#,
                "tasks[0]: unknown field `no luck`",
            ),
            (
                r#"{"priority": "urgent"}"#,
                "tasks[0]: unknown priority \"urgent\"; expected high",
            ),
            (r#"{"payload": 1, "payload_base64": ""}"#, "both given"),
            (
                r#"{"payload_base64": "?"}"#,
                "tasks[0]: payload_base64 is not base64",
            ),
            ("7", "tasks[0]: invalid type"),
        ];
        for (item, want) in cases {
            let mut verdicts = answer(
                format!(r#"{{"tasks": [{item}, {{"reject": "spam"}}]}}"#).as_bytes(),
                2,
            )
            .unwrap();
            assert_eq!(verdicts.pop().unwrap(), Ok(Verdict::Reject("spam".into())));
            let error = verdicts.pop().unwrap().unwrap_err();
            assert!(error.contains(want), "{error:?} should say {want:?}");
        }
    }
}
