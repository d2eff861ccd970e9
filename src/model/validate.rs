//! Turns a [`NewTask`] into a [`TaskRow`], or returns one line with the error.

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::{
    Backoff, Encoding, HTTP_QUEUE, Idempotency, KeyHash, LimitBy, MAX_RECORD_BYTES, NewTask, Part,
    Priority, QueueName, Sequence, TaskId, TaskRow, idempotency, is_traceparent,
    json::{self, Fault},
    limit_hash, limit_partition,
    times::Times,
};

/// The maximum length of a key. InnoDB cannot index a longer one; more data belongs in the payload.
pub const MAX_KEY_BYTES: usize = 4096;

/// The maximum length of a traceparent. W3C sets no limit for versions above 00.
pub const MAX_TRACEPARENT_BYTES: usize = 256;

/// The maximum number of headers of a task, in addition to the limit of their bytes, because a
/// header costs more than its bytes.
pub const MAX_HEADERS: usize = 1000;

/// The header and value that mark a task that was stored without its queue's enrichment. It is
/// exempt from the limits of headers, so that every task can have it.
pub const NOT_ENRICHED: (&str, &str) = ("taskd-enrichment", "skipped");

/// The number of characters of a SHA-256 in hex.
const HASH_CHARACTERS: usize = 64;

/// The limits of a task, and the defaults of its queue.
#[derive(Clone, Debug)]
pub struct TaskRules {
    pub max_payload_bytes: usize,
    pub max_headers_bytes: usize,
    pub max_replicas: u32,
    pub max_lease: Duration,
    pub replicas: u32,
    pub priority: Priority,
    pub lease: Duration,
    pub max_attempts: u32,
    pub idempotency_window: Duration,
    pub limit_by: LimitBy,
    /// Somebody was already told that the task is valid, so its deadline may have passed since.
    pub is_accepted: bool,
    /// The task is a step of an execution, so its queue may be one of taskd's own.
    pub is_step: bool,
}

impl TaskRules {
    /// The rules for a task that a worker discovered, whose completion has been confirmed.
    #[must_use]
    pub fn for_accepted(self) -> Self {
        Self {
            is_accepted: true,
            ..self
        }
    }

    /// The rules for a step of an execution.
    #[must_use]
    pub fn for_step(self) -> Self {
        Self {
            is_step: true,
            ..self.for_accepted()
        }
    }
}

/// The partitions of `pipeline`.
#[derive(Clone, Copy, Debug)]
pub struct Partitions {
    pub all: u32,
    /// Those among which tasks with limit keys are spread: more would split keys.
    pub limited: u32,
}

impl From<u32> for Partitions {
    fn from(all: u32) -> Self {
        Self { all, limited: all }
    }
}

/// The result of validating a task: the computed parts of its row.
pub struct Checked {
    queue: QueueName,
    payload_encoding: Encoding,
    replicas: u32,
    priority: Priority,
    max_attempts: u32,
    lease: Duration,
    times: Times,
    created_unix_ms: i64,
    backoff: Option<Backoff>,
    idempotency_window: Duration,
    limit_key: String,
    sequence: Option<Sequence>,
}

/// Validates an output that goes into a join. Returns the encoding of its payload.
pub fn part(part: &Part) -> Result<Encoding, String> {
    if part.key.len() > MAX_KEY_BYTES {
        return Err(format!(
            "key has {} bytes; at most {MAX_KEY_BYTES}",
            part.key.len()
        ));
    }
    encoding("payload", part.encoding, &part.payload)
}

/// Validates `task` and turns it into a row with id `id`.
pub fn task_row(
    task: NewTask,
    id: TaskId,
    rules: &TaskRules,
    partitions: impl Into<Partitions>,
    now_unix_ms: i64,
) -> Result<TaskRow, String> {
    Ok(check(&task, rules, now_unix_ms)?.row(task, id, partitions))
}

impl Checked {
    pub fn queue(&self) -> &QueueName {
        &self.queue
    }

