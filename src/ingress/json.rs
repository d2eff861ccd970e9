//! The JSON of the HTTP API (and of the files that `taskd insert` reads) to and from the messages of the proto.
//!
//! Same names as the proto's, in snake_case; durations `"30s"`, times RFC 3339. A payload or result is any JSON value: it is
//! kept as its text, a string as its bytes, `null` as nothing. What comes in stays where it was received: a payload is a slice
//! of the body.

use std::{borrow::Cow, collections::HashMap, str::FromStr};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, de};
use serde_json::value::RawValue;

use crate::{config::in_field, pb, reading::QueueOverview, store::ResultRow};

/// The text as a whole is wrong: nothing of it was looked at.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{detail}")]
pub struct Malformed {
    pub detail: String,
    pub line: usize,
    pub column: usize,
}

impl From<serde_json::Error> for Malformed {
    fn from(error: serde_json::Error) -> Self {
        let detail =
            if error.is_data() { without_place(&error) } else { format!("not JSON: {}", without_place(&error)) };
        Self { detail, line: error.line(), column: error.column() }
    }
}

/// One entry of a list: what it says, or the answer that it gets because it is wrong.
pub type Item<T> = Result<T, pb::ItemResult>;

// --- What comes in.

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a task")]
struct NewTask<'a> {
    #[serde(default)]
    queue: String,
    #[serde(borrow, default)]
    key: Cow<'a, str>,
    #[serde(borrow)]
    payload: Option<&'a RawValue>,
    payload_base64: Option<String>,
    replicas: Option<u32>,
    priority: Option<Priority>,
    delay: Option<Time>,
    not_before: Option<Instant>,
    lease_duration: Option<Time>,
    max_attempts: Option<u32>,
    #[serde(default)]
    headers: HashMap<String, String>,
    #[serde(default)]
    traceparent: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a completion")]
struct Completion<'a> {
    id: String,
    lease_token: String,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    result_base64: Option<String>,
    #[serde(borrow, default)]
    discovered: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a rejection")]
