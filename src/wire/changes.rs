//! Changes of tasks, and bulk changes: converts messages to and from `model`.

use super::{
    pb,
    time::{read_duration, timestamp},
};
use crate::model::{
    BulkChange, BulkProgress, BulkState, ChangeTasks, Priority, RequeueTasks, TaskCount,
    TaskFilter, TasksChanged, Update,
};

/// Which tasks to change, and how. Either may be invalid.
pub type Asked<T> = (Result<ChangeTasks, String>, Result<T, String>);

pub fn update(request: pb::ChangeTasksRequest) -> Asked<Update> {
    let pb::ChangeTasksRequest {
        ids,
        filter,
        dry_run,
        yes,
        priority,
        replicas,
    } = request;
    let priority = match pb::Priority::try_from(priority) {
        Ok(pb::Priority::Unspecified) => Ok(None),
        Ok(priority) => Ok(Some(Priority::from_number(i32::from(priority).into()))),
        Err(_) => Err(format!("priority {priority} is unknown")),
    };
    let replicas = Some(replicas).filter(|replicas| *replicas > 0);
    let tasks = pb::RetryTasksRequest {
        ids,
        filter,
        dry_run,
        yes,
    }
    .try_into();
    (
        tasks,
        priority.map(|priority| Update { priority, replicas }),
    )
}

pub fn requeue(request: pb::RequeueTasksRequest) -> Asked<RequeueTasks> {
    let pb::RequeueTasksRequest {
        ids,
        filter,
        dry_run,
        yes,
        to,
        away_from,
        reserved_for,
    } = request;
    let reserved_for = reserved_for
        .map(|time| read_duration("reserved_for", time))
        .transpose();
    let tasks = pb::RetryTasksRequest {
        ids,
        filter,
        dry_run,
        yes,
    }
    .try_into();
    (
        tasks,
        reserved_for.and_then(|reserved_for| RequeueTasks::new(&to, &away_from, reserved_for)),
    )
}

impl TryFrom<pb::RetryTasksRequest> for ChangeTasks {
    type Error = String;

    fn try_from(request: pb::RetryTasksRequest) -> Result<Self, String> {
        let pb::RetryTasksRequest {
            ids,
            filter,
            dry_run,
            yes,
        } = request;
        Self::new(
            ids,
            filter.map(TaskFilter::try_from).transpose()?,
            dry_run,
            yes,
        )
    }
}

impl TryFrom<pb::CancelTasksRequest> for ChangeTasks {
    type Error = String;

    fn try_from(request: pb::CancelTasksRequest) -> Result<Self, String> {
        let pb::CancelTasksRequest {
            ids,
            filter,
            dry_run,
            yes,
        } = request;
        pb::RetryTasksRequest {
            ids,
            filter,
            dry_run,
            yes,
        }
        .try_into()
    }
}

impl From<TasksChanged> for pb::RetryTasksResponse {
    fn from(changed: TasksChanged) -> Self {
        let mut response = Self::default();
        match changed {
            TasksChanged::Items(answers) => {
                response.results = answers.into_iter().map(Into::into).collect()
            }
            TasksChanged::Counted(TaskCount {
                matched,
                looked_at,
                at_least,
                as_of_unix_ms,
            }) => {
                response.count = Some(pb::TaskCount {
                    matched,
                    looked_at,
                    at_least,
                    as_of: Some(timestamp(as_of_unix_ms)),
                });
            }
            TasksChanged::Started(bulk) => response.bulk = Some((*bulk).into()),
        }
        response
    }
}

macro_rules! tasks_changed {
    ($($response:ident)*) => {$(
        impl From<TasksChanged> for pb::$response {
            fn from(changed: TasksChanged) -> Self {
                let pb::RetryTasksResponse { results, count, bulk } = changed.into();
                Self { results, count, bulk }
            }
        }
    )*};
}
tasks_changed!(ChangeTasksResponse RequeueTasksResponse CancelTasksResponse);

impl From<TaskFilter> for pb::TaskFilter {
    fn from(filter: TaskFilter) -> Self {
        Self {
            queue: filter
                .queue
                .map(|queue| queue.as_str().to_owned())
                .unwrap_or_default(),
            statuses: filter
                .statuses
                .into_iter()
                .map(|status| pb::TaskStatus::from(status).into())
                .collect(),
            key: filter.key.unwrap_or_default(),
            key_prefix: filter.key_prefix,
            headers: filter.headers.into_iter().collect(),
            worker: filter
                .worker
                .map(|worker| worker.as_str().to_owned())
                .unwrap_or_default(),
            since: filter.since_unix_ms.map(timestamp),
            until: filter.until_unix_ms.map(timestamp),
            reason: filter.reason,
            as_of: filter.as_of_unix_ms.map(timestamp),
            tree: filter.tree.map(|tree| tree.to_string()).unwrap_or_default(),
        }
    }
}

impl From<BulkChange> for pb::BulkChange {
    fn from(bulk: BulkChange) -> Self {
        let state = match bulk.state {
            BulkState::Running => pb::BulkState::Running,
            BulkState::Done => pb::BulkState::Done,
            BulkState::Stopped => pb::BulkState::Stopped,
            BulkState::Failed => pb::BulkState::Failed,
        };
        let BulkProgress {
            cursor: _,
            looked_at,
            matched,
            changed,
            failed,
            last_error,
        } = bulk.progress;
        Self {
            id: bulk.id.to_string(),
            what: bulk.change.to_string(),
            state: state.into(),
            filter: Some(bulk.filter.into()),
            who: bulk.who,
            looked_at,
            matched,
            changed,
            failed,
            last_error,
            created_at: Some(timestamp(bulk.created_unix_ms)),
            updated_at: Some(timestamp(bulk.updated_unix_ms)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{QueueName, TaskId, TaskStatus, WorkerName};

    #[test]
    fn a_filter_survives_the_way_there_and_back() {
        let filter = TaskFilter {
            queue: QueueName::new("q").ok(),
            statuses: vec![TaskStatus::Cancelled],
            key: None,
            key_prefix: "k".into(),
            headers: vec![("h".into(), "v".into())],
            worker: WorkerName::new("w").ok(),
            since_unix_ms: Some(1),
            until_unix_ms: Some(2),
            reason: "timeout".into(),
            as_of_unix_ms: Some(3),
            tree: Some(TaskId::new()),
        };
        assert_eq!(
            TaskFilter::try_from(pb::TaskFilter::from(filter.clone())),
            Ok(filter)
        );
        let neither = ChangeTasks::try_from(pb::RetryTasksRequest::default());
        assert_eq!(neither.unwrap_err(), "name tasks by ids or by a filter");
    }
}
