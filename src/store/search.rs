//! Searches for tasks.

use async_trait::async_trait;

use super::Result;
use crate::model::{Priority, ShardId, StoredStatus, TaskCursor, TaskFilter, TaskId};

/// The part of the store that lists tasks.
#[async_trait]
pub trait Search: Send + Sync {
    /// Tasks without payloads, the newest first.
    ///
    /// The filter's unfinished statuses are one here. The page ends at `limit` tasks, or when
    /// `look_at` tasks were looked at: a filter that no index serves may leave most of them out.
    async fn search(&self, search: &TaskSearch) -> Result<TaskPage>;

    /// The stored tasks among `ids`, without payloads, in any order.
    async fn listed(&self, ids: &[TaskId]) -> Result<Vec<ListedTask>>;
}

/// A page to read.
#[derive(Clone, Debug)]
pub struct TaskSearch {
    pub filter: TaskFilter,
    pub limit: u32,
    pub look_at: u32,
    /// Where the page begins; `None`: at the newest task.
    pub after: Option<TaskCursor>,
    /// The caller must not learn from counts and places what other queues have.
    pub stays_in_queue: bool,
}

/// The tasks of a page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TaskPage {
    pub tasks: Vec<ListedTask>,
    pub looked_at: u32,
    /// Where the next page begins; `None`: there are no more.
    pub next: Option<TaskCursor>,
}

/// A task of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedTask {
    pub id: TaskId,
    pub shard: ShardId,
    pub key: bytes::Bytes,
    pub status: StoredStatus,
    pub replicas: u32,
    pub completed: u32,
    /// Failures that reports have mentioned.
    pub attempts: u32,
    pub priority: Priority,
    pub updated_unix_ms: i64,
    /// 0: at once.
    pub not_before_unix_ms: i64,
    /// 0: none.
    pub deadline_unix_ms: i64,
    pub reason: String,
    /// How often it was sent again.
    pub epoch: u32,
}