struct Rejection {
    id: String,
    lease_token: String,
    #[serde(default)]
    reason: String,
    retry: Option<bool>,
    delay: Option<Time>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an extension")]
struct Extension {
    id: String,
    lease_token: String,
    by: Option<Time>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with worker and queues")]
struct GetTasks {
    worker: String,
    queues: Vec<String>,
    #[serde(default)]
    max_tasks: u32,
    wait: Option<Time>,
    lease_duration: Option<Time>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with worker and completions")]
struct CompleteTasks<'a> {
    worker: String,
    #[serde(borrow)]
    completions: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with worker and rejections")]
struct RejectTasks<'a> {
    worker: String,
    #[serde(borrow)]
    rejections: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with worker and extensions")]
struct ExtendTasks<'a> {
    worker: String,
    #[serde(borrow)]
    extensions: Vec<&'a RawValue>,
}

/// `"30s"`
struct Time(prost_types::Duration);

/// `"2030-01-02T03:04:05Z"`
struct Instant(prost_types::Timestamp);

/// `"high"`, in any case.
struct Priority(pb::Priority);

/// One task, out of its text: a line, or an entry of an array.
pub fn new_task(text: &Bytes) -> Result<pb::NewTask, String> {
    task_within(text, utf8(text)?)
}

/// One task or an array of them.
pub fn new_tasks(body: &Bytes) -> Result<Vec<Result<pb::NewTask, String>>, Malformed> {
    if first_byte(body) == Some(b'[') {
        let items: Vec<&RawValue> = serde_json::from_slice(body)?;
        return Ok(items.into_iter().map(|item| task_within(body, item.get())).collect());
    }
    let item: &RawValue = serde_json::from_slice(body).map_err(perhaps_lines)?;
    Ok(vec![task_within(body, item.get())])
}

/// A second value behind the first is what NDJSON sent as JSON looks like.
fn perhaps_lines(error: serde_json::Error) -> Malformed {
    let mut malformed = Malformed::from(error);
    if malformed.detail.ends_with("trailing characters") {
        malformed.detail += "; several tasks? send an array, or lines with Content-Type: application/x-ndjson";
    }
    malformed
}

pub fn get_tasks(body: &Bytes) -> Result<pb::GetTasksRequest, Malformed> {
    let request: GetTasks = object(body)?;
    Ok(pb::GetTasksRequest {
        worker: request.worker,
        queues: request.queues,
        max_tasks: request.max_tasks,
        wait: request.wait.map(|time| time.0),
        lease_duration: request.lease_duration.map(|time| time.0),
    })
}

/// The worker, and what it has completed.
pub fn complete_tasks(body: &Bytes) -> Result<(String, Vec<Item<pb::Completion>>), Malformed> {
    let request: CompleteTasks<'_> = object(body)?;
    Ok((request.worker, items(&request.completions, |text| completion(body, text))))
}

/// The worker, and what it gives back.
pub fn reject_tasks(body: &Bytes) -> Result<(String, Vec<Item<pb::Rejection>>), Malformed> {
    let request: RejectTasks<'_> = object(body)?;
    Ok((request.worker, items(&request.rejections, rejection)))
}

/// The worker, and what it holds on to.
pub fn extend_tasks(body: &Bytes) -> Result<(String, Vec<Item<pb::Extension>>), Malformed> {
    let request: ExtendTasks<'_> = object(body)?;
    Ok((request.worker, items(&request.extensions, extension)))
}

fn items<T>(texts: &[&RawValue], read: impl Fn(&str) -> Result<T, String>) -> Vec<Item<T>> {
    texts.iter().map(|text| read(text.get()).map_err(|error| invalid(text.get(), error))).collect()
}

/// The answer to an item that could not be read, with its id where that could.
fn invalid(text: &str, error: String) -> pb::ItemResult {
    let value: Option<serde_json::Value> = serde_json::from_str(text).ok();
    let id = value.as_ref().and_then(|value| value.get("id")?.as_str()).unwrap_or_default();
    pb::ItemResult { id: id.into(), status: pb::ItemStatus::Invalid.into(), error, lease_expires_at: None }
}

/// `text` must be a part of `body`.
fn task_within(body: &Bytes, text: &str) -> Result<pb::NewTask, String> {
    let task: NewTask<'_> = item(text, "a task")?;
    Ok(pb::NewTask {
        payload: value(body, "payload", task.payload, task.payload_base64)?,
        queue: task.queue,
        key: Bytes::from(task.key.into_owned()),
        replicas: task.replicas,
        priority: task.priority.map_or(pb::Priority::Unspecified, |priority| priority.0).into(),
        delay: task.delay.map(|time| time.0),
        not_before: task.not_before.map(|time| time.0),
        lease_duration: task.lease_duration.map(|time| time.0),
        max_attempts: task.max_attempts,
        headers: task.headers,
        traceparent: task.traceparent,
    })
}

fn completion(body: &Bytes, text: &str) -> Result<pb::Completion, String> {
    let completion: Completion<'_> = item(text, "a completion")?;
    let discovered =
        completion.discovered.iter().enumerate().map(|(index, task)| {
            task_within(body, task.get()).map_err(|error| format!("discovered[{index}]: {error}"))
        });
    Ok(pb::Completion {
        discovered: discovered.collect::<Result<_, _>>()?,
        result: value(body, "result", completion.result, completion.result_base64)?,
        id: completion.id,
        lease_token: completion.lease_token,
    })
}

fn rejection(text: &str) -> Result<pb::Rejection, String> {
    let Rejection { id, lease_token, reason, retry, delay } = item(text, "a rejection")?;
    Ok(pb::Rejection { id, lease_token, reason, retry, delay: delay.map(|time| time.0) })
}

fn extension(text: &str) -> Result<pb::Extension, String> {
    let Extension { id, lease_token, by } = item(text, "an extension")?;
    Ok(pb::Extension { id, lease_token, by: by.map(|time| time.0) })
}

/// The bytes of `payload` or `payload_base64`.
fn value(body: &Bytes, name: &str, json: Option<&RawValue>, base64: Option<String>) -> Result<Bytes, String> {
    match (json, base64) {
        (Some(_), Some(_)) => Err(format!("{name} and {name}_base64 are both given; use one")),
        (None, None) => Ok(Bytes::new()),
        (None, Some(text)) => {
            BASE64.decode(text).map(Bytes::from).map_err(|error| format!("{name}_base64 is not base64: {error}"))
        }
        (Some(json), None) if json.get().starts_with('"') => string_within(body, json.get()),
        (Some(json), None) => Ok(body.slice_ref(json.get().as_bytes())),
    }
}

fn string_within(body: &Bytes, json: &str) -> Result<Bytes, String> {
    // Without a backslash, what stands between the quotes is the string.
    let inner = &json[1..json.len() - 1];
    if !inner.contains('\\') {
        return Ok(body.slice_ref(inner.as_bytes()));
    }
    serde_json::from_str(json).map(|text: String| Bytes::from(text)).map_err(|error| without_place(&error))
}

/// serde would take an array for a struct, field by field; we do not.
fn object<'a, T: Deserialize<'a>>(body: &'a Bytes) -> Result<T, Malformed> {
    if first_byte(body).is_some_and(|byte| byte != b'{') {
        // Syntax first: what is no JSON at all should be told so.
        let _: &RawValue = serde_json::from_slice(body)?;
        return Err(Malformed { detail: "expected a JSON object".into(), line: 1, column: 1 });
    }
    serde_json::from_slice(body).map_err(|error| match error.is_data() {
        true => Malformed { detail: in_its_field::<T>(body, &error), line: error.line(), column: error.column() },
        false => error.into(),
    })
}

fn item<'a, T: Deserialize<'a>>(text: &'a str, what: &str) -> Result<T, String> {
    if first_byte(text.as_bytes()).is_some_and(|byte| byte != b'{') {
        return Err(format!("expected {what}: a JSON object"));
    }
    serde_json::from_str(text).map_err(|error| {
        if error.is_data() {
            in_its_field::<T>(text.as_bytes(), &error)
        } else {
            format!("not JSON at column {}: {}", error.column(), without_place(&error))
        }
    })
}

/// serde does not say where it was: the text is read again, slower, to learn that.
fn in_its_field<'a, T: Deserialize<'a>>(text: &'a [u8], error: &serde_json::Error) -> String {
    let message = without_place(error);
    match serde_path_to_error::deserialize::<_, T>(&mut serde_json::Deserializer::from_slice(text)) {
        Err(again) => in_field(again.path(), &message),
        Ok(_) => message,
    }
}

fn first_byte(text: &[u8]) -> Option<u8> {
    text.iter().copied().find(|byte| !byte.is_ascii_whitespace())
}

fn utf8(text: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(text).map_err(|error| format!("not UTF-8 at byte {}", error.valid_up_to()))
}

/// serde's message without its " at line 1 column 9": a place within an item means nothing to who sees the whole.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let end = text.rfind(" at line ").unwrap_or(text.len());
    text[..end].to_owned()
}

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a duration; write \"250ms\", \"30s\" or \"1h 30m\"");
        let duration = humantime::parse_duration(text).map_err(|_| wrong())?;
        prost_types::Duration::try_from(duration).map(Self).map_err(|_| wrong())
    }
}

