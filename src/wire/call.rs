//! Converts messages of requests and answers to and from `model`. An error is one line of text for
//! the sender of the message.

use std::time::Duration;

use bytes::Bytes;

use super::{
    backoff, pb,
    time::{duration, read_duration, timestamp, unix_ms},
    trees::read_tree,
};
use crate::model::{
    Batch, Completion, DiscoveredTask, Encoding, Extension, GetTasks, InsertAnswer, InsertStatus,
    Item, ItemAnswer, ItemStatus, LeasedTask, LimitReport, NewBackoff, NewTask, OnDead, Priority,
    RecordedDuration, RecordedValues, Rejection, TaskStatus, TaskTree, TaskView, UnreadableTask,
};

impl From<Priority> for pb::Priority {
    fn from(priority: Priority) -> Self {
        match priority {
            Priority::High => Self::High,
            Priority::Medium => Self::Medium,
            Priority::Low => Self::Low,
        }
    }
}

fn read_priority(number: i32) -> Result<Option<Priority>, String> {
    match pb::Priority::try_from(number) {
        Ok(pb::Priority::Unspecified) => Ok(None),
        Ok(pb::Priority::High) => Ok(Some(Priority::High)),
        Ok(pb::Priority::Medium) => Ok(Some(Priority::Medium)),
        Ok(pb::Priority::Low) => Ok(Some(Priority::Low)),
        Err(_) => Err(format!(
            "priority {number} is unknown; expected high, medium or low"
        )),
    }
}

impl From<Encoding> for pb::Encoding {
    fn from(encoding: Encoding) -> Self {
        match encoding {
            Encoding::Unknown => Self::Unspecified,
            Encoding::Bytes => Self::Bytes,
            Encoding::Text => Self::Text,
            Encoding::Json => Self::Json,
        }
    }
}

/// Reads the encoding of the field `what`, which is `payload` or `result`.
fn read_encoding(what: &str, number: i32) -> Result<Encoding, String> {
    match pb::Encoding::try_from(number) {
        Ok(_) => Ok(Encoding::from_number(number.into())),
        Err(_) => Err(format!(
            "{what}_encoding {number} is unknown; expected BYTES, TEXT or JSON"
        )),
    }
}

/// The values of a task that may be invalid in a message.
#[derive(Default)]
struct Values {
    payload_encoding: Encoding,
    priority: Option<Priority>,
    lease_duration: Option<Duration>,
    delay: Option<Duration>,
    finish_within: Option<Duration>,
    backoff: Option<NewBackoff>,
    tree: Option<Box<TaskTree>>,
    on_dead: OnDead,
}

impl Values {
    fn read(task: &pb::NewTask) -> Result<Self, String> {
        Ok(Self {
            payload_encoding: read_encoding("payload", task.payload_encoding)?,
            priority: read_priority(task.priority)?,
            lease_duration: task
                .lease_duration
                .map(|lease| read_duration("lease_duration", lease))
                .transpose()?,
            delay: task
                .delay
                .map(|delay| read_duration("delay", delay))
                .transpose()?,
            finish_within: task
                .finish_within
                .map(|within| read_duration("finish_within", within))
                .transpose()?,
            backoff: task.backoff.map(backoff::read).transpose()?,
            tree: task.tree.clone().map(read_tree).transpose()?,
            on_dead: read_on_dead(task.on_dead)?,
        })
    }

    fn of(self, task: pb::NewTask) -> NewTask {
        NewTask {
            id: None,
            payload_encoding: self.payload_encoding,
            priority: self.priority,
            delay: self.delay,
            not_before_unix_ms: task.not_before.map(unix_ms),
            deadline_unix_ms: task.deadline.map(unix_ms),
            finish_within: self.finish_within,
            lease_duration: self.lease_duration,
            backoff: self.backoff,
            queue: task.queue,
            key: task.key,
            payload: task.payload,
            replicas: task.replicas,
            max_attempts: task.max_attempts,
            headers: task.headers,
            traceparent: task.traceparent,
            idempotency_key: task.idempotency_key,
            limit_key: task.limit_key,
            sequence: task.sequence,
            on_dead: self.on_dead,
            tree: self.tree,
            port: task.port,
        }
    }
}

fn read_on_dead(number: i32) -> Result<OnDead, String> {
    match pb::OnDead::try_from(number) {
        Ok(pb::OnDead::Unspecified | pb::OnDead::Next) => Ok(OnDead::Next),
        Ok(pb::OnDead::Hold) => Ok(OnDead::Hold),
        Err(_) => Err(format!(
            "on_dead {number} is unknown; expected next or hold"
        )),
    }
}

impl TryFrom<pb::NewTask> for NewTask {
    type Error = String;

