//! What this process remembers of each shard, so that it need not ask Redis: the last snapshot of
//! the work that waits there, what the last claim or peek left in the lanes, and deliveries that
//! are still to be reported.
//!
//! The loops ask Redis about shards that are not empty or have just changed, and every
//! [`SLEEPS_FOR`] about the others.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::snapshot::ShardSnapshot;
use crate::{model::ShardId, runtime::Clock};

/// The most deliveries that one call reports.
const DELIVERIES_AT_ONCE: usize = 1000;
/// The most deliveries to remember while Redis does not answer. The rest are never reported: if
/// those leases run out, their tasks lose no attempt.
const DELIVERIES_MAX: usize = 100_000;
/// How long to trust what a call found in the lanes. If a wake is lost, tasks in a shard that was
/// empty wait for this long, and so does a more urgent task in one that was not.
const KNOWN_FOR: Duration = Duration::from_secs(1);

/// What this process remembers of one shard.
pub(super) struct ShardCache {
    pub(super) id: ShardId,
    clock: Clock,
    awake: Arc<ActiveShards>,
    /// The shard was empty at the last snapshot, and nothing has happened there since.
    asleep: AtomicBool,
    delivered: Mutex<Vec<u64>>,
    notify: Arc<Notify>,
    /// The shard has tasks with limit keys.
    is_limited: AtomicBool,
    /// The number of changes of the shard that this process has made or heard of.
    happened: AtomicU64,
    /// How many of them may have made something due sooner.
    urgent: AtomicU64,
    /// The last snapshot, unless something may have become due since.
    seen: Mutex<Option<StoredSnapshot>>,
    /// The number of changes that may have put elements into the lanes.
    offers: AtomicU64,
    /// The last claim, if it left no element.
    drained: Mutex<Option<LanesAnswer<()>>>,
    /// The priorities that had elements at the last peek or after the last claim, as the bits that
    /// a peek returns.
    peeked: Mutex<Option<LanesAnswer<u8>>>,
}

/// What Redis answered about the lanes.
#[derive(Clone, Copy, Debug)]
struct LanesAnswer<T> {
    what: T,
    /// [`ShardCache::offers`] before the call.
    offers: u64,
    at: Instant,
}

impl<T: Copy> LanesAnswer<T> {
    /// Returns the answer, unless it is too old or something was put into the lanes since.
    fn still(self, offers: u64, now: Instant) -> Option<T> {
        let is_recent = now.saturating_duration_since(self.at) < KNOWN_FOR;
        (self.offers == offers && is_recent).then_some(self.what)
    }
}

#[derive(Clone, Copy, Debug)]
struct StoredSnapshot {
    look: ShardSnapshot,
    at: Instant,
}

/// The counts of changes of a shard at the moment before a snapshot is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Activity {
    happened: u64,
    urgent: u64,
}

