//! Watchdog: what ran out of time, stayed behind or got lost is found and put back.
//!
//! - leases and delays: each shard, when its next one is due, at the latest every `interval`;
//! - the outbox: rows that were stored and not published (`republish_after`), what was scheduled, what was parked and has room now;
//! - finals: records that SQL shows final and that are older than `grace` are forgotten; so are those whose report is lost (`unreported`);
//! - shards that Redis lost: a new generation, and all that SQL knows as unfinished goes out again;
//! - what finished longer ago than `retention` is removed from SQL;
//! - tasks that SQL has and Redis does not: a page of SQL is compared with Redis every `reconcile_every`;
//! - the bus: what was read and is old is deleted, once a minute.
//!
//! Of many processes one at a time does this.

mod lead;
mod unreported;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::{lead::Lead, unreported::Unreported};
use crate::{
    bus::{Keep, Topic},
    config::Settings,
    model::{self, Offset, QueueName, ShardId, TaskId, TaskRow},
    outbox::{Last, Outbox},
    queue::{self, Queue},
    store::{PAGE_BYTES, PublishedTask, Turn, Unpublished},
    supervise::{Beat, Supervisor},
    telemetry::metrics::{self, QueueDepth, Republished, Watched},
};

#[derive(Clone)]
struct Watchdog {
    outbox: Outbox,
    queue: Queue,
    settings: Arc<Settings>,
    lead: Lead,
    stop: CancellationToken,
}

pub fn start(outbox: Outbox, queue: Queue, settings: &Arc<Settings>, supervisor: &Supervisor) {
    let (lead, stop) = (Lead::start(queue.clone(), settings.stall_after, supervisor), supervisor.stop_token());
    let watchdog = Watchdog { outbox, queue, settings: Arc::clone(settings), lead, stop };
    let spawn = |name: &'static str| (watchdog.clone(), Arc::new(supervisor.progress().register(name)));
    let (dog, beat) = spawn("watchdog/leases");
    supervisor.spawn("watchdog/leases", move || dog.clone().leases(Arc::clone(&beat)));
    let (dog, beat) = spawn("watchdog/outbox");
    supervisor.spawn("watchdog/outbox", move || dog.clone().publish_outbox(Arc::clone(&beat)));
    let (dog, beat) = spawn("watchdog/finals");
    supervisor.spawn("watchdog/finals", move || dog.clone().finals(Arc::clone(&beat)));
    let (dog, beat) = spawn("watchdog/reconcile");
    supervisor.spawn("watchdog/reconcile", move || dog.clone().reconcile(Arc::clone(&beat)));
    if !settings.watchdog.retention.is_zero() {
        let (dog, beat) = spawn("watchdog/retention");
        supervisor.spawn("watchdog/retention", move || dog.clone().remove_finished(Arc::clone(&beat)));
    }
    let (dog, beat) = spawn("watchdog/depths");
    supervisor.spawn("watchdog/depths", move || dog.clone().depths(Arc::clone(&beat)));
    let (dog, beat) = spawn("watchdog/trim");
    supervisor.spawn("watchdog/trim", move || dog.clone().trim(Arc::clone(&beat)));
}

/// Parked tasks that were released and that the fanout has not read yet, by queue, and since when.
type OnTheirWay = HashMap<QueueName, (Last, Instant)>;
/// After this the watchdog asks whether the topic was made anew: then no reader will ever reach their offsets.
const LONG_ON_THEIR_WAY: Duration = Duration::from_secs(10);

/// Tasks removed in one transaction: so few that nobody waits long for it.
const REMOVED_AT_ONCE: u32 = 256;

/// How often the topics are trimmed.
const TRIM_EVERY: Duration = Duration::from_secs(60);

/// Elements per lane that one sweep looks at.
const SWEEP: usize = 512;

impl Watchdog {
    /// Waits; false at the stop.
    async fn pause(&self, duration: Duration) -> bool {
        tokio::select! {
            () = tokio::time::sleep(duration) => true,
            () = self.stop.cancelled() => false,
        }
    }

    // --- leases and delays

