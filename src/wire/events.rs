//! Events: status changes of tasks, for watchers and for other programs.

use prost::Message as _;

use super::{
    pb,
    time::{read_duration, timestamp},
};
use crate::model::{AwaitedTask, QueueName, TaskEvent, TaskId, TaskResult, TaskStatus};

/// Status changes of tasks of one queue, encoded. `None`: the status is not known.
pub fn status_changes(
    queue: &QueueName,
    changes: impl Iterator<Item = (TaskId, Option<TaskStatus>, i64)>,
) -> bytes::Bytes {
    let change = |(id, status, at_unix_ms): (TaskId, Option<TaskStatus>, i64)| pb::StatusChange {
        id: bytes::Bytes::copy_from_slice(id.as_bytes()),
        status: status.map_or(pb::TaskStatus::Unspecified, pb::TaskStatus::from).into(),
        at_unix_ms,
    };
    let changes = pb::StatusChanges { queue: queue.as_str().to_owned(), changes: changes.map(change).collect() };
    changes.encode_to_vec().into()
}

/// A change, as a channel or a record has it.
type ReadChange = (TaskId, Option<TaskStatus>, i64);

/// Reads status changes. A status of a later version is not known.
pub fn read_status_changes(bytes: &[u8]) -> Result<Vec<ReadChange>, String> {
    let changes = pb::StatusChanges::decode(bytes).map_err(|error| error.to_string())?.changes;
    let read = |change: pb::StatusChange| {
        let status = TaskStatus::ALL.into_iter().find(|status| pb::TaskStatus::from(*status) as i32 == change.status);
        Some((TaskId::from_slice(&change.id)?, status, change.at_unix_ms))
    };
    Ok(changes.into_iter().filter_map(read).collect())
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
        let AwaitedTask { answer, status, results } = awaited;
        Self {
            task_status: status.map_or(pb::TaskStatus::Unspecified, pb::TaskStatus::from).into(),
            results: results.into_iter().map(Into::into).collect(),
            ..answer.into()
        }
    }
}

/// How long an insert waits for the ends of its tasks; `None`: it does not.
pub fn insert_wait(request: &pb::InsertTasksRequest) -> Result<Option<std::time::Duration>, String> {
    request.wait.map(|wait| read_duration("wait", wait)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_changes_are_read_as_they_are_written() {
        let queue = QueueName::new("q").unwrap();
        let changes = [
            (TaskId::new(), Some(TaskStatus::Queued), 1),
            (TaskId::new(), None, 2),
            (TaskId::new(), Some(TaskStatus::Cancelled), 3),
        ];
        assert_eq!(read_status_changes(&status_changes(&queue, changes.into_iter())), Ok(changes.to_vec()));
        assert!(read_status_changes(&[0xff, 0xff]).is_err());
    }
}
