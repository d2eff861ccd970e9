//! The counts of queues. SQL knows all tasks, and Redis those that workers can get now.

use std::collections::{BTreeMap, BTreeSet};

use tracing::Instrument as _;

use super::{
    access::reaches_everything,
    error::Error,
    handle::{Api, span},
    reader::Reader,
};
use crate::{
    model::{Caller, QueueName, QueueView, ShardId, StoredStatus},
    queue,
    store::QueueCount,
};

/// What SQL says of queues.
pub struct StoredQueues {
    names: BTreeSet<QueueName>,
    counts: Vec<QueueCount>,
    /// When the oldest task was inserted that waits in SQL.
    oldest: Vec<(QueueName, i64)>,
}

/// What Redis says of queues that have an open shard.
pub struct HeldQueues {
    queues: BTreeMap<QueueName, HeldQueue>,
    paused: Vec<QueueName>,
}

#[derive(Default)]
struct HeldQueue {
    live: u64,
    waiting: u64,
    assigned: u64,
    delayed: u64,
    leases: u64,
    oldest_created_unix_ms: Option<i64>,
    unread_shards: u64,
}

impl Api {
    /// What SQL says of all queues that have unfinished tasks or an open shard.
    pub async fn stored_queues(&self, caller: &Caller) -> Result<StoredQueues, Error> {
        reaches_everything(caller)?;
        let query = self.query()?;
        let shards = query.queue.shards();
        let stored = query.stored_queues(&shards);
        stored.instrument(span("stored_queues", caller)).await
    }

    /// What Redis says of all queues that have an open shard.
    pub async fn held_queues(&self, caller: &Caller) -> Result<HeldQueues, Error> {
        reaches_everything(caller)?;
        let query = self.query()?;
        let shards = query.queue.shards();
        let held = query.held(&shards);
        held.instrument(span("held_queues", caller)).await
    }
}

impl Reader {
    /// The queues that have unfinished tasks or an open shard.
    pub(super) async fn queues(&self) -> Result<Vec<QueueView>, Error> {
        let shards = self.queue.shards();
        let stored = self.stored_queues(&shards).await?;
        let held = self.held(&shards).await?;
        Ok(merged(&stored, &held, self.clock.now_unix_ms()))
    }

    /// One queue, which may be empty.
    pub(super) async fn queue_view(&self, queue: &QueueName) -> Result<QueueView, Error> {
        let mut shards = self.queue.shards();
        shards.retain(|shard| shard.queue == *queue);
        let mut queues = self.views(std::slice::from_ref(queue), &shards).await?;
        let mut view = entry_of(&mut queues, queue).clone();
        view.paused = self.queue.paused().contains(queue);
        Ok(view)
    }

    /// The counts of these queues and of their open shards. The caller sets `paused`.
    pub(super) async fn views(
        &self,
        names: &[QueueName],
        shards: &[ShardId],
    ) -> Result<BTreeMap<QueueName, QueueView>, Error> {
        let stored = self.stored(names.iter().cloned().collect()).await?;
        let held = self.held(shards).await?;
        Ok(views(&stored, &held, self.clock.now_unix_ms()))
    }

    async fn stored_queues(&self, shards: &[ShardId]) -> Result<StoredQueues, Error> {
        // A closed queue has nothing to show until somebody inserts a task.
        let mut names: BTreeSet<QueueName> =
            shards.iter().map(|shard| shard.queue.clone()).collect();
        let unfinished = self.store.unfinished().await?;
        names.extend(unfinished.into_iter().map(|(queue, _)| queue));
        self.stored(names).await
    }

    async fn stored(&self, names: BTreeSet<QueueName>) -> Result<StoredQueues, Error> {
        let asked: Vec<QueueName> = names.iter().cloned().collect();
        let counts = self.store.counts(Some(&asked)).await?;
        let mut oldest = self.store.oldest_waiting(self.clock.now_unix_ms()).await?;
        oldest.retain(|(queue, _)| names.contains(queue));
        Ok(StoredQueues {
            names,
            counts,
            oldest,
        })
    }

