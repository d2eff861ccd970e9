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

/// Shared by the shards of a process.
pub(super) struct Process {
    pub(super) redis: Redis,
    pub(super) clock: Clock,
    /// Leases that were not delivered go here.
    pub(super) release: mpsc::UnboundedSender<Undelivered>,
    /// Some shard has deliveries to report.
    pub(super) delivered: Arc<Notify>,
    pub(super) awake: Arc<ActiveShards>,
    /// Calls under way.
    pub(super) calls: TaskTracker,
    pub(super) history: Arc<History>,
    /// Grants cannot be guessed.
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
    /// The part of the shard that answers to callers keep.
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
            // Calls that wait for copies share a connection, on which Redis answers one after the
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

    /// A claim for these callers, which goes with another call.
    pub(super) fn claiming(&self, requests: Vec<Claim>) -> Claiming {
        Claiming::begin(
            self.reach.clone(),
            Arc::clone(&self.cache),
            self.release.clone(),
            requests,
        )
    }

    /// Something happened in the shard that the next look must see.
    pub(super) fn note_due(&self) {
        self.cache.note_due();
    }

    /// Something happened in the shard that makes nothing due sooner.
    pub(super) fn note_work(&self) {
        self.cache.note_work();
    }

    /// Something may have come into its lanes.
    pub(super) fn offered(&self) {
        self.cache.note_offer();
        self.cache.note_work();
    }

    /// True if a claim of this process has just left the lanes empty, and nothing that it knows of
    /// has come since. A wake tells what other processes put in.
    pub fn is_drained(&self) -> bool {
        self.cache.is_drained()
    }
}
