//! Reading: what became of a task, and how the queues stand. SQL knows what is final, Redis what happens meanwhile.

use crate::{
    model::{QueueName, TaskId},
    pb,
    store::ResultRow,
};

#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot read now: {0}")]
pub struct Unavailable(pub String);

/// One queue, in tasks.
#[derive(Clone, Debug)]
pub struct QueueOverview {
    pub queue: QueueName,
    pub pending: u64,
    pub queued: u64,
    pub assigned: u64,
    pub delayed: u64,
    pub completed: u64,
    pub dead: u64,
    pub cancelled: u64,
    /// How long the oldest task that nobody holds has waited; `None` when none waits.
    pub oldest_waiting_ms: Option<u64>,
}

/// How callers read. Cheap to clone.
#[derive(Clone)]
pub struct Handle {}

impl Handle {
    pub async fn task(&self, id: TaskId) -> Result<Option<pb::Task>, Unavailable> {
        Err(Unavailable(format!("not built yet: {id}")))
    }

    /// `None`: no such task.
    pub async fn results(&self, id: TaskId) -> Result<Option<Vec<ResultRow>>, Unavailable> {
        Err(Unavailable(format!("not built yet: {id}")))
    }

    pub async fn queues(&self) -> Result<Vec<QueueOverview>, Unavailable> {
        Err(Unavailable("not built yet".into()))
    }
}
