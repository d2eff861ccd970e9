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
    notes::{Awake, Notes},
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
    pub(super) awake: Arc<Awake>,
    /// Calls under way.
    pub(super) calls: TaskTracker,
    pub(super) history: Arc<History>,
    /// Grants cannot be guessed.
    pub(super) secret_grants: Arc<AtomicBool>,
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
    pub(super) notes: Arc<Notes>,
    reach: Reach,
    release: mpsc::UnboundedSender<Undelivered>,
}

impl Shard {
    pub(super) fn new(process: &Process, id: &ShardId) -> Self {
        let calls = &process.calls;
        let notes = Notes::new(id, &process.clock, &process.awake, &process.delivered);
        let reach = process.reach(id);
        let claims = {
            let reach = reach.clone();
            let notes = Arc::clone(&notes);
            let release = process.release.clone();
            Combiner::new(MAX_COMBINED, CALLS, calls.clone(), move |requests| {
                claim(reach.clone(), Arc::clone(&notes), release.clone(), requests)
            })
        };
        let completions = {
            let reach = reach.clone();
            let notes = Arc::clone(&notes);
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
                    notes.work();
                    let notes = Arc::clone(&notes);
                    complete(reach.clone(), move || notes.touch(), callers)
                },
            )
        };
        let peeks = {
            let reach = reach.clone();
            let notes = Arc::clone(&notes);
            Combiner::new(
                MAX_COMBINED,
                CALLS,
                calls.clone(),
                move |callers: Vec<()>| peek(reach.clone(), Arc::clone(&notes), callers.len()),
            )
        };
        Self {
            id: id.clone(),
            claims,
            completions,
            peeks,
            notes,
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
            Arc::clone(&self.notes),
            self.release.clone(),
            requests,
        )
    }

    /// Something happened in the shard that the next look must see.
    pub(super) fn touch(&self) {
        self.notes.touch();
    }

    /// Something happened in the shard that makes nothing due sooner.
    pub(super) fn work(&self) {
        self.notes.work();
    }

    /// Something may have come into its lanes.
    pub(super) fn offered(&self) {
        self.notes.offer();
        self.notes.work();
    }

    /// True if a claim of this process has just left the lanes empty, and nothing that it knows of
    /// has come since. A wake tells what other processes put in.
    pub fn is_drained(&self) -> bool {
        self.notes.is_drained()
    }
}
