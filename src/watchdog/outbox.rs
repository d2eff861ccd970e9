//! The outbox: what stayed behind, was scheduled, or was parked and has room now goes to the bus.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::Watchdog;
use crate::{
    bus::Topic,
    model::{QueueName, TaskId, TaskRow},
    outbox::Last,
    queue,
    store::{PAGE_BYTES, Turn, Unpublished},
    supervise::Beat,
    telemetry::metrics::{self, Republished},
};

/// Parked tasks that were released and that the fanout has not read yet, by queue.
type OnTheirWay = HashMap<QueueName, Last>;

impl Watchdog {
    pub(super) async fn publish_outbox(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        for queue in self.outbox.store.parked_queues().await? {
            self.outbox.gates.close(&queue);
        }
        let (mut looked_for_parked, mut on_their_way) = (Instant::now(), OnTheirWay::new());
        // Left out until the next look, so that each is tried, and named in the log, every few seconds.
        let mut refused = HashSet::new();
        // Of the clock, when rows that it had left behind were looked for. At first by a process that was there before.
        let mut steps = None;
        while self.lead.wait(&beat, &self.stop).await {
            let started = Instant::now();
            let now = self.outbox.clock.steps();
            if steps != Some(now) {
                self.bring_forward(&beat).await?;
                steps = Some(now);
            }
            let limit = self.settings.watchdog.batch_max;
            let due = self.outbox.store.due(self.outbox.clock.now_unix_ms(), limit, &refused).await?;
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

    /// Rows that are to be published a moment after they were stored, and are due in an hour: the clock was an hour ahead then.
    async fn bring_forward(&self, beat: &Beat) -> anyhow::Result<()> {
        let now = self.outbox.clock.now_unix_ms();
        let soon =
            now.saturating_add(i64::try_from(self.settings.watchdog.republish_after.as_millis()).unwrap_or(i64::MAX));
        let (mut after, mut rows) = (None, 0);
        loop {
            let page = self.outbox.store.bring_forward(soon, now, after, self.settings.watchdog.batch_max).await?;
            (after, rows) = (page.next, rows + page.rows);
            beat.beat();
            if after.is_none() || self.stop.is_cancelled() {
                break;
            }
        }
        if rows > 0 {
            tracing::info!("{rows} tasks were due at a time that the clock has stepped back from: they are due now");
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
            on_their_way.retain(|_, released| released.iter().any(|(partition, last)| read(*partition) < Some(*last)));
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
            on_their_way.insert(queue, last);
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
}

fn republished(reason: u8) -> Republished {
    match reason {
        r if r == Unpublished::Scheduled as u8 => Republished::Scheduled,
        r if r == Unpublished::Missing as u8 => Republished::Missing,
        r if r == Unpublished::Parked as u8 => Republished::Unparked,
        _ => Republished::Unpublished,
    }
}
