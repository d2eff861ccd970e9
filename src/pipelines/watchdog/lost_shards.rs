//! Shards that Redis lost: each is opened in its next generation, and `rebuild` publishes its
//! unfinished tasks again.
//!
//! Crash windows:
//!
//! - After the mark in SQL, before the shard is open in Redis: the shard is still lost, and gets
//!   another generation.
//! - After the opening, before all tasks are published: the mark is still there, so the next
//!   watchdog starts the rebuild again.
//! - Redis loses the shard again during the rebuild: the shard gets another generation and a new
//!   rebuild. The end of the earlier rebuild does not remove the mark, because it names the earlier
//!   generation.
//! - Two watchdogs run: the generation is raised once. Both publish all tasks, and the queue
//!   recognises the second record of each as a duplicate.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use super::{
    error::Error,
    rebuild::Rebuild,
    shared::{MovesShards, without_generation},
};
use crate::{
    bus::{Bus, Topic},
    model::{LimitHold, Offset, QueueName, ShardId},
    pipelines::context::Context,
    queue::Upkeep,
    runtime::{Clock, Loop},
    store::{Operators, Outbox},
};

/// How long discovery may take to read `task-results` to its end, and how often to check.
const READ_WITHIN: Duration = Duration::from_secs(60);
const ASK_EVERY: Duration = Duration::from_millis(100);

#[derive(Clone)]
pub(super) struct LostShards {
    store: Arc<dyn Outbox>,
    /// Which limit keys workers hold; `None` if no queue has limits per key.
    holds: Option<Arc<dyn Operators>>,
    bus: Arc<dyn Bus>,
    queue: Upkeep,
    rebuild: Rebuild,
    moves_shards: MovesShards,
    clock: Clock,
}

impl LostShards {
    pub(super) fn new(context: &Context, moves_shards: &MovesShards) -> Self {
        let Context {
            store, bus, queue, ..
        } = context.clone();
        let holds = (context.limit_partitions > 0).then(|| context.store.clone() as _);
        let rebuild = Rebuild::new(context);
        let moves_shards = Arc::clone(moves_shards);
        Self {
            store,
            holds,
            bus,
            queue: queue.upkeep,
            rebuild,
            moves_shards,
            clock: context.clock.clone(),
        }
    }

    /// Brings back those of `shards` that are open in SQL but have no generation in Redis, and
    /// finishes rebuilds that were started before.
    pub(super) async fn bring_back(&self, shards: Vec<ShardId>, cx: &Loop) -> Result<(), Error> {
        let begun = self.store.rebuilding().await?.shards;
        // This process may not know a shard that another one has marked.
        let shards: BTreeSet<ShardId> = shards.into_iter().chain(begun.keys().cloned()).collect();
        let lost = without_generation(&self.queue, shards.into_iter().collect()).await?;
        if lost.is_empty() && begun.is_empty() {
            return Ok(());
        }
        // A shard that is being closed has no generation either.
        let _alone = cx.idle(self.moves_shards.lock()).await;
        let lost = without_generation(&self.queue, lost).await?;
        // All are opened before any is rebuilt: the fanout of a partition waits for each lost
        // shard.
        self.open(lost, cx).await?;
        let rebuilding = self.store.rebuilding().await?;
        if rebuilding.shards.is_empty() {
            Ok(())
        } else {
            self.rebuild.run(&rebuilding, cx).await
        }
    }

    /// The holds of limit keys that outlive Redis.
    async fn holds(&self, queue: &QueueName) -> Result<Vec<LimitHold>, Error> {
        let Some(store) = &self.holds else {
            return Ok(Vec::new());
        };
        Ok(store.holds(queue, self.clock.now_unix_ms()).await?)
    }

    /// Opens the lost shards that are open in SQL, in their next generations.
    async fn open(&self, lost: Vec<ShardId>, cx: &Loop) -> Result<(), Error> {
        if lost.is_empty() {
            return Ok(());
        }
        let open = self.store.shards(None).await?;
        let open: HashMap<ShardId, u64> = open
            .into_iter()
            .map(|shard| (shard.id, shard.generation))
            .collect();
        let (lost, closed): (Vec<_>, Vec<_>) =
            lost.into_iter().partition(|shard| open.contains_key(shard));
        closed
            .iter()
            .for_each(|shard| self.queue.remove_shard(shard));
        if lost.is_empty() {
            return Ok(());
        }
        let named = named(&lost);
        tracing::warn!(
            shards = lost.len(),
            "redis has lost {named}: bringing the unfinished tasks back from SQL"
        );
        self.results_are_in_sql(cx).await?;
        // A shard that has a generation by now was not lost: it was just being opened. If its
        // opening arrives even later, the next generation replaces it.
        let lost = without_generation(&self.queue, lost).await?;
        if lost.is_empty() {
            return Ok(());
        }
        // Records up to these ends count as read. Their tasks are in SQL, and are published again
        // after these ends.
        let ends = self.bus.ends(Topic::Pipeline).await?;
        let lost: Vec<(ShardId, u64)> = lost
            .into_iter()
            .map(|shard| (shard.clone(), open[&shard]))
            .collect();
        let generations = self.store.begin_rebuild(&lost).await?;
        let mut holds: HashMap<QueueName, Vec<LimitHold>> = HashMap::new();
        for ((shard, _), generation) in lost.iter().zip(generations) {
            let end = ends.get(shard.number as usize).copied().flatten();
            if !holds.contains_key(&shard.queue) {
                holds.insert(shard.queue.clone(), self.holds(&shard.queue).await?);
            }
            let of_queue = &holds[&shard.queue];
            let opened = self
                .queue
                .open_held(shard, generation, self.bus.generation(), end, of_queue)
                .await;
            opened.map_err(|error| Error::from(error).of_shard("bring back", shard))?;
            tracing::debug!(%shard, "shard {shard} lives again, as generation {generation}");
            cx.beat();
        }
        tracing::info!(
            shards = lost.len(),
            "{named} are open again: their tasks follow"
        );
        Ok(())
    }

    /// Waits until SQL has the reports from before the loss. Otherwise workers would do those tasks
    /// again.
    ///
    /// Checks all partitions: the reports may be in any of them, because the topic may have had
    /// fewer partitions when they were published.
    async fn results_are_in_sql(&self, cx: &Loop) -> Result<(), Error> {
        let deadline = cx.clock().now() + READ_WITHIN;
        // A partition that this process does not know yet may hold some too.
        self.bus.check_partitions().await?;
        let ends = self.bus.ends(Topic::TaskResults).await?;
        let unread = |committed: Vec<Option<Offset>>| {
            ends.iter()
                .zip(committed)
                .any(|(end, committed)| committed < *end)
        };
        while unread(self.bus.committed(Topic::TaskResults).await?) {
            if cx.clock().now() >= deadline {
                return Err(Error::ReportsUnread);
            }
            cx.beat();
            if !cx.pause(ASK_EVERY).await {
                return Err(Error::Stopping);
            }
        }
        Ok(())
    }
}

/// Some of the shards by name, and how many there are: a lost Redis may have had thousands.
fn named(shards: &[ShardId]) -> String {
    const NAMED: usize = 5;
    let names: Vec<String> = shards.iter().take(NAMED).map(ShardId::to_string).collect();
    let more = if shards.len() > NAMED { ", …" } else { "" };
    format!("{} shards ({}{more})", shards.len(), names.join(", "))
}
