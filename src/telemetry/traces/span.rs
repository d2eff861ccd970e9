//! Finished spans.

use std::time::SystemTime;

use crate::model::{QueueName, SpanId, TaskId, TraceContext};

/// A step of a task, which names a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hop {
    /// From the call, or the report of the parent task, to the SQL commit.
    Insert,
    /// From SQL onto the bus.
    Publish,
    /// From the bus into the queue.
    Enqueue,
    /// From the beginning of the claim to the lease.
    Claim,
    /// From the lease to the report.
    Work,
    /// From the report to the SQL commit.
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
    /// A span that led to this one but is not its parent.
    pub link: Option<TraceContext>,
    pub start: SystemTime,
    pub end: SystemTime,
    pub task: TaskId,
    pub queue: QueueName,
    pub worker: Option<String>,
    pub attempt: Option<u32>,
    pub outcome: &'static str,
    /// Empty if the hop succeeded.
    pub error: String,
}
