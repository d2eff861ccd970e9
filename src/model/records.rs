//! The contents of bus records.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::Serialize;

use super::{
    Encoding, Joining, LeaseNumber, NewJoin, NewTask, QueueName, Rfc3339, TaskId, UnreadableTask,
    rfc_3339,
};

/// A task being moved from SQL to the queue.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineTask {
    pub id: TaskId,
    pub queue: QueueName,
    /// The task may have been published before, so the fanout asks SQL about it first.
    pub again: bool,
    pub published_unix_ms: i64,
    pub replicas: u32,
    /// 0 if due immediately.
    pub not_before_unix_ms: i64,
    /// The bytes that Redis stores.
    pub body: Bytes,
    /// Empty unless the task is sampled.
    pub traceparent: String,
}

/// The end of an attempt or of a task, to be stored in SQL.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    pub id: TaskId,
    /// Redis's clock.
    pub at_unix_ms: i64,
    pub what: What,
}

#[derive(Clone, Debug, PartialEq)]
pub enum What {
    Completed(Completed),
    Died(Died),
}

/// A worker's report that it has finished a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Completed {
    pub worker: String,
    pub result: Bytes,
    pub result_encoding: Encoding,
    pub discovered: Vec<DiscoveredTask>,
    /// As in [`Completion`](super::Completion).
    pub joining: Option<Box<Joining<NewJoin>>>,
    pub attempt: u32,
    pub lease: LeaseNumber,
    /// When the lease was granted, or 0 if unknown.
    pub leased_unix_ms: i64,
    /// The span of the work. Empty unless the task is sampled.
    pub traceparent: String,
}

/// A discovered task in a report. `Err` if this version cannot read all of it.
pub type DiscoveredTask = Result<NewTask, Box<UnreadableTask>>;

/// The death of a task, as decided by a Lua script.
#[derive(Clone, Debug, PartialEq)]
pub struct Died {
    pub reason: String,
    pub attempts: u32,
    /// The most recent failures, oldest first.
    pub history: Vec<Failure>,
    /// The epoch of the task when it died.
    pub epoch: u32,
}

/// A rejection, or an expired lease.
#[derive(Clone, Debug, JsonSchema, PartialEq, Eq, Serialize)]
pub struct Failure {
    #[serde(rename = "at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub at_unix_ms: i64,
    pub worker: String,
    pub reason: String,
}

/// An expired lease.
#[derive(Clone, Debug, PartialEq)]
pub struct Expiration {
    pub id: TaskId,
    pub queue: String,
    pub worker: String,
    pub attempts: u32,
    pub dead: bool,
    pub at_unix_ms: i64,
}
