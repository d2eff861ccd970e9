//! Shards that Redis lost: SQL knows their unfinished tasks, and a new generation begins with them.

use std::{collections::HashMap, sync::Arc, time::Duration};

use super::{
    context::{Context, MovesShards, count},
    error::Error,
};
use crate::{
    bus::{Bus, Topic},
    model::{Offset, ShardId},
    queue::Upkeep,
    runtime::Loop,
    store::Store,
    telemetry::metrics::{self, Watched},
};

/// How long discovery may take to read `task-results` to its end, and how often that is asked.
const READ_WITHIN: Duration = Duration::from_secs(60);
const ASK_EVERY: Duration = Duration::from_millis(100);

#[derive(Clone)]
pub(super) struct LostShards {
    store: Arc<dyn Store>,
    bus: Arc<dyn Bus>,
    queue: Upkeep,
    /// Tasks of one transaction.
    batch_max: usize,
    moves_shards: MovesShards,
}

impl LostShards {
    pub(super) fn new(context: &Context, moves_shards: &MovesShards) -> Self {
        let Context { store, bus, queue, settings, .. } = context.clone();
        let batch_max = settings.watchdog.batch_max;
        Self { store, bus, queue, batch_max, moves_shards: Arc::clone(moves_shards) }
    }

    /// Brings back those of `shards` that are open and have no generation.
    pub(super) async fn bring_back(&self, shards: Vec<ShardId>, cx: &Loop) -> Result<(), Error> {
        let lost = self.without_generation(shards).await?;
        if lost.is_empty() {
            return Ok(());
        }
        // A shard that is being closed has no generation either.
        let _alone = cx.idle(self.moves_shards.lock()).await;
        let lost = self.without_generation(lost).await?;
        let open = self.store.shards(None).await?;
        let open: HashMap<ShardId, u64> = open.into_iter().map(|shard| (shard.id, shard.generation)).collect();
        for shard in lost {
            match open.get(&shard) {
                Some(generation) => {
                    let rebuilt = self.rebuild(&shard, *generation, cx).await;
                    rebuilt.map_err(|error| error.of_shard("bring back", &shard))?;
                }
                None => self.queue.remove_shard(&shard),
            }
        }
        Ok(())
    }

    async fn without_generation(&self, shards: Vec<ShardId>) -> Result<Vec<ShardId>, Error> {
        let generations = self.queue.generations(&shards).await?;
        let lost = shards.into_iter().zip(generations).filter(|(_, generation)| generation.is_none());
        Ok(lost.map(|(shard, _)| shard).collect())
    }

    /// Brings back a shard that was in this generation. After a crash before the last step, it begins again.
    async fn rebuild(&self, shard: &ShardId, generation: u64, cx: &Loop) -> Result<(), Error> {
        tracing::warn!(%shard, "redis has lost shard {shard}: bringing its unfinished tasks back from SQL");
        self.results_are_in_sql(cx).await?;
        // Records up to this end count as read. Their tasks are in SQL, and are published again behind it.
        let partitions = self.bus.ends(Topic::Pipeline).await?;
        let end = partitions.get(shard.number as usize).copied().flatten();
        let (mut after, mut tasks, mut credited) = (None, 0, 0);
        let limit = u32::try_from(self.batch_max).unwrap_or(u32::MAX);
        while let Some(back) = self.store.unpublish_shard(shard, after, limit).await? {
            (after, tasks, credited) = (Some(back.last), tasks + back.tasks, credited + back.credited);
            metrics::watchdog_handled(Watched::Republished, count(back.tasks));
            cx.beat();
        }
        let generation = self.store.next_generation(shard, generation).await?;
        self.queue.open_shard(shard, generation, self.bus.generation(), end).await?;
        tracing::info!(
            %shard,
            tasks,
            credited,
            "shard {shard} lives again, as generation {generation}: {tasks} unfinished tasks go out again, {credited} \
             replicas of theirs stay credited; what else was done on them is done again"
        );
        Ok(())
    }

    /// Waits until SQL has the reports from before the loss. Otherwise workers would do those tasks again.
    ///
    /// The reports may stand in any partition: there may have been fewer when they came.
    async fn results_are_in_sql(&self, cx: &Loop) -> Result<(), Error> {
        let deadline = cx.clock().now() + READ_WITHIN;
        // A partition that this process does not know yet may hold some too.
        self.bus.check_partitions().await?;
        let ends = self.bus.ends(Topic::TaskResults).await?;
        let unread =
            |committed: Vec<Option<Offset>>| ends.iter().zip(committed).any(|(end, committed)| committed < *end);
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
