//! What happened in an execution: its log.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::problem::Problem;
use crate::workflow::program::Next;

/// An event of the log, and when it happened.
///
/// Stored histories have these names, so they never change. Write an entry with its names
/// (`rmp_serde::to_vec_named`, JSON): a value that is null differs from one that is absent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Unix time in milliseconds.
    pub at: i64,
    #[serde(flatten)]
    pub event: Event,
}

/// What happened: an accepted result, or a decision of the machine.
///
/// It has everything that [`super::State::apply`] needs, so that replay evaluates nothing. A value
/// that the state has already is left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Event {
    /// The execution began.
    Started {
        /// The id of the execution.
        execution: String,
        /// The hash of its program.
        program: String,
        input: Value,
        /// What `input.from` of the workflow made of the input, if that differs.
        #[serde(
            default,
            deserialize_with = "present",
            skip_serializing_if = "Option::is_none"
        )]
        from: Option<Value>,
    },
    TaskStarted {
        path: String,
        /// How often the task had started before.
        round: u32,
        /// The retry of the `try` around it. 0: the first attempt.
        attempt: u32,
        /// What `input.from` made of the value before it, if that differs.
        #[serde(
            default,
            deserialize_with = "present",
            skip_serializing_if = "Option::is_none"
        )]
        input: Option<Value>,
        /// What the task passes to the function that it calls, if that is not its input.
        #[serde(
            default,
            deserialize_with = "present",
            skip_serializing_if = "Option::is_none"
        )]
        arguments: Option<Value>,
    },
    TaskCompleted {
        path: String,
        /// Absent if it is the value that flowed through the task: its input, the output of its
        /// last task, or the event that it emitted.
        #[serde(
            default,
            deserialize_with = "present",
            skip_serializing_if = "Option::is_none"
        )]
        output: Option<Value>,
        /// The new context, if the task exports one.
        #[serde(
            default,
            deserialize_with = "present",
            skip_serializing_if = "Option::is_none"
        )]
        context: Option<Value>,
        next: Next,
    },
    /// Its condition was false.
    TaskSkipped {
        path: String,
        next: Next,
    },
    TaskFaulted {
        path: String,
        /// Absent if it is the error of a task inside it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<Problem>,
    },
    /// A `try` begins again after a wait.
    TaskRetried {
        path: String,
        /// Counts from 1.
        attempt: u32,
        /// Milliseconds.
        wait: u64,
    },
    /// The task or the branch was cancelled, with all that ran inside it.
    TaskCancelled {
        path: String,
    },
    /// A `try` caught the error of a task inside it, and does not try again.
    ErrorCaught {
        path: String,
    },
    RoundStarted {
        path: String,
        /// Counts from 0.
        index: u32,
        /// What the loop runs over. Only the first round has it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        items: Option<Vec<Value>>,
    },
    BranchStarted {
        path: String,
    },
    BranchEnded {
        path: String,
        /// Whether the fork ends with it.
        joins: bool,
    },
    /// A task was put into a queue. Its id follows from the execution, these and the time.
    StepIssued {
        path: String,
        round: u32,
        attempt: u32,
    },
    StepEnded {
        path: String,
        status: StepStatus,
    },
    TimerArmed {
        /// Its number, unique in the execution.
        timer: u64,
        path: String,
        purpose: TimerPurpose,
        /// Unix time in milliseconds.
        due: i64,
    },
    TimerFired {
        timer: u64,
    },
    /// An event was emitted: a CloudEvent.
    Emitted {
        path: String,
        event: Value,
    },
    /// The execution was cancelled.
    Cancelled,
    /// The execution ended with an error.
    Faulted {
        error: Problem,
    },
    /// The execution completed.
    Completed {
        /// Absent if it is the output of the last task.
        #[serde(
            default,
            deserialize_with = "present",
            skip_serializing_if = "Option::is_none"
        )]
        output: Option<Value>,
    },
}

impl Event {
    /// The values in it.
    pub(super) fn values(&self) -> impl Iterator<Item = &Value> {
        let (one, other, items) = match self {
            Self::Started { input, from, .. } => (Some(input), from.as_ref(), None),
            Self::TaskStarted {
                input, arguments, ..
            } => (input.as_ref(), arguments.as_ref(), None),
            Self::TaskCompleted {
                output, context, ..
            } => (output.as_ref(), context.as_ref(), None),
            Self::RoundStarted { items, .. } => (None, None, items.as_ref()),
            Self::Emitted { event, .. } => (Some(event), None, None),
            Self::Completed { output } => (output.as_ref(), None, None),
            _ => (None, None, None),
        };
        one.into_iter()
            .chain(other)
            .chain(items.into_iter().flatten())
    }

    /// The error in it.
    pub(super) fn problem(&self) -> Option<&Problem> {
        match self {
            Self::TaskFaulted { error, .. } => error.as_ref(),
            Self::Faulted { error } => Some(error),
            _ => None,
        }
    }
}

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepStatus {
    Completed,
    Dead,
    Cancelled,
}

/// What names a step. No two steps of an execution have the same key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepKey {
    pub path: String,
    /// How often the task had started before.
    pub round: u32,
    /// The retry of the `try` around it.
    pub attempt: u32,
}

impl fmt::Display for StepKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}.{}", self.path, self.round, self.attempt)
    }
}

/// What a timer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimerPurpose {
    /// A task that waits goes on.
    Wait,
    /// A task, or the workflow, takes too long.
    Timeout,
    /// A `try` begins again.
    Retry,
    /// An attempt of a `try` takes too long.
    Attempt,
}

/// Reads a value that is there, even if it is null.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}