    async fn leases(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        let interval = self.settings.watchdog.interval;
        let mut due: HashMap<ShardId, Instant> = HashMap::new();
        while self.lead.wait(&beat, &self.stop).await {
            let (now, mut failed) = (Instant::now(), Ok(()));
            for shard in self.queue.shards() {
                if due.get(&shard).is_none_or(|at| *at <= now) {
                    let wait = match self.tend(&shard).await {
                        Ok(wait) => wait.min(interval),
                        Err(queue::Error::NoGeneration) => interval,
                        // A shard that is damaged must not hold up those behind it.
                        Err(error) => {
                            failed = failed.and(Err(error).with_context(|| format!("cannot tend {shard}")));
                            interval
                        }
                    };
                    due.insert(shard, now + wait);
                }
            }
            failed?;
            metrics::watchdog_step("leases", now.elapsed());
            beat.beat();
            let next = due.values().min().map_or(interval, |at| at.saturating_duration_since(Instant::now()));
            self.pause(next.clamp(Duration::from_millis(5), interval)).await;
        }
        Ok(())
    }

    /// Everything due in the shard; how long until the next is.
    async fn tend(&self, shard: &ShardId) -> queue::Result<Duration> {
        let most = self.settings.watchdog.batch_max;
        let backoff = &self.settings.queues.get(&shard.queue).backoff;
        let expired = self.queue.expire(shard, most, backoff).await?;
        metrics::watchdog_handled(Watched::Expired, count(expired.expired));
        metrics::watchdog_handled(Watched::Dead, count(expired.dead));
        metrics::watchdog_handled(Watched::Retried, count(expired.expired - expired.dead));
        let promoted = self.queue.promote(shard, most).await?;
        metrics::watchdog_handled(Watched::Promoted, count(promoted.promoted));
        self.queue.sweep(shard, SWEEP).await?;
        if expired.more || promoted.more {
            return Ok(Duration::ZERO);
        }
        let next = expired.next_unix_ms.into_iter().chain(promoted.next_unix_ms).min();
        // By this machine's clock only how long we sleep; Redis decides what is due.
        let until = next.map(|at| u64::try_from(at - model::now_unix_ms()).unwrap_or(0));
        Ok(until.map_or(Duration::MAX, Duration::from_millis))
    }

    // --- the outbox

    async fn publish_outbox(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        for queue in self.outbox.store.parked_queues().await? {
            self.outbox.gates.close(&queue);
        }
        let (mut looked_for_parked, mut on_their_way) = (Instant::now(), OnTheirWay::new());
        // Left out until the next look, so that each is tried, and named in the log, every few seconds.
        let mut refused = HashSet::new();
        while self.lead.wait(&beat, &self.stop).await {
            if self.outbox.gates.is_short() {
                // The fanout would park every task again.
                beat.beat();
                self.pause(Duration::from_millis(200)).await;
                continue;
            }
            let started = Instant::now();
            let limit = self.settings.watchdog.batch_max;
            let due = self.outbox.store.due(model::now_unix_ms(), limit, &refused).await?;
            let full = due.len() == limit || due.iter().map(|row| row.task.weight()).sum::<usize>() >= PAGE_BYTES;
            let mut by_reason: BTreeMap<u8, Vec<(&TaskRow, Turn)>> = BTreeMap::new();
            for row in &due {
                by_reason.entry(row.unpublished as u8).or_default().push((&row.task, row.turn));
            }
            for (reason, rows) in by_reason {
                // What was never published needs no second look; a fresh row may have been, just before its mark.
                let again = reason != Unpublished::Scheduled as u8;
                let (_, left) = self.outbox.publish_others(&rows, again).await?;
                metrics::outbox_republished(republished(reason), rows.len() - left.len());
                refused.extend(left);
            }
            self.release_parked(limit, &mut on_their_way, &mut refused).await?;
            // Another process may have parked tasks.
            if looked_for_parked.elapsed() > Duration::from_secs(5) {
                looked_for_parked = Instant::now();
                refused.clear();
                for queue in self.outbox.store.parked_queues().await? {
                    self.outbox.gates.close(&queue);
                }
            }
            metrics::watchdog_step("outbox", started.elapsed());
            beat.beat();
            let wait = match (full, on_their_way.is_empty()) {
                (true, _) => Duration::from_millis(1),
                (false, false) => Duration::from_millis(20),
                (false, true) => Duration::from_millis(200),
            };
            self.pause(wait).await;
        }
        Ok(())
    }

