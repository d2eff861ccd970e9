//! Fanout: topic `pipeline` into the queue, each partition in order, exactly once by the offset that the enqueue script stores.
//!
//! Crash windows: before the script, nothing happened; after it, before the commit, the records come again and their offsets are known.
//! Whoever lost a partition and does not know it yet is refused by its epoch, and joins anew.
//! A record whose queue is full is parked in SQL *before* the offset passes it: killed in between, it is parked and enqueued, and the
//! parked copy finds its record.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use prost::Message as _;
use tokio_util::sync::CancellationToken;

use crate::{
    bus::{Message, Reading, Subscription, Topic},
    config::Settings,
    model::{self, MAX_REPLICAS, Offset, QueueName, ShardId, TaskId},
    outbox::Outbox,
    pb,
    queue::{self, Enqueue, EnqueueTask, Enqueued, Queue},
    store::{TaskState, Unpublished},
    supervise::{Beat, Supervisor},
    telemetry::metrics::{self, FanoutBatch},
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

/// The records of one shard in one batch.
#[derive(Default)]
struct Group {
    tasks: Vec<EnqueueTask>,
    upto: Offset,
}

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
        let mut behind: BTreeMap<u32, Option<Offset>> = BTreeMap::new();
        for (shard, group) in groups {
            if behind.contains_key(&shard.number) {
                continue;
            }
            let epoch = self.epoch(shard.number, subscription.tenure(shard.number), owned).await?;
            match self.enqueue(&shard, &group, epoch, owned.last.get(&shard).copied(), &mut done).await? {
                None => drop(owned.last.insert(shard, group.upto)),
                Some(stored) => drop(behind.insert(shard.number, stored)),
            }
        }
        for (partition, stored) in &behind {
            tracing::warn!(partition, "redis fell back: reading pipeline/{partition} again from {stored:?}");
            owned.last.retain(|shard, _| shard.number != *partition);
            subscription.seek(*partition, *stored).await?;
        }
        let dealt_with: Vec<_> = messages.into_iter().filter(|m| !behind.contains_key(&m.partition)).collect();
        subscription.commit(&dealt_with).await?;
        metrics::fanout_batch(done, started.elapsed());
        Ok(())
    }

    /// The batch by shard, without what SQL knows to be final.
    async fn groups(&self, messages: &[Message], done: &mut FanoutBatch) -> anyhow::Result<BTreeMap<ShardId, Group>> {
        let grace_ms = i64::try_from(self.settings.watchdog.grace.as_millis()).unwrap_or(i64::MAX);
        let recent = model::now_unix_ms().saturating_sub(grace_ms);
        let (mut records, mut poison, mut ask) = (Vec::with_capacity(messages.len()), Vec::new(), Vec::new());
        for message in messages {
            match decode(message) {
                Ok((id, queue, record)) => {
                    if record.again || record.published_unix_ms < recent {
                        ask.push(id);
                    }
                    records.push((message, id, queue, record));
                }
                Err(reason) => poison.push((message.clone(), reason)),
            }
        }
        if let Some(oldest) = records.iter().map(|(.., record)| record.published_unix_ms).min() {
            let age_ms = u64::try_from(model::now_unix_ms().saturating_sub(oldest)).unwrap_or(0);
            metrics::fanout_oldest(Duration::from_millis(age_ms));
        }
        done.poison = poison.len();
        self.outbox.bury(Topic::Pipeline, &poison).await?;
        let states = if ask.is_empty() { Vec::new() } else { self.outbox.store.states(&ask).await? };
        let mut states: HashMap<TaskId, TaskState> = states.into_iter().map(|state| (state.id, state)).collect();
        let asked: std::collections::HashSet<_> = ask.into_iter().collect();

        let mut groups: BTreeMap<ShardId, Group> = BTreeMap::new();
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
                body: model::body_blob(&record),
                credited,
            });
        }
        Ok(groups)
    }

    /// Enqueues a group; `Some` when Redis fell back behind it.
    async fn enqueue(
        &self,
        shard: &ShardId,
        group: &Group,
        epoch: u64,
        predecessor: Option<Offset>,
        done: &mut FanoutBatch,
    ) -> anyhow::Result<Option<Option<Offset>>> {
        if !self.queue.knows(shard) {
            self.open(shard).await?;
        }
        let settings = self.settings.queues.get(&shard.queue);
        let mut batch = Enqueue {
            topic_generation: self.outbox.bus.generation(),
            epoch,
            predecessor,
            upto: group.upto,
            tasks: &group.tasks,
            high_water_tasks: settings.high_water_tasks,
            high_water_bytes: settings.high_water_bytes,
        };
        // Redis has little memory left: the whole group is parked in SQL.
        let is_short = self.outbox.gates.is_short() && !group.tasks.is_empty();
        let answer = match is_short {
            true => Ok(Enqueued::Done { dealt_with: 0, added: 0 }),
            false => self.queue.enqueue(shard, &batch).await,
        };
        let (dealt_with, added) = match answer {
            Ok(Enqueued::Done { dealt_with, added }) => (dealt_with, added),
            Ok(Enqueued::Behind(stored)) => return Ok(Some(stored)),
            Ok(Enqueued::Fenced(by)) => return Err(self.fenced(shard, epoch, by).await),
            Err(queue::Error::NoGeneration) => {
                anyhow::bail!("redis lost shard {shard}; waiting until the watchdog has brought it back")
            }
            Err(error) => return Err(error).with_context(|| format!("cannot enqueue to {shard}")),
        };
        done.enqueued += added;
        done.repeated += dealt_with - added;
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
            done.parked += ids.len();
            batch.tasks = &[];
            match self.queue.enqueue(shard, &batch).await? {
                Enqueued::Done { .. } => {}
                Enqueued::Behind(stored) => return Ok(Some(stored)),
                Enqueued::Fenced(by) => return Err(self.fenced(shard, epoch, by).await),
            }
        }
        Ok(None)
    }

    /// Of the present tenure. Taken at its first record: who had the partition before is refused from then on, wherever it was held up.
    async fn epoch(&self, partition: u32, tenure: u64, owned: &mut Owned) -> anyhow::Result<u64> {
        match owned.epochs.get(&partition) {
            Some((of, epoch)) if *of == tenure => Ok(*epoch),
            _ => {
                let epoch = self.queue.take_epoch(partition).await?;
                owned.epochs.insert(partition, (tenure, epoch));
                Ok(epoch)
            }
        }
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

    /// A shard's first task. SQL remembers the shard before Redis does, so that one that Redis lost is not taken for a new one.
    async fn open(&self, shard: &ShardId) -> anyhow::Result<()> {
        let is_known = self.outbox.store.shards().await?.iter().any(|(known, _life)| known == shard);
        if !is_known && self.outbox.store.next_life(shard, 0).await? == 1 {
            self.queue.open_shard(shard, 1, self.outbox.bus.generation(), None).await?;
        }
        self.queue.add_shard(shard);
        Ok(())
    }
}

