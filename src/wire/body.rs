//! Bodies: what the queue stores of a task for its worker.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

use super::{backoff, pb};
use crate::model::{
    Encoding, LIMIT_HASH_BYTES, LimitHash, Priority, TaskBody, TaskId, TaskRow, TraceContext,
    limit_hash,
};

/// Bytes before the encoded [`pb::TaskBody`] in Redis, which Lua reads with
/// `struct.unpack('>BI4I4', …)`: priority, max_attempts, lease in milliseconds. The limit key and the
/// backoff follow as the first fields of the body.
const HEAD: usize = 9;
/// The protobuf key of the backoff, and the size of the whole field in bytes.
const BACKOFF_KEY: u8 = (15 << 3) | 2;
const BACKOFF_FIELD: usize = 20;
/// The key of the field of the limit key.
const LIMIT_KEY: u8 = (14 << 3) | 2;
/// The protobuf key of the deadline: field 16, eight bytes long.
const DEADLINE_KEY: &[u8] = &[0x81, 0x01];

/// NUM and priority as a body stores them. Most tasks have the defaults, which take no byte.
fn in_body(replicas: u32, priority: Priority) -> (u32, i32) {
    let priority = match priority {
        Priority::Medium => pb::Priority::Unspecified,
        other => other.into(),
    };
    (if replicas == 1 { 0 } else { replicas }, priority.into())
}

/// The body of a task, for its worker.
fn body(row: &TaskRow, traceparent: &str) -> pb::TaskBody {
    let (replicas, priority) = in_body(row.replicas, row.priority);
    pb::TaskBody {
        key: row.key.clone(),
        payload: row.payload.clone(),
        payload_encoding: pb::Encoding::from(row.payload_encoding).into(),
        headers: row.headers.iter().cloned().collect(),
        traceparent: traceparent.to_owned(),
        replicas,
        priority,
        // `backoff::put_before` adds these two.
        backoff: Bytes::new(),
        deadline_unix_ms: 0,
        // `encoded_body` has it.
        limit: Bytes::new(),
    }
}

pub(super) fn encoded_body(row: &TaskRow, traceparent: &str) -> Vec<u8> {
    let first_due_unix_ms = row.created_unix_ms.max(row.not_before_unix_ms);
    let rest = backoff::put_before(
        &body(row, traceparent),
        row.backoff,
        first_due_unix_ms,
        row.deadline_unix_ms,
    );
    if row.limit_key.is_empty() {
        return rest;
    }
    let hash = limit_hash(&row.queue, &row.limit_key);
    let first = pb::TaskBody {
        limit: [&hash[..], row.limit_key.as_bytes()].concat().into(),
        ..Default::default()
    };
    [first.encode_to_vec(), rest].concat()
}

/// The place behind the head and the field of the limit key in the bytes of [`body_blob`], and that
/// field's value.
fn limit_in(blob: &[u8]) -> Option<(usize, &[u8])> {
    if *blob.get(HEAD)? != LIMIT_KEY {
        return None;
    }
    let mut rest = blob.get(HEAD + 1..)?;
    let length = usize::try_from(prost::encoding::decode_varint(&mut rest).ok()?).ok()?;
    let end = (blob.len() - rest.len()).checked_add(length)?;
    Some((end, rest.get(..length)?))
}

/// True if the bytes of [`body_blob`] are of a task with a limit key.
pub fn is_limited(blob: &[u8]) -> bool {
    limit_hash_in(blob).is_some()
}

/// The hash of the limit key in the bytes of [`body_blob`], if the task has one.
pub fn limit_hash_in(blob: &[u8]) -> Option<LimitHash> {
    let (_, limit) = limit_in(blob)?;
    limit.get(..LIMIT_HASH_BYTES)?.try_into().ok()
}

/// The bytes that Redis keeps of a task until it is final.
pub fn body_blob(record: &pb::PipelineRecord) -> Bytes {
    blob(
        record.priority,
        record.max_attempts,
        record.lease_ms,
        &record.body,
    )
}

/// The bytes that Redis keeps of a task that was never on the bus.
pub fn blob_of_row(row: &TaskRow) -> Bytes {
    let body = encoded_body(row, &row.traceparent);
    blob(
        pb::Priority::from(row.priority).into(),
        row.max_attempts,
        row.lease_ms,
        &body,
    )
}

fn blob(priority: i32, max_attempts: u32, lease_ms: u32, body: &[u8]) -> Bytes {
    let mut blob = BytesMut::with_capacity(HEAD + body.len());
    blob.put_u8(priority as u8);
    blob.put_u32(max_attempts);
    blob.put_u32(lease_ms);
    blob.put_slice(body);
    blob.freeze()
}

/// Returns bytes that, appended to those of [`body_blob`], change NUM and priority for the worker:
/// if a field occurs twice, the last one counts.
pub fn body_values(replicas: u32, priority: Priority) -> Bytes {
    let priority = pb::Priority::from(priority).into();
    pb::TaskBody {
        replicas,
        priority,
        ..Default::default()
    }
    .encode_to_vec()
    .into()
}

