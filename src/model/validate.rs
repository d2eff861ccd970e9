//! From what a user sent to a [`TaskRow`], or one line that says what is wrong with it.

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use serde::de::IgnoredAny;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::{Encoding, KeyHash, MAX_RECORD_BYTES, Priority, QueueName, TaskId, TaskRow};
use crate::{
    config::{Limits, QueueSettings},
    wire::pb,
};

/// A key of at most so many bytes: InnoDB could index no more, and who needs more has a payload.
pub const MAX_KEY_BYTES: usize = 4096;

/// W3C allows versions above 00 to be longer, without a bound.
const MAX_TRACEPARENT_BYTES: usize = 256;

/// Headers of one task, beside the limit of their bytes: each costs more than its bytes.
pub const MAX_HEADERS: usize = 1000;

/// The end of year 9999: what comes after it has no form in RFC 3339.
const LAST_UNIX_MS: i64 = 253_402_300_799_999;

/// Turns `task` into a row with the id `id`. `settings` are its queue's.
pub fn task_row(
    task: pb::NewTask,
    id: TaskId,
    settings: &QueueSettings,
    limits: &Limits,
    partitions: u32,
    now_unix_ms: i64,
) -> Result<TaskRow, String> {
    let queue = QueueName::new(&task.queue).map_err(|e| e.to_string())?;
    if task.key.len() > MAX_KEY_BYTES {
        return Err(format!("key has {} bytes; at most {MAX_KEY_BYTES}", task.key.len()));
    }
    if task.payload.len() > limits.max_payload_bytes {
        return Err(format!("payload has {} bytes; at most {}", task.payload.len(), limits.max_payload_bytes));
    }
    if task.key.is_empty() && task.payload.is_empty() {
        return Err("key and payload are both empty: nothing says what the task is".into());
    }
    let payload_encoding = encoding("payload", task.payload_encoding, &task.payload)?;
    headers(&task.headers, limits)?;
    let replicas = task.replicas.unwrap_or(settings.replicas);
    if replicas == 0 || replicas > limits.max_replicas {
        return Err(format!("replicas is {replicas}; must be 1 to {}", limits.max_replicas));
    }
    let max_attempts = task.max_attempts.unwrap_or(settings.max_attempts);
    if max_attempts == 0 || max_attempts > 1000 {
        return Err(format!("max_attempts is {max_attempts}; must be 1 to 1000"));
    }
    let priority = match pb::Priority::try_from(task.priority) {
        Ok(pb::Priority::Unspecified) => settings.priority,
        Ok(pb::Priority::High) => Priority::High,
        Ok(pb::Priority::Medium) => Priority::Medium,
        Ok(pb::Priority::Low) => Priority::Low,
        Err(_) => return Err(format!("priority {} is unknown; expected high, medium or low", task.priority)),
    };
    let lease = match task.lease_duration {
        None => settings.lease,
        Some(text) => positive("lease_duration", text)?,
    };
    if lease < Duration::from_millis(100) || lease > limits.max_lease {
        let max = humantime::format_duration(limits.max_lease);
        return Err(format!("lease_duration is {}; must be 100ms to {max}", humantime::format_duration(lease)));
    }
    let not_before_unix_ms = match (task.delay, task.not_before) {
        (Some(_), Some(_)) => return Err("delay and not_before are both given; use one".into()),
        (Some(delay), None) => now_unix_ms.saturating_add(ms(positive("delay", delay)?)),
        (None, Some(at)) => at.seconds.saturating_mul(1000).saturating_add(i64::from(at.nanos) / 1_000_000).max(0),
        (None, None) => 0,
    };
    let not_before_unix_ms = if not_before_unix_ms <= now_unix_ms { 0 } else { not_before_unix_ms };
    if not_before_unix_ms > LAST_UNIX_MS {
        return Err("delay or not_before is too far in the future: year 9999 is the last".into());
    }
    // The key and the payload may be parts of a body of megabytes. The row lives on when the request is answered, and
    // must not keep the body.
    let key = if task.key.is_empty() { payload_key(&task.payload) } else { Bytes::copy_from_slice(&task.key) };
    let traceparent = if task.traceparent.is_empty() { new_traceparent() } else { task.traceparent };
    if traceparent.len() > MAX_TRACEPARENT_BYTES {
        return Err(format!("traceparent has {} bytes; at most {MAX_TRACEPARENT_BYTES}", traceparent.len()));
    }
    if !is_traceparent(&traceparent) {
        return Err(format!(
            "traceparent {traceparent:?} is not of the W3C form 00-<32 hex>-<16 hex>-<2 hex> (lower case, not zero)"
        ));
    }
    let mut headers: Vec<_> = task.headers.into_iter().collect();
    headers.sort();
    let key_hash = KeyHash::new(&queue, &key);
    let row = TaskRow {
        id,
        partition: key_hash.partition(partitions),
        queue,
        key,
        key_hash,
        payload: Bytes::copy_from_slice(&task.payload),
        payload_encoding,
        replicas,
        priority,
        max_attempts,
        lease_ms: u32::try_from(lease.as_millis()).unwrap_or(u32::MAX),
        not_before_unix_ms,
        headers,
        traceparent,
        created_unix_ms: now_unix_ms,
    };
    if row.weight() > MAX_RECORD_BYTES {
        return Err(format!("the task has {} bytes with key and headers; at most {MAX_RECORD_BYTES}", row.weight()));
    }
    Ok(row)
}

