//! Tasks to insert.

use std::{borrow::Cow, collections::HashMap, fmt};

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer as _, de};
use serde_json::value::RawValue;

use super::{
    super::tally::{Excess, Tally},
    Nested, Unread,
    backoff::Backoff,
    first_byte, headers, item,
    text::{Instant, Priority, Time},
    trees, utf8, value,
};
use crate::model::{self, OnDead, QueueName, TaskTree, validate::MAX_HEADERS};

/// A task to insert.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a task")]
#[schemars(extend("required" = ["queue"]))]
pub(in crate::ingress) struct NewTask<'a> {
    // The OpenAPI document shows no default, because an empty name is not valid.
    #[serde(default)]
    #[schemars(with = "QueueName", transform = without_default)]
    queue: String,
    #[serde(borrow, default)]
    /// The task's name in its queue, for ever: at most 4,096 bytes. Empty: the hash of the payload.
    #[schemars(length(max = 4096))]
    key: Cow<'a, str>,
    #[serde(borrow)]
    /// Any JSON value. A worker gets it byte for byte; a string is its text.
    payload: Option<&'a RawValue>,
    /// Bytes, in place of `payload`.
    #[schemars(extend("contentEncoding" = "base64"))]
    payload_base64: Option<String>,
    /// How many distinct workers must complete the task.
    #[schemars(range(min = 1))]
    replicas: Option<u32>,
    priority: Option<Priority>,
    /// The wait before the first attempt.
    delay: Option<Time>,
    /// The time of the first attempt, in place of `delay`.
    not_before: Option<Instant>,
    /// When the task must have its completions. After that it is dead.
    deadline: Option<Instant>,
    /// The time from the insert to the deadline, in place of `deadline`.
    finish_within: Option<Time>,
    lease_duration: Option<Time>,
    /// After how many failures the task is dead.
    max_attempts: Option<u32>,
    backoff: Option<Nested<Backoff>>,
    #[serde(default, deserialize_with = "headers::<_, MAX_HEADERS>")]
    #[schemars(with = "HashMap<String, String>", extend("maxProperties" = MAX_HEADERS))]
    headers: HashMap<String, String>,
    #[serde(default)]
    /// The caller's trace in the W3C format. Empty: taskd makes one.
    #[schemars(length(max = 256))]
    traceparent: String,
    #[serde(default)]
    /// An insert that is repeated with the same key gets the first answer again, for the queue's
    /// `idempotency_window`. Not for discovered tasks.
    #[schemars(length(max = 256))]
    idempotency_key: String,
    #[serde(default)]
    /// What the task shares its limits with, in a queue with a `limit_by`. Empty: what that says.
    #[schemars(length(max = 255))]
    limit_key: String,
    #[serde(default)]
    /// The tasks of a queue with one sequence go one after the other, in the order of their inserts.
    /// Empty: in no sequence.
    #[schemars(length(max = 255))]
    sequence: String,
    #[serde(default)]
    /// What the death of this task means for the ones after it in its sequence.
    on_dead: OnDead,
    #[serde(default, deserialize_with = "trees::of_task")]
    #[schemars(with = "Option<trees::OfTask>")]
    /// `new`: the task is the root of a tree. Or the id of an open tree, or the settings of a new one.
    /// Not for discovered tasks, which are in the tree of their parent.
    tree: Option<Box<TaskTree>>,
    #[serde(default)]
    /// Only of discovered tasks in a topology: the port of the stage, in place of `queue`.
    #[schemars(length(max = 64))]
    port: String,
}

fn without_default(schema: &mut schemars::Schema) {
    schema.remove("default");
}

