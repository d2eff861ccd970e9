//! Limits log lines that callers can cause.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Admits a burst of lines, and then one line per interval. Counts the lines that it drops.
pub struct LogPace {
    burst: u32,
    every: Duration,
    state: Mutex<State>,
}

struct State {
    /// How many lines may be written right now.
    left: u32,
    /// When `left` was last raised.
    since: Option<Instant>,
    left_out: u64,
}

impl LogPace {
    pub const fn new(burst: u32, every: Duration) -> Self {
        Self {
            burst,
            every,
            state: Mutex::new(State {
                left: burst,
                since: None,
                left_out: 0,
            }),
        }
    }

    /// Returns how many lines were dropped before this one; `None` if this one is dropped, too.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        let since = *state.since.get_or_insert(now);
        let passed =
            now.saturating_duration_since(since).as_millis() / self.every.as_millis().max(1);
        let passed = u32::try_from(passed).unwrap_or(u32::MAX);
        if passed > 0 {
            state.left = state.left.saturating_add(passed).min(self.burst);
            state.since = Some(now);
        }
        if state.left == 0 {
            state.left_out += 1;
            return None;
        }
        state.left -= 1;
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_one_in_each_interval() {
        let pace = LogPace::new(3, Duration::from_secs(10));
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let lines = |seconds| (0..5).map(|_| pace.admit(at(seconds))).collect::<Vec<_>>();
        assert_eq!(lines(0), [Some(0), Some(0), Some(0), None, None]);
        assert_eq!(lines(9), [None; 5]);
        assert_eq!(lines(10), [Some(7), None, None, None, None]);
        assert_eq!(lines(1000), [Some(4), Some(0), Some(0), None, None]);
    }
}
