//! Notes of this process on its shards: the last look, and the deliveries to report.
//!
//! The loops look at shards that are not empty or have just changed, and at times at the others.

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

use super::look::Look;
use crate::{model::ShardId, runtime::Clock};

/// Grants whose delivery is reported in one call, at most.
const DELIVERIES_AT_ONCE: usize = 1000;
/// Deliveries remembered while Redis does not answer. If the leases of the others run out, they
/// cost nothing.
const DELIVERIES_MAX: usize = 100_000;
/// How long it counts what a call found in the lanes. Where a wake gets lost, tasks wait so long in
/// a shard that was empty, and a more urgent one behind others.
const KNOWN_FOR: Duration = Duration::from_secs(1);

/// Notes of this process on one shard.
pub(super) struct Notes {
    pub(super) id: ShardId,
    clock: Clock,
    awake: Arc<Awake>,
    /// The shard was empty at the last look, and nothing has happened since.
    asleep: AtomicBool,
    delivered: Mutex<Vec<u64>>,
    notify: Arc<Notify>,
    /// Counts what happened in the shard, as far as this process knows.
    happened: AtomicU64,
    /// Counts what of it may have made something due sooner.
    hurried: AtomicU64,
    /// The last look, unless something may have become due since.
    seen: Mutex<Option<Seen>>,
    /// Counts what may have put elements into the lanes, as far as this process knows.
    offers: AtomicU64,
    /// A claim that left no element.
    drained: Mutex<Option<Known<()>>>,
    /// The priorities that had elements at the last peek, or behind the last claim, as a peek's
    /// sum.
    peeked: Mutex<Option<Known<u8>>>,
}

/// An answer of Redis about the lanes.
#[derive(Clone, Copy, Debug)]
struct Known<T> {
    what: T,
    /// The offers before the call.
    offers: u64,
    at: Instant,
}

impl<T: Copy> Known<T> {
    /// It, unless it is too old or something has come since.
    fn still(self, offers: u64, now: Instant) -> Option<T> {
        let is_recent = now.saturating_duration_since(self.at) < KNOWN_FOR;
        (self.offers == offers && is_recent).then_some(self.what)
    }
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    look: Look,
    at: Instant,
}

/// The counts of a shard before a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Before {
    happened: u64,
    hurried: u64,
}

