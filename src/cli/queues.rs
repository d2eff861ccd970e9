//! The queues of a running taskd as its HTTP API answers them, and their rates between two looks.

use std::time::{Duration, Instant};

use serde::Deserialize;

use super::{ask, http::HttpPort};

/// A queue, as `GET /v1/queues` answers it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Queue {
    pub(super) queue: String,
    pub(super) pending: u64,
    pub(super) queued: u64,
    pub(super) assigned: u64,
    pub(super) delayed: u64,
    pub(super) leases: u64,
    pub(super) completed: u64,
    pub(super) dead: u64,
    pub(super) cancelled: u64,
    pub(super) oldest_waiting_ms: Option<u64>,
    #[serde(default)]
    pub(super) paused: bool,
}

impl Queue {
    /// All tasks that taskd counts, finished or not.
    fn all(&self) -> u64 {
        [self.pending, self.queued, self.assigned, self.delayed, self.completed, self.dead, self.cancelled].iter().sum()
    }
}

/// Events a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    pub(super) inserted: f64,
    pub(super) completed: f64,
}

/// The queues at a time.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) at: Instant,
    pub(super) queues: Vec<Queue>,
}

impl Look {
    /// Reads an answer of the API.
    pub(super) fn read(server: &HttpPort, body: &[u8]) -> anyhow::Result<Self> {
        #[derive(Deserialize)]
        struct Queues {
            queues: Vec<Queue>,
        }
        let Queues { queues } = ask::read(server, body)?;
        Ok(Self { at: Instant::now(), queues })
    }

    /// The rates of a queue of this look since an earlier one that has the queue, too.
    pub(super) fn rates(&self, queue: &Queue, before: Option<&Self>) -> Option<Rates> {
        let before = before?;
        let was = before.queues.iter().find(|was| was.queue == queue.queue)?;
        let rate = |now: u64, was: u64| per_second(now.saturating_sub(was), self.at - before.at);
        // Retention removes finished tasks, so a count may be lower than before.
        Some(Rates { inserted: rate(queue.all(), was.all()), completed: rate(queue.completed, was.completed) })
    }
}

/// Events a second. Two looks at the same time have no rate.
pub(super) fn per_second(events: u64, elapsed: Duration) -> f64 {
    if elapsed.is_zero() { 0.0 } else { events as f64 / elapsed.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_between_two_looks() {
        let queue = |name: &str, queued, completed| Queue {
            queue: name.into(),
            pending: 0,
            queued,
            assigned: 0,
            delayed: 0,
            leases: 0,
            completed,
            dead: 0,
            cancelled: 0,
            oldest_waiting_ms: None,
            paused: false,
        };
        let at = Instant::now();
        let before = Look { at, queues: vec![queue("q", 10, 100)] };
        let now = Look { at: at + Duration::from_secs(2), queues: vec![queue("q", 40, 110), queue("new", 1, 1)] };
        let want = Rates { inserted: 20.0, completed: 5.0 };
        assert_eq!(now.rates(&now.queues[0], Some(&before)), Some(want));
        assert_eq!(now.rates(&now.queues[1], Some(&before)), None, "the look before did not have it");
        assert_eq!(now.rates(&now.queues[0], None), None);
        let removed = Look { at: at + Duration::from_secs(2), queues: vec![queue("q", 0, 50)] };
        assert_eq!(removed.rates(&removed.queues[0], Some(&before)), Some(Rates::default()));
        assert_eq!(per_second(1, Duration::ZERO), 0.0);
    }
}