    fn try_from(task: pb::NewTask) -> Result<Self, String> {
        Ok(Values::read(&task)?.of(task))
    }
}

/// Reads a discovered task of a report. If a value is invalid, keeps the raw values and the reason.
pub(super) fn discovered_task(task: pb::NewTask) -> DiscoveredTask {
    let recorded = |duration: prost_types::Duration| {
        let prost_types::Duration { seconds, nanos } = duration;
        RecordedDuration { seconds, nanos }
    };
    match Values::read(&task) {
        Ok(values) => Ok(values.of(task)),
        Err(reason) => {
            let values = RecordedValues {
                payload_encoding: task.payload_encoding,
                priority: task.priority,
                delay: task.delay.map(recorded),
                lease_duration: task.lease_duration.map(recorded),
            };
            Err(Box::new(UnreadableTask {
                task: Values::default().of(task),
                values,
                reason,
            }))
        }
    }
}

impl From<NewTask> for pb::NewTask {
    fn from(task: NewTask) -> Self {
        Self {
            queue: task.queue,
            key: task.key,
            payload: task.payload,
            payload_encoding: pb::Encoding::from(task.payload_encoding).into(),
            replicas: task.replicas,
            priority: task
                .priority
                .map_or(pb::Priority::Unspecified, Into::into)
                .into(),
            delay: task.delay.and_then(duration),
            not_before: task.not_before_unix_ms.map(timestamp),
            deadline: task.deadline_unix_ms.map(timestamp),
            finish_within: task.finish_within.and_then(duration),
            lease_duration: task.lease_duration.and_then(duration),
            max_attempts: task.max_attempts,
            headers: task.headers,
            traceparent: task.traceparent,
            idempotency_key: task.idempotency_key,
            limit_key: task.limit_key,
            sequence: task.sequence,
            on_dead: match task.on_dead {
                OnDead::Next => pb::OnDead::Unspecified.into(),
                OnDead::Hold => pb::OnDead::Hold.into(),
            },
            backoff: task.backoff.map(Into::into),
            tree: task.tree.map(|tree| (*tree).into()),
            port: task.port,
        }
    }
}

/// Writes a task with the raw values of its record, for a later version that can read them.
pub(super) fn with_values(task: NewTask, values: RecordedValues) -> pb::NewTask {
    let duration = |duration: RecordedDuration| {
        let RecordedDuration { seconds, nanos } = duration;
        prost_types::Duration { seconds, nanos }
    };
    let RecordedValues {
        payload_encoding,
        priority,
        delay,
        lease_duration,
    } = values;
    let delay = delay.map(duration);
    let lease_duration = lease_duration.map(duration);
    pb::NewTask {
        payload_encoding,
        priority,
        delay,
        lease_duration,
        ..task.into()
    }
}

/// Writes a discovered task of a report.
pub(super) fn of_discovered(task: DiscoveredTask) -> pb::NewTask {
    task.map_or_else(
        |unreadable| with_values(unreadable.task, unreadable.values),
        pb::NewTask::from,
    )
}

impl From<InsertAnswer> for pb::InsertResult {
    fn from(answer: InsertAnswer) -> Self {
        let status = match answer.status {
            InsertStatus::Created => pb::InsertStatus::Created,
            InsertStatus::Duplicate => pb::InsertStatus::Duplicate,
            InsertStatus::Rejected => pb::InsertStatus::Rejected,
            InsertStatus::TryLater => pb::InsertStatus::TryLater,
        };
        let id = answer.id.map(|id| id.to_string()).unwrap_or_default();
        Self {
            status: status.into(),
            id,
            error: answer.error,
            task_status: answer
                .task_status
                .map_or(0, |status| pb::TaskStatus::from(status).into()),
            tree: answer.tree.map(|tree| tree.to_string()).unwrap_or_default(),
            ..Default::default()
        }
    }
}

impl TryFrom<pb::GetTasksRequest> for GetTasks {
    type Error = String;

    fn try_from(request: pb::GetTasksRequest) -> Result<Self, String> {
        let lease = request
            .lease_duration
            .map(|lease| read_duration("lease_duration", lease));
        Ok(Self {
            lease_duration: lease.transpose()?,
            wait: request
                .wait
                .map(|wait| read_duration("wait", wait))
                .transpose()?
                .unwrap_or_default(),
            worker: request.worker,
            queues: request.queues,
            max_tasks: request.max_tasks,
            max_bytes: request.max_bytes,
            weights: request.weights,
        })
    }
}

