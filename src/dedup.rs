//! The filter of keys seen before: one hash per queue in Redis (in a cluster each on its own node), key hash → task id.
//! A hint: the filter says "seen" only of keys whose task is stored, and SQL decides about the rest. So an entry may be
//! missing at any time, and a crash loses nothing.
//!
//! A database that is set back (a restored backup, a replica that took over and lacked the end) loses stored tasks that
//! the filter knows. So Redis also keeps the last task of each of the last [`BATCHES`] batches. While SQL has all of
//! them, nothing is lost. When SQL lacks one, a new *era* begins, and filters of the old era count for nothing.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use redis::RedisError;

use crate::{
    model::{KeyHash, QueueName, TaskId},
    redis_pool::{Call, Redis, scripts},
    runtime::LoopError,
};

/// How many bytes of the SHA-256 the filter keeps: no two keys of one queue share them.
const HASH_BYTES: usize = 16;
/// The field of a filter that names its era.
const ERA: &str = "era";
/// More than the processes that store at a time: each may have stored the last batch.
const BATCHES: isize = 64;
/// How many keys and ids go into one script call: Lua's stack is bounded.
const MARKED_AT_ONCE: usize = 1000;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Redis(#[from] RedisError),
}

impl Error {
    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Redis(_) => true,
        }
    }
}

impl LoopError for Error {}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The filter of all queues. Clones share the era.
#[derive(Clone)]
pub struct Filter {
    redis: Redis,
    era: Arc<AtomicU64>,
}

/// The tasks that were stored last, as Redis remembers them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastStored {
    era: u64,
    pub tasks: Vec<(KeyHash, TaskId)>,
}

impl Filter {
    /// A filter in its first era, until [`Self::last_stored`] learns the present one.
    pub fn new(redis: Redis) -> Self {
        Self { redis, era: Arc::default() }
    }

    fn key(&self, queue: &QueueName) -> String {
        format!("{}:{{{queue}}}:seen", self.redis.prefix())
    }

    fn era_key(&self) -> String {
        format!("{}:{{filter}}:era", self.redis.prefix())
    }

    fn stored_key(&self) -> String {
        format!("{}:{{filter}}:stored", self.redis.prefix())
    }

    async fn run(&self, call: Call) -> Result<u64> {
        Ok(redis::from_redis_value(call.run(&mut self.redis.conn()).await?).map_err(RedisError::from)?)
    }

    fn era(&self) -> u64 {
        self.era.load(Ordering::Relaxed)
    }

    /// The task of each key, where the filter knows one; in order.
    pub async fn seen(&self, keys: &[(QueueName, KeyHash)]) -> Result<Vec<Option<TaskId>>> {
        let mut seen = vec![None; keys.len()];
        for (queue, places) in by_queue(keys.iter().map(|(queue, _)| queue)) {
            let mut command = redis::cmd("HMGET");
            command.arg(self.key(queue)).arg(ERA);
            places.iter().for_each(|place| {
                command.arg(&keys[*place].1.0[..HASH_BYTES]);
            });
            let mut values: Vec<Option<Vec<u8>>> = command.query_async(&mut self.redis.conn()).await?;
            let ids = values.split_off(1);
            if values.pop().flatten().is_some_and(|era| era == self.era().to_string().as_bytes()) {
                for (place, id) in places.into_iter().zip(ids) {
                    seen[place] = id.and_then(|id| TaskId::from_slice(&id));
                }
            }
        }
        Ok(seen)
    }

