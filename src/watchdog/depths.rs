//! Gauges: how queues, outboxes and the bus stand.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use super::Watchdog;
use crate::{
    bus::Topic,
    model::QueueName,
    queue,
    supervise::Beat,
    telemetry::metrics::{self, QueueDepth},
};

const EVERY: Duration = Duration::from_secs(2);

impl Watchdog {
    pub(super) async fn depths(self, beat: Arc<Beat>) -> anyhow::Result<()> {
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
            for (shard, look) in self.queue.look(self.look_for(EVERY)).await {
                let depth = depths.entry(shard.queue.clone()).or_default();
                if look?.is_idle {
                    continue;
                }
                let stats = match self.queue.stats(&shard).await {
                    Err(queue::Error::NoGeneration) => continue,
                    other => other?,
                };
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
            if !self.pause(EVERY).await {
                return Ok(());
            }
        }
    }
}
