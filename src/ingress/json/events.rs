//! Events of tasks, and the answers to inserts that wait.

use std::time::Duration;

use bytes::Bytes;
use schemars::JsonSchema;
use serde::Serialize;

use super::{
    large::Entry,
    query,
    read::{self, TaskResult},
    text::Time,
};
use crate::model::{self, InsertAnswer, Key, TaskEvent, TaskStatus, TreeState, WaitFor, WatchEnd};

/// A task took on a status.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct Event<'a> {
    #[serde(flatten)]
    event: &'a TaskEvent,
    /// Left out if SQL could not be asked for it.
    #[serde(flatten)]
    key: Option<Key<'a>>,
}

impl<'a> Event<'a> {
    pub(in crate::ingress) fn new(event: &'a TaskEvent, key: Option<&'a Bytes>) -> Self {
        Self {
            event,
            key: key.map(Key::from),
        }
    }
}

/// Why a stream of events ends before its task does.
#[derive(Serialize)]
pub(in crate::ingress) struct End {
    reason: &'static str,
    detail: &'static str,
}

impl From<WatchEnd> for End {
    fn from(end: WatchEnd) -> Self {
        Self {
            reason: end.as_str(),
            detail: end.says(),
        }
    }
}

/// Reads the query of an insert: how long it waits, and for what; `None` if it does not wait.
pub(in crate::ingress) fn wait(text: &str) -> Result<Option<(Duration, WaitFor)>, String> {
    let mut wait = None;
    let mut wait_for = None;
    for (name, value) in query::parameters(text)? {
        match &*name {
            "wait" => {
                let Time(duration) = value.parse().map_err(|why| format!("wait: {why}"))?;
                wait = Some(duration);
            }
            "wait_for" => {
                let read = WaitFor::parse(&value).map_err(|why| format!("wait_for: {why}"))?;
                wait_for = Some(read);
            }
            // The route has refused other names.
            _ => {}
        }
    }
    match (wait, wait_for) {
        (None, Some(_)) => Err(WaitFor::NEEDS_WAIT.into()),
        (wait, wait_for) => Ok(wait.map(|wait| (wait, wait_for.unwrap_or_default()))),
    }
}

/// The answer to one inserted task. With `wait`, also what became of it.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct AwaitedTask<'a> {
    #[serde(flatten)]
    answer: &'a InsertAnswer,
    /// Its status at the end of the wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    task_status: Option<TaskStatus>,
    /// With `wait_for=tree`: the state of its tree at the end of the wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    tree_state: Option<TreeState>,
    /// The results, if the task is completed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    results: Vec<TaskResult<'a>>,
}

/// Writes the answer as an entry of a large list.
pub(in crate::ingress) fn large(mut awaited: model::AwaitedTask) -> Entry {
    let results = std::mem::take(&mut awaited.results);
    let mut entry = Entry::new(&AwaitedTask::from(&awaited));
    if !results.is_empty() {
        entry.list("results", results.into_iter().map(read::large));
    }
    entry.end()
}

impl<'a> From<&'a model::AwaitedTask> for AwaitedTask<'a> {
    fn from(awaited: &'a model::AwaitedTask) -> Self {
        let model::AwaitedTask {
            answer,
            status,
            results,
            tree_state,
        } = awaited;
        Self {
            answer,
            task_status: *status,
            tree_state: *tree_state,
            results: results.iter().map(Into::into).collect(),
        }
    }
}
