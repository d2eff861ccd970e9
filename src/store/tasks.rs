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

/// A request for a page of tasks.
#[derive(Clone, Debug)]
pub struct TaskSearch {
    pub filter: TaskFilter,
    pub limit: u32,
    pub look_at: u32,
    /// Where the page begins, or `None` for the newest task.
    pub after: Option<TaskCursor>,
    /// The caller must not be able to infer from counts and cursors what other queues contain.
    pub stays_in_queue: bool,
}

/// The tasks of a page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TaskPage {
    pub tasks: Vec<ListedTask>,
    pub looked_at: u32,
    /// Where the next page begins, or `None` if there are no more tasks.
    pub next: Option<TaskCursor>,
}

/// A task in a list.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedTask {
    pub id: TaskId,
    pub shard: ShardId,
    pub key: bytes::Bytes,
    pub status: StoredStatus,
    pub replicas: u32,
    pub completed: u32,
    /// Failures that reports have mentioned so far.
    pub attempts: u32,
    pub priority: Priority,
    pub updated_unix_ms: i64,
    /// 0 if due immediately.
    pub not_before_unix_ms: i64,
    /// 0 if there is no deadline.
    pub deadline_unix_ms: i64,
    /// Empty if it is in no sequence.
    pub sequence: String,
    pub reason: String,
    /// How often it was sent again.
    pub epoch: u32,
    pub tree: Option<TaskId>,
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
            sequence: task
                .sequence
                .map(|sequence| sequence.name)
                .unwrap_or_default(),
            reason: detail.reason,
            epoch: detail.epoch,
            tree: detail.tree,
        }
    }
}

/// A page of the completed tasks of a queue, of which those are removed that were completed at least
/// `age` ago by the database's clock.
#[derive(Clone, Debug)]
pub struct CompletedPage {
    pub queue: QueueName,
    pub age: Duration,
    /// The last task of the page before, or [`TaskId::FIRST`].
    pub after: TaskId,
    /// The page ends here: later tasks are too young to have been completed long ago.
    pub below: TaskId,
    pub limit: u32,
}

/// What became of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemovedPage {
    pub removed: u64,
    /// The last task of the page. `None` if it was the last page.
    pub last: Option<TaskId>,
}

/// An unfinished task whose deadline has passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overdue {
    pub task: ChangingTask,
    pub deadline_unix_ms: i64,
}

/// A page of the deadlines that have passed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DueDeadlines {
    /// Earliest first.
    pub overdue: Vec<Overdue>,
    /// The call reached its limit, so there may be more.
    pub is_full: bool,
}

/// Which tasks exist, and what became of them.
///
/// Every method is one transaction and may be repeated: see [`super::Store`].
#[async_trait]
pub trait Tasks: Send + Sync {
    /// Stores new rows and counts them. Returns one answer per row, in order.
    ///
    /// The fresh rows of a call form a batch; the others get rows in the outbox. If two rows have
    /// the same key, the first one is new. A row whose id is already stored is `New` again and
    /// stays unchanged; one without a key is `Repeated`, and so are later rows of the call with its
    /// id. The first row with an idempotency key takes the key until its window ends.
    /// Later rows with it are `Repeated`, or `KeyReused` if they are a different task.
    async fn insert(&self, rows: &[NewRow]) -> Result<Stored<Inserted>>;

    /// Stores results, statuses and discovered tasks in one transaction. Returns one answer per
    /// report, in order.
    ///
    /// A report that was already settled, even in the same call, is `repeated`. A task with NUM
    /// credited workers becomes Completed. The first final status is kept. A task that dies gets a
    /// letter. A death of an earlier epoch is `unknown`. The discovered tasks of a task of a tree are
    /// in the tree, unless the report is `surplus`.
    async fn settle(&self, reports: &[Settlement]) -> Result<Stored<Settled>>;

    /// Removes at most `limit` tasks that finished at least `age` ago by the database's clock,
    /// earliest first. Returns how many.
    ///
    /// Their results, letters and histories are removed, too. The keys remain duplicates with the
    /// last status of their tasks, except that the keys of dead tasks become free. Nothing remains
    /// of a task without a key, which stays an hour at least, and until its record was passed.
    /// `counts` does not change.
    async fn remove_finished(&self, age: Duration, limit: u32) -> Result<u64>;

    /// Removes the completed tasks among the next `page.limit` of a queue, in the order of their
    /// ids, as [`Self::remove_finished`] does.
    async fn remove_completed(&self, page: &CompletedPage) -> Result<RemovedPage>;

