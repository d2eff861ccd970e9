//! Gauges: what is in queues, in outboxes and on the bus.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::time::timeout;

use super::{depth_history::DepthHistory, error::Error, lead::Lead, shared::look_for};
use crate::{
    bus::{Bus, Topic},
    config,
    coordination::Coordination,
    model::{self, QueueName},
    pipelines::{admission::Occupancy, context::Context},
    queue::{self, Failing, Upkeep},
    runtime::{Clock, Loop},
    store::Store,
    telemetry::metrics::{self, LimitsDepth, QueueDepth},
};

const EVERY: Duration = Duration::from_secs(2);
/// How often empty queues are shown as zero, so that their gauges stay.
const SHOW_ALL_EVERY: Duration = Duration::from_secs(20);
/// How long the write of the depths may take. The next round tries again.
const WRITE_WITHIN: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub(super) struct Depths {
    store: Arc<dyn Store>,
    coordination: Coordination,
    lead: Lead,
    bus: Arc<dyn Bus>,
    queue: Upkeep,
    occupancy: Occupancy,
    clock: Clock,
    settings: config::Watchdog,
}

/// The gauges as they were shown last.
#[derive(Default)]
struct Shown {
    /// Queues that were not empty.
    queues: BTreeSet<QueueName>,
    /// Queues with limit keys. Others have no series of them.
    limited: BTreeSet<QueueName>,
    /// Queues with tasks that wait in sequences.
    sequenced: BTreeSet<QueueName>,
    /// When the number of open trees was shown.
    trees: Option<Instant>,
    /// When all queues were shown.
    all: Option<Instant>,
}

type QueueDepths = BTreeMap<QueueName, (QueueDepth, LimitsDepth)>;

impl Depths {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        let Context {
            store,
            coordination,
            bus,
            queue,
            occupancy,
            clock,
            settings,
            ..
        } = context.clone();
        Self {
            store,
            coordination,
            lead: lead.clone(),
            bus,
            queue: queue.upkeep,
            occupancy,
            clock,
            settings: settings.watchdog.clone(),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        let mut failing = Failing::default();
        let mut shown = Shown::default();
        let mut history = DepthHistory::new(
            Arc::clone(&self.store),
            self.coordination.clone(),
            self.clock.clone(),
        );
        loop {
            let mut depths = self.to_show(&mut shown);
            self.add_waiting(&mut depths);
            let to_forward = self.add_queued(&mut depths, &mut failing).await;
            for (queue, (depth, limits)) in &depths {
                metrics::queue_depth(queue.as_str(), *depth);
                if *limits != LimitsDepth::default() {
                    shown.limited.insert(queue.clone());
                }
                if shown.limited.contains(queue) {
                    metrics::limits_depth(queue.as_str(), *limits);
                }
                if *depth != QueueDepth::default() {
                    shown.queues.insert(queue.clone());
                }
            }
            self.show_sequences(&mut shown).await?;
            metrics::results_depth(to_forward);
            self.show_trees(&mut shown).await?;
            for topic in [Topic::Pipeline, Topic::TaskResults] {
                metrics::bus_backlog(topic.as_str(), self.bus.backlog(topic).await?);
            }
            failing.end_round("count")?;
            cx.beat();
            if self.lead.is_held(&cx) {
                self.write_history(&depths, &mut history).await;
            } else {
                history.leave();
            }
            if !cx.pause(EVERY).await {
                return Ok(());
            }
        }
    }

    /// Writes the depths for the dashboard, if it is time. Failures are only logged, because
    /// nothing else depends on them.
    async fn write_history(&self, depths: &QueueDepths, history: &mut DepthHistory) {
        let written = async {
            if !history.is_due().await? {
                return Ok(());
            }
            let mut of = BTreeMap::new();
            for (queue, (depth, _)) in depths {
                let depths = model::QueueDepths {
                    waiting: depth.waiting,
                    assigned: depth.leased,
                    delayed: depth.delayed,
                    ..model::QueueDepths::default()
                };
                of.insert(queue.clone(), depths);
            }
            let shards = self.queue.shards().into_iter();
            history
                .write(of, shards.map(|shard| shard.queue).collect())
                .await
        };
        let written: Result<Result<(), Error>, _> = timeout(WRITE_WITHIN, written).await;
        match written {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!("cannot write the depths of the last hour: {error}"),
            Err(_) => tracing::debug!("cannot write the depths of the last hour in time"),
        }
    }

