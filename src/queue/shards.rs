//! The shards that this process knows: the part of the queue that every user sees.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
};

use parking_lot::{Mutex, RwLock};
use redis::Value;
use tokio::sync::{Notify, broadcast, mpsc};
use tokio_util::task::TaskTracker;

use super::{
    announce::Announcer,
    calls::Reach,
    delivery::Undelivered,
    error::{Error, Result},
    history::History,
    keys,
    limits::Limits,
    pauses::Pauses,
    published::PublishedTopics,
    session_notices::SessionNotice,
    shard::{Process, Shard},
    shard_cache::ShardCache,
    stats::Stats,
    types::Inspected,
    wake_message::WakeMessage,
    wakes::Wakes,
    wire::{inspected, items, number, stats, stored_offset, text},
};
use crate::{
    model::{Offset, QueueName, ShardId, TaskId, WorkerName},
    redis_pool::{Batch, Call, Connection, Redis, Script, scripts},
    runtime::{Clock, Loop},
};

/// Some shards, with the number of offers in each at some moment.
pub struct Offers(Vec<(Arc<Shard>, u64)>);

impl Offers {
    /// Returns whether claims since then have left the shards of the queue empty. Later offers wake
    /// callers themselves.
    pub fn are_taken(&self, queue: &QueueName) -> bool {
        let mut of_queue = self.0.iter().filter(|(shard, _)| shard.id.queue == *queue);
        of_queue.all(|(shard, offers)| shard.cache.was_drained_after(*offers))
    }
}

/// The shards of the process. Clones share them.
#[derive(Clone)]
pub struct Shards(pub(super) Arc<Inner>);

pub(super) struct Inner {
    process: Process,
    /// The name of this process for the others.
    name: String,
    wakes: Arc<Wakes>,
    pauses: Pauses,
    announcer: Announcer,
    shards: RwLock<BTreeMap<QueueName, Vec<Arc<Shard>>>>,
    released: Mutex<Option<mpsc::UnboundedReceiver<Undelivered>>>,
    pub(super) notices: broadcast::Sender<SessionNotice>,
    published: PublishedTopics,
}

/// How many shards a server is asked about at once: other callers wait for the exchange.
const SHARDS_OF_SERVER: usize = 64;
/// How many shards a cluster is asked about at once: all callers wait for the node that answers
/// last.
const SHARDS_OF_CLUSTER: usize = 4096;
/// How many notices a slow listener may lag behind.
const NOTICES_BEHIND: usize = 256;

impl Shards {
    pub(super) fn new(redis: Redis, name: String, clock: Clock) -> Self {
        let (release, released) = mpsc::unbounded_channel();
        let announcer = Announcer::new(redis.clone(), clock.clone());
        let delivered = Arc::default();
        let awake = Arc::default();
        let calls = TaskTracker::new();
        let process = Process {
            redis,
            clock,
            release,
            delivered,
            awake,
            calls,
            history: Default::default(),
            secret_grants: Default::default(),
            limits: Default::default(),
        };
        let released = Mutex::new(Some(released));
        let (notices, _) = broadcast::channel(NOTICES_BEHIND);
        let inner = Inner {
            process,
            name,
            wakes: Default::default(),
            pauses: Default::default(),
            announcer,
            shards: Default::default(),
            released,
            notices,
            published: PublishedTopics::default(),
        };
        Self(Arc::new(inner))
    }

    /// Makes grants random, so that nobody can guess lease tokens. Without this, grants are
    /// counted, which a model can predict.
    pub fn keep_grants_secret(&self) {
        self.0.process.secret_grants.store(true, Ordering::Relaxed);
    }

    /// Waits for the calls in flight.
    pub async fn drained(&self) {
        self.0.process.calls.close();
        self.0.process.calls.wait().await;
    }

    // --- wakes

    pub fn wakes(&self) -> &Arc<Wakes> {
        &self.0.wakes
    }

    /// Notifies all processes that something happened in the queue.
    pub async fn wake_everywhere(&self, queue: &QueueName) -> Result<()> {
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(self.wake_channel()).arg(queue.as_str());
        Ok(publish.exec_async(&mut self.conn()).await?)
    }

    pub(super) fn pauses(&self) -> &Pauses {
        &self.0.pauses
    }

    pub(super) async fn listen(&self, cx: &Loop) -> Result<()> {
        let woken = |wake: Option<&WakeMessage>| {
            let shards = wake.map_or_else(|| self.all(), |wake| self.shards_of(&wake.queue));
            shards.iter().for_each(|shard| shard.offered());
            if wake.is_none_or(|wake| wake.is_due) {
                shards.iter().for_each(|shard| shard.note_due());
            }
        };
        let told = |notice| drop(self.0.notices.send(notice));
        self.0
            .wakes
            .listen(
                &self.0.process.redis,
                &self.0.name,
                cx,
                woken,
                told,
                &self.0.published,
            )
            .await
    }

    /// The topics with new records.
    pub fn published_topics(&self) -> &PublishedTopics {
        &self.0.published
    }

