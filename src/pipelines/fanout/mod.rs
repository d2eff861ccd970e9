//! Fanout: topic `pipeline` into the queue, each partition in order, exactly once by the offset that the enqueue script stores.
//!
//! Crash windows: before the script, nothing happened; after it, before the commit, the records come again and their offsets are known.
//! Whoever lost a partition and does not know it yet is refused by its epoch, and joins anew.
//! A record whose queue is full is parked in SQL *before* the offset passes it: killed in between, it is parked and enqueued, and the
//! parked copy finds its record.

mod record;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use futures::{StreamExt, TryStreamExt, stream};
use tokio_util::sync::CancellationToken;

use crate::{
    bus::{Message, Reading, Subscription, Topic},
    config::Settings,
    model::{Offset, ShardId, TaskId},
    pipelines::outbox::Outbox,
    queue::{self, Enqueue, EnqueueTask, Enqueued, Queue},
    runtime::{Beat, Supervisor},
    store::{TaskState, Unpublished},
    telemetry::metrics::{self, FanoutBatch},
    wire,
};

#[derive(Clone)]
struct Fanout {
    outbox: Outbox,
    queue: Queue,
    settings: Arc<Settings>,
}

pub fn start(outbox: Outbox, queue: Queue, settings: &Arc<Settings>, supervisor: &Supervisor) {
    let fanout = Fanout { outbox, queue, settings: Arc::clone(settings) };
    let (beat, stop) = (Arc::new(supervisor.progress().register("fanout")), supervisor.stop_token());
    supervisor.spawn("fanout", move || fanout.clone().consume(Arc::clone(&beat), stop.clone()));
}

/// What a reader knows of the partitions that it was given.
#[derive(Default)]
struct Owned {
    /// By partition, the epoch that was taken for a tenure.
    epochs: HashMap<u32, (u64, u64)>,
    /// What was enqueued last per shard: where Redis has fallen back behind it, the reader seeks back.
    last: HashMap<ShardId, Offset>,
}

impl Owned {
    /// Of the present tenure.
    fn epoch(&self, partition: u32) -> u64 {
        self.epochs.get(&partition).map_or(0, |(_, epoch)| *epoch)
    }
}

/// The records of one shard in one batch.
#[derive(Default)]
struct Group {
    tasks: Vec<EnqueueTask>,
    upto: Offset,
}

type Groups = BTreeMap<ShardId, Group>;

/// How far a group came.
enum Enqueuing {
    Done {
        added: usize,
        repeated: usize,
        parked: usize,
    },
    /// Redis fell back behind what was enqueued before.
    Behind,
    /// The shard has no generation: it is closed, or lost.
    Gone,
}

/// How far many groups came.
struct Outcome {
    /// Partitions with a shard that fell back.
    behind: BTreeSet<u32>,
    gone: Groups,
    /// The first error.
    failed: anyhow::Result<()>,
}

impl Default for Outcome {
    fn default() -> Self {
        Self { behind: BTreeSet::new(), gone: Groups::new(), failed: Ok(()) }
    }
}

impl Outcome {
    fn add(&mut self, other: Self) {
        self.behind.extend(other.behind);
        self.gone.extend(other.gone);
        let failed = std::mem::replace(&mut self.failed, Ok(()));
        self.failed = failed.and(other.failed);
    }
}

/// Shards that are called at a time.
const AT_ONCE: usize = 64;

impl Fanout {
    async fn consume(self, beat: Arc<Beat>, stop: CancellationToken) -> anyhow::Result<()> {
        let mut subscription = self.outbox.bus.subscribe(Topic::Pipeline, Reading::Ordered).await?;
        let mut owned = Owned::default();
        loop {
            let messages = tokio::select! {
                messages = beat.idle(subscription.next(self.settings.fanout.batch_max)) => messages?,
                () = stop.cancelled() => return Ok(()),
            };
            self.handle(messages, &mut *subscription, &mut owned).await?;
            beat.beat();
        }
    }

