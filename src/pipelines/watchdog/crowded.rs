//! Brings crowded tasks from SQL when few tasks of their limit key are left in Redis: straight into
//! the queue if this process uses the shortcut, otherwise by the bus.
//!
//! A shard knows which of its limit keys have tasks in SQL, by marks. Enqueue sets a mark before its
//! caller puts the task into SQL; this loop clears it when it finds no task there. If the task comes
//! right after, the walk over the limit keys in SQL sets the mark again. It also does so after Redis
//! was lost. Marks that an earlier run of this loop did not clear are found by asking all shards, at
//! the start and once a minute.
//!
//! SQL is told which tasks were released beside the next release, so that each does not wait for the
//! other.
//!
//! Crash windows: a task that is in the queue and not marked as published waits in SQL still. It is
//! released again, and the queue knows it: see [`crate::pipelines::shortcut`]. These are the tasks of
//! at most two releases.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::join;

use super::{
    error::Error, lead::Lead, on_their_way::OnTheirWay, republish::Republish, shared::Forgets,
};
use crate::{
    bus::{Bus, Topic},
    config::Settings,
    model::{LimitBy, LimitHash, QueueName, ShardId, TaskId, TaskRow, limit_partition},
    pipelines::{admission::Gates, context::Context, shortcut::Shortcut},
    queue::{self, CrowdMarks, Failing, Uncrowded, Upkeep},
    runtime::{Clock, Loop},
    store::{self, Outbox, OutboxRow, PAGE_BYTES, Published, Turn},
    telemetry::metrics::{self, Republished},
};

/// How often the walk reads limit keys from SQL, and how many: 1,000 a second.
const WALK_EVERY: Duration = Duration::from_secs(1);
const WALKED_AT_ONCE: usize = 1000;
/// How often to ask all shards of queues with limits for marks.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// The pause between two rounds while tasks are crowded, and when the last one released some.
const WHILE_CROWDED: Duration = Duration::from_millis(100);
const AT_ONCE: Duration = Duration::from_millis(1);
/// How often to look for crowded tasks if no queue has limits any more.
const WITHOUT_LIMITS: Duration = Duration::from_secs(60);
/// The most tasks of one release: what brings a limit key from half of what may wait in Redis to
/// all of it.
const RELEASED_AT_ONCE: usize = 2048;
/// The most limit keys of a shard in one round.
const KEYS_OF_ROUND: usize = 64;
/// After this many refusals in a row the tasks of a shard go by the bus, which always takes them.
const REFUSED_OFTEN: u32 = 3;
/// How many tasks to bring to a shard that is not open, which has no marks.
const TO_A_CLOSED_SHARD: usize = 32;

#[derive(Clone)]
pub(super) struct Crowded {
    store: Arc<dyn Outbox>,
    bus: Arc<dyn Bus>,
    queue: Upkeep,
    gates: Gates,
    shortcut: Option<Shortcut>,
    forgets: Forgets,
    clock: Clock,
    settings: Arc<Settings>,
    republish: Republish,
    lead: Lead,
    limit_partitions: u32,
    on_their_way: OnTheirWay<ShardId>,
    /// How many times in a row the fence of a shard moved before tasks were released into it.
    refusals: HashMap<ShardId, u32>,
}

/// The state of the loop.
#[derive(Default)]
struct Rounds {
    /// The queues with crowded tasks, or with marks in their shards.
    queues: Vec<QueueName>,
    /// The queues whose shards had marks in the last round.
    marked: BTreeSet<QueueName>,
    /// When all shards of queues with limits were last asked for marks. Those of a leader before,
    /// or of this loop before an error, are found by this.
    looked: Option<Instant>,
    /// Where the walk goes on.
    after: Option<(QueueName, LimitHash)>,
    walked: Option<Instant>,
    /// Rows that SQL refuses to mark. They are left out until the next walk begins.
    refused: HashSet<TaskId>,
    /// What was released last.
    unmarked: Option<Unmarked>,
    failing: Failing<Error>,
}

/// Tasks that are in the queue, which SQL does not know yet.
struct Unmarked {
    shard: ShardId,
    rows: Vec<OutboxRow>,
    published: Vec<Published>,
    keys: HashSet<LimitHash>,
    ids: HashSet<TaskId>,
}

/// The outcome of a shard's turn.
#[derive(Default)]
struct Turned {
    /// The shard may be able to take more at once.
    goes_on: bool,
    /// Limit keys of the shard count as having tasks in SQL.
    has_marks: bool,
}

