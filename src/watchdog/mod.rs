//! Watchdog: what ran out of time, stayed behind or got lost is found and put back.
//!
//! - leases and delays: each shard, when its next one is due, at the latest every `interval`;
//! - the outbox: rows that were stored and not published (`republish_after`), what was scheduled, what was parked and has room now;
//! - finals: records that SQL shows final and that are older than `grace` are forgotten; so are those whose report is lost (`unreported`);
//! - shards that Redis lost: a new generation, and all that SQL knows as unfinished goes out again;
//! - what finished longer ago than `retention` is removed from SQL;
//! - shards that had nothing for `forget_queues_after` are closed;
//! - tasks that SQL has and Redis does not: a page of SQL is compared with Redis every `reconcile_every`;
//! - the bus: what was read and is old is deleted, once a minute.
//!
//! Of many processes one at a time does this.

mod closing;
mod lead;
mod outbox;
mod reconcile;
mod retention;
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
    dedup::Filter,
    model::{QueueName, ShardId, TaskId},
    outbox::Outbox,
    queue::{self, Queue},
    supervise::{Beat, Supervisor},
    telemetry::metrics::{self, QueueDepth, Watched},
};

#[derive(Clone)]
struct Watchdog {
    outbox: Outbox,
    filter: Filter,
    queue: Queue,
    settings: Arc<Settings>,
    lead: Lead,
    stop: CancellationToken,
    /// Held while a shard is closed or brought back: between the two steps of a closing it looks lost.
    shards: Arc<tokio::sync::Mutex<()>>,
}

pub fn start(outbox: Outbox, filter: Filter, queue: Queue, settings: &Arc<Settings>, supervisor: &Supervisor) {
    let (lead, stop) = (Lead::start(queue.clone(), settings.stall_after, supervisor), supervisor.stop_token());
    let settings_of = Arc::clone(settings);
    let watchdog = Watchdog { outbox, filter, queue, settings: settings_of, lead, stop, shards: Arc::default() };
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
    if !settings.watchdog.forget_queues_after.is_zero() {
        let (dog, beat) = spawn("watchdog/closing");
        supervisor.spawn("watchdog/closing", move || dog.clone().close_idle(Arc::clone(&beat)));
    }
    let (dog, beat) = spawn("watchdog/depths");
    supervisor.spawn("watchdog/depths", move || dog.clone().depths(Arc::clone(&beat)));
    let (dog, beat) = spawn("watchdog/trim");
    supervisor.spawn("watchdog/trim", move || dog.clone().trim(Arc::clone(&beat)));
}

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
        // Only how long we sleep; Redis decides what is due.
        let until = next.map(|at| u64::try_from(at - self.outbox.clock.now_unix_ms()).unwrap_or(0));
        Ok(until.map_or(Duration::MAX, Duration::from_millis))
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
            for (queue, unfinished) in self.outbox.gates.unfinished() {
                // Less what Redis has, below.
                depths.entry(queue).or_default().pending = unfinished;
            }
            let now = self.outbox.clock.now_unix_ms();
            let age = |created: i64| Duration::from_millis(u64::try_from(now.saturating_sub(created)).unwrap_or(0));
            for (queue, created) in self.outbox.gates.oldest() {
                depths.entry(queue).or_default().oldest = age(created);
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
                depth.oldest = depth.oldest.max(stats.oldest_created_unix_ms.map(age).unwrap_or_default());
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

fn is_lost(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(queue::Error::NoGeneration))
}

fn count(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