    /// Turns the validated task into a row with id `id`.
    pub fn row(self, task: NewTask, id: TaskId, partitions: impl Into<Partitions>) -> TaskRow {
        let partitions = partitions.into();
        // Key and payload may be slices of a request body of several megabytes. The row outlives
        // the request, so it must not keep the body alive.
        let key = match (task.id, task.key.is_empty()) {
            (Some(_), _) => Bytes::new(),
            (None, true) => payload_key(&task.payload),
            (None, false) => Bytes::copy_from_slice(&task.key),
        };
        let key_hash = match task.id {
            Some(id) => KeyHash::without_key(id),
            None => KeyHash::new(&self.queue, &key),
        };
        // The hash from which the shard follows. The first bytes of an id are a time, which would
        // send all tasks of a day to one shard.
        let shard_hash = match (task.id, task.key.is_empty()) {
            (None, _) => key_hash,
            (Some(id), true) => KeyHash::new(&self.queue, id.as_bytes()),
            (Some(_), false) => KeyHash::new(&self.queue, &task.key),
        };
        let mut headers: Vec<_> = task.headers.into_iter().collect();
        headers.sort();
        let now = self.created_unix_ms;
        let window = self.idempotency_window;
        let idempotency = Idempotency::new(
            &task.idempotency_key,
            &self.queue,
            &key_hash.0,
            &task.payload,
            now,
            window,
        );
        TaskRow {
            id,
            // All tasks of a limit key are in one shard, so that one script sees all of it.
            partition: match self.limit_key.as_str() {
                "" => shard_hash.partition(partitions.all),
                key => limit_partition(&limit_hash(&self.queue, key), partitions.limited),
            },
            queue: self.queue,
            key,
            key_hash,
            payload: Bytes::copy_from_slice(&task.payload),
            payload_encoding: self.payload_encoding,
            replicas: self.replicas,
            priority: self.priority,
            max_attempts: self.max_attempts,
            lease_ms: u32::try_from(self.lease.as_millis()).unwrap_or(u32::MAX),
            not_before_unix_ms: self.times.not_before_unix_ms,
            headers,
            traceparent: task.traceparent,
            created_unix_ms: self.created_unix_ms,
            backoff: self.backoff,
            deadline_unix_ms: self.times.deadline_unix_ms,
            limit_key: self.limit_key,
            sequence: self.sequence,
            idempotency,
            tree: None,
            execution: None,
        }
    }
}

/// Says that nobody else may use the queue of HTTP calls.
pub fn queue_is_own() -> String {
    format!(
        "queue {HTTP_QUEUE} is for the HTTP calls of workflows, which taskd sends itself; use another queue"
    )
}

/// Validates a task without consuming it.
pub fn check(task: &NewTask, rules: &TaskRules, now_unix_ms: i64) -> Result<Checked, String> {
    // The outputs of a stage have become tasks of queues before.
    if !task.port.is_empty() {
        return Err("port is for what a task of a stage discovers; name a queue".into());
    }
    let queue = QueueName::new(&task.queue).map_err(|e| e.to_string())?;
    if queue.as_str() == HTTP_QUEUE && !rules.is_step {
        return Err(queue_is_own());
    }
    if task.key.len() > MAX_KEY_BYTES {
        return Err(format!(
            "key has {} bytes; at most {MAX_KEY_BYTES}",
            task.key.len()
        ));
    }
    if task.payload.len() > rules.max_payload_bytes {
        return Err(format!(
            "payload has {} bytes; at most {}",
            task.payload.len(),
            rules.max_payload_bytes
        ));
    }
    if task.id.is_none() && task.key.is_empty() && task.payload.is_empty() {
        return Err("key and payload are both empty: nothing says what the task is".into());
    }
    let payload_encoding = encoding("payload", task.payload_encoding, &task.payload)?;
    headers(&task.headers, rules)?;
    let replicas = task.replicas.unwrap_or(rules.replicas);
    if replicas == 0 || replicas > rules.max_replicas {
        return Err(format!(
            "replicas is {replicas}; must be 1 to {}",
            rules.max_replicas
        ));
    }
    let max_attempts = task.max_attempts.unwrap_or(rules.max_attempts);
    if max_attempts == 0 || max_attempts > 1000 {
        return Err(format!("max_attempts is {max_attempts}; must be 1 to 1000"));
    }
    let lease = task.lease_duration.unwrap_or(rules.lease);
    lease_duration("lease_duration", lease, rules.max_lease)?;
    let times = Times::new(task, rules.is_accepted, now_unix_ms)?;
    traceparent(&task.traceparent)?;
    idempotency::check(&task.idempotency_key)?;
    let backoff = task.backoff.as_ref().map_or(Ok(None), Backoff::new)?;
    let limit_key = rules.limit_by.key_of(task)?;
    let sequence = Sequence::new(&task.sequence, task.on_dead)?;
    let weight = weight(task);
    if weight > MAX_RECORD_BYTES {
        return Err(format!(
            "the task has {weight} bytes with key and headers; at most {MAX_RECORD_BYTES}"
        ));
    }
    Ok(Checked {
        queue,
        payload_encoding,
        replicas,
        priority: task.priority.unwrap_or(rules.priority),
        max_attempts,
        lease,
        times,
        created_unix_ms: now_unix_ms,
        backoff,
        idempotency_window: rules.idempotency_window,
        limit_key,
        sequence,
    })
}

