//! What goes into the machine and what comes out of it.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    event::{Entry, StepKey},
    state::Status,
};
use crate::{
    model::{QueueName, json},
    workflow::{definition::StepOptions, expression::Bounds},
};

/// What comes to an execution from outside.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// It begins.
    Start {
        /// The id of the execution.
        execution: String,
        input: Value,
    },
    /// A step ended. Ignored if the execution does not wait for it any more.
    StepEnded { key: StepKey, end: StepEnd },
    /// A timer is due. Ignored if it is not armed any more.
    TimerFired { timer: u64 },
    /// An operator cancels the execution. Ignored if it has ended.
    Cancel,
    /// The execution goes on where [`Outcome::more`] left it.
    Resume,
}

/// How a step ended.
#[derive(Clone, Debug, PartialEq)]
pub enum StepEnd {
    /// The results of its workers, in the order of time.
    Completed { results: Vec<Value> },
    /// It died, with the reason of its last attempt.
    Dead { reason: String },
    /// An operator cancelled it.
    Cancelled,
}

impl StepEnd {
    /// The result of a worker: JSON, or a text as a string. An empty one is null, and JSON that is too
    /// deep to be read again is a text.
    pub fn result(bytes: &[u8]) -> Value {
        if bytes.is_empty() {
            return Value::Null;
        }
        let read = serde_json::from_slice(bytes).ok();
        read.filter(|value| json::levels(value) <= json::MAX_DEPTH)
            .unwrap_or_else(|| Value::String(String::from_utf8_lossy(bytes).into_owned()))
    }
}

/// What the caller does in the transaction that stores the events.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Inserts a task.
    IssueStep(Box<Step>),
    /// Cancels the task of a step.
    CancelStep(StepKey),
    /// Stores a timer.
    ArmTimer {
        timer: u64,
        /// Unix time in milliseconds.
        due: i64,
    },
    /// Removes a timer, if it is still there.
    DisarmTimer { timer: u64 },
    /// The execution has ended. The state has its output or error.
    Finish(Status),
}

/// A task to insert.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub key: StepKey,
    pub queue: QueueName,
    /// Settings of the task; those that are absent are the queue's. Its `queue` is [`Self::queue`] already.
    pub options: StepOptions,
    /// JSON.
    pub payload: Value,
}

/// What one execution may use. An execution that goes beyond faults, and says which limit it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most events.
    pub events: u64,
    /// The most bytes of its state, which are mostly values.
    pub state: usize,
    /// The most bytes of the values in its history.
    pub history: u64,
    /// The most tasks between two waits.
    pub steps: u32,
    /// How deep tasks may be in each other.
    pub depth: usize,
    /// Of each expression, and of all those of one task together.
    pub expressions: Bounds,
    /// After this many events, bytes, or work of expressions a call of [`super::step`] returns, even if
    /// more can be done.
    pub batch_events: usize,
    pub batch_bytes: usize,
    pub batch_work: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            events: 100_000,
            state: 4 << 20,
            history: 256 << 20,
            steps: 10_000,
            depth: 64,
            expressions: Bounds::default(),
            batch_events: 1000,
            batch_bytes: 4 << 20,
            batch_work: 200_000_000,
        }
    }
}

/// What a call of [`super::step`] gives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// What to append to the log. Empty if the input changed nothing.
    pub entries: Vec<Entry>,
    pub commands: Vec<Command>,
    /// Whether to call again with [`Input::Resume`], after the events were stored.
    pub more: bool,
    /// How many evaluations went beyond each bound.
    pub refused: BTreeMap<&'static str, u64>,
}
