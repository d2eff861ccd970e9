//! From what a user sent to a [`TaskRow`], or one line that says what is wrong with it.

use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::{KeyHash, MAX_RECORD_BYTES, Priority, QueueName, TaskId, TaskRow};
use crate::{
    config::{Limits, QueueSettings},
    pb,
};

/// A key of at most so many bytes: InnoDB could index no more, and who needs more has a payload.
pub const MAX_KEY_BYTES: usize = 4096;

/// W3C allows versions above 00 to be longer, without a bound.
const MAX_TRACEPARENT_BYTES: usize = 256;

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
    let headers_bytes: usize = task.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    if headers_bytes > limits.max_headers_bytes {
        return Err(format!("headers have {headers_bytes} bytes; at most {}", limits.max_headers_bytes));
    }
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
    // 2^53: Redis's scripts count in doubles.
    if not_before_unix_ms > (1 << 53) {
        return Err("not_before is too far in the future".into());
    }
    let key = if task.key.is_empty() { payload_key(&task.payload) } else { task.key };
    let traceparent = if task.traceparent.is_empty() { new_traceparent() } else { task.traceparent };
    if traceparent.len() > MAX_TRACEPARENT_BYTES {
        return Err(format!("traceparent has {} bytes; at most {MAX_TRACEPARENT_BYTES}", traceparent.len()));
    }
    if !is_traceparent(&traceparent) {
        return Err(format!("traceparent {traceparent:?} is not of the W3C form 00-<32 hex>-<16 hex>-<2 hex>"));
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
        payload: task.payload,
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
    let hex = |part: &str, len: usize| part.len() == len && part.bytes().all(|b| b.is_ascii_hexdigit());
    // Version 00 ends here; what comes behind in later ones is theirs.
    let ends = parts.len() == 4 || (parts.len() > 4 && parts[0] != "00");
    ends && hex(parts[0], 2) && hex(parts[1], 32) && hex(parts[2], 16) && hex(parts[3], 2)
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
    fn what_is_wrong_is_named() {
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
            (pb::NewTask { traceparent: "x".into(), ..task() }, "W3C"),
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
