//! The clock of the whole installation: Redis's, as each process follows it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::now_unix_ms;

/// A time that differs by more from what was expected is a step, not a slow answer.
const STEP_MS: i64 = 1000;
/// An answer that took longer says too little about when it was right.
const PROMPT: Duration = Duration::from_millis(500);

/// Redis's clock. Whatever one process writes and another compares with a time goes by it, so that a machine with a
/// wrong clock does no harm. Between two answers of Redis time passes by this machine's monotonic clock, which nobody
/// sets. Clones are the same clock.
#[derive(Clone)]
pub struct Clock(Arc<Inner>);

struct Inner {
    began: Instant,
    /// The time that the clock showed at `began`.
    base_unix_ms: AtomicI64,
    steps: AtomicU64,
}

impl Clock {
    /// One that goes as this machine's until it is told another time.
    pub fn of_this_machine() -> Self {
        Self(Arc::new(Inner {
            began: Instant::now(),
            base_unix_ms: AtomicI64::new(now_unix_ms()),
            steps: AtomicU64::default(),
        }))
    }

    /// Milliseconds since 1970.
    pub fn now_unix_ms(&self) -> i64 {
        self.at(Instant::now())
    }

    /// How often it has stepped: what was due by the time before may be far away by the time now.
    pub fn steps(&self) -> u64 {
        self.0.steps.load(Ordering::Relaxed)
    }

    /// Redis, asked at `asked`, has just answered `unix_ms`. By how many milliseconds the clock has stepped, if it has.
    pub fn follow(&self, unix_ms: i64, asked: Instant) -> Option<i64> {
        let took = asked.elapsed();
        let by = unix_ms - self.at(asked + took / 2);
        let is_step = by.abs() > STEP_MS + ms(took);
        if took > PROMPT && !is_step {
            return None;
        }
        self.0.base_unix_ms.fetch_add(by, Ordering::Relaxed);
        if is_step {
            self.0.steps.fetch_add(1, Ordering::Relaxed);
        }
        is_step.then_some(by)
    }

    fn at(&self, instant: Instant) -> i64 {
        self.0.base_unix_ms.load(Ordering::Relaxed) + ms(instant.saturating_duration_since(self.0.began))
    }
}

fn ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_follows_and_counts_steps_alone() {
        let clock = Clock::of_this_machine();
        let same = clock.clone();
        let now = clock.now_unix_ms();
        assert_eq!(clock.follow(now + 200, Instant::now()), None);
        assert!((200..1000).contains(&(same.now_unix_ms() - now)));
        assert_eq!(clock.steps(), 0);

        let hour = 3_600_000;
        let by = clock.follow(now - hour, Instant::now()).unwrap();
        assert!((-hour - 1000..=-hour).contains(&by), "{by}");
        assert!((0..1000).contains(&(same.now_unix_ms() - now + hour)));
        clock.follow(now, Instant::now()).unwrap();
        assert_eq!(same.steps(), 2);
    }

    #[test]
    fn an_answer_that_took_long_is_no_step() {
        let clock = Clock::of_this_machine();
        let asked = Instant::now() - Duration::from_secs(8);
        assert_eq!(clock.follow(clock.now_unix_ms() - 8000, asked), None);
        assert_eq!(clock.follow(clock.now_unix_ms(), asked), None);
        assert!(clock.follow(clock.now_unix_ms() - 60_000, asked).is_some());
    }
}