    /// Publishes parked tasks of queues that have room again; opens the gate of one that has none parked.
    async fn release_parked(
        &self,
        limit: usize,
        on_their_way: &mut OnTheirWay,
        refused: &mut HashSet<TaskId>,
    ) -> anyhow::Result<()> {
        if !on_their_way.is_empty() {
            let committed = self.outbox.bus.committed(Topic::Pipeline).await?;
            let read = |partition: u32| committed.get(partition as usize).copied().flatten();
            on_their_way.retain(|_, (released, _)| {
                released.retain(|partition, last| read(*partition) < Some(*last));
                !released.is_empty()
            });
            for (released, since) in on_their_way.values_mut().filter(|(_, since)| since.elapsed() > LONG_ON_THEIR_WAY)
            {
                for (partition, last) in released.clone() {
                    if self.outbox.bus.lies_beyond(Topic::Pipeline, partition, last).await? {
                        released.remove(&partition);
                    }
                }
                *since = Instant::now();
            }
            on_their_way.retain(|_, (released, _)| !released.is_empty());
        }
        for queue in self.outbox.gates.closed() {
            // What was released last is not counted in its shards yet.
            if on_their_way.contains_key(&queue) || !self.has_room(&queue).await? {
                continue;
            }
            let parked = self.outbox.store.parked(&queue, limit, refused).await?;
            if parked.is_empty() {
                self.outbox.gates.open(&queue);
                continue;
            }
            let rows: Vec<_> = parked.iter().map(|row| (&row.task, row.turn)).collect();
            // A parked task was perhaps published before, and parked by the fanout.
            let (last, left) = self.outbox.publish_others(&rows, true).await?;
            metrics::outbox_republished(Republished::Unparked, rows.len() - left.len());
            refused.extend(left);
            on_their_way.insert(queue, (last, Instant::now()));
        }
        Ok(())
    }

