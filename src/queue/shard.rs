//! One shard as this process knows it.

use std::sync::{Arc, atomic::AtomicBool};

use tokio::sync::{Notify, mpsc};
use tokio_util::task::TaskTracker;

use super::{
    calls::{Claiming, MAX_COMBINED, Reach, claim, complete, peek},
    combiner::{CALLS, Combiner},
    delivery::{Granted, Undelivered},
    history::History,
    keys::ShardKeys,
    limits::Limits,
    shard_cache::{ActiveShards, ShardCache},
    types::{Claim, Code, Together},
};
use crate::{model::ShardId, redis_pool::Redis, runtime::Clock};

/// What the shards of a process share.
pub(super) struct Process {
    pub(super) redis: Redis,
    pub(super) clock: Clock,
    /// Takes leases that were not delivered.
    pub(super) release: mpsc::UnboundedSender<Undelivered>,
    /// Notified when a shard has deliveries to report.
    pub(super) delivered: Arc<Notify>,
    pub(super) awake: Arc<ActiveShards>,
    /// Calls in flight.
    pub(super) calls: TaskTracker,
    pub(super) history: Arc<History>,
    /// Whether grants are random, so that they cannot be guessed.
    pub(super) secret_grants: Arc<AtomicBool>,
    pub(super) limits: Arc<Limits>,
}

impl Process {
    pub(super) fn reach(&self, shard: &ShardId) -> Reach {
        let keys = ShardKeys::new(self.redis.prefix(), shard);
        Reach {
            redis: self.redis.clone(),
            keys,
            clock: self.clock.clone(),
            history: Arc::clone(&self.history),
            secret_grants: Arc::clone(&self.secret_grants),
            limits: Arc::clone(&self.limits),
        }
    }
}

/// One shard of a queue.
pub struct Shard {
    pub id: ShardId,
    pub(super) claims: Arc<Combiner<Claim, Granted>>,
    pub(super) completions: Arc<Combiner<Together, Vec<Code>>>,
    pub(super) peeks: Arc<Combiner<(), u8>>,
    /// The part of the shard that answers to callers keep alive.
    pub(super) cache: Arc<ShardCache>,
    reach: Reach,
    release: mpsc::UnboundedSender<Undelivered>,
}

impl Shard {
    pub(super) fn new(process: &Process, id: &ShardId) -> Self {
        let calls = &process.calls;
        let cache = ShardCache::new(id, &process.clock, &process.awake, &process.delivered);
        let reach = process.reach(id);
        let claims = {
            let reach = reach.clone();
            let cache = Arc::clone(&cache);
            let release = process.release.clone();
            Combiner::new(MAX_COMBINED, CALLS, calls.clone(), move |requests| {
                claim(reach.clone(), Arc::clone(&cache), release.clone(), requests)
            })
        };
        let completions = {
            let reach = reach.clone();
            let cache = Arc::clone(&cache);
            // Calls that wait for replicas share a connection, on which Redis answers one after the
            // other.
            let at_a_time = if reach.redis.durability().is_some() {
                1
            } else {
                CALLS
            };
            Combiner::new(
                MAX_COMBINED,
                at_a_time,
                calls.clone(),
                move |callers: Vec<Together>| {
                    cache.note_work();
                    let cache = Arc::clone(&cache);
                    complete(reach.clone(), Some(cache), callers)
                },
            )
        };
        let peeks = {
            let reach = reach.clone();
            let cache = Arc::clone(&cache);
            Combiner::new(
                MAX_COMBINED,
                CALLS,
                calls.clone(),
                move |callers: Vec<()>| peek(reach.clone(), Arc::clone(&cache), callers.len()),
            )
        };
        Self {
            id: id.clone(),
            claims,
            completions,
            peeks,
            cache,
            reach,
            release: process.release.clone(),
        }
    }

    pub(super) fn reach(&self) -> Reach {
        self.reach.clone()
    }

    /// Prepares a claim for these callers, which goes in the exchange of another call.
    pub(super) fn claiming(&self, requests: Vec<Claim>) -> Claiming {
        Claiming::begin(
            self.reach.clone(),
            Arc::clone(&self.cache),
            self.release.clone(),
            requests,
        )
    }

    /// Records a change of the shard that the next snapshot must include.
    pub(super) fn note_due(&self) {
        self.cache.note_due();
    }

    /// Records a change of the shard that makes nothing due sooner.
    pub(super) fn note_work(&self) {
        self.cache.note_work();
    }

    /// Records that tasks may have been put into the lanes.
    pub(super) fn offered(&self) {
        self.cache.note_offer();
        self.cache.note_work();
    }

    /// Returns whether a claim of this process has just left the lanes empty, and nothing has come
    /// since as far as it knows. If another process adds tasks, a wake tells so.
    pub fn is_drained(&self) -> bool {
        self.cache.is_drained()
    }
}
