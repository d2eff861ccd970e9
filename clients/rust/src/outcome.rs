//! The outcomes of a handler: the task is done, or the attempt failed.

use std::{fmt::Display, time::Duration};

use bytes::Bytes;
use serde::Serialize;

use crate::{
    new_task::{NewTask, proto},
    pb,
};

/// The longest reason that taskd accepts, in bytes.
const LONGEST_REASON: usize = 4000;
/// The longest delay that taskd accepts.
const LONGEST_DELAY: Duration = Duration::from_secs(365 * 24 * 3600);
/// The longest hold or pace of a limit key that taskd takes.
const LONGEST_REPORT: Duration = Duration::from_secs(3600);

/// A task that is done: its result, and the tasks discovered on the way.
#[derive(Clone, Debug, Default)]
pub struct Done {
    result: Bytes,
    encoding: pb::Encoding,
    pub(crate) discovered: Vec<pb::NewTask>,
    limit: Option<pb::LimitReport>,
}

impl Done {
    /// Done, with an empty result.
    pub fn new() -> Self {
        Self::default()
    }

    /// Done, with a result in JSON. Fails if serde cannot serialize the value.
    pub fn json(value: &(impl Serialize + ?Sized)) -> Result<Self, serde_json::Error> {
        Ok(Self {
            result: serde_json::to_vec(value)?.into(),
            encoding: pb::Encoding::Json,
            discovered: Vec::new(),
            limit: None,
        })
    }

    /// Done, with a text as its result.
    pub fn text(text: impl Into<String>) -> Self {
        Self {
            result: text.into().into(),
            encoding: pb::Encoding::Text,
            discovered: Vec::new(),
            limit: None,
        }
    }

    /// Done, with bytes as its result.
    pub fn bytes(bytes: impl Into<Bytes>) -> Self {
        Self {
            result: bytes.into(),
            encoding: pb::Encoding::Bytes,
            discovered: Vec::new(),
            limit: None,
        }
    }

    /// Adds any number of tasks that the handler discovered. taskd drops those whose keys it has
    /// already seen.
    ///
    /// A completion can carry at most 10,000. [`Worker::run`](crate::Worker::run) inserts the
    /// surplus before it reports the task; if taskd requires tokens, the worker's token then also
    /// needs the role `insert`. An invalid task, for example one whose key is too long, does not
    /// affect the others: it becomes a dead letter, or
    /// [`Event::NotStored`](crate::Event::NotStored) names it.
    #[must_use]
    pub fn discover(mut self, tasks: impl IntoIterator<Item = NewTask>) -> Self {
        self.discovered.extend(tasks.into_iter().map(|task| task.0));
        self
    }

    /// Nothing of the task's limit key starts for this long, for all workers, such as a Retry-After.
    /// taskd takes at most an hour. For a task without a limit key
    /// ([`TaskInfo::limit_key`](crate::TaskInfo::limit_key)) it does nothing.
    #[must_use]
    pub fn hold(mut self, hold: Duration) -> Self {
        self.limit.get_or_insert_default().hold = Some(proto(hold.min(LONGEST_REPORT)));
        self
    }

    /// Starts of the task's limit key are at least so far apart, such as a Crawl-delay, as for
    /// [`Self::hold`]. taskd keeps it for an hour.
    #[must_use]
    pub fn pace(mut self, pace: Duration) -> Self {
        self.limit.get_or_insert_default().pace = Some(proto(pace.min(LONGEST_REPORT)));
        self
    }

    pub(crate) fn completion(self, id: &str, lease_token: &str) -> pb::Completion {
        pb::Completion {
            id: id.to_owned(),
            lease_token: lease_token.to_owned(),
            result: self.result,
            discovered: self.discovered,
            result_encoding: self.encoding.into(),
            limit: self.limit,
        }
    }
}

impl From<()> for Done {
    fn from((): ()) -> Self {
        Self::new()
    }
}

/// A failed attempt: taskd retries the task after the backoff of its queue, until `max_attempts`
/// have failed.
///
/// Anything that implements `Display` converts into one, so `?` works on any error in a handler.
#[derive(Clone, Debug)]
pub struct Failure {
    pub(crate) reason: String,
    pub(crate) retry: bool,
    pub(crate) delay: Option<Duration>,
    pub(crate) not_started: bool,
    /// The worker takes no tasks until the delay is over.
    pub(crate) throttles: bool,
    limit: Option<pb::LimitReport>,
}

