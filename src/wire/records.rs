//! Records of the bus.

use bytes::{BufMut, Bytes};
use prost::Message;

use super::{
    body::{body_blob, encoded_body},
    call::{discovered_task, of_discovered, with_values},
    history::read_failure,
    joins, pb,
};
use crate::model::{
    Completed, DeadLetter, Died, Encoding, Expiration, FailedAttempt, Failure, LeaseNumber,
    MAX_REPLICAS, PipelineTask, QueueName, Report, ShardId, TaskId, TaskRow, TraceContext, What,
};

fn id_bytes(id: TaskId) -> Bytes {
    Bytes::copy_from_slice(id.as_bytes())
}

/// Encodes a record of topic `pipeline`. `published` is the span of its publication, if there is
/// one: the parent of the next span.
pub fn pipeline_record(
    row: &TaskRow,
    published: Option<TraceContext>,
    again: bool,
    published_unix_ms: i64,
) -> Bytes {
    let published = published.map(|published| published.to_string());
    let traceparent = published.as_deref().unwrap_or(&row.traceparent);
    let record = pb::PipelineRecord {
        id: id_bytes(row.id),
        queue: row.queue.as_str().to_owned(),
        again,
        published_unix_ms,
        replicas: row.replicas,
        priority: pb::Priority::from(row.priority).into(),
        max_attempts: row.max_attempts,
        lease_ms: row.lease_ms,
        not_before_unix_ms: row.not_before_unix_ms,
        body: encoded_body(row, traceparent).into(),
        traceparent: TraceContext::sampled(traceparent)
            .map(|_| traceparent.to_owned())
            .unwrap_or_default(),
    };
    record.encode_to_vec().into()
}

/// Reads a record of `pipeline`; an error says why no script could enqueue it.
pub fn read_pipeline_record(value: &Bytes) -> Result<PipelineTask, String> {
    let record = pb::PipelineRecord::decode(value.clone()).map_err(|e| e.to_string())?;
    let id = TaskId::from_slice(&record.id).ok_or("the id has not 16 bytes")?;
    let queue = QueueName::new(&record.queue).map_err(|e| e.to_string())?;
    // Compared with the widest bounds, not with this process's settings, which may have been wider
    // when the task was stored.
    if record.replicas == 0 || record.replicas > MAX_REPLICAS {
        return Err(format!(
            "replicas is {}; must be 1 to {MAX_REPLICAS}",
            record.replicas
        ));
    }
    // Otherwise no worker could get the task.
    pb::TaskBody::decode(record.body.clone())
        .map_err(|e| format!("the body cannot be read: {e}"))?;
    // The scripts make a key of the priority.
    if !(1..=3).contains(&record.priority) {
        return Err(format!("priority is {}; must be 1 to 3", record.priority));
    }
    if record.max_attempts == 0 || record.lease_ms == 0 {
        return Err(format!(
            "max_attempts is {}, lease_ms {}; must be 1 or more",
            record.max_attempts, record.lease_ms
        ));
    }
    Ok(PipelineTask {
        id,
        queue,
        again: record.again,
        published_unix_ms: record.published_unix_ms,
        replicas: record.replicas,
        not_before_unix_ms: record.not_before_unix_ms,
        body: body_blob(&record),
        traceparent: record.traceparent,
    })
}

/// Encodes the report of a completion, without its time. Returns its size as `Err` if that is above
/// `max` bytes.
pub fn completed_report(id: TaskId, completed: Completed, max: usize) -> Result<Bytes, usize> {
    let mut done = pb::Completed {
        worker: completed.worker,
        result: completed.result,
        result_encoding: pb::Encoding::from(completed.result_encoding).into(),
        discovered: completed
            .discovered
            .into_iter()
            .map(of_discovered)
            .collect(),
        attempt: completed.attempt,
        generation: completed.lease.generation,
        grant: completed.lease.grant,
        leased_unix_ms: completed.leased_unix_ms,
        traceparent: completed.traceparent,
        ..Default::default()
    };
    joins::write(completed.joining, &mut done);
    let bytes = done.encoded_len();
    if bytes > max {
        return Err(bytes);
    }
    let what = Some(pb::report::What::Completed(done));
    Ok(pb::Report {
        task_id: id_bytes(id),
        what,
        at_unix_ms: 0,
    }
    .encode_to_vec()
    .into())
}

/// Encodes the report of a death.
pub fn died_report(id: TaskId, died: Died, at_unix_ms: i64) -> Bytes {
    let history = died.history.into_iter().map(Into::into).collect();
    let died = pb::Died {
        reason: died.reason,
        attempts: died.attempts,
        history,
        epoch: died.epoch,
    };
    let what = Some(pb::report::What::Died(died));
    pb::Report {
        task_id: id_bytes(id),
        what,
        at_unix_ms,
    }
    .encode_to_vec()
    .into()
}

