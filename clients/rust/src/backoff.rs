//! The waits of a task between its attempts.

use std::time::Duration;

use crate::{duration::proto, pb};

/// The waits of a task between its attempts, in place of those of its queue.
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
    /// Always `initial`.
    pub fn constant(initial: Duration) -> Self {
        Self::of(pb::BackoffKind::Constant, initial)
    }

    /// `initial` more after each failure.
    pub fn linear(initial: Duration) -> Self {
        Self::of(pb::BackoffKind::Linear, initial)
    }

    /// Twice as long after each failure.
    pub fn exponential(initial: Duration) -> Self {
        Self::of(pb::BackoffKind::Exponential, initial)
    }

    /// The waits of the queue, and the task is dead when its next attempt would begin later than
    /// `time` after its insert, or after the time before which no worker gets it.
    pub fn of_queue_for(time: Duration) -> Self {
        Self(pb::Backoff {
            give_up_after: Some(proto(time)),
            ..Default::default()
        })
    }

    /// The longest wait: at most, and by default, a day.
    pub fn maximum(self, maximum: Duration) -> Self {
        Self(pb::Backoff {
            maximum: Some(proto(maximum)),
            ..self.0
        })
    }

    /// The share, 0 to 1, by which a wait is longer or shorter at random. By default 0.2.
    pub fn jitter(self, share: f64) -> Self {
        Self(pb::Backoff {
            jitter: Some(share),
            ..self.0
        })
    }

    /// The task is dead when its next attempt would begin later than this after its insert, or
    /// after the time before which no worker gets it.
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
