//! Reads of tasks, their results and their counts.

use async_trait::async_trait;

use super::{Place, QueueCount, Result, StateFor, Stretch, TaskDetail, TaskState, WalkedPage};
use crate::model::{QueueName, TaskId, TaskResult, TaskRow, WorkerName};

/// The part of the store that reads tasks.
#[async_trait]
pub trait TaskReads: Send + Sync {
    /// The states of the stored tasks among `ids`, in any order; one for an id that is named twice.
    async fn states(&self, ids: &[TaskId]) -> Result<Vec<TaskState>>;

    /// The states of the stored tasks among `ids`, each with the worker's completion, credited or
    /// surplus.
    async fn states_for(&self, worker: &WorkerName, ids: &[TaskId]) -> Result<Vec<StateFor>>;

    /// The unfinished tasks among `ids`, each once, in any order.
    async fn unfinished_among(&self, ids: &[TaskId]) -> Result<Vec<TaskId>>;

    /// The tasks on the bus among the next `limit` unfinished ones of a stretch. Those are among
    /// them that wait in their batch, and are not published yet.
    ///
    /// A page may be empty and have a next one. Queues whose count of unfinished tasks is zero are
    /// left out.
    async fn on_bus(&self, stretch: Stretch<'_>, limit: u32) -> Result<WalkedPage>;

    /// The greatest id of a stored task.
    async fn last_id(&self) -> Result<Option<TaskId>>;

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
}
