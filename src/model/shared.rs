//! Calls of sessions without streams.

use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;

use super::{Completion, Extension, ItemAnswer, Items, Rejection};

/// Identifies the session of a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionCall {
    pub worker: String,
    pub session: String,
}

/// A request for tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantTasks {
    pub call: SessionCall,
    /// How much to add to the demand.
    pub want: u32,
    pub wait: Duration,
}

/// A report on tasks of a session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReportTasks {
    pub call: SessionCall,
    pub completions: Items<Completion>,
    pub rejections: Items<Rejection>,
    pub extensions: Items<Extension>,
    /// Ids of started tasks.
    pub started: Vec<String>,
}

impl ReportTasks {
    /// The number of completions, rejections and extensions in the report.
    pub fn items(&self) -> usize {
        self.completions.len() + self.rejections.len() + self.extensions.len()
    }
}

/// How many tasks a session demands and holds.
#[derive(Clone, Copy, Debug, Default, JsonSchema, PartialEq, Eq, Serialize)]
pub struct Pending {
    /// How many more tasks it demands.
    pub demand: u32,
    /// How many tasks it holds and has not reported.
    pub in_hand: u32,
}

/// The answer to a report, in the order of its items.
#[derive(Clone, Debug, Default, JsonSchema, PartialEq, Serialize)]
pub struct TasksReported {
    pub completions: Vec<ItemAnswer>,
    pub rejections: Vec<ItemAnswer>,
    pub extensions: Vec<ItemAnswer>,
    /// How many of the held tasks this report ended.
    pub counted: u32,
    #[serde(flatten)]
    pub pending: Pending,
}

/// A session that has ended.
#[derive(Clone, Copy, Debug, Default, JsonSchema, PartialEq, Eq, Serialize)]
pub struct SessionClosed {
    /// Tasks that are offered again without a failure, because they had not been started.
    pub offered: u32,
    /// Tasks that had been started, which counts as a failure.
    pub failed: u32,
}