    async fn handle(
        &self,
        messages: Vec<Message>,
        subscription: &mut dyn Subscription,
        owned: &mut Owned,
    ) -> anyhow::Result<()> {
        let started = Instant::now();
        let mut done = FanoutBatch { records: messages.len(), ..Default::default() };
        let groups = self.groups(&messages, &mut done).await?;
        for partition in groups.keys().map(|shard| shard.number).collect::<BTreeSet<_>>() {
            self.take_epoch(partition, subscription.tenure(partition), owned).await?;
        }
        // New names must not hold up the queues that are there.
        let (known, new): (Groups, Groups) = groups.into_iter().partition(|(shard, _)| self.queue.knows(shard));
        let mut outcome = self.enqueue_all(known, owned, &mut done).await;
        let unopened: Groups = new.into_iter().chain(std::mem::take(&mut outcome.gone)).collect();
        if !unopened.is_empty() {
            self.open(unopened.keys(), owned).await?;
            outcome.add(self.enqueue_all(unopened, owned, &mut done).await);
        }
        outcome.failed?;
        if let Some(shard) = outcome.gone.keys().next() {
            // Its watchdog may not look at it for a while: nothing stood there.
            self.queue.wake_everywhere(&shard.queue).await?;
            anyhow::bail!("redis lost shard {shard}; waiting until the watchdog has brought it back");
        }
        for partition in &outcome.behind {
            let stored = self.fell_back_to(*partition, owned).await?;
            tracing::warn!(partition, "redis fell back: reading pipeline/{partition} again from {stored:?}");
            subscription.seek(*partition, stored).await?;
        }
        let dealt_with: Vec<_> = messages.into_iter().filter(|m| !outcome.behind.contains(&m.partition)).collect();
        subscription.commit(&dealt_with).await?;
        metrics::fanout_batch(done, started.elapsed());
        Ok(())
    }

    /// The batch by shard, without what SQL knows to be final.
    async fn groups(&self, messages: &[Message], done: &mut FanoutBatch) -> anyhow::Result<Groups> {
        let grace_ms = i64::try_from(self.settings.watchdog.grace.as_millis()).unwrap_or(i64::MAX);
        let now = self.outbox.clock.now_unix_ms();
        // A record from the future was published before the clock stepped back.
        let recent = now.saturating_sub(grace_ms)..=now.saturating_add(grace_ms);
        let (mut records, mut poison, mut ask) = (Vec::with_capacity(messages.len()), Vec::new(), Vec::new());
        for message in messages {
            match record::decode(message) {
                Ok((id, queue, record)) => {
                    if record.again || !recent.contains(&record.published_unix_ms) {
                        ask.push(id);
                    }
                    records.push((message, id, queue, record));
                }
                Err(reason) => poison.push((message.clone(), reason)),
            }
        }
        if let Some(oldest) = records.iter().map(|(.., record)| record.published_unix_ms).min() {
            let age_ms = u64::try_from(now.saturating_sub(oldest)).unwrap_or(0);
            metrics::fanout_oldest(Duration::from_millis(age_ms));
        }
        done.poison = poison.len();
        self.outbox.bury(Topic::Pipeline, &poison).await?;
        let states = if ask.is_empty() { Vec::new() } else { self.outbox.store.states(&ask).await? };
        let mut states: HashMap<TaskId, TaskState> = states.into_iter().map(|state| (state.id, state)).collect();
        let asked: std::collections::HashSet<_> = ask.into_iter().collect();

        let mut groups = Groups::new();
        for (message, id, queue, record) in records {
            let group = groups.entry(ShardId { queue, number: message.partition }).or_default();
            group.upto = message.offset;
            let mut credited = Vec::new();
            if asked.contains(&id) {
                match states.remove(&id) {
                    Some(state) if !state.status.is_final() => credited = state.workers,
                    // Final, or removed since, or twice in this batch, or of a store that was replaced.
                    _ => {
                        done.again_final += 1;
                        continue;
                    }
                }
            }
            group.tasks.push(EnqueueTask {
                offset: message.offset,
                id,
                replicas: record.replicas,
                not_before_unix_ms: record.not_before_unix_ms,
                body: wire::body_blob(&record),
                credited,
            });
        }
        Ok(groups)
    }