/// The bytes of [`body_blob`] with another priority and NUM.
pub fn with_body_values(blob: &Bytes, replicas: u32, priority: Priority) -> Bytes {
    let mut changed = BytesMut::with_capacity(blob.len() + 8);
    changed.put_u8(priority as u8);
    changed.put_slice(&blob[1.min(blob.len())..]);
    changed.put_slice(&body_values(replicas, priority));
    changed.freeze()
}

/// The place of the deadline in the bytes of [`body_blob`]: it stands behind the head, the limit
/// key and the backoff, whichever of them there are.
fn deadline_at(blob: &[u8]) -> Option<usize> {
    let first = limit_in(blob).map_or(HEAD, |(end, _)| end);
    let at = match blob.get(first) {
        Some(&BACKOFF_KEY) => first + BACKOFF_FIELD,
        _ => first,
    };
    (blob.get(at..at + DEADLINE_KEY.len())? == DEADLINE_KEY).then_some(at)
}

/// Reads the deadline in the bytes of [`body_blob`], without decoding the rest: each claim does
/// this for each of its tasks.
pub fn deadline_of(blob: &[u8]) -> Option<i64> {
    let at = deadline_at(blob)? + DEADLINE_KEY.len();
    let bytes = blob.get(at..at + size_of::<i64>())?;
    Some(i64::from_le_bytes(bytes.try_into().ok()?))
}

/// Removes the deadline from the bytes of [`body_blob`]: a task that is sent again has none.
pub fn without_deadline(blob: &Bytes) -> Bytes {
    let Some(at) = deadline_at(blob) else {
        return blob.clone();
    };
    let behind = (at + DEADLINE_KEY.len() + size_of::<i64>()).min(blob.len());
    [&blob[..at], &blob[behind..]].concat().into()
}

/// Reads the bytes of [`body_blob`] of a task, for the answer to a claim.
pub fn read_body(id: TaskId, blob: &Bytes) -> Result<TaskBody, prost::DecodeError> {
    let body = pb::TaskBody::decode(blob.slice(HEAD.min(blob.len())..))?;
    Ok(TaskBody {
        key: body.key,
        payload: body.payload,
        payload_encoding: Encoding::from_number(body.payload_encoding.into()),
        headers: body.headers,
        traceparent: match body.traceparent.as_str() {
            "" => TraceContext::of_id(id.as_bytes()).to_string(),
            _ => body.traceparent,
        },
        replicas: body.replicas.max(1),
        priority: Priority::from_number(body.priority.into()),
        limit_key: match body.limit.get(LIMIT_HASH_BYTES..) {
            Some(key) => String::from_utf8_lossy(key).into_owned(),
            None => String::new(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Backoff, BackoffKind};

    #[test]
    fn num_and_priority_of_most_tasks_take_no_byte_of_a_body() {
        for (num, of, bytes) in [
            (1, Priority::Medium, 0),
            (1, Priority::High, 2),
            (3, Priority::Low, 4),
        ] {
            let (replicas, priority) = in_body(num, of);
            let body = pb::TaskBody {
                replicas,
                priority,
                ..Default::default()
            }
            .encode_to_vec();
            assert_eq!(body.len(), bytes);
            let blob = body_blob(&pb::PipelineRecord {
                body: body.into(),
                ..Default::default()
            });
            let read = read_body(TaskId::new(), &blob).unwrap();
            assert_eq!((read.replicas, read.priority), (num, of));
        }
    }

    #[test]
    fn a_deadline_is_found_in_a_body_and_taken_out_of_it() {
        let body = pb::TaskBody {
            key: "k".into(),
            payload: vec![7; 300].into(),
            replicas: 3,
            ..Default::default()
        };
        let backoff = Backoff {
            kind: BackoffKind::Linear,
            initial_ms: 1_000,
            maximum_ms: 2_000,
            jitter_percent: 50,
            give_up_after_ms: 0,
        };
        for backoff in [None, Some(backoff)] {
            let blob_with =
                |deadline| blob(1, 2, 3, &backoff::put_before(&body, backoff, 0, deadline));
            let with = blob_with(1_700_000_000_123);
            assert_eq!(deadline_of(&with), Some(1_700_000_000_123));
            assert_eq!(deadline_of(&blob_with(0)), None);
            assert_eq!(without_deadline(&with), blob_with(0));
            assert_eq!(without_deadline(&blob_with(0)), blob_with(0));
            let changed = with_body_values(&with, 5, Priority::Low);
            assert_eq!(deadline_of(&changed), Some(1_700_000_000_123));
            assert_eq!(read_body(TaskId::new(), &changed).unwrap().replicas, 5);
            for length in 0..with.len() {
                let cut = with.slice(..length);
                assert!(deadline_of(&cut).is_none_or(|at| at == 1_700_000_000_123));
                assert!(without_deadline(&cut).len() <= length);
            }
        }
    }

    #[test]
    fn a_body_gets_other_values() {
        let record = pb::PipelineRecord {
            priority: 3,
            body: pb::TaskBody {
                key: "k".into(),
                replicas: 1,
                priority: 3,
                ..Default::default()
            }
            .encode_to_vec()
            .into(),
            ..Default::default()
        };
        let changed = with_body_values(&body_blob(&record), 7, Priority::High);
        let body = read_body(TaskId::new(), &changed).unwrap();
        assert_eq!(
            (changed[0], body.replicas, body.priority, &body.key[..]),
            (1, 7, Priority::High, &b"k"[..])
        );
    }
}