impl ShardCache {
    /// `delivered` is notified when there are deliveries to report.
    pub(super) fn new(
        id: &ShardId,
        clock: &Clock,
        awake: &Arc<ActiveShards>,
        delivered: &Arc<Notify>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id: id.clone(),
            clock: clock.clone(),
            awake: Arc::clone(awake),
            asleep: AtomicBool::new(false),
            is_limited: AtomicBool::new(false),
            delivered: Mutex::default(),
            notify: Arc::clone(delivered),
            happened: AtomicU64::new(0),
            urgent: AtomicU64::new(0),
            seen: Mutex::default(),
            offers: AtomicU64::new(0),
            drained: Mutex::default(),
            peeked: Mutex::default(),
        })
    }

    /// Whether the scripts for shards with limit keys are to be called.
    pub(super) fn is_limited(&self) -> bool {
        self.is_limited.load(Ordering::Relaxed)
    }

    /// The shard has tasks with limit keys, until it closes.
    pub(super) fn note_limited(&self) {
        self.is_limited.store(true, Ordering::Relaxed);
    }

    /// Records a change that may have made something due at once or sooner than before. The last
    /// snapshot no longer counts.
    pub(super) fn note_due(self: &Arc<Self>) {
        self.record_urgent(|_| None);
    }

    /// Records a claim or an extension. The shortest of its leases ends `lease` from now.
    pub(super) fn note_lease(self: &Arc<Self>, lease: Duration) {
        let now = self.clock.now();
        self.record_urgent(|StoredSnapshot { mut look, at }| {
            let ends = now.saturating_duration_since(at) + lease;
            look.next = Some(look.next.map_or(ends, |next| next.min(ends)));
            Some(StoredSnapshot { look, at })
        });
    }

    /// Records a change that makes nothing due sooner. The last snapshot still counts, unless it
    /// found the shard empty.
    pub(super) fn note_work(self: &Arc<Self>) {
        self.record(Some);
    }

    /// Records that the outbox is empty.
    pub(super) fn note_forwarded(self: &Arc<Self>) {
        self.record(|StoredSnapshot { look, at }| {
            Some(StoredSnapshot {
                look: ShardSnapshot { outbox: 0, ..look },
                at,
            })
        });
    }

    fn record_urgent(
        self: &Arc<Self>,
        change: impl FnOnce(StoredSnapshot) -> Option<StoredSnapshot>,
    ) {
        self.urgent.fetch_add(1, Ordering::SeqCst);
        self.record(change);
    }

    /// Counts a change, and applies `change` to the last snapshot. The count is raised first: if a
    /// snapshot is being taken at this moment, either this finds the shard asleep and wakes it, or
    /// [`Self::store_snapshot`] finds that the count has changed.
    fn record(self: &Arc<Self>, change: impl FnOnce(StoredSnapshot) -> Option<StoredSnapshot>) {
        self.happened.fetch_add(1, Ordering::SeqCst);
        {
            let mut seen = self.seen.lock();
            *seen = seen.filter(|seen| !seen.look.is_idle).and_then(change);
        }
        if self.wake_up() {
            self.awake.wake(self);
        }
    }

    /// Marks the shard as awake. Returns whether it was asleep.
    pub(super) fn wake_up(&self) -> bool {
        self.asleep.swap(false, Ordering::SeqCst)
    }

    /// Returns the last snapshot if it is younger than `max_age`, nothing may have become due since,
    /// and none of its leases and delays has ended.
    pub(super) fn snapshot(&self, max_age: Duration) -> Option<ShardSnapshot> {
        let StoredSnapshot { mut look, at } = (*self.seen.lock())?;
        let age = self.clock.now().saturating_duration_since(at);
        if age >= max_age {
            return None;
        }
        if let Some(next) = look.next {
            look.next = Some(next.checked_sub(age)?);
        }
        Some(look)
    }

    /// The counts to read before a snapshot is taken. They go into [`Self::store_snapshot`] with it.
    pub(super) fn activity(&self) -> Activity {
        Activity {
            happened: self.happened.load(Ordering::SeqCst),
            urgent: self.urgent.load(Ordering::SeqCst),
        }
    }

    /// Stores a snapshot, unless it may lack something that happened while it was taken. `before`
    /// and `at` are the counts and the time before it was taken.
    pub(super) fn store_snapshot(
        self: &Arc<Self>,
        look: ShardSnapshot,
        before: Activity,
        at: Instant,
    ) {
        {
            let mut seen = self.seen.lock();
            let now = self.activity();
            let is_whole = if look.is_idle {
                before == now
            } else {
                before.urgent == now.urgent
            };
            *seen = is_whole.then_some(StoredSnapshot { look, at });
        }
        if look.is_idle {
            self.awake.set_asleep(self, self.clock.now());
            self.asleep.store(true, Ordering::SeqCst);
            if before != self.activity() && self.wake_up() {
                self.awake.wake(self);
            }
        }
    }

    /// Records that elements may have been put into the lanes, also if a call failed and nobody
    /// knows.
    pub(super) fn note_offer(&self) {
        self.offers.fetch_add(1, Ordering::SeqCst);
    }

    /// The count to read before a claim. It goes into [`Self::note_drained`] with the answer.
    pub(super) fn offers(&self) -> u64 {
        self.offers.load(Ordering::SeqCst)
    }

    /// Records that a claim left no element.
    pub(super) fn note_drained(&self, offers: u64) {
        *self.drained.lock() = Some(LanesAnswer {
            what: (),
            offers,
            at: self.clock.now(),
        });
        self.forget_priorities();
    }

    pub(super) fn is_drained(&self) -> bool {
        self.is_drained_at(self.clock.now())
    }

    /// True if a claim after these offers left no element.
    pub(super) fn was_drained_after(&self, offers: u64) -> bool {
        self.drained
            .lock()
            .is_some_and(|drained| drained.offers >= offers)
    }

    fn is_drained_at(&self, now: Instant) -> bool {
        let drained = *self.drained.lock();
        drained.is_some_and(|drained| drained.still(self.offers(), now).is_some())
    }

    /// Records the priorities that a peek found or a claim left.
    pub(super) fn note_priorities(&self, offers: u64, priorities: u8) {
        *self.peeked.lock() = Some(LanesAnswer {
            what: priorities,
            offers,
            at: self.clock.now(),
        });
    }

    /// The priorities of the last peek or claim, unless something has come since.
    pub(super) fn priorities(&self) -> Option<u8> {
        let peeked = *self.peeked.lock();
        peeked.and_then(|peeked| peeked.still(self.offers(), self.clock.now()))
    }

    /// Forgets the priorities, so that the next caller peeks.
    pub(super) fn forget_priorities(&self) {
        *self.peeked.lock() = None;
    }

    /// Records that the tasks of a grant have reached their worker.
    pub(super) fn note_delivered(&self, grant: u64) {
        let mut delivered = self.delivered.lock();
        if delivered.len() < DELIVERIES_MAX {
            delivered.push(grant);
            self.notify.notify_one();
        }
    }

    /// Whether there are grants to report.
    pub(super) fn has_delivered(&self) -> bool {
        !self.delivered.lock().is_empty()
    }

    /// Takes the deliveries to report in one call.
    pub(super) fn take_delivered(&self) -> Vec<u64> {
        let mut delivered = self.delivered.lock();
        let keep = delivered.len().saturating_sub(DELIVERIES_AT_ONCE);
        delivered.split_off(keep)
    }

    /// Puts back deliveries that could not be reported.
    pub(super) fn put_back_delivered(&self, grants: Vec<u64>) {
        self.delivered.lock().extend(grants);
        self.notify.notify_one();
    }
}

