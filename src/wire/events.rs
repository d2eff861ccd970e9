//! Events: status changes of tasks, for watchers and for other programs.

use bytes::Bytes;
use prost::Message as _;

use super::{
    pb, task_status,
    time::{read_duration, timestamp},
    trees::read_state,
};
use crate::model::{
    AwaitedTask, EventRecord, QueueName, TaskEvent, TaskId, TaskResult, TaskStatus, WaitFor,
};

/// Encodes status changes of tasks of one queue. `None` means that the status is not known.
pub fn status_changes(
    queue: &QueueName,
    changes: impl Iterator<Item = (TaskId, Option<TaskStatus>, i64)>,
) -> Bytes {
    let change = |(id, status, at_unix_ms): (TaskId, Option<TaskStatus>, i64)| pb::StatusChange {
        id: Bytes::copy_from_slice(id.as_bytes()),
        status: status
            .map_or(pb::TaskStatus::Unspecified, pb::TaskStatus::from)
            .into(),
        at_unix_ms,
    };
    let changes = pb::StatusChanges {
        queue: queue.as_str().to_owned(),
        changes: changes.map(change).collect(),
    };
    changes.encode_to_vec().into()
}

/// A status change as read: the task, its status if known, and the time in milliseconds since 1970.
type ReadChange = (TaskId, Option<TaskStatus>, i64);

/// Reads status changes. A status that only a later version knows becomes `None`.
pub fn read_status_changes(bytes: &[u8]) -> Result<Vec<ReadChange>, String> {
    let changes = pb::StatusChanges::decode(bytes)
        .map_err(|error| error.to_string())?
        .changes;
    let read = |change: pb::StatusChange| {
        Some((
            TaskId::from_slice(&change.id)?,
            task_status(change.status),
            change.at_unix_ms,
        ))
    };
    Ok(changes.into_iter().filter_map(read).collect())
}

/// Encodes a record of topic `events`, without its number.
pub fn event_record(event: &EventRecord) -> Bytes {
    let record = pb::EventRecord {
        number: 0,
        id: Bytes::copy_from_slice(event.id.as_bytes()),
        queue: event.queue.as_str().to_owned(),
        key: event.key.clone(),
        // The end of a tree is no status of its root.
        status: match event.tree {
            Some(_) => pb::TaskStatus::Unspecified.into(),
            None => pb::TaskStatus::from(event.status).into(),
        },
        at_unix_ms: event.at_unix_ms,
        epoch: event.epoch,
        worker: event.worker.clone(),
        attempt: event.attempt,
        attempts: event.attempts,
        reason: event.reason.clone(),
        tree_state: event
            .tree
            .map_or(pb::TreeState::Unspecified, pb::TreeState::from)
            .into(),
    };
    record.encode_to_vec().into()
}

/// Encodes records of events in the form in which SQL keeps them.
pub fn kept_events(records: Vec<Bytes>) -> Bytes {
    pb::KeptEvents { records }.encode_to_vec().into()
}

/// Reads the records that SQL kept.
pub fn read_kept_events(kept: Bytes) -> Result<Vec<Bytes>, String> {
    Ok(pb::KeptEvents::decode(kept)
        .map_err(|error| error.to_string())?
        .records)
}

/// Adds its number to a record. Returns also the task that the record is about. Keeps fields of
/// later versions.
pub fn numbered_event(record: &Bytes, number: u64) -> Result<(TaskId, Bytes), String> {
    let event = pb::EventRecord::decode(record.clone()).map_err(|error| error.to_string())?;
    let id = TaskId::from_slice(&event.id).ok_or("the id has not 16 bytes")?;
    // Concatenated protobuf messages are one message with the fields of both.
    let number = pb::EventRecord {
        number,
        ..Default::default()
    }
    .encode_to_vec();
    Ok((id, [&number[..], &record[..]].concat().into()))
}

/// Removes the fields of a record that may be large, for a topic that does not accept the whole.
pub fn short_event(record: &Bytes) -> Result<Bytes, String> {
    let event = pb::EventRecord::decode(record.clone()).map_err(|error| error.to_string())?;
    Ok(pb::EventRecord {
        key: Default::default(),
        worker: Default::default(),
        reason: Default::default(),
        ..event
    }
    .encode_to_vec()
    .into())
}

/// Reads a record of topic `events`, with its number.
pub fn read_event_record(record: &Bytes) -> Result<(u64, EventRecord), String> {
    let event = pb::EventRecord::decode(record.clone()).map_err(|error| error.to_string())?;
    let tree = read_state(event.tree_state)?;
    let status = task_status(event.status).or(tree.map(|_| TaskStatus::Pending));
    let read = EventRecord {
        id: TaskId::from_slice(&event.id).ok_or("the id has not 16 bytes")?,
        queue: QueueName::new(&event.queue).map_err(|error| error.to_string())?,
        key: event.key,
        status: status.ok_or_else(|| format!("the status {}", event.status))?,
        at_unix_ms: event.at_unix_ms,
        epoch: event.epoch,
        worker: event.worker,
        attempt: event.attempt,
        attempts: event.attempts,
        reason: event.reason,
        tree,
    };
    Ok((event.number, read))
}

