//! The tasks of a load, numbered from 0, and which of them are duplicates, fail or are slow.

use std::time::Duration;

use anyhow::ensure;
use bytes::Bytes;
use taskd_client::NewTask;

use super::args::Load;

/// Shares are in tenths of a percent: a run of this many tasks matches them exactly.
const WHOLE: u32 = 1000;
/// Spreads neighbouring numbers; must be coprime to `WHOLE`.
const STRIDE: u32 = 387;
const MOST_TASKS: u64 = 50_000_000;
/// The limits of one insert: tasks, and bytes of payload.
const MOST_AT_ONCE: usize = 5000;
const MOST_BYTES_AT_ONCE: usize = 16 << 20;

pub(super) struct Plan {
    count: u32,
    rate: u32,
    duplicates: u32,
    failing: u32,
    dying: u32,
    slow: u32,
    pub(super) slow_time: Duration,
    /// Shared by all tasks.
    payload: Bytes,
}

/// What is planned to happen to a new task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    /// Its first attempt fails.
    Failing,
    Dying,
    Slow,
}

impl Plan {
    pub(super) fn new(args: &Load) -> anyhow::Result<Self> {
        let count = (f64::from(args.rate) * args.duration.0.as_secs_f64()).ceil() as u64;
        ensure!(
            (1..=MOST_TASKS).contains(&count),
            "--rate and --duration make {count} tasks; 1 to {MOST_TASKS} are possible"
        );
        let kinds = args.failing + args.dying + args.slow;
        ensure!(
            kinds <= WHOLE,
            "--failing, --dying and --slow are more than 100% together"
        );
        ensure!(args.duplicates < WHOLE, "--duplicates leaves no new task");
        Ok(Self {
            count: u32::try_from(count)?,
            rate: args.rate,
            duplicates: args.duplicates,
            failing: args.failing,
            dying: args.dying,
            slow: args.slow,
            slow_time: args.slow_time.0,
            payload: vec![b'x'; usize::try_from(args.payload.0)?].into(),
        })
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// How many tasks should have been sent by now.
    pub(super) fn due(&self, elapsed: Duration) -> u32 {
        let due = elapsed.as_secs_f64() * f64::from(self.rate) + 1.0;
        // The cast saturates.
        (due as u32).min(self.count)
    }

    /// The end of the range for an insert that begins with task `next`.
    pub(super) fn end_of_call(&self, next: u32, elapsed: Duration) -> u32 {
        let most = (MOST_BYTES_AT_ONCE / self.payload.len().max(1)).clamp(1, MOST_AT_ONCE);
        self.due(elapsed)
            .min(next.saturating_add(u32::try_from(most).unwrap_or(u32::MAX)))
    }

    pub(super) fn is_duplicate(&self, number: u32) -> bool {
        // The very first task has nothing to duplicate.
        number > 0 && place(number) < self.duplicates
    }

    pub(super) fn new_tasks(&self) -> u32 {
        self.count_of(|number| !self.is_duplicate(number))
    }

    /// How many new tasks are of this kind.
    pub(super) fn of_kind(&self, kind: Kind) -> u32 {
        self.count_of(|number| !self.is_duplicate(number) && self.kind(number) == kind)
    }

    fn count_of(&self, is_one: impl Fn(u32) -> bool) -> u32 {
        u32::try_from((0..self.count).filter(|number| is_one(*number)).count()).unwrap_or(u32::MAX)
    }

    /// What happens to a new task. It does not depend on which numbers are duplicates.
    pub(super) fn kind(&self, number: u32) -> Kind {
        let place = place(number / WHOLE + number % WHOLE * 7 + 3);
        if place < self.failing {
            Kind::Failing
        } else if place < self.failing + self.dying {
            Kind::Dying
        } else if place < self.failing + self.dying + self.slow {
            Kind::Slow
        } else {
            Kind::Plain
        }
    }

    /// The number that is the task's key: its own, or for a duplicate a slightly lower one.
    pub(super) fn original(&self, number: u32) -> u32 {
        let mut original = number;
        while self.is_duplicate(original) {
            original -= 1;
        }
        original
    }

    pub(super) fn task(&self, number: u32, queue: &str) -> NewTask {
        NewTask::new(queue, self.original(number).to_string()).bytes(self.payload.clone())
    }
}

/// Maps any thousand consecutive numbers to 0 to 999, each exactly once.
fn place(number: u32) -> u32 {
    number % WHOLE * STRIDE % WHOLE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(count: u32) -> Plan {
        let (slow_time, payload) = (Duration::ZERO, Bytes::new());
        Plan {
            count,
            rate: 100,
            duplicates: 100,
            failing: 50,
            dying: 10,
            slow: 20,
            slow_time,
            payload,
        }
    }

    #[test]
    fn shares_are_exact() {
        let plan = plan(10_000);
        assert_eq!(plan.new_tasks(), 9001, "a tenth, but not the first of all");
        let kinds =
            [Kind::Failing, Kind::Dying, Kind::Slow, Kind::Plain].map(|kind| plan.of_kind(kind));
        assert_eq!(kinds.iter().sum::<u32>(), 9001);
        assert!(
            kinds
                .iter()
                .zip([450, 90, 180])
                .all(|(has, wants)| has.abs_diff(wants) <= wants / 2),
            "{kinds:?}"
        );
    }

    #[test]
    fn a_duplicate_has_the_key_of_an_earlier_task() {
        let plan = plan(2000);
        for number in (0..2000).filter(|number| plan.is_duplicate(*number)) {
            let original = plan.original(number);
            assert!(original < number && !plan.is_duplicate(original));
        }
    }

    #[test]
    fn tasks_are_due_at_the_rate() {
        let plan = plan(1000);
        let due = [0, 10, 1000, 60_000].map(|ms| plan.due(Duration::from_millis(ms)));
        assert_eq!(due, [1, 2, 101, 1000]);
    }

    #[test]
    fn an_insert_takes_so_many_tasks_and_so_many_bytes_of_what_is_due() {
        let late = Duration::from_secs(1_000_000);
        let ends = [0, 100, 1 << 20, 16 << 20, 100 << 20].map(|bytes| {
            let plan = Plan {
                payload: Bytes::from(vec![0; bytes]),
                ..plan(1_000_000)
            };
            (
                plan.end_of_call(7, late) - 7,
                plan.end_of_call(999_999, late),
            )
        });
        assert_eq!(ends, [5000, 5000, 16, 1, 1].map(|tasks| (tasks, 1_000_000)));
        assert_eq!(plan(1000).end_of_call(1, Duration::from_millis(10)), 2);
    }
}