/// How long the loops leave out an empty shard, unless a wake or a call of this process changes it.
/// It is bounded because a wake may be lost.
const SLEEPS_FOR: Duration = Duration::from_secs(30);

/// The shards of a process that its loops ask Redis about, apart from those that are asleep. Ten
/// thousand empty shards cost next to nothing.
#[derive(Default)]
pub(super) struct ActiveShards(Mutex<Lists>);

#[derive(Default)]
struct Lists {
    /// By address, because a shard may be closed and opened again in another generation.
    awake: HashMap<usize, Arc<ShardCache>>,
    /// In the order in which they wake up. A shard that changed meanwhile is in `awake` too.
    asleep: VecDeque<(Instant, Arc<ShardCache>)>,
}

fn address(cache: &Arc<ShardCache>) -> usize {
    Arc::as_ptr(cache).addr()
}

impl ActiveShards {
    fn lock(&self) -> MutexGuard<'_, Lists> {
        self.0.lock()
    }

    pub(super) fn wake(&self, cache: &Arc<ShardCache>) {
        self.lock().awake.insert(address(cache), Arc::clone(cache));
    }

    pub(super) fn set_asleep(&self, cache: &Arc<ShardCache>, now: Instant) {
        let mut lists = self.lock();
        lists.awake.remove(&address(cache));
        lists
            .asleep
            .push_back((now + SLEEPS_FOR, Arc::clone(cache)));
    }

    /// Returns the shards to ask Redis about now. Forgets those that are no longer `known`.
    pub(super) fn list(
        &self,
        now: Instant,
        known: impl Fn(&Arc<ShardCache>) -> bool,
    ) -> Vec<Arc<ShardCache>> {
        let mut lists = self.lock();
        while let Some((_, cache)) = lists.asleep.pop_front_if(|(until, _)| *until <= now) {
            if cache.wake_up() {
                lists.awake.insert(address(&cache), cache);
            }
        }
        lists.awake.retain(|_, cache| known(cache));
        lists.awake.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::QueueName;

    fn cache() -> Arc<ShardCache> {
        let id = ShardId {
            queue: QueueName::new("q").unwrap(),
            number: 0,
        };
        ShardCache::new(
            &id,
            &Clock::of_this_machine(),
            &Arc::default(),
            &Arc::default(),
        )
    }

    const HOUR: Duration = Duration::from_secs(3600);
    const BUSY: ShardSnapshot = ShardSnapshot {
        is_idle: false,
        next: None,
        outbox: 1,
        ..EMPTY
    };
    const EMPTY: ShardSnapshot = ShardSnapshot {
        is_idle: true,
        expires: false,
        promotes: false,
        next: None,
        spent: 0,
        pointers: 0,
        outbox: 0,
        settles: false,
        open: 0,
        own_limits: None,
        long_holds: 0,
    };

    /// Stores a snapshot during which something happens.
    fn see(
        cache: &Arc<ShardCache>,
        look: ShardSnapshot,
        happens: impl FnOnce(),
    ) -> Option<ShardSnapshot> {
        let before = cache.activity();
        let at = cache.clock.now();
        happens();
        cache.store_snapshot(look, before, at);
        cache.snapshot(HOUR)
    }

    #[test]
    fn a_look_outlives_work_and_knows_when_its_leases_end() {
        let cache = cache();
        assert_eq!(see(&cache, BUSY, || {}), Some(BUSY));
        assert_eq!(cache.snapshot(Duration::ZERO), None, "it is too old");
        cache.note_work();
        assert_eq!(cache.snapshot(HOUR), Some(BUSY));
        cache.note_forwarded();
        assert_eq!(
            cache.snapshot(HOUR),
            Some(ShardSnapshot { outbox: 0, ..BUSY })
        );
        cache.note_lease(HOUR);
        cache.note_lease(2 * HOUR);
        let next = |cache: &ShardCache| cache.snapshot(HOUR).and_then(|look| look.next);
        assert!(
            next(&cache).is_some_and(|next| next <= HOUR),
            "a longer lease ends later"
        );
        cache.note_lease(Duration::from_secs(60));
        assert!(next(&cache).is_some_and(|next| next <= Duration::from_secs(60)));
        cache.note_lease(Duration::ZERO);
        assert_eq!(
            cache
                .snapshot(HOUR)
                .filter(|look| look.next != Some(Duration::ZERO)),
            None,
            "a lease has ended"
        );
        assert!(see(&cache, BUSY, || {}).is_some());
        cache.note_due();
        assert_eq!(cache.snapshot(HOUR), None, "something may be due");
    }

    #[test]
    fn a_look_that_missed_something_is_not_kept() {
        let cache = cache();
        assert_eq!(see(&cache, BUSY, || cache.note_due()), None);
        assert_eq!(
            see(&cache, BUSY, || cache.note_lease(HOUR)),
            None,
            "it may not have the lease"
        );
        assert_eq!(see(&cache, BUSY, || cache.note_work()), Some(BUSY));
        let sleeps = || cache.asleep.load(Ordering::SeqCst);
        assert!(see(&cache, EMPTY, || cache.note_work()).is_none() && !sleeps());
        let happens: [fn(&Arc<ShardCache>); 3] = [
            ShardCache::note_work,
            |cache| cache.note_lease(HOUR),
            ShardCache::note_due,
        ];
        for happens in happens {
            assert!(see(&cache, EMPTY, || {}).is_some() && sleeps());
            happens(&cache);
            assert!(
                cache.snapshot(HOUR).is_none() && !sleeps(),
                "the shard is no longer empty"
            );
        }
    }

    #[test]
    fn a_shard_is_drained_for_a_moment_and_until_something_is_offered() {
        let cache = cache();
        let now = cache.clock.now();
        assert!(!cache.is_drained_at(now), "nobody has looked yet");
        cache.note_drained(cache.offers());
        assert!(cache.is_drained_at(now));
        assert!(
            !cache.is_drained_at(cache.clock.now() + KNOWN_FOR),
            "a wake may get lost"
        );
        cache.note_due();
        assert!(
            cache.is_drained_at(now),
            "a report puts nothing into the lanes"
        );
        let before = cache.offers();
        cache.note_offer();
        assert!(!cache.is_drained_at(now));
        assert!(cache.was_drained_after(before) && !cache.was_drained_after(cache.offers()));
        cache.note_drained(before);
        assert!(
            !cache.is_drained_at(now),
            "something came while the claim was under way"
        );
    }

    #[test]
    fn a_peek_is_known_until_something_is_offered_or_nobody_knows() {
        let cache = cache();
        assert_eq!(cache.priorities(), None);
        cache.note_priorities(cache.offers(), 6);
        assert_eq!(cache.priorities(), Some(6));
        cache.note_offer();
        assert_eq!(
            cache.priorities(),
            None,
            "a task of high priority may have come"
        );
        cache.note_priorities(cache.offers(), 7);
        cache.forget_priorities();
        assert_eq!(cache.priorities(), None);
    }
}
