//! The events of a queue, kept once for all of its watchers.
//!
//! Each watcher has a position in the ring. An event is held for [`HOLD`] before watchers see it,
//! because an earlier event of another process may arrive later; so all watchers see the same
//! order.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

use crate::{
    model::{EventId, TaskEvent, TaskId, TaskStatus, Watched},
    telemetry::metrics,
};

/// How long an event is held, at least, for earlier ones that arrive later.
pub(super) const HOLD: Duration = Duration::from_millis(50);
/// The most events of one queue to keep, with those that are held. A watcher whose next event has
/// been dropped is too slow.
pub(super) const ROOM: usize = 10_000;
/// The most events of all queues, some 60 bytes each. Above it, each queue keeps an equal share.
const ROOM_OF_ALL: usize = 500_000;
/// Among this many last events, one that arrives twice is recognized.
const KNOWN: usize = 1_000;
/// How many events a watcher takes at a time. The others stay here, where all watchers share them.
const AT_ONCE: usize = 32;

/// A watcher's next event was dropped before the watcher read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooSlow;

/// The events in all rings of a process.
#[derive(Default)]
pub(super) struct Total {
    rings: AtomicUsize,
    events: AtomicUsize,
}

impl Total {
    pub(super) fn is_crowded(&self) -> bool {
        self.events.load(Ordering::Relaxed) >= ROOM_OF_ALL
    }

    #[cfg(test)]
    pub(super) fn events(&self) -> usize {
        self.events.load(Ordering::Relaxed)
    }

    fn share(&self) -> usize {
        (ROOM_OF_ALL / self.rings.load(Ordering::Relaxed).max(1)).clamp(1, ROOM)
    }

    fn room(&self) -> usize {
        if self.is_crowded() {
            self.share()
        } else {
            ROOM
        }
    }
}

/// A watcher's position in a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// The index of the next event or gap (a *word* in code).
    next: u64,
    /// The first event that counts, by arrival: those that arrived before the watcher do not.
    from: u64,
}

/// What there is at a position, or when to read again.
#[derive(Debug)]
pub(super) enum Found {
    Words(Vec<Watched>),
    /// There is nothing before this time.
    NotBefore(Instant),
    Nothing,
}

enum Word {
    /// An event, and the number of its arrival.
    Event(TaskEvent, u64),
    Gap,
}

/// An event that waits for earlier ones.
struct HeldEvent {
    event: TaskEvent,
    arrival: u64,
    since: Instant,
}

/// The last events, and the latest of each of their tasks.
#[derive(Default)]
struct RecentEvents {
    events: VecDeque<(TaskId, TaskStatus, i64)>,
    last: HashMap<TaskId, Last>,
}

struct Last {
    status: TaskStatus,
    at_unix_ms: i64,
    is_told: bool,
}

impl Last {
    fn is(&self, status: TaskStatus, at_unix_ms: i64) -> bool {
        self.status == status && self.at_unix_ms == at_unix_ms
    }
}

impl RecentEvents {
    /// Returns whether the event is known, or is a step back: from the end of its task, or from a
    /// later status that watchers have been told. An event that is still held is no reason: they
    /// will be put in order.
    fn has(&self, event: &TaskEvent) -> bool {
        self.last.get(&event.id).is_some_and(|last| {
            let is_passed = last.is_told && event.status.rank() < last.status.rank();
            let is_back =
                (last.status.is_final() || is_passed) && event.at_unix_ms <= last.at_unix_ms;
            event.status == last.status || is_back
        })
    }

    fn note(&mut self, event: &TaskEvent) {
        self.keep(KNOWN - 1);
        let TaskEvent {
            id,
            status,
            at_unix_ms,
            ..
        } = *event;
        // If the last event is still held and later in the order, it stays the last.
        let is_before =
            |last: &Last| !last.is_told && event.order() < (last.at_unix_ms, last.status.rank());
        if !self.last.get(&id).is_some_and(is_before) {
            self.last.insert(
                id,
                Last {
                    status,
                    at_unix_ms,
                    is_told: false,
                },
            );
        }
        self.events.push_back((id, status, at_unix_ms));
    }