    /// Enqueues the groups, many at once. An error of one shard is no reason for another to wait.
    async fn enqueue_all(&self, groups: Groups, owned: &mut Owned, done: &mut FanoutBatch) -> Outcome {
        let calls = groups.into_iter().map(|(shard, group)| {
            let (epoch, predecessor) = (owned.epoch(shard.number), owned.last.get(&shard).copied());
            async move {
                let enqueued = self.enqueue(&shard, &group, epoch, predecessor).await;
                (shard, group, enqueued)
            }
        });
        let answers: Vec<_> = stream::iter(calls).buffer_unordered(AT_ONCE).collect().await;
        let mut outcome = Outcome::default();
        for (shard, group, enqueued) in answers {
            match enqueued {
                Ok(Enqueuing::Done { added, repeated, parked }) => {
                    done.enqueued += added;
                    done.repeated += repeated;
                    done.parked += parked;
                    owned.last.insert(shard, group.upto);
                }
                Ok(Enqueuing::Behind) => drop(outcome.behind.insert(shard.number)),
                Ok(Enqueuing::Gone) => drop(outcome.gone.insert(shard, group)),
                Err(error) => outcome.failed = outcome.failed.and(Err(error)),
            }
        }
        outcome
    }

    async fn enqueue(
        &self,
        shard: &ShardId,
        group: &Group,
        epoch: u64,
        predecessor: Option<Offset>,
    ) -> anyhow::Result<Enqueuing> {
        let settings = self.settings.queues.get(&shard.queue);
        let mut batch = Enqueue {
            topic_generation: self.outbox.bus.generation(),
            epoch,
            predecessor,
            upto: group.upto,
            tasks: &group.tasks,
            high_water_tasks: settings.high_water_tasks,
            high_water_bytes: settings.high_water_bytes,
            live_tasks_max: settings.live_tasks_max(),
        };
        // Redis has little memory left: the whole group is parked in SQL.
        let is_short = self.outbox.gates.is_short() && !group.tasks.is_empty();
        let answer = match is_short {
            true => Ok(Enqueued::Done { dealt_with: 0, added: 0 }),
            false => self.queue.enqueue(shard, &batch).await,
        };
        let (dealt_with, added) = match answer {
            Ok(Enqueued::Done { dealt_with, added }) => (dealt_with, added),
            Ok(Enqueued::Behind(_)) => return Ok(Enqueuing::Behind),
            Ok(Enqueued::Fenced(by)) => return Err(self.fenced(shard, epoch, by).await),
            Err(queue::Error::NoGeneration) => return Ok(Enqueuing::Gone),
            Err(error) => return Err(error).with_context(|| format!("cannot enqueue to {shard}")),
        };
        if dealt_with > added && self.has_read_beyond(shard).await? {
            return Err(self.begin_anew(shard.number, epoch).await);
        }
        let rest = &group.tasks[dealt_with..];
        if !rest.is_empty() {
            if !is_short {
                self.outbox.gates.close(&shard.queue);
            }
            let ids: Vec<_> = rest.iter().map(|task| task.id).collect();
            self.outbox.store.unpublish(&ids, Unpublished::Parked).await?;
            batch.tasks = &[];
            match self.queue.enqueue(shard, &batch).await? {
                Enqueued::Done { .. } => {}
                Enqueued::Behind(_) => return Ok(Enqueuing::Behind),
                Enqueued::Fenced(by) => return Err(self.fenced(shard, epoch, by).await),
            }
        }
        Ok(Enqueuing::Done { added, repeated: dealt_with - added, parked: rest.len() })
    }

    /// Takes an epoch at the first record of a tenure: who had the partition before is refused from then on, wherever
    /// it was held up.
    async fn take_epoch(&self, partition: u32, tenure: u64, owned: &mut Owned) -> anyhow::Result<()> {
        if owned.epochs.get(&partition).is_none_or(|(of, _)| *of != tenure) {
            let epoch = self.queue.take_epoch(partition).await?;
            owned.epochs.insert(partition, (tenure, epoch));
            // Others have enqueued since, and may have closed what was known.
            owned.last.retain(|shard, _| shard.number != partition);
        }
        Ok(())
    }

