//! The queue in Redis: which task waits, who holds it until when, who was credited. Everything that moves a task is one atomic script of
//! `lua/`; this module names the keys, calls the scripts and combines callers. Nothing above it knows Lua.
//!
//! `enqueue` is for the fanout, `worker` for the tasks service, `upkeep` for the watchdog and the forwarder.

mod awake;
mod combiner;
mod enqueue;
mod failing;
pub mod keys;
pub mod scripts;
mod shard;
mod types;
mod upkeep;
mod wakes;
mod wire;
mod worker;

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use redis::{RedisError, Value};
use tokio::sync::{Notify, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use uuid::Uuid;

use self::{awake::Awake, keys::ShardKeys, scripts::Script, shard::Notes, types::Undelivered};
pub use self::{
    failing::{FailedRound, Failing},
    shard::Shard,
    types::{
        Claim, Closing, Code, Completion, Delivery, Enqueue, EnqueueTask, Enqueued, Event, Expired, Extension, Failure,
        Granted, HandBack, How, Inspected, Leased, Look, OutboxEntry, Promoted, RecordStatus, Stats,
    },
    upkeep::{LookFor, OUTBOX_FULL, OUTBOX_FULL_BYTES},
    wakes::{Waiter, Wakes},
};
use crate::{
    model::{QueueName, ShardId},
    redis_pool::{Connection, Redis, Shortfall},
    runtime::{Beat, LoopError, Supervisor},
    telemetry::metrics,
};

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The shard was never opened, or Redis lost it.
    #[error("the shard has no generation in Redis")]
    NoGeneration,
    #[error("too many callers wait for the queue")]
    Busy,
    /// The bus does not take reports, and the outbox has all that it may have.
    #[error("the outbox of the shard is full: the bus does not take reports")]
    OutboxFull,
    #[error("the process is stopping")]
    Stopped,
    /// A script answered something else than its contract says.
    #[error("unexpected answer of Redis: {0}")]
    Answer(String),
    /// The queue does not know it, and SQL could not be asked.
    #[error("cannot tell now: {0}")]
    Unsure(String),
    /// Done, and not yet where the settings say that it must be. The same call again waits again.
    #[error(transparent)]
    NotDurable(#[from] Shortfall),
    #[error(transparent)]
    Redis(RedisError),
}

impl From<RedisError> for Error {
    fn from(error: RedisError) -> Self {
        match error.code() {
            Some("NOGEN") => Self::NoGeneration,
            Some("FULL") => Self::OutboxFull,
            _ => Self::Redis(error),
        }
    }
}

impl Error {
    /// Redis has reached its `maxmemory`.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Redis(error) if error.code() == Some("OOM"))
    }
}

impl LoopError for Error {}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The queue. Cheap to clone.
#[derive(Clone)]
pub struct Queue(Arc<Inner>);

struct Inner {
    redis: Redis,
    /// Names this process to the others.
    process: String,
    wakes: Arc<Wakes>,
    shards: RwLock<BTreeMap<QueueName, Vec<Arc<Shard>>>>,
    release: mpsc::UnboundedSender<Undelivered>,
    released: std::sync::Mutex<Option<mpsc::UnboundedReceiver<Undelivered>>>,
    /// Some shard has deliveries to report.
    delivered: Arc<Notify>,
    awake: Arc<Awake>,
    /// Calls under way.
    calls: TaskTracker,
}

/// How long deliveries gather before they are reported, where no claim takes them along.
const DELIVERIES_GATHER: Duration = Duration::from_millis(50);

/// How long after an error they are reported again.
const DELIVERIES_AGAIN: Duration = Duration::from_secs(1);

impl Queue {
    pub fn new(redis: Redis) -> Self {
        Self::of_process(redis, Uuid::new_v4().to_string())
    }

    /// `process` is a name that no other living process has. Who comes again under the name of a dead one has its leases.
    pub fn of_process(redis: Redis, process: String) -> Self {
        let (release, released) = mpsc::unbounded_channel();
        Self(Arc::new(Inner {
            redis,
            process,
            wakes: Arc::default(),
            shards: RwLock::default(),
            release,
            released: std::sync::Mutex::new(Some(released)),
            delivered: Arc::default(),
            awake: Arc::default(),
            calls: TaskTracker::new(),
        }))
    }

    pub fn wakes(&self) -> &Arc<Wakes> {
        &self.0.wakes
    }

    /// Hears of what is put into queues: workers' calls wait for it, and loops leave out shards of which they hear nothing.
    pub fn start_listening(&self, supervisor: &Supervisor) {
        let (beat, stop) = (Arc::new(supervisor.progress().register("wakes")), supervisor.stop_token());
        let queue = self.clone();
        supervisor.spawn("wakes", move || {
            let (queue, beat, stop) = (queue.clone(), Arc::clone(&beat), stop.clone());
            async move {
                let woken = |name: Option<&QueueName>| match name {
                    Some(name) => queue.shards_of(name).iter().for_each(|shard| shard.touch()),
                    None => queue.known().iter().for_each(|shard| shard.touch()),
                };
                Ok(queue.0.wakes.listen(&queue.0.redis, &beat, &stop, woken).await?)
            }
        });
    }

    /// Gives back what could not be delivered and reports what was, until the stop and then what is left. Runs once.
    pub async fn settle_deliveries(&self, beat: &Beat, stop: &CancellationToken) {
        let Some(mut released) = self.0.released.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        loop {
            tokio::select! {
                Some((shard, items)) = beat.idle(released.recv()) => self.release(&shard, &items).await,
                () = self.0.delivered.notified() => {
                    stop.run_until_cancelled(tokio::time::sleep(DELIVERIES_GATHER)).await;
                    if !self.report_deliveries().await {
                        stop.run_until_cancelled(tokio::time::sleep(DELIVERIES_AGAIN)).await;
                    }
                    beat.beat();
                }
                () = stop.cancelled() => break,
            }
        }
        while let Ok((shard, items)) = released.try_recv() {
            self.release(&shard, &items).await;
        }
        self.report_deliveries().await;
    }

