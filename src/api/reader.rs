//! Reads what became of tasks, and the state of the queues. SQL knows what is final, Redis what
//! happens until then.

use std::sync::Arc;

use uuid::Uuid;

use super::{
    error::Error,
    known_depths::KnownDepths,
    known_keys::KnownKeys,
    known_topics::KnownTopics,
    ledger::Ledger,
    open_executions::OpenExecutions,
    settled::SettledReports,
    watches::{ExecutionWatches, TreeWatches},
    workflow_queues::WorkflowQueues,
};
use crate::{
    bus::Bus,
    config::Settings,
    coordination::Coordination,
    model::{Act, Caller, QueueName, StoredStatus, TaskId, TaskResult, TaskStatus, TaskView},
    outbound::Outbound,
    pipelines::{
        admission::{Gates, Occupancy},
        context::ExecutionWakes,
    },
    queue::{Inspected, RecordStatus, Shards},
    runtime::Clock,
    store::{ListedTask, Store},
};

/// The servers that know about tasks. Cheap to clone.
#[derive(Clone)]
pub struct Reader {
    pub store: Arc<dyn Store>,
    pub queue: Shards,
    pub bus: Arc<dyn Bus>,
    pub coordination: Coordination,
    pub gates: Gates,
    pub occupancy: Occupancy,
    pub settings: Arc<Settings>,
    pub clock: Clock,
    pub ledger: Arc<Ledger>,
    pub settled: Arc<SettledReports>,
    pub known_keys: KnownKeys,
    pub topics: KnownTopics,
    pub depths: KnownDepths,
    pub tree_watches: TreeWatches,
    pub execution_watches: ExecutionWatches,
    pub executions: ExecutionWakes,
    pub open_executions: OpenExecutions,
    pub outbound: Outbound,
    pub workflow_queues: WorkflowQueues,
}

impl Reader {
    pub(super) fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub(super) fn now_unix_ms(&self) -> i64 {
        self.clock.now_unix_ms()
    }

    /// Returns the queue of a task. Only a caller that reaches it may know that the task exists.
    pub(super) async fn queue_of(&self, caller: &Caller, id: TaskId) -> Result<QueueName, Error> {
        let queue = self
            .store
            .queues_of(&[id])
            .await?
            .pop()
            .map(|(_, queue)| queue);
        queue
            .filter(|queue| caller.access.reaches(queue.as_str()))
            .ok_or(Error::NoSuchTask(id))
    }

    pub(super) async fn acts(&self, before: Option<Uuid>, limit: u32) -> Result<Vec<Act>, Error> {
        Ok(self.store.acts(before, limit).await?)
    }

    /// The size of what [`Self::results`] would return, in bytes.
    pub(super) async fn results_bytes(&self, id: TaskId) -> Result<usize, Error> {
        Ok(self
            .store
            .result_sizes(id)
            .await?
            .into_iter()
            .map(|(_, bytes)| bytes)
            .sum())
    }

    /// Returns `None` if there is no such task.
    pub(super) async fn results(&self, id: TaskId) -> Result<Option<Vec<TaskResult>>, Error> {
        let results = self.store.results(id).await?;
        if results.is_empty() && self.store.task(id).await?.is_none() {
            return Ok(None);
        }
        Ok(Some(results))
    }
}

/// A task as callers see it, from SQL and its record in Redis.
pub(super) fn view(task: ListedTask, record: Option<Inspected>, now_unix_ms: i64) -> TaskView {
    TaskView {
        status: status(task.status, task.not_before_unix_ms, record, now_unix_ms),
        // The time in the id, since lists and filters go by that.
        created_unix_ms: task.id.created_unix_ms(),
        id: task.id,
        queue: task.shard.queue,
        key: task.key,
        replicas: task.replicas,
        completed: record.map_or(task.completed, |record| record.credited.max(task.completed)),
        leased: record.map_or(0, |record| record.held),
        attempts: record.map_or(task.attempts, |record| record.failures.max(task.attempts)),
        priority: task.priority,
        updated_unix_ms: task.updated_unix_ms,
        not_before_unix_ms: (task.not_before_unix_ms > 0).then_some(task.not_before_unix_ms),
        // A task that was sent again has no deadline any more.
        deadline_unix_ms: (task.deadline_unix_ms > 0 && task.epoch == 0)
            .then_some(task.deadline_unix_ms),
        sequence: task.sequence,
        tree: task.tree,
        reason: task.reason,
    }
}

/// The status of a task according to SQL and its record in Redis.
///
/// A task is final when SQL has its end, and with it the results, the letter and the reason. Until
/// then a task whose record is final counts as assigned, which is also what watchers are told.
fn status(
    stored: StoredStatus,
    not_before_unix_ms: i64,
    record: Option<Inspected>,
    now_unix_ms: i64,
) -> TaskStatus {
    match (stored, record) {
        (StoredStatus::Completed, _) => TaskStatus::Completed,
        (StoredStatus::Dead, _) => TaskStatus::Dead,
        (StoredStatus::Cancelled, _) => TaskStatus::Cancelled,
        (StoredStatus::Unfinished, None) if not_before_unix_ms > now_unix_ms => TaskStatus::Delayed,
        (StoredStatus::Unfinished, None) => TaskStatus::Pending,
        (StoredStatus::Unfinished, Some(record)) => match record.status {
            // Its end is on the way to SQL.
            RecordStatus::Completed | RecordStatus::Dead | RecordStatus::Cancelled => {
                TaskStatus::Assigned
            }
            RecordStatus::Live if record.held > 0 => TaskStatus::Assigned,
            // Every replica that is left waits for its time or its backoff.
            RecordStatus::Live if record.waiting + record.credited >= record.replicas => {
                TaskStatus::Delayed
            }
            RecordStatus::Live => TaskStatus::Queued,
        },
    }
}
