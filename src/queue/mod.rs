//! The queue in Redis: which task waits, who holds it until when, who was credited. Everything that moves a task is one atomic script of
//! `lua/`; this module names the keys, calls the scripts and combines callers. Nothing above it knows Lua.

mod combiner;
pub mod keys;
pub mod scripts;
mod types;
mod wakes;
mod wire;

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use redis::{RedisError, Value};
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use uuid::Uuid;

use self::{
    combiner::Combiner,
    keys::ShardKeys,
    scripts::Script,
    types::Undelivered,
    wire::{
        bytes, inspected, items, number, numbers, outbox_entry, packed_ms, packed_strings, pairs, task_id, text,
        unsigned,
    },
};
pub use self::{
    types::{
        Claim, Code, Completion, Delivery, Enqueue, EnqueueTask, Enqueued, Event, Expired, Extension, Granted,
        HandBack, How, Inspected, Leased, OutboxEntry, Promoted, RecordStatus, Stats,
    },
    wakes::{Waiter, Wakes},
};
use crate::{
    model::{LeaseToken, Offset, QueueName, ShardId, TaskId},
    redis_pool::{Connection, Redis, Shortfall},
    supervise::Beat,
    telemetry::metrics,
};

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The shard was never opened, or Redis lost it.
    #[error("the shard has no generation in Redis")]
    NoGeneration,
    #[error("too many callers wait for the queue")]
    Busy,
    #[error("the process is stopping")]
    Stopped,
    /// A script answered something else than its contract says.
    #[error("unexpected answer of Redis: {0}")]
    Answer(String),
    /// Done, and not yet where the settings say that it must be. The same call again waits again.
    #[error(transparent)]
    NotDurable(#[from] Shortfall),
    #[error(transparent)]
    Redis(RedisError),
}

impl Error {
    /// Redis is at its `maxmemory` and refuses commands that need memory.
    fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Redis(error) if error.code() == Some("OOM"))
    }
}

