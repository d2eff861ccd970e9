//! The order of sessions: their ids are UUIDv7s, their times by Redis's clock.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicI64, Ordering},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uuid::{Timestamp, Uuid};

use crate::model::WorkerName;

/// The waits before a takeover is told again. The connection that listens may be away for some 10
/// s.
const TOLD_AGAIN: [Duration; 3] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(25),
];

/// The takeovers that one process tells again.
const MOST_TOLD: usize = 1000;

/// The takeovers of other processes, as far as this one heard of them.
#[derive(Default)]
pub(in crate::pipelines::tasks) struct Heard {
    /// The latest time in their ids.
    latest_unix_ms: AtomicI64,
}

impl Heard {
    pub(super) fn hear(&self, session: Uuid) {
        if let Some(unix_ms) = time_of(session) {
            self.latest_unix_ms.fetch_max(unix_ms, Ordering::Relaxed);
        }
    }

    /// The id of a new session, later than `before` and than all that was heard.
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

/// A session that took over, and when it says so again.
#[derive(Clone, Copy)]
pub(super) struct TookOver {
    told: usize,
    next: Instant,
}

impl TookOver {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            told: 0,
            next: now + TOLD_AGAIN[0],
        }
    }

    /// True if it is to be told again now. Counts it as told.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.told < TOLD_AGAIN.len() && now >= self.next;
        if is_due {
            self.told += 1;
            self.next = now + TOLD_AGAIN.get(self.told).copied().unwrap_or_default();
        }
        is_due
    }
}

/// The takeovers of a process by sessions without streams, until they are told often enough.
#[derive(Default)]
pub(in crate::pipelines::tasks) struct Told(Mutex<VecDeque<(WorkerName, Uuid, TookOver)>>);

impl Told {
    pub(super) fn add(&self, worker: WorkerName, session: Uuid, now: Instant) {
        let mut told = self.0.lock();
        // The oldest one has been told more often than the others.
        if told.len() >= MOST_TOLD {
            told.pop_front();
        }
        told.push_back((worker, session, TookOver::new(now)));
    }

    /// The takeovers that are to be told again now. Counts them as told.
    pub(super) fn due(&self, now: Instant) -> Vec<(WorkerName, Uuid)> {
        let mut told = self.0.lock();
        let due = told.iter_mut().filter_map(|(worker, session, took_over)| {
            took_over.is_due(now).then(|| (worker.clone(), *session))
        });
        let due = due.collect();
        told.retain(|(.., took_over)| took_over.told < TOLD_AGAIN.len());
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
        let heard = Heard::default();
        assert_eq!(time_of(heard.next_id(None, NOW)), Some(NOW));
        assert_eq!(time_of(heard.next_id(Some(id_at(NOW - 1)), NOW)), Some(NOW));
        assert_eq!(time_of(heard.next_id(Some(id_at(NOW)), NOW)), Some(NOW + 1));
        // The clock was set back since another process told of a takeover.
        heard.hear(id_at(NOW + 3_600_000));
        heard.hear(id_at(NOW));
        assert_eq!(
            time_of(heard.next_id(Some(id_at(NOW)), NOW)),
            Some(NOW + 3_600_001)
        );
    }

    #[test]
    fn takeovers_without_streams_are_told_again_and_then_forgotten() {
        let told = Told::default();
        let now = Instant::now();
        let worker = |n: usize| WorkerName::new(&n.to_string()).unwrap();
        (0..=MOST_TOLD).for_each(|n| told.add(worker(n), id_at(NOW), now));
        assert_eq!(told.due(now), []);
        for seconds in [1, 6, 31] {
            let due = told.due(now + Duration::from_secs(seconds));
            assert_eq!(
                (due.len(), &due[0].0),
                (MOST_TOLD, &worker(1)),
                "the first one had no place"
            );
        }
        assert!(told.0.lock().is_empty());
    }

    #[test]
    fn a_takeover_is_told_again_three_times() {
        let now = Instant::now();
        let mut took_over = TookOver::new(now);
        assert!(!took_over.is_due(now));
        let at = |seconds| now + Duration::from_secs(seconds);
        let told: Vec<u64> = (0..100)
            .filter(|second| took_over.is_due(at(*second)))
            .collect();
        assert_eq!(told, [1, 6, 31]);
    }
}