impl From<TaskEvent> for pb::TaskEvent {
    fn from(event: TaskEvent) -> Self {
        Self {
            event_id: event.event_id().to_string(),
            id: event.id.to_string(),
            queue: event.queue.as_str().to_owned(),
            status: pb::TaskStatus::from(event.status).into(),
            at: Some(timestamp(event.at_unix_ms)),
            gap: false,
            key: Bytes::new(),
        }
    }
}

impl From<TaskResult> for pb::TaskResult {
    fn from(result: TaskResult) -> Self {
        Self {
            worker: result.worker,
            result: result.result,
            result_encoding: pb::Encoding::from(result.encoding).into(),
            attempt: result.attempt,
            completed_at: Some(timestamp(result.completed_unix_ms)),
            surplus: result.surplus,
        }
    }
}

impl From<AwaitedTask> for pb::InsertResult {
    fn from(awaited: AwaitedTask) -> Self {
        let AwaitedTask {
            answer,
            status,
            results,
            tree_state,
        } = awaited;
        Self {
            tree_state: tree_state
                .map_or(pb::TreeState::Unspecified, pb::TreeState::from)
                .into(),
            task_status: status
                .map_or(pb::TaskStatus::Unspecified, pb::TaskStatus::from)
                .into(),
            results: results.into_iter().map(Into::into).collect(),
            ..answer.into()
        }
    }
}

/// Reads how long an insert waits, and for what; `None` if it does not wait.
pub fn insert_wait(
    request: &pb::InsertTasksRequest,
) -> Result<Option<(std::time::Duration, WaitFor)>, String> {
    let wait_for = match pb::WaitFor::try_from(request.wait_for) {
        Ok(pb::WaitFor::Unspecified | pb::WaitFor::Task) => WaitFor::Task,
        Ok(pb::WaitFor::Tree) => WaitFor::Tree,
        Err(_) => {
            return Err(format!(
                "wait_for {} is unknown; expected TASK or TREE",
                request.wait_for
            ));
        }
    };
    let Some(wait) = request.wait else {
        return match wait_for {
            WaitFor::Task => Ok(None),
            WaitFor::Tree => Err(WaitFor::NEEDS_WAIT.into()),
        };
    };
    Ok(Some((read_duration("wait", wait)?, wait_for)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::TreeState;

    #[test]
    fn status_changes_are_read_as_they_are_written() {
        let queue = QueueName::new("q").unwrap();
        let changes = [
            (TaskId::new(), Some(TaskStatus::Queued), 1),
            (TaskId::new(), None, 2),
            (TaskId::new(), Some(TaskStatus::Cancelled), 3),
        ];
        assert_eq!(
            read_status_changes(&status_changes(&queue, changes.into_iter())),
            Ok(changes.to_vec())
        );
        assert!(read_status_changes(&[0xff, 0xff]).is_err());
    }

    #[test]
    fn a_record_is_read_as_it_was_written_with_the_number_that_it_got() {
        let queue = QueueName::new("q").unwrap();
        let event = EventRecord {
            key: "k".into(),
            status: TaskStatus::Dead,
            at_unix_ms: 7,
            epoch: 1,
            worker: "w".into(),
            attempt: 2,
            attempts: 3,
            reason: "no luck".into(),
            ..EventRecord::new(TaskId::new(), queue)
        };
        let kept = read_kept_events(kept_events(vec![event_record(&event)])).unwrap();
        let (id, numbered) = numbered_event(&kept[0], 9).unwrap();
        assert_eq!(
            (id, read_event_record(&numbered)),
            (event.id, Ok((9, event.clone())))
        );
        let (_, short) = numbered_event(&short_event(&kept[0]).unwrap(), 9).unwrap();
        assert_eq!(
            read_event_record(&short),
            Ok((
                9,
                EventRecord {
                    key: Default::default(),
                    worker: Default::default(),
                    reason: Default::default(),
                    ..event.clone()
                }
            ))
        );
        let end = EventRecord {
            tree: Some(TreeState::Failed),
            epoch: 2,
            ..EventRecord::new(TaskId::new(), event.queue.clone())
        };
        let (_, numbered) = numbered_event(&event_record(&end), 10).unwrap();
        assert_eq!(read_event_record(&numbered), Ok((10, end)));
        // A field of a later version is kept.
        let later = Bytes::from([&kept[0][..], &[0xf8, 0x07, 0x01]].concat());
        assert!(
            numbered_event(&later, 9)
                .unwrap()
                .1
                .ends_with(&[0xf8, 0x07, 0x01])
        );
        assert!(
            numbered_event(&Bytes::from_static(&[0xff]), 9).is_err()
                && read_kept_events("x".into()).is_err()
        );
    }

    #[test]
    fn numbers_grow_from_row_to_row_and_within_a_row() {
        let last = EventRecord::number(1, crate::model::MOST_KEPT_TOGETHER - 1);
        assert!(EventRecord::number(1, 0) < last && last < EventRecord::number(2, 0));
    }
}
