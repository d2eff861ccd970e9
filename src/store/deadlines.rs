//! The deadlines of tasks, in SQL.

use async_trait::async_trait;

use super::Result;
use crate::model::ChangingTask;

/// An unfinished task whose deadline has passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overdue {
    pub task: ChangingTask,
    pub deadline_unix_ms: i64,
}

/// A part of the deadlines that have passed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DueDeadlines {
    /// The earliest first.
    pub overdue: Vec<Overdue>,
    /// The call looked at as many as it may.
    pub is_full: bool,
}

/// The store of deadlines. `Store::insert` and `Store::settle` keep those of new tasks.
#[async_trait]
pub trait Deadlines: Send + Sync {
    /// The unfinished tasks among at most `limit` deadlines that have passed.
    ///
    /// Each comes again at `again_unix_ms`, in case nobody ends its task now. Removes the deadlines
    /// of tasks that are final, were sent again, or are not there any more. A row that it cannot
    /// read waits for a day.
    async fn due_deadlines(
        &self,
        now_unix_ms: i64,
        again_unix_ms: i64,
        limit: u32,
    ) -> Result<DueDeadlines>;
}
