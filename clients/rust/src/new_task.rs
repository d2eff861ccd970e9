//! Tasks to insert, and tasks that a worker discovered.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use serde::Serialize;

pub(crate) use crate::duration::proto;
pub use crate::pb::Priority;
use crate::{backoff::Backoff, pb, tree::NewTree};

/// A task to insert. Unset fields take the settings of the queue.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewTask(pub(crate) pb::NewTask);

impl NewTask {
    /// A task with an empty payload. The key is its name, unique in the queue forever.
    pub fn new(queue: impl Into<String>, key: impl Into<Bytes>) -> Self {
        Self(pb::NewTask {
            queue: queue.into(),
            key: key.into(),
            ..Default::default()
        })
    }

    /// Sets a JSON payload. Fails if serde cannot serialize the value.
    pub fn json(self, value: &(impl Serialize + ?Sized)) -> Result<Self, serde_json::Error> {
        Ok(self.encoded(serde_json::to_vec(value)?, pb::Encoding::Json))
    }

    /// Sets a text payload.
    #[must_use]
    pub fn text(self, text: impl Into<String>) -> Self {
        self.encoded(text.into(), pb::Encoding::Text)
    }

    /// Sets a payload of bytes.
    #[must_use]
    pub fn bytes(self, bytes: impl Into<Bytes>) -> Self {
        self.encoded(bytes, pb::Encoding::Bytes)
    }

    /// How many distinct workers must complete the task.
    #[must_use]
    pub fn replicas(self, replicas: u32) -> Self {
        Self(pb::NewTask {
            replicas: Some(replicas),
            ..self.0
        })
    }

    /// Tasks with a higher priority are delivered first.
    #[must_use]
    pub fn priority(self, priority: Priority) -> Self {
        Self(pb::NewTask {
            priority: priority.into(),
            ..self.0
        })
    }

    /// An output for a port of the stage whose task discovers it: the topology says which queues it
    /// goes to.
    pub fn output(port: impl Into<String>, key: impl Into<Bytes>) -> Self {
        Self(pb::NewTask {
            port: port.into(),
            key: key.into(),
            ..Default::default()
        })
    }