/// Checks that a payload or a result (`what`) is of the kind that its sender says. An empty one may be of any.
pub fn encoding(what: &str, said: i32, bytes: &[u8]) -> Result<Encoding, String> {
    let utf8 =
        || std::str::from_utf8(bytes).map_err(|error| format!("it is not UTF-8 at byte {}", error.valid_up_to()));
    let json = || {
        let _: IgnoredAny = serde_json::from_str(utf8()?).map_err(|error| error.to_string())?;
        Ok(())
    };
    let not_what_is_said = |form: &str, why: String| format!("{what}_encoding is {form}, but {what} is not: {why}");
    match pb::Encoding::try_from(said) {
        Ok(pb::Encoding::Unspecified | pb::Encoding::Bytes) => Ok(Encoding::Bytes),
        Ok(pb::Encoding::Text) => utf8().map(|_| Encoding::Text).map_err(|why| not_what_is_said("TEXT", why)),
        Ok(pb::Encoding::Json) if bytes.is_empty() => Ok(Encoding::Json),
        Ok(pb::Encoding::Json) => json().map(|()| Encoding::Json).map_err(|why| not_what_is_said("JSON", why)),
        Err(_) => Err(format!("{what}_encoding {said} is unknown; expected BYTES, TEXT or JSON")),
    }
}