impl From<LeasedTask> for pb::LeasedTask {
    fn from(task: LeasedTask) -> Self {
        let LeasedTask {
            id,
            token,
            expires_unix_ms,
            lease: _,
            body,
        } = task;
        Self {
            id: id.to_string(),
            queue: token.shard.queue.as_str().to_owned(),
            key: body.key,
            payload: body.payload,
            payload_encoding: pb::Encoding::from(body.payload_encoding).into(),
            headers: body.headers,
            traceparent: body.traceparent,
            attempt: token.attempt,
            lease_token: token.text(),
            lease_expires_at: Some(timestamp(expires_unix_ms)),
            replicas: body.replicas,
            priority: pb::Priority::from(body.priority).into(),
            limit_key: body.limit_key,
        }
    }
}

impl From<pb::CompleteTasksRequest> for Batch<Completion> {
    fn from(request: pb::CompleteTasksRequest) -> Self {
        let read = |item: pb::Completion| {
            let pb::Completion {
                id,
                lease_token,
                result,
                discovered,
                result_encoding,
                limit,
            } = item;
            Ok(Item {
                id,
                lease_token,
                report: completion(result, result_encoding, discovered, limit),
            })
        };
        Self {
            worker: request.worker,
            items: request.completions.into_iter().map(read).collect(),
        }
    }
}

fn completion(
    result: Bytes,
    result_encoding: i32,
    discovered: Vec<pb::NewTask>,
    limit: Option<pb::LimitReport>,
) -> Result<Completion, String> {
    let limit = limit_report(limit)?;
    let result_encoding = read_encoding("result", result_encoding)?;
    let mut completion = Completion {
        result,
        result_encoding,
        limit,
        ..Default::default()
    };
    for (index, task) in discovered.into_iter().enumerate() {
        match discovered_task(task) {
            Ok(task) => completion.discovered.push(task),
            Err(unreadable) => {
                completion
                    .not_stored
                    .add(|| format!("discovered[{index}]: {}", unreadable.reason));
                completion.unreadable.push(unreadable);
            }
        }
    }
    Ok(completion)
}

fn limit_report(limit: Option<pb::LimitReport>) -> Result<LimitReport, String> {
    let Some(limit) = limit else {
        return Ok(LimitReport::default());
    };
    let read = |what: &str, time: Option<prost_types::Duration>| {
        time.map_or(Ok(Duration::ZERO), |time| {
            read_duration(&format!("limit.{what}"), time)
        })
    };
    Ok(LimitReport {
        hold: read("hold", limit.hold)?,
        pace: read("pace", limit.pace)?,
    })
}

impl From<pb::RejectTasksRequest> for Batch<Rejection> {
    fn from(request: pb::RejectTasksRequest) -> Self {
        let read = |item: pb::Rejection| {
            let pb::Rejection {
                id,
                lease_token,
                reason,
                retry,
                delay,
                not_started,
                limit,
            } = item;
            let delay = delay.map(|delay| read_duration("delay", delay)).transpose();
            let report = delay.and_then(|delay| {
                Ok(Rejection {
                    reason,
                    retry: retry.unwrap_or(true),
                    delay,
                    not_started,
                    limit: limit_report(limit)?,
                })
            });
            Ok(Item {
                id,
                lease_token,
                report,
            })
        };
        Self {
            worker: request.worker,
            items: request.rejections.into_iter().map(read).collect(),
        }
    }
}

impl From<pb::ExtendTasksRequest> for Batch<Extension> {
    fn from(request: pb::ExtendTasksRequest) -> Self {
        let read = |item: pb::Extension| {
            let pb::Extension {
                id,
                lease_token,
                by,
            } = item;
            let by = by.map(|by| read_duration("by", by)).transpose();
            Ok(Item {
                id,
                lease_token,
                report: by.map(|by| Extension { by }),
            })
        };
        Self {
            worker: request.worker,
            items: request.extensions.into_iter().map(read).collect(),
        }
    }
}

impl From<ItemAnswer> for pb::ItemResult {
    fn from(answer: ItemAnswer) -> Self {
        let status = match answer.status {
            ItemStatus::Ok => pb::ItemStatus::Ok,
            ItemStatus::LeaseLost => pb::ItemStatus::LeaseLost,
            ItemStatus::AlreadyCompleted => pb::ItemStatus::AlreadyCompleted,
            ItemStatus::UnknownTask => pb::ItemStatus::UnknownTask,
            ItemStatus::Cancelled => pb::ItemStatus::Cancelled,
            ItemStatus::Invalid => pb::ItemStatus::Invalid,
            ItemStatus::TryLater => pb::ItemStatus::TryLater,
        };
        let lease_expires_at = answer.lease_expires_unix_ms.map(timestamp);
        Self {
            id: answer.id,
            status: status.into(),
            error: answer.error,
            lease_expires_at,
        }
    }
}

