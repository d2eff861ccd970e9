//! Changes of live work: what an operator may want of unfinished tasks, and what became of it.

use super::{Act, Priority, QueueName, ShardId, TaskId};

/// A change of unfinished tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// No worker does the task any more.
    Cancel,
}

impl Change {
    /// The words of the act of an operator.
    pub fn act(&self) -> String {
        match self {
            Self::Cancel => "cancel task".to_owned(),
        }
    }
}

/// The kind of a change that SQL keeps until the queue has it, as the discriminants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ChangeKind {
    Cancel = 1,
}

impl ChangeKind {
    pub const ALL: [Self; 1] = [Self::Cancel];

    /// The name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
        }
    }
}

/// The outcome of a change for one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Changed {
    Done,
    /// Workers had completed the task before.
    AlreadyCompleted,
    /// The task had failed for good before.
    Dead,
    /// Somebody had cancelled it before.
    Cancelled,
    /// There is no such task, or it finished so long ago that it was removed.
    Unknown,
    /// SQL has the wish, and a server does not answer now: the watchdog applies it.
    Later,
}

impl Changed {
    /// The name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::AlreadyCompleted => "completed",
            Self::Dead => "dead",
            Self::Cancelled => "cancelled",
            Self::Unknown => "unknown",
            Self::Later => "later",
        }
    }
}

/// A task that a change is about, as SQL has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangingTask {
    pub id: TaskId,
    pub shard: ShardId,
    pub replicas: u32,
    pub priority: Priority,
    /// How often the task was sent again.
    pub epoch: u32,
}

/// A task by its id, and the queue that says who reaches it.
pub type OwnedTask = (TaskId, QueueName);

/// An act of an operator about a task.
pub type TaskAct = (TaskId, Act);
