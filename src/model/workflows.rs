//! Workflows that are deployed, and their executions, as callers see them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ExecutionStatus, Rfc3339, rfc_3339, some_rfc_3339};

/// The longest id that a caller may give an execution, in bytes.
pub const MAX_GIVEN_ID_BYTES: usize = 128;

/// A version of a workflow in an answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "Workflow")]
pub struct WorkflowView {
    pub namespace: String,
    pub name: String,
    pub version: String,
    /// SHA-256 of the definition in canonical JSON, in hex. An execution is pinned to it.
    pub hash: String,
    /// The queues of its steps; only for one version.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<String>,
    /// Who deployed it. Absent in the answer to a dry run.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub deployed_by: String,
    #[serde(
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub deployed_at: Option<i64>,
    /// The definition as it was deployed; only for one version.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub text: String,
}

/// A page of workflows.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct WorkflowList {
    pub workflows: Vec<WorkflowView>,
    /// The cursor of the next page; absent on the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// An execution in an answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "Execution")]
pub struct ExecutionView {
    pub id: String,
    /// The id that was given at its start.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub given_id: String,
    pub namespace: String,
    pub name: String,
    pub version: String,
    /// The hash of its definition.
    pub hash: String,
    pub status: ExecutionStatus,
    /// The status in the words of an older system: `PENDING`, `RUNNING`, `CANCELLED`, `FAILED` or
    /// `COMPLETED`.
    pub status_group: &'static str,
    /// The number of events so far.
    pub events: u64,
    #[serde(serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub started_at: i64,
    /// When something happened in it last.
    #[serde(serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub updated_at: i64,
    #[serde(
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub ended_at: Option<i64>,
    /// Only for one execution, like all that follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input: Option<Value>,
    /// The output of a completed one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<Value>,
    /// The error of a faulted one: a problem document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<Value>,
    /// What it waits for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<ExecutionWait>,
}

/// What an execution waits for.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ExecutionWait {
    /// The task of the workflow that waits: a JSON pointer.
    pub path: String,
    /// `step`: the end of a task in a queue; `wait`, `timeout`, `retry` or `attempt`: a timer.
    pub on: String,
    /// The task of a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    #[serde(serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub since: i64,
    /// When a timer is due.
    #[serde(
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub until: Option<i64>,
}

/// What is stored for readers next to the status of an execution. Later versions read these names.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExecutionSummary {
    /// The output of a completed one, unless it is null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<Value>,
    /// The error of a faulted one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<SummaryWait>,
}

/// What an execution waits for, as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SummaryWait {
    pub path: String,
    pub on: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    pub since_unix_ms: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_unix_ms: Option<i64>,
}

impl From<SummaryWait> for ExecutionWait {
    fn from(wait: SummaryWait) -> Self {
        Self {
            path: wait.path,
            on: wait.on,
            task: wait.task,
            since: wait.since_unix_ms,
            until: wait.until_unix_ms,
        }
    }
}

/// A page of executions.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ExecutionList {
    pub executions: Vec<ExecutionView>,
    /// The cursor of the next page; absent on the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}
