//! One shard as this process knows it: its combined callers, the last look, and the deliveries to report.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    Claim, Code, Completion, Granted, Look, Shards,
    combiner::Combiner,
    keys::ShardKeys,
    upkeep::Awake,
    worker::{MAX_COMBINED, claim, complete, peek},
};
use crate::{
    model::ShardId,
    redis_pool::{Call, Redis, Script},
    runtime::Clock,
};

/// Grants whose delivery is reported in one call, at most.
pub(super) const DELIVERIES_AT_ONCE: usize = 1000;
/// Deliveries remembered while Redis does not answer. If the leases of the others run out, they cost nothing.
const DELIVERIES_MAX: usize = 100_000;

/// One shard of a queue.
pub struct Shard {
    pub id: ShardId,
    pub(super) claims: Arc<Combiner<Claim, Granted>>,
    pub(super) completions: Arc<Combiner<Completion, Code>>,
    pub(super) peeks: Arc<Combiner<(), u8>>,
    /// What the answers to callers keep of the shard.
    pub(super) notes: Arc<Notes>,
}

/// What a call of a shard's script needs.
#[derive(Clone)]
pub(super) struct Reach {
    pub(super) redis: Redis,
    pub(super) keys: ShardKeys,
    pub(super) clock: Clock,
}

impl Reach {
    pub(super) fn call(&self, script: &'static Script) -> Call {
        self.keys.call(script, self.clock.moved_unix_ms())
    }
}

/// What this process has noted of a shard.
pub(super) struct Notes {
    pub(super) id: ShardId,
    clock: Clock,
    awake: Arc<Awake>,
    /// The shard was empty at the last look, and nothing has happened since.
    asleep: AtomicBool,
    delivered: Mutex<Vec<u64>>,
    notify: Arc<Notify>,
    /// Counts what happened in the shard, as far as this process knows.
    touched: AtomicU64,
    seen: Mutex<Option<Seen>>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    look: Look,
    at: Instant,
    touched: u64,
}

impl Shard {
    pub(super) fn new(shards: &Shards, id: &ShardId) -> Self {
        let calls = &shards.0.calls;
        let notes = Arc::new(Notes {
            id: id.clone(),
            clock: shards.0.clock.clone(),
            awake: Arc::clone(&shards.0.awake),
            asleep: AtomicBool::new(false),
            delivered: Mutex::default(),
            notify: Arc::clone(&shards.0.delivered),
            touched: AtomicU64::new(0),
            seen: Mutex::default(),
        });
        let reach = shards.reach(id);
        let claims = {
            let (reach, notes, release) = (reach.clone(), Arc::clone(&notes), shards.0.release.clone());
            Combiner::new(MAX_COMBINED, calls.clone(), move |requests| {
                claim(reach.clone(), Arc::clone(&notes), release.clone(), requests)
            })
        };
        let completions = {
            let (reach, notes) = (reach.clone(), Arc::clone(&notes));
            Combiner::new(MAX_COMBINED, calls.clone(), move |items: Vec<Completion>| {
                notes.touch();
                complete(reach.clone(), items)
            })
        };
        let peeks =
            Combiner::new(MAX_COMBINED, calls.clone(), move |callers: Vec<()>| peek(reach.clone(), callers.len()));
        Self { id: id.clone(), claims, completions, peeks, notes }
    }

    /// Something happened in the shard that the next look must see.
    pub(super) fn touch(&self) {
        self.notes.touch();
    }
}

impl Notes {
    /// Notes that something happened. Either this sees that the shard sleeps, or [`Self::saw`] sees the touch.
    pub(super) fn touch(self: &Arc<Self>) {
        self.touched.fetch_add(1, Ordering::SeqCst);
        if self.get_up() {
            self.awake.wake(self);
        }
    }

    /// Ends the sleep of the shard; whether it slept.
    pub(super) fn get_up(&self) -> bool {
        self.asleep.swap(false, Ordering::SeqCst)
    }

    /// The last look, if it was taken within `max_age` and nothing has happened since.
    pub(super) fn seen(&self, max_age: Duration) -> Option<(Look, Duration)> {
        let seen = (*self.seen.lock())?;
        let age = self.clock.now().saturating_duration_since(seen.at);
        (age < max_age && seen.touched == self.touched()).then_some((seen.look, age))
    }

    /// How often it was touched before a look; goes with that look into [`Self::saw`].
    pub(super) fn touched(&self) -> u64 {
        self.touched.load(Ordering::SeqCst)
    }

    pub(super) fn saw(self: &Arc<Self>, look: Look, touched: u64) {
        let seen = Seen { look, at: self.clock.now(), touched };
        *self.seen.lock() = Some(seen);
        if look.is_idle {
            self.awake.lay_down(self, self.clock.now());
            self.asleep.store(true, Ordering::SeqCst);
            if touched != self.touched() && self.get_up() {
                self.awake.wake(self);
            }
        }
    }

    /// The tasks of the grant have reached their worker.
    pub(super) fn note_delivered(&self, grant: u64) {
        let mut delivered = self.delivered.lock();
        if delivered.len() < DELIVERIES_MAX {
            delivered.push(grant);
            self.notify.notify_one();
        }
    }

    /// Grants to report now.
    pub(super) fn take_delivered(&self) -> Vec<u64> {
        let mut delivered = self.delivered.lock();
        let keep = delivered.len().saturating_sub(DELIVERIES_AT_ONCE);
        delivered.split_off(keep)
    }

    /// Keeps grants that could not be reported.
    pub(super) fn put_back_delivered(&self, grants: Vec<u64>) {
        self.delivered.lock().extend(grants);
        self.notify.notify_one();
    }
}
