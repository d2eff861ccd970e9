//! Trees as they are: their counts and their ends.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::Serialize;

use super::{
    Backoff, Encoding, KeyHash, Priority, QueueName, Rfc3339, TaskCursor, TaskId, TaskRow,
    TaskView, ThenTask, TreeOnDead, TreeState, rfc_3339, some_rfc_3339, to_rfc_3339,
};

impl From<&TaskRow> for ThenTask {
    fn from(row: &TaskRow) -> Self {
        Self {
            queue: row.queue.as_str().to_owned(),
            shard: row.partition,
            replicas: row.replicas,
            priority: row.priority as i64,
            max_attempts: row.max_attempts,
            lease_ms: row.lease_ms,
            limit_key: row.limit_key.clone(),
            backoff: row
                .backoff
                .map(|backoff| backoff.packed(backoff.give_up_after_ms).to_vec()),
        }
    }
}

impl ThenTask {
    /// The task of an end. Its id follows from the tree and the epoch, and it takes no key, so
    /// nothing that exists can be in its way.
    ///
    /// Returns `None` if the queue's name is not valid, which happens only if somebody has changed
    /// the row in SQL.
    pub fn row(&self, end: &TreeEnd) -> Option<TaskRow> {
        let epoch = end.epoch.to_be_bytes();
        let id = TaskId::derived_from(
            &[b"then", &end.tree.as_bytes()[..], &epoch],
            end.ended_unix_ms,
        );
        let payload = serde_json::to_vec(end).expect("texts and numbers are always JSON");
        self.task(id, payload.into(), end.ended_unix_ms)
    }

    /// The task with this id and this payload in JSON, without a key.
    pub(super) fn task(&self, id: TaskId, payload: Bytes, at_unix_ms: i64) -> Option<TaskRow> {
        let backoff = match &self.backoff {
            None => None,
            Some(packed) => Some(Backoff::unpacked(packed).ok()?),
        };
        Some(TaskRow {
            id,
            queue: QueueName::new(&self.queue).ok()?,
            partition: self.shard,
            key: Bytes::new(),
            key_hash: KeyHash::without_key(id),
            payload,
            payload_encoding: Encoding::Json,
            replicas: self.replicas,
            priority: Priority::from_number(self.priority),
            max_attempts: self.max_attempts,
            lease_ms: self.lease_ms,
            not_before_unix_ms: 0,
            headers: Vec::new(),
            traceparent: String::new(),
            created_unix_ms: at_unix_ms,
            backoff,
            deadline_unix_ms: 0,
            limit_key: self.limit_key.clone(),
            sequence: None,
            idempotency: None,
            tree: None,
            execution: None,
        })
    }

    #[cfg(test)]
    pub(super) fn of_queue(queue: &str) -> Self {
        Self {
            queue: queue.to_owned(),
            shard: 0,
            replicas: 1,
            priority: Priority::Medium as i64,
            max_attempts: 3,
            lease_ms: 60_000,
            limit_key: String::new(),
            backoff: None,
        }
    }
}

/// The end of a tree: the payload of its `then` task.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct TreeEnd {
    pub tree: TaskId,
    // The queue of its root.
    pub queue: QueueName,
    pub state: TreeState,
    pub epoch: u32,
    pub tasks: u64,
    pub completed: u64,
    pub dead: u64,
    pub cancelled: u64,
    pub letters: u64,
    #[serde(rename = "opened_at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub opened_unix_ms: i64,
    #[serde(rename = "ended_at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub ended_unix_ms: i64,
}

// A tree, as SQL has it.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "Tree")]
pub struct TreeView {
    /// The id of its root.
    pub id: TaskId,
    /// The queue of its root.
    pub queue: QueueName,
    pub state: TreeState,
    /// How often it was opened again after an end.
    pub epoch: u32,
    /// Tasks that were ever added to it.
    pub tasks: u64,
    /// Unfinished tasks.
    pub open: u64,
    /// Dead tasks that keep it open, with `on_dead = hold`.
    pub held: u64,
    pub completed: u64,
    /// Tasks that are dead and were not sent again, those that hold it included.
    pub dead: u64,
    pub cancelled: u64,
    /// Discovered tasks that were not stored, and were not sent again.
    pub letters: u64,
    /// Surplus reports, whose discovered tasks are outside of the tree, and outputs that came to a join
    /// of no subtree.
    pub late: u64,
    /// Subtrees that joins wait for.
    pub joins: u64,
    /// Somebody has cancelled it: nothing is added any more.
    pub cancelling: bool,
    pub on_dead: TreeOnDead,
    /// The queue that gets a task at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub then: Option<String>,
    #[serde(
        rename = "deadline",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub deadline_unix_ms: Option<i64>,
    #[serde(rename = "opened_at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub opened_unix_ms: i64,
    #[serde(
        rename = "ended_at",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub ended_unix_ms: Option<i64>,
}

impl TreeView {
    /// What keeps the tree open. Dead tasks do not hold it while it is being cancelled.
    pub fn waits_for(&self) -> u64 {
        if self.cancelling {
            return self.open;
        }
        self.open.saturating_add(self.held)
    }

