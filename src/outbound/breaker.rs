//! The circuit breaker: while a server fails, nobody waits for it.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// The number of calls in the window, as a multiple of the failures in a row that open the breaker.
/// It also opens when half of the window has failed.
pub const WINDOW: u32 = 4;

/// Counts failures in a row, and those among the last calls. Callers share it.
pub struct Breaker {
    most: u32,
    pause: Duration,
    state: Mutex<State>,
}

enum State {
    Closed(Calls),
    Open {
        until: Instant,
    },
    /// A single call tries the endpoint. After this time another one may: the first may be slow.
    Probing {
        until: Instant,
    },
}

/// The outcomes of the last calls, for a closed breaker.
#[derive(Default)]
struct Calls {
    in_a_row: u32,
    /// True for a failure.
    window: VecDeque<bool>,
    failed: u32,
}

impl Calls {
    fn note(&mut self, has_failed: bool, most: u32) {
        self.in_a_row = if has_failed { self.in_a_row + 1 } else { 0 };
        self.window.push_back(has_failed);
        self.failed += u32::from(has_failed);
        if self.window.len() > (WINDOW * most) as usize {
            self.failed -= u32::from(self.window.pop_front() == Some(true));
        }
    }

    fn are_too_bad(&self, most: u32) -> bool {
        self.in_a_row >= most || self.failed >= WINDOW / 2 * most
    }
}

/// A call that the breaker lets through. Dropped without an outcome, a probe leaves the breaker
/// open.
pub struct Permit<'a> {
    breaker: &'a Breaker,
    is_probe: bool,
}

/// How an outcome changed the breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turned {
    Opened,
    Closed,
}

impl Breaker {
    /// The breaker opens for `pause` after `most` failures in a row, or when `2 * most` of the last
    /// `4 * most` calls have failed.
    pub fn new(most: u32, pause: Duration) -> Self {
        Self {
            most,
            pause,
            state: Mutex::new(State::Closed(Calls::default())),
        }
    }

    /// Returns `None` while the breaker is open. After each pause, one call may probe.
    pub fn permit(&self, now: Instant) -> Option<Permit<'_>> {
        let mut state = self.state.lock();
        let is_probe = match *state {
            State::Closed(_) => false,
            State::Open { until } | State::Probing { until } if now >= until => {
                *state = State::Probing {
                    until: now + self.pause,
                };
                true
            }
            State::Open { .. } | State::Probing { .. } => return None,
        };
        Some(Permit {
            breaker: self,
            is_probe,
        })
    }

    fn open(&self, now: Instant) -> State {
        State::Open {
            until: now + self.pause,
        }
    }
}

impl Permit<'_> {
    pub fn succeeded(mut self) -> Option<Turned> {
        let was_probe = std::mem::take(&mut self.is_probe);
        let mut state = self.breaker.state.lock();
        match &mut *state {
            State::Closed(calls) => {
                calls.note(false, self.breaker.most);
                None
            }
            State::Open { .. } | State::Probing { .. } if was_probe => {
                *state = State::Closed(Calls::default());
                Some(Turned::Closed)
            }
            // The call began before the breaker opened.
            State::Open { .. } | State::Probing { .. } => None,
        }
    }

    pub fn failed(mut self, now: Instant) -> Option<Turned> {
        let was_probe = std::mem::take(&mut self.is_probe);
        let mut state = self.breaker.state.lock();
        match &mut *state {
            State::Closed(calls) => {
                calls.note(true, self.breaker.most);
                if !calls.are_too_bad(self.breaker.most) {
                    return None;
                }
                *state = self.breaker.open(now);
                Some(Turned::Opened)
            }
            State::Probing { .. } if was_probe => {
                *state = self.breaker.open(now);
                None
            }
            State::Open { .. } | State::Probing { .. } => None,
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut state = self.breaker.state.lock();
        if self.is_probe && matches!(*state, State::Probing { .. }) {
            *state = self.breaker.open(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_secs(10);

    fn fail(breaker: &Breaker, now: Instant) -> Option<Turned> {
        breaker.permit(now).unwrap().failed(now)
    }

    #[test]
    fn failures_in_a_row_open_it_and_a_probe_closes_it() {
        let breaker = Breaker::new(3, PAUSE);
        let mut now = Instant::now();
        assert_eq!([fail(&breaker, now), fail(&breaker, now)], [None; 2]);
        assert_eq!(breaker.permit(now).unwrap().succeeded(), None);
        let three = [
            fail(&breaker, now),
            fail(&breaker, now),
            fail(&breaker, now),
        ];
        assert_eq!(three, [None, None, Some(Turned::Opened)]);
        assert!(breaker.permit(now).is_none());

        now += PAUSE;
        let probe = breaker.permit(now).unwrap();
        assert!(breaker.permit(now).is_none(), "one probe at a time");
        assert_eq!(probe.failed(now), None);
        assert!(breaker.permit(now).is_none(), "the pause begins anew");
        now += PAUSE;
        assert_eq!(
            breaker.permit(now).unwrap().succeeded(),
            Some(Turned::Closed)
        );
        assert_eq!(fail(&breaker, now), None);
    }

    #[test]
    fn it_opens_when_half_of_the_last_calls_have_failed() {
        let breaker = Breaker::new(3, PAUSE);
        let now = Instant::now();
        let call = |fails: bool| match fails {
            true => fail(&breaker, now),
            false => breaker.permit(now).unwrap().succeeded(),
        };
        // A third of the calls is not enough, however long it goes on.
        let third = |n: usize| n.is_multiple_of(3);
        assert!((0..100).all(|n| call(third(n)).is_none()));
        (0..12).for_each(|_| assert_eq!(call(false), None));
        // Never three in a row: the sixth of the last twelve opens it.
        let half: Vec<_> = (0..11_u32).map(|n| call(n.is_multiple_of(2))).collect();
        assert_eq!(
            (half.iter().flatten().count(), half[10]),
            (1, Some(Turned::Opened))
        );
        // The breaker starts counting again when it closes.
        assert_eq!(
            breaker.permit(now + PAUSE).unwrap().succeeded(),
            Some(Turned::Closed)
        );
        assert_eq!([call(true), call(true)], [None; 2]);
    }

    #[test]
    fn a_slow_probe_keeps_nobody_out() {
        let breaker = Breaker::new(1, PAUSE);
        let start = Instant::now();
        assert_eq!(fail(&breaker, start), Some(Turned::Opened));
        let slow = breaker.permit(start + PAUSE).unwrap();
        assert!(breaker.permit(start + PAUSE).is_none());
        let other = breaker.permit(start + 2 * PAUSE).unwrap();
        assert_eq!(other.succeeded(), Some(Turned::Closed));
        drop(slow);
        assert!(breaker.permit(start).is_some(), "a lost probe of before");
    }

    #[test]
    fn outcomes_of_before_do_not_move_an_open_one_and_a_lost_probe_blocks_nobody() {
        let breaker = Breaker::new(1, PAUSE);
        let start = Instant::now();
        let good = breaker.permit(start).unwrap();
        let bad = breaker.permit(start).unwrap();
        assert_eq!(fail(&breaker, start), Some(Turned::Opened));
        assert_eq!((good.succeeded(), bad.failed(start)), (None, None));
        assert!(breaker.permit(start).is_none());
        drop(breaker.permit(start + PAUSE).unwrap());
        assert!(breaker.permit(start).is_none());
        assert!(breaker.permit(Instant::now() + PAUSE).is_some());
    }
}
