//! Explanations of tasks: converts messages to and from `model`.

use super::{pb, time::timestamp};
use crate::model::{
    ExplainTask, Explanation, Failure, LeaseView, TaskPlace, WorkerReason, WorkerView,
};

impl From<pb::ExplainTaskRequest> for ExplainTask {
    fn from(request: pb::ExplainTaskRequest) -> Self {
        let pb::ExplainTaskRequest {
            id,
            queue,
            key,
            worker,
        } = request;
        Self {
            id,
            queue,
            key,
            worker,
        }
    }
}

impl From<Explanation> for pb::TaskExplanation {
    fn from(explanation: Explanation) -> Self {
        Self {
            task: Some(explanation.task.into()),
            place: pb::TaskPlace::from(explanation.place).into(),
            says: explanation.says,
            since: explanation.since_unix_ms.map(timestamp),
            next: explanation.next,
            next_at: explanation.next_unix_ms.map(timestamp),
            leases: explanation.leases.into_iter().map(Into::into).collect(),
            completed_by: explanation.completed_by,
            failures: explanation.failures.into_iter().map(failure).collect(),
            notes: explanation.notes,
            worker: explanation.worker.map(Into::into),
            now: Some(timestamp(explanation.now_unix_ms)),
        }
    }
}

impl From<TaskPlace> for pb::TaskPlace {
    fn from(place: TaskPlace) -> Self {
        match place {
            TaskPlace::Finished => Self::Finished,
            TaskPlace::Outbox => Self::Outbox,
            TaskPlace::Parked => Self::Parked,
            TaskPlace::Scheduled => Self::Scheduled,
            TaskPlace::Behind => Self::Behind,
            TaskPlace::Bus => Self::Bus,
            TaskPlace::Waiting => Self::Waiting,
            TaskPlace::Leased => Self::Leased,
            TaskPlace::Delayed => Self::Delayed,
            TaskPlace::Reported => Self::Reported,
            TaskPlace::Lost => Self::Lost,
        }
    }
}

impl From<LeaseView> for pb::TaskLease {
    fn from(lease: LeaseView) -> Self {
        let LeaseView {
            worker,
            expires_unix_ms,
            is_delivered,
        } = lease;
        Self {
            worker,
            lease_expires_at: expires_unix_ms.map(timestamp),
            delivered: is_delivered,
        }
    }
}

/// Not a `From`: `records` converts failures to another message.
fn failure(failure: Failure) -> pb::TaskFailure {
    let Failure {
        at_unix_ms,
        worker,
        reason,
    } = failure;
    pb::TaskFailure {
        at: Some(timestamp(at_unix_ms)),
        worker,
        reason,
    }
}

impl From<WorkerView> for pb::WorkerAnswer {
    fn from(view: WorkerView) -> Self {
        let WorkerView {
            worker,
            reason,
            says,
            until_unix_ms,
        } = view;
        Self {
            worker,
            may_get: reason == WorkerReason::MayGet,
            reason: pb::WorkerReason::from(reason).into(),
            says,
            until: until_unix_ms.map(timestamp),
        }
    }
}

impl From<WorkerReason> for pb::WorkerReason {
    fn from(reason: WorkerReason) -> Self {
        match reason {
            WorkerReason::MayGet => Self::MayGet,
            WorkerReason::CompletedIt => Self::CompletedIt,
            WorkerReason::HoldsIt => Self::HoldsIt,
            WorkerReason::RefusedIt => Self::RefusedIt,
            WorkerReason::ReservedForAnother => Self::ReservedForAnother,
            WorkerReason::NotDue => Self::NotDue,
            WorkerReason::InBackoff => Self::InBackoff,
            WorkerReason::LeasedByOthers => Self::LeasedByOthers,
            WorkerReason::Finished => Self::Finished,
            WorkerReason::NotInQueue => Self::NotInQueue,
            WorkerReason::ClaimsPaused => Self::ClaimsPaused,
            WorkerReason::LimitReached => Self::LimitReached,
            WorkerReason::QueuePaused => Self::QueuePaused,
        }
    }
}
