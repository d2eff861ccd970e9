//! The calls of workers and the answers to them.

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{
    super::tally::{Excess, MAX_QUEUES, Tally},
    AtMost, Nested, Unread, insert, item,
    large::{Entry, Large},
    object,
    text::{Instant, Time},
    value::{self, Payload},
    weights,
};
use crate::{
    api::{ECHO, shorten},
    model::{
        self, Batch, Item, ItemAnswer, Key, LeaseToken, NotStored, Priority, QueueName, TaskId,
        WorkerName, to_rfc_3339,
    },
};

/// The highest value of `max_items`.
pub(super) const MAX_ITEMS: usize = 1000;
/// The most tasks that one completion may discover.
const MAX_DISCOVERED: usize = 10_000;

/// What a worker has learnt about the limit key of a task.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with hold or pace")]
pub(super) struct LimitReport {
    /// Nothing of the limit key starts for this long. At most `1h`.
    hold: Option<Time>,
    /// Starts of the limit key are at least so far apart, for an hour. At most `1h`.
    pace: Option<Time>,
}

fn limit_report(limit: Option<Nested<LimitReport>>) -> model::LimitReport {
    let Some(Nested(limit)) = limit else {
        return model::LimitReport::default();
    };
    let time = |time: Option<Time>| time.map_or(Duration::ZERO, |time| time.0);
    model::LimitReport {
        hold: time(limit.hold),
        pace: time(limit.pace),
    }
}

/// A task that a worker has done.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a completion")]
pub(super) struct Completion<'a> {
    id: String,
    lease_token: String,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    #[schemars(extend("contentEncoding" = "base64"))]
    result_base64: Option<String>,
    /// The tasks that the worker found on the way.
    #[serde(borrow, default)]
    #[schemars(with = "AtMost<insert::NewTask<'a>, MAX_DISCOVERED>")]
    discovered: AtMost<&'a RawValue, MAX_DISCOVERED>,
    /// Only of a task with a limit key.
    limit: Option<Nested<LimitReport>>,
}

/// A task that a worker gives back.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a rejection")]
pub(super) struct Rejection {
    id: String,
    lease_token: String,
    #[serde(default)]
    reason: String,
    /// `false` counts as `max_attempts` failures, so a task for one worker is dead. Otherwise the
    /// task is tried again.
    retry: Option<bool>,
    /// The wait before the next attempt, in place of the backoff.
    delay: Option<Time>,
    /// `true`: the worker has not started the task. No failure counts, and the task is offered
    /// again at once.
    #[serde(default)]
    not_started: bool,
    /// Only of a task with a limit key.
    limit: Option<Nested<LimitReport>>,
}

/// A lease that a worker needs for longer.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an extension")]
pub(super) struct Extension {
    id: String,
    lease_token: String,
    /// How long the lease lasts from now. Without it the answer is INVALID.
    by: Option<Time>,
}

/// A worker's request for tasks.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with worker and queues")]
pub(in crate::ingress) struct GetTasks {
    /// The worker's name. It may be left out only with a token for one worker.
    #[serde(default)]
    #[schemars(length(max = 128))]
    worker: String,
    #[schemars(with = "AtMost<QueueName, MAX_QUEUES>", extend("minItems" = 1))]
    queues: AtMost<String, MAX_QUEUES>,
    /// 0 means one.
    #[serde(default)]
    max_tasks: u32,
    /// How long to wait for the first task.
    wait: Option<Time>,
    lease_duration: Option<Time>,
    #[serde(default)]
    /// The approximate size of the answer; 0 means 3.5 MiB.
    max_bytes: u64,
    /// How the queues share the tasks while each has some: `{"a": 3, "b": 1}`; 1 to 1,000, by
    /// default 1. Then priorities order the tasks of each queue only.
    #[serde(default, deserialize_with = "weights")]
    #[schemars(extend("maxProperties" = MAX_QUEUES))]
    weights: HashMap<String, u32>,
}

/// A worker's report of tasks that it has done.
#[derive(Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "an object with worker and completions"
)]
pub(in crate::ingress) struct CompleteTasks<'a> {
    /// The worker's name. It may be left out only with a token for one worker.
    #[serde(default)]
    #[schemars(length(max = 128))]
    worker: String,
    #[serde(borrow)]
    #[schemars(with = "AtMost<Completion<'a>, MAX_ITEMS>")]
    completions: AtMost<&'a RawValue, MAX_ITEMS>,
    /// Also leases tasks that are available now. This does not wait, and needs no worker of its
    /// own.
    next: Option<Nested<GetTasks>>,
}

