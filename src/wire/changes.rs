//! Changes of live work: messages to and from `model`.

use super::{pb, time::read_duration};
use crate::model::{ChangeTasks, Priority, RequeueTasks, TasksChanged, Update};

/// Which tasks to change, and how. Either may be wrong.
pub type Asked<T> = (Result<ChangeTasks, String>, Result<T, String>);

pub fn update(request: pb::ChangeTasksRequest) -> Asked<Update> {
    let pb::ChangeTasksRequest { ids, filter, dry_run, yes, priority, replicas } = request;
    let priority = match pb::Priority::try_from(priority) {
        Ok(pb::Priority::Unspecified) => Ok(None),
        Ok(priority) => Ok(Some(Priority::from_number(i32::from(priority).into()))),
        Err(_) => Err(format!("priority {priority} is unknown")),
    };
    let replicas = Some(replicas).filter(|replicas| *replicas > 0);
    let tasks = pb::RetryTasksRequest { ids, filter, dry_run, yes }.try_into();
    (tasks, priority.map(|priority| Update { priority, replicas }))
}

pub fn requeue(request: pb::RequeueTasksRequest) -> Asked<RequeueTasks> {
    let pb::RequeueTasksRequest { ids, filter, dry_run, yes, to, away_from, reserved_for } = request;
    let reserved_for = reserved_for.map(|time| read_duration("reserved_for", time)).transpose();
    let tasks = pb::RetryTasksRequest { ids, filter, dry_run, yes }.try_into();
    (tasks, reserved_for.and_then(|reserved_for| RequeueTasks::new(&to, &away_from, reserved_for)))
}

impl From<TasksChanged> for pb::ChangeTasksResponse {
    fn from(changed: TasksChanged) -> Self {
        let pb::RetryTasksResponse { results, count, job } = changed.into();
        Self { results, count, job }
    }
}

impl From<TasksChanged> for pb::RequeueTasksResponse {
    fn from(changed: TasksChanged) -> Self {
        let pb::RetryTasksResponse { results, count, job } = changed.into();
        Self { results, count, job }
    }
}