    /// Shows how many tasks wait behind others of their sequences.
    async fn show_sequences(&self, shown: &mut Shown) -> Result<(), Error> {
        if self.occupancy.unfinished().is_empty() && shown.sequenced.is_empty() {
            return Ok(());
        }
        let waiting = self.store.waiting_in_sequences().await?;
        let before = std::mem::take(&mut shown.sequenced);
        for queue in before {
            if !waiting.iter().any(|(waits, _)| *waits == queue) {
                metrics::sequences_waiting(queue.as_str(), 0);
            }
        }
        for (queue, tasks) in waiting {
            metrics::sequences_waiting(queue.as_str(), tasks);
            shown.sequenced.insert(queue);
        }
        Ok(())
    }

    /// Shows how many trees are open, from time to time, because SQL counts all of them.
    async fn show_trees(&self, shown: &mut Shown) -> Result<(), Error> {
        let now = self.clock.now();
        if shown.trees.is_some_and(|at| now - at < SHOW_ALL_EVERY) {
            return Ok(());
        }
        metrics::trees_open(self.store.open_trees().await?);
        shown.trees = Some(now);
        Ok(())
    }

    /// Returns zeros for the queues that may have become empty since they were shown, and from time
    /// to time for all.
    fn to_show(&self, shown: &mut Shown) -> QueueDepths {
        let show_all_every = (self.settings.forget_queues_after / 3).clamp(EVERY, SHOW_ALL_EVERY);
        let mut queues = std::mem::take(&mut shown.queues);
        if shown
            .all
            .is_none_or(|at| self.clock.now() - at >= show_all_every)
        {
            queues.extend(self.queue.shards().into_iter().map(|shard| shard.queue));
            shown.all = Some(self.clock.now());
        }
        queues
            .into_iter()
            .map(|queue| (queue, Default::default()))
            .collect()
    }

    fn age(&self, created_unix_ms: i64) -> Duration {
        let age_ms = self.clock.now_unix_ms().saturating_sub(created_unix_ms);
        Duration::from_millis(u64::try_from(age_ms).unwrap_or(0))
    }

    /// Adds all unfinished tasks as pending, and the age of the oldest that waits in SQL.
    fn add_waiting(&self, depths: &mut QueueDepths) {
        for (queue, unfinished) in self.occupancy.unfinished() {
            depths.entry(queue).or_default().0.pending = unfinished;
        }
        for (queue, created) in self.occupancy.oldest() {
            depths.entry(queue).or_default().0.oldest = self.age(created);
        }
    }

    /// Moves the tasks that Redis has from pending to their state there. Returns the number of
    /// entries in all outboxes.
    async fn add_queued(
        &self,
        depths: &mut QueueDepths,
        failing: &mut Failing<queue::Error>,
    ) -> u64 {
        let mut to_forward = 0;
        let mut shards = Vec::new();
        // Only for the shards that are not empty.
        for (shard, look) in self.queue.look(look_for(&self.settings, 2 * EVERY)).await {
            depths.entry(shard.queue.clone()).or_default();
            if look.is_ok() && !failing.leaves_out(&shard) {
                shards.push(shard);
            }
        }
        let began = Instant::now();
        for (shard, stats) in shards.iter().zip(self.queue.stats_of(&shards).await) {
            let stats = match stats {
                Err(queue::Error::NoGeneration) => continue,
                other => failing.note(shard, began, other),
            };
            // If a shard fails, the others are shown nevertheless.
            let Some(stats) = stats else { continue };
            let (depth, limits) = depths.entry(shard.queue.clone()).or_default();
            limits.keys += stats.limit_keys;
            limits.crowded += stats.crowded_keys;
            limits.waiting += stats.behind;
            to_forward += stats.outbox;
            depth.pending = depth.pending.saturating_sub(stats.live);
            depth.waiting += stats.open;
            let (leased, delayed) = stats.assigned_and_delayed();
            depth.leased += leased;
            depth.delayed += delayed;
            depth.oldest = depth.oldest.max(
                stats
                    .oldest_created_unix_ms
                    .map(|at| self.age(at))
                    .unwrap_or_default(),
            );
        }
        to_forward
    }
}
