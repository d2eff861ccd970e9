//! Gauges: how queues, outboxes and the bus stand.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use super::Watchdog;
use crate::{
    bus::Topic,
    model::QueueName,
    queue::{self, Failing},
    runtime::Beat,
    telemetry::metrics::{self, QueueDepth},
};

const EVERY: Duration = Duration::from_secs(2);
/// How often zeros are shown for queues in which nothing stands, so that their gauges stay.
const SHOW_ALL_EVERY: Duration = Duration::from_secs(20);

impl Watchdog {
    pub(super) async fn depths(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        let (mut failing, mut shown, mut all_shown) = (Failing::default(), BTreeSet::new(), None::<Instant>);
        let show_all_every = (self.settings.watchdog.forget_queues_after / 3).clamp(EVERY, SHOW_ALL_EVERY);
        loop {
            let mut depths: BTreeMap<QueueName, QueueDepth> = BTreeMap::new();
            // Queues that were shown and are empty now are shown as zero.
            depths.extend(std::mem::take(&mut shown).into_iter().map(|queue| (queue, QueueDepth::default())));
            if all_shown.is_none_or(|at| at.elapsed() >= show_all_every) {
                let all = self.queue.shards().into_iter().map(|shard| (shard.queue, QueueDepth::default()));
                depths.extend(all);
                all_shown = Some(Instant::now());
            }
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
            for (shard, look) in self.queue.look(self.look_for(EVERY)).await {
                let depth = depths.entry(shard.queue.clone()).or_default();
                if look.is_err() || failing.leaves_out(&shard) {
                    continue;
                }
                let began = Instant::now();
                let stats = match self.queue.stats(&shard).await {
                    Err(queue::Error::NoGeneration) => continue,
                    other => failing.note(&shard, began, other),
                };
                // Others are shown all the same.
                let Some(stats) = stats else { continue };
                to_forward += stats.outbox;
                depth.pending = depth.pending.saturating_sub(stats.live);
                depth.waiting += stats.open;
                depth.leased += stats.leases;
                depth.delayed += stats.delayed;
                depth.oldest = depth.oldest.max(stats.oldest_created_unix_ms.map(age).unwrap_or_default());
            }
            for (queue, depth) in depths {
                metrics::queue_depth(queue.as_str(), depth);
                if depth != QueueDepth::default() {
                    shown.insert(queue);
                }
            }
            metrics::results_depth(to_forward);
            for topic in [Topic::Pipeline, Topic::TaskResults] {
                metrics::bus_backlog(topic.as_str(), self.outbox.bus.backlog(topic).await?);
            }
            failing.end_round("count")?;
            beat.beat();
            if !self.pause(EVERY).await {
                return Ok(());
            }
        }
    }
}
