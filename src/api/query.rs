//! Reading: what became of a task, and how the queues stand. SQL knows what is final, Redis what happens meanwhile.

use std::{collections::BTreeMap, sync::Arc};

use futures::StreamExt as _;

use crate::{
    model::{self, QueueName, ShardId, StoredStatus, TaskId},
    queue::{self, Inspected, RecordStatus, Shards},
    runtime::Clock,
    store::{ResultRow, Store, TaskDetail},
    wire::pb,
};

/// Shards whose stats are asked for together.
const SHARDS_AT_ONCE: usize = 64;

#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot read now: {0}")]
pub struct Unavailable(pub String);

impl From<crate::store::Error> for Unavailable {
    fn from(error: crate::store::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<queue::Error> for Unavailable {
    fn from(error: queue::Error) -> Self {
        Self(error.to_string())
    }
}

/// One queue, in tasks: each unfinished one is in one of the first four counts.
#[derive(Clone, Debug)]
pub struct QueueOverview {
    pub queue: QueueName,
    /// In SQL alone: just stored, parked, or not due for long.
    pub pending: u64,
    /// With something left to hand out.
    pub queued: u64,
    /// All that is left is out with workers.
    pub assigned: u64,
    /// All that is left is not due yet.
    pub delayed: u64,
    /// How many leases are out; a task may have as many as replicas.
    pub leases: u64,
    pub completed: u64,
    pub dead: u64,
    pub cancelled: u64,
    /// How long the oldest task that nobody holds has waited, in Redis or in SQL; `None` when none waits.
    pub oldest_waiting_ms: Option<u64>,
}

/// How callers read. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    store: Arc<dyn Store>,
    queue: Shards,
    clock: Clock,
}

impl Handle {
    pub fn new(store: Arc<dyn Store>, queue: Shards, clock: Clock) -> Self {
        Self { store, queue, clock }
    }

    pub async fn task(&self, id: TaskId) -> Result<Option<pb::Task>, Unavailable> {
        let Some(detail) = self.store.task(id).await? else { return Ok(None) };
        let record = if detail.status.is_final() { None } else { self.record(&detail).await? };
        Ok(Some(task(detail, record, self.clock.now_unix_ms())))
    }