    pub(super) async fn tell_published(&self, cx: &Loop) -> Result<()> {
        let redis = &self.0.process.redis;
        self.0.published.tell(redis, &self.0.name, cx).await
    }

    /// Returns a receiver for the notices from now on.
    pub fn notices(&self) -> broadcast::Receiver<SessionNotice> {
        self.0.notices.subscribe()
    }

    /// Notifies all processes that a session takes over.
    pub async fn tell_takeover(&self, worker: &WorkerName, session: uuid::Uuid) -> Result<()> {
        let mut publish = redis::cmd("PUBLISH");
        publish
            .arg(self.wake_channel())
            .arg(format!("~{session} {worker}"));
        Ok(publish.exec_async(&mut self.conn()).await?)
    }

    pub(super) fn wake_channel(&self) -> String {
        keys::wake_channel(self.prefix())
    }

    /// The interface to announce and watch what happens to tasks.
    pub fn announcer(&self) -> &Announcer {
        &self.0.announcer
    }

    // --- known shards

    /// The known shards of a queue; none for a queue that never had a task.
    pub fn shards_of(&self, queue: &QueueName) -> Vec<Arc<Shard>> {
        self.0.shards.read().get(queue).cloned().unwrap_or_default()
    }

    /// All known shards, by queue and number.
    pub fn shards(&self) -> Vec<ShardId> {
        self.all().iter().map(|shard| shard.id.clone()).collect()
    }

    pub fn knows(&self, id: &ShardId) -> bool {
        self.shard(id).is_some()
    }

    /// Makes a shard known to this process.
    pub fn add_shard(&self, id: &ShardId) {
        {
            let mut shards = self.0.shards.write();
            let of_queue = shards.entry(id.queue.clone()).or_default();
            if of_queue.iter().any(|shard| shard.id == *id) {
                return;
            }
            let shard = Arc::new(Shard::new(&self.0.process, id));
            self.0.process.awake.wake(&shard.cache);
            of_queue.push(shard);
            of_queue.sort_by_key(|shard| shard.id.number);
        }
        // A caller that was woken for the shard's first tasks did not see them, because the shard
        // was not known yet.
        self.0.wakes.wake(&id.queue);
    }

    /// Forgets a shard that was closed. Calls in flight find nothing there.
    pub fn remove_shard(&self, id: &ShardId) {
        let mut shards = self.0.shards.write();
        if let Some(of_queue) = shards.get_mut(&id.queue) {
            of_queue.retain(|shard| shard.id != *id);
            if of_queue.is_empty() {
                shards.remove(&id.queue);
            }
        }
    }

    pub(super) fn all(&self) -> Vec<Arc<Shard>> {
        self.0.shards.read().values().flatten().cloned().collect()
    }

    pub(super) fn shard(&self, id: &ShardId) -> Option<Arc<Shard>> {
        self.0
            .shards
            .read()
            .get(&id.queue)?
            .iter()
            .find(|shard| shard.id == *id)
            .cloned()
    }

    pub(super) fn awake(&self) -> Vec<Arc<ShardCache>> {
        let shards = self.0.shards.read();
        self.0
            .process
            .awake
            .list(self.0.process.clock.now(), |cache| {
                let of_queue = shards.get(&cache.id.queue);
                of_queue.is_some_and(|of_queue| {
                    of_queue
                        .iter()
                        .any(|shard| Arc::ptr_eq(&shard.cache, cache))
                })
            })
    }

    /// Records a change of the shard that its next snapshot must include.
    pub(super) fn note_due(&self, id: &ShardId) {
        if let Some(shard) = self.shard(id) {
            shard.note_due();
        }
    }

    /// Records that leases may have ended. Those of limit keys may have left a time at which the next
    /// task may start, which promoting the shard tells.
    pub(super) fn note_ended(&self, id: &ShardId) {
        let Some(shard) = self.shard(id) else {
            return;
        };
        shard.note_due();
        if shard.cache.is_limited() {
            self.limits().note_start(id, self.clock().now_unix_ms());
        }
    }

    /// Records a change of the shard that makes nothing due sooner.
    pub(super) fn note_work(&self, id: &ShardId) {
        if let Some(shard) = self.shard(id) {
            shard.note_work();
        }
    }

    /// Returns the known shards of these queues, with the number of offers in each so far.
    pub fn offers(&self, queues: &[QueueName]) -> Offers {
        let shards = queues.iter().flat_map(|queue| self.shards_of(queue));
        Offers(
            shards
                .map(|shard| (Arc::clone(&shard), shard.cache.offers()))
                .collect(),
        )
    }

    /// Records that tasks may have been put into the shard's lanes.
    pub(super) fn offered(&self, id: &ShardId) {
        if let Some(shard) = self.shard(id) {
            shard.offered();
        }
    }

    // --- what they contain

    pub async fn stats(&self, shard: &ShardId) -> Result<Stats> {
        stats(self.call(&scripts::STATS, shard, 1, |_| {}).await?)
    }