    fn note_told(&mut self, event: &TaskEvent) {
        if let Some(last) = self.last.get_mut(&event.id)
            && last.is(event.status, event.at_unix_ms)
        {
            last.is_told = true;
        }
    }

    fn keep(&mut self, count: usize) {
        while self.events.len() > count
            && let Some((id, status, at)) = self.events.pop_front()
        {
            if self.last.get(&id).is_some_and(|last| last.is(status, at)) {
                self.last.remove(&id);
            }
        }
    }
}

#[derive(Default)]
struct State {
    told: VecDeque<Word>,
    /// The position of the first of them.
    first: u64,
    held: Vec<HeldEvent>,
    /// When the first of these have waited for long enough, if there are any.
    hear_at: Option<Instant>,
    /// The number of the next arrival.
    arrival: u64,
    /// The position after the last gap. Nobody resumes after an event that arrived before it.
    behind_gap: Place,
    known: RecentEvents,
}

impl State {
    fn len(&self) -> usize {
        self.told.len() + self.held.len()
    }

    fn end(&self) -> Place {
        Place {
            next: self.first + self.told.len() as u64,
            from: self.arrival,
        }
    }

    fn keep(&mut self, count: usize) {
        let more = self.told.len().saturating_sub(count);
        self.told.drain(..more);
        self.first += more as u64;
    }

    /// Tells the watchers what was held up to this point in the order, sorted.
    fn release(&mut self, upto: Option<(i64, u8)>) {
        self.held.sort_by_key(|held| held.event.order());
        let count = self
            .held
            .partition_point(|held| Some(held.event.order()) <= upto);
        for HeldEvent { event, arrival, .. } in self.held.drain(..count) {
            self.known.note_told(&event);
            self.told.push_back(Word::Event(event, arrival));
        }
    }

    /// Tells the watchers what has waited for [`HOLD`], and what arrived since and belongs before
    /// it.
    fn hear(&mut self, now: Instant) {
        if self.hear_at.is_some_and(|at| at <= now) {
            let have_waited = self.held.iter().filter(|held| held.since + HOLD <= now);
            let upto = have_waited.map(|held| held.event.order()).max();
            self.release(upto);
            self.hear_at = (!self.held.is_empty()).then(|| now + HOLD);
        }
    }

    fn hold(&mut self, event: TaskEvent, room: usize, now: Instant) {
        if self.held.len() >= room {
            // If too many are held, tell the earlier half without waiting.
            self.held.sort_by_key(|held| held.event.order());
            let middle = self
                .held
                .get(self.held.len() / 2)
                .map(|held| held.event.order());
            self.release(middle);
        }
        self.known.note(&event);
        self.held.push(HeldEvent {
            event,
            arrival: self.arrival,
            since: now,
        });
        self.arrival += 1;
        self.hear_at.get_or_insert(now + HOLD);
    }
}

pub(super) struct Ring {
    state: Mutex<State>,
    wake: Notify,
    total: Arc<Total>,
}

impl Ring {
    pub(super) fn new(total: Arc<Total>) -> Self {
        total.rings.fetch_add(1, Ordering::Relaxed);
        Self {
            state: Mutex::default(),
            wake: Notify::new(),
            total,
        }
    }