    /// Below nine tenths of the high water in every shard.
    async fn has_room(&self, queue: &QueueName) -> anyhow::Result<bool> {
        let settings = self.settings.queues.get(queue);
        for shard in self.queue.shards_of(queue) {
            let stats = match self.queue.stats(&shard.id).await {
                Err(queue::Error::NoGeneration) => return Ok(false),
                other => other?,
            };
            if stats.ahead >= settings.high_water_tasks / 10 * 9
                || stats.waiting_bytes >= settings.high_water_bytes / 10 * 9
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    // --- final records

    async fn finals(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        let mut unreported = Unreported::default();
        while self.lead.wait(&beat, &self.stop).await {
            let started = Instant::now();
            let (mut busy, mut failed) = (false, Ok(()));
            for shard in self.queue.shards() {
                match self.settle_finals(&shard, &mut unreported).await {
                    Ok(forgotten) => busy |= forgotten,
                    Err(error) if is_lost(&error) => {}
                    Err(error) => failed = failed.and(Err(error).with_context(|| format!("cannot settle {shard}"))),
                }
            }
            failed?;
            metrics::watchdog_step("finals", started.elapsed());
            beat.beat();
            let wait = if busy {
                Duration::from_millis(1)
            } else {
                (self.settings.watchdog.grace / 10).min(Duration::from_secs(1))
            };
            self.pause(wait).await;
        }
        Ok(())
    }

    /// Forgets some final records; whether a full page was forgotten.
    async fn settle_finals(&self, shard: &ShardId, unreported: &mut Unreported) -> anyhow::Result<bool> {
        let most = self.settings.watchdog.batch_max;
        let ids = self.queue.finals(shard, self.settings.watchdog.grace, most).await?;
        if ids.is_empty() {
            return Ok(false);
        }
        let states = self.outbox.store.states(&ids).await?;
        // What SQL does not have was final for so long that it was removed.
        let open: HashSet<TaskId> = states.into_iter().filter(|s| !s.status.is_final()).map(|s| s.id).collect();
        let lost = unreported.lost(shard, &open, &self.outbox, &self.queue).await?;
        if !lost.is_empty() {
            // Without a record they are missing, and go out again.
            tracing::warn!(%shard, "the reports of {} tasks of {shard} are lost: they are done again", lost.len());
        }
        let settled: Vec<_> = ids.iter().map(|id| (*id, !open.contains(id) || lost.contains(id))).collect();
        let forgotten = self.queue.forget(shard, &settled).await?;
        metrics::watchdog_handled(Watched::Settled, count(forgotten));
        Ok(count(forgotten) == most)
    }

    // --- what finished long ago

    async fn remove_finished(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        let retention = self.settings.watchdog.retention;
        while self.lead.wait(&beat, &self.stop).await {
            let started = Instant::now();
            let removed = self.outbox.store.remove_finished(retention, REMOVED_AT_ONCE).await?;
            metrics::watchdog_step("retention", started.elapsed());
            metrics::watchdog_handled(Watched::Removed, count(removed));
            beat.beat();
            // At most half of the time, so that others get at the database, however much is due.
            let busy = removed == u64::from(REMOVED_AT_ONCE);
            let wait = if busy { started.elapsed() } else { retention / 10 };
            let most = if busy { Duration::from_secs(10) } else { Duration::from_secs(60) };
            beat.idle(self.pause(wait.clamp(Duration::from_millis(10), most))).await;
        }
        Ok(())
    }

    // --- what Redis lost

    async fn reconcile(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        let mut after = None;
        while self.lead.wait(&beat, &self.stop).await {
            let started = Instant::now();
            for (shard, life) in self.outbox.store.shards().await? {
                self.queue.add_shard(&shard);
                if self.queue.generation(&shard).await?.is_none() {
                    self.rebuild(&shard, life, &beat).await.with_context(|| format!("cannot bring back {shard}"))?;
                }
            }
            after = self.compare_page(after).await?;
            metrics::watchdog_step("reconcile", started.elapsed());
            beat.beat();
            self.pause(self.settings.watchdog.reconcile_every).await;
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
        let life = self.outbox.store.next_life(shard, life).await?;
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
        let limit = u32::try_from(self.settings.watchdog.batch_max).unwrap_or(u32::MAX);
        let page = self.outbox.store.published(self.outbox.bus.generation(), after, limit).await?;
        // Asked before the records: what the fanout had dealt with by then has one, or is in the outbox.
        let committed = self.outbox.bus.committed(Topic::Pipeline).await?;
        let next = (page.len() == self.settings.watchdog.batch_max).then(|| page.last().map(|task| task.id)).flatten();
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
            missing.extend(self.missing(&shard, &tasks, at(&committed), at(&ends)).await?);
        }
        if !missing.is_empty() {
            tracing::warn!("{} tasks are in SQL and not in Redis: they go out again", missing.len());
            self.outbox.store.unpublish(&missing, Unpublished::Missing).await?;
            metrics::watchdog_handled(Watched::Republished, missing.len());
        }
        Ok(next)
    }

    /// Missing is what the queue has no record of, although it has read past it, or the fanout has (a Redis that fell back), or nobody can
    /// ever read it: it lies behind the partition's `end`, since the bus fell back. What is still on its way is not missing.
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

    // --- what was read

    async fn trim(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        let keep = Keep { age: self.settings.topic_retention, records: self.settings.topic_retention_records };
        while self.lead.wait(&beat, &self.stop).await {
            let started = Instant::now();
            for topic in Topic::ALL {
                let trimmed = self.outbox.bus.trim(topic, keep).await?;
                if trimmed > 0 {
                    tracing::debug!(%topic, "deleted {trimmed} old records of {topic}");
                }
            }
            metrics::watchdog_step("trim", started.elapsed());
            beat.idle(self.pause(TRIM_EVERY)).await;
        }
        Ok(())
    }

    // --- gauges

    async fn depths(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        loop {
            let mut depths: BTreeMap<QueueName, QueueDepth> = BTreeMap::new();
            let mut to_forward = 0;
            for count in self.outbox.store.counts().await? {
                let depth = depths.entry(count.queue).or_default();
                // Less what Redis has, below.
                depth.pending += if count.status.is_final() { 0 } else { count.count };
            }
            for shard in self.queue.shards() {
                let stats = match self.queue.stats(&shard).await {
                    Err(queue::Error::NoGeneration) => continue,
                    other => other?,
                };
                let depth = depths.entry(shard.queue).or_default();
                to_forward += stats.outbox;
                depth.pending = depth.pending.saturating_sub(stats.live);
                depth.waiting += stats.open;
                depth.leased += stats.leases;
                depth.delayed += stats.delayed;
                let age = stats.oldest_created_unix_ms.map(|at| model::now_unix_ms().saturating_sub(at));
                let age = Duration::from_millis(age.and_then(|age| u64::try_from(age).ok()).unwrap_or(0));
                depth.oldest = depth.oldest.max(age);
            }
            for (queue, depth) in depths {
                metrics::queue_depth(queue.as_str(), depth);
            }
            metrics::results_depth(to_forward);
            for topic in [Topic::Pipeline, Topic::TaskResults] {
                metrics::bus_backlog(topic.as_str(), self.outbox.bus.backlog(topic).await?);
            }
            beat.beat();
            if !self.pause(Duration::from_secs(2)).await {
                return Ok(());
            }
        }
    }
}

fn republished(reason: u8) -> Republished {
    match reason {
        r if r == Unpublished::Scheduled as u8 => Republished::Scheduled,
        r if r == Unpublished::Missing as u8 => Republished::Missing,
        r if r == Unpublished::Parked as u8 => Republished::Unparked,
        _ => Republished::Unpublished,
    }
}

fn is_lost(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(queue::Error::NoGeneration))
}

fn count(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