impl Failure {
    /// A failed attempt. Operators see the first 1,024 bytes of the reason in the task's history.
    pub fn new(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            retry: true,
            delay: None,
            not_started: false,
            throttles: false,
            limit: None,
        }
    }

    /// Makes this the last attempt: the task dies. If several workers must complete it, this counts
    /// as `max_attempts` failures, and other workers may continue.
    #[must_use]
    pub fn never_again(self) -> Self {
        Self {
            retry: false,
            ..self
        }
    }

    /// Sets the delay before the next attempt, instead of the queue's backoff; at most 365 days.
    #[must_use]
    pub fn again_after(self, delay: Duration) -> Self {
        Self {
            delay: Some(delay),
            ..self
        }
    }

    /// Says that the handler has not started the task: taskd delivers it again at once, and counts
    /// no failure. This overrides [`Self::never_again`] and [`Self::again_after`].
    #[must_use]
    pub fn not_started(self) -> Self {
        Self {
            retry: true,
            delay: None,
            not_started: true,
            throttles: false,
            ..self
        }
    }

    /// Puts the task off: taskd delivers it again after `delay`, and counts no failure. Use it if a
    /// site is busy or a service is unavailable. A task can be put off any number of times before
    /// its deadline.
    ///
    /// A taskd too old for this counts a failure, and waits for the same delay.
    #[must_use]
    pub fn put_off(self, delay: Duration) -> Self {
        Self {
            retry: true,
            delay: Some(delay),
            not_started: true,
            ..self
        }
    }

    /// Puts the task off, and the worker takes no tasks either until `delay` is over: for a service
    /// that every task needs and that is away or asks for a pause. Tasks that wait in the worker go
    /// to others at once.
    #[must_use]
    pub fn throttle(self, delay: Duration) -> Self {
        Self {
            throttles: true,
            // The worker adds it to the present time, which would panic with a longer one.
            ..self.put_off(delay.min(LONGEST_DELAY))
        }
    }

    /// Nothing of the task's limit key starts for this long, for all workers, such as a Retry-After.
    /// taskd takes at most an hour. For a task without a limit key
    /// ([`TaskInfo::limit_key`](crate::TaskInfo::limit_key)) it does nothing.
    #[must_use]
    pub fn hold(mut self, hold: Duration) -> Self {
        self.limit.get_or_insert_default().hold = Some(proto(hold.min(LONGEST_REPORT)));
        self
    }

    /// Starts of the task's limit key are at least so far apart, such as a Crawl-delay, as for
    /// [`Self::hold`]. taskd keeps it for an hour.
    #[must_use]
    pub fn pace(mut self, pace: Duration) -> Self {
        self.limit.get_or_insert_default().pace = Some(proto(pace.min(LONGEST_REPORT)));
        self
    }

    /// Returns the delay if the task is put off.
    pub(crate) fn is_put_off(&self) -> Option<Duration> {
        self.delay
            .filter(|delay| self.not_started && !delay.is_zero())
    }

    pub(crate) fn rejection(self, id: &str, lease_token: &str) -> pb::Rejection {
        let at_once = self.not_started.then_some(Duration::ZERO);
        let delay = self
            .delay
            .or(at_once)
            .map(|delay| proto(delay.min(LONGEST_DELAY)));
        pb::Rejection {
            id: id.to_owned(),
            lease_token: lease_token.to_owned(),
            reason: cut(self.reason),
            // With `not_started`, taskd accepts nothing else.
            retry: Some(self.retry || self.not_started),
            delay,
            not_started: self.not_started,
            limit: self.limit,
        }
    }
}

/// Truncates a reason to what taskd accepts.
fn cut(mut reason: String) -> String {
    let mut end = reason.len().min(LONGEST_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason.truncate(end);
    reason
}

impl<E: Display> From<E> for Failure {
    fn from(error: E) -> Self {
        // The alternate form includes the causes, for errors that support it.
        Self::new(format!("{error:#}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejection_is_one_that_taskd_takes() {
        let failure = Failure::new("ä".repeat(3000)).again_after(Duration::MAX);
        let rejection = failure.rejection("id", "token");
        assert_eq!(rejection.reason, "ä".repeat(2000));
        assert_eq!(
            rejection.delay,
            Some(prost_types::Duration {
                seconds: 31_536_000,
                nanos: 0
            })
        );
        let odd = Failure::new(format!("a{}", "ä".repeat(3000)))
            .rejection("id", "token")
            .reason;
        assert_eq!((odd.len(), odd.chars().count()), (3999, 2000));
        assert_eq!(
            Failure::new("short").rejection("id", "token").reason,
            "short"
        );
    }

    #[test]
    fn what_has_not_started_goes_back_as_taskd_takes_it() {
        let new = || Failure::new("busy");
        let five = Duration::from_secs(5);
        let failures = [
            new().again_after(five).not_started(),
            new().not_started().never_again(),
            new().not_started(),
        ];
        for failure in failures {
            assert_eq!(failure.is_put_off(), None);
            let rejection = failure.rejection("id", "token");
            let zero = prost_types::Duration::default();
            assert_eq!(
                (rejection.not_started, rejection.retry, rejection.delay),
                (true, Some(true), Some(zero))
            );
        }
        let throttled = new().throttle(Duration::MAX);
        assert_eq!(throttled.is_put_off(), Some(LONGEST_DELAY));
        let put_off = new().never_again().put_off(five);
        assert_eq!(put_off.is_put_off(), Some(five));
        let rejection = put_off.rejection("id", "token");
        let seconds = rejection.delay.map(|delay| delay.seconds);
        assert_eq!(
            (rejection.not_started, rejection.retry, seconds),
            (true, Some(true), Some(5))
        );
    }
}
