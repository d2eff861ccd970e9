//! One shard as this process knows it: its callers combined, what it last saw there, and deliveries to report.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::Notify;

use super::{
    Claim, Code, Completion, Granted, Look, Queue,
    awake::Awake,
    combiner::Combiner,
    worker::{MAX_COMBINED, claim, complete, peek},
};
use crate::model::ShardId;

/// Grants whose delivery is reported in one call, at most.
pub(super) const DELIVERIES_AT_ONCE: usize = 1000;
/// Deliveries remembered while Redis does not answer. If the leases of those beyond run out, they cost nothing.
const DELIVERIES_MAX: usize = 100_000;

/// One shard of a queue.
pub struct Shard {
    pub id: ShardId,
    pub(super) claims: Arc<Combiner<Claim, Granted>>,
    pub(super) completions: Arc<Combiner<Completion, Code>>,
    pub(super) peeks: Arc<Combiner<(), u8>>,
    /// What the callers' answers keep of it.
    pub(super) notes: Arc<Notes>,
}

/// What this process has noted of a shard.
#[derive(Debug)]
pub(super) struct Notes {
    pub(super) id: ShardId,
    awake: Arc<Awake>,
    /// Nothing stood in the shard at the last look, and nothing has happened since.
    asleep: AtomicBool,
    delivered: Mutex<Vec<u64>>,
    notify: Arc<Notify>,
    /// Counts what happened there, as far as this process knows.
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
    pub(super) fn new(queue: &Queue, id: &ShardId) -> Self {
        let (keys, redis, calls) = (queue.keys(id), queue.0.redis.clone(), &queue.0.calls);
        let notes = Arc::new(Notes {
            id: id.clone(),
            awake: Arc::clone(&queue.0.awake),
            asleep: AtomicBool::new(false),
            delivered: Mutex::default(),
            notify: Arc::clone(&queue.0.delivered),
            touched: AtomicU64::new(0),
            seen: Mutex::default(),
        });
        let claims = {
            let (redis, keys, id, notes) = (redis.clone(), keys.clone(), id.clone(), Arc::clone(&notes));
            let release = queue.0.release.clone();
            Combiner::new(MAX_COMBINED, calls.clone(), move |requests| {
                claim(redis.conn(), keys.clone(), id.clone(), Arc::clone(&notes), release.clone(), requests)
            })
        };
        let completions = {
            let (redis, keys, notes) = (redis.clone(), keys.clone(), Arc::clone(&notes));
            Combiner::new(MAX_COMBINED, calls.clone(), move |items: Vec<Completion>| {
                notes.touch();
                complete(redis.clone(), keys.clone(), items)
            })
        };
        let peeks = Combiner::new(MAX_COMBINED, calls.clone(), move |callers: Vec<()>| {
            peek(redis.conn(), keys.clone(), callers.len())
        });
        Self { id: id.clone(), claims, completions, peeks, notes }
    }

    /// Something happened there that the next look must see.
    pub(super) fn touch(&self) {
        self.notes.touch();
    }
}

impl Notes {
    /// Either this sees that the shard sleeps, or [`Self::saw`] sees that it was touched.
    pub(super) fn touch(self: &Arc<Self>) {
        self.touched.fetch_add(1, Ordering::SeqCst);
        if self.get_up() {
            self.awake.wake(self);
        }
    }

    /// Ends its sleep; whether it slept.
    pub(super) fn get_up(&self) -> bool {
        self.asleep.swap(false, Ordering::SeqCst)
    }

    /// The last look, if it was taken within `max_age` and nothing has happened since.
    pub(super) fn seen(&self, max_age: Duration) -> Option<(Look, Duration)> {
        let seen = (*self.seen.lock().unwrap_or_else(PoisonError::into_inner))?;
        let age = seen.at.elapsed();
        (age < max_age && seen.touched == self.touched()).then_some((seen.look, age))
    }

    /// How often it was touched before a look; goes with that look into [`Self::saw`].
    pub(super) fn touched(&self) -> u64 {
        self.touched.load(Ordering::SeqCst)
    }

    pub(super) fn saw(self: &Arc<Self>, look: Look, touched: u64) {
        let seen = Seen { look, at: Instant::now(), touched };
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(seen);
        if look.is_idle {
            self.awake.lay_down(self);
            self.asleep.store(true, Ordering::SeqCst);
            if touched != self.touched() && self.get_up() {
                self.awake.wake(self);
            }
        }
    }

    /// The tasks of the grant have reached their worker.
    pub(super) fn note_delivered(&self, grant: u64) {
        let mut delivered = self.delivered.lock().unwrap_or_else(PoisonError::into_inner);
        if delivered.len() < DELIVERIES_MAX {
            delivered.push(grant);
            self.notify.notify_one();
        }
    }

    /// Grants to report now.
    pub(super) fn take_delivered(&self) -> Vec<u64> {
        let mut delivered = self.delivered.lock().unwrap_or_else(PoisonError::into_inner);
        let keep = delivered.len().saturating_sub(DELIVERIES_AT_ONCE);
        delivered.split_off(keep)
    }

    /// Those could not be reported.
    pub(super) fn put_back_delivered(&self, grants: Vec<u64>) {
        self.delivered.lock().unwrap_or_else(PoisonError::into_inner).extend(grants);
        self.notify.notify_one();
    }
}
