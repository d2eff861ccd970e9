//! Records of the bus, and the bodies that the queue keeps for workers.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

use super::pb;
use crate::model::{Completed, Died, Encoding, Expiration, Failure, Priority, ShardId, TaskBody, TaskId, TaskRow};

fn id_bytes(id: TaskId) -> Bytes {
    Bytes::copy_from_slice(id.as_bytes())
}

/// The body of a task, for its worker.
pub fn body(row: &TaskRow) -> pb::TaskBody {
    pb::TaskBody {
        key: row.key.clone(),
        payload: row.payload.clone(),
        payload_encoding: pb::Encoding::from(row.payload_encoding).into(),
        headers: row.headers.iter().cloned().collect(),
        traceparent: row.traceparent.clone(),
        replicas: row.replicas,
        priority: pb::Priority::from(row.priority).into(),
    }
}

/// The record of topic `pipeline`.
pub fn pipeline_record(row: &TaskRow, again: bool, published_unix_ms: i64) -> pb::PipelineRecord {
    pb::PipelineRecord {
        id: id_bytes(row.id),
        queue: row.queue.as_str().to_owned(),
        again,
        published_unix_ms,
        replicas: row.replicas,
        priority: pb::Priority::from(row.priority).into(),
        max_attempts: row.max_attempts,
        lease_ms: row.lease_ms,
        not_before_unix_ms: row.not_before_unix_ms,
        body: body(row).encode_to_vec().into(),
    }
}

/// Bytes before the encoded [`pb::TaskBody`] in Redis, which Lua reads with `struct.unpack('>BI4I4', …)`:
/// priority, max_attempts, lease in milliseconds.
const HEAD: usize = 9;

/// The bytes that Redis keeps of a task until it is final.
pub fn body_blob(record: &pb::PipelineRecord) -> Bytes {
    let mut blob = BytesMut::with_capacity(HEAD + record.body.len());
    blob.put_u8(record.priority as u8);
    blob.put_u32(record.max_attempts);
    blob.put_u32(record.lease_ms);
    blob.put_slice(&record.body);
    blob.freeze()
}

/// Reads what [`body_blob`] wrote, for the answer to a claim.
pub fn read_body(blob: &Bytes) -> Result<TaskBody, prost::DecodeError> {
    let body = pb::TaskBody::decode(blob.slice(HEAD.min(blob.len())..))?;
    Ok(TaskBody {
        key: body.key,
        payload: body.payload,
        payload_encoding: Encoding::from_number(body.payload_encoding.into()),
        headers: body.headers,
        traceparent: body.traceparent,
        replicas: body.replicas,
        priority: Priority::from_number(body.priority.into()),
    })
}

/// The report of a completion, without its time; `Err` with its bytes where they are more than `max`.
pub fn completed_report(id: TaskId, completed: Completed, max: usize) -> Result<Bytes, usize> {
    let done = pb::Completed {
        worker: completed.worker,
        result: completed.result,
        result_encoding: pb::Encoding::from(completed.result_encoding).into(),
        discovered: completed.discovered.into_iter().map(Into::into).collect(),
        attempt: completed.attempt,
        generation: completed.lease.generation,
        grant: completed.lease.grant,
    };
    let bytes = done.encoded_len();
    if bytes > max {
        return Err(bytes);
    }
    let what = Some(pb::report::What::Completed(done));
    Ok(pb::Report { task_id: id_bytes(id), what, at_unix_ms: 0 }.encode_to_vec().into())
}

/// The report of a death.
pub fn died_report(id: TaskId, died: Died, at_unix_ms: i64) -> Bytes {
    let history = died.history.into_iter().map(Into::into).collect();
    let died = pb::Died { reason: died.reason, attempts: died.attempts, history };
    let what = Some(pb::report::What::Died(died));
    pb::Report { task_id: id_bytes(id), what, at_unix_ms }.encode_to_vec().into()
}

impl From<Failure> for pb::Failure {
    fn from(failure: Failure) -> Self {
        Self { at_unix_ms: failure.at_unix_ms, worker: failure.worker, reason: failure.reason }
    }
}

/// The report with its time. An encoded message may be extended by appending a field.
pub fn with_time(report: &Bytes, at_unix_ms: i64) -> Bytes {
    let tail = pb::Report { at_unix_ms, ..Default::default() };
    let mut whole = BytesMut::with_capacity(report.len() + tail.encoded_len());
    whole.put_slice(report);
    whole.put_slice(&tail.encode_to_vec());
    whole.freeze()
}

/// The record of topic `task-results` with encoded reports of one shard.
pub fn report_batch(shard: &ShardId, reports: Vec<Bytes>) -> Bytes {
    let queue = shard.queue.as_str().to_owned();
    pb::EncodedReportBatch { queue, shard: shard.number, reports }.encode_to_vec().into()
}

/// The record of topic `expirations`.
pub fn expiration(expiration: Expiration) -> Bytes {
    let record = pb::Expiration {
        task_id: id_bytes(expiration.id),
        queue: expiration.queue,
        worker: expiration.worker,
        attempts: expiration.attempts,
        dead: expiration.dead,
        at_unix_ms: expiration.at_unix_ms,
    };
    record.encode_to_vec().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_added_without_decoding() {
        let done = pb::Completed { worker: "w".into(), ..Default::default() };
        let what = Some(pb::report::What::Completed(done));
        let report = pb::Report { task_id: Bytes::from_static(&[7; 16]), what, at_unix_ms: 0 };
        let whole = pb::Report::decode(with_time(&report.encode_to_vec().into(), 42)).unwrap();
        assert_eq!(whole, pb::Report { at_unix_ms: 42, ..report });
    }
}