/// One task or an array of them, as [`new_tasks`] reads them.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[allow(dead_code, reason = "only the document of the API has this type")]
pub(in crate::ingress) enum OneOrMore<'a> {
    One(Box<NewTask<'a>>),
    More(Vec<NewTask<'a>>),
}

/// Reads a task from a line.
pub fn new_task(text: &Bytes) -> Result<model::NewTask, String> {
    task_within(text, utf8(text)?)
}

/// Reads a task from a line and counts its parts. An outer error is a limit, not a mistake in the
/// task.
pub(in crate::ingress) fn counted_task(
    text: &Bytes,
    tally: &mut Tally<'_>,
) -> Result<Result<model::NewTask, String>, Excess> {
    counted(new_task(text), tally)
}

/// The tasks of a request.
#[derive(Debug)]
pub(in crate::ingress) struct NewTasks {
    pub(in crate::ingress) tasks: Vec<Result<model::NewTask, String>>,
    /// True if the body was a single task, not a list.
    pub(in crate::ingress) is_single: bool,
}

/// Reads one task or an array of them.
pub(in crate::ingress) fn new_tasks(
    body: &Bytes,
    tally: &mut Tally<'_>,
) -> Result<NewTasks, Unread> {
    if first_byte(body) != Some(b'[') {
        let item: &RawValue = serde_json::from_slice(body).map_err(perhaps_lines)?;
        let task = part(body, item.get(), tally)?;
        return Ok(NewTasks {
            tasks: vec![task],
            is_single: true,
        });
    }
    let items = entries(body, tally)?;
    let tasks = items.into_iter().map(|item| part(body, item.get(), tally));
    Ok(NewTasks {
        tasks: tasks.collect::<Result<_, _>>()?,
        is_single: false,
    })
}

/// Reads the entries of an array, up to the limit.
fn entries<'a>(body: &'a Bytes, tally: &mut Tally<'_>) -> Result<Vec<&'a RawValue>, Unread> {
    struct Entries<'t, 's> {
        tally: &'t mut Tally<'s>,
        excess: &'t mut Option<Excess>,
    }

    impl<'de> de::Visitor<'de> for Entries<'_, '_> {
        type Value = Vec<&'de RawValue>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of tasks")
        }

        fn visit_seq<A: de::SeqAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
            let mut list = Vec::new();
            while let Some(entry) = entries.next_element()? {
                if let Err(excess) = self.tally.task() {
                    *self.excess = Some(excess);
                    return Err(de::Error::custom("too many"));
                }
                list.push(entry);
            }
            Ok(list)
        }
    }

    let (mut excess, mut reader) = (None, serde_json::Deserializer::from_slice(body));
    let list = reader.deserialize_seq(Entries {
        tally,
        excess: &mut excess,
    });
    match (list, excess) {
        (_, Some(excess)) => Err(excess.into()),
        (list, None) => {
            let list = list?;
            reader.end()?;
            Ok(list)
        }
    }
}

/// Adds a hint: a second value after the first looks like NDJSON that was sent as JSON.
fn perhaps_lines(error: serde_json::Error) -> Unread {
    let mut unread = Unread::from(error);
    if let Unread::Malformed { detail, .. } = &mut unread
        && detail.ends_with("trailing characters")
    {
        *detail +=
            "; several tasks? send an array, or lines with Content-Type: application/x-ndjson";
    }
    unread
}

/// Reads a task that is a part of `body`, and counts it. An outer error concerns the whole request.
pub(super) fn part(
    body: &Bytes,
    text: &str,
    tally: &mut Tally<'_>,
) -> Result<Result<model::NewTask, String>, Excess> {
    counted(task_within(body, text), tally)
}

fn counted(
    task: Result<model::NewTask, String>,
    tally: &mut Tally<'_>,
) -> Result<Result<model::NewTask, String>, Excess> {
    match &task {
        Ok(task) => task.headers.keys().try_for_each(|_| tally.header())?,
        Err(why) => tally.unreadable(why)?,
    }
    Ok(task)
}