    /// Changes the state, and counts its events.
    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let before = state.len();
        let answer = change(&mut state);
        let after = state.len();
        if after >= before {
            self.total
                .events
                .fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.total
                .events
                .fetch_sub(before - after, Ordering::Relaxed);
        }
        answer
    }

    /// Adds events. Costs the same for any number of watchers, except that they have to be woken.
    pub(super) fn tell(&self, events: Vec<TaskEvent>, now: Instant) {
        let room = self.total.room();
        let is_new = self.with(|state| {
            // Move on what was held for long enough, even if no watcher reads.
            state.hear(now);
            let were_held = !state.held.is_empty();
            for event in events {
                if !state.known.has(&event) {
                    state.hold(event, room, now);
                }
            }
            state.keep(room);
            !were_held && !state.held.is_empty()
        });
        // Watchers that have read since then know the time at which to read again.
        if is_new {
            self.wake.notify_waiters();
        }
    }

    /// Adds a gap: events before this may be missing.
    pub(super) fn gap(&self) {
        let room = self.total.room();
        self.with(|state| {
            state.told.push_back(Word::Gap);
            state.keep(room);
            state.behind_gap = state.end();
            state.known = RecentEvents::default();
        });
        self.wake.notify_waiters();
    }

    /// Frees memory if all rings together have too much.
    pub(super) fn shrink(&self) {
        let share = self.total.share() / 2;
        self.with(|state| {
            state.keep(share);
            state.told.shrink_to(share);
            state.held.shrink_to(share);
            state.known.keep(share);
            state.known.events.shrink_to(share);
            state.known.last.shrink_to(share);
        });
    }

    /// The position of a watcher that registers now.
    pub(super) fn end(&self) -> Place {
        self.state.lock().end()
    }

    pub(super) fn behind_gap(&self) -> Place {
        self.state.lock().behind_gap
    }

    /// Returns the position after an event, if the ring has it.
    pub(super) fn behind(&self, last: &EventId) -> Option<Place> {
        let state = self.state.lock();
        let counts = |event: &TaskEvent, arrival: u64| {
            arrival >= state.behind_gap.from && event.event_id() == *last
        };
        let place = state.told.iter().position(|word| match word {
            Word::Event(event, arrival) => counts(event, *arrival),
            Word::Gap => false,
        });
        if let Some(place) = place {
            return Some(Place {
                next: state.first + place as u64 + 1,
                from: 0,
            });
        }
        // The event is still held here, but another process has already told it.
        let held = state
            .held
            .iter()
            .find(|held| counts(&held.event, held.arrival))?;
        Some(Place {
            from: held.arrival + 1,
            ..state.end()
        })
    }

    /// Takes the next events and gaps at a position.
    pub(super) fn read(&self, place: &mut Place, now: Instant) -> Result<Found, TooSlow> {
        self.with(|state| {
            state.hear(now);
            state.keep(ROOM);
            let Some(skip) = place.next.checked_sub(state.first) else {
                metrics::events_dropped(
                    usize::try_from(state.first - place.next).unwrap_or(usize::MAX),
                );
                return Err(TooSlow);
            };
            let mut words = Vec::new();
            for word in state
                .told
                .iter()
                .skip(usize::try_from(skip).unwrap_or(usize::MAX))
            {
                if words.len() >= AT_ONCE {
                    break;
                }
                place.next += 1;
                match word {
                    Word::Event(event, arrival) if *arrival >= place.from => {
                        words.push(Watched::Event(event.clone()))
                    }
                    Word::Event(..) => {}
                    Word::Gap => words.push(Watched::Gap),
                }
            }
            Ok(match (words.is_empty(), state.hear_at) {
                (false, _) => Found::Words(words),
                (true, Some(at)) => Found::NotBefore(at),
                (true, None) => Found::Nothing,
            })
        })
    }

    /// Waits for the next events and gaps at a position. Cancel safe.
    pub(super) async fn next(&self, place: &mut Place) -> Result<Vec<Watched>, TooSlow> {
        loop {
            // Registered before reading, so that nothing that comes after is missed.
            let woken = self.wake.notified();
            match self.read(place, Instant::now())? {
                Found::Words(words) => return Ok(words),
                Found::Nothing => woken.await,
                Found::NotBefore(at) => {
                    tokio::select! {
                        () = woken => {}
                        () = tokio::time::sleep_until(at) => {}
                    }
                }
            }
        }
    }

    /// Waits until `is_true` returns true. Checks it whenever the ring wakes its watchers, as each
    /// gap does.
    pub(super) async fn until(&self, is_true: impl Fn() -> bool) {
        loop {
            let woken = self.wake.notified();
            if is_true() {
                return;
            }
            woken.await;
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.with(|state| *state = State::default());
        self.total.rings.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
