//! Requests and answers of the operations as plain types that no protocol shapes.

use std::{borrow::Cow, collections::HashMap, fmt, net::SocketAddr, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use super::{
    Access, Encoding, Joining, LeaseToken, LimitReport, NewBackoff, OnDead, Priority, QueueName,
    Rfc3339, TaskId, TaskRow, TaskTree, WorkerName, rfc_3339, some_rfc_3339,
};

/// The client of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    pub protocol: Protocol,
    /// `None` if the operating system did not provide it.
    pub peer: Option<SocketAddr>,
}

/// The client that makes an authenticated call, and its access.
#[derive(Clone, Debug)]
pub struct Caller {
    pub client: Client,
    pub access: Access,
}

/// The protocol of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1 with JSON.
    Http,
    /// gRPC over HTTP/2.
    Grpc,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Http => "HTTP",
            Self::Grpc => "gRPC",
        })
    }
}

/// A task to insert, not validated yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewTask {
    /// A task with an id takes no key: its id follows from where it comes from, so a second insert
    /// with it changes nothing. `key` then only chooses the shard and the limit key. Set inside of
    /// the process only, never by a caller.
    pub id: Option<TaskId>,
    pub queue: String,
    /// If empty, the hash of the payload becomes the key, or the shard follows from the id.
    pub key: Bytes,
    pub payload: Bytes,
    pub payload_encoding: Encoding,
    /// `None` in this and the following fields means the queue's setting.
    pub replicas: Option<u32>,
    pub priority: Option<Priority>,
    /// How long to wait before the first claim. At most one of this and `not_before_unix_ms` is
    /// set.
    pub delay: Option<Duration>,
    pub not_before_unix_ms: Option<i64>,
    /// When the task must have its NUM completions. At most one of this and `finish_within` is set.
    pub deadline_unix_ms: Option<i64>,
    pub finish_within: Option<Duration>,
    pub lease_duration: Option<Duration>,
    pub max_attempts: Option<u32>,
    pub backoff: Option<NewBackoff>,
    pub headers: HashMap<String, String>,
    /// If empty, taskd creates one.
    pub traceparent: String,
    /// Empty for none. If an insert is repeated with the same key, it gets the original answer.
    pub idempotency_key: String,
    /// What the task shares its limits with. Empty: as the queue's `limit_by` says.
    pub limit_key: String,
    /// The sequence of the queue in which it goes one after the other. Empty: none.
    pub sequence: String,
    /// What the death of the task means for the next ones of its sequence.
    pub on_dead: OnDead,
    /// The tree that it begins or joins; `None`: none.
    pub tree: Option<Box<TaskTree>>,
    /// Of a discovered task in a topology: the port to which it is sent, in place of a queue.
    /// Empty: none.
    pub port: String,
}

/// Converts a stored task to the form that an insert takes, with all defaults filled in.
impl From<&TaskRow> for NewTask {
    fn from(row: &TaskRow) -> Self {
        Self {
            id: row.key_hash.task_without_key(),
            queue: row.queue.as_str().to_owned(),
            key: row.key.clone(),
            payload: row.payload.clone(),
            payload_encoding: row.payload_encoding,
            replicas: Some(row.replicas),
            priority: Some(row.priority),
            delay: None,
            not_before_unix_ms: (row.not_before_unix_ms > 0).then_some(row.not_before_unix_ms),
            deadline_unix_ms: (row.deadline_unix_ms > 0).then_some(row.deadline_unix_ms),
            finish_within: None,
            lease_duration: Some(Duration::from_millis(row.lease_ms.into())),
            max_attempts: Some(row.max_attempts),
            backoff: row.backoff.map(NewBackoff::from),
            headers: row.headers.iter().cloned().collect(),
            traceparent: row.context().into_owned(),
            // The window of the idempotency key began with the insert, and the row only has a hash
            // of the key.
            idempotency_key: String::new(),
            limit_key: row.limit_key.clone(),
            sequence: row
                .sequence
                .as_ref()
                .map(|sequence| sequence.name.clone())
                .unwrap_or_default(),
            on_dead: row
                .sequence
                .as_ref()
                .map(|sequence| sequence.on_dead)
                .unwrap_or_default(),
            // SQL knows the tree of a stored task.
            tree: None,
            port: String::new(),
        }
    }
}