/// Reads a task from a part of `body`.
fn task_within(body: &Bytes, text: &str) -> Result<model::NewTask, String> {
    let task: NewTask<'_> = item(text, "a task")?;
    let (payload, payload_encoding) =
        value::read(body, "payload", task.payload, task.payload_base64)?;
    Ok(model::NewTask {
        id: None,
        payload,
        payload_encoding,
        queue: task.queue,
        key: Bytes::from(task.key.into_owned()),
        replicas: task.replicas,
        priority: task.priority.map(|priority| priority.0),
        delay: task.delay.map(|time| time.0),
        not_before_unix_ms: task.not_before.map(|time| time.0),
        deadline_unix_ms: task.deadline.map(|time| time.0),
        finish_within: task.finish_within.map(|time| time.0),
        lease_duration: task.lease_duration.map(|time| time.0),
        max_attempts: task.max_attempts,
        backoff: task.backoff.map(|Nested(backoff)| backoff.into()),
        headers: task.headers,
        traceparent: task.traceparent,
        idempotency_key: task.idempotency_key,
        limit_key: task.limit_key,
        sequence: task.sequence,
        on_dead: task.on_dead,
        tree: task.tree,
        port: task.port,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::{
        super::testing::{share, shown, tally},
        *,
    };
    use crate::model::{Encoding, InsertAnswer, InsertStatus, TaskId, TaskStatus};

    fn read(text: &'static str) -> Result<model::NewTask, String> {
        new_task(&Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn every_field_of_a_task_is_read() {
        let task = read(
            r#"{"queue":"q","key":"k","payload":{"a": 1},"replicas":3,"priority":"High","delay":"90s",
                "finish_within":"2h","lease_duration":"1500ms","max_attempts":7,"headers":{"h":"v"},"traceparent":"tp",
                "idempotency_key":"i","limit_key":"l","sequence":"s","on_dead":"hold","port":"p","backoff":{"kind":"Linear","initial":"2s","jitter":0.1,"give_up_after":"1h"}}"#,
        )
        .unwrap();
        let expected = model::NewTask {
            id: None,
            queue: "q".into(),
            key: "k".into(),
            payload: "{\"a\": 1}".into(),
            payload_encoding: Encoding::Json,
            replicas: Some(3),
            priority: Some(model::Priority::High),
            delay: Some(Duration::from_secs(90)),
            not_before_unix_ms: None,
            deadline_unix_ms: None,
            finish_within: Some(Duration::from_secs(7200)),
            lease_duration: Some(Duration::from_millis(1500)),
            max_attempts: Some(7),
            headers: HashMap::from([("h".into(), "v".into())]),
            traceparent: "tp".into(),
            idempotency_key: "i".into(),
            limit_key: "l".into(),
            sequence: "s".into(),
            on_dead: OnDead::Hold,
            tree: None,
            port: "p".into(),
            backoff: Some(model::NewBackoff {
                kind: model::BackoffKind::Linear,
                initial: Some(Duration::from_secs(2)),
                maximum: None,
                jitter: Some(0.1),
                give_up_after: Some(Duration::from_secs(3600)),
            }),
        };
        assert_eq!(task, expected);
    }

    #[test]
    fn a_payload_is_its_text_and_a_string_its_bytes() {
        use Encoding::{Bytes, Json, Text, Unknown};
        let cases: [(&str, &[u8], Encoding); 8] = [
            (r#"{"payload":"plain"}"#, b"plain", Text),
            (r#"{"payload":"a\nb\u00e9"}"#, "a\nbé".as_bytes(), Text),
            (r#"{"payload":[1, 2]}"#, b"[1, 2]", Json),
            (r#"{"payload":42}"#, b"42", Json),
            (r#"{"payload":true}"#, b"true", Json),
            (r#"{"payload":null}"#, b"", Unknown),
            (r#"{"payload":""}"#, b"", Text),
            (r#"{"payload_base64":"AP8="}"#, b"\x00\xff", Bytes),
        ];
        for (text, payload, encoding) in cases {
            let task = read(text).unwrap();
            assert_eq!(
                (&task.payload[..], task.payload_encoding),
                (payload, encoding),
                "{text}"
            );
        }
    }

    fn read_all(body: &Bytes) -> Result<NewTasks, Unread> {
        new_tasks(body, &mut tally(&share()))
    }

    #[test]
    fn a_payload_is_not_copied() {
        let body = Bytes::from_static(br#"[{"payload":{"a":1}},{"payload":"text"}]"#);
        for task in read_all(&body).unwrap().tasks {
            let payload = task.unwrap().payload;
            assert!(body.as_ptr_range().contains(&payload.as_ptr()));
        }
    }

    #[test]
    fn what_is_wrong_with_a_task_is_named() {
        let cases = [
            (
                r#"{"pirority":"high"}"#,
                "unknown field `pirority`, expected one of `queue`, `key`, `payload`",
            ),
            (
                r#"{"priority":"urgent"}"#,
                "priority: unknown priority \"urgent\"; expected high, medium or low",
            ),
            (
                r#"{"delay":"soon"}"#,
                "delay: \"soon\" is not a duration; write \"250ms\"",
            ),
            (
                r#"{"delay":30}"#,
                "delay: invalid type: integer `30`, expected a string",
            ),
            (
                r#"{"headers":{"a":1}}"#,
                "headers.a: invalid type: integer `1`, expected a string",
            ),
            (
                r#"{"deadline":"tomorrow"}"#,
                "deadline: \"tomorrow\" is not a time; write it as RFC 3339",
            ),
            (
                r#"{"not_before":"tomorrow"}"#,
                "not_before: \"tomorrow\" is not a time; write it as RFC 3339",
            ),
            (
                r#"{"payload":1,"payload_base64":"AA=="}"#,
                "payload and payload_base64 are both given",
            ),
            (r#"{"payload_base64":"%"}"#, "payload_base64 is not base64"),
            (
                r#"{"payload":"\ud800"}"#,
                "payload: an escape is half of a character",
            ),
            (
                r#"{"payload":"\udc00!"}"#,
                "payload: an escape is half of a character",
            ),
            (
                r#"{"key":"\ud800"}"#,
                "not JSON at column 15: an escape is half of a character",
            ),
            (
                r#"{"replicas":-1}"#,
                "replicas: invalid value: integer `-1`, expected no negative number",
            ),
            (
                r#"{"backoff":{"kind":"wild"}}"#,
                "backoff.kind: unknown kind \"wild\"; expected constant, linear or",
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
    fn one_task_or_an_array_and_a_wrong_entry_does_not_spoil_the_others() {
        let read = |text: &'static str| read_all(&Bytes::from_static(text.as_bytes()));
        let one = read(r#" {"queue":"q"}"#).unwrap();
        assert!(one.is_single && one.tasks.len() == 1);
        let tasks = read("[{\"queue\":\"q\"},{\"que\":1},7]").unwrap();
        assert!(!tasks.is_single);
        assert!(tasks.tasks[0].is_ok() && tasks.tasks[1].is_err() && tasks.tasks[2].is_err());
        let Unread::Malformed {
            line,
            column,
            detail,
        } = read("[{\"queue\":\"q\"},\n{\"queue\" \"q\"}]").unwrap_err()
        else {
            panic!("not JSON")
        };
        assert_eq!((line, column), (2, 10), "{detail}");
        let lines = read("{\"queue\":\"q\"}\n{\"queue\":\"q\"}\n").unwrap_err();
        assert_eq!(
            lines.to_string(),
            "not JSON: trailing characters; several tasks? \
             send an array, or lines with Content-Type: application/x-ndjson"
        );
        assert!(
            read("[{}] []")
                .unwrap_err()
                .to_string()
                .starts_with("not JSON: trailing characters")
        );
    }

    #[test]
    fn too_many_tasks_or_headers_are_not_read_to_their_end() {
        let body = Bytes::from(format!("[{}0]", "0,".repeat(2 << 20)));
        assert_eq!(
            read_all(&body).unwrap_err(),
            Unread::Excess(Excess::Tasks(20_000))
        );
        let headers = |count: usize| {
            (0..count)
                .map(|n| format!("\"{n}\":\"\""))
                .collect::<Vec<_>>()
                .join(",")
        };
        let task = |count| {
            format!(
                "{{\"queue\":\"q\",\"key\":\"k\",\"headers\":{{{}}}}}",
                headers(count)
            )
        };
        let error = new_task(&Bytes::from(task(1001))).unwrap_err();
        assert_eq!(error, "headers: more than 1000 headers");
        let body = Bytes::from(format!("[{}]", vec![task(1000); 400].join(",")));
        let error = read_all(&body).unwrap_err().to_string();
        assert!(
            error.contains("bytes of memory; send fewer at once"),
            "{error}"
        );
    }

    #[test]
    fn answers_leave_out_what_is_empty() {
        let id: TaskId = "01890a5d-ac96-774b-bcce-b302099a8057".parse().unwrap();
        let created = InsertAnswer {
            status: InsertStatus::Created,
            id: Some(id),
            error: String::new(),
            task_status: None,
            tree: None,
        };
        assert_eq!(
            shown(created.clone()),
            json!({"status": "CREATED", "id": id.to_string()})
        );
        let duplicate = InsertAnswer {
            status: InsertStatus::Duplicate,
            task_status: Some(TaskStatus::Completed),
            ..created.clone()
        };
        assert_eq!(
            shown(duplicate),
            json!({"status": "DUPLICATE", "id": id.to_string(), "task_status": "COMPLETED"})
        );
        let rejected = InsertAnswer::rejected("why".into());
        assert_eq!(
            shown(rejected),
            json!({"status": "REJECTED", "error": "why"})
        );
    }
}
