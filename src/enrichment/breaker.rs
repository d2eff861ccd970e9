//! The circuit breaker: while an endpoint fails, nobody waits for it.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Counts failures in a row. Callers share it.
pub(super) struct Breaker {
    most: u32,
    pause: Duration,
    state: Mutex<State>,
}

#[derive(Clone, Copy)]
enum State {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
    },
    /// One call tries the endpoint.
    Probing,
}

/// A call that the breaker lets through. Dropped without an outcome, a probe leaves the breaker open.
pub(super) struct Permit<'a> {
    breaker: &'a Breaker,
    is_probe: bool,
}

/// A change that an outcome made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turned {
    Opened,
    Closed,
}

impl Breaker {
    /// Opens after `most` failures in a row, for `pause`.
    pub(super) fn new(most: u32, pause: Duration) -> Self {
        Self { most, pause, state: Mutex::new(State::Closed { failures: 0 }) }
    }

    /// `None` while the breaker is open. After the pause, one call at a time may probe.
    pub(super) fn permit(&self, now: Instant) -> Option<Permit<'_>> {
        let mut state = self.state.lock();
        let is_probe = match *state {
            State::Closed { .. } => false,
            State::Open { until } if now >= until => {
                *state = State::Probing;
                true
            }
            State::Open { .. } | State::Probing => return None,
        };
        Some(Permit { breaker: self, is_probe })
    }

    fn open(&self, now: Instant) -> State {
        State::Open { until: now + self.pause }
    }
}

impl Permit<'_> {
    pub(super) fn succeeded(mut self) -> Option<Turned> {
        let mut state = self.breaker.state.lock();
        match *state {
            State::Probing if self.is_probe => {
                self.is_probe = false;
                *state = State::Closed { failures: 0 };
                Some(Turned::Closed)
            }
            State::Closed { .. } => {
                *state = State::Closed { failures: 0 };
                None
            }
            // A call of before the failures.
            State::Open { .. } | State::Probing => None,
        }
    }

    pub(super) fn failed(mut self, now: Instant) -> Option<Turned> {
        let mut state = self.breaker.state.lock();
        match *state {
            State::Probing if self.is_probe => {
                self.is_probe = false;
                *state = self.breaker.open(now);
                None
            }
            State::Closed { failures } if failures + 1 >= self.breaker.most => {
                *state = self.breaker.open(now);
                Some(Turned::Opened)
            }
            State::Closed { failures } => {
                *state = State::Closed { failures: failures + 1 };
                None
            }
            State::Open { .. } | State::Probing => None,
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.is_probe {
            *self.breaker.state.lock() = self.breaker.open(Instant::now());
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
        let (breaker, mut now) = (Breaker::new(3, PAUSE), Instant::now());
        assert_eq!([fail(&breaker, now), fail(&breaker, now)], [None; 2]);
        assert_eq!(breaker.permit(now).unwrap().succeeded(), None);
        let three = [fail(&breaker, now), fail(&breaker, now), fail(&breaker, now)];
        assert_eq!(three, [None, None, Some(Turned::Opened)]);
        assert!(breaker.permit(now).is_none());

        now += PAUSE;
        let probe = breaker.permit(now).unwrap();
        assert!(breaker.permit(now).is_none(), "one probe at a time");
        assert_eq!(probe.failed(now), None);
        assert!(breaker.permit(now).is_none(), "the pause begins anew");
        now += PAUSE;
        assert_eq!(breaker.permit(now).unwrap().succeeded(), Some(Turned::Closed));
        assert_eq!(fail(&breaker, now), None);
    }

    #[test]
    fn outcomes_of_before_do_not_move_an_open_one_and_a_lost_probe_blocks_nobody() {
        let (breaker, start) = (Breaker::new(1, PAUSE), Instant::now());
        let (good, bad) = (breaker.permit(start).unwrap(), breaker.permit(start).unwrap());
        assert_eq!(fail(&breaker, start), Some(Turned::Opened));
        assert_eq!((good.succeeded(), bad.failed(start)), (None, None));
        assert!(breaker.permit(start).is_none());
        drop(breaker.permit(start + PAUSE).unwrap());
        assert!(breaker.permit(start).is_none());
        assert!(breaker.permit(Instant::now() + PAUSE).is_some());
    }
}
