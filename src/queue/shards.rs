//! The shards that this process knows: the part of the queue that every user sees.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::{Mutex, RwLock};
use redis::Value;
use tokio::sync::{Notify, mpsc};
use tokio_util::task::TaskTracker;

use super::{
    Error, Inspected, Result, Shard, Stats, Wakes, keys,
    keys::ShardKeys,
    shard::{Notes, Reach},
    types::Undelivered,
    upkeep::Awake,
    wire::{inspected, items, numbers, text, unsigned},
};
use crate::{
    model::{Offset, QueueName, ShardId, TaskId},
    redis_pool::{Call, Connection, Redis, Script, scripts},
    runtime::{Clock, Loop},
};

/// The shards of the process. Clones are the same.
#[derive(Clone)]
pub struct Shards(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) redis: Redis,
    /// Names this process to the others.
    pub(super) process: String,
    pub(super) clock: Clock,
    pub(super) wakes: Arc<Wakes>,
    shards: RwLock<BTreeMap<QueueName, Vec<Arc<Shard>>>>,
    pub(super) release: mpsc::UnboundedSender<Undelivered>,
    pub(super) released: Mutex<Option<mpsc::UnboundedReceiver<Undelivered>>>,
    /// Some shard has deliveries to report.
    pub(super) delivered: Arc<Notify>,
    pub(super) awake: Arc<Awake>,
    /// Calls under way.
    pub(super) calls: TaskTracker,
}

impl Shards {
    pub(super) fn new(redis: Redis, process: String, clock: Clock) -> Self {
        let (release, released) = mpsc::unbounded_channel();
        Self(Arc::new(Inner {
            redis,
            process,
            clock,
            wakes: Arc::default(),
            shards: RwLock::default(),
            release,
            released: Mutex::new(Some(released)),
            delivered: Arc::default(),
            awake: Arc::default(),
            calls: TaskTracker::new(),
        }))
    }

    /// Waits for the calls under way.
    pub async fn drained(&self) {
        self.0.calls.close();
        self.0.calls.wait().await;
    }

    // --- wakes

    pub fn wakes(&self) -> &Arc<Wakes> {
        &self.0.wakes
    }

    /// Tells all processes that something happened in the queue.
    pub async fn wake_everywhere(&self, queue: &QueueName) -> Result<()> {
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(self.wake_channel()).arg(queue.as_str());
        Ok(publish.exec_async(&mut self.conn()).await?)
    }

    pub(super) async fn listen(&self, cx: &Loop) -> Result<()> {
        let woken = |name: Option<&QueueName>| match name {
            Some(name) => self.shards_of(name).iter().for_each(|shard| shard.touch()),
            None => self.all().iter().for_each(|shard| shard.touch()),
        };
        self.0.wakes.listen(&self.0.redis, cx, woken).await
    }

    pub(super) fn wake_channel(&self) -> String {
        keys::wake_channel(self.prefix())
    }

    // --- which there are

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
            let shard = Arc::new(Shard::new(self, id));
            self.0.awake.wake(&shard.notes);
            of_queue.push(shard);
            of_queue.sort_by_key(|shard| shard.id.number);
        }
        // A caller that was woken for the shard's first tasks did not see them.
        self.0.wakes.wake(&id.queue);
    }

    /// Forgets a shard that was closed. Callers that are under way find nothing there.
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
        self.0.shards.read().get(&id.queue)?.iter().find(|shard| shard.id == *id).cloned()
    }

    pub(super) fn awake(&self) -> Vec<Arc<Notes>> {
        let shards = self.0.shards.read();
        self.0.awake.list(self.0.clock.now(), |notes| {
            let of_queue = shards.get(&notes.id.queue);
            of_queue.is_some_and(|of_queue| of_queue.iter().any(|shard| Arc::ptr_eq(&shard.notes, notes)))
        })
    }

    /// Something happened in the shard that its next look must see.
    pub(super) fn touch(&self, id: &ShardId) {
        if let Some(shard) = self.shard(id) {
            shard.touch();
        }
    }

    // --- what they have

    pub async fn stats(&self, shard: &ShardId) -> Result<Stats> {
        let n = numbers(self.call(&scripts::STATS, shard, 1, |_| {}).await?, 9)?;
        Ok(Stats {
            open: unsigned(n[0]),
            leases: unsigned(n[1]),
            delayed: unsigned(n[2]),
            live: unsigned(n[3]),
            waiting_bytes: unsigned(n[4]),
            outbox: unsigned(n[5]),
            finals: unsigned(n[6]),
            oldest_created_unix_ms: (n[7] >= 0).then_some(n[7]),
            ahead: unsigned(n[8]),
        })
    }

    /// The shard's stored offset with its topic generation, and each task's record.
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
        let stored = text(answer.next())?;
        let offset = stored.rsplit_once('/').and_then(|(topic, at)| Some((topic.to_owned(), at.parse().ok()?)));
        let records = answer.map(inspected).collect::<Result<Vec<_>>>()?;
        if records.len() != ids.len() {
            return Err(Error::Answer(format!("{} records for {} ids", records.len(), ids.len())));
        }
        Ok((offset, records))
    }

    // --- the scripts

    /// Calls a script that belongs to a shard. `items`: how many go together.
    pub(super) async fn call(
        &self,
        script: &'static Script,
        shard: &ShardId,
        items: usize,
        args: impl FnOnce(&mut Call),
    ) -> Result<Value> {
        let mut call = self.keys(shard).call(script, self.now()).of_items(items);
        args(&mut call);
        Ok(call.run(&mut self.conn()).await?)
    }

    pub(super) fn reach(&self, shard: &ShardId) -> Reach {
        Reach { redis: self.0.redis.clone(), keys: self.keys(shard), clock: self.0.clock.clone() }
    }

    fn keys(&self, shard: &ShardId) -> ShardKeys {
        ShardKeys::new(self.prefix(), shard)
    }

    /// The time for scripts; `None` unless a test has moved it.
    pub(super) fn now(&self) -> Option<i64> {
        self.0.clock.moved_unix_ms()
    }

    pub(super) fn conn(&self) -> Connection {
        self.0.redis.conn()
    }

    pub(super) fn prefix(&self) -> &str {
        self.0.redis.prefix()
    }

    pub(super) fn process(&self) -> &str {
        &self.0.process
    }
}
