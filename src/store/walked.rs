//! Walks over unfinished tasks: queue by queue, and in each by id.

use std::collections::BTreeMap;

use crate::model::{QueueName, ShardId, TaskId};

/// How far a walk has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Walked {
    pub queue: QueueName,
    pub id: TaskId,
}

impl Walked {
    /// It has come to this queue, and has passed none of its tasks.
    pub fn before(queue: &QueueName) -> Self {
        Self {
            queue: queue.clone(),
            id: TaskId::FIRST,
        }
    }
}

/// A part of the unfinished tasks.
#[derive(Clone, Copy, Debug)]
pub struct Stretch<'a> {
    /// Of this queue; `None`: of all, in the order of their names.
    pub queue: Option<&'a QueueName>,
    pub after: Option<&'a Walked>,
    /// The greatest id. A walk without it may never end in a queue whose tasks come and go fast.
    pub upto: TaskId,
}

impl Stretch<'_> {
    pub const ALL: Self = Self {
        queue: None,
        after: None,
        upto: TaskId::LAST,
    };
}

/// The tasks on the bus in a page of a walk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WalkedPage {
    /// In the order of their ids.
    pub tasks: BTreeMap<ShardId, Vec<TaskId>>,
    /// Where the next page begins; `None`: this is the last one.
    pub next: Option<Walked>,
}
