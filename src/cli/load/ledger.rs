//! What happened to each task, as this process saw it.

use std::{
    sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use taskd_client::{Ended, InsertedAs};

/// The tasks, by number. Counts only grow.
pub(super) struct Ledger {
    began: Instant,
    tasks: Vec<Entry>,
    created: AtomicU64,
    duplicates: AtomicU64,
    completed: AtomicU64,
    died: AtomicU64,
    failed: AtomicU64,
    lost: AtomicU64,
    /// Calls that failed because taskd was unavailable.
    pub(super) away: AtomicU64,
    /// Received tasks with a key that was never sent.
    pub(super) strange: AtomicU64,
}

#[derive(Default)]
struct Entry {
    /// When it was sent, in µs since the start.
    sent: AtomicU64,
    /// The time from then until its first handler started, in µs.
    waited: AtomicU32,
    created: AtomicU8,
    completed: AtomicU8,
    died: AtomicU8,
    failed: AtomicU8,
}

impl Ledger {
    pub(super) fn new(tasks: u32) -> Self {
        let tasks = (0..tasks).map(|_| Entry::default()).collect();
        let zero = AtomicU64::default;
        Self {
            began: Instant::now(),
            tasks,
            created: zero(),
            duplicates: zero(),
            completed: zero(),
            died: zero(),
            failed: zero(),
            lost: zero(),
            away: zero(),
            strange: zero(),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    pub(super) fn sent(&self, number: u32) {
        self.tasks[number as usize].sent.store(self.now(), Relaxed);
    }

    pub(super) fn inserted(&self, number: u32, status: InsertedAs) {
        match status {
            InsertedAs::Created => {
                self.created.fetch_add(1, Relaxed);
                self.tasks[number as usize].created.fetch_add(1, Relaxed);
            }
            InsertedAs::Duplicate | InsertedAs::Rejected => {
                self.duplicates.fetch_add(1, Relaxed);
            }
        }
    }

    /// Records that a handler started; returns the number of its task, or `None` if it was never
    /// sent.
    pub(super) fn started(&self, key: &str) -> Option<u32> {
        let number = key.parse().ok();
        let Some(entry) = number.and_then(|number: u32| self.tasks.get(number as usize)) else {
            self.strange.fetch_add(1, Relaxed);
            return None;
        };
        let waited = u32::try_from(self.now().saturating_sub(entry.sent.load(Relaxed)).max(1))
            .unwrap_or(u32::MAX);
        // Only the first attempt is recorded.
        entry
            .waited
            .compare_exchange(0, waited, Relaxed, Relaxed)
            .ok();
        number
    }

    /// Counts the end of an attempt, according to taskd's answer.
    pub(super) fn reported(&self, key: &str, ended: Ended, is_dead: bool) {
        let number = key.parse::<u32>().ok();
        let Some(entry) = number.and_then(|number| self.tasks.get(number as usize)) else {
            return;
        };
        let (all, one) = match ended {
            Ended::Completed => (&self.completed, &entry.completed),
            Ended::Rejected if is_dead => (&self.died, &entry.died),
            Ended::Rejected => (&self.failed, &entry.failed),
            Ended::GivenBack | Ended::Lost => {
                self.lost.fetch_add(1, Relaxed);
                return;
            }
        };
        all.fetch_add(1, Relaxed);
        one.fetch_add(1, Relaxed);
    }

    pub(super) fn created(&self) -> u64 {
        self.created.load(Relaxed)
    }

    pub(super) fn duplicates(&self) -> u64 {
        self.duplicates.load(Relaxed)
    }

    pub(super) fn completed(&self) -> u64 {
        self.completed.load(Relaxed)
    }

    pub(super) fn died(&self) -> u64 {
        self.died.load(Relaxed)
    }

    /// First attempts that failed as planned.
    pub(super) fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    /// Tasks that completed or died.
    pub(super) fn ended(&self) -> u64 {
        self.completed() + self.died()
    }

    /// The new tasks that have not ended, and the tasks that ended more than once.
    pub(super) fn wrong(&self) -> (Vec<u32>, Vec<u32>) {
        let (mut lost, mut doubled) = (Vec::new(), Vec::new());
        for (number, entry) in (0..).zip(&self.tasks) {
            let ends = entry.completed.load(Relaxed) + entry.died.load(Relaxed);
            if ends > 1 {
                doubled.push(number);
            } else if ends < entry.created.load(Relaxed) {
                lost.push(number);
            }
        }
        (lost, doubled)
    }

    /// The times from the insert call to the handler, sorted.
    pub(super) fn waits(&self) -> Vec<Duration> {
        let waits = self
            .tasks
            .iter()
            .map(|entry| entry.waited.load(Relaxed))
            .filter(|waited| *waited > 0);
        let mut waits: Vec<_> = waits
            .map(|waited| Duration::from_micros(waited.into()))
            .collect();
        waits.sort_unstable();
        waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_and_a_doubled_task_are_found() {
        let ledger = Ledger::new(4);
        (0..3).for_each(|number| ledger.inserted(number, InsertedAs::Created));
        ledger.inserted(3, InsertedAs::Duplicate);
        for (key, ended, is_dead) in [
            ("0", Ended::Completed, false),
            ("1", Ended::Rejected, false),
            ("1", Ended::Rejected, true),
        ] {
            ledger.reported(key, ended, is_dead);
        }
        assert_eq!(ledger.wrong(), (vec![2], vec![]));
        ledger.reported("0", Ended::Completed, false);
        assert_eq!(ledger.wrong(), (vec![2], vec![0]));
        assert_eq!(
            (
                ledger.created(),
                ledger.duplicates(),
                ledger.ended(),
                ledger.failed()
            ),
            (3, 1, 3, 1)
        );
        assert_eq!(ledger.started("9"), None);
        assert_eq!(ledger.strange.load(Relaxed), 1);
    }
}