/// The [`TaskRow::weight`] that the task's row will have.
pub(super) fn weight(task: &NewTask) -> usize {
    let key = if task.key.is_empty() {
        HASH_CHARACTERS
    } else {
        task.key.len()
    };
    super::weight(key, task.payload.len(), header_bytes(&task.headers).0)
}

/// The total size and the number of headers, not counting [`NOT_ENRICHED`].
fn header_bytes(headers: &HashMap<String, String>) -> (usize, usize) {
    let mut bytes = 0;
    let mut count = 0;
    for (name, value) in headers {
        if (name.as_str(), value.as_str()) != NOT_ENRICHED {
            bytes += name.len() + value.len();
            count += 1;
        }
    }
    (bytes, count)
}

/// Validates a lease duration that was given in field `what`.
pub fn lease_duration(what: &str, lease: Duration, max: Duration) -> Result<(), String> {
    if lease < Duration::from_millis(100) || lease > max {
        let lease = humantime::format_duration(lease);
        let max = humantime::format_duration(max);
        return Err(format!("{what} is {lease}; must be 100ms to {max}"));
    }
    Ok(())
}

/// Checks that a payload or a result (`what`) has the encoding that its sender declares. An empty
/// one may have any encoding.
pub fn encoding(what: &str, said: Encoding, bytes: &[u8]) -> Result<Encoding, String> {
    let utf8 = || {
        std::str::from_utf8(bytes)
            .map_err(|error| format!("it is not UTF-8 at byte {}", error.valid_up_to()))
    };
    let not_what_is_said =
        |form: &str, why: String| format!("{what}_encoding is {form}, but {what} is not: {why}");
    match said {
        Encoding::Unknown | Encoding::Bytes => Ok(Encoding::Bytes),
        Encoding::Text => utf8()
            .map(|_| Encoding::Text)
            .map_err(|why| not_what_is_said("TEXT", why)),
        Encoding::Json if bytes.is_empty() => Ok(Encoding::Json),
        Encoding::Json => {
            let text = utf8().map_err(|why| not_what_is_said("JSON", why))?;
            json::check(text)
                .map(|()| Encoding::Json)
                .map_err(|fault| match fault {
                    Fault::NotJson(why) => not_what_is_said("JSON", why),
                    Fault::TooDeep => too_deep(what),
                })
        }
    }
}

/// The error message for a payload or a result that is nested too deeply.
pub(super) fn too_deep(what: &str) -> String {
    format!(
        "{what} has arrays and objects more than {} deep in each other",
        json::MAX_DEPTH
    )
}

/// Validates headers. Workers may pass them on to places where line breaks and names are
/// significant.
fn headers(headers: &HashMap<String, String>, rules: &TaskRules) -> Result<(), String> {
    let (bytes, count) = header_bytes(headers);
    if bytes > rules.max_headers_bytes {
        return Err(format!(
            "headers have {bytes} bytes; at most {}",
            rules.max_headers_bytes
        ));
    }
    if count > MAX_HEADERS {
        return Err(format!("{count} headers; at most {MAX_HEADERS}"));
    }
    for (name, value) in headers {
        if name.is_empty() {
            return Err("a header has an empty name".into());
        }
        if name.chars().chain(value.chars()).any(char::is_control) {
            let name = name.chars().take(64).collect::<String>();
            return Err(format!("header {name:?} contains a control character"));
        }
    }
    Ok(())
}