impl FromStr for Instant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |_| format!("{text:?} is not a time; write it as RFC 3339: \"2030-01-31T12:00:00Z\"");
        text.parse().map(Self).map_err(wrong)
    }
}

impl FromStr for Priority {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = crate::model::Priority::ALL.into_iter().find(|known| known.as_str().eq_ignore_ascii_case(text));
        let unknown = || format!("unknown priority {text:?}; expected high, medium or low");
        known.map(|known| Self(known.to_pb())).ok_or_else(unknown)
    }
}

macro_rules! deserialize_from_text {
    ($($type:ty)*) => {$(
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Cow::<'de, str>::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    )*};
}
deserialize_from_text!(Time Instant Priority);

// --- What goes out.

/// `{"results": […]}`, or another list under its name.
pub fn list<T: Serialize>(name: &'static str, entries: impl IntoIterator<Item = T>) -> serde_json::Result<Vec<u8>> {
    let entries: Vec<T> = entries.into_iter().collect();
    serde_json::to_vec(&HashMap::from([(name, entries)]))
}

#[derive(Debug, Serialize)]
pub struct InsertAnswer<'a> {
    pub status: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub id: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub error: &'a str,
}

impl<'a> From<&'a pb::InsertResult> for InsertAnswer<'a> {
    fn from(result: &'a pb::InsertResult) -> Self {
        let status = name(result.status().as_str_name(), "INSERT_STATUS_");
        Self { status, id: &result.id, error: &result.error }
    }
}

