//! Releases parked rows when their queue is not full any more: straight into the queue if this
//! process uses the shortcut, otherwise to the bus.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{error::Error, on_their_way::OnTheirWay, republish::Republish, shared::Forgets};
use crate::{
    bus::{Bus, Topic},
    config::Settings,
    model::{QueueName, ShardId, TaskId, TaskRow},
    pipelines::{
        admission::Gates,
        context::Context,
        shortcut::{Released, Shortcut},
    },
    queue::{self, Failing, Upkeep},
    runtime::{Clock, Loop},
    store::{Outbox, OutboxRow, Turn, Unpublished},
    telemetry::metrics::{self, Republished},
};

/// The most pages of one queue to release before other queues get their turn.
const PAGES_AT_ONCE: usize = 16;

/// The time for the pages of all queues, before other rows get their turn.
const ROUND: Duration = Duration::from_secs(1);

/// After this many refusals in a row a page goes by the bus, which always accepts it.
const REFUSED_OFTEN: u32 = 3;

#[derive(Clone)]
pub(super) struct Parked {
    store: Arc<dyn Outbox>,
    bus: Arc<dyn Bus>,
    queue: Upkeep,
    gates: Gates,
    shortcut: Option<Shortcut>,
    forgets: Forgets,
    clock: Clock,
    settings: Arc<Settings>,
    republish: Republish,
    on_their_way: OnTheirWay<QueueName>,
    /// How many times in a row a fence moved before a page of the queue was released.
    refusals: HashMap<QueueName, u32>,
    /// The queue that was handled last.
    last: Option<QueueName>,
}

/// One round: when it ends, and the rows and shards that it leaves out.
struct Round<'a> {
    refused: &'a mut HashSet<TaskId>,
    failing: &'a mut Failing<Error>,
    until: Instant,
    cx: &'a Loop,
}

impl Parked {
    pub(super) fn new(context: &Context, forgets: &Forgets) -> Self {
        let Context {
            store,
            bus,
            queue,
            gates,
            shortcut,
            clock,
            settings,
            ..
        } = context.clone();
        let republish = Republish::new(context);
        Self {
            store,
            bus,
            queue: queue.upkeep,
            gates,
            shortcut,
            forgets: Arc::clone(forgets),
            clock,
            settings,
            republish,
            on_their_way: OnTheirWay::new(),
            refusals: HashMap::new(),
            last: None,
        }
    }

    /// Closes the gates of queues with parked tasks. Another process may have parked them.
    pub(super) async fn close_gates(&self) -> Result<(), Error> {
        for queue in self.store.parked_queues().await? {
            self.gates.close(&queue);
        }
        Ok(())
    }

    /// Returns whether the fanout has yet to read some released tasks.
    pub(super) fn are_on_their_way(&self) -> bool {
        !self.on_their_way.is_empty()
    }

    /// Releases parked tasks of queues that are not full any more, in turn. Opens the gate of a
    /// queue that has none parked. Returns whether any queue may be able to take more.
    pub(super) async fn release(
        &mut self,
        refused: &mut HashSet<TaskId>,
        failing: &mut Failing<Error>,
        cx: &Loop,
    ) -> Result<bool, Error> {
        self.on_their_way.follow(&*self.bus, &self.clock).await?;
        let mut round = Round {
            refused,
            failing,
            until: Instant::now() + ROUND,
            cx,
        };
        let mut has_more = false;
        for queue in self.in_turn() {
            if self.is_over(&round) {
                has_more = true;
                break;
            }
            self.last = Some(queue.clone());
            // The tasks that were released last are not counted in their shards yet.
            if self.on_their_way.has(&queue) || !self.has_room(&queue, round.failing).await {
                continue;
            }
            if self.release_of(&queue, &mut round).await? {
                has_more |= !self.on_their_way.has(&queue);
            } else {
                self.gates.open(&queue);
            }
        }
        // SQL and the bus have answered, so the shards are the cause, even if those of all closed
        // gates fail.
        failing.end_part("release tasks into");
        Ok(has_more)
    }

    /// Returns the closed queues, beginning after the one that was handled last.
    fn in_turn(&self) -> Vec<QueueName> {
        let mut queues = self.gates.closed();
        queues.sort_unstable();
        let behind = queues.partition_point(|queue| Some(queue) <= self.last.as_ref());
        queues.rotate_left(behind);
        queues
    }

    /// Returns whether other rows get their turn now, or Redis has little memory left: then it may
    /// be full for a task although its queue is not.
    fn is_over(&self, round: &Round<'_>) -> bool {
        self.gates.is_short() || Instant::now() >= round.until || round.cx.stop.is_cancelled()
    }