    async fn release(&self, shard: &ShardId, items: &[HandBack]) {
        // At an error the leases run out by themselves: later, and at no cost.
        if let Err(error) = self.hand_back(shard, items, &[Duration::ZERO]).await {
            tracing::warn!(%shard, "could not give back {} undelivered leases of {shard}: {error}", items.len());
        }
    }

    /// Reports the deliveries that no claim has taken along; whether all are reported.
    pub async fn report_deliveries(&self) -> bool {
        let mut all = true;
        for shard in self.known() {
            if let Err(error) = self.report_delivered(&shard).await {
                // A lease of theirs that runs out costs nothing.
                tracing::debug!(shard = %shard.id, "could not report deliveries of {}: {error}", shard.id);
                all = false;
            }
        }
        all
    }

    /// Waits for the calls under way.
    pub async fn drained(&self) {
        self.0.calls.close();
        self.0.calls.wait().await;
    }

    // --- shards

    /// The known shards of a queue; none when nobody ever put a task in.
    pub fn shards_of(&self, queue: &QueueName) -> Vec<Arc<Shard>> {
        let shards = self.0.shards.read().unwrap_or_else(PoisonError::into_inner);
        shards.get(queue).cloned().unwrap_or_default()
    }

    /// All known shards, by queue and number.
    pub fn shards(&self) -> Vec<ShardId> {
        self.known().iter().map(|shard| shard.id.clone()).collect()
    }

    /// Shards in which something stands or has happened, or that no loop has looked at for long.
    pub fn awake_shards(&self) -> Vec<ShardId> {
        self.awake().iter().map(|notes| notes.id.clone()).collect()
    }

    fn awake(&self) -> Vec<Arc<Notes>> {
        let shards = self.0.shards.read().unwrap_or_else(PoisonError::into_inner);
        self.0.awake.list(|notes| {
            let of_queue = shards.get(&notes.id.queue);
            of_queue.is_some_and(|of_queue| of_queue.iter().any(|shard| Arc::ptr_eq(&shard.notes, notes)))
        })
    }

    fn known(&self) -> Vec<Arc<Shard>> {
        let shards = self.0.shards.read().unwrap_or_else(PoisonError::into_inner);
        shards.values().flatten().cloned().collect()
    }

    /// Makes a shard known to this process.
    pub fn add_shard(&self, id: &ShardId) {
        {
            let mut shards = self.0.shards.write().unwrap_or_else(PoisonError::into_inner);
            let of_queue = shards.entry(id.queue.clone()).or_default();
            if of_queue.iter().any(|shard| shard.id == *id) {
                return;
            }
            let shard = Arc::new(Shard::new(self, id));
            self.0.awake.wake(&shard.notes);
            of_queue.push(shard);
            of_queue.sort_by_key(|shard| shard.id.number);
        }
        // Whoever was woken for its first tasks did not see them.
        self.0.wakes.wake(&id.queue);
    }

    /// Forgets a shard that was closed. Callers that are under way find nothing there.
    pub fn remove_shard(&self, id: &ShardId) {
        let mut shards = self.0.shards.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_queue) = shards.get_mut(&id.queue) {
            of_queue.retain(|shard| shard.id != *id);
            if of_queue.is_empty() {
                shards.remove(&id.queue);
            }
        }
    }

    pub fn knows(&self, id: &ShardId) -> bool {
        self.shard(id).is_some()
    }

    fn shard(&self, id: &ShardId) -> Option<Arc<Shard>> {
        let shards = self.0.shards.read().unwrap_or_else(PoisonError::into_inner);
        shards.get(&id.queue)?.iter().find(|shard| shard.id == *id).cloned()
    }

    fn keys(&self, shard: &ShardId) -> ShardKeys {
        ShardKeys::new(self.0.redis.prefix(), shard)
    }

    /// Tells all processes that something happened in the queue.
    pub async fn wake_everywhere(&self, queue: &QueueName) -> Result<()> {
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(self.wake_channel()).arg(queue.as_str());
        Ok(publish.exec_async(&mut self.0.redis.conn()).await?)
    }

    /// Something happened in the shard that its next look must see.
    fn touch(&self, id: &ShardId) {
        if let Some(shard) = self.shard(id) {
            shard.touch();
        }
    }

    // --- the scripts

    async fn call(
        &self,
        script: &'static Script,
        shard: &ShardId,
        items: usize,
        args: impl FnOnce(&mut scripts::Call),
    ) -> Result<Value> {
        let mut call = script.on(&self.keys(shard), None);
        args(&mut call);
        run(script, items, &call, &mut self.0.redis.conn()).await
    }

    fn wake_channel(&self) -> String {
        keys::wake_channel(self.0.redis.prefix())
    }
}

/// `items` is how many go together.
async fn run(script: &'static Script, items: usize, call: &scripts::Call, conn: &mut Connection) -> Result<Value> {
    let started = std::time::Instant::now();
    let answer = call.run(conn).await;
    metrics::redis_script(script.name, items, started.elapsed());
    Ok(answer?)
}

/// A lease cannot outlive its shard: where Redis lost the shard, every token is void.
fn lost_without_generation<T>(answer: Result<T>, lost: impl FnOnce() -> T) -> Result<T> {
    match answer {
        Err(Error::NoGeneration) => Ok(lost()),
        other => other,
    }
}

/// A new seed for each call: Redis gives every script run the same one.
fn seed() -> u32 {
    Uuid::new_v4().as_fields().0 >> 1
}