    async fn held(&self, shards: &[ShardId]) -> Result<HeldQueues, Error> {
        let mut queues: BTreeMap<QueueName, HeldQueue> = BTreeMap::new();
        for (stats, shard) in self.queue.stats_of(shards).await.into_iter().zip(shards) {
            if matches!(stats, Err(queue::Error::NoGeneration)) {
                continue;
            }
            let of = queues.entry(shard.queue.clone()).or_default();
            let stats = match stats {
                // Its tasks remain in `pending`.
                Err(error) if error.is_of_shard() => {
                    of.unread_shards += 1;
                    continue;
                }
                other => other?,
            };
            let (assigned, delayed) = stats.assigned_and_delayed();
            of.live += stats.live;
            of.waiting += stats.open;
            of.assigned += assigned;
            of.delayed += delayed;
            of.leases += stats.leases;
            of.oldest_created_unix_ms =
                earlier(of.oldest_created_unix_ms, stats.oldest_created_unix_ms);
        }
        Ok(HeldQueues {
            queues,
            paused: self.queue.paused(),
        })
    }
}

/// The views of all queues that both know, of which one may be older than the other.
pub fn merged(stored: &StoredQueues, held: &HeldQueues, now_unix_ms: i64) -> Vec<QueueView> {
    let mut queues = views(stored, held, now_unix_ms);
    for queue in &held.paused {
        entry_of(&mut queues, queue).paused = true;
    }
    queues.into_values().collect()
}

fn views(
    stored: &StoredQueues,
    held: &HeldQueues,
    now_unix_ms: i64,
) -> BTreeMap<QueueName, QueueView> {
    let age_ms = |created_unix_ms: i64| {
        u64::try_from(now_unix_ms.saturating_sub(created_unix_ms)).unwrap_or(0)
    };
    let mut queues = BTreeMap::new();
    for count in &stored.counts {
        let entry = entry_of(&mut queues, &count.queue);
        match count.status {
            // The tasks in Redis are subtracted below.
            StoredStatus::Unfinished => entry.pending = count.count,
            StoredStatus::Completed => entry.completed = count.count,
            StoredStatus::Dead => entry.dead = count.count,
            StoredStatus::Cancelled => entry.cancelled = count.count,
        }
    }
    for (queue, of) in &held.queues {
        let is_empty = of.live == 0 && of.unread_shards == 0;
        if is_empty && !stored.names.contains(queue) {
            continue;
        }
        let entry = entry_of(&mut queues, queue);
        entry.waiting = of.waiting;
        entry.leases = of.leases;
        entry.assigned = of.assigned;
        entry.delayed = of.delayed;
        // A task whose end is on its way to SQL counts as pending for that moment.
        entry.pending = entry.pending.saturating_sub(of.live);
        entry.oldest_waiting_ms = of.oldest_created_unix_ms.map(age_ms);
        entry.unread_shards = of.unread_shards;
    }
    for (queue, created_unix_ms) in &stored.oldest {
        let entry = entry_of(&mut queues, queue);
        entry.oldest_waiting_ms = entry.oldest_waiting_ms.max(Some(age_ms(*created_unix_ms)));
    }
    queues
}

fn earlier(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

fn entry_of<'a>(
    queues: &'a mut BTreeMap<QueueName, QueueView>,
    queue: &QueueName,
) -> &'a mut QueueView {
    queues.entry(queue.clone()).or_insert_with(|| QueueView {
        queue: queue.clone(),
        pending: 0,
        waiting: 0,
        assigned: 0,
        delayed: 0,
        leases: 0,
        completed: 0,
        dead: 0,
        cancelled: 0,
        oldest_waiting_ms: None,
        paused: false,
        unread_shards: 0,
    })
}