    /// Releases as many parked tasks as the queue can take for sure, and at least a page. Returns
    /// whether there were any.
    ///
    /// After tasks that go by the bus, the next ones wait until the fanout has committed these,
    /// which it does at a tick. If they were few, workers would have to wait, too.
    async fn release_of(
        &mut self,
        queue: &QueueName,
        round: &mut Round<'_>,
    ) -> Result<bool, Error> {
        let settings = self.settings.queues.get(queue);
        let page = self.settings.watchdog.batch_max;
        // `Stats::has_room` keeps a tenth free.
        let room = [
            settings.high_water_tasks / 10,
            settings.high_water_bytes / 10,
        ];
        let mut released = [0, 0];
        let partitions = self.bus.partitions(Topic::Pipeline);
        for _ in 0..PAGES_AT_ONCE {
            // Read the fences before the rows.
            let fences = match &self.shortcut {
                Some(shortcut)
                    if self
                        .refusals
                        .get(queue)
                        .is_none_or(|count| *count < REFUSED_OFTEN) =>
                {
                    let alone = Arc::clone(&self.forgets).lock_owned().await;
                    Some((
                        shortcut.clone(),
                        shortcut.fences(self.shards_of(queue)).await,
                        alone,
                    ))
                }
                _ => None,
            };
            let parked = self.store.parked(queue, page, round.refused).await?;
            if parked.is_empty() {
                return Ok(released != [0, 0]);
            }
            let may_pass = |row: &&OutboxRow| {
                let partition = row.task.partition;
                // A bus that was created again may have fewer partitions than when the task was
                // stored.
                row.is_as_new
                    && partition < partitions
                    && fences
                        .as_ref()
                        .is_some_and(|(_, known, _)| known.has(partition))
            };
            let (passing, others): (Vec<_>, Vec<_>) = parked.iter().partition(may_pass);
            let is_full = match fences {
                Some((shortcut, fences, alone)) => {
                    let began = Instant::now();
                    let mut released = shortcut.release(&pairs(&passing), &fences).await;
                    drop(alone);
                    if let Some((shard, error)) = released.error.take() {
                        round.failing.note::<()>(&shard, began, Err(error.into()));
                        released.is_full = true;
                    }
                    self.follow(queue, &passing, released, round.refused)
                        .await?
                }
                None => {
                    self.refusals.remove(queue);
                    false
                }
            };
            self.publish(queue, &others, round.refused).await?;
            round.cx.beat();
            released[0] += parked.len() as u64;
            released[1] += parked
                .iter()
                .map(|row| row.task.weight() as u64)
                .sum::<u64>();
            if is_full || released[0] >= room[0] || released[1] >= room[1] || self.is_over(round) {
                break;
            }
        }
        Ok(true)
    }

    async fn publish(
        &mut self,
        queue: &QueueName,
        rows: &[&OutboxRow],
        refused: &mut HashSet<TaskId>,
    ) -> Result<(), Error> {
        if rows.is_empty() {
            return Ok(());
        }
        let last = self
            .republish
            .publish(&pairs(rows), Republished::Unparked, refused)
            .await?;
        self.on_their_way.add(queue.clone(), last, self.clock.now());
        Ok(())
    }

    /// Marks those of these rows that were released. Returns whether the queue is full.
    async fn follow(
        &mut self,
        queue: &QueueName,
        rows: &[&OutboxRow],
        Released {
            published,
            crowded,
            is_full,
            has_moved,
            ..
        }: Released,
        refused: &mut HashSet<TaskId>,
    ) -> Result<bool, Error> {
        match has_moved {
            true => *self.refusals.entry(queue.clone()).or_default() += 1,
            false => _ = self.refusals.remove(queue),
        }
        if !crowded.is_empty() {
            self.store.unpublish(&crowded, Unpublished::Crowded).await?;
        }
        if !published.is_empty() {
            match self
                .store
                .mark_published(self.bus.generation(), &published)
                .await
            {
                Err(error) if error.is_refusal() => {
                    // SQL refuses to mark them together. If they also go by the bus, each is marked
                    // separately, and the queue recognises them.
                    let done: HashSet<TaskId> = published
                        .iter()
                        .flat_map(|some| &some.tasks)
                        .map(|(task, _)| *task)
                        .collect();
                    let rows: Vec<_> = rows
                        .iter()
                        .filter(|row| done.contains(&row.task.id))
                        .copied()
                        .collect();
                    self.publish(queue, &rows, refused).await?;
                }
                marked => {
                    marked?;
                    let count = published.iter().map(|some| some.tasks.len()).sum();
                    metrics::outbox_republished(Republished::Unparked, count);
                }
            }
        }
        Ok(is_full)
    }

    fn shards_of(&self, queue: &QueueName) -> Vec<ShardId> {
        self.queue
            .shards_of(queue)
            .iter()
            .map(|shard| shard.id.clone())
            .collect()
    }

    /// Returns whether every shard of the queue is below nine tenths of its high water. If a shard
    /// does not answer, returns false, so that other queues are not held up.
    async fn has_room(&self, queue: &QueueName, failing: &mut Failing<Error>) -> bool {
        let settings = self.settings.queues.get(queue);
        for shard in self.queue.shards_of(queue) {
            if failing.leaves_out(&shard.id) {
                return false;
            }
            let began = Instant::now();
            let stats = self.queue.stats(&shard.id).await;
            if matches!(stats, Err(queue::Error::NoGeneration)) {
                return false;
            }
            let stats = failing.note(&shard.id, began, stats.map_err(Error::from));
            if !stats.is_some_and(|stats| stats.has_room(settings)) {
                return false;
            }
        }
        true
    }
}

fn pairs<'a>(rows: &[&'a OutboxRow]) -> Vec<(&'a TaskRow, Turn)> {
    rows.iter().map(|row| (&row.task, row.turn)).collect()
}
