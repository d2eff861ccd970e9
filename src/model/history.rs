//! The history of a task: its attempts, and the acts of operators on it.

use std::collections::HashMap;

use bytes::Bytes;
use schemars::JsonSchema;
use serde::Serialize;

use super::{Act, Encoding, LeaseNumber, NewBackoff, Rfc3339, TaskId, TaskView, some_rfc_3339};

/// How an attempt ended, or that it is still running. SQL and protobuf store the discriminants.
#[derive(Clone, Copy, Debug, JsonSchema, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[repr(u8)]
pub enum AttemptState {
    /// The worker still holds the task.
    Leased = 1,
    /// The worker reported a result.
    Completed = 2,
    /// The worker rejected the task.
    Rejected = 3,
    /// The worker's lease expired.
    Expired = 4,
}

impl AttemptState {
    pub const ALL: [Self; 4] = [Self::Leased, Self::Completed, Self::Rejected, Self::Expired];

    pub fn from_number(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as i64 == number)
    }
}

/// An attempt of a worker.
#[derive(Clone, Debug, JsonSchema, PartialEq, Eq, Serialize)]
#[schemars(rename = "TaskAttempt")]
pub struct Attempt {
    pub worker: String,
    pub state: AttemptState,
    // `None` if taskd does not know it.
    #[serde(
        rename = "from",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub from_unix_ms: Option<i64>,
    // `None` if the attempt is still running.
    #[serde(
        rename = "until",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub until_unix_ms: Option<i64>,
    // Only of an attempt that is still running.
    #[serde(
        rename = "lease_expires_at",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub expires_unix_ms: Option<i64>,
    // 1 for the first attempt, as the worker was told. 0 if unknown.
    #[serde(skip_serializing_if = "is_unknown")]
    pub attempt: u32,
    // Why the attempt failed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    // The worker completed the task after NUM others, or after the task had ended.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub surplus: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_unknown(attempt: &u32) -> bool {
    *attempt == 0
}

/// An attempt that ended without a result, to be stored in SQL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedAttempt {
    pub id: TaskId,
    pub worker: String,
    pub state: AttemptState,
    /// 0 if unknown.
    pub leased_unix_ms: i64,
    pub at_unix_ms: i64,
    pub attempt: u32,
    /// Distinguishes the leases of a task.
    pub lease: LeaseNumber,
    pub reason: String,
}

/// The maximum length of the reason of a failed attempt, in bytes.
const LONGEST_REASON: usize = 1024;

impl FailedAttempt {
    /// The reason, truncated for the history.
    pub fn cut(reason: &str) -> &str {
        &reason[..reason.floor_char_boundary(LONGEST_REASON)]
    }
}

/// A task with everything that is known about it, except its results.
#[derive(Clone, Debug)]
pub struct TaskFile {
    pub task: TaskView,
    pub payload: Bytes,
    pub payload_encoding: Encoding,
    pub headers: HashMap<String, String>,
    pub traceparent: String,
    /// The task's own backoff, or `None` if it uses the queue's.
    pub backoff: Option<NewBackoff>,
    /// Oldest first.
    pub history: Vec<Attempt>,
    /// Oldest first.
    pub acts: Vec<Act>,
    /// The number of results.
    pub results: u32,
}

impl TaskFile {
    /// The approximate size of the file in an answer, in bytes.
    pub fn weight(&self) -> usize {
        /// The approximate size of an attempt or an act without its texts.
        const ENTRY: usize = 256;
        let headers = self
            .headers
            .iter()
            .map(|(name, value)| name.len() + value.len())
            .sum();
        let attempts: usize = self
            .history
            .iter()
            .map(|one| one.reason.len() + one.worker.len() + ENTRY)
            .sum();
        super::weight(self.task.key.len(), self.payload.len(), headers)
            + attempts
            + self.acts.len() * ENTRY
    }
}

/// The time at which an attempt began, or `None` if it is implausible: the time comes from a token
/// that the worker sends back, and a clock may have been set back.
pub fn began(leased_unix_ms: i64, ended_unix_ms: i64) -> Option<i64> {
    (leased_unix_ms > 0 && leased_unix_ms <= ended_unix_ms).then_some(leased_unix_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_cut_between_characters() {
        let long = format!("x{}", "é".repeat(600));
        assert_eq!(FailedAttempt::cut(&long).len(), 1023);
        assert_eq!(FailedAttempt::cut("short"), "short");
    }

    #[test]
    fn a_beginning_that_cannot_be_is_unknown() {
        assert_eq!([began(5, 9), began(9, 9)], [Some(5), Some(9)]);
        assert_eq!([began(0, 9), began(-1, 9), began(10, 9)], [None; 3]);
    }
}