/// The answer to a task that could not be read.
pub fn rejected(error: String) -> pb::InsertResult {
    pb::InsertResult { status: pb::InsertStatus::Rejected.into(), id: String::new(), error }
}

#[derive(Serialize)]
pub struct ItemAnswer<'a> {
    id: &'a str,
    status: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    error: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_expires_at: Option<String>,
}

impl<'a> From<&'a pb::ItemResult> for ItemAnswer<'a> {
    fn from(result: &'a pb::ItemResult) -> Self {
        Self {
            id: &result.id,
            status: name(result.status().as_str_name(), "ITEM_STATUS_"),
            error: &result.error,
            lease_expires_at: time(&result.lease_expires_at),
        }
    }
}

/// A key as text, and as bytes where it is none.
#[derive(Serialize)]
struct Key<'a> {
    key: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_base64: Option<String>,
}

impl<'a> From<&'a Bytes> for Key<'a> {
    fn from(bytes: &'a Bytes) -> Self {
        let key = String::from_utf8_lossy(bytes);
        let key_base64 = std::str::from_utf8(bytes).is_err().then(|| BASE64.encode(bytes));
        Self { key, key_base64 }
    }
}

#[derive(Serialize)]
pub struct Task<'a> {
    id: &'a str,
    queue: &'a str,
    #[serde(flatten)]
    key: Key<'a>,
    status: &'a str,
    replicas: u32,
    completed: u32,
    leased: u32,
    attempts: u32,
    priority: &'a str,
    created_at: Option<String>,
    updated_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_before: Option<String>,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'a str,
}

impl<'a> From<&'a pb::Task> for Task<'a> {
    fn from(task: &'a pb::Task) -> Self {
        Self {
            id: &task.id,
            queue: &task.queue,
            key: (&task.key).into(),
            status: name(task.status().as_str_name(), "TASK_STATUS_"),
            replicas: task.replicas,
            completed: task.completed,
            leased: task.leased,
            attempts: task.attempts,
            priority: priority_name(task.priority()),
            created_at: time(&task.created_at),
            updated_at: time(&task.updated_at),
            not_before: time(&task.not_before),
            reason: &task.reason,
        }
    }
}

#[derive(Serialize)]
pub struct LeasedTask<'a> {
    id: &'a str,
    queue: &'a str,
    #[serde(flatten)]
    key: Key<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a str>,
    payload_base64: String,
    headers: &'a HashMap<String, String>,
    traceparent: &'a str,
    lease_token: &'a str,
    lease_expires_at: Option<String>,
    attempt: u32,
    replicas: u32,
    priority: &'a str,
}

impl<'a> From<&'a pb::LeasedTask> for LeasedTask<'a> {
    fn from(task: &'a pb::LeasedTask) -> Self {
        Self {
            id: &task.id,
            queue: &task.queue,
            key: (&task.key).into(),
            payload: std::str::from_utf8(&task.payload).ok(),
            payload_base64: BASE64.encode(&task.payload),
            headers: &task.headers,
            traceparent: &task.traceparent,
            lease_token: &task.lease_token,
            lease_expires_at: time(&task.lease_expires_at),
            attempt: task.attempt,
            replicas: task.replicas,
            priority: priority_name(task.priority()),
        }
    }
}

#[derive(Serialize)]
pub struct TaskResult<'a> {
    worker: &'a str,
    attempt: u32,
    completed_at: String,
    surplus: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Value<'a>>,
    result_base64: String,
}