/// What was released into a shard.
#[derive(Default)]
struct Refilled {
    /// Limit keys without tasks in SQL.
    empty: Vec<LimitHash>,
    /// There may be more to release at once.
    has_more: bool,
}

impl Crowded {
    pub(super) fn new(context: &Context, lead: &Lead, forgets: &Forgets) -> Self {
        let Context {
            store,
            bus,
            queue,
            gates,
            shortcut,
            clock,
            settings,
            limit_partitions,
            ..
        } = context.clone();
        Self {
            store,
            bus,
            queue: queue.upkeep,
            gates,
            shortcut,
            forgets: Arc::clone(forgets),
            clock,
            settings,
            republish: Republish::new(context),
            lead: lead.clone(),
            limit_partitions,
            on_their_way: OnTheirWay::new(),
            refusals: HashMap::new(),
        }
    }

    pub(super) async fn run(mut self, cx: Loop) -> Result<(), Error> {
        let mut rounds = Rounds::default();
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            let has_more = self.round(&mut rounds, &cx).await?;
            if !has_more {
                self.mark_last(&mut rounds).await?;
            }
            metrics::watchdog_step("crowded", started.elapsed());
            cx.beat();
            let wait = match (rounds.queues.is_empty(), has_more) {
                (false, true) => AT_ONCE,
                (false, false) => WHILE_CROWDED,
                (true, _) if self.limit_partitions == 0 => WITHOUT_LIMITS,
                (true, _) => WALK_EVERY,
            };
            cx.idle(cx.pause(wait)).await;
        }
        self.mark_last(&mut rounds).await
    }

    /// Releases tasks of limit keys that have few in Redis. Returns whether any shard may be able to
    /// take more at once.
    async fn round(&mut self, rounds: &mut Rounds, cx: &Loop) -> Result<bool, Error> {
        let is_due = rounds.walked.is_none_or(|at| at.elapsed() >= WALK_EVERY);
        let mut found = match is_due {
            true => self.walk(rounds).await?,
            false => BTreeMap::new(),
        };
        if self.gates.is_short() {
            // The fanout would park every task again.
            return Ok(false);
        }
        self.on_their_way.follow(&*self.bus, &self.clock).await?;
        let mut shards: Vec<ShardId> = found.keys().cloned().collect();
        for queue in &rounds.queues {
            let known = self.queue.shards_of(queue);
            shards.extend(known.iter().map(|shard| shard.id.clone()));
        }
        shards.sort_unstable();
        shards.dedup();
        let mut has_more = false;
        let mut marked = BTreeSet::new();
        for shard in shards {
            if cx.stop.is_cancelled() {
                return Ok(false);
            }
            let keys = found.remove(&shard).unwrap_or_default();
            if rounds.failing.leaves_out(&shard) || self.on_their_way.has(&shard) {
                marked.insert(shard.queue);
                continue;
            }
            let began = Instant::now();
            let turn = self.turn(&shard, keys, rounds).await;
            let turn = match turn {
                Err(error @ (Error::Store(_) | Error::Bus(_))) => return Err(error),
                turn => rounds.failing.note(&shard, began, turn),
            };
            let turn = turn.unwrap_or_default();
            has_more |= turn.goes_on;
            if turn.has_marks {
                marked.insert(shard.queue);
            }
            cx.beat();
        }
        rounds.marked = marked;
        rounds.failing.end_part("release crowded tasks into");
        Ok(has_more)
    }

    /// Reads which queues have crowded tasks, and the next limit keys of such tasks, by shard.
    async fn walk(&self, rounds: &mut Rounds) -> Result<BTreeMap<ShardId, Vec<LimitHash>>, Error> {
        rounds.queues = self.store.crowded_queues().await?;
        rounds.queues.extend(rounds.marked.iter().cloned());
        rounds.queues.sort_unstable();
        rounds.queues.dedup();
        let mut found: BTreeMap<ShardId, Vec<LimitHash>> = BTreeMap::new();
        let mut left = WALKED_AT_ONCE;
        let after = rounds.after.take();
        let begins = after.as_ref().map(|(queue, _)| queue);
        for queue in rounds.queues.iter().filter(|queue| Some(*queue) >= begins) {
            let last = match &after {
                Some((of, key)) if of == queue => Some(key),
                _ => None,
            };
            let keys = self.store.crowded_keys(queue, last, left).await?;
            for key in &keys {
                let shard = self.shard_of(queue, key).await?;
                found.entry(shard).or_default().push(*key);
            }
            left -= keys.len();
            if let Some(last) = keys.last().filter(|_| left == 0) {
                rounds.after = Some((queue.clone(), *last));
                break;
            }
        }
        if rounds.after.is_none() {
            rounds.refused.clear();
        }
        if rounds.looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
            for shard in self.queue.shards() {
                if self.settings.queues.get(&shard.queue).limit_by != LimitBy::Nothing {
                    found.entry(shard).or_default();
                }
            }
            rounds.looked = Some(Instant::now());
        }
        // At its end: if reading takes long, rounds without a walk follow.
        rounds.walked = Some(Instant::now());
        Ok(found)
    }

    /// The shard of a limit key: that of its tasks.
    async fn shard_of(&self, queue: &QueueName, key: &LimitHash) -> Result<ShardId, Error> {
        let mut number = limit_partition(key, self.limit_partitions);
        if self.limit_partitions == 0 {
            // No queue has limits any more, so this process has not asked among how many
            // partitions limit keys are spread.
            let first = self.store.crowded(queue, key, 1, &HashSet::new()).await?;
            number = first.first().map_or(0, |row| row.task.partition);
        }
        Ok(ShardId {
            queue: queue.clone(),
            number,
        })
    }

    /// Refills the limit keys of a shard that have few tasks there. Marks those that the walk has
    /// found.
    async fn turn(
        &mut self,
        shard: &ShardId,
        walked: Vec<LimitHash>,
        rounds: &mut Rounds,
    ) -> Result<Turned, Error> {
        let settings = self.settings.queues.get(&shard.queue);
        let (bytes, live) = (settings.high_water_bytes, settings.live_tasks_max());
        let marks = CrowdMarks {
            crowded: walked,
            empty: Vec::new(),
        };
        let asked = self
            .queue
            .uncrowded(shard, bytes, live, KEYS_OF_ROUND, &marks);
        let Uncrowded { each, keys, marks } = match asked.await {
            Ok(answer) => answer,
            // It is closed, and the fanout opens it for the first of these tasks; or it is lost,
            // and they wait on the bus until it is back.
            Err(queue::Error::NoGeneration) => Uncrowded {
                each: TO_A_CLOSED_SHARD,
                keys: marks.crowded,
                marks: 0,
            },
            Err(error) => return Err(error.into()),
        };
        let mut turned = Turned {
            goes_on: false,
            has_marks: marks > 0,
        };
        if keys.is_empty() {
            return Ok(turned);
        }
        let is_all = keys.len() < KEYS_OF_ROUND;
        let Refilled { empty, has_more } = self.refill(shard, &keys, each, rounds).await?;
        turned.goes_on = has_more || !is_all && !empty.is_empty();
        if !empty.is_empty() {
            let marks = CrowdMarks {
                crowded: Vec::new(),
                empty,
            };
            match self.queue.uncrowded(shard, bytes, live, 0, &marks).await {
                Ok(left) => turned.has_marks = left.marks > 0,
                Err(queue::Error::NoGeneration) => turned.has_marks = false,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(turned)
    }

    /// Releases tasks of these limit keys, `each` at most of each, as many as fit into one call.
    /// Beside it, marks what was released last.
    async fn refill(
        &mut self,
        shard: &ShardId,
        keys: &[LimitHash],
        each: usize,
        rounds: &mut Rounds,
    ) -> Result<Refilled, Error> {
        let last = rounds.unmarked.take();
        let store = Arc::clone(&self.store);
        let bus = Arc::clone(&self.bus);
        let generation = bus.generation();
        let marking = async {
            match &last {
                Some(last) => store.mark_published(generation, &last.published).await,
                None => Ok(()),
            }
        };
        let releasing = self.release(shard, keys, each, last.as_ref(), rounds);
        let (refilled, marked) = join(releasing, marking).await;
        if let Some(last) = last {
            self.note_marked(last, marked, rounds).await?;
        }
        refilled
    }

    /// Marks what was released last.
    async fn mark_last(&mut self, rounds: &mut Rounds) -> Result<(), Error> {
        let Some(last) = rounds.unmarked.take() else {
            return Ok(());
        };
        let generation = self.bus.generation();
        let marked = self.store.mark_published(generation, &last.published).await;
        self.note_marked(last, marked, rounds).await
    }

    async fn note_marked(
        &mut self,
        last: Unmarked,
        marked: store::Result<()>,
        rounds: &mut Rounds,
    ) -> Result<(), Error> {
        match marked {
            // SQL refuses to mark them together. By the bus each is marked separately, and the
            // queue recognises them.
            Err(error) if error.is_refusal() => {
                self.publish(&last.shard, &last.rows, &mut rounds.refused)
                    .await
            }
            marked => {
                marked?;
                metrics::outbox_republished(Republished::Refilled, last.ids.len());
                Ok(())
            }
        }
    }

    /// Publishes rows to the bus.
    async fn publish(
        &mut self,
        shard: &ShardId,
        rows: &[OutboxRow],
        refused: &mut HashSet<TaskId>,
    ) -> Result<(), Error> {
        let last = self
            .republish
            .publish(&pairs(rows), Republished::Refilled, refused)
            .await?;
        self.on_their_way.add(shard.clone(), last, self.clock.now());
        Ok(())
    }

    async fn release(
        &mut self,
        shard: &ShardId,
        keys: &[LimitHash],
        each: usize,
        last: Option<&Unmarked>,
        rounds: &mut Rounds,
    ) -> Result<Refilled, Error> {
        let is_refused = self.refusals.get(shard) >= Some(&REFUSED_OFTEN);
        // Read the fence before the rows.
        let fences = match self.shortcut.clone().filter(|_| !is_refused) {
            Some(shortcut) => {
                let alone = Arc::clone(&self.forgets).lock_owned().await;
                let fences = shortcut.fences(vec![shard.clone()]).await;
                Some((shortcut, fences, alone))
            }
            None => None,
        };
        let mut refilled = Refilled::default();
        let mut rows: Vec<OutboxRow> = Vec::new();
        let mut bytes = 0;
        let mut taken = HashSet::new();
        for key in keys {
            let limit = each.min(RELEASED_AT_ONCE - rows.len());
            let unmarked = last.filter(|last| last.keys.contains(key));
            let page = match unmarked {
                Some(last) => {
                    let without = &rounds.refused | &last.ids;
                    let page = self.store.crowded(&shard.queue, key, limit, &without);
                    page.await?
                }
                None => {
                    let page = self
                        .store
                        .crowded(&shard.queue, key, limit, &rounds.refused);
                    page.await?
                }
            };
            // If the last ones cannot be marked, they wait in SQL still.
            if page.is_empty() && unmarked.is_none() {
                refilled.empty.push(*key);
            }
            if !page.is_empty() {
                taken.insert(*key);
            }
            bytes += page.iter().map(|row| row.task.weight()).sum::<usize>();
            rows.extend(page);
            if rows.len() >= RELEASED_AT_ONCE || bytes >= PAGE_BYTES {
                break;
            }
        }
        let partitions = self.bus.partitions(Topic::Pipeline);
        let may_pass = |row: &OutboxRow| {
            let partition = row.task.partition;
            row.is_as_new
                && partition < partitions
                && fences
                    .as_ref()
                    .is_some_and(|(_, known, _)| known.has(partition))
        };
        let (mut passing, by_bus): (Vec<_>, Vec<_>) = rows.into_iter().partition(may_pass);
        match fences {
            Some((shortcut, fences, alone)) if !passing.is_empty() => {
                let released = shortcut.release(&pairs(&passing), &fences).await;
                drop(alone);
                if released.has_moved {
                    *self.refusals.entry(shard.clone()).or_default() += 1;
                } else {
                    self.refusals.remove(shard);
                }
                refilled.has_more |= !released.is_full && !released.published.is_empty();
                if !released.published.is_empty() {
                    let of_each = released.published.iter().flat_map(|some| &some.tasks);
                    let ids: HashSet<TaskId> = of_each.map(|(id, _)| *id).collect();
                    passing.retain(|row| ids.contains(&row.task.id));
                    rounds.unmarked = Some(Unmarked {
                        shard: shard.clone(),
                        rows: passing,
                        published: released.published,
                        keys: taken,
                        ids,
                    });
                }
                if let Some((_, error)) = released.error {
                    return Err(error.into());
                }
            }
            _ => {
                self.refusals.remove(shard);
            }
        }
        if !by_bus.is_empty() {
            self.publish(shard, &by_bus, &mut rounds.refused).await?;
        }
        Ok(refilled)
    }
}

fn pairs(rows: &[OutboxRow]) -> Vec<(&TaskRow, Turn)> {
    rows.iter().map(|row| (&row.task, row.turn)).collect()
}