/// Reads a status. `None` if it is unspecified or only a later version knows it.
pub fn task_status(number: i32) -> Option<TaskStatus> {
    TaskStatus::ALL
        .into_iter()
        .find(|status| pb::TaskStatus::from(*status) as i32 == number)
}

impl From<TaskStatus> for pb::TaskStatus {
    fn from(status: TaskStatus) -> Self {
        match status {
            TaskStatus::Pending => Self::Pending,
            TaskStatus::Queued => Self::Queued,
            TaskStatus::Assigned => Self::Assigned,
            TaskStatus::Delayed => Self::Delayed,
            TaskStatus::Completed => Self::Completed,
            TaskStatus::Dead => Self::Dead,
            TaskStatus::Cancelled => Self::Cancelled,
        }
    }
}

impl From<TaskView> for pb::Task {
    fn from(task: TaskView) -> Self {
        let status = pb::TaskStatus::from(task.status);
        Self {
            id: task.id.to_string(),
            queue: task.queue.as_str().to_owned(),
            key: task.key,
            status: status.into(),
            replicas: task.replicas,
            completed: task.completed,
            leased: task.leased,
            attempts: task.attempts,
            priority: pb::Priority::from(task.priority).into(),
            created_at: Some(timestamp(task.created_unix_ms)),
            updated_at: Some(timestamp(task.updated_unix_ms)),
            not_before: task.not_before_unix_ms.map(timestamp),
            deadline: task.deadline_unix_ms.map(timestamp),
            reason: task.reason,
            sequence: task.sequence,
            tree: task.tree.map(|tree| tree.to_string()).unwrap_or_default(),
            ..Default::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task() -> pb::NewTask {
        pb::NewTask {
            queue: "q".into(),
            key: "k".into(),
            payload: "p".into(),
            replicas: Some(3),
            priority: pb::Priority::Low.into(),
            not_before: Some(timestamp(1_500)),
            lease_duration: duration(Duration::from_millis(1_500)),
            max_attempts: Some(7),
            headers: [("h".to_owned(), "v".to_owned())].into(),
            traceparent: "t".into(),
            payload_encoding: pb::Encoding::Text.into(),
            delay: duration(Duration::from_secs(9)),
            idempotency_key: "i".into(),
            limit_key: "l".into(),
            sequence: "s".into(),
            on_dead: pb::OnDead::Hold.into(),
            deadline: Some(timestamp(2_500)),
            finish_within: duration(Duration::from_secs(8)),
            backoff: Some(pb::Backoff {
                kind: pb::BackoffKind::Linear.into(),
                initial: duration(Duration::from_secs(1)),
                jitter: Some(0.5),
                ..Default::default()
            }),
            tree: None,
            port: "p".into(),
        }
    }

    #[test]
    fn a_task_survives_the_way_there_and_back() {
        let root = pb::NewTask {
            tree: Some(pb::TaskTree {
                then: "reports".into(),
                timeout: duration(Duration::from_secs(7)),
                on_dead: pb::TreeOnDead::Hold.into(),
                ..Default::default()
            }),
            ..task()
        };
        for task in [task(), root, pb::NewTask::default()] {
            assert_eq!(
                pb::NewTask::from(NewTask::try_from(task.clone()).unwrap()),
                task
            );
        }
    }

    #[test]
    fn what_no_model_can_say_is_named() {
        let negative = Some(prost_types::Duration {
            seconds: -1,
            nanos: 0,
        });
        let cases = [
            (
                pb::NewTask {
                    priority: 9,
                    ..task()
                },
                "priority 9 is unknown; expected high, medium or low",
            ),
            (
                pb::NewTask {
                    payload_encoding: 9,
                    ..task()
                },
                "payload_encoding 9 is unknown; expected BYTES, TEXT or JSON",
            ),
            (
                pb::NewTask {
                    delay: negative,
                    ..task()
                },
                "delay is negative or out of range",
            ),
            (
                pb::NewTask {
                    lease_duration: negative,
                    ..task()
                },
                "lease_duration is negative or out of range",
            ),
            (
                pb::NewTask {
                    finish_within: negative,
                    ..task()
                },
                "finish_within is negative or out of range",
            ),
        ];
        for (task, why) in cases {
            assert_eq!(NewTask::try_from(task.clone()).unwrap_err(), why);
            let good = pb::NewTask::default();
            let completion = completion("".into(), 0, vec![good, task], None).unwrap();
            assert_eq!(
                (completion.discovered.len(), completion.unreadable.len()),
                (1, 1)
            );
            let note = format!("1 discovered task is not stored: discovered[1]: {why}");
            assert_eq!(completion.not_stored.note(), note);
        }
    }
}