/// The fate of an inserted task.
#[derive(Clone, Copy, Debug, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum InsertStatus {
    Created,
    Duplicate,
    /// The task is invalid, and would be rejected again.
    Rejected,
    /// The task was not stored, and may be sent again.
    TryLater,
}

/// The answer to one inserted task.
#[derive(Clone, Debug, JsonSchema, PartialEq, Serialize)]
pub struct InsertAnswer {
    pub status: InsertStatus,
    /// The id of the new task, or of the task that has the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<TaskId>,
    /// Why taskd did not store the task. For a duplicate of a DEAD or CANCELLED task, it says so.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// Of a duplicate: the status of the task that has the key, if that has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_status: Option<TaskStatus>,
    /// The tree that the task is in, if the insert named a tree. That of a duplicate is the one that
    /// had it first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tree: Option<TaskId>,
}

impl InsertAnswer {
    pub fn rejected(error: String) -> Self {
        Self {
            status: InsertStatus::Rejected,
            id: None,
            error,
            task_status: None,
            tree: None,
        }
    }

    pub fn try_later(error: String) -> Self {
        Self {
            status: InsertStatus::TryLater,
            id: None,
            error,
            task_status: None,
            tree: None,
        }
    }
}

/// A worker's request for tasks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GetTasks {
    pub worker: String,
    pub queues: Vec<String>,
    /// 0 means 1.
    pub max_tasks: u32,
    /// How long to wait for a task if there is none.
    pub wait: Duration,
    /// Overrides the lease durations of the tasks.
    pub lease_duration: Option<Duration>,
    /// Approximate maximum size of the tasks, in bytes. 0 means the default.
    pub max_bytes: u64,
    /// How the queues share the tasks, by name; a queue that is not named has 1. Empty: priorities
    /// decide across queues.
    pub weights: HashMap<String, u32>,
}

/// The parts of a task that only its worker needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TaskBody {
    pub key: Bytes,
    pub payload: Bytes,
    pub payload_encoding: Encoding,
    pub headers: HashMap<String, String>,
    pub traceparent: String,
    pub replicas: u32,
    pub priority: Priority,
    /// Empty: none.
    pub limit_key: String,
}

/// A task to be delivered to a worker. The token contains its queue and its attempt.
#[derive(Clone, Debug)]
pub struct LeasedTask {
    pub id: TaskId,
    pub token: LeaseToken,
    pub expires_unix_ms: i64,
    /// The duration of the lease.
    pub lease: Duration,
    pub body: TaskBody,
}

impl LeasedTask {
    /// The approximate size of the task in an answer, in bytes.
    pub fn weight(&self) -> usize {
        let headers = self
            .body
            .headers
            .iter()
            .map(|(name, value)| name.len() + value.len())
            .sum();
        super::weight(self.body.key.len(), self.body.payload.len(), headers)
    }
}

/// A worker's report about several tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch<T> {
    pub worker: String,
    /// An item is `Err` if not even its id and token could be read. It then holds the answer to the
    /// item.
    pub items: Vec<Result<Item<T>, ItemAnswer>>,
}

/// A worker's report about one task, with the id and the token as the worker sent them.
#[derive(Clone, Debug, PartialEq)]
pub struct Item<T> {
    pub id: String,
    pub lease_token: String,
    /// `Err` says what is wrong with the report.
    pub report: Result<T, String>,
}

/// The worker has finished the task.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    pub result: Bytes,
    pub result_encoding: Encoding,
    /// The tasks that the worker discovered.
    pub discovered: Vec<NewTask>,
    /// What joins of the task's topology have to do with it.
    pub joining: Option<Box<Joining<NewJoin>>>,
    /// Discovered tasks with values that this version cannot read. They become dead letters.
    pub unreadable: Vec<Box<UnreadableTask>>,
    /// What is wrong with individual discovered tasks, to be put into the answer.
    pub not_stored: NotStored,
    pub limit: LimitReport,
}

