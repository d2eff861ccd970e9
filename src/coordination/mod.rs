//! Agreement between processes: whose tasks Redis holds, which process does shared work, which owns
//! a partition, and what time it is.
//!
//! Each of these is a key in Redis, next to those of the shards (`lua/README.md`). Losing one is
//! safe: without the ownership key the process starts over, a lease only avoids double work, and an
//! epoch that fell back is raised again.

mod depth_history;
mod presence;
mod watch;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use redis::RedisError;
use uuid::Uuid;

use crate::{
    redis_pool::{Call, Redis, scripts},
    runtime::{Clock, LoopError},
};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "this Redis holds the tasks of another database ({owner}, not {store_id}); use the database that belongs to \
         it, or another --redis-prefix, or an empty Redis"
    )]
    OfAnother { owner: String, store_id: String },
    /// The ownership key is gone from Redis, so other keys are probably gone too.
    #[error("redis has forgotten whose tasks it holds")]
    Disowned,
    #[error(transparent)]
    Redis(#[from] RedisError),
}

impl Error {
    /// True if the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Redis(_))
    }
}

impl LoopError for Error {
    fn ends_round(&self) -> bool {
        matches!(self, Self::Disowned)
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The coordination as one process takes part in it. Clones are the same process.
#[derive(Clone)]
pub struct Coordination {
    redis: Redis,
    /// The name of this process, which no other living process has.
    process: Arc<str>,
    clock: Clock,
    standing: Arc<Standing>,
}

/// What this process does for all.
#[derive(Debug, Default)]
pub struct Standing {
    leads: AtomicBool,
    differences: AtomicU64,
}

impl Standing {
    /// Notes whether this process leads. Another leader has its own findings.
    pub fn set_leads(&self, leads: bool) {
        self.leads.store(leads, Relaxed);
        if !leads {
            self.set_differences(0);
        }
    }

    pub fn leads(&self) -> bool {
        self.leads.load(Relaxed)
    }

    /// Notes how many differences the last check of all shards found.
    pub fn set_differences(&self, differences: u64) {
        self.differences.store(differences, Relaxed);
    }

    pub fn differences(&self) -> u64 {
        self.differences.load(Relaxed)
    }
}

impl Coordination {
    pub fn new(redis: Redis, process: &str, clock: Clock) -> Self {
        Self {
            redis,
            process: process.into(),
            clock,
            standing: Arc::default(),
        }
    }

    pub fn standing(&self) -> &Arc<Standing> {
        &self.standing
    }

    /// Claims Redis for the database `store_id` if no database has it. Fails if it holds the tasks
    /// of another one.
    pub async fn own(&self, store_id: &str) -> Result<()> {
        // A full Redis refuses writes, so write only if the key is missing.
        let owner = match self.owner().await? {
            Some(owner) => owner,
            None => {
                let key = self.owner_key();
                let mut pipe = redis::pipe();
                pipe.atomic().set_nx(&key, store_id).ignore().get(&key);
                let (owner,): (String,) = pipe.query_async(&mut self.redis.conn()).await?;
                owner
            }
        };
        if owner != store_id {
            return Err(Error::OfAnother {
                owner,
                store_id: store_id.to_owned(),
            });
        }
        Ok(())
    }

    /// The random name of this Redis. A Redis that has lost its data gets another one.
    pub async fn redis_name(&self) -> Result<String> {
        let mut call = scripts::NAME.call(&[format!("{}:redis-name", self.redis.prefix())]);
        call.arg(Uuid::new_v4().simple().to_string());
        Ok(
            redis::from_redis_value(call.run(&mut self.redis.conn()).await?)
                .map_err(RedisError::from)?,
        )
    }

    /// The database whose tasks this Redis holds; `None` if the key is gone.
    async fn owner(&self) -> Result<Option<String>> {
        Ok(redis::cmd("GET")
            .arg(self.owner_key())
            .query_async(&mut self.redis.conn())
            .await?)
    }

    /// Takes or keeps the lease on work that one process at a time does. Returns whether this
    /// process has it.
    pub async fn lease(&self, work: &str, lease: Duration) -> Result<bool> {
        let key = format!("{}:lease:{work}", self.redis.prefix());
        let mut call = scripts::LEASE.call(&[key]).now(self.clock.moved_unix_ms());
        call.arg(&*self.process).arg(lease.as_millis() as u64);
        Ok(self.run(call).await? == 1)
    }

    /// Gives the lease back, if this process has it.
    pub async fn release(&self, work: &str) -> Result<()> {
        self.lease(work, Duration::ZERO).await?;
        Ok(())
    }

    /// Takes the epoch of a new owner of a partition of `pipeline`. Once a shard has had an enqueue
    /// with this epoch, it refuses those with a lower one.
    pub async fn take_epoch(&self, partition: u32) -> Result<u64> {
        self.raise_epoch(partition, 1).await
    }

    /// Raises a partition's epoch to at least `known`, because a Redis that was set back may hand
    /// out a lower one.
    pub async fn epoch_is_at_least(&self, partition: u32, known: u64) -> Result<()> {
        let now = self.raise_epoch(partition, 0).await?;
        if now < known {
            // If two callers do this at the same time, the epoch is raised too far, which does no
            // harm.
            self.raise_epoch(partition, known - now).await?;
        }
        Ok(())
    }

    /// Returns the present epoch of a partition, by a write that changes nothing, so that it fails
    /// if Redis accepts no writes.
    pub async fn present_epoch(&self, partition: u32) -> Result<u64> {
        self.raise_epoch(partition, 0).await
    }

    async fn raise_epoch(&self, partition: u32, by: u64) -> Result<u64> {
        let mut call = scripts::EPOCH.call(&[format!("{}:epochs", self.redis.prefix())]);
        call.arg(partition).arg(by);
        Ok(self.run(call).await?.unsigned_abs())
    }

    /// The time of Redis, in milliseconds since 1970. In a cluster the same node answers each time.
    async fn time(&self) -> Result<i64> {
        self.run(scripts::TIME.call(&[self.owner_key()]).now(None))
            .await
    }

    async fn run(&self, call: Call) -> Result<i64> {
        Ok(
            redis::from_redis_value(call.run(&mut self.redis.conn()).await?)
                .map_err(RedisError::from)?,
        )
    }

    fn owner_key(&self) -> String {
        format!("{}:store-id", self.redis.prefix())
    }
}