impl From<Failure> for pb::Failure {
    fn from(failure: Failure) -> Self {
        Self {
            at_unix_ms: failure.at_unix_ms,
            worker: failure.worker,
            reason: failure.reason,
        }
    }
}

/// Adds the time to an encoded report, by appending the field.
pub fn with_time(report: &Bytes, at_unix_ms: i64) -> Bytes {
    let tail = pb::Report {
        at_unix_ms,
        ..Default::default()
    };
    let mut whole = Vec::with_capacity(report.len() + tail.encoded_len());
    whole.put_slice(report);
    tail.encode(&mut whole).expect("a vector has room");
    whole.into()
}

/// The number of the field `reports` in `ReportBatch`.
const REPORTS: u32 = 3;

/// Appends an encoded report to `frames` as a field of [`report_batch`]'s record. Such frames can
/// be concatenated, and are then a part of that record. Returns the number of bytes appended.
pub fn frame_report(report: &Bytes, frames: &mut Vec<u8>) -> usize {
    let before = frames.len();
    prost::encoding::bytes::encode(REPORTS, report, frames);
    frames.len() - before
}

/// Reads the reports of [`frame_report`], and the failed attempts among them.
pub fn framed_reports(frames: Bytes) -> Result<(Vec<Bytes>, Vec<Bytes>), String> {
    let batch = pb::EncodedReportBatch::decode(frames).map_err(|error| error.to_string())?;
    Ok((batch.reports, batch.failures))
}

/// Encodes a record of topic `task-results` with these encoded reports and failed attempts. If they
/// are of one shard, `of` names it.
pub fn report_batch(of: Option<&ShardId>, reports: Vec<Bytes>, failures: Vec<Bytes>) -> Bytes {
    let (queue, shard) = of
        .map(|of| (of.queue.as_str().to_owned(), of.number))
        .unwrap_or_default();
    pb::EncodedReportBatch {
        queue,
        shard,
        reports,
        failures,
    }
    .encode_to_vec()
    .into()
}

/// The reports and the failed attempts in a record of topic `task-results`.
#[derive(Default)]
pub struct Reports {
    /// One result per report, so that the others can be read if one cannot.
    pub reports: Vec<Result<Report, String>>,
    pub failures: Vec<FailedAttempt>,
}

/// Reads a record of topic `task-results`.
pub fn read_reports(value: &Bytes) -> Result<Reports, String> {
    let batch = pb::ReportBatch::decode(value.clone()).map_err(|error| error.to_string())?;
    let failures = batch
        .failures
        .into_iter()
        .filter_map(read_failure)
        .collect();
    Ok(Reports {
        reports: batch.reports.into_iter().map(report).collect(),
        failures,
    })
}

fn report(report: pb::Report) -> Result<Report, String> {
    let id =
        TaskId::from_slice(&report.task_id).ok_or("a report whose task_id has not 16 bytes")?;
    let what = match report.what {
        Some(pb::report::What::Completed(mut done)) => What::Completed(Completed {
            joining: joins::read(&mut done)?,
            worker: done.worker,
            result: done.result,
            result_encoding: Encoding::from_number(done.result_encoding.into()),
            discovered: done.discovered.into_iter().map(discovered_task).collect(),
            attempt: done.attempt,
            lease: LeaseNumber {
                generation: done.generation,
                grant: done.grant,
            },
            leased_unix_ms: done.leased_unix_ms,
            traceparent: done.traceparent,
        }),
        Some(pb::report::What::Died(died)) => What::Died(Died {
            reason: died.reason,
            attempts: died.attempts,
            history: died.history.into_iter().map(Into::into).collect(),
            epoch: died.epoch,
        }),
        None => return Err("a report of a kind that this version does not know".into()),
    };
    Ok(Report {
        id,
        at_unix_ms: report.at_unix_ms,
        what,
    })
}

impl From<pb::Failure> for Failure {
    fn from(failure: pb::Failure) -> Self {
        Self {
            at_unix_ms: failure.at_unix_ms,
            worker: failure.worker,
            reason: failure.reason,
        }
    }
}

/// Returns the record with only one of its reports, or unchanged if it cannot be read.
pub fn one_report(value: &Bytes, index: usize) -> Bytes {
    let Ok(mut batch) = pb::EncodedReportBatch::decode(value.clone()) else {
        return value.clone();
    };
    batch.reports = batch.reports.get(index).cloned().into_iter().collect();
    batch.failures.clear();
    batch.encode_to_vec().into()
}

