//! The question where a task is, and the answer.

use schemars::JsonSchema;
use serde::Serialize;

use super::{Unread, query, read::Task, text::Instant};
use crate::{
    model::{self, ExplainTask, TaskPlace, WorkerReason},
    wire::time::to_rfc_3339,
};

/// Reads the question from the query of its URL: `id=…`, or `queue=…&key=…`; and `worker=…`.
pub(in crate::ingress) fn question(text: &str) -> Result<ExplainTask, Unread> {
    let mut question = ExplainTask::default();
    for (name, value) in query::parameters(text).map_err(Unread::Invalid)? {
        match &*name {
            "id" => question.id = value,
            "queue" => question.queue = value,
            "key" => question.key = value.into(),
            "worker" => question.worker = value,
            // The route has refused others.
            _ => {}
        }
    }
    Ok(question)
}

/// Where a task is, what happens to it next, and what keeps it from a worker.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct Explanation<'a> {
    task: Task<'a>,
    place: TaskPlace,
    says: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Instant>")]
    since: Option<String>,
    next: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Instant>")]
    next_at: Option<String>,
    leases: Vec<Lease<'a>>,
    completed_by: &'a [String],
    failures: Vec<Failure<'a>>,
    notes: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    worker: Option<Worker<'a>>,
    #[schemars(with = "Instant")]
    now: String,
}

/// A worker that holds the task.
#[derive(JsonSchema, Serialize)]
struct Lease<'a> {
    worker: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Instant>")]
    lease_expires_at: Option<String>,
    delivered: bool,
}

/// A rejection, or an expired lease.
#[derive(JsonSchema, Serialize)]
struct Failure<'a> {
    #[schemars(with = "Instant")]
    at: String,
    worker: &'a str,
    reason: &'a str,
}

/// A worker's chance of the task.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "WorkerChance")]
struct Worker<'a> {
    worker: &'a str,
    may_get: bool,
    reason: WorkerReason,
    says: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Instant>")]
    until: Option<String>,
}

impl<'a> From<&'a model::Explanation> for Explanation<'a> {
    fn from(explanation: &'a model::Explanation) -> Self {
        Self {
            task: (&explanation.task).into(),
            place: explanation.place,
            says: &explanation.says,
            since: explanation.since_unix_ms.map(to_rfc_3339),
            next: &explanation.next,
            next_at: explanation.next_unix_ms.map(to_rfc_3339),
            leases: explanation.leases.iter().map(Into::into).collect(),
            completed_by: &explanation.completed_by,
            failures: explanation.failures.iter().map(Into::into).collect(),
            notes: &explanation.notes,
            worker: explanation.worker.as_ref().map(Into::into),
            now: to_rfc_3339(explanation.now_unix_ms),
        }
    }
}

impl<'a> From<&'a model::LeaseView> for Lease<'a> {
    fn from(lease: &'a model::LeaseView) -> Self {
        let lease_expires_at = lease.expires_unix_ms.map(to_rfc_3339);
        Self {
            worker: &lease.worker,
            lease_expires_at,
            delivered: lease.is_delivered,
        }
    }
}

impl<'a> From<&'a model::Failure> for Failure<'a> {
    fn from(failure: &'a model::Failure) -> Self {
        Self {
            at: to_rfc_3339(failure.at_unix_ms),
            worker: &failure.worker,
            reason: &failure.reason,
        }
    }
}

impl<'a> From<&'a model::WorkerView> for Worker<'a> {
    fn from(view: &'a model::WorkerView) -> Self {
        Self {
            worker: &view.worker,
            may_get: view.reason == WorkerReason::MayGet,
            reason: view.reason,
            says: &view.says,
            until: view.until_unix_ms.map(to_rfc_3339),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_read_from_the_query() {
        let read = question("queue=q&key=https%3A%2F%2Fa%2F%3Fb+c&worker=w").unwrap();
        assert_eq!(
            (&read.queue[..], &read.key[..], &read.worker[..]),
            ("q", &b"https://a/?b c"[..], "w")
        );
        assert_eq!(question("").unwrap(), ExplainTask::default());
        let refused = question("id=1&id=2").unwrap_err().to_string();
        assert_eq!(refused, "the parameter \"id\" is given twice");
    }
}
