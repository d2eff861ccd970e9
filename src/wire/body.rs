//! Bodies: what the queue keeps of a task for its worker.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

use super::{backoff, pb};
use crate::model::{Encoding, Priority, TaskBody, TaskId, TaskRow, TraceContext};

/// Bytes before the encoded [`pb::TaskBody`] in Redis, which Lua reads with `struct.unpack('>BI4I4', …)`:
/// priority, max_attempts, lease in milliseconds. A backoff follows as the first field of the body.
const HEAD: usize = 9;

/// NUM and priority as a body has them. Those of most tasks take no byte.
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
        // `backoff::put_before` has it.
        backoff: Bytes::new(),
    }
}

pub(super) fn encoded_body(row: &TaskRow, traceparent: &str) -> Vec<u8> {
    let first_due_unix_ms = row.created_unix_ms.max(row.not_before_unix_ms);
    backoff::put_before(&body(row, traceparent), row.backoff, first_due_unix_ms)
}

/// The bytes that Redis keeps of a task until it is final.
pub fn body_blob(record: &pb::PipelineRecord) -> Bytes {
    blob(record.priority, record.max_attempts, record.lease_ms, &record.body)
}

/// The bytes that Redis keeps of a task that was never on the bus.
pub fn blob_of_row(row: &TaskRow) -> Bytes {
    let body = encoded_body(row, &row.traceparent);
    blob(pb::Priority::from(row.priority).into(), row.max_attempts, row.lease_ms, &body)
}

fn blob(priority: i32, max_attempts: u32, lease_ms: u32, body: &[u8]) -> Bytes {
    let mut blob = BytesMut::with_capacity(HEAD + body.len());
    blob.put_u8(priority as u8);
    blob.put_u32(max_attempts);
    blob.put_u32(lease_ms);
    blob.put_slice(body);
    blob.freeze()
}

/// Bytes that give the bytes of [`body_blob`] other values for the worker: of a field that comes twice the last counts.
pub fn body_values(replicas: u32, priority: Priority) -> Bytes {
    let priority = pb::Priority::from(priority).into();
    pb::TaskBody { replicas, priority, ..Default::default() }.encode_to_vec().into()
}

/// The bytes of [`body_blob`] with another priority and NUM.
pub fn with_body_values(blob: &Bytes, replicas: u32, priority: Priority) -> Bytes {
    let mut changed = BytesMut::with_capacity(blob.len() + 8);
    changed.put_u8(priority as u8);
    changed.put_slice(&blob[1.min(blob.len())..]);
    changed.put_slice(&body_values(replicas, priority));
    changed.freeze()
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
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn num_and_priority_of_most_tasks_take_no_byte_of_a_body() {
        for (num, of, bytes) in [(1, Priority::Medium, 0), (1, Priority::High, 2), (3, Priority::Low, 4)] {
            let (replicas, priority) = in_body(num, of);
            let body = pb::TaskBody { replicas, priority, ..Default::default() }.encode_to_vec();
            assert_eq!(body.len(), bytes);
            let blob = body_blob(&pb::PipelineRecord { body: body.into(), ..Default::default() });
            let read = read_body(TaskId::new(), &blob).unwrap();
            assert_eq!((read.replicas, read.priority), (num, of));
        }
    }

    #[test]
    fn a_body_gets_other_values() {
        let record = pb::PipelineRecord {
            priority: 3,
            body: pb::TaskBody { key: "k".into(), replicas: 1, priority: 3, ..Default::default() }
                .encode_to_vec()
                .into(),
            ..Default::default()
        };
        let changed = with_body_values(&body_blob(&record), 7, Priority::High);
        let body = read_body(TaskId::new(), &changed).unwrap();
        assert_eq!((changed[0], body.replicas, body.priority, &body.key[..]), (1, 7, Priority::High, &b"k"[..]));
    }
}