/// A worker's report of tasks that it gives back.
#[derive(Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "an object with worker and rejections"
)]
pub(in crate::ingress) struct RejectTasks<'a> {
    /// The worker's name. It may be left out only with a token for one worker.
    #[serde(default)]
    #[schemars(length(max = 128))]
    worker: String,
    #[serde(borrow)]
    #[schemars(with = "AtMost<Rejection, MAX_ITEMS>")]
    rejections: AtMost<&'a RawValue, MAX_ITEMS>,
}

/// A worker's request for longer leases.
#[derive(Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "an object with worker and extensions"
)]
pub(in crate::ingress) struct ExtendTasks<'a> {
    /// The worker's name. It may be left out only with a token for one worker.
    #[serde(default)]
    #[schemars(length(max = 128))]
    worker: String,
    #[serde(borrow)]
    #[schemars(with = "AtMost<Extension, MAX_ITEMS>")]
    extensions: AtMost<&'a RawValue, MAX_ITEMS>,
}

pub(in crate::ingress) fn get_tasks(body: &Bytes) -> Result<model::GetTasks, Unread> {
    Ok(object::<GetTasks>(body)?.into())
}

impl From<GetTasks> for model::GetTasks {
    fn from(request: GetTasks) -> Self {
        Self {
            worker: request.worker,
            queues: request.queues.0,
            max_tasks: request.max_tasks,
            wait: request.wait.map_or(Duration::ZERO, |time| time.0),
            lease_duration: request.lease_duration.map(|time| time.0),
            max_bytes: request.max_bytes,
            weights: request.weights,
        }
    }
}

/// Tasks that a worker has finished, and its request for the next ones.
pub(in crate::ingress) type Completions = (Batch<model::Completion>, Option<model::GetTasks>);

/// Reads the tasks that a worker has finished.
pub(in crate::ingress) fn completions(
    body: &Bytes,
    tally: &mut Tally<'_>,
) -> Result<Completions, Unread> {
    let CompleteTasks {
        worker,
        completions,
        next,
    } = object(body)?;
    let batch = batch(worker, &completions.0, tally, |text, tally| {
        completion(body, text, tally)
    })?;
    Ok((batch, next.map(|Nested(next)| next.into())))
}

/// Reads the tasks that a worker gives back.
pub(in crate::ingress) fn rejections(
    body: &Bytes,
    tally: &mut Tally<'_>,
) -> Result<Batch<model::Rejection>, Unread> {
    let RejectTasks { worker, rejections } = object(body)?;
    batch(worker, &rejections.0, tally, |text, _| Ok(rejection(text)))
}

/// Reads the tasks that a worker needs for longer.
pub(in crate::ingress) fn extensions(
    body: &Bytes,
    tally: &mut Tally<'_>,
) -> Result<Batch<model::Extension>, Unread> {
    let ExtendTasks { worker, extensions } = object(body)?;
    batch(worker, &extensions.0, tally, |text, _| Ok(extension(text)))
}

/// Checks what all items have in common, then reads each.
pub(super) fn batch<T>(
    worker: String,
    texts: &[&RawValue],
    tally: &mut Tally<'_>,
    read: impl Fn(&str, &mut Tally<'_>) -> Result<Result<Item<T>, String>, Excess>,
) -> Result<Batch<T>, Unread> {
    // Without a name, the caller's token may say which worker it is.
    if !worker.is_empty() {
        WorkerName::new(&worker).map_err(|error| Unread::Invalid(error.to_string()))?;
    }
    texts.iter().try_for_each(|_| tally.item())?;
    let answered = |text: &&RawValue| {
        let item = read(text.get(), tally)?;
        item.as_ref()
            .err()
            .map_or(Ok(()), |why| tally.unreadable(why))?;
        Ok(item.map_err(|why| ItemAnswer::invalid(echoed_id(text.get()), why)))
    };
    let items = texts.iter().map(answered).collect::<Result<_, Excess>>()?;
    Ok(Batch { worker, items })
}

/// Returns the id of an item that cannot be read as a whole, if at least the id can.
fn echoed_id(text: &str) -> String {
    #[derive(Deserialize)]
    struct Id {
        id: String,
    }
    serde_json::from_str(text).map_or_else(
        |_| String::new(),
        |Id { id }| shorten(&id, ECHO).into_owned(),
    )
}

pub(super) fn completion(
    body: &Bytes,
    text: &str,
    tally: &mut Tally<'_>,
) -> Result<Result<Item<model::Completion>, String>, Excess> {
    let completion: Completion<'_> = match item(text, "a completion") {
        Ok(completion) => completion,
        Err(error) => return Ok(Err(error)),
    };
    let mut discovered = Vec::new();
    let mut not_stored = NotStored::default();
    for (index, task) in completion.discovered.0.iter().enumerate() {
        tally.discovered()?;
        match insert::part(body, task.get(), tally)? {
            Ok(task) => discovered.push(task),
            Err(error) => not_stored.add(|| format!("discovered[{index}]: {error}")),
        }
    }
    let limit = limit_report(completion.limit);
    let (id, lease_token) = (completion.id, completion.lease_token);
    let result = value::read(body, "result", completion.result, completion.result_base64);
    Ok(result.map(|(result, result_encoding)| {
        let report = model::Completion {
            result,
            result_encoding,
            discovered,
            not_stored,
            limit,
            ..Default::default()
        };
        Item {
            id,
            lease_token,
            report: Ok(report),
        }
    }))
}