/// Bytes that are JSON as they are, other text as a string.
#[derive(Serialize)]
#[serde(untagged)]
enum Value<'a> {
    Json(&'a RawValue),
    Text(&'a str),
}

impl<'a> Value<'a> {
    fn of(bytes: &'a [u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok().filter(|text| !text.is_empty())?;
        Some(serde_json::from_str(text).map_or(Self::Text(text), Self::Json))
    }
}

impl<'a> From<&'a ResultRow> for TaskResult<'a> {
    fn from(row: &'a ResultRow) -> Self {
        Self {
            worker: &row.worker,
            attempt: row.attempt,
            completed_at: time_of_ms(row.completed_unix_ms),
            surplus: row.surplus,
            result: Value::of(&row.result),
            result_base64: BASE64.encode(&row.result),
        }
    }
}

#[derive(Serialize)]
pub struct Queue<'a> {
    queue: &'a str,
    pending: u64,
    queued: u64,
    assigned: u64,
    delayed: u64,
    leases: u64,
    completed: u64,
    dead: u64,
    cancelled: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    oldest_waiting_ms: Option<u64>,
}

impl<'a> From<&'a QueueOverview> for Queue<'a> {
    fn from(overview: &'a QueueOverview) -> Self {
        Self {
            queue: overview.queue.as_str(),
            pending: overview.pending,
            queued: overview.queued,
            assigned: overview.assigned,
            delayed: overview.delayed,
            leases: overview.leases,
            completed: overview.completed,
            dead: overview.dead,
            cancelled: overview.cancelled,
            oldest_waiting_ms: overview.oldest_waiting_ms,
        }
    }
}

/// A protobuf enum value without its prefix.
fn name(full: &'static str, prefix: &str) -> &'static str {
    full.strip_prefix(prefix).unwrap_or(full)
}

fn priority_name(priority: pb::Priority) -> &'static str {
    match priority {
        pb::Priority::High => "high",
        pb::Priority::Medium | pb::Priority::Unspecified => "medium",
        pb::Priority::Low => "low",
    }
}

fn time(timestamp: &Option<prost_types::Timestamp>) -> Option<String> {
    timestamp.as_ref().map(ToString::to_string)
}

