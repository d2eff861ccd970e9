//! The queues of a running taskd as its HTTP API returns them, and their rates between two
//! snapshots.

use std::{
    ops::Add,
    time::{Duration, Instant},
};

use serde::Deserialize;

use super::{ask, http::HttpPort};

/// A queue as `GET /v1/queues` returns it.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Queue {
    pub(super) queue: String,
    #[serde(flatten)]
    pub(super) counts: Counts,
    pub(super) leases: u64,
    pub(super) oldest_waiting_ms: Option<u64>,
    pub(super) paused: bool,
    pub(super) unread_shards: u64,
}

impl Queue {
    /// Returns the mark to show after the name.
    pub(super) fn mark(&self) -> &'static str {
        match self {
            Self {
                unread_shards: 1.., ..
            } => " (unread)",
            Self { paused: true, .. } => " (paused)",
            _ => "",
        }
    }
}

/// The tasks of queues, by status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Counts {
    pub(super) pending: u64,
    pub(super) waiting: u64,
    pub(super) assigned: u64,
    pub(super) delayed: u64,
    pub(super) completed: u64,
    pub(super) dead: u64,
    pub(super) cancelled: u64,
}

impl Counts {
    /// All tasks that taskd counts, finished or not.
    pub(super) fn all(&self) -> u64 {
        let Self {
            pending,
            waiting,
            assigned,
            delayed,
            completed,
            dead,
            cancelled,
        } = self;
        pending + waiting + assigned + delayed + completed + dead + cancelled
    }
}

impl Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            pending: self.pending + other.pending,
            waiting: self.waiting + other.waiting,
            assigned: self.assigned + other.assigned,
            delayed: self.delayed + other.delayed,
            completed: self.completed + other.completed,
            dead: self.dead + other.dead,
            cancelled: self.cancelled + other.cancelled,
        }
    }
}

/// How many tasks of a queue were inserted and completed per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    pub(super) inserted: f64,
    pub(super) completed: f64,
}

/// The queues at one point in time.
#[derive(Debug)]
pub(super) struct QueuesSnapshot {
    pub(super) at: Instant,
    pub(super) queues: Vec<Queue>,
}

impl QueuesSnapshot {
    /// Decodes an answer of the API.
    pub(super) fn read(server: &HttpPort, body: &[u8]) -> anyhow::Result<Self> {
        #[derive(Deserialize)]
        struct Queues {
            queues: Vec<Queue>,
        }
        let Queues { queues } = ask::read(server, body)?;
        Ok(Self {
            at: Instant::now(),
            queues,
        })
    }

    /// Keeps only this queue, if one is named.
    pub(super) fn keep(&mut self, name: Option<&str>) {
        if let Some(name) = name {
            self.queues.retain(|queue| queue.queue == name);
        }
    }

    /// Returns the rates of a queue since an earlier snapshot, if that has the queue, too.
    pub(super) fn rates(&self, queue: &Queue, before: Option<&Self>) -> Option<Rates> {
        let before = before?;
        let was = before.queues.iter().find(|was| was.queue == queue.queue)?;
        let rate = |now: u64, was: u64| per_second(now.saturating_sub(was), self.at - before.at);
        let now = queue.counts;
        let was = was.counts;
        // Retention removes finished tasks, so a count may be lower than before.
        Some(Rates {
            inserted: rate(now.all(), was.all()),
            completed: rate(now.completed, was.completed),
        })
    }
}

/// Returns the events per second, or 0 if no time has passed.
pub(super) fn per_second(events: u64, elapsed: Duration) -> f64 {
    if elapsed.is_zero() {
        0.0
    } else {
        events as f64 / elapsed.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_between_two_looks() {
        let queue = |name: &str, waiting, completed| Queue {
            queue: name.into(),
            counts: Counts {
                waiting,
                completed,
                ..Counts::default()
            },
            ..Queue::default()
        };
        let at = Instant::now();
        let before = QueuesSnapshot {
            at,
            queues: vec![queue("q", 10, 100)],
        };
        let now = QueuesSnapshot {
            at: at + Duration::from_secs(2),
            queues: vec![queue("q", 40, 110), queue("new", 1, 1)],
        };
        let want = Rates {
            inserted: 20.0,
            completed: 5.0,
        };
        assert_eq!(now.rates(&now.queues[0], Some(&before)), Some(want));
        assert_eq!(
            now.rates(&now.queues[1], Some(&before)),
            None,
            "the look before did not have it"
        );
        assert_eq!(now.rates(&now.queues[0], None), None);
        let removed = QueuesSnapshot {
            at: at + Duration::from_secs(2),
            queues: vec![queue("q", 0, 50)],
        };
        assert_eq!(
            removed.rates(&removed.queues[0], Some(&before)),
            Some(Rates::default())
        );
        assert_eq!(per_second(1, Duration::ZERO), 0.0);
    }
}