pub(super) fn rejection(text: &str) -> Result<Item<model::Rejection>, String> {
    let Rejection {
        id,
        lease_token,
        reason,
        retry,
        delay,
        not_started,
        limit,
    } = item(text, "a rejection")?;
    let (retry, delay) = (retry.unwrap_or(true), delay.map(|time| time.0));
    let report = model::Rejection {
        reason,
        retry,
        delay,
        not_started,
        limit: limit_report(limit),
    };
    Ok(Item {
        id,
        lease_token,
        report: Ok(report),
    })
}

pub(super) fn extension(text: &str) -> Result<Item<model::Extension>, String> {
    let Extension {
        id,
        lease_token,
        by,
    } = item(text, "an extension")?;
    Ok(Item {
        id,
        lease_token,
        report: Ok(model::Extension {
            by: by.map(|time| time.0),
        }),
    })
}

/// The answers to completions, and the tasks that `next` asked for.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct Completed<'a> {
    results: &'a [ItemAnswer],
    /// Only with `next`.
    #[serde(skip_serializing_if = "Option::is_none")]
    tasks: Option<Vec<LeasedTask<'a>>>,
}

impl<'a> Completed<'a> {
    pub(in crate::ingress) fn new(
        answers: &'a [ItemAnswer],
        tasks: &'a [model::LeasedTask],
    ) -> Self {
        let tasks = Some(tasks.iter().map(LeasedTask::from).collect());
        Self {
            results: answers,
            tasks,
        }
    }

    /// The answer before its tasks, which follow.
    pub(in crate::ingress) fn before_tasks(answers: &'a [ItemAnswer]) -> Entry {
        Entry::new(&Self {
            results: answers,
            tasks: None,
        })
    }
}

/// A task with a lease for the worker.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct LeasedTask<'a> {
    id: TaskId,
    #[schemars(with = "QueueName")]
    queue: &'a str,
    #[serde(flatten)]
    key: Key<'a>,
    #[serde(flatten)]
    payload: Payload<'a>,
    headers: &'a HashMap<String, String>,
    traceparent: &'a str,
    #[schemars(with = "String")]
    lease_token: &'a LeaseToken,
    #[schemars(with = "Instant")]
    lease_expires_at: String,
    attempt: u32,
    replicas: u32,
    priority: Priority,
    /// What the task shares its limits with, if it has limits.
    #[serde(skip_serializing_if = "str::is_empty")]
    limit_key: &'a str,
}

impl<'a> From<&'a model::LeasedTask> for LeasedTask<'a> {
    fn from(task: &'a model::LeasedTask) -> Self {
        let model::LeasedTask {
            id,
            token,
            expires_unix_ms,
            lease: _,
            body,
        } = task;
        Self {
            id: *id,
            queue: token.shard.queue.as_str(),
            key: (&body.key).into(),
            payload: Payload::of(&body.payload, body.payload_encoding),
            headers: &body.headers,
            traceparent: &body.traceparent,
            lease_token: token,
            lease_expires_at: to_rfc_3339(*expires_unix_ms),
            attempt: token.attempt,
            replicas: body.replicas,
            priority: body.priority,
            limit_key: &body.limit_key,
        }
    }
}

/// Writes a task as an entry of a large answer.
pub(in crate::ingress) fn large(mut task: model::LeasedTask) -> Entry {
    let payload = Large::of(
        std::mem::take(&mut task.body.payload),
        task.body.payload_encoding,
    );
    let mut fields = LeasedTask::from(&task);
    fields.payload.payload_encoding = payload.encoding();
    let mut entry = Entry::new(&fields);
    entry.value("payload", payload);
    entry.end()
}

#[cfg(test)]
mod tests;