    /// Ends this reader: it joins the group anew, and takes a higher epoch if the partition is given to it again.
    async fn fenced(&self, shard: &ShardId, epoch: u64, by: u64) -> anyhow::Error {
        let partition = shard.number;
        match self.queue.epoch_is_at_least(partition, by).await {
            Ok(()) => anyhow::anyhow!(
                "pipeline/{partition} has another owner, with epoch {by} above our {epoch}: joining anew"
            ),
            Err(error) => error.into(),
        }
    }

    /// Whether the shard's stored offset lies beyond the end of its partition, so that it takes new records for known
    /// ones.
    async fn has_read_beyond(&self, shard: &ShardId) -> anyhow::Result<bool> {
        let (stored, _) = self.queue.inspect(shard, &[]).await?;
        match stored.filter(|(topic, _)| topic == self.outbox.bus.generation()) {
            Some((_, offset)) => Ok(self.outbox.bus.lies_beyond(Topic::Pipeline, shard.number, offset).await?),
            None => Ok(false),
        }
    }

    /// Rewinds the partition's shards, because the bus gives its offsets a second time. The error ends this reader; the
    /// next one begins at the committed offset and reads the same records again.
    async fn begin_anew(&self, partition: u32, epoch: u64) -> anyhow::Error {
        let rewind = async {
            for shard in self.queue.shards().into_iter().filter(|shard| shard.number == partition) {
                if self.has_read_beyond(&shard).await? {
                    self.queue.rewind(&shard, epoch).await?;
                }
            }
            anyhow::Ok(())
        };
        match rewind.await {
            Ok(()) => anyhow::anyhow!("pipeline/{partition} was made anew, or has lost records: reading it from there"),
            Err(error) => error,
        }
    }

    /// Opens shards of which this process knows nothing, and those that have no keys: in one transaction, and one
    /// exchange with Redis. SQL remembers a shard before Redis does, so that one that Redis lost is not taken for a new
    /// one. Killed in between, the shard looks lost.
    async fn open(&self, shards: impl Iterator<Item = &ShardId>, owned: &mut Owned) -> anyhow::Result<()> {
        let shards: Vec<ShardId> = shards.cloned().collect();
        let openings = self.outbox.store.open_shards(&shards).await?;
        let opened = shards.iter().zip(openings).filter(|(_, opening)| opening.is_new);
        let opened: Vec<_> = opened.map(|(shard, opening)| (shard.clone(), opening.life)).collect();
        self.queue.open_shards(&opened, self.outbox.bus.generation()).await?;
        // Nothing was enqueued in this life.
        owned.last.retain(|shard, _| !opened.iter().any(|(opened, _)| opened == shard));
        shards.iter().for_each(|shard| self.queue.add_shard(shard));
        Ok(())
    }

    /// The lowest stored offset of the shards of a partition that fell back. The records behind it are read again, for
    /// all of them.
    async fn fell_back_to(&self, partition: u32, owned: &mut Owned) -> anyhow::Result<Option<Offset>> {
        let generation = self.outbox.bus.generation();
        let mut of_partition: Vec<(ShardId, Offset)> =
            owned.last.iter().map(|(id, last)| (id.clone(), *last)).collect();
        of_partition.retain(|(shard, _)| shard.number == partition);
        let looks = of_partition.into_iter().map(|(shard, last)| async move {
            let stored = match self.queue.inspect(&shard, &[]).await {
                // The watchdog brings it back.
                Err(queue::Error::NoGeneration) => return Ok(None),
                other => other?.0,
            };
            let stored = stored.filter(|(topic, _)| topic == generation).map(|(_, offset)| offset);
            anyhow::Ok((stored < Some(last)).then_some((shard, stored)))
        });
        let looks: Vec<_> = stream::iter(looks).buffer_unordered(AT_ONCE).try_collect().await?;
        let fell_back: Vec<_> = looks.into_iter().flatten().collect();
        for (shard, stored) in &fell_back {
            match stored {
                Some(stored) => drop(owned.last.insert(shard.clone(), *stored)),
                None => drop(owned.last.remove(shard)),
            }
        }
        // Beside those that were refused there is perhaps none any more: read on from where the reader stands, as after
        // a start.
        let lowest = fell_back.into_iter().map(|(_, stored)| stored).min();
        lowest.with_context(|| format!("pipeline/{partition}: no shard is behind any more"))
    }
}
