//! Paused queues, in SQL.

use async_trait::async_trait;

use super::Result;
use crate::model::{Act, PausedQueue, QueueName};

/// The most paused queues. Each process keeps their names in memory.
pub const MOST_PAUSED: u32 = 10_000;

/// The outcome of a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pausing {
    Done,
    /// The queue was paused, or not paused, before.
    Already,
    /// There are [`MOST_PAUSED`].
    NoRoom,
}

/// The store of pauses. Every method is one transaction, and may be repeated as those of `Store`.
#[async_trait]
pub trait Pauses: Send + Sync {
    /// A number that each pause and each resume raises.
    async fn pauses_version(&self) -> Result<u64>;

    /// The paused queues, by name. There are at most [`MOST_PAUSED`].
    async fn paused_queues(&self) -> Result<Vec<PausedQueue>>;

    /// Pauses a queue, also one that has no task yet, and records the act.
    async fn pause(&self, paused: &PausedQueue, act: &Act) -> Result<Pausing>;

    /// Resumes a queue, and records the act.
    async fn resume(&self, queue: &QueueName, act: &Act) -> Result<Pausing>;
}
