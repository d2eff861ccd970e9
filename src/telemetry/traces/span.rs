//! Finished spans.

use std::time::SystemTime;

use crate::model::{QueueName, SpanId, TaskId, TraceContext};

/// A step of a task. The names of spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hop {
    /// From the call, or the report of the parent, to the commit in SQL.
    Insert,
    /// Onto the bus.
    Publish,
    /// From the bus into the queue.
    Enqueue,
    /// From the look into the queue to the lease.
    Claim,
    /// From the lease to the report.
    Work,
    /// The report into SQL.
    Settle,
}

impl Hop {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Insert => "insert",
            Self::Publish => "publish",
            Self::Enqueue => "enqueue",
            Self::Claim => "claim",
            Self::Work => "work",
            Self::Settle => "settle",
        }
    }
}

/// A finished span.
#[derive(Clone, Debug)]
pub struct Span {
    pub hop: Hop,
    pub context: TraceContext,
    pub parent: Option<SpanId>,
    /// A span that led to this one, and is not its parent.
    pub link: Option<TraceContext>,
    pub start: SystemTime,
    pub end: SystemTime,
    pub task: TaskId,
    pub queue: QueueName,
    pub worker: Option<String>,
    pub attempt: Option<u32>,
    pub outcome: &'static str,
    /// Empty: the hop went well.
    pub error: String,
}
