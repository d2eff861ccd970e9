//! The clock of a process: it follows the clock of Redis, and tests can move it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::watch;

use crate::model::{millis, now_unix_ms};

/// A difference above this is a step of the clock, not a slow answer.
const STEP_MS: i64 = 1000;

/// The clock of Redis, as this process follows it.
///
/// All times that one process writes and another compares come from it, so a machine with a wrong
/// clock does no harm. Between two answers of Redis it advances with this machine's monotonic
/// clock. A test may [advance](Self::advance) it, which ends waits early. Clones are the same
/// clock.
#[derive(Clone)]
pub struct Clock(Arc<Inner>);

struct Inner {
    began: Instant,
    /// The time that the clock showed at `began`.
    base_unix_ms: AtomicI64,
    steps: AtomicU64,
    /// The time that tests have skipped.
    skipped: watch::Sender<Duration>,
}

impl Clock {
    /// Returns a clock that shows this machine's time until Redis has answered for the first time.
    pub fn of_this_machine() -> Self {
        Self::begun(Instant::now(), now_unix_ms())
    }

    fn begun(began: Instant, unix_ms: i64) -> Self {
        Self(Arc::new(Inner {
            began,
            base_unix_ms: AtomicI64::new(unix_ms),
            steps: AtomicU64::default(),
            skipped: watch::Sender::new(Duration::ZERO),
        }))
    }

    /// Milliseconds since 1970.
    pub fn now_unix_ms(&self) -> i64 {
        self.at(self.now())
    }

    /// Monotonic time: this machine's, plus what tests have skipped.
    pub fn now(&self) -> Instant {
        Instant::now() + *self.0.skipped.borrow()
    }

    /// Waits for `duration` of this clock's time.
    pub async fn sleep(&self, duration: Duration) {
        let mut skipped = self.0.skipped.subscribe();
        let until = self.now() + duration;
        loop {
            let left = until.saturating_duration_since(self.now());
            tokio::select! {
                () = tokio::time::sleep(left) => return,
                changed = skipped.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Skips `duration`, for tests. Redis does not follow, so from then on scripts get the time as
    /// an argument.
    pub fn advance(&self, duration: Duration) {
        self.0.skipped.send_modify(|skipped| *skipped += duration);
    }

    /// The time that tests have skipped. Clocks that do not follow this one, such as the
    /// database's, do not include it.
    pub fn skipped(&self) -> Duration {
        *self.0.skipped.borrow()
    }

    /// The time to pass to scripts after a test has moved this clock. `None` if scripts should use
    /// the clock of Redis.
    pub fn moved_unix_ms(&self) -> Option<i64> {
        (!self.0.skipped.borrow().is_zero()).then(|| self.now_unix_ms())
    }

    /// The number of steps of the clock. A time recorded before a step may be far off after it.
    pub fn steps(&self) -> u64 {
        self.0.steps.load(Ordering::Relaxed)
    }

    /// Follows Redis, which was asked at `asked` and has just answered `unix_ms`. Returns the size
    /// of the step in milliseconds if the clock had to step.
    pub fn follow(&self, unix_ms: i64, asked: Instant) -> Option<i64> {
        let took = asked.elapsed();
        let by = unix_ms - self.at(asked + took / 2);
        // Redis read its clock at some moment between request and answer. If ours agrees with any
        // such moment, leave it, so that a slow answer does not distort it. Both clocks truncate to
        // milliseconds.
        if by.abs() <= millis(took) / 2 + 1 {
            return None;
        }
        let is_step = by.abs() > STEP_MS + millis(took);
        self.0.base_unix_ms.fetch_add(by, Ordering::Relaxed);
        if is_step {
            self.0.steps.fetch_add(1, Ordering::Relaxed);
        }
        is_step.then_some(by)
    }

    fn at(&self, instant: Instant) -> i64 {
        self.0.base_unix_ms.load(Ordering::Relaxed)
            + millis(instant.saturating_duration_since(self.0.began))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_follows_and_counts_steps_alone() {
        let clock = Clock::of_this_machine();
        let same = clock.clone();
        let asked = Instant::now();
        let now = clock.now_unix_ms();
        // This machine may stall between any two lines.
        let within = |shown: i64, least: i64| {
            (least..=least + 201 + millis(asked.elapsed())).contains(&shown)
        };
        assert_eq!(clock.follow(now + 200, asked), None);
        assert!(within(same.now_unix_ms() - now, 200));
        assert_eq!(clock.steps(), 0);

        let hour = 3_600_000;
        let by = clock.follow(now - hour, asked).unwrap();
        assert!(within(-by, hour), "{by}");
        assert!(within(same.now_unix_ms() - now + hour, 0));
        clock.follow(now, asked).unwrap();
        assert_eq!(same.steps(), 2);
    }

    #[test]
    fn an_answer_that_took_long_changes_nothing_that_it_does_not_contradict() {
        let minute = Duration::from_secs(60);
        let clock = Clock::begun(Instant::now() - minute, now_unix_ms() - millis(minute));
        let began = Instant::now();
        let asked = began - Duration::from_secs(8);
        let before = clock.now_unix_ms();
        // This machine may stall between any two lines.
        let within = |shown: i64, least: i64| {
            (least..=least + 1 + 2 * millis(began.elapsed())).contains(&shown)
        };
        assert_eq!(clock.follow(before - 8000, asked), None);
        assert_eq!(clock.follow(clock.now_unix_ms(), asked), None);
        assert!(within(clock.now_unix_ms() - before, 0));
        // The clock was at least 6 s behind.
        assert_eq!(clock.follow(clock.now_unix_ms() + 2000, asked), None);
        assert!(within(clock.now_unix_ms() - before, 6000));
        assert!(clock.follow(clock.now_unix_ms() - 60_000, asked).is_some());
    }

    #[tokio::test]
    async fn a_skipped_hour_is_not_waited_for() {
        let clock = Clock::of_this_machine();
        assert_eq!(clock.moved_unix_ms(), None);
        let before = clock.now_unix_ms();
        let began = Instant::now();
        let hour = Duration::from_secs(3600);
        tokio::join!(clock.sleep(hour), async { clock.advance(hour) });
        assert!(began.elapsed() < hour / 2);
        assert!(clock.now_unix_ms() - before >= millis(hour));
        assert!(clock.moved_unix_ms().is_some());
    }
}
