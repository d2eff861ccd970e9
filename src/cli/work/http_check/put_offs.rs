//! How often a host has put off the check of a task.

use std::{
    collections::HashMap,
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The longest wait that a server may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);
/// A host that asks for no wait is not asked again at once.
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
/// How often a check is put off as the host asks. Then each wait is at least twice as long as the
/// one before it.
const AS_ASKED: u32 = 5;
/// How often a check is put off at all: together about five hours if the host asks for seconds.
/// Then an answer that asks to wait is a failed attempt.
const MOST_TIMES: u32 = 20;
/// The tasks of a generation. This process remembers two.
const MOST_TASKS: usize = 50_000;

/// The checks that were put off by this process, and how often.
#[derive(Default)]
pub(super) struct PutOffs {
    generations: Mutex<Generations>,
}

#[derive(Default)]
struct Generations {
    newer: HashMap<String, u32>,
    older: HashMap<String, u32>,
}

impl PutOffs {
    /// Counts that the host of the task asks for this wait, and returns how long the check is put
    /// off. `None`: it was put off too often.
    pub(super) fn next(&self, id: &str, asked: Duration) -> Option<Duration> {
        let mut generations = self.generations();
        let times = generations.times(id);
        if times >= MOST_TIMES {
            return None;
        }
        generations.set(id, times + 1);
        let least = match times.checked_sub(AS_ASKED) {
            None => SHORTEST_WAIT,
            Some(doublings) => SHORTEST_WAIT * (2 << doublings),
        };
        Some(asked.max(least).min(LONGEST_WAIT))
    }

    /// Forgets a task that has its answer.
    pub(super) fn forget(&self, id: &str) {
        let mut generations = self.generations();
        generations.newer.remove(id);
        generations.older.remove(id);
    }

    fn generations(&self) -> MutexGuard<'_, Generations> {
        self.generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Generations {
    fn times(&self, id: &str) -> u32 {
        let known = self.newer.get(id).or_else(|| self.older.get(id));
        known.copied().unwrap_or_default()
    }

    fn set(&mut self, id: &str, times: u32) {
        if self.newer.len() >= MOST_TASKS && !self.newer.contains_key(id) {
            self.older = mem::take(&mut self.newer);
        }
        self.newer.insert(id.to_owned(), times);
    }
}

/// The wait of a check that counts as a failure.
pub(super) fn within_bounds(asked: Duration) -> Duration {
    asked.clamp(SHORTEST_WAIT, LONGEST_WAIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_is_put_off_as_asked_then_longer_and_not_for_ever() {
        let put_offs = PutOffs::default();
        let mut waits = Vec::new();
        while let Some(wait) = put_offs.next("a", Duration::from_secs(1)) {
            waits.push(wait.as_secs());
        }
        let want = [
            1, 1, 1, 1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3600, 3600, 3600, 3600,
        ];
        assert_eq!(waits, want);
        assert_eq!(put_offs.next("b", Duration::ZERO), Some(SHORTEST_WAIT));
        assert_eq!(
            put_offs.next("c", Duration::from_secs(90)),
            Some(Duration::from_secs(90))
        );
        assert_eq!(put_offs.next("d", Duration::MAX), Some(LONGEST_WAIT));
        put_offs.forget("a");
        assert_eq!(put_offs.next("a", Duration::ZERO), Some(SHORTEST_WAIT));
    }

    #[test]
    fn a_bounded_number_of_tasks_is_remembered() {
        let put_offs = PutOffs::default();
        for number in 0..3 * MOST_TASKS {
            put_offs.next(&number.to_string(), Duration::ZERO);
        }
        let generations = put_offs.generations();
        assert_eq!(
            (generations.newer.len(), generations.older.len()),
            (MOST_TASKS, MOST_TASKS)
        );
    }
}