impl Notes {
    /// `delivered` is notified when there are deliveries to report.
    pub(super) fn new(
        id: &ShardId,
        clock: &Clock,
        awake: &Arc<Awake>,
        delivered: &Arc<Notify>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id: id.clone(),
            clock: clock.clone(),
            awake: Arc::clone(awake),
            asleep: AtomicBool::new(false),
            delivered: Mutex::default(),
            notify: Arc::clone(delivered),
            happened: AtomicU64::new(0),
            hurried: AtomicU64::new(0),
            seen: Mutex::default(),
            offers: AtomicU64::new(0),
            drained: Mutex::default(),
            peeked: Mutex::default(),
        })
    }

    /// Notes that something happened that the next look must see: something may be due now, or
    /// sooner than before.
    pub(super) fn touch(self: &Arc<Self>) {
        self.hurry(|_| None);
    }

    /// Notes a claim or an extension. The shortest of its leases ends `lease` from now.
    pub(super) fn leased(self: &Arc<Self>, lease: Duration) {
        let now = self.clock.now();
        self.hurry(|Seen { mut look, at }| {
            let ends = now.saturating_duration_since(at) + lease;
            look.next = Some(look.next.map_or(ends, |next| next.min(ends)));
            Some(Seen { look, at })
        });
    }

    /// Notes work that makes nothing due sooner: the last look will do, unless it found the shard
    /// empty.
    pub(super) fn work(self: &Arc<Self>) {
        self.note(Some);
    }

    /// Notes that the outbox was empty.
    pub(super) fn forwarded(self: &Arc<Self>) {
        self.note(|Seen { look, at }| {
            Some(Seen {
                look: Look { outbox: 0, ..look },
                at,
            })
        });
    }

    fn hurry(self: &Arc<Self>, change: impl FnOnce(Seen) -> Option<Seen>) {
        self.hurried.fetch_add(1, Ordering::SeqCst);
        self.note(change);
    }

    /// Notes that something happened, and changes the last look. Either this sees that the shard
    /// sleeps, or [`Self::saw`] sees the count.
    fn note(self: &Arc<Self>, change: impl FnOnce(Seen) -> Option<Seen>) {
        self.happened.fetch_add(1, Ordering::SeqCst);
        {
            let mut seen = self.seen.lock();
            *seen = seen.filter(|seen| !seen.look.is_idle).and_then(change);
        }
        if self.get_up() {
            self.awake.wake(self);
        }
    }

    /// Ends the sleep of the shard; whether it slept.
    pub(super) fn get_up(&self) -> bool {
        self.asleep.swap(false, Ordering::SeqCst)
    }

    /// The last look, if it was taken within `max_age`, nothing may have become due since, and no
    /// lease or delay of it has ended.
    pub(super) fn seen(&self, max_age: Duration) -> Option<Look> {
        let Seen { mut look, at } = (*self.seen.lock())?;
        let age = self.clock.now().saturating_duration_since(at);
        if age >= max_age {
            return None;
        }
        if let Some(next) = look.next {
            look.next = Some(next.checked_sub(age)?);
        }
        Some(look)
    }

    /// The moment before a look; goes with that look into [`Self::saw`].
    pub(super) fn before(&self) -> Before {
        Before {
            happened: self.happened.load(Ordering::SeqCst),
            hurried: self.hurried.load(Ordering::SeqCst),
        }
    }

    /// Keeps a look, unless it may have missed something. `at`: the time before it, at the latest.
    pub(super) fn saw(self: &Arc<Self>, look: Look, before: Before, at: Instant) {
        {
            let mut seen = self.seen.lock();
            let now = self.before();
            let is_whole = if look.is_idle {
                before == now
            } else {
                before.hurried == now.hurried
            };
            *seen = is_whole.then_some(Seen { look, at });
        }
        if look.is_idle {
            self.awake.lay_down(self, self.clock.now());
            self.asleep.store(true, Ordering::SeqCst);
            if before != self.before() && self.get_up() {
                self.awake.wake(self);
            }
        }
    }

    /// Notes that elements may have come, or that nobody knows: a call has failed.
    pub(super) fn offer(&self) {
        self.offers.fetch_add(1, Ordering::SeqCst);
    }

    /// The offers before a claim; go with its answer into [`Self::drained`].
    pub(super) fn offers(&self) -> u64 {
        self.offers.load(Ordering::SeqCst)
    }

    /// A claim left no element. The next caller that does not trust this peeks.
    pub(super) fn drained(&self, offers: u64) {
        *self.drained.lock() = Some(Known {
            what: (),
            offers,
            at: self.clock.now(),
        });
        self.forget_peek();
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

    /// A peek found these priorities, or a claim left them.
    pub(super) fn peeked(&self, offers: u64, priorities: u8) {
        *self.peeked.lock() = Some(Known {
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

    /// Nobody knows what the shard has now, so the next caller peeks.
    pub(super) fn forget_peek(&self) {
        *self.peeked.lock() = None;
    }

    /// The tasks of the grant have reached their worker.
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

/// How long an empty shard is left out, unless a wake or a call of this process touches it. A wake
/// may get lost.
const SLEEPS_FOR: Duration = Duration::from_secs(30);

/// A process's shards by whether its loops look at them, so that ten thousand empty ones cost next
/// to nothing.
#[derive(Default)]
pub(super) struct Awake(Mutex<Lists>);

#[derive(Default)]
struct Lists {
    /// By address: a shard that was closed may come again in another generation.
    awake: HashMap<usize, Arc<Notes>>,
    /// In order of time. A shard that was touched since is awake too.
    asleep: VecDeque<(Instant, Arc<Notes>)>,
}

fn address(notes: &Arc<Notes>) -> usize {
    Arc::as_ptr(notes).addr()
}

impl Awake {
    fn lock(&self) -> MutexGuard<'_, Lists> {
        self.0.lock()
    }

    pub(super) fn wake(&self, notes: &Arc<Notes>) {
        self.lock().awake.insert(address(notes), Arc::clone(notes));
    }

    pub(super) fn lay_down(&self, notes: &Arc<Notes>, now: Instant) {
        let mut lists = self.lock();
        lists.awake.remove(&address(notes));
        lists
            .asleep
            .push_back((now + SLEEPS_FOR, Arc::clone(notes)));
    }

    /// The shards to look at now. Forgets those that are no longer `known`.
    pub(super) fn list(
        &self,
        now: Instant,
        known: impl Fn(&Arc<Notes>) -> bool,
    ) -> Vec<Arc<Notes>> {
        let mut lists = self.lock();
        while let Some((_, notes)) = lists.asleep.pop_front_if(|(until, _)| *until <= now) {
            if notes.get_up() {
                lists.awake.insert(address(&notes), notes);
            }
        }
        lists.awake.retain(|_, notes| known(notes));
        lists.awake.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::QueueName;

    fn notes() -> Arc<Notes> {
        let id = ShardId {
            queue: QueueName::new("q").unwrap(),
            number: 0,
        };
        Notes::new(
            &id,
            &Clock::of_this_machine(),
            &Arc::default(),
            &Arc::default(),
        )
    }

    const HOUR: Duration = Duration::from_secs(3600);
    const BUSY: Look = Look {
        is_idle: false,
        next: None,
        outbox: 1,
        ..EMPTY
    };
    const EMPTY: Look = Look {
        is_idle: true,
        expires: false,
        promotes: false,
        next: None,
        spent: 0,
        pointers: 0,
        outbox: 0,
        settles: false,
        open: 0,
    };

    /// Keeps a look during which something happens.
    fn see(notes: &Arc<Notes>, look: Look, happens: impl FnOnce()) -> Option<Look> {
        let before = notes.before();
        let at = notes.clock.now();
        happens();
        notes.saw(look, before, at);
        notes.seen(HOUR)
    }

    #[test]
    fn a_look_outlives_work_and_knows_when_its_leases_end() {
        let notes = notes();
        assert_eq!(see(&notes, BUSY, || {}), Some(BUSY));
        assert_eq!(notes.seen(Duration::ZERO), None, "it is too old");
        notes.work();
        assert_eq!(notes.seen(HOUR), Some(BUSY));
        notes.forwarded();
        assert_eq!(notes.seen(HOUR), Some(Look { outbox: 0, ..BUSY }));
        notes.leased(HOUR);
        notes.leased(2 * HOUR);
        let next = |notes: &Notes| notes.seen(HOUR).and_then(|look| look.next);
        assert!(
            next(&notes).is_some_and(|next| next <= HOUR),
            "a longer lease ends later"
        );
        notes.leased(Duration::from_secs(60));
        assert!(next(&notes).is_some_and(|next| next <= Duration::from_secs(60)));
        notes.leased(Duration::ZERO);
        assert_eq!(
            notes
                .seen(HOUR)
                .filter(|look| look.next != Some(Duration::ZERO)),
            None,
            "a lease has ended"
        );
        assert!(see(&notes, BUSY, || {}).is_some());
        notes.touch();
        assert_eq!(notes.seen(HOUR), None, "something may be due");
    }

    #[test]
    fn a_look_that_missed_something_is_not_kept() {
        let notes = notes();
        assert_eq!(see(&notes, BUSY, || notes.touch()), None);
        assert_eq!(
            see(&notes, BUSY, || notes.leased(HOUR)),
            None,
            "it may not have the lease"
        );
        assert_eq!(see(&notes, BUSY, || notes.work()), Some(BUSY));
        let sleeps = || notes.asleep.load(Ordering::SeqCst);
        assert!(see(&notes, EMPTY, || notes.work()).is_none() && !sleeps());
        let happens: [fn(&Arc<Notes>); 3] = [Notes::work, |notes| notes.leased(HOUR), Notes::touch];
        for happens in happens {
            assert!(see(&notes, EMPTY, || {}).is_some() && sleeps());
            happens(&notes);
            assert!(
                notes.seen(HOUR).is_none() && !sleeps(),
                "the shard is no longer empty"
            );
        }
    }

    #[test]
    fn a_shard_is_drained_for_a_moment_and_until_something_is_offered() {
        let notes = notes();
        let now = notes.clock.now();
        assert!(!notes.is_drained_at(now), "nobody has looked yet");
        notes.drained(notes.offers());
        assert!(notes.is_drained_at(now));
        assert!(
            !notes.is_drained_at(notes.clock.now() + KNOWN_FOR),
            "a wake may get lost"
        );
        notes.touch();
        assert!(
            notes.is_drained_at(now),
            "a report puts nothing into the lanes"
        );
        let before = notes.offers();
        notes.offer();
        assert!(!notes.is_drained_at(now));
        assert!(notes.was_drained_after(before) && !notes.was_drained_after(notes.offers()));
        notes.drained(before);
        assert!(
            !notes.is_drained_at(now),
            "something came while the claim was under way"
        );
    }

    #[test]
    fn a_peek_is_known_until_something_is_offered_or_nobody_knows() {
        let notes = notes();
        assert_eq!(notes.priorities(), None);
        notes.peeked(notes.offers(), 6);
        assert_eq!(notes.priorities(), Some(6));
        notes.offer();
        assert_eq!(
            notes.priorities(),
            None,
            "a task of high priority may have come"
        );
        notes.peeked(notes.offers(), 7);
        notes.forget_peek();
        assert_eq!(notes.priorities(), None);
    }
}