fn decode(message: &Message) -> Result<(TaskId, QueueName, pb::PipelineRecord), String> {
    let record = pb::PipelineRecord::decode(message.value.clone()).map_err(|e| e.to_string())?;
    let id = TaskId::from_slice(&record.id).ok_or("the id has not 16 bytes")?;
    let queue = QueueName::new(&record.queue).map_err(|e| e.to_string())?;
    // The widest bounds there are, not this process's settings: those may have been wider when the task was stored.
    if record.replicas == 0 || record.replicas > MAX_REPLICAS {
        return Err(format!("replicas is {}; must be 1 to {MAX_REPLICAS}", record.replicas));
    }
    // The scripts make a key of it.
    if !(1..=3).contains(&record.priority) {
        return Err(format!("priority is {}; must be 1 to 3", record.priority));
    }
    if record.max_attempts == 0 || record.lease_ms == 0 {
        return Err(format!(
            "max_attempts is {}, lease_ms {}; must be 1 or more",
            record.max_attempts, record.lease_ms
        ));
    }
    Ok((id, queue, record))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_script_can_enqueue_is_poison() {
        let good = || pb::PipelineRecord {
            id: vec![7; 16].into(),
            queue: "q".into(),
            replicas: 1,
            priority: 3,
            max_attempts: 1,
            lease_ms: 1,
            ..Default::default()
        };
        let decode = |record: pb::PipelineRecord| {
            let (offset, value) = (Offset { major: 1, minor: 0 }, record.encode_to_vec().into());
            decode(&Message { partition: 0, offset, value }).map(drop)
        };
        decode(good()).unwrap();
        let cases = [
            (pb::PipelineRecord { id: vec![7; 15].into(), ..good() }, "16 bytes"),
            (pb::PipelineRecord { queue: "a{b".into(), ..good() }, "contains '{'"),
            (pb::PipelineRecord { replicas: 0, ..good() }, "replicas is 0"),
            (pb::PipelineRecord { replicas: 10_001, ..good() }, "replicas is 10001; must be 1 to 10000"),
            (pb::PipelineRecord { priority: 0, ..good() }, "priority is 0; must be 1 to 3"),
            (pb::PipelineRecord { priority: 4, ..good() }, "priority is 4"),
            (pb::PipelineRecord { max_attempts: 0, ..good() }, "max_attempts is 0"),
            (pb::PipelineRecord { lease_ms: 0, ..good() }, "lease_ms 0"),
        ];
        for (record, want) in cases {
            let error = decode(record).unwrap_err();
            assert!(error.contains(want), "{error:?} should say {want:?}");
        }
    }
}
