//! The outbox: what stayed behind, was scheduled, or was parked and has room now goes to the bus.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use super::Watchdog;
use crate::{
    bus::Topic,
    model::{self, QueueName, TaskId, TaskRow},
    pipelines::outbox::Last,
    queue,
    runtime::Beat,
    store::{PAGE_BYTES, Settlement, Turn, Unpublished},
    telemetry::metrics::{self, Republished, Watched},
    wire::pb,
};

/// Parked tasks that were released and that the fanout has not read yet, by queue, and since when.
type OnTheirWay = HashMap<QueueName, (Last, Instant)>;

/// After this the watchdog asks whether the topic was made anew: then no reader will ever reach their offsets.
const LONG_ON_THEIR_WAY: Duration = Duration::from_secs(10);

/// Rows that are looked at together after the clock has stepped: most are scheduled, and stay as they are.
const LOOKED_AT_ONCE: usize = 10_000;

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
            if self.outbox.gates.is_short() {
                // The fanout would park every task again.
                beat.beat();
                self.pause(Duration::from_millis(200)).await;
                continue;
            }
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
                let others = self.outbox.publish_others(&rows, again).await?;
                let published = rows.len() - others.stay.len() - others.too_large.len();
                metrics::outbox_republished(republished(reason), published);
                refused.extend(others.stay);
                self.give_up(&rows, &others.too_large).await?;
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

    /// Rows that are to be published a moment after they were stored, and are due in an hour: the clock was an hour
    /// ahead then.
    async fn bring_forward(&self, beat: &Beat) -> anyhow::Result<()> {
        let now = self.outbox.clock.now_unix_ms();
        let soon =
            now.saturating_add(i64::try_from(self.settings.watchdog.republish_after.as_millis()).unwrap_or(i64::MAX));
        let (mut after, mut rows) = (None, 0);
        loop {
            let page = self.outbox.store.bring_forward(soon, now, after, LOOKED_AT_ONCE).await?;
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

    /// Tasks that the bus does not take are dead. Killed behind the letters, they are sent again.
    async fn give_up(&self, rows: &[(&TaskRow, Turn)], too_large: &[(TaskId, String)]) -> anyhow::Result<()> {
        if too_large.is_empty() {
            return Ok(());
        }
        let at_unix_ms = self.outbox.clock.now_unix_ms();
        let (mut letters, mut deaths, mut keys) = (Vec::new(), Vec::new(), Vec::new());
        for (id, reason) in too_large {
            let Some((task, _)) = rows.iter().find(|(task, _)| task.id == *id) else { continue };
            tracing::error!(%id, "task {id} cannot be published, and is dead: {reason}");
            letters.push(pb::DeadLetter {
                reason: reason.clone(),
                at_unix_ms,
                task_id: Bytes::copy_from_slice(id.as_bytes()),
                queue: task.queue.as_str().to_owned(),
                task: Some(model::NewTask::from(*task).into()),
                ..Default::default()
            });
            deaths.push(Settlement::Died { id: *id, reason: reason.clone(), attempts: 0, at_unix_ms });
            keys.push((task.queue.clone(), task.key_hash));
        }
        self.outbox.send_letters(letters).await?;
        self.outbox.store.settle(deaths).await?;
        metrics::watchdog_handled(Watched::Dead, too_large.len());
        if let Err(error) = self.filter.forget(&keys).await {
            tracing::debug!("could not take {} keys out of the filter: {error}", keys.len());
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
            let others = self.outbox.publish_others(&rows, true).await?;
            let published = rows.len() - others.stay.len() - others.too_large.len();
            metrics::outbox_republished(Republished::Unparked, published);
            refused.extend(others.stay);
            self.give_up(&rows, &others.too_large).await?;
            on_their_way.insert(queue, (others.last, Instant::now()));
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
            let nine_tenths = |bound: u64| bound - bound / 10;
            if stats.ahead >= nine_tenths(settings.high_water_tasks)
                || stats.waiting_bytes >= nine_tenths(settings.high_water_bytes)
                || stats.live >= nine_tenths(settings.live_tasks_max())
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