    /// Delays the task: no worker gets it earlier.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        Self(pb::NewTask {
            delay: Some(proto(delay)),
            not_before: None,
            ..self.0
        })
    }

    /// No worker gets the task before this time.
    #[must_use]
    pub fn not_before(self, time: SystemTime) -> Self {
        Self(pb::NewTask {
            not_before: Some(time.into()),
            delay: None,
            ..self.0
        })
    }

    /// The task dies if it is not completed by this time.
    #[must_use]
    pub fn deadline(self, time: SystemTime) -> Self {
        Self(pb::NewTask {
            deadline: Some(time.into()),
            finish_within: None,
            ..self.0
        })
    }

    /// The task dies if it is not completed within this time after its insert.
    #[must_use]
    pub fn finish_within(self, time: Duration) -> Self {
        Self(pb::NewTask {
            finish_within: Some(proto(time)),
            deadline: None,
            ..self.0
        })
    }

    /// The number of failures of a replica after which the task dies.
    #[must_use]
    pub fn max_attempts(self, attempts: u32) -> Self {
        Self(pb::NewTask {
            max_attempts: Some(attempts),
            ..self.0
        })
    }

    /// The delays between its attempts, instead of those of its queue.
    #[must_use]
    pub fn backoff(self, backoff: Backoff) -> Self {
        Self(pb::NewTask {
            backoff: Some(backoff.into()),
            ..self.0
        })
    }

    /// The duration of the task's leases, unless the worker sets one.
    #[must_use]
    pub fn lease(self, lease: Duration) -> Self {
        Self(pb::NewTask {
            lease_duration: Some(proto(lease)),
            ..self.0
        })
    }

    /// The caller's trace context, as a W3C `traceparent`.
    #[must_use]
    pub fn traceparent(self, traceparent: impl Into<String>) -> Self {
        Self(pb::NewTask {
            traceparent: traceparent.into(),
            ..self.0
        })
    }

    /// Makes a retried insert with the same key return the answer of the first. Not for discovered
    /// tasks: there, taskd already recognizes a repeated completion.
    #[must_use]
    pub fn idempotency_key(self, key: impl Into<String>) -> Self {
        Self(pb::NewTask {
            idempotency_key: key.into(),
            ..self.0
        })
    }

    /// What the task shares its limits with, such as the address of a host. Only for queues with a
    /// `limit_by`, which otherwise says it.
    #[must_use]
    pub fn limit_key(self, key: impl Into<String>) -> Self {
        Self(pb::NewTask {
            limit_key: key.into(),
            ..self.0
        })
    }

    /// The tasks of a queue with one sequence go one after the other, in the order of their inserts.
    #[must_use]
    pub fn sequence(self, name: impl Into<String>) -> Self {
        Self(pb::NewTask {
            sequence: name.into(),
            ..self.0
        })
    }

    /// When the task dies, the next ones of its sequence wait until it is sent again or purged.
    #[must_use]
    pub fn hold_when_dead(self) -> Self {
        Self(pb::NewTask {
            on_dead: pb::OnDead::Hold.into(),
            ..self.0
        })
    }

    /// The task is the root of a tree: taskd tells when all that is discovered from it is over.
    #[must_use]
    pub fn new_tree(self, tree: NewTree) -> Self {
        Self(pb::NewTask {
            tree: Some(tree.into()),
            ..self.0
        })
    }

    /// The task joins this tree, which must be open.
    #[must_use]
    pub fn in_tree(self, id: impl Into<String>) -> Self {
        let tree = pb::TaskTree {
            id: id.into(),
            ..Default::default()
        };
        Self(pb::NewTask {
            tree: Some(tree),
            ..self.0
        })
    }

    /// Adds a header, which the worker receives.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.headers.insert(name.into(), value.into());
        self
    }

    fn encoded(self, payload: impl Into<Bytes>, encoding: pb::Encoding) -> Self {
        Self(pb::NewTask {
            payload: payload.into(),
            payload_encoding: encoding.into(),
            ..self.0
        })
    }
}

impl From<pb::NewTask> for NewTask {
    fn from(task: pb::NewTask) -> Self {
        Self(task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_says_all_that_taskd_takes() {
        let second = Duration::from_secs(1);
        let backoff = Backoff::linear(second)
            .maximum(60 * second)
            .jitter(0.5)
            .give_up_after(3600 * second);
        let task = NewTask::new("q", "k")
            .finish_within(second)
            .lease(second)
            .backoff(backoff);
        let task = task.idempotency_key("i").traceparent("t").0;
        let seconds =
            |duration: Option<prost_types::Duration>| duration.map(|duration| duration.seconds);
        assert_eq!(
            (seconds(task.finish_within), seconds(task.lease_duration)),
            (Some(1), Some(1))
        );
        assert_eq!((&*task.idempotency_key, &*task.traceparent), ("i", "t"));
        let backoff = task.backoff.unwrap();
        assert_eq!(
            (backoff.kind(), backoff.jitter),
            (pb::BackoffKind::Linear, Some(0.5))
        );
        assert_eq!(
            [backoff.initial, backoff.maximum, backoff.give_up_after].map(seconds),
            [Some(1), Some(60), Some(3600)]
        );
        let output = NewTask::output("link", "k").0;
        assert_eq!((&*output.queue, &*output.port), ("", "link"));
        let tree = NewTree::new().then("r").timeout(second).hold_on_dead();
        let tree = NewTask::new("q", "k").new_tree(tree).0.tree.unwrap();
        assert_eq!((&*tree.then, seconds(tree.timeout)), ("r", Some(1)));
        assert_eq!(tree.on_dead(), pb::TreeOnDead::Hold);
        let joins = NewTask::new("q", "k").in_tree("i").0.tree.unwrap();
        assert_eq!(joins.id, "i");
        let limit: pb::Backoff = Backoff::of_queue_for(second).into();
        assert_eq!(
            (limit.kind(), seconds(limit.give_up_after)),
            (pb::BackoffKind::Unspecified, Some(1))
        );
    }
}
