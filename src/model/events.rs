//! Events: a task took on a status, for those who watch it.

use std::{fmt, str::FromStr};

use bytes::Bytes;
use schemars::JsonSchema;
use serde::Serialize;

use super::{
    ECHO, InsertAnswer, QueueName, Rfc3339, StoredStatus, TaskId, TaskResult, TaskStatus,
    TreeState, rfc_3339, shorten,
};

/// A task took on a status.
#[derive(Clone, Debug, JsonSchema, PartialEq, Eq, Serialize)]
pub struct TaskEvent {
    pub id: TaskId,
    pub queue: QueueName,
    pub status: TaskStatus,
    #[serde(rename = "at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub at_unix_ms: i64,
}

impl TaskEvent {
    pub fn event_id(&self) -> EventId {
        EventId {
            at_unix_ms: self.at_unix_ms,
            status: self.status,
            task: self.id,
        }
    }

    /// The sort key of events: by time, and within one millisecond in the order of a task's life.
    pub fn order(&self) -> (i64, u8) {
        (self.at_unix_ms, self.status.rank())
    }
}

/// The maximum number of events in one row of SQL.
pub const MOST_KEPT_TOGETHER: usize = 1_000;

/// An event to be published to topic `events`. SQL has already stored the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRecord {
    pub id: TaskId,
    pub queue: QueueName,
    pub key: Bytes,
    pub status: TaskStatus,
    pub at_unix_ms: i64,
    pub epoch: u32,
    /// The worker of the last completion, and the number of its attempt.
    pub worker: String,
    pub attempt: u32,
    /// Failures that SQL knows of.
    pub attempts: u32,
    pub reason: String,
    /// The task is the root of a tree that has ended, and this is how. Then nothing has become of
    /// the task, and the epoch is that of the tree.
    pub tree: Option<TreeState>,
}

impl EventRecord {
    pub fn new(id: TaskId, queue: QueueName) -> Self {
        let status = TaskStatus::Pending;
        let at_unix_ms = 0;
        let epoch = 0;
        let attempt = 0;
        let attempts = 0;
        Self {
            id,
            queue,
            key: Default::default(),
            status,
            at_unix_ms,
            epoch,
            worker: Default::default(),
            attempt,
            attempts,
            reason: Default::default(),
            tree: None,
        }
    }

    /// The number of the event at index `place` of row `kept`. It increases with each event of a
    /// task.
    pub fn number(kept: i64, place: usize) -> u64 {
        kept.unsigned_abs() * MOST_KEPT_TOGETHER as u64 + place as u64
    }
}

impl TaskStatus {
    pub fn is_final(self) -> bool {
        self.stored() != StoredStatus::Unfinished
    }

    /// The final status for a status stored in SQL, or `None` if the task is unfinished.
    pub fn of_end(stored: StoredStatus) -> Option<Self> {
        match stored {
            StoredStatus::Unfinished => None,
            StoredStatus::Completed => Some(Self::Completed),
            StoredStatus::Dead => Some(Self::Dead),
            StoredStatus::Cancelled => Some(Self::Cancelled),
        }
    }

    /// The position of a status in the usual life of a task.
    pub fn rank(self) -> u8 {
        match self {
            Self::Pending => 0,
            Self::Delayed => 1,
            Self::Queued => 2,
            Self::Assigned => 3,
            Self::Completed | Self::Dead | Self::Cancelled => 4,
        }
    }
}

/// The id of an event: `<unix ms>-<status>-<task id>`. A watcher that reconnects sends the id of
/// the last event that it received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventId {
    pub at_unix_ms: i64,
    pub status: TaskStatus,
    pub task: TaskId,
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}-{}-{}",
            self.at_unix_ms,
            self.status.as_str(),
            self.task
        )
    }
}

impl FromStr for EventId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.splitn(3, '-');
        let mut part = || parts.next().ok_or(());
        let at = part()?;
        let status = part()?;
        let task = part()?;
        Ok(Self {
            at_unix_ms: at.parse().map_err(|_| ())?,
            status: TaskStatus::ALL
                .into_iter()
                .find(|known| known.as_str() == status)
                .ok_or(())?,
            task: task.parse().map_err(|_| ())?,
        })
    }
}

/// What a watcher receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched {
    Event(TaskEvent),
    /// Events before this point may be missing, because they happened while the watcher was
    /// disconnected.
    Gap,
    /// Nothing happened for a while.
    Beat,
    /// The watch ends. Always the last part, except that an event with a final status also ends the
    /// watch.
    End(WatchEnd),
}

/// Why a watch ends before its task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchEnd {
    /// This process is stopping.
    Stopping,
    /// The token was revoked, or has expired.
    Unauthenticated,
    /// The watcher reads more slowly than events arrive.
    TooSlow,
}

impl WatchEnd {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stopping => "STOPPING",
            Self::Unauthenticated => "UNAUTHENTICATED",
            Self::TooSlow => "TOO_SLOW",
        }
    }

    pub fn says(self) -> &'static str {
        match self {
            Self::Stopping => "this taskd is stopping; connect again",
            Self::Unauthenticated => "the token was revoked, or has expired",
            Self::TooSlow => {
                "events come faster than you read; connect again, and watch fewer tasks"
            }
        }
    }
}

/// The answer to an inserted task after its caller has waited for the task to finish.
#[derive(Clone, Debug, PartialEq)]
pub struct AwaitedTask {
    pub answer: InsertAnswer,
    /// `None` if the task was not stored, or was removed in the meantime.
    pub status: Option<TaskStatus>,
    /// Only of a completed task.
    pub results: Vec<TaskResult>,
    /// The state of its tree, if the caller has waited for that.
    pub tree_state: Option<TreeState>,
}

/// What an insert waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WaitFor {
    /// The ends of the tasks.
    #[default]
    Task,
    /// The ends of the trees of those tasks that name one, and the ends of the other tasks.
    Tree,
}

impl WaitFor {
    /// Of a caller who does not say how long.
    pub const NEEDS_WAIT: &str = "wait_for needs a wait: how long to wait, such as wait=30s";

    /// Reads `task` or `tree`.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "task" => Ok(Self::Task),
            "tree" => Ok(Self::Tree),
            _ => Err(format!(
                "{:?} is nothing to wait for; write task or tree",
                shorten(text, ECHO)
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_ids_are_read_as_they_are_written() {
        for status in TaskStatus::ALL {
            let id = EventId {
                at_unix_ms: 1_700_000_000_123,
                status,
                task: TaskId::new(),
            };
            assert_eq!(id.to_string().parse(), Ok(id));
        }
        for wrong in [
            "",
            "1",
            "1-DEAD",
            "1-ENDED-0190b8c0-0000-7000-8000-000000000000",
            "x-DEAD-0",
            "1-DEAD-x",
        ] {
            assert_eq!(wrong.parse::<EventId>(), Err(()), "{wrong}");
        }
    }
}