/// A join whose subtree begins, in a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewJoin {
    /// The task that it makes, without payload.
    pub task: NewTask,
    /// The stages with edges into it, in the order of the file.
    pub from: Vec<String>,
}

/// A task with a value that this version does not know, because a later version wrote it.
#[derive(Clone, Debug, PartialEq)]
pub struct UnreadableTask {
    /// The task without these values.
    pub task: NewTask,
    pub values: RecordedValues,
    pub reason: String,
}

/// Those values of a task that may be unreadable, as they are in its record.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedValues {
    pub payload_encoding: i32,
    pub priority: i32,
    pub delay: Option<RecordedDuration>,
    pub lease_duration: Option<RecordedDuration>,
}

/// A duration that may be negative or out of range.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedDuration {
    pub seconds: i64,
    pub nanos: i32,
}

/// The discovered tasks of a completion that are not stored because they are invalid. The
/// completion counts nevertheless, because the work is done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NotStored {
    count: usize,
    first: String,
}

impl NotStored {
    /// Counts a task. Only the first reason is kept, because a completion may have thousands of
    /// invalid tasks.
    pub fn add(&mut self, why: impl FnOnce() -> String) {
        if self.count == 0 {
            self.first = why();
        }
        self.count += 1;
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The error message of an answer that is otherwise OK. Empty if all tasks are stored.
    pub fn note(&self) -> String {
        match self.count {
            0 => String::new(),
            1 => format!("1 discovered task is not stored: {}", self.first),
            count => format!(
                "{count} discovered tasks are not stored; the first: {}",
                self.first
            ),
        }
    }
}

/// The worker cannot do the task.
#[derive(Clone, Debug, PartialEq)]
pub struct Rejection {
    pub reason: String,
    /// False if the worker must not get the task again.
    pub retry: bool,
    /// Overrides the backoff.
    pub delay: Option<Duration>,
    /// The worker has not started the task: the attempt does not count as a failure, and the task
    /// is offered again immediately.
    pub not_started: bool,
    pub limit: LimitReport,
}

/// The worker needs the task for longer.
#[derive(Clone, Debug, PartialEq)]
pub struct Extension {
    /// The new duration of the lease, from now.
    pub by: Option<Duration>,
}

/// The outcome of a report about one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ItemStatus {
    Ok,
    /// The worker does not hold this lease, or no longer holds it.
    LeaseLost,
    /// Other workers have completed the task.
    AlreadyCompleted,
    UnknownTask,
    Cancelled,
    /// The item is invalid.
    Invalid,
    /// The queue did not respond. The item may be sent again.
    TryLater,
}

impl ItemStatus {
    pub const ALL: [Self; 7] = [
        Self::Ok,
        Self::LeaseLost,
        Self::AlreadyCompleted,
        Self::UnknownTask,
        Self::Cancelled,
        Self::Invalid,
        Self::TryLater,
    ];

    /// The name in JSON and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::LeaseLost => "LEASE_LOST",
            Self::AlreadyCompleted => "ALREADY_COMPLETED",
            Self::UnknownTask => "UNKNOWN_TASK",
            Self::Cancelled => "CANCELLED",
            Self::Invalid => "INVALID",
            Self::TryLater => "TRY_LATER",
        }
    }
}

/// The answer to one item. Answers are in the order of the request.
#[derive(Clone, Debug, JsonSchema, PartialEq, Serialize)]
pub struct ItemAnswer {
    // As the worker sent it.
    pub id: String,
    pub status: ItemStatus,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// Only set after an extension.
    #[serde(
        rename = "lease_expires_at",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub lease_expires_unix_ms: Option<i64>,
}

impl ItemAnswer {
    pub fn new(id: String, status: ItemStatus) -> Self {
        Self {
            id,
            status,
            error: String::new(),
            lease_expires_unix_ms: None,
        }
    }

    pub fn invalid(id: String, error: String) -> Self {
        Self {
            error,
            ..Self::new(id, ItemStatus::Invalid)
        }
    }
}

