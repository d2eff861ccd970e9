//! The history of a task: its attempts, and the acts of operators on it.

use std::collections::HashMap;

use bytes::Bytes;
use schemars::JsonSchema;
use serde::Serialize;

use super::{Act, Encoding, LeaseNumber, NewBackoff, Rfc3339, TaskId, TaskView, some_rfc_3339};

/// The end of an attempt, or that it goes on. SQL and protobuf keep the discriminants.
#[derive(Clone, Copy, Debug, JsonSchema, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[repr(u8)]
pub enum AttemptState {
    /// The worker has the task.
    Leased = 1,
    /// The worker has a result.
    Completed = 2,
    /// The worker gave the task back.
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
    // `None`: taskd does not know it.
    #[serde(
        rename = "from",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub from_unix_ms: Option<i64>,
    // `None`: it goes on.
    #[serde(
        rename = "until",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub until_unix_ms: Option<i64>,
    // Of an attempt that goes on.
    #[serde(
        rename = "lease_expires_at",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub expires_unix_ms: Option<i64>,
    // 1 for the first try, as the worker was told. 0: unknown.
    #[serde(skip_serializing_if = "is_unknown")]
    pub attempt: u32,
    // The reason of its failure.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    // The worker completed after NUM others, or after the end of the task.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub surplus: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_unknown(attempt: &u32) -> bool {
    *attempt == 0
}

/// An attempt that ended without a result, on its way to SQL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedAttempt {
    pub id: TaskId,
    pub worker: String,
    pub state: AttemptState,
    /// 0: unknown.
    pub leased_unix_ms: i64,
    pub at_unix_ms: i64,
    pub attempt: u32,
    /// Tells the leases of a task apart.
    pub lease: LeaseNumber,
    pub reason: String,
}

/// The most bytes of the reason of a failed attempt.
const LONGEST_REASON: usize = 1024;

impl FailedAttempt {
    /// The reason as the history keeps it.
    pub fn cut(reason: &str) -> &str {
        &reason[..reason.floor_char_boundary(LONGEST_REASON)]
    }
}

/// A task with all that its reader may want to know, but for its results.
#[derive(Clone, Debug)]
pub struct TaskFile {
    pub task: TaskView,
    pub payload: Bytes,
    pub payload_encoding: Encoding,
    pub headers: HashMap<String, String>,
    pub traceparent: String,
    /// The task's own; `None`: the queue's.
    pub backoff: Option<NewBackoff>,
    /// The earliest first.
    pub history: Vec<Attempt>,
    /// The earliest first.
    pub acts: Vec<Act>,
    /// How many results it has.
    pub results: u32,
}

impl TaskFile {
    /// The bytes of the file in an answer, about.
    pub fn weight(&self) -> usize {
        /// The names, times and numbers of an attempt or an act.
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

/// The moment at which an attempt began, if that can be: a token comes back from its worker, and
/// clocks are set back.
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