    /// The stats of many shards, in order.
    pub async fn stats_of(&self, shards: &[ShardId]) -> Vec<Result<Stats>> {
        let answers = self
            .call_each(&scripts::STATS, shards.iter().collect(), |_, _| {})
            .await;
        answers
            .into_iter()
            .map(|answer| answer.and_then(stats))
            .collect()
    }

    /// Returns the shard's stored offset with its topic generation, and each task's record.
    pub async fn inspect(
        &self,
        shard: &ShardId,
        ids: &[TaskId],
    ) -> Result<(Option<(String, Offset)>, Vec<Option<Inspected>>)> {
        let value = self
            .call(&scripts::INSPECT, shard, ids.len(), |call| {
                for id in ids {
                    call.arg(id.as_bytes());
                }
            })
            .await?;
        let mut answer = items(value)?.into_iter();
        let offset = stored_offset(&text(answer.next())?);
        let records = answer.map(inspected).collect::<Result<Vec<_>>>()?;
        if records.len() != ids.len() {
            return Err(Error::Answer(format!(
                "{} records for {} ids",
                records.len(),
                ids.len()
            )));
        }
        Ok((offset, records))
    }

    /// Returns the stored offset as [`Self::inspect`] does, and the indices of the tasks of which
    /// the shard has no readable record.
    pub async fn missing(
        &self,
        shard: &ShardId,
        ids: &[TaskId],
    ) -> Result<(Option<(String, Offset)>, Vec<usize>)> {
        let value = self
            .call(&scripts::MISSING, shard, ids.len(), |call| {
                call.arg(
                    ids.iter()
                        .flat_map(|id| *id.as_bytes())
                        .collect::<Vec<u8>>(),
                );
            })
            .await?;
        let mut answer = items(value)?.into_iter();
        let offset = stored_offset(&text(answer.next())?);
        let place = |place| match number::<usize>(Some(place))? {
            place if (1..=ids.len()).contains(&place) => Ok(place - 1),
            place => Err(Error::Answer(format!(
                "the place {place} among {} ids",
                ids.len()
            ))),
        };
        Ok((offset, answer.map(place).collect::<Result<_>>()?))
    }

    // --- the scripts

    /// Calls a script of a shard. `items` is the number of items in the call.
    pub(super) async fn call(
        &self,
        script: &'static Script,
        shard: &ShardId,
        items: usize,
        args: impl FnOnce(&mut Call),
    ) -> Result<Value> {
        let mut call = self.reach(shard).call(script).of_items(items);
        args(&mut call);
        Ok(call.run(&mut self.conn()).await?)
    }

    /// Calls a script of each shard, in few exchanges. Returns the answers in order.
    pub(super) async fn call_each(
        &self,
        script: &'static Script,
        shards: Vec<&ShardId>,
        args: impl Fn(&mut Call, &ShardId),
    ) -> Vec<Result<Value>> {
        let most = if self.is_cluster() {
            SHARDS_OF_CLUSTER
        } else {
            SHARDS_OF_SERVER
        };
        let mut answers = Vec::with_capacity(shards.len());
        for shards in shards.chunks(most) {
            let mut batch = Batch::default();
            for shard in shards {
                let mut call = self.reach(shard).call(script).of_items(1);
                args(&mut call, shard);
                batch.script(call);
            }
            let some = self.0.process.redis.run_apart(batch).await;
            answers.extend(some.into_iter().map(|answer| Ok(answer?)));
        }
        answers
    }

    pub(super) fn reach(&self, id: &ShardId) -> Reach {
        // A known shard has the names of its keys ready.
        self.shard(id)
            .map_or_else(|| self.0.process.reach(id), |shard| shard.reach())
    }

    // --- for histories of tasks

    /// Whether this process reports attempts for the histories of tasks.
    pub fn history(&self) -> &History {
        &self.0.process.history
    }

    // --- for limits per key

    pub(super) fn limits(&self) -> &Limits {
        &self.0.process.limits
    }

    /// Calls in flight that no caller owns. The stop waits for them.
    pub(super) fn calls(&self) -> &TaskTracker {
        &self.0.process.calls
    }

    // --- for deliveries

    pub(super) fn release(&self) -> mpsc::UnboundedSender<Undelivered> {
        self.0.process.release.clone()
    }

    /// Returns the receiver of leases that were not delivered. Works only once.
    pub(super) fn released(&self) -> Option<mpsc::UnboundedReceiver<Undelivered>> {
        self.0.released.lock().take()
    }

    pub(super) fn delivered(&self) -> &Notify {
        &self.0.process.delivered
    }

    // --- Redis

    pub(super) fn conn(&self) -> Connection {
        self.0.process.redis.conn()
    }

    pub(super) fn clock(&self) -> &Clock {
        &self.0.process.clock
    }

    pub fn is_cluster(&self) -> bool {
        self.0.process.redis.is_cluster()
    }

    pub(super) fn prefix(&self) -> &str {
        self.0.process.redis.prefix()
    }

    pub(super) fn process(&self) -> &str {
        &self.0.name
    }
}
