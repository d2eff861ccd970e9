//! Executions of workflows: their names and statuses, and lists of them.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The id of an execution. It begins with the time at which the execution was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExecutionId(Uuid);

impl ExecutionId {
    /// Sorts before all executions. [`Self::LAST`] sorts after them.
    pub const FIRST: Self = Self(Uuid::nil());
    pub const LAST: Self = Self(Uuid::max());

    /// Creates a UUIDv7.
    #[expect(
        clippy::new_without_default,
        reason = "every id differs, so there is no default one"
    )]
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// Reads an id as users write it.
    pub fn parse(text: &str) -> Option<Self> {
        Uuid::try_parse(text).ok().map(Self)
    }

    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        Uuid::from_slice(bytes).ok().map(Self)
    }

    /// The first id of this time, by which a list begins or ends.
    pub fn first_of(unix_ms: i64) -> Self {
        let mut bytes = [0; 16];
        let [_, _, time @ ..] = unix_ms.max(0).to_be_bytes();
        bytes[..6].copy_from_slice(&time);
        Self(Uuid::from_bytes(bytes))
    }

    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }
}

impl fmt::Display for ExecutionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What names a definition of a workflow.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub struct WorkflowVersion {
    pub namespace: String,
    pub name: String,
    pub version: String,
}

impl fmt::Display for WorkflowVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            namespace,
            name,
            version,
        } = self;
        write!(f, "{namespace}/{name}/{version}")
    }
}

/// Whether an execution runs, and how it ended. SQL stores the discriminants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum ExecutionStatus {
    /// It has not begun.
    Pending = 0,
    /// Something can be done at once.
    Running = 1,
    /// It waits for a step or a timer.
    Waiting = 2,
    Completed = 3,
    Faulted = 4,
    Cancelled = 5,
}

impl ExecutionStatus {
    pub const ALL: [Self; 6] = [
        Self::Pending,
        Self::Running,
        Self::Waiting,
        Self::Completed,
        Self::Faulted,
        Self::Cancelled,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Completed => "completed",
            Self::Faulted => "faulted",
            Self::Cancelled => "cancelled",
        }
    }

    pub fn from_number(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|known| *known as i64 == number)
    }

    /// Whether the execution goes on no more.
    pub fn is_final(self) -> bool {
        self >= Self::Completed
    }
}

impl fmt::Display for ExecutionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A request for a page of executions, newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecutionPages {
    /// The namespace and the name of the workflow.
    pub workflow: Option<(String, String)>,
    pub status: Option<ExecutionStatus>,
    /// Those that were created at this time or later.
    pub since_unix_ms: Option<i64>,
    /// Those that were created before this time.
    pub until_unix_ms: Option<i64>,
    /// The last execution of the page before.
    pub after: Option<ExecutionId>,
    pub limit: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_id_of_a_time_is_before_all_others_of_it() {
        let id = ExecutionId::new();
        let [a, b, c, d, e, f, ..] = *id.as_bytes();
        let at = i64::from_be_bytes([0, 0, a, b, c, d, e, f]);
        assert!(ExecutionId::first_of(at) < id);
        assert!(ExecutionId::first_of(at + 1) > id);
        assert_eq!(ExecutionId::parse(&id.to_string()), Some(id));
    }
}
