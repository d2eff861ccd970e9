//! The delays between the attempts of a task.

use std::time::Duration;

use crate::{duration::proto, pb};

/// The delays between the attempts of a task, instead of those of its queue.
///
/// ```
/// # use {std::time::Duration, taskd_client::{Backoff, NewTask}};
/// let backoff = Backoff::exponential(Duration::from_secs(2)).maximum(Duration::from_secs(600));
/// let task = NewTask::new("crawl", "https://example.org/").backoff(backoff);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct Backoff(pb::Backoff);

impl Backoff {
    /// Always waits `initial`.
    pub fn constant(initial: Duration) -> Self {
        Self::of(pb::BackoffKind::Constant, initial)
    }

    /// Waits `initial` longer after each failure.
    pub fn linear(initial: Duration) -> Self {
        Self::of(pb::BackoffKind::Linear, initial)
    }

    /// Waits twice as long after each failure.
    pub fn exponential(initial: Duration) -> Self {
        Self::of(pb::BackoffKind::Exponential, initial)
    }

    /// Keeps the delays of the queue, but the task dies if its next attempt would begin more than
    /// `time` after its insert (after its start time, if it is scheduled for later).
    pub fn of_queue_for(time: Duration) -> Self {
        Self(pb::Backoff {
            give_up_after: Some(proto(time)),
            ..Default::default()
        })
    }

    /// The longest delay. It is a day by default, which is also the maximum.
    pub fn maximum(self, maximum: Duration) -> Self {
        Self(pb::Backoff {
            maximum: Some(proto(maximum)),
            ..self.0
        })
    }

    /// By what fraction, 0 to 1, a delay is randomly lengthened or shortened. 0.2 by default.
    pub fn jitter(self, share: f64) -> Self {
        Self(pb::Backoff {
            jitter: Some(share),
            ..self.0
        })
    }

    /// The task dies if its next attempt would begin later than this after its insert (after its
    /// start time, if it is scheduled for later).
    pub fn give_up_after(self, time: Duration) -> Self {
        Self(pb::Backoff {
            give_up_after: Some(proto(time)),
            ..self.0
        })
    }

    fn of(kind: pb::BackoffKind, initial: Duration) -> Self {
        Self(pb::Backoff {
            kind: kind.into(),
            initial: Some(proto(initial)),
            ..Default::default()
        })
    }
}

impl From<Backoff> for pb::Backoff {
    fn from(backoff: Backoff) -> Self {
        backoff.0
    }
}
