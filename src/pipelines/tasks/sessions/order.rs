//! The order of sessions, for takeovers. Session ids are UUIDv7s whose times come from Redis's clock,
//! so all processes agree which of two sessions is the later one.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicI64, Ordering},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uuid::{Timestamp, Uuid};

use crate::model::WorkerName;

/// The pauses before a takeover is announced again. A process may hear nothing for some ten seconds
/// while its connection is down.
const REPEAT_AFTER: [Duration; 3] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(25),
];

/// The most takeovers that one process announces again.
const MOST_REPEATED: usize = 1000;

/// What this process has heard of takeovers by others.
#[derive(Default)]
pub(in crate::pipelines::tasks) struct HeardTakeovers {
    /// The latest time in their ids.
    latest_unix_ms: AtomicI64,
}

impl HeardTakeovers {
    pub(super) fn hear(&self, session: Uuid) {
        if let Some(unix_ms) = time_of(session) {
            self.latest_unix_ms.fetch_max(unix_ms, Ordering::Relaxed);
        }
    }

    /// Returns the id of a new session, later than `before` and than all takeovers heard of.
    pub(super) fn next_id(&self, before: Option<Uuid>, now_unix_ms: i64) -> Uuid {
        let heard = self.latest_unix_ms.load(Ordering::Relaxed);
        let before = before.and_then(time_of).unwrap_or(0).max(heard);
        id_at(if before >= now_unix_ms {
            before + 1
        } else {
            now_unix_ms
        })
    }
}

/// When a takeover is announced again.
#[derive(Clone, Copy)]
pub(super) struct TakeoverRepeats {
    announced: usize,
    next: Instant,
}

impl TakeoverRepeats {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            announced: 0,
            next: now + REPEAT_AFTER[0],
        }
    }

    /// Returns whether the takeover is to be announced now, and counts it as announced if so.
    pub(super) fn count_if_due(&mut self, now: Instant) -> bool {
        let is_due = self.announced < REPEAT_AFTER.len() && now >= self.next;
        if is_due {
            self.announced += 1;
            self.next = now
                + REPEAT_AFTER
                    .get(self.announced)
                    .copied()
                    .unwrap_or_default();
        }
        is_due
    }
}

/// Takeovers by sessions without streams that this process announces again.
#[derive(Default)]
pub(in crate::pipelines::tasks) struct RepeatedTakeovers(
    Mutex<VecDeque<(WorkerName, Uuid, TakeoverRepeats)>>,
);

impl RepeatedTakeovers {
    pub(super) fn add(&self, worker: WorkerName, session: Uuid, now: Instant) {
        let mut announced = self.0.lock();
        // The oldest one has been announced more often than the others.
        if announced.len() >= MOST_REPEATED {
            announced.pop_front();
        }
        announced.push_back((worker, session, TakeoverRepeats::new(now)));
    }

    /// Returns the takeovers to announce now, and counts them as announced.
    pub(super) fn due(&self, now: Instant) -> Vec<(WorkerName, Uuid)> {
        let mut announced = self.0.lock();
        let due = announced
            .iter_mut()
            .filter_map(|(worker, session, took_over)| {
                took_over
                    .count_if_due(now)
                    .then(|| (worker.clone(), *session))
            });
        let due = due.collect();
        announced.retain(|(.., took_over)| took_over.announced < REPEAT_AFTER.len());
        due
    }
}

/// True if a takeover by one session ends the other.
pub(super) fn ends(takeover: Uuid, other: Uuid) -> bool {
    other < takeover
}

fn id_at(unix_ms: i64) -> Uuid {
    let ms = unix_ms.max(0).unsigned_abs();
    let nanos = u32::try_from(ms % 1000).unwrap_or(0) * 1_000_000;
    Uuid::new_v7(Timestamp::from_unix_time(ms / 1000, nanos, 0, 0))
}

fn time_of(session: Uuid) -> Option<i64> {
    let (seconds, nanos) = session
        .get_timestamp()
        .filter(|_| session.get_version_num() == 7)?
        .to_unix();
    i64::try_from(seconds * 1000 + u64::from(nanos) / 1_000_000).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_800_000_000_123;

    #[test]
    fn of_two_takeovers_one_ends_the_other() {
        let one = id_at(NOW);
        let two = id_at(NOW);
        assert!(ends(one, two) != ends(two, one), "also in one millisecond");
        let earlier = id_at(NOW);
        let later = id_at(NOW + 1);
        assert!(ends(later, earlier) && !ends(earlier, later) && !ends(later, later));
    }

    #[test]
    fn a_new_session_is_later_than_all_that_is_known() {
        let heard = HeardTakeovers::default();
        assert_eq!(time_of(heard.next_id(None, NOW)), Some(NOW));
        assert_eq!(time_of(heard.next_id(Some(id_at(NOW - 1)), NOW)), Some(NOW));
        assert_eq!(time_of(heard.next_id(Some(id_at(NOW)), NOW)), Some(NOW + 1));
        // The clock was set back after another process announced a takeover.
        heard.hear(id_at(NOW + 3_600_000));
        heard.hear(id_at(NOW));
        assert_eq!(
            time_of(heard.next_id(Some(id_at(NOW)), NOW)),
            Some(NOW + 3_600_001)
        );
    }

    #[test]
    fn takeovers_without_streams_are_told_again_and_then_forgotten() {
        let announced = RepeatedTakeovers::default();
        let now = Instant::now();
        let worker = |n: usize| WorkerName::new(&n.to_string()).unwrap();
        (0..=MOST_REPEATED).for_each(|n| announced.add(worker(n), id_at(NOW), now));
        assert_eq!(announced.due(now), []);
        for seconds in [1, 6, 31] {
            let due = announced.due(now + Duration::from_secs(seconds));
            assert_eq!(
                (due.len(), &due[0].0),
                (MOST_REPEATED, &worker(1)),
                "the first one had no place"
            );
        }
        assert!(announced.0.lock().is_empty());
    }

    #[test]
    fn a_takeover_is_told_again_three_times() {
        let now = Instant::now();
        let mut took_over = TakeoverRepeats::new(now);
        assert!(!took_over.count_if_due(now));
        let at = |seconds| now + Duration::from_secs(seconds);
        let announced: Vec<u64> = (0..100)
            .filter(|second| took_over.count_if_due(at(*second)))
            .collect();
        assert_eq!(announced, [1, 6, 31]);
    }
}