/// Encodes a record of topic `dead-letters`.
pub fn dead_letter(letter: &DeadLetter) -> Bytes {
    let letter = letter.clone();
    let without_key = letter.task.as_ref().and_then(|task| task.id);
    let task = letter.task.map(|task| match letter.values {
        Some(values) => with_values(task, values),
        None => task.into(),
    });
    let record = pb::DeadLetter {
        reason: letter.reason,
        at_unix_ms: letter.at_unix_ms,
        task_id: letter.task_id.map(id_bytes).unwrap_or_default(),
        queue: letter.queue,
        attempts: letter.attempts,
        topic: letter.topic,
        partition: letter.partition,
        offset: letter.offset,
        value: letter.value,
        task,
        history: letter.history.into_iter().map(Into::into).collect(),
        parent_id: letter.parent_id.map(id_bytes).unwrap_or_default(),
        tree: letter.tree.map(id_bytes).unwrap_or_default(),
        incomplete: letter.incomplete,
        without_key: without_key.map(id_bytes).unwrap_or_default(),
    };
    record.encode_to_vec().into()
}

/// Reads a letter from SQL, which stores it like a record of `dead-letters`.
pub fn read_dead_letter(value: &Bytes) -> Result<DeadLetter, prost::DecodeError> {
    let record = pb::DeadLetter::decode(value.clone())?;
    let task = record.task.map(|task| match discovered_task(task) {
        Ok(task) => (task, None),
        Err(unreadable) => (unreadable.task, Some(unreadable.values)),
    });
    let (mut task, values) = task.map_or((None, None), |(task, values)| (Some(task), values));
    if let Some(task) = &mut task {
        task.id = TaskId::from_slice(&record.without_key);
    }
    Ok(DeadLetter {
        reason: record.reason,
        at_unix_ms: record.at_unix_ms,
        task_id: TaskId::from_slice(&record.task_id),
        queue: record.queue,
        attempts: record.attempts,
        topic: record.topic,
        partition: record.partition,
        offset: record.offset,
        value: record.value,
        task,
        values,
        history: record.history.into_iter().map(Into::into).collect(),
        parent_id: TaskId::from_slice(&record.parent_id),
        tree: TaskId::from_slice(&record.tree),
        incomplete: record.incomplete,
    })
}

/// Encodes a record of topic `expirations`.
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
        let done = pb::Completed {
            worker: "w".into(),
            ..Default::default()
        };
        let what = Some(pb::report::What::Completed(done));
        let report = pb::Report {
            task_id: Bytes::from_static(&[7; 16]),
            what,
            at_unix_ms: 0,
        };
        let whole = pb::Report::decode(with_time(&report.encode_to_vec().into(), 42)).unwrap();
        assert_eq!(
            whole,
            pb::Report {
                at_unix_ms: 42,
                ..report
            }
        );
    }

    #[test]
    fn frames_are_a_part_of_the_record() {
        let reports = [
            Bytes::new(),
            Bytes::from_static(b"one"),
            vec![b'x'; 300].into(),
        ];
        let mut frames = Vec::new();
        let lengths = reports
            .each_ref()
            .map(|report| frame_report(report, &mut frames));
        assert_eq!(lengths, [2, 5, 303]);
        assert_eq!(framed_reports(frames.clone().into()).unwrap().0, reports);
        assert_eq!(
            framed_reports(frames.split_off(2).into()).unwrap().0,
            reports[1..]
        );
        assert!(framed_reports(Bytes::from_static(b"\x1a\x05one")).is_err());
    }

    #[test]
    fn what_no_script_can_enqueue_is_poison() {
        let good = || pb::PipelineRecord {
            id: vec![7; 16].into(),
            queue: "q".into(),
            replicas: 1,
            priority: 3,
            max_attempts: 1,
            lease_ms: 1,
            ..Default::default()
        };
        let decode = |record: pb::PipelineRecord| {
            read_pipeline_record(&record.encode_to_vec().into()).map(drop)
        };
        decode(good()).unwrap();
        let cases = [
            (
                pb::PipelineRecord {
                    id: vec![7; 15].into(),
                    ..good()
                },
                "16 bytes",
            ),
            (
                pb::PipelineRecord {
                    queue: "a{b".into(),
                    ..good()
                },
                "contains '{'",
            ),
            (
                pb::PipelineRecord {
                    replicas: 0,
                    ..good()
                },
                "replicas is 0",
            ),
            (
                pb::PipelineRecord {
                    replicas: 10_001,
                    ..good()
                },
                "replicas is 10001; must be 1 to 10000",
            ),
            (
                pb::PipelineRecord {
                    priority: 0,
                    ..good()
                },
                "priority is 0; must be 1 to 3",
            ),
            (
                pb::PipelineRecord {
                    priority: 4,
                    ..good()
                },
                "priority is 4",
            ),
            (
                pb::PipelineRecord {
                    max_attempts: 0,
                    ..good()
                },
                "max_attempts is 0",
            ),
            (
                pb::PipelineRecord {
                    lease_ms: 0,
                    ..good()
                },
                "lease_ms 0",
            ),
            (
                pb::PipelineRecord {
                    body: vec![0xff].into(),
                    ..good()
                },
                "the body cannot be read",
            ),
        ];
        for (record, want) in cases {
            let error = decode(record).unwrap_err();
            assert!(error.contains(want), "{error:?} should say {want:?}");
        }
    }
}
