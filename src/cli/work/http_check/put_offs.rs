//! Counts how often a host has put off the check of a task.

use std::{
    collections::HashMap,
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The longest delay that a server can ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);
/// The shortest delay, used if a server asks for none.
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
/// How often a check is put off for as long as the host asks. After that, the minimum delay doubles
/// each time.
const AS_ASKED: u32 = 5;
/// How often a check is put off at most: together about five hours, if the host asks for seconds.
/// After that, an answer that asks to wait fails the attempt.
const MOST_TIMES: u32 = 20;
/// The tasks per generation. This process remembers two generations.
const MOST_TASKS: usize = 50_000;

/// How often this process has put off the check of each task.
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
    /// Counts that the task's host asked for this delay, and returns how long to put the check off;
    /// `None` if it was already put off too often.
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

    /// Forgets a task that has got its answer.
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

/// The delay after a failed attempt.
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