fn time_of_ms(unix_ms: i64) -> String {
    let nanos = i32::try_from(unix_ms.rem_euclid(1000)).unwrap_or_default() * 1_000_000;
    prost_types::Timestamp { seconds: unix_ms.div_euclid(1000), nanos }.to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(text: &'static str) -> Result<pb::NewTask, String> {
        new_task(&Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn every_field_of_a_task_is_read() {
        let task = read(
            r#"{"queue":"q","key":"k","payload":{"a": 1},"replicas":3,"priority":"High","delay":"90s","lease_duration":"1500ms",
                "max_attempts":7,"headers":{"h":"v"},"traceparent":"tp"}"#,
        )
        .unwrap();
        let expected = pb::NewTask {
            queue: "q".into(),
            key: "k".into(),
            payload: "{\"a\": 1}".into(),
            replicas: Some(3),
            priority: pb::Priority::High.into(),
            delay: Some(prost_types::Duration { seconds: 90, nanos: 0 }),
            not_before: None,
            lease_duration: Some(prost_types::Duration { seconds: 1, nanos: 500_000_000 }),
            max_attempts: Some(7),
            headers: HashMap::from([("h".into(), "v".into())]),
            traceparent: "tp".into(),
        };
        assert_eq!(task, expected);
    }

    #[test]
    fn a_payload_is_its_text_and_a_string_its_bytes() {
        let cases: [(&str, &[u8]); 8] = [
            (r#"{"payload":"plain"}"#, b"plain"),
            (r#"{"payload":"a\nb\u00e9"}"#, "a\nbé".as_bytes()),
            (r#"{"payload":[1, 2]}"#, b"[1, 2]"),
            (r#"{"payload":42}"#, b"42"),
            (r#"{"payload":true}"#, b"true"),
            (r#"{"payload":null}"#, b""),
            (r#"{"payload":""}"#, b""),
            (r#"{"payload_base64":"AP8="}"#, b"\x00\xff"),
        ];
        for (text, payload) in cases {
            assert_eq!(read(text).unwrap().payload, payload, "{text}");
        }
    }

    #[test]
    fn a_payload_is_not_copied() {
        let body = Bytes::from_static(br#"[{"payload":{"a":1}},{"payload":"text"}]"#);
        let tasks = new_tasks(&body).unwrap();
        for task in tasks {
            let payload = task.unwrap().payload;
            assert!(body.as_ptr_range().contains(&payload.as_ptr()));
        }
    }

    #[test]
    fn what_is_wrong_with_a_task_is_named() {
        let cases = [
            (r#"{"pirority":"high"}"#, "unknown field `pirority`, expected one of `queue`, `key`, `payload`"),
            (r#"{"priority":"urgent"}"#, "priority: unknown priority \"urgent\"; expected high, medium or low"),
            (r#"{"delay":"soon"}"#, "delay: \"soon\" is not a duration; write \"250ms\""),
            (r#"{"delay":30}"#, "delay: invalid type: integer `30`, expected a string"),
            (r#"{"headers":{"a":1}}"#, "headers.a: invalid type: integer `1`, expected a string"),
            (r#"{"not_before":"tomorrow"}"#, "not_before: \"tomorrow\" is not a time; write it as RFC 3339"),
            (r#"{"payload":1,"payload_base64":"AA=="}"#, "payload and payload_base64 are both given"),
            (r#"{"payload_base64":"%"}"#, "payload_base64 is not base64"),
            (
                r#"{"replicas":-1}"#,
                "replicas: invalid value: integer `-1`, expected a whole number from 0 to 4294967295",
            ),
            (r#"["q","k"]"#, "expected a task: a JSON object"),
            (r#"{"queue":"q""#, "not JSON at column 12: EOF"),
            ("", "not JSON at column 0: EOF"),
        ];
        for (text, want) in cases {
            let error = read(text).unwrap_err();
            assert!(error.contains(want), "{error:?} should say {want:?}");
            assert!(!error.contains(" at line "), "{error}");
        }
    }

    #[test]
    fn times_are_read_with_any_offset() {
        let at = |text| read(text).unwrap().not_before.unwrap().to_string();
        assert_eq!(at(r#"{"not_before":"2030-01-31T12:00:00+02:00"}"#), "2030-01-31T10:00:00Z");
    }

    #[test]
    fn one_task_or_an_array_and_a_wrong_entry_does_not_spoil_the_others() {
        let read = |text: &'static str| new_tasks(&Bytes::from_static(text.as_bytes()));
        assert_eq!(read(r#" {"queue":"q"}"#).unwrap().len(), 1);
        let tasks = read("[{\"queue\":\"q\"},{\"que\":1},7]").unwrap();
        assert!(tasks[0].is_ok() && tasks[1].is_err() && tasks[2].is_err());
        let malformed = read("[{\"queue\":\"q\"},\n{\"queue\" \"q\"}]").unwrap_err();
        assert_eq!((malformed.line, malformed.column), (2, 10), "{malformed}");
        let lines = read("{\"queue\":\"q\"}\n{\"queue\":\"q\"}\n").unwrap_err();
        assert_eq!(
            lines.to_string(),
            "not JSON: trailing characters; several tasks? send an array, or lines with Content-Type: application/x-ndjson"
        );
    }

    #[test]
    fn a_wrong_completion_is_answered_under_its_id() {
        let body = Bytes::from_static(
            br#"{"worker":"w","completions":[
                {"id":"1","lease_token":"t","result":{"ok":true},"discovered":[{"key":"x"}]},
                {"id":"2","lease_token":"t","discovered":[{"key":"x"},{"kee":"y"}]},
                {"lease_token":"t"}]}"#,
        );
        let (worker, items) = complete_tasks(&body).unwrap();
        assert_eq!(worker, "w");
        let first = items[0].as_ref().unwrap();
        assert_eq!((first.result.as_ref(), first.discovered.len()), (b"{\"ok\":true}".as_ref(), 1));
        let second = items[1].as_ref().unwrap_err();
        assert_eq!((second.id.as_str(), second.status()), ("2", pb::ItemStatus::Invalid));
        assert!(second.error.starts_with("discovered[1]: unknown field `kee`"), "{}", second.error);
        assert_eq!(items[2].as_ref().unwrap_err().error, "missing field `id`");
    }

    #[test]
    fn rejections_and_extensions_are_read() {
        let body = Bytes::from_static(
            br#"{"worker":"w","rejections":[{"id":"1","lease_token":"t","reason":"r","retry":false,"delay":"1m"}]}"#,
        );
        let rejection = reject_tasks(&body).unwrap().1.remove(0).unwrap();
        assert_eq!((rejection.retry, rejection.delay.unwrap().seconds), (Some(false), 60));
        let body = Bytes::from_static(br#"{"worker":"w","extensions":[{"id":"1","lease_token":"t","by":"2m"}]}"#);
        let extension = extend_tasks(&body).unwrap().1.remove(0).unwrap();
        assert_eq!(extension.by.unwrap().seconds, 120);
    }

    #[test]
    fn a_request_that_is_no_object_or_lacks_something_is_malformed() {
        let read = |text: &'static str| get_tasks(&Bytes::from_static(text.as_bytes())).unwrap_err().to_string();
        assert_eq!(read(r#"["w", ["q"]]"#), "expected a JSON object");
        assert_eq!(read(r#"{"queues":[]}"#), "missing field `worker`");
        assert_eq!(read(r#"{"worker":"w","queues":"q"}"#), "queues: invalid type: string \"q\", expected a list");
        assert!(read(r#"{"worker":"w","queues":["q"],"max":3}"#).starts_with("unknown field `max`, expected one of"));
        assert!(read("{").starts_with("not JSON: EOF"));
        assert!(read("").starts_with("not JSON: EOF"));
    }

    fn shown(value: impl Serialize) -> serde_json::Value {
        serde_json::to_value(value).unwrap()
    }

    #[test]
    fn answers_leave_out_what_is_empty() {
        let created =
            pb::InsertResult { status: pb::InsertStatus::Created.into(), id: "1".into(), error: String::new() };
        assert_eq!(shown(InsertAnswer::from(&created)), json!({"status": "CREATED", "id": "1"}));
        assert_eq!(shown(InsertAnswer::from(&rejected("why".into()))), json!({"status": "REJECTED", "error": "why"}));
        let lost = pb::ItemResult { id: "1".into(), status: pb::ItemStatus::LeaseLost.into(), ..Default::default() };
        assert_eq!(shown(ItemAnswer::from(&lost)), json!({"id": "1", "status": "LEASE_LOST"}));
        assert_eq!(list("results", [1, 2]).unwrap(), br#"{"results":[1,2]}"#);
    }

    #[test]
    fn a_leased_task_has_its_payload_as_text_only_where_it_is_text() {
        let task = pb::LeasedTask { key: "k".into(), payload: "{\"a\":1}".into(), attempt: 1, ..Default::default() };
        let json = shown(LeasedTask::from(&task));
        assert_eq!((&json["key"], &json["payload"]), (&json!("k"), &json!("{\"a\":1}")));
        assert_eq!((&json["payload_base64"], &json["priority"]), (&json!("eyJhIjoxfQ=="), &json!("medium")));
        assert!(json.get("key_base64").is_none());
        let task = pb::LeasedTask { key: vec![0xff].into(), payload: vec![0xff].into(), ..Default::default() };
        let json = shown(LeasedTask::from(&task));
        assert_eq!((&json["key_base64"], &json["payload_base64"]), (&json!("/w=="), &json!("/w==")));
        assert!(json.get("payload").is_none());
    }

    #[test]
    fn a_result_is_shown_as_the_json_it_is() {
        let row = |result: &'static [u8]| {
            let result = Bytes::from_static(result);
            let row = ResultRow { worker: "w".into(), result, attempt: 2, completed_unix_ms: 1_500, surplus: true };
            shown(TaskResult::from(&row))
        };
        let json = row(br#"{"links":[1]}"#);
        assert_eq!(json["result"], json!({"links": [1]}));
        assert_eq!((&json["surplus"], &json["attempt"]), (&json!(true), &json!(2)));
        assert_eq!(json["completed_at"], "1970-01-01T00:00:01.500Z");
        assert_eq!(row(b"plain text")["result"], "plain text");
        assert_eq!(row(b"42")["result"], 42);
        assert!(row(b"").get("result").is_none());
        assert!(row(b"\xff").get("result").is_none());
        assert_eq!(row(b"\xff")["result_base64"], "/w==");
    }
}