    /// The end of this tree at a time, with its present counts.
    pub fn end(&self, ended_unix_ms: i64) -> TreeEnd {
        let is_failed = self.dead > 0 || self.cancelled > 0 || self.letters > 0;
        let state = if is_failed && self.on_dead != TreeOnDead::Ignore {
            TreeState::Failed
        } else {
            TreeState::Done
        };
        TreeEnd {
            tree: self.id,
            queue: self.queue.clone(),
            state,
            epoch: self.epoch,
            tasks: self.tasks,
            completed: self.completed,
            dead: self.dead,
            cancelled: self.cancelled,
            letters: self.letters,
            opened_unix_ms: self.opened_unix_ms,
            ended_unix_ms,
        }
    }

    /// One line about the tree, for `taskd explain`.
    pub fn says(&self) -> String {
        let id = self.id;
        match self.state {
            TreeState::Open if self.held > 0 => format!(
                "tree {id}: OPEN, {} of {} tasks unfinished, {} dead ones hold it",
                self.open, self.tasks, self.held
            ),
            TreeState::Open => format!(
                "tree {id}: OPEN, {} of {} tasks unfinished",
                self.open, self.tasks
            ),
            state => format!(
                "tree {id}: {state} since {}, {} tasks, {} completed",
                to_rfc_3339(self.ended_unix_ms.unwrap_or_default()),
                self.tasks,
                self.completed
            ),
        }
    }
}

/// The tasks of a tree that are in one queue, by status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TreeQueue {
    pub queue: QueueName,
    pub unfinished: u64,
    pub completed: u64,
    pub dead: u64,
    pub cancelled: u64,
}

/// A tree with what is in it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TreeFile {
    #[serde(flatten)]
    pub tree: TreeView,
    /// Its tasks by queue and status, as far as SQL still has them.
    pub queues: Vec<TreeQueue>,
    /// The tree has more tasks than `queues` counts: the first 100,000.
    pub at_least: bool,
    /// The oldest tasks that it waits for.
    pub waits_for: Vec<TreeWait>,
}

/// A task that a tree waits for.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TreeWait {
    #[serde(flatten)]
    pub task: TaskView,
    /// Where the task is, or which worker holds it. Left out if a server that knows does not answer.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub says: String,
    /// What happens next.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub next: String,
}

/// Which trees to list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TreePages {
    /// Of roots in this queue.
    pub queue: Option<QueueName>,
    pub state: Option<TreeState>,
    /// Opened at this time or later.
    pub since_unix_ms: Option<i64>,
    /// 0 means the operation's default.
    pub limit: u32,
    /// Where the page begins, or `None` for the newest tree.
    pub after: Option<TaskCursor>,
}

/// Trees, newest first, and where the next page begins.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct TreeList {
    pub trees: Vec<TreeView>,
    #[serde(rename = "cursor", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub next: Option<TaskCursor>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view() -> TreeView {
        TreeView {
            id: TaskId::at(1_000, 0),
            queue: QueueName::new("q").unwrap(),
            state: TreeState::Open,
            epoch: 0,
            tasks: 3,
            open: 0,
            held: 0,
            completed: 3,
            dead: 0,
            cancelled: 0,
            letters: 0,
            late: 1,
            joins: 0,
            cancelling: false,
            on_dead: TreeOnDead::Count,
            then: None,
            deadline_unix_ms: None,
            opened_unix_ms: 1_000,
            ended_unix_ms: None,
        }
    }

    #[test]
    fn a_tree_fails_by_what_counts() {
        let ends = |view: TreeView| view.end(2_000).state;
        assert_eq!(ends(view()), TreeState::Done, "late reports do not count");
        for failed in [
            TreeView { dead: 1, ..view() },
            TreeView {
                cancelled: 1,
                ..view()
            },
            TreeView {
                letters: 1,
                ..view()
            },
        ] {
            assert_eq!(ends(failed.clone()), TreeState::Failed);
            let held = TreeView {
                on_dead: TreeOnDead::Hold,
                ..failed.clone()
            };
            assert_eq!(ends(held), TreeState::Failed);
            let ignored = TreeView {
                on_dead: TreeOnDead::Ignore,
                ..failed
            };
            assert_eq!(ends(ignored), TreeState::Done);
        }
    }

    #[test]
    fn the_task_of_an_end_follows_from_tree_and_epoch() {
        let then = ThenTask {
            queue: "reports".into(),
            shard: 2,
            replicas: 1,
            priority: Priority::Low as i64,
            max_attempts: 5,
            lease_ms: 30_000,
            limit_key: String::new(),
            backoff: None,
        };
        let end = view().end(2_000);
        let row = then.row(&end).unwrap();
        assert_eq!(row, then.row(&end).unwrap());
        assert_eq!((row.partition, row.priority), (2, Priority::Low));
        assert!(!row.has_key());
        let next = TreeView { epoch: 1, ..view() }.end(2_000);
        assert_ne!(then.row(&next).unwrap().id, row.id);
        let payload: serde_json::Value = serde_json::from_slice(&row.payload).unwrap();
        assert_eq!(payload["state"], "DONE");
        assert_eq!(payload["ended_at"], "1970-01-01T00:00:02Z");
        let stored = serde_json::to_string(&then).unwrap();
        assert_eq!(serde_json::from_str::<ThenTask>(&stored).unwrap(), then);
    }
}