/// Validates a traceparent that a caller gave.
fn traceparent(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Ok(());
    }
    if text.len() > MAX_TRACEPARENT_BYTES {
        return Err(format!(
            "traceparent has {} bytes; at most {MAX_TRACEPARENT_BYTES}",
            text.len()
        ));
    }
    if !is_traceparent(text) {
        return Err(format!(
            "traceparent {text:?} is not of the W3C form 00-<32 hex>-<16 hex>-<2 hex> (lower case, not zero)"
        ));
    }
    Ok(())
}

fn payload_key(payload: &[u8]) -> Bytes {
    let hash = Sha256::digest(payload);
    hash.iter()
        .map(|b| format!("{b:02x}"))
        .collect::<String>()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{NewBackoff, TraceContext};

    fn rules() -> TaskRules {
        TaskRules {
            max_payload_bytes: 1 << 20,
            max_headers_bytes: 16 << 10,
            max_replicas: 100,
            max_lease: Duration::from_secs(12 * 3600),
            replicas: 1,
            priority: Priority::Medium,
            lease: Duration::from_secs(30),
            max_attempts: 5,
            idempotency_window: Duration::from_secs(60),
            limit_by: LimitBy::Nothing,
            is_accepted: false,
            is_step: false,
        }
    }

    fn row(task: NewTask) -> Result<TaskRow, String> {
        task_row(task, TaskId::new(), &rules(), 4, 1_000_000)
    }

    #[test]
    fn a_task_with_an_id_takes_no_key() {
        let without_key = |id, key: &'static str| {
            let task = NewTask {
                id: Some(id),
                key: key.into(),
                payload: Bytes::new(),
                ..task()
            };
            task_row(task, id, &rules(), 64, 1_000_000).unwrap()
        };
        let ids: Vec<TaskId> = (0..64).map(|place| TaskId::at(1_000_000, place)).collect();
        let stored = without_key(ids[0], "k");
        assert!(!stored.has_key() && stored.key.is_empty());
        assert_eq!(stored.key_hash, KeyHash::without_key(ids[0]));
        // The key that was given chooses the shard, as if the task took it.
        let with_key = task_row(task(), ids[0], &rules(), 64, 1_000_000).unwrap();
        assert!(with_key.has_key());
        for id in &ids {
            assert_eq!(without_key(*id, "k").partition, with_key.partition);
        }
        // Without one the ids of a moment are spread over the shards.
        let shards: std::collections::HashSet<u32> = ids
            .iter()
            .map(|id| without_key(*id, "").partition)
            .collect();
        assert!(shards.len() > 16, "{shards:?}");
    }

    fn task() -> NewTask {
        NewTask {
            queue: "q".into(),
            key: "k".into(),
            ..Default::default()
        }
    }

    #[test]
    fn a_row_keeps_nothing_of_the_body_that_its_task_came_in() {
        let body = Bytes::from(vec![b'x'; 1 << 20]);
        let task = NewTask {
            key: body.slice(..1),
            payload: body.slice(1..3),
            ..task()
        };
        let row = row(task).unwrap();
        assert!(body.is_unique());
        assert_eq!((&row.key[..], &row.payload[..]), (&b"x"[..], &b"xx"[..]));
    }

    #[test]
    fn defaults_are_filled_in() {
        let row = row(task()).unwrap();
        assert_eq!(
            (
                row.replicas,
                row.max_attempts,
                row.lease_ms,
                row.not_before_unix_ms
            ),
            (1, 5, 30_000, 0)
        );
        assert!(
            is_traceparent(&row.context())
                && row.context().contains(&row.id.0.simple().to_string())
        );
        assert!(row.partition < 4);
    }

    #[test]
    fn a_key_not_given_is_the_payloads_hash() {
        let row = row(NewTask {
            key: Bytes::new(),
            payload: "abc".into(),
            ..task()
        })
        .unwrap();
        assert_eq!(
            row.key,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad".as_bytes()
        );
    }

    #[test]
    fn the_whole_task_is_bounded_too() {
        let rules = TaskRules {
            max_payload_bytes: MAX_RECORD_BYTES,
            ..rules()
        };
        let row = |bytes: usize| {
            let task = NewTask {
                payload: vec![0; bytes].into(),
                ..task()
            };
            task_row(task, TaskId::new(), &rules, 4, 1_000_000)
        };
        assert!(row(MAX_RECORD_BYTES - 1000).is_ok());
        let error = row(MAX_RECORD_BYTES).unwrap_err();
        assert!(
            error.ends_with("bytes with key and headers; at most 8388608"),
            "{error}"
        );
    }

    #[test]
    fn full_headers_have_room_for_the_mark_of_a_task_that_was_not_enriched() {
        let (name, value) = NOT_ENRICHED;
        let mark = (name.to_owned(), value.to_owned());
        let many = (0..MAX_HEADERS).map(|n| (n.to_string(), String::new()));
        let large = [("h".to_owned(), "v".repeat(rules().max_headers_bytes - 1))];
        assert!(
            row(NewTask {
                headers: many.chain([mark.clone()]).collect(),
                ..task()
            })
            .is_ok()
        );
        assert!(
            row(NewTask {
                headers: large.into_iter().chain([mark]).collect(),
                ..task()
            })
            .is_ok()
        );
    }

    fn of_a_task() -> String {
        TraceContext::of_id(TaskId::new().as_bytes()).to_string()
    }

    #[test]
    fn a_traceparent_of_a_later_version_may_be_longer() {
        let traceparent = format!("cc{}-more", &of_a_task()[2..]);
        assert_eq!(
            row(NewTask {
                traceparent: traceparent.clone(),
                ..task()
            })
            .unwrap()
            .traceparent,
            traceparent
        );
    }

    #[test]
    fn a_payload_is_what_its_encoding_says() {
        use Encoding::{Bytes, Json, Text, Unknown};
        let encoded = |payload: &'static [u8], encoding: Encoding| {
            let task = NewTask {
                payload: payload.into(),
                payload_encoding: encoding,
                ..task()
            };
            row(task).map(|row| row.payload_encoding)
        };
        let cases: [(&[u8], Encoding, Encoding); 6] = [
            (b"\xff", Unknown, Encoding::Bytes),
            (b"{}", Bytes, Encoding::Bytes),
            (b"\xc3\xa9", Text, Encoding::Text),
            (b" {\"a\": [1e999]} ", Json, Encoding::Json),
            (b"", Json, Encoding::Json),
            (b"", Text, Encoding::Text),
        ];
        for (payload, said, want) in cases {
            assert_eq!(encoded(payload, said), Ok(want), "{payload:?} as {said:?}");
        }
        let half = "payload_encoding is JSON, but payload is not: an escape is half of a character";
        let wrong: [(&[u8], Encoding, &str); 4] = [
            (b"[\"\\ud800\"]", Json, half),
            (
                b"a\xff",
                Text,
                "payload_encoding is TEXT, but payload is not: it is not UTF-8 at byte 1",
            ),
            (
                b"\"\xff\"",
                Json,
                "payload_encoding is JSON, but payload is not: it is not UTF-8 at byte 1",
            ),
            (
                b"{} {}",
                Json,
                "payload_encoding is JSON, but payload is not: trailing characters at line 1 column 4",
            ),
        ];
        for (payload, said, why) in wrong {
            assert_eq!(encoded(payload, said), Err(why.into()));
        }
        let deep = "payload has arrays and objects more than 120 deep in each other";
        assert_eq!(
            encoded(
                ["[".repeat(121), "]".repeat(121)]
                    .concat()
                    .leak()
                    .as_bytes(),
                Json
            ),
            Err(deep.into())
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let headers = |name: &str, value: &str| [(name.to_owned(), value.to_owned())].into();
        let trace = "0".repeat(31) + "1";
        let d = |seconds| Some(Duration::from_secs(seconds));
        let cases = [
            (
                NewTask {
                    queue: String::new(),
                    ..task()
                },
                "queue is missing",
            ),
            (
                NewTask {
                    queue: "a b".into(),
                    ..task()
                },
                "contains ' '",
            ),
            (
                NewTask {
                    queue: "a{b".into(),
                    ..task()
                },
                "contains '{'",
            ),
            (
                NewTask {
                    queue: "é".into(),
                    ..task()
                },
                "contains 'é'",
            ),
            (
                NewTask {
                    queue: "q".repeat(65),
                    ..task()
                },
                "65 characters",
            ),
            (
                NewTask {
                    key: vec![b'k'; 4097].into(),
                    ..task()
                },
                "key has 4097 bytes",
            ),
            (
                NewTask {
                    key: Bytes::new(),
                    ..task()
                },
                "both empty",
            ),
            (
                NewTask {
                    payload: vec![0; (1 << 20) + 1].into(),
                    ..task()
                },
                "payload has 1048577 bytes",
            ),
            (
                NewTask {
                    replicas: Some(0),
                    ..task()
                },
                "replicas is 0",
            ),
            (
                NewTask {
                    replicas: Some(101),
                    ..task()
                },
                "replicas is 101",
            ),
            (
                NewTask {
                    max_attempts: Some(0),
                    ..task()
                },
                "max_attempts is 0",
            ),
            (
                NewTask {
                    lease_duration: d(0),
                    ..task()
                },
                "lease_duration is 0s",
            ),
            (
                NewTask {
                    idempotency_key: "i".repeat(257),
                    ..task()
                },
                "idempotency_key has 257 bytes",
            ),
            (
                NewTask {
                    backoff: Some(NewBackoff {
                        initial: d(1),
                        ..Default::default()
                    }),
                    ..task()
                },
                "has no kind",
            ),
            (
                NewTask {
                    delay: d(1),
                    not_before_unix_ms: Some(0),
                    ..task()
                },
                "both given",
            ),
            (
                NewTask {
                    delay: d(253_402_300_800),
                    ..task()
                },
                "year 9999 is the last",
            ),
            (
                NewTask {
                    not_before_unix_ms: Some(253_402_300_800_000),
                    ..task()
                },
                "year 9999 is the last",
            ),
            (
                NewTask {
                    not_before_unix_ms: Some(i64::MAX),
                    ..task()
                },
                "year 9999 is the last",
            ),
            (
                NewTask {
                    queue: "\u{1}".repeat(1 << 18),
                    ..task()
                },
                "queue name has 262144 characters; at most 64",
            ),
            (
                NewTask {
                    headers: headers("", "v"),
                    ..task()
                },
                "a header has an empty name",
            ),
            (
                NewTask {
                    headers: headers("a\r\nX: y", ""),
                    ..task()
                },
                "header \"a\\r\\nX: y\" contains a control",
            ),
            (
                NewTask {
                    headers: headers("a", "\0"),
                    ..task()
                },
                "header \"a\" contains a control character",
            ),
            (
                NewTask {
                    headers: (0..1001).map(|n| (n.to_string(), "".into())).collect(),
                    ..task()
                },
                "1001 headers",
            ),
            (
                NewTask {
                    traceparent: "x".into(),
                    ..task()
                },
                "W3C",
            ),
            (
                NewTask {
                    traceparent: format!("00-{}-{}-01", "0".repeat(32), "1".repeat(16)),
                    ..task()
                },
                "W3C",
            ),
            (
                NewTask {
                    traceparent: format!("00-{trace}-{}-01", "0".repeat(16)),
                    ..task()
                },
                "W3C",
            ),
            (
                NewTask {
                    traceparent: format!("ff-{trace}-{}-01", "1".repeat(16)),
                    ..task()
                },
                "W3C",
            ),
            (
                NewTask {
                    traceparent: format!("00-{trace}-{}-01", "A".repeat(16)),
                    ..task()
                },
                "W3C",
            ),
            (
                NewTask {
                    traceparent: format!("01-{trace}-{}-01-\u{1b}\n", "1".repeat(16)),
                    ..task()
                },
                "W3C",
            ),
            (
                NewTask {
                    traceparent: format!("{}-x", of_a_task()),
                    ..task()
                },
                "W3C",
            ),
            (
                NewTask {
                    traceparent: format!("cc{}-{}", &of_a_task()[2..], "x".repeat(201)),
                    ..task()
                },
                "257 bytes",
            ),
        ];
        for (task, want) in cases {
            let error = row(task).unwrap_err();
            assert!(error.contains(want), "{error:?} should say {want:?}");
        }
    }
}
