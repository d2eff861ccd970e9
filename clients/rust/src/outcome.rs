//! The outcomes of a handler: the task is done, or the attempt failed.

use std::{fmt::Display, time::Duration};

use bytes::Bytes;
use serde::Serialize;

use crate::{
    new_task::{NewTask, proto},
    pb,
};

/// The bytes of a reason that taskd takes.
const LONGEST_REASON: usize = 4000;
/// The longest delay that taskd takes.
const LONGEST_DELAY: Duration = Duration::from_secs(365 * 24 * 3600);

/// A task that is done: its result, and the tasks discovered on the way.
#[derive(Clone, Debug, Default)]
pub struct Done {
    result: Bytes,
    encoding: pb::Encoding,
    discovered: Vec<pb::NewTask>,
}

impl Done {
    /// Done, with an empty result.
    pub fn new() -> Self {
        Self::default()
    }

    /// Done, with a result in JSON. `Err`: serde cannot write the value.
    pub fn json(value: &(impl Serialize + ?Sized)) -> Result<Self, serde_json::Error> {
        Ok(Self { result: serde_json::to_vec(value)?.into(), encoding: pb::Encoding::Json, discovered: Vec::new() })
    }

    /// Done, with a text as its result.
    pub fn text(text: impl Into<String>) -> Self {
        Self { result: text.into().into(), encoding: pb::Encoding::Text, discovered: Vec::new() }
    }

    /// Done, with bytes as its result.
    pub fn bytes(bytes: impl Into<Bytes>) -> Self {
        Self { result: bytes.into(), encoding: pb::Encoding::Bytes, discovered: Vec::new() }
    }

    /// Tasks that the handler discovered. taskd drops those that it has seen before.
    #[must_use]
    pub fn discover(mut self, tasks: impl IntoIterator<Item = NewTask>) -> Self {
        self.discovered.extend(tasks.into_iter().map(|task| task.0));
        self
    }

    pub(crate) fn completion(self, id: &str, lease_token: &str) -> pb::Completion {
        pb::Completion {
            id: id.to_owned(),
            lease_token: lease_token.to_owned(),
            result: self.result,
            discovered: self.discovered,
            result_encoding: self.encoding.into(),
        }
    }
}

impl From<()> for Done {
    fn from((): ()) -> Self {
        Self::new()
    }
}

/// An attempt that failed: taskd tries the task again after the backoff of its queue, until `max_attempts` failed.
///
/// Everything with words becomes one, so `?` works on any error in a handler.
#[derive(Clone, Debug)]
pub struct Failure {
    pub(crate) reason: String,
    pub(crate) retry: bool,
    pub(crate) delay: Option<Duration>,
    pub(crate) not_started: bool,
}

impl Failure {
    /// A failed attempt. Operators read the reason in the history of the task: the first 1,024 bytes of it.
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), retry: true, delay: None, not_started: false }
    }

    /// No further attempt: the task is dead. If several workers must complete it, this counts as `max_attempts`
    /// failures, and other workers may go on.
    #[must_use]
    pub fn never_again(self) -> Self {
        Self { retry: false, ..self }
    }

    /// Waits so long before the next attempt, instead of the backoff of the queue; at most 365 days.
    #[must_use]
    pub fn again_after(self, delay: Duration) -> Self {
        Self { delay: Some(delay), ..self }
    }

    /// The handler has not begun with the task: taskd offers it again at once, and counts no failure. This
    /// overrides [`Self::never_again`] and [`Self::again_after`].
    #[must_use]
    pub fn not_started(self) -> Self {
        Self { not_started: true, ..self }
    }

    pub(crate) fn rejection(self, id: &str, lease_token: &str) -> pb::Rejection {
        // taskd takes nothing else with `not_started`. An older one does not know it, and counts a failure.
        let (retry, delay) = if self.not_started { (true, Some(Duration::ZERO)) } else { (self.retry, self.delay) };
        pb::Rejection {
            id: id.to_owned(),
            lease_token: lease_token.to_owned(),
            reason: cut(self.reason),
            retry: Some(retry),
            delay: delay.map(|delay| proto(delay.min(LONGEST_DELAY))),
            not_started: self.not_started,
        }
    }
}

/// The beginning of a reason, as much as taskd takes.
fn cut(mut reason: String) -> String {
    reason.truncate(reason.floor_char_boundary(LONGEST_REASON));
    reason
}

impl<E: Display> From<E> for Failure {
    fn from(error: E) -> Self {
        // The causes of an error that shows them.
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
        assert_eq!(rejection.delay, Some(prost_types::Duration { seconds: 31_536_000, nanos: 0 }));
        let odd = Failure::new(format!("a{}", "ä".repeat(3000))).rejection("id", "token").reason;
        assert_eq!((odd.len(), odd.chars().count()), (3999, 2000));
        assert_eq!(Failure::new("short").rejection("id", "token").reason, "short");
    }

    #[test]
    fn what_has_not_started_goes_back_as_taskd_takes_it() {
        let new = || Failure::new("busy");
        let five = Duration::from_secs(5);
        let failures = [new().not_started().again_after(five), new().not_started().never_again(), new().not_started()];
        for failure in failures {
            let rejection = failure.rejection("id", "token");
            let zero = prost_types::Duration::default();
            assert_eq!((rejection.not_started, rejection.retry, rejection.delay), (true, Some(true), Some(zero)));
        }
    }
}