    /// Remembers a batch of stored tasks; forgets others of the queue where it has more than `limit(queue)`.
    pub async fn mark(&self, tasks: &[(QueueName, KeyHash, TaskId)], limit: impl Fn(&QueueName) -> u64) -> Result<()> {
        let Some((_, hash, id)) = tasks.last() else { return Ok(()) };
        let last = [&hash.0[..], id.as_bytes()].concat();
        let mut pipe = redis::pipe();
        // Before the marks, so that the filter knows no key of a batch that Redis does not name.
        pipe.lpush(self.stored_key(), last).ignore().ltrim(self.stored_key(), 0, BATCHES - 1).ignore();
        let () = pipe.query_async(&mut self.redis.conn()).await?;
        for (queue, places) in by_queue(tasks.iter().map(|(queue, ..)| queue)) {
            let key = self.key(queue);
            let mut known: u64 = 0;
            for places in places.chunks(MARKED_AT_ONCE) {
                let mut call = scripts::FILTER_MARK.call(&[&key]).of_items(places.len());
                call.arg(self.era());
                places.iter().for_each(|place| {
                    call.arg(&tasks[*place].1.0[..HASH_BYTES]).arg(tasks[*place].2.as_bytes());
                });
                known = self.run(call).await?;
            }
            let excess = known.saturating_sub(limit(queue)).min(10_000);
            if excess > 0 {
                let mut command = redis::cmd("HRANDFIELD");
                let mut fields: Vec<Vec<u8>> =
                    command.arg(&key).arg(excess + 1).query_async(&mut self.redis.conn()).await?;
                fields.retain(|field| field != ERA.as_bytes());
                fields.truncate(usize::try_from(excess).unwrap_or(usize::MAX));
                let () = redis::cmd("HDEL").arg(&key).arg(fields).query_async(&mut self.redis.conn()).await?;
            }
        }
        Ok(())
    }

    /// Asks Redis which tasks were stored last, and learns the era.
    pub async fn last_stored(&self) -> Result<LastStored> {
        let mut pipe = redis::pipe();
        pipe.get(self.era_key()).lrange(self.stored_key(), 0, -1);
        let (era, tasks): (Option<u64>, Vec<Vec<u8>>) = pipe.query_async(&mut self.redis.conn()).await?;
        let era = era.unwrap_or_default();
        self.era.store(era, Ordering::Relaxed);
        let task = |entry: Vec<u8>| {
            let (hash, id) = entry.split_at_checked(32)?;
            Some((KeyHash(hash.try_into().ok()?), TaskId::from_slice(id)?))
        };
        Ok(LastStored { era, tasks: tasks.into_iter().filter_map(task).collect() })
    }

    /// Drops all filters, because SQL lacks a task that was stored last; false when another process was faster.
    pub async fn drop_all(&self, last: &LastStored) -> Result<bool> {
        let mut call = scripts::FILTER_DROP.call(&[self.era_key(), self.stored_key()]);
        call.arg(last.era);
        let dropped = self.run(call).await? == 1;
        self.last_stored().await?;
        Ok(dropped)
    }

    /// Forgets all keys of a queue: SQL knows them.
    pub async fn forget_queue(&self, queue: &QueueName) -> Result<()> {
        let () = redis::cmd("UNLINK").arg(self.key(queue)).query_async(&mut self.redis.conn()).await?;
        Ok(())
    }

    /// Forgets keys of tasks that are dead or cancelled, so that SQL answers when they are sent again.
    pub async fn forget(&self, keys: &[(QueueName, KeyHash)]) -> Result<()> {
        for (queue, places) in by_queue(keys.iter().map(|(queue, _)| queue)) {
            let mut command = redis::cmd("HDEL");
            command.arg(self.key(queue));
            places.iter().for_each(|place| {
                command.arg(&keys[*place].1.0[..HASH_BYTES]);
            });
            let () = command.query_async(&mut self.redis.conn()).await?;
        }
        Ok(())
    }
}

/// The places of each queue in a list.
fn by_queue<'a>(queues: impl Iterator<Item = &'a QueueName>) -> BTreeMap<&'a QueueName, Vec<usize>> {
    let mut places: BTreeMap<&QueueName, Vec<usize>> = BTreeMap::new();
    queues.enumerate().for_each(|(place, queue)| places.entry(queue).or_default().push(place));
    places
}
