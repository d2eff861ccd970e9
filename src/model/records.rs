//! The contents of reports on the bus.

use bytes::Bytes;

use super::{Encoding, LeaseNumber, NewTask, TaskId};

/// A worker's report that it has finished a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Completed {
    pub worker: String,
    pub result: Bytes,
    pub result_encoding: Encoding,
    pub discovered: Vec<NewTask>,
    pub attempt: u32,
    pub lease: LeaseNumber,
}

/// The death of a task, decided by a script.
#[derive(Clone, Debug, PartialEq)]
pub struct Died {
    pub reason: String,
    pub attempts: u32,
    /// The last failures, the earliest first.
    pub history: Vec<Failure>,
}

/// One failure of a task: a rejection, or a lease that ran out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub at_unix_ms: i64,
    pub worker: String,
    pub reason: String,
}

/// A lease that ran out.
#[derive(Clone, Debug, PartialEq)]
pub struct Expiration {
    pub id: TaskId,
    pub queue: String,
    pub worker: String,
    pub attempts: u32,
    pub dead: bool,
    pub at_unix_ms: i64,
}
