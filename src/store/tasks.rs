//! Reads of tasks, their results and their counts.

use async_trait::async_trait;

use super::{Place, PublishedTask, QueueCount, Result, StateFor, TaskDetail, TaskState, Walked};
use crate::model::{QueueName, TaskId, TaskResult, TaskRow, WorkerName};

/// The part of the store that reads tasks.
#[async_trait]
pub trait TaskReads: Send + Sync {
    /// The states of the stored tasks among `ids`, in any order; one for an id that is named twice.
    async fn states(&self, ids: &[TaskId]) -> Result<Vec<TaskState>>;

    /// The states of the stored tasks among `ids`, each with the worker's completion, credited or surplus.
    async fn states_for(&self, worker: &WorkerName, ids: &[TaskId]) -> Result<Vec<StateFor>>;

    /// The unfinished tasks among `ids`, each once, in any order.
    async fn unfinished_among(&self, ids: &[TaskId]) -> Result<Vec<TaskId>>;

    /// Published tasks that are unfinished and lie behind `after`: queue by queue in the order of their names, in each
    /// by id.
    async fn published(&self, generation: &str, after: Option<&Walked>, limit: u32) -> Result<Vec<PublishedTask>>;

    /// The stored tasks among `ids`, in any order.
    async fn rows(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>>;

    async fn task(&self, id: TaskId) -> Result<Option<TaskDetail>>;

    /// Where the task is. `None`: it is finished, or there is no such task. `generation` is the topic's.
    async fn place(&self, generation: &str, id: TaskId) -> Result<Option<Place>>;

    /// The results of a task, the earliest first.
    async fn results(&self, id: TaskId) -> Result<Vec<TaskResult>>;

    /// The bytes of all results of a task.
    async fn results_bytes(&self, id: TaskId) -> Result<usize>;

    /// Counts per queue and status, of `queues` or of every queue that ever was. May leave out zeros.
    async fn counts(&self, queues: Option<&[QueueName]>) -> Result<Vec<QueueCount>>;

    /// The number of unfinished tasks of each queue that has some. Queues without any cost nothing.
    async fn unfinished(&self) -> Result<Vec<(QueueName, u64)>>;
}