    async fn record(&self, detail: &TaskDetail) -> Result<Option<Inspected>, Unavailable> {
        let shard = ShardId { queue: detail.task.queue.clone(), number: detail.task.partition };
        match self.queue.inspect(&shard, &[detail.task.id]).await {
            Ok((_, records)) => Ok(records.into_iter().next().flatten()),
            // Nothing was enqueued there yet, or it is being brought back.
            Err(queue::Error::NoGeneration) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// `None`: no such task.
    pub async fn results(&self, id: TaskId) -> Result<Option<Vec<ResultRow>>, Unavailable> {
        let results = self.store.results(id).await?;
        if results.is_empty() && self.store.task(id).await?.is_none() {
            return Ok(None);
        }
        Ok(Some(results))
    }

    /// The bytes that [`Self::results`] would have.
    pub async fn results_bytes(&self, id: TaskId) -> Result<usize, Unavailable> {
        Ok(self.store.results_bytes(id).await?)
    }

    pub async fn queues(&self) -> Result<Vec<QueueOverview>, Unavailable> {
        let mut queues: BTreeMap<QueueName, QueueOverview> = BTreeMap::new();
        let now = self.clock.now_unix_ms();
        let age_ms = |created_unix_ms: i64| u64::try_from(now.saturating_sub(created_unix_ms)).unwrap_or(0);
        let shards = self.queue.shards();
        // One that has been closed has nothing to show, until somebody puts a task in again.
        let mut open: Vec<QueueName> = shards.iter().map(|shard| shard.queue.clone()).collect();
        open.extend(self.store.unfinished().await?.into_iter().map(|(queue, _)| queue));
        open.sort_unstable();
        open.dedup();
        for count in self.store.counts(Some(&open)).await? {
            let entry = overview(&mut queues, &count.queue);
            match count.status {
                // Less what Redis has, below.
                StoredStatus::Unfinished => entry.pending = count.count,
                StoredStatus::Completed => entry.completed = count.count,
                StoredStatus::Dead => entry.dead = count.count,
                StoredStatus::Cancelled => entry.cancelled = count.count,
            }
        }
        let asked = shards.into_iter().map(|shard| async move { (self.queue.stats(&shard).await, shard) });
        let mut asked = futures::stream::iter(asked).buffer_unordered(SHARDS_AT_ONCE);
        while let Some((stats, shard)) = asked.next().await {
            let stats = match stats {
                Err(queue::Error::NoGeneration) => continue,
                other => other?,
            };
            let entry = overview(&mut queues, &shard.queue);
            entry.queued += stats.open;
            entry.leases += stats.leases;
            // Replicas of one task may wait and be out: `delayed` counts replicas, and they are fewer tasks at most.
            let nothing_left = stats.live.saturating_sub(stats.open);
            let delayed = stats.delayed.min(nothing_left);
            entry.delayed += delayed;
            entry.assigned += nothing_left - delayed;
            // A task whose end is still on its way to SQL is counted as pending for that moment.
            entry.pending = entry.pending.saturating_sub(stats.live);
            entry.oldest_waiting_ms = entry.oldest_waiting_ms.max(stats.oldest_created_unix_ms.map(age_ms));
        }
        for (queue, created_unix_ms) in self.store.oldest_waiting(now).await? {
            let entry = overview(&mut queues, &queue);
            entry.oldest_waiting_ms = entry.oldest_waiting_ms.max(Some(age_ms(created_unix_ms)));
        }
        Ok(queues.into_values().collect())
    }
}

fn overview<'a>(queues: &'a mut BTreeMap<QueueName, QueueOverview>, queue: &QueueName) -> &'a mut QueueOverview {
    queues.entry(queue.clone()).or_insert_with(|| QueueOverview {
        queue: queue.clone(),
        pending: 0,
        queued: 0,
        assigned: 0,
        delayed: 0,
        leases: 0,
        completed: 0,
        dead: 0,
        cancelled: 0,
        oldest_waiting_ms: None,
    })
}

fn task(detail: TaskDetail, record: Option<Inspected>, now_unix_ms: i64) -> pb::Task {
    let row = detail.task;
    let status = match (detail.status, record) {
        (StoredStatus::Completed, _) => pb::TaskStatus::Completed,
        (StoredStatus::Dead, _) => pb::TaskStatus::Dead,
        (StoredStatus::Cancelled, _) => pb::TaskStatus::Cancelled,
        (StoredStatus::Unfinished, None) if row.not_before_unix_ms > now_unix_ms => pb::TaskStatus::Delayed,
        (StoredStatus::Unfinished, None) => pb::TaskStatus::Pending,
        (StoredStatus::Unfinished, Some(record)) => match record.status {
            // On its way to SQL.
            RecordStatus::Completed => pb::TaskStatus::Completed,
            RecordStatus::Dead => pb::TaskStatus::Dead,
            RecordStatus::Cancelled => pb::TaskStatus::Cancelled,
            RecordStatus::Live if record.held > 0 => pb::TaskStatus::Assigned,
            RecordStatus::Live if record.waiting + record.credited >= record.replicas => pb::TaskStatus::Delayed,
            RecordStatus::Live => pb::TaskStatus::Queued,
        },
    };
    pb::Task {
        id: row.id.to_string(),
        queue: row.queue.as_str().to_owned(),
        key: row.key,
        status: status.into(),
        replicas: row.replicas,
        completed: record.map_or(detail.completed, |record| record.credited.max(detail.completed)),
        leased: record.map_or(0, |record| record.held),
        attempts: record.map_or(detail.attempts, |record| record.failures.max(detail.attempts)),
        priority: row.priority.to_pb().into(),
        created_at: Some(model::timestamp(row.created_unix_ms)),
        updated_at: Some(model::timestamp(detail.updated_unix_ms)),
        not_before: (row.not_before_unix_ms > 0).then(|| model::timestamp(row.not_before_unix_ms)),
        reason: detail.reason,
    }
}