    /// The states of those of `ids` that are stored, in any order. An id that is given twice yields
    /// one state.
    async fn states(&self, ids: &[TaskId]) -> Result<Vec<TaskState>>;

    /// The states of those of `ids` that are stored, each with the worker's completion, credited or
    /// surplus.
    async fn states_for(&self, worker: &WorkerName, ids: &[TaskId]) -> Result<Vec<StateFor>>;

    /// Those of `ids` that are unfinished, each once, in any order.
    async fn unfinished_among(&self, ids: &[TaskId]) -> Result<Vec<TaskId>>;

    /// Those of `ids` that are stored, in any order.
    async fn rows(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>>;

    async fn task(&self, id: TaskId) -> Result<Option<TaskDetail>>;

    /// The same without its payload and its headers, which may be large.
    async fn brief_task(&self, id: TaskId) -> Result<Option<TaskDetail>>;

    /// Where the task is, or `None` if it is finished or does not exist. `generation` is the
    /// topic's.
    async fn place(&self, generation: &str, id: TaskId) -> Result<Option<Place>>;

    /// The results of a task, oldest first.
    async fn results(&self, id: TaskId) -> Result<Vec<TaskResult>>;

    /// The workers that have a result of the task, in the order of [`Self::results`], each with the
    /// size of the result in bytes.
    async fn result_sizes(&self, id: TaskId) -> Result<Vec<(String, usize)>>;

    /// The results of these workers, in the order of [`Self::results`]. There must be few workers,
    /// because they are all in one statement.
    async fn results_of(&self, id: TaskId, workers: &[String]) -> Result<Vec<TaskResult>>;

    /// Counts by queue and status, of `queues` or of every queue that ever existed. May leave out
    /// zeros. A wrong, negative count is returned as zero.
    async fn counts(&self, queues: Option<&[QueueName]>) -> Result<Vec<QueueCount>>;

    /// The names that begin so, of every queue that ever existed: the first `limit` of them, in
    /// order.
    async fn queue_names(&self, beginning: &str, limit: u32) -> Result<Vec<QueueName>>;

    /// The number of unfinished tasks of each queue that has some, or zero if the count is wrong
    /// and negative. Queues without unfinished tasks cost nothing.
    async fn unfinished(&self) -> Result<Vec<(QueueName, u64)>>;

    /// Tasks without payloads, newest first.
    ///
    /// Does not distinguish the filter's unfinished statuses. The page ends at `limit` tasks, or
    /// after looking at `look_at` tasks, because a filter without a suitable index may exclude most
    /// of them.
    async fn search(&self, search: &TaskSearch) -> Result<TaskPage>;

    /// Begins an era: a search with the answer as `as_of_unix_ms` matches the same tasks later,
    /// except those that were changed in the meantime. The answer is `now_unix_ms`, or later than
    /// each earlier answer.
    async fn begin_era(&self, now_unix_ms: i64) -> Result<i64>;

    /// Those of `ids` that are stored, without payloads, in any order.
    async fn listed(&self, ids: &[TaskId]) -> Result<Vec<ListedTask>>;

    /// The tasks that have or had these keys, each with its last status, in any order. Leaves out a
    /// key that no task ever had.
    async fn key_owners(&self, keys: &[KeyHash]) -> Result<Vec<(KeyHash, TaskId, StoredStatus)>>;

    /// Those of `ids` that became final less than `age` ago by the database's clock, in any order.
    async fn lately_final(&self, ids: &[TaskId], age: Duration) -> Result<Vec<TaskId>>;

    /// Removes at most `limit` keys whose windows have ended, earliest first. Returns how many.
    async fn remove_expired_keys(&self, now_unix_ms: i64, limit: u32) -> Result<u64>;

    /// The unfinished tasks among at most `limit` deadlines that have passed.
    ///
    /// Each is due again at `again_unix_ms`, in case nobody ends its task now. Removes the
    /// deadlines of tasks that are final, were sent again, or no longer exist. A row that cannot be
    /// read is retried after a day.
    async fn due_deadlines(
        &self,
        now_unix_ms: i64,
        again_unix_ms: i64,
        limit: u32,
    ) -> Result<DueDeadlines>;

    /// The queues of those of `ids` that are stored, in any order.
    async fn queues_of(&self, ids: &[TaskId]) -> Result<Vec<OwnedTask>>;
}
