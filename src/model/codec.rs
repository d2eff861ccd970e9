//! Task rows as the messages that travel on the bus and stand in the queue.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

use super::TaskRow;
use crate::wire::pb;

/// What the worker will be handed.
pub fn body(row: &TaskRow) -> pb::TaskBody {
    pb::TaskBody {
        key: row.key.clone(),
        payload: row.payload.clone(),
        payload_encoding: row.payload_encoding.to_pb().into(),
        headers: row.headers.iter().cloned().collect(),
        traceparent: row.traceparent.clone(),
        replicas: row.replicas,
        priority: row.priority.to_pb().into(),
    }
}

/// The task as an insert takes it, with every default filled in.
pub fn new_task(row: &TaskRow) -> pb::NewTask {
    let lease = Duration::from_millis(row.lease_ms.into());
    pb::NewTask {
        queue: row.queue.as_str().to_owned(),
        key: row.key.clone(),
        payload: row.payload.clone(),
        payload_encoding: row.payload_encoding.to_pb().into(),
        replicas: Some(row.replicas),
        priority: row.priority.to_pb().into(),
        delay: None,
        not_before: (row.not_before_unix_ms > 0).then(|| super::timestamp(row.not_before_unix_ms)),
        lease_duration: prost_types::Duration::try_from(lease).ok(),
        max_attempts: Some(row.max_attempts),
        headers: row.headers.iter().cloned().collect(),
        traceparent: row.traceparent.clone(),
    }
}

/// The record of topic `pipeline`.
pub fn pipeline_record(row: &TaskRow, again: bool, published_unix_ms: i64) -> pb::PipelineRecord {
    pb::PipelineRecord {
        id: Bytes::copy_from_slice(row.id.as_bytes()),
        queue: row.queue.as_str().to_owned(),
        again,
        published_unix_ms,
        replicas: row.replicas,
        priority: row.priority.to_pb().into(),
        max_attempts: row.max_attempts,
        lease_ms: row.lease_ms,
        not_before_unix_ms: row.not_before_unix_ms,
        body: body(row).encode_to_vec().into(),
    }
}

/// Bytes before the encoded [`pb::TaskBody`] in Redis, which Lua reads with `struct.unpack('>BI4I4', …)`:
/// priority, max_attempts, lease in milliseconds.
const HEAD: usize = 9;

/// What Redis keeps of a task until it is final.
pub fn body_blob(record: &pb::PipelineRecord) -> Bytes {
    let mut blob = BytesMut::with_capacity(HEAD + record.body.len());
    blob.put_u8(record.priority as u8);
    blob.put_u32(record.max_attempts);
    blob.put_u32(record.lease_ms);
    blob.put_slice(&record.body);
    blob.freeze()
}

/// The other way, for the claim's answer.
pub fn decode_body_blob(blob: &Bytes) -> Result<pb::TaskBody, prost::DecodeError> {
    pb::TaskBody::decode(blob.slice(HEAD.min(blob.len())..))
}
