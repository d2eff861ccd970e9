//! Brings back what Redis lost, or never got: whole shards, and single tasks.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use tokio::time::Instant;

use super::{Watchdog, count};
use crate::{
    bus::Topic,
    model::{Offset, ShardId, TaskId},
    queue,
    runtime::Beat,
    store::{PublishedTask, Unpublished},
    telemetry::metrics::{self, Watched},
};

/// Tasks of SQL that are compared with Redis at a time.
const PAGE: u32 = 10_000;
/// The wait after a page is so many times as long as the page took: a tenth of the time goes into it, however slow SQL
/// is.
const SHARE: u32 = 9;
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// How often all shards are asked whether they have a generation. Those in which something happens are each time.
const ALL_EVERY: Duration = Duration::from_secs(30);
/// Tasks of one shard in one call, or in one transaction.
const AT_ONCE: usize = 1000;

impl Watchdog {
    pub(super) async fn reconcile(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        let (mut after, mut next_page, mut all_asked) = (None, Instant::now(), None::<Instant>);
        while self.lead.wait(&beat, &self.stop).await {
            let started = Instant::now();
            // Of those in which nothing stands, nothing was lost but the generation.
            let all = all_asked.is_none_or(|at| at.elapsed() >= ALL_EVERY);
            let shards = if all { self.queue.shards() } else { self.queue.awake_shards() };
            self.bring_back_lost(shards, &beat).await?;
            if all {
                all_asked = Some(started);
            }
            let compares = Instant::now();
            if next_page <= compares {
                after = self.compare_page(after).await?;
                next_page = Instant::now() + (compares.elapsed() * SHARE).min(LONGEST_WAIT);
            }
            metrics::watchdog_step("reconcile", started.elapsed());
            beat.beat();
            beat.idle(self.pause(self.settings.watchdog.reconcile_every)).await;
        }
        Ok(())
    }

    /// Brings back shards that are open and have no generation.
    async fn bring_back_lost(&self, shards: Vec<ShardId>, beat: &Beat) -> anyhow::Result<()> {
        let without_generation = async |shards: Vec<ShardId>| {
            let generations = self.queue.generations(&shards).await?;
            let lost = shards.into_iter().zip(generations).filter(|(_, generation)| generation.is_none());
            anyhow::Ok(lost.map(|(shard, _)| shard).collect::<Vec<_>>())
        };
        let lost = without_generation(shards).await?;
        if lost.is_empty() {
            return Ok(());
        }
        // One that is being closed has no generation either.
        let _alone = beat.idle(self.shards.lock()).await;
        let lost = without_generation(lost).await?;
        let open = self.outbox.store.shards(None).await?;
        let open: HashMap<ShardId, u64> = open.into_iter().map(|shard| (shard.id, shard.generation)).collect();
        for shard in lost {
            match open.get(&shard) {
                Some(life) => {
                    self.rebuild(&shard, *life, beat).await.with_context(|| format!("cannot bring back {shard}"))?
                }
                None => self.queue.remove_shard(&shard),
            }
        }
        Ok(())
    }

    /// Brings back a shard that Redis lost. Killed anywhere before the last step, it begins again.
    async fn rebuild(&self, shard: &ShardId, life: u64, beat: &Beat) -> anyhow::Result<()> {
        tracing::warn!(%shard, "redis has lost shard {shard}: bringing its unfinished tasks back from SQL");
        self.results_are_in_sql(beat).await?;
        // Records up to here count as read: their tasks are in SQL, and go out again from there.
        let partitions = self.outbox.bus.ends(Topic::Pipeline).await?;
        let end = partitions.get(shard.number as usize).copied().flatten();
        let (mut after, mut tasks, mut credited) = (None, 0, 0);
        let limit = u32::try_from(self.settings.watchdog.batch_max).unwrap_or(u32::MAX);
        while let Some(back) = self.outbox.store.unpublish_shard(shard, after, limit).await? {
            (after, tasks, credited) = (Some(back.last), tasks + back.tasks, credited + back.credited);
            metrics::watchdog_handled(Watched::Republished, count(back.tasks));
            beat.beat();
        }
        let life = self.outbox.store.next_generation(shard, life).await?;
        self.queue.open_shard(shard, life, self.outbox.bus.generation(), end).await?;
        tracing::info!(
            %shard,
            tasks,
            credited,
            "shard {shard} lives again, as generation {life}: {tasks} unfinished tasks go out again, {credited} replicas of theirs stay \
             credited; what else was done on them is done again"
        );
        Ok(())
    }

    /// Waits until what workers had reported before the loss is in SQL: else they would be asked to do it again.
    /// In whichever partition they stand: there may have been fewer when they came.
    async fn results_are_in_sql(&self, beat: &Beat) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        // One that this process does not know yet may hold some too.
        self.outbox.bus.check_partitions().await?;
        let ends = self.outbox.bus.ends(Topic::TaskResults).await?;
        let unread =
            |committed: Vec<Option<Offset>>| ends.iter().zip(committed).any(|(end, committed)| committed < *end);
        while unread(self.outbox.bus.committed(Topic::TaskResults).await?) {
            anyhow::ensure!(Instant::now() < deadline, "task-results is not read to its end");
            beat.beat();
            if !self.pause(Duration::from_millis(100)).await {
                anyhow::bail!("the process is stopping");
            }
        }
        Ok(())
    }

    /// Compares a page of SQL with Redis; where the next page begins.
    async fn compare_page(&self, after: Option<TaskId>) -> anyhow::Result<Option<TaskId>> {
        let page = self.outbox.store.published(self.outbox.bus.generation(), after, PAGE).await?;
        // Asked before the records: what the fanout had dealt with by then has one, or is in the outbox.
        let committed = self.outbox.bus.committed(Topic::Pipeline).await?;
        let next = (page.len() == PAGE as usize).then(|| page.last().map(|task| task.id)).flatten();
        // Asked after the page: what was published stands before the end, unless the bus has lost it.
        let ends = self.outbox.bus.ends(Topic::Pipeline).await?;
        let mut shards: BTreeMap<ShardId, Vec<PublishedTask>> = BTreeMap::new();
        for task in page {
            shards.entry(task.shard.clone()).or_default().push(task);
        }
        let mut missing = Vec::new();
        for (shard, tasks) in shards {
            if shard.number as usize >= ends.len() {
                // Younger than this opening of the bus: who knows the partition looks there.
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
            self.outbox.store.unpublish(missing, Unpublished::Missing).await?;
            metrics::watchdog_handled(Watched::Republished, missing.len());
        }
        Ok(next)
    }

    /// Missing is what the queue has no record of, although it has read past it, or the fanout has (a Redis that fell
    /// back), or nobody can ever read it: it lies behind the partition's `end`, since the bus fell back. What is still
    /// on its way is not missing.
    async fn missing(
        &self,
        shard: &ShardId,
        tasks: &[PublishedTask],
        committed: Option<Offset>,
        end: Option<Offset>,
    ) -> anyhow::Result<Vec<TaskId>> {
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
        let generation = self.outbox.bus.generation();
        let stored = stored.filter(|(topic, _)| topic == generation).map(|(_, offset)| offset);
        let unknown = tasks.iter().zip(records).filter(|(_, record)| record.is_none()).map(|(task, _)| task);
        let missing = unknown.filter(|task| match task.offset {
            Some(published) => stored.max(committed) >= Some(published) || end < Some(published),
            // Published in another life of the topic, which nobody reads any more.
            None => true,
        });
        Ok(missing.map(|task| task.id).collect())
    }
}
