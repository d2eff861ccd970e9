//! SQL compared with Redis: brings back what Redis lost, whole shards and single tasks.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    context::{Context, MovesShards},
    error::Error,
    lead::Lead,
    lost_shards::LostShards,
};
use crate::{
    bus::{Bus, Topic},
    model::{Offset, ShardId, TaskId},
    queue::{self, Upkeep},
    runtime::Loop,
    store::{PublishedTask, Store, Unpublished},
    telemetry::metrics::{self, Watched},
};

/// Tasks of SQL that are compared with Redis at a time.
const PAGE: u32 = 10_000;
/// Batches of which those are removed that no task needs.
const BATCHES: u32 = 1000;
/// The pause after a page, in the time that the page took. So comparing takes a tenth of the time, however slow SQL is.
const SHARE: u32 = 9;
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// How often all shards are asked whether they have a generation. Each round asks those in which something happens.
const ALL_EVERY: Duration = Duration::from_secs(30);
/// Tasks of one shard in one call, or in one transaction.
const AT_ONCE: usize = 1000;

#[derive(Clone)]
pub(super) struct Reconcile {
    store: Arc<dyn Store>,
    bus: Arc<dyn Bus>,
    queue: Upkeep,
    every: Duration,
    lost_shards: LostShards,
    lead: Lead,
}

impl Reconcile {
    pub(super) fn new(context: &Context, lead: &Lead, moves_shards: &MovesShards) -> Self {
        let Context { store, bus, queue, settings, .. } = context.clone();
        let lost_shards = LostShards::new(context, moves_shards);
        Self { store, bus, queue, every: settings.watchdog.reconcile_every, lost_shards, lead: lead.clone() }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        let (mut after, mut after_batch) = (None, None);
        let (mut next_page, mut all_asked) = (cx.clock().now(), None::<Instant>);
        while self.lead.wait(&cx).await {
            let (started, now) = (Instant::now(), cx.clock().now());
            // An empty shard loses nothing but its generation, so it is asked rarely.
            let all = all_asked.is_none_or(|at| now - at >= ALL_EVERY);
            let shards = if all { self.queue.shards() } else { self.queue.awake_shards() };
            self.lost_shards.bring_back(shards, &cx).await?;
            if all {
                all_asked = Some(now);
            }
            let compares = Instant::now();
            if next_page <= cx.clock().now() {
                after = self.compare_page(after).await?;
                after_batch = self.store.remove_batches(after_batch, BATCHES).await?;
                next_page = cx.clock().now() + (compares.elapsed() * SHARE).min(LONGEST_WAIT);
            }
            metrics::watchdog_step("reconcile", started.elapsed());
            cx.beat();
            cx.idle(cx.pause(self.every)).await;
        }
        Ok(())
    }

    /// Compares a page of SQL with Redis. Answers where the next page begins.
    async fn compare_page(&self, after: Option<TaskId>) -> Result<Option<TaskId>, Error> {
        let page = self.store.published(self.bus.generation(), after, PAGE).await?;
        // Read before the records: a task that the fanout had dealt with by then has one, or is in the outbox.
        let committed = self.bus.committed(Topic::Pipeline).await?;
        let next = (page.len() == PAGE as usize).then(|| page.last().map(|task| task.id)).flatten();
        // Read after the page: a published task stands before the end, unless the bus has lost it.
        let ends = self.bus.ends(Topic::Pipeline).await?;
        let mut shards: BTreeMap<ShardId, Vec<PublishedTask>> = BTreeMap::new();
        for task in page {
            shards.entry(task.shard.clone()).or_default().push(task);
        }
        let mut missing = Vec::new();
        for (shard, tasks) in shards {
            if shard.number as usize >= ends.len() {
                // The partition is younger than this opening of the bus. A process that knows it compares the shard.
                continue;
            }
            let at = |offsets: &[Option<Offset>]| offsets.get(shard.number as usize).copied().flatten();
            for tasks in tasks.chunks(AT_ONCE) {
                missing.extend(self.missing(&shard, tasks, at(&committed), at(&ends)).await?);
            }
        }
        if !missing.is_empty() {
            tracing::warn!("{} tasks are in SQL and not in Redis: they go out again", missing.len());
        }
        for missing in missing.chunks(AT_ONCE) {
            self.store.unpublish(missing, Unpublished::Missing).await?;
            metrics::watchdog_handled(Watched::Republished, missing.len());
        }
        Ok(next)
    }

    /// Those of `tasks` that are missing: the queue has no record of them, and none will come.
    ///
    /// None comes when the queue or the fanout has read past the task (Redis fell back), or when the task lies behind
    /// the partition's `end` (the bus fell back). A task that is still on its way is not missing.
    async fn missing(
        &self,
        shard: &ShardId,
        tasks: &[PublishedTask],
        committed: Option<Offset>,
        end: Option<Offset>,
    ) -> Result<Vec<TaskId>, Error> {
        let ids: Vec<_> = tasks.iter().map(|task| task.id).collect();
        let (stored, records) = if self.queue.knows(shard) {
            match self.queue.inspect(shard, &ids).await {
                // A lost shard is brought back as a whole.
                Err(queue::Error::NoGeneration) => return Ok(Vec::new()),
                other => other?,
            }
        } else {
            (None, vec![None; ids.len()])
        };
        let generation = self.bus.generation();
        let stored = stored.filter(|(topic, _)| topic == generation).map(|(_, offset)| offset);
        let unknown = tasks.iter().zip(records).filter(|(_, record)| record.is_none()).map(|(task, _)| task);
        let missing = unknown.filter(|task| match task.offset {
            Some(published) => stored.max(committed) >= Some(published) || end < Some(published),
            // Published in another generation of the topic, which nobody reads any more.
            None => true,
        });
        Ok(missing.map(|task| task.id).collect())
    }
}
