//! Calls of sessions without streams.

use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;

use super::{Completion, Extension, ItemAnswer, Items, Rejection};

/// Names a session to a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionCall {
    pub worker: String,
    pub session: String,
}

/// Asks for tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantTasks {
    pub call: SessionCall,
    /// Adds to the demand.
    pub want: u32,
    pub wait: Duration,
}

/// Reports tasks of a session.
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
    /// The completions, rejections and extensions in it.
    pub fn items(&self) -> usize {
        self.completions.len() + self.rejections.len() + self.extensions.len()
    }
}

/// How many tasks a session wants and has.
#[derive(Clone, Copy, Debug, Default, JsonSchema, PartialEq, Eq, Serialize)]
pub struct Pending {
    /// How many tasks it still wants.
    pub demand: u32,
    /// How many tasks it got and has not reported.
    pub in_hand: u32,
}

/// The answer to a report, in the order of its items.
#[derive(Clone, Debug, Default, JsonSchema, PartialEq, Serialize)]
pub struct TasksReported {
    pub completions: Vec<ItemAnswer>,
    pub rejections: Vec<ItemAnswer>,
    pub extensions: Vec<ItemAnswer>,
    /// How many tasks in hand this report ended.
    pub counted: u32,
    #[serde(flatten)]
    pub pending: Pending,
}

/// A session that has ended.
#[derive(Clone, Copy, Debug, Default, JsonSchema, PartialEq, Eq, Serialize)]
pub struct SessionClosed {
    /// Tasks that are offered again at no cost.
    pub offered: u32,
    /// Tasks that had been started.
    pub failed: u32,
}