/// The status of a task, combined from SQL and Redis.
#[derive(Clone, Copy, Debug, JsonSchema, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TaskStatus {
    /// Only in SQL.
    Pending,
    Queued,
    /// At least one worker holds it.
    Assigned,
    /// It waits for its time or its backoff.
    Delayed,
    Completed,
    Dead,
    Cancelled,
}

/// A task with its status.
#[derive(Clone, Debug, JsonSchema, Serialize)]
#[schemars(rename = "Task")]
pub struct TaskView {
    pub id: TaskId,
    pub queue: QueueName,
    #[serde(flatten, serialize_with = "key")]
    #[schemars(with = "Key<'_>")]
    pub key: Bytes,
    pub status: TaskStatus,
    pub replicas: u32,
    // The number of workers that have completed it.
    pub completed: u32,
    // The number of workers that hold it.
    pub leased: u32,
    // Rejections and expired leases.
    pub attempts: u32,
    pub priority: Priority,
    #[serde(rename = "created_at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub created_unix_ms: i64,
    #[serde(rename = "updated_at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub updated_unix_ms: i64,
    #[serde(
        rename = "not_before",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub not_before_unix_ms: Option<i64>,
    // `None` if it has no deadline, or if an operator has removed it by sending the task again.
    #[serde(
        rename = "deadline",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub deadline_unix_ms: Option<i64>,
    // The tasks of its queue with which it goes one after the other. Empty: none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub sequence: String,
    // The tree that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tree: Option<TaskId>,
    // Why the task died.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// A key as text, and also as bytes if it is not UTF-8.
#[derive(JsonSchema, Serialize)]
pub struct Key<'a> {
    key: Cow<'a, str>,
    /// Only set if the key is not UTF-8: `key` then has replacement characters for invalid bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("contentEncoding" = "base64"))]
    key_base64: Option<String>,
}

impl<'a> From<&'a Bytes> for Key<'a> {
    fn from(bytes: &'a Bytes) -> Self {
        let key = String::from_utf8_lossy(bytes);
        let key_base64 = std::str::from_utf8(bytes)
            .is_err()
            .then(|| BASE64.encode(bytes));
        Self { key, key_base64 }
    }
}

fn key<S: Serializer>(key: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
    Key::from(key).serialize(serializer)
}

/// The result that a worker reported for a task.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskResult {
    pub worker: String,
    pub result: Bytes,
    pub encoding: Encoding,
    pub attempt: u32,
    pub completed_unix_ms: i64,
    /// The task had already ended when the worker completed it.
    pub surplus: bool,
}

/// One queue, and whether it is drained if the caller waited for that.
#[derive(Clone, Debug, JsonSchema, Serialize)]
#[schemars(rename = "Queue")]
pub struct OneQueue {
    #[serde(flatten)]
    pub view: QueueView,
    /// Only with `wait=drained`: nothing of the queue was unfinished during the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drained: Option<bool>,
}

/// The task counts of a queue. Each unfinished task is in exactly one of the first four.
#[derive(Clone, Debug, JsonSchema, Serialize)]
pub struct QueueView {
    pub queue: QueueName,
    /// Only in SQL: just stored, parked, or not due for a long time.
    pub pending: u64,
    /// At least one replica can be claimed.
    pub waiting: u64,
    /// Workers hold all remaining replicas.
    pub assigned: u64,
    /// No remaining replica is due yet.
    pub delayed: u64,
    /// The leases of all workers. A task may have as many as it has replicas.
    pub leases: u64,
    pub completed: u64,
    pub dead: u64,
    pub cancelled: u64,
    /// The age of the oldest waiting task, in Redis or in SQL. `None` if no task is waiting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_waiting_ms: Option<u64>,
    /// Workers get no tasks of the queue.
    pub paused: bool,
    /// Shards that cannot be read from Redis. Their unfinished tasks count as pending.
    pub unread_shards: u64,
}

/// The format used by the APIs.
impl Serialize for TaskId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for LeaseToken {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for QueueName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl Serialize for WorkerName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl Serialize for ItemStatus {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl Serialize for Priority {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}
