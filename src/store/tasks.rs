//! Tasks: which exist, and what became of them.

use std::time::Duration;

use async_trait::async_trait;

use super::{
    Inserted, NewRow, Place, QueueCount, Result, Settled, Settlement, StateFor, Stored, TaskDetail,
    TaskState,
};
use crate::model::{
    ChangingTask, KeyHash, OwnedTask, Priority, QueueName, ShardId, StoredStatus, TaskCursor,
    TaskFilter, TaskId, TaskResult, TaskRow, WorkerName,
};

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

impl From<TaskDetail> for ListedTask {
    fn from(detail: TaskDetail) -> Self {
        let task = detail.task;
        Self {
            id: task.id,
            shard: ShardId {
                queue: task.queue,
                number: task.partition,
            },
            key: task.key,
            status: detail.status,
            replicas: task.replicas,
            completed: detail.completed,
            attempts: detail.attempts,
            priority: task.priority,
            updated_unix_ms: detail.updated_unix_ms,
            not_before_unix_ms: task.not_before_unix_ms,
            deadline_unix_ms: task.deadline_unix_ms,
            reason: detail.reason,
            epoch: detail.epoch,
        }
    }
}

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

/// Which tasks exist, and what became of them.
///
/// Every method is one transaction, and may be repeated as [`super::Store`] says.
#[async_trait]
pub trait Tasks: Send + Sync {
    /// Stores new rows and counts them. Answers per row, in order.
    ///
    /// The fresh ones of a call are one batch; others get rows in the outbox. Of two rows with one
    /// key the first is new. A row whose id is stored already is `New` again and stays as it is.
    /// The first row with an idempotency key takes it until its window ends: the others are
    /// `Repeated`, or `KeyReused` if they are another task.
    async fn insert(&self, rows: &[NewRow]) -> Result<Stored<Inserted>>;

    /// Stores results, statuses and discovered tasks in one transaction. One answer per report, in
    /// order.
    ///
    /// A report that comes twice, also within one call, is `repeated`. A task with NUM credited
    /// workers becomes Completed. The first final status stays. A task that dies gets its letter. A
    /// death of an earlier epoch is `unknown`.
    async fn settle(&self, reports: &[Settlement]) -> Result<Stored<Settled>>;

    /// Removes at most `limit` tasks that finished `age` or longer ago. Answers how many.
    ///
    /// Results, letters and histories go with them. The database's clock decides, and the first to
    /// finish goes first. The keys stay duplicates with the tasks' last status, except those of
    /// dead tasks, which are free; `counts` stays.
    async fn remove_finished(&self, age: Duration, limit: u32) -> Result<u64>;

    /// The states of the stored tasks among `ids`, in any order; one for an id that is named twice.
    async fn states(&self, ids: &[TaskId]) -> Result<Vec<TaskState>>;

    /// The states of the stored tasks among `ids`, each with the worker's completion, credited or
    /// surplus.
    async fn states_for(&self, worker: &WorkerName, ids: &[TaskId]) -> Result<Vec<StateFor>>;

    /// The unfinished tasks among `ids`, each once, in any order.
    async fn unfinished_among(&self, ids: &[TaskId]) -> Result<Vec<TaskId>>;

    /// The stored tasks among `ids`, in any order.
    async fn rows(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>>;

    async fn task(&self, id: TaskId) -> Result<Option<TaskDetail>>;

    /// Where the task is. `None`: it is finished, or there is no such task. `generation` is the
    /// topic's.
    async fn place(&self, generation: &str, id: TaskId) -> Result<Option<Place>>;

    /// The results of a task, the earliest first.
    async fn results(&self, id: TaskId) -> Result<Vec<TaskResult>>;

    /// The workers with a result of a task, in the order of [`Self::results`], each with the bytes
    /// of the result.
    async fn result_sizes(&self, id: TaskId) -> Result<Vec<(String, usize)>>;

    /// The results of these workers, in the order of [`Self::results`]. The workers are few: they
    /// stand in one statement.
    async fn results_of(&self, id: TaskId, workers: &[String]) -> Result<Vec<TaskResult>>;

    /// Counts per queue and status, of `queues` or of every queue that ever was. May leave out
    /// zeros. A wrong count below zero is zero here.
    async fn counts(&self, queues: Option<&[QueueName]>) -> Result<Vec<QueueCount>>;

    /// The number of unfinished tasks of each queue that has some; zero where the count is wrong
    /// and below zero. Queues without any cost nothing.
    async fn unfinished(&self) -> Result<Vec<(QueueName, u64)>>;

    /// Tasks without payloads, the newest first.
    ///
    /// The filter's unfinished statuses are one here. The page ends at `limit` tasks, or when
    /// `look_at` tasks were looked at: a filter that no index serves may leave most of them out.
    async fn search(&self, search: &TaskSearch) -> Result<TaskPage>;

    /// The stored tasks among `ids`, without payloads, in any order.
    async fn listed(&self, ids: &[TaskId]) -> Result<Vec<ListedTask>>;

    /// The tasks that have or had these keys, each with its last status, in any order. Leaves out a
    /// key that no task ever had.
    async fn key_owners(&self, keys: &[KeyHash]) -> Result<Vec<(KeyHash, TaskId, StoredStatus)>>;

    /// The tasks among `ids` that became final less than `age` ago, by the database's clock; in any
    /// order.
    async fn lately_final(&self, ids: &[TaskId], age: Duration) -> Result<Vec<TaskId>>;

    /// Removes at most `limit` keys whose window is over, the earliest first. Answers how many.
    async fn remove_expired_keys(&self, now_unix_ms: i64, limit: u32) -> Result<u64>;

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

    /// The queues of the stored tasks among `ids`, in any order.
    async fn queues_of(&self, ids: &[TaskId]) -> Result<Vec<OwnedTask>>;
}
