//! The part of the store that fsck needs: counts that are made again, and tasks that nobody would
//! publish.

use async_trait::async_trait;

use super::{PublishedTask, Result};
use crate::model::{QueueName, TaskId};

/// A queue whose count of unfinished tasks is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongCount {
    pub queue: QueueName,
    pub kept: i64,
    /// The unfinished tasks that are on the bus or in the outbox.
    pub counted: i64,
}

/// Rows of `tasks` that one statement of [`CheckStore::stranded`] goes over, at most.
pub(super) const GONE_OVER: u64 = 20_000;

#[async_trait]
pub trait CheckStore: Send + Sync {
    /// Counts all unfinished tasks again, as of one moment. Goes over all of them.
    async fn wrong_counts(&self) -> Result<Vec<WrongCount>>;

    /// Writes the right count of a queue, also where there is none. Other changes of tasks wait
    /// meanwhile, or are seen.
    async fn correct_count(&self, queue: &QueueName) -> Result<()>;

    /// The published, unfinished tasks among `ids`, in any order. `generation` is the topic's.
    async fn published_among(&self, generation: &str, ids: &[TaskId])
    -> Result<Vec<PublishedTask>>;

    /// A page of all tasks behind `after`: the unfinished ones that are neither on the bus nor in
    /// the outbox. Answers where the next page begins.
    async fn stranded(
        &self,
        after: Option<TaskId>,
    ) -> Result<(Vec<(QueueName, TaskId)>, Option<TaskId>)>;
}