impl From<RedisError> for Error {
    fn from(error: RedisError) -> Self {
        if error.code() == Some("NOGEN") { Self::NoGeneration } else { Self::Redis(error) }
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Elements that one claim looks at, at most, before it answers `more`.
const SCAN_BUDGET: usize = 2000;
/// Tasks and requests in one script call, at most: far below what Lua's stack holds.
const MAX_COMBINED: usize = 1000;

/// Who has read entries of a shard's outbox and does not remove them within this time has died, or the bus is away.
const FORWARDING: Duration = Duration::from_secs(3);

/// Entries in a shard's outbox at which claims and expiries pause.
pub const OUTBOX_FULL: usize = 10_000;

/// One shard of a queue.
pub struct Shard {
    pub id: ShardId,
    claims: Arc<Combiner<Claim, Granted>>,
    completions: Arc<Combiner<Completion, Code>>,
}

/// The queue. Cheap to clone.
#[derive(Clone)]
pub struct Queue(Arc<Inner>);

struct Inner {
    redis: Redis,
    /// Names this process to the others.
    process: String,
    wakes: Arc<Wakes>,
    shards: RwLock<HashMap<QueueName, Vec<Arc<Shard>>>>,
    release: mpsc::UnboundedSender<Undelivered>,
    released: std::sync::Mutex<Option<mpsc::UnboundedReceiver<Undelivered>>>,
    /// Calls under way.
    calls: TaskTracker,
}

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
            calls: TaskTracker::new(),
        }))
    }

    pub fn wakes(&self) -> &Arc<Wakes> {
        &self.0.wakes
    }

    /// Listens for wakes until the stop.
    pub async fn listen(&self, beat: &Beat, stop: &CancellationToken) -> Result<()> {
        Ok(self.0.wakes.listen(&self.0.redis, beat, stop).await?)
    }

    /// Gives back what could not be delivered, until the stop and then what is left. Runs once.
    pub async fn give_back_undelivered(&self, beat: &Beat, stop: &CancellationToken) {
        let Some(mut released) = self.0.released.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        loop {
            let next = tokio::select! {
                next = beat.idle(released.recv()) => next,
                () = stop.cancelled() => released.try_recv().ok(),
            };
            let Some((shard, items)) = next else { return };
            // At an error the leases run out by themselves: later, and counted as a failure.
            if let Err(error) = self.hand_back(&shard, &items, &[Duration::ZERO]).await {
                tracing::warn!(%shard, "could not give back {} undelivered leases of {shard}: {error}", items.len());
            }
        }
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
        let shards = self.0.shards.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = shards.values().flatten().map(|shard| shard.id.clone()).collect();
        all.sort();
        all
    }

    /// Makes a shard known to this process.
    pub fn add_shard(&self, id: &ShardId) {
        {
            let mut shards = self.0.shards.write().unwrap_or_else(PoisonError::into_inner);
            let of_queue = shards.entry(id.queue.clone()).or_default();
            if of_queue.iter().any(|shard| shard.id == *id) {
                return;
            }
            of_queue.push(self.make_shard(id));
            of_queue.sort_by_key(|shard| shard.id.number);
        }
        // Whoever was woken for its first tasks did not see them.
        self.0.wakes.wake(&id.queue);
    }

    pub fn knows(&self, id: &ShardId) -> bool {
        let shards = self.0.shards.read().unwrap_or_else(PoisonError::into_inner);
        shards.get(&id.queue).is_some_and(|shards| shards.iter().any(|shard| shard.id == *id))
    }

    fn make_shard(&self, id: &ShardId) -> Arc<Shard> {
        let keys = ShardKeys::new(self.0.redis.prefix(), id);
        let (conn, claim_keys, shard) = (self.0.redis.conn(), keys.clone(), id.clone());
        let release = self.0.release.clone();
        let claims = Combiner::new(MAX_COMBINED, self.0.calls.clone(), move |requests: Vec<Claim>| {
            claim(conn.clone(), claim_keys.clone(), shard.clone(), release.clone(), requests)
        });
        let redis = self.0.redis.clone();
        let completions = Combiner::new(MAX_COMBINED, self.0.calls.clone(), move |items: Vec<Completion>| {
            complete(redis.clone(), keys.clone(), items)
        });
        Arc::new(Shard { id: id.clone(), claims, completions })
    }

    fn keys(&self, shard: &ShardId) -> ShardKeys {
        ShardKeys::new(self.0.redis.prefix(), shard)
    }

    /// The number of the shard's life in Redis; `None`: never opened, or lost.
    pub async fn generation(&self, shard: &ShardId) -> Result<Option<u64>> {
        let keys = self.keys(shard);
        Ok(redis::cmd("GET").arg(keys.generation()).query_async(&mut self.0.redis.conn()).await?)
    }

    /// Gives a shard that has no generation one, in one step with an empty state: records of `pipeline` up to `offset` count as enqueued.
    /// What stands in its outbox stays. Does nothing when the shard has a generation.
    pub async fn open_shard(
        &self,
        shard: &ShardId,
        life: u64,
        topic_generation: &str,
        offset: Option<Offset>,
    ) -> Result<()> {
        let stored = offset.map(|offset| format!("{topic_generation}/{offset}")).unwrap_or_default();
        self.call(&scripts::OPEN, shard, 1, |call| {
            call.arg(life).arg(stored);
        })
        .await?;
        Ok(())
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

    /// For a new owner of a partition of `pipeline`: higher than that of every owner before, who is refused from the next enqueue on.
    pub async fn take_epoch(&self, partition: u32) -> Result<u64> {
        self.raise_epoch(partition, 1).await
    }

    /// After a refusal: a Redis that fell back may have forgotten how high the epochs were. The next one taken is above `known`.
    pub async fn epoch_is_at_least(&self, partition: u32, known: u64) -> Result<()> {
        let now = self.raise_epoch(partition, 0).await?;
        if now < known {
            // Two at once raise it too far, which does no harm.
            self.raise_epoch(partition, known - now).await?;
        }
        Ok(())
    }

    async fn raise_epoch(&self, partition: u32, by: u64) -> Result<u64> {
        // A full Redis must allow it: the owner of a partition moves its records to SQL.
        const RAISE: &str = "#!lua flags=allow-oom\nreturn redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2])";
        let mut raise = redis::cmd("EVAL");
        raise.arg(RAISE).arg(1).arg(keys::epochs(self.0.redis.prefix())).arg(partition).arg(by);
        Ok(raise.query_async(&mut self.0.redis.conn()).await?)
    }

    pub async fn enqueue(&self, shard: &ShardId, batch: &Enqueue<'_>) -> Result<Enqueued> {
        let script = if batch.tasks.is_empty() { &scripts::PASS } else { &scripts::ENQUEUE };
        let value = self
            .call(script, shard, batch.tasks.len(), |call| {
                call.arg(self.wake_channel()).arg(shard.queue.as_str()).arg(batch.topic_generation);
                call.arg(batch.predecessor.map(|p| p.to_string()).unwrap_or_default()).arg(batch.upto.to_string());
                call.arg(batch.high_water_tasks).arg(batch.high_water_bytes).arg(batch.epoch);
                for task in batch.tasks {
                    call.arg(task.offset.to_string()).arg(task.id.as_bytes()).arg(task.replicas);
                    call.arg(task.not_before_unix_ms).arg(&task.body[..]).arg(packed_strings(&task.credited));
                }
            })
            .await?;
        let mut answer = items(value)?.into_iter();
        match text(answer.next())?.as_str() {
            "ok" => Ok(Enqueued::Done { dealt_with: number(answer.next())?, added: number(answer.next())? }),
            "fenced" => Ok(Enqueued::Fenced(number(answer.next())?)),
            _ => Ok(Enqueued::Behind(text(answer.next())?.parse().ok())),
        }
    }

    /// Forgets how far the shard has read `pipeline`, because its offsets come a second time. Only the owner of the
    /// partition may do it.
    pub async fn rewind(&self, shard: &ShardId, epoch: u64) -> Result<()> {
        self.call(&scripts::REWIND, shard, 1, |call| {
            call.arg(epoch);
        })
        .await?;
        Ok(())
    }

    /// Leases tasks of the shard to the worker. A shard that Redis lost has nothing.
    pub async fn claim(&self, shard: &Shard, claim: Claim) -> Result<Granted> {
        let (weight, worker) = (claim.max_tasks, claim.worker.clone());
        match shard.claims.call(claim, weight).await {
            // A lease needs memory: a full Redis hands out nothing.
            Err(error) if matches!(error, Error::NoGeneration) || error.is_out_of_memory() => {
                let delivery = Delivery { worker, leases: Vec::new(), release: self.0.release.clone() };
                Ok(Granted { tasks: Vec::new(), more: false, delivery })
            }
            other => other,
        }
    }

    /// Credits the worker. When it answers `Ok`, the report is as durable as Redis.
    pub async fn complete(&self, completion: Completion) -> Result<Code> {
        let shard = completion.token.shard.clone();
        let known = self.shards_of(&shard.queue).into_iter().find(|known| known.id == shard);
        let answer = match known {
            Some(shard) => {
                // Large reports count as many: an outbox entry stays below some 16 MiB.
                let weight = 1 + completion.report.len() / (16 << 10);
                shard.completions.call(completion, weight).await
            }
            // Another process may know the shard; a token that was made up finds nothing.
            None => complete(self.0.redis.clone(), self.keys(&shard), vec![completion]).await.map(|codes| codes[0]),
        };
        lost_without_generation(answer, || Code::LeaseLost)
    }

    /// Gives leases of one shard back; answers per item, and whether the task is dead now.
    pub async fn hand_back(
        &self,
        shard: &ShardId,
        back: &[HandBack],
        backoff: &[Duration],
    ) -> Result<Vec<(Code, bool)>> {
        let answer = self
            .call(&scripts::REJECT, shard, back.len(), |call| {
                call.arg(seed()).arg(self.wake_channel()).arg(shard.queue.as_str()).arg(packed_ms(backoff));
                for item in back {
                    let (mode, delay) = match item.how {
                        How::Retry(None) => ("retry", String::new()),
                        How::Retry(Some(delay)) => ("retry", delay.as_millis().to_string()),
                        How::Never => ("never", String::new()),
                        How::Release => ("release", String::new()),
                    };
                    call.arg(item.id.as_bytes()).arg(item.token.generation).arg(item.token.grant);
                    call.arg(item.worker.as_str()).arg(mode).arg(delay).arg(item.reason.as_str());
                }
            })
            .await
            .and_then(|value| pairs(value, back.len()));
        let lost = || vec![(Code::LeaseLost, 0); back.len()];
        let answers = lost_without_generation(answer, lost)?;
        Ok(answers.into_iter().map(|(code, dead)| (code, dead != 0)).collect())
    }

    /// Extends leases of one shard; answers per item, and the new deadline in unix ms.
    pub async fn extend(&self, shard: &ShardId, extensions: &[Extension]) -> Result<Vec<(Code, i64)>> {
        let answer = self
            .call(&scripts::EXTEND, shard, extensions.len(), |call| {
                for item in extensions {
                    let by = u64::try_from(item.by.as_millis()).unwrap_or(u64::MAX);
                    call.arg(item.id.as_bytes()).arg(item.token.generation).arg(item.token.grant);
                    call.arg(item.worker.as_str()).arg(by);
                }
            })
            .await
            .and_then(|value| pairs(value, extensions.len()));
        lost_without_generation(answer, || vec![(Code::LeaseLost, 0); extensions.len()])
    }

    pub async fn expire(&self, shard: &ShardId, most: usize, backoff: &[Duration]) -> Result<Expired> {
        let value = self
            .call(&scripts::EXPIRE, shard, 1, |call| {
                call.arg(seed()).arg(self.wake_channel()).arg(shard.queue.as_str()).arg(packed_ms(backoff));
                call.arg(most).arg(OUTBOX_FULL);
            })
            .await?;
        let n = numbers(value, 4)?;
        let next_unix_ms = (n[3] >= 0).then_some(n[3]);
        Ok(Expired { expired: unsigned(n[0]), dead: unsigned(n[1]), more: n[2] != 0, next_unix_ms })
    }

    pub async fn promote(&self, shard: &ShardId, most: usize) -> Result<Promoted> {
        let value = self
            .call(&scripts::PROMOTE, shard, 1, |call| {
                call.arg(self.wake_channel()).arg(shard.queue.as_str()).arg(most);
            })
            .await?;
        let n = numbers(value, 3)?;
        Ok(Promoted { promoted: unsigned(n[0]), more: n[1] != 0, next_unix_ms: (n[2] >= 0).then_some(n[2]) })
    }

    /// Drops what is spent; answers how many elements left or moved.
    pub async fn sweep(&self, shard: &ShardId, most: usize) -> Result<u64> {
        let value = self
            .call(&scripts::SWEEP, shard, 1, |call| {
                call.arg(most);
            })
            .await?;
        number(Some(value))
    }

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

    /// Final records older than `grace`, the earliest first.
    pub async fn finals(&self, shard: &ShardId, grace: Duration, most: usize) -> Result<Vec<TaskId>> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let value = self
            .call(&scripts::FINALS, shard, 1, |call| {
                call.arg(grace_ms).arg(most);
            })
            .await?;
        items(value)?.into_iter().map(|id| task_id(Some(id))).collect()
    }

    /// Forgets those that are settled (`true`), in the order of [`Queue::finals`].
    pub async fn forget(&self, shard: &ShardId, settled: &[(TaskId, bool)]) -> Result<u64> {
        let value = self
            .call(&scripts::FORGET, shard, settled.len(), |call| {
                for (id, is_settled) in settled {
                    call.arg(id.as_bytes()).arg(u8::from(*is_settled));
                }
            })
            .await?;
        number(Some(value))
    }

    /// The first entries of the shard's outbox; none while another process forwards them.
    pub async fn outbox(&self, shard: &ShardId, most: usize) -> Result<Vec<OutboxEntry>> {
        let value = self
            .call(&scripts::OUTBOX, shard, most, |call| {
                call.arg(&self.0.process).arg(FORWARDING.as_millis() as u64).arg(most);
            })
            .await?;
        items(value)?.into_iter().map(outbox_entry).collect()
    }

    /// Removes entries that stand on the bus now; answers how many are left.
    pub async fn forwarded(&self, shard: &ShardId, entries: &[String]) -> Result<usize> {
        let value = self
            .call(&scripts::FORWARDED, shard, entries.len(), |call| {
                call.arg(self.wake_channel())
                    .arg(shard.queue.as_str())
                    .arg(OUTBOX_FULL)
                    .arg(&self.0.process)
                    .arg(entries);
            })
            .await?;
        number(Some(value))
    }

    /// Takes or keeps the lease on work that one process at a time does, or gives it back (zero); whether this process has it.
    pub async fn lease(&self, what: &str, lease: Duration) -> Result<bool> {
        let mut command = redis::cmd("EVAL");
        command.arg(include_str!("../../lua/lease.lua")).arg(1).arg(keys::lease(self.0.redis.prefix(), what));
        command.arg(&self.0.process).arg(lease.as_millis() as u64);
        Ok(command.query_async(&mut self.0.redis.conn()).await?)
    }

    /// Remembers whose tasks this Redis holds; answers whose they are.
    pub async fn belongs_to(&self, store_id: &str) -> Result<String> {
        // A full Redis refuses the write, so it is only made where the key is missing.
        if let Some(owner) = self.owner().await? {
            return Ok(owner);
        }
        let key = keys::store_id(self.0.redis.prefix());
        let mut pipe = redis::pipe();
        pipe.atomic().set_nx(&key, store_id).ignore().get(&key);
        let (owner,): (String,) = pipe.query_async(&mut self.0.redis.conn()).await?;
        Ok(owner)
    }

    /// Whose tasks this Redis says that it holds; `None` when it has lost that.
    pub async fn owner(&self) -> Result<Option<String>> {
        let key = keys::store_id(self.0.redis.prefix());
        Ok(redis::cmd("GET").arg(key).query_async(&mut self.0.redis.conn()).await?)
    }
}

