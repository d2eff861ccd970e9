//! Tasks, results and queues as their readers see them.

use serde::Serialize;

use super::{
    Key, name, priority_name, time,
    value::{Shown, Value},
};
use crate::{api::query::QueueOverview, model, store::ResultRow, wire::pb};

#[derive(Serialize)]
pub(in crate::ingress) struct Task<'a> {
    id: &'a str,
    queue: &'a str,
    #[serde(flatten)]
    key: Key<'a>,
    status: &'a str,
    replicas: u32,
    completed: u32,
    leased: u32,
    attempts: u32,
    priority: &'a str,
    created_at: Option<String>,
    updated_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_before: Option<String>,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'a str,
}

impl<'a> From<&'a pb::Task> for Task<'a> {
    fn from(task: &'a pb::Task) -> Self {
        Self {
            id: &task.id,
            queue: &task.queue,
            key: (&task.key).into(),
            status: name(task.status().as_str_name(), "TASK_STATUS_"),
            replicas: task.replicas,
            completed: task.completed,
            leased: task.leased,
            attempts: task.attempts,
            priority: priority_name(task.priority()),
            created_at: time(&task.created_at),
            updated_at: time(&task.updated_at),
            not_before: time(&task.not_before),
            reason: &task.reason,
        }
    }
}

#[derive(Serialize)]
pub(in crate::ingress) struct TaskResult<'a> {
    worker: &'a str,
    attempt: u32,
    completed_at: String,
    surplus: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Value<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result_base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result_encoding: Option<&'static str>,
}

impl<'a> From<&'a ResultRow> for TaskResult<'a> {
    fn from(row: &'a ResultRow) -> Self {
        let Shown { value, base64, encoding } = Shown::of(&row.result, row.encoding);
        Self {
            worker: &row.worker,
            attempt: row.attempt,
            completed_at: model::timestamp(row.completed_unix_ms).to_string(),
            surplus: row.surplus,
            result: value,
            result_base64: base64,
            result_encoding: encoding,
        }
    }
}

#[derive(Serialize)]
pub(in crate::ingress) struct Queue<'a> {
    queue: &'a str,
    pending: u64,
    queued: u64,
    assigned: u64,
    delayed: u64,
    leases: u64,
    completed: u64,
    dead: u64,
    cancelled: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    oldest_waiting_ms: Option<u64>,
}

impl<'a> From<&'a QueueOverview> for Queue<'a> {
    fn from(overview: &'a QueueOverview) -> Self {
        Self {
            queue: overview.queue.as_str(),
            pending: overview.pending,
            queued: overview.queued,
            assigned: overview.assigned,
            delayed: overview.delayed,
            leases: overview.leases,
            completed: overview.completed,
            dead: overview.dead,
            cancelled: overview.cancelled,
            oldest_waiting_ms: overview.oldest_waiting_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::json;

    use super::{super::testing::shown, *};
    use crate::model::Encoding;

    #[test]
    fn a_result_is_shown_once_and_as_what_it_was() {
        let row = |result: &'static [u8], encoding| {
            let (worker, result) = ("w".into(), Bytes::from_static(result));
            let row = ResultRow { worker, result, encoding, attempt: 2, completed_unix_ms: 1_500, surplus: true };
            shown(TaskResult::from(&row))
        };
        let json = row(br#"{"links":[1]}"#, Encoding::Json);
        assert_eq!((&json["result"], &json["result_encoding"]), (&json!({"links": [1]}), &json!("json")));
        assert_eq!((&json["surplus"], &json["attempt"]), (&json!(true), &json!(2)));
        assert_eq!(json["completed_at"], "1970-01-01T00:00:01.500Z");
        assert!(json.get("result_base64").is_none());
        assert_eq!(row(b"42", Encoding::Text)["result"], "42");
        assert!(row(b"", Encoding::Text).get("result_encoding").is_none());
        let json = row(b"\xff", Encoding::Bytes);
        assert_eq!((&json["result_base64"], &json["result_encoding"]), (&json!("/w=="), &json!("bytes")));
    }
}