/// Workers pass them on, into places where lines and names have a meaning.
fn headers(headers: &HashMap<String, String>, limits: &Limits) -> Result<(), String> {
    let bytes: usize = headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    if bytes > limits.max_headers_bytes {
        return Err(format!("headers have {bytes} bytes; at most {}", limits.max_headers_bytes));
    }
    if headers.len() > MAX_HEADERS {
        return Err(format!("{} headers; at most {MAX_HEADERS}", headers.len()));
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

/// A protobuf duration that is not negative.
pub fn positive(what: &str, duration: prost_types::Duration) -> Result<Duration, String> {
    Duration::try_from(duration).map_err(|_| format!("{what} is negative or out of range"))
}

fn ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn payload_key(payload: &[u8]) -> Bytes {
    let hash = Sha256::digest(payload);
    hash.iter().map(|b| format!("{b:02x}")).collect::<String>().into()
}

fn new_traceparent() -> String {
    let trace = Uuid::new_v4().simple();
    let span = Uuid::new_v4().as_u64_pair().0 | 1;
    format!("00-{trace}-{span:016x}-01")
}

fn is_traceparent(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let hex =
        |part: &str, len: usize| part.len() == len && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let id = |part: &str, len: usize| hex(part, len) && part.bytes().any(|b| b != b'0');
    // Version 00 ends here; what comes behind in later ones is theirs. There is no ff.
    let ends = parts.len() == 4 || (parts.len() > 4 && parts[0] != "00");
    let is_text = text.bytes().all(|b| b.is_ascii_graphic());
    ends && is_text && hex(parts[0], 2) && parts[0] != "ff" && id(parts[1], 32) && id(parts[2], 16) && hex(parts[3], 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(task: pb::NewTask) -> Result<TaskRow, String> {
        task_row(task, TaskId::new(), &QueueSettings::default(), &Limits::default(), 4, 1_000_000)
    }

    fn task() -> pb::NewTask {
        pb::NewTask { queue: "q".into(), key: "k".into(), ..Default::default() }
    }

    #[test]
    fn a_row_keeps_nothing_of_the_body_that_its_task_came_in() {
        let body = Bytes::from(vec![b'x'; 1 << 20]);
        let task = pb::NewTask { key: body.slice(..1), payload: body.slice(1..3), ..task() };
        let row = row(task).unwrap();
        assert!(body.is_unique());
        assert_eq!((&row.key[..], &row.payload[..]), (&b"x"[..], &b"xx"[..]));
    }

    #[test]
    fn defaults_are_filled_in() {
        let row = row(task()).unwrap();
        assert_eq!((row.replicas, row.max_attempts, row.lease_ms, row.not_before_unix_ms), (1, 5, 30_000, 0));
        assert!(is_traceparent(&row.traceparent));
        assert!(row.partition < 4);
    }

    #[test]
    fn a_key_not_given_is_the_payloads_hash() {
        let row = row(pb::NewTask { key: Bytes::new(), payload: "abc".into(), ..task() }).unwrap();
        assert_eq!(row.key, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad".as_bytes());
    }

    #[test]
    fn the_whole_task_is_bounded_too() {
        let limits = Limits { max_payload_bytes: MAX_RECORD_BYTES, ..Default::default() };
        let row = |bytes: usize| {
            let task = pb::NewTask { payload: vec![0; bytes].into(), ..task() };
            task_row(task, TaskId::new(), &QueueSettings::default(), &limits, 4, 1_000_000)
        };
        assert!(row(MAX_RECORD_BYTES - 1000).is_ok());
        let error = row(MAX_RECORD_BYTES).unwrap_err();
        assert!(error.ends_with("bytes with key and headers; at most 8388608"), "{error}");
    }

    #[test]
    fn a_traceparent_of_a_later_version_may_be_longer() {
        let traceparent = format!("cc{}-more", &new_traceparent()[2..]);
        assert_eq!(row(pb::NewTask { traceparent: traceparent.clone(), ..task() }).unwrap().traceparent, traceparent);
    }

    #[test]
    fn a_payload_is_what_its_encoding_says() {
        use pb::Encoding::{Bytes, Json, Text, Unspecified};
        let encoded = |payload: &'static [u8], encoding: i32| {
            let task = pb::NewTask { payload: payload.into(), payload_encoding: encoding, ..task() };
            row(task).map(|row| row.payload_encoding)
        };
        let cases: [(&[u8], pb::Encoding, Encoding); 6] = [
            (b"\xff", Unspecified, Encoding::Bytes),
            (b"{}", Bytes, Encoding::Bytes),
            (b"\xc3\xa9", Text, Encoding::Text),
            (b" {\"a\": [1e999]} ", Json, Encoding::Json),
            (b"", Json, Encoding::Json),
            (b"", Text, Encoding::Text),
        ];
        for (payload, said, want) in cases {
            assert_eq!(encoded(payload, said.into()), Ok(want), "{payload:?} as {said:?}");
        }
        let wrong: [(&[u8], i32, &str); 4] = [
            (b"a\xff", Text.into(), "payload_encoding is TEXT, but payload is not: it is not UTF-8 at byte 1"),
            (b"\"\xff\"", Json.into(), "payload_encoding is JSON, but payload is not: it is not UTF-8 at byte 1"),
            (
                b"{} {}",
                Json.into(),
                "payload_encoding is JSON, but payload is not: trailing characters at line 1 column 4",
            ),
            (b"", 9, "payload_encoding 9 is unknown; expected BYTES, TEXT or JSON"),
        ];
        for (payload, said, why) in wrong {
            assert_eq!(encoded(payload, said), Err(why.into()));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let headers = |name: &str, value: &str| [(name.to_owned(), value.to_owned())].into();
        let at = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
        let trace = "0".repeat(31) + "1";
        let d = |seconds, nanos| Some(prost_types::Duration { seconds, nanos });
        let cases = [
            (pb::NewTask { queue: String::new(), ..task() }, "queue is missing"),
            (pb::NewTask { queue: "a b".into(), ..task() }, "contains ' '"),
            (pb::NewTask { queue: "a{b".into(), ..task() }, "contains '{'"),
            (pb::NewTask { queue: "é".into(), ..task() }, "contains 'é'"),
            (pb::NewTask { queue: "q".repeat(65), ..task() }, "65 characters"),
            (pb::NewTask { key: vec![b'k'; 4097].into(), ..task() }, "key has 4097 bytes"),
            (pb::NewTask { key: Bytes::new(), ..task() }, "both empty"),
            (pb::NewTask { payload: vec![0; (1 << 20) + 1].into(), ..task() }, "payload has 1048577 bytes"),
            (pb::NewTask { replicas: Some(0), ..task() }, "replicas is 0"),
            (pb::NewTask { replicas: Some(101), ..task() }, "replicas is 101"),
            (pb::NewTask { max_attempts: Some(0), ..task() }, "max_attempts is 0"),
            (pb::NewTask { priority: 9, ..task() }, "priority 9 is unknown"),
            (pb::NewTask { lease_duration: d(0, 0), ..task() }, "lease_duration is 0s"),
            (pb::NewTask { lease_duration: d(-1, 0), ..task() }, "lease_duration is negative"),
            (pb::NewTask { delay: d(1, 0), not_before: Some(Default::default()), ..task() }, "both given"),
            (pb::NewTask { delay: d(253_402_300_800, 0), ..task() }, "year 9999 is the last"),
            (pb::NewTask { not_before: at(253_402_300_800), ..task() }, "year 9999 is the last"),
            (pb::NewTask { not_before: at(i64::MAX), ..task() }, "year 9999 is the last"),
            (pb::NewTask { queue: "\u{1}".repeat(1 << 18), ..task() }, "queue name has 262144 characters; at most 64"),
            (pb::NewTask { headers: headers("", "v"), ..task() }, "a header has an empty name"),
            (pb::NewTask { headers: headers("a\r\nX: y", ""), ..task() }, "header \"a\\r\\nX: y\" contains a control"),
            (pb::NewTask { headers: headers("a", "\0"), ..task() }, "header \"a\" contains a control character"),
            (
                pb::NewTask { headers: (0..1001).map(|n| (n.to_string(), "".into())).collect(), ..task() },
                "1001 headers",
            ),
            (pb::NewTask { traceparent: "x".into(), ..task() }, "W3C"),
            (pb::NewTask { traceparent: format!("00-{}-{}-01", "0".repeat(32), "1".repeat(16)), ..task() }, "W3C"),
            (pb::NewTask { traceparent: format!("00-{trace}-{}-01", "0".repeat(16)), ..task() }, "W3C"),
            (pb::NewTask { traceparent: format!("ff-{trace}-{}-01", "1".repeat(16)), ..task() }, "W3C"),
            (pb::NewTask { traceparent: format!("00-{trace}-{}-01", "A".repeat(16)), ..task() }, "W3C"),
            (pb::NewTask { traceparent: format!("01-{trace}-{}-01-\u{1b}\n", "1".repeat(16)), ..task() }, "W3C"),
            (pb::NewTask { traceparent: format!("{}-x", new_traceparent()), ..task() }, "W3C"),
            (
                pb::NewTask { traceparent: format!("cc{}-{}", &new_traceparent()[2..], "x".repeat(201)), ..task() },
                "257 bytes",
            ),
        ];
        for (task, want) in cases {
            let error = row(task).unwrap_err();
            assert!(error.contains(want), "{error:?} should say {want:?}");
        }
    }
}