/// `items` is how many go together.
async fn run(script: &'static Script, items: usize, call: &scripts::Call, conn: &mut Connection) -> Result<Value> {
    let started = std::time::Instant::now();
    let answer = call.run(conn).await;
    metrics::redis_script(script.name, items, started.elapsed());
    Ok(answer?)
}

async fn claim(
    mut conn: Connection,
    keys: ShardKeys,
    shard: ShardId,
    release: mpsc::UnboundedSender<Undelivered>,
    requests: Vec<Claim>,
) -> Result<Vec<Granted>> {
    let mut call = scripts::CLAIM.on(&keys, None);
    call.arg(SCAN_BUDGET).arg(OUTBOX_FULL);
    for request in &requests {
        let lease_ms = request.lease.map_or(0, |lease| u64::try_from(lease.as_millis()).unwrap_or(u64::MAX));
        call.arg(request.worker.as_str()).arg(request.max_tasks).arg(request.max_bytes).arg(lease_ms);
    }
    let mut answer = items(run(&scripts::CLAIM, requests.len(), &call, &mut conn).await?)?.into_iter();
    let generation = number(answer.next())?;
    let paused = number::<u8>(answer.next())? == 1;
    let mut granted = Vec::with_capacity(requests.len());
    for request in requests {
        let delivery = Delivery { worker: request.worker, leases: Vec::new(), release: release.clone() };
        let mut one = Granted { tasks: Vec::new(), more: false, delivery };
        if !paused {
            let mut parts =
                items(answer.next().ok_or_else(|| Error::Answer("a claim is missing".into()))?)?.into_iter();
            let grant = number(parts.next())?;
            one.more = number::<u8>(parts.next())? == 1;
            for task in parts {
                let mut fields = items(task)?.into_iter();
                let (id, body) = (task_id(fields.next())?, bytes(fields.next())?);
                let token = LeaseToken { shard: shard.clone(), generation, grant, attempt: number(fields.next())? };
                one.delivery.leases.push((id, token.clone()));
                one.tasks.push(Leased { id, token, body, expires_unix_ms: number(fields.next())? });
            }
        }
        granted.push(one);
    }
    Ok(granted)
}

async fn complete(redis: Redis, keys: ShardKeys, completions: Vec<Completion>) -> Result<Vec<Code>> {
    let mut call = scripts::COMPLETE.on(&keys, None);
    for item in &completions {
        call.arg(item.id.as_bytes()).arg(item.token.generation).arg(item.token.grant);
        call.arg(item.worker.as_str()).arg(&item.report[..]);
    }
    let answer = match redis.durability() {
        None => run(&scripts::COMPLETE, completions.len(), &call, &mut redis.conn()).await?,
        Some(durability) => {
            let (mut conn, _turn) = redis.waiting_conn().await?;
            let started = std::time::Instant::now();
            let answer = call.run_durably(&mut conn, durability, keys.waiting()).await;
            metrics::redis_script(scripts::COMPLETE.name, completions.len(), started.elapsed());
            answer?
        }
    };
    let answer = items(answer)?;
    if answer.len() != completions.len() {
        return Err(Error::Answer(format!("{} codes for {} completions", answer.len(), completions.len())));
    }
    answer.into_iter().map(|code| Code::from_number(number(Some(code))?)).collect()
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
    uuid::Uuid::new_v4().as_fields().0 >> 1
}
