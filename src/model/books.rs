//! The books: what came in, what went out, and where the rest is held.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::QueueName;

/// Whether the books of a queue agree.
#[derive(Clone, Copy, Debug, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum BooksState {
    /// Each unfinished task is in SQL's outbox or live in Redis.
    Balanced,
    /// Some are on their way between the two, so the places do not add up at this moment.
    Moving,
    /// The places do not add up, and nothing moves.
    Unbalanced,
}

/// The books of all queues, or of some.
#[derive(Clone, Debug, PartialEq)]
pub struct Books {
    pub at_unix_ms: i64,
    /// What waits on the bus, of all queues. `None`: the caller does not reach all queues.
    pub bus: Option<BusBacklog>,
    /// Rejected tasks whose queue is not known here.
    pub rejected_elsewhere: u64,
    /// By name.
    pub queues: Vec<QueueBooks>,
}

/// Records on the bus that are not dealt with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BusBacklog {
    /// Of `pipeline`: no fanout has dealt with them.
    pub pipeline: u64,
    /// Of `task-results`: they are not settled.
    pub task_results: u64,
}

/// The books of a queue, in tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueBooks {
    pub queue: QueueName,
    pub state: BooksState,
    /// Tasks that came in and were not stored.
    pub duplicates: u64,
    pub rejected: u64,
    /// Tasks that ended, also if they were removed since.
    pub completed: u64,
    pub dead: u64,
    pub cancelled: u64,
    /// Tasks that are stored and have not ended.
    pub held: UnfinishedTasks,
}

/// Where the unfinished tasks of a queue are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnfinishedTasks {
    pub total: u64,
    /// In SQL's outbox, or in a batch that is not published.
    pub fresh: u64,
    pub parked: u64,
    pub scheduled: u64,
    pub missing: u64,
    /// Live in Redis: with a replica to claim, with all replicas leased, with nothing due.
    pub waiting: u64,
    pub assigned: u64,
    pub delayed: u64,
    /// The rest: on the bus, or the report of their end is on its way. Below zero: some are in two
    /// places.
    pub between: i64,
    /// Leases; a task may have several.
    pub leases: u64,
    /// Entries of the shards' outboxes. An entry has all reports of a call.
    pub reports: u64,
    /// Elements by lane; spent ones count.
    pub lanes: BTreeMap<&'static str, u64>,
    /// Shards that Redis has lost.
    pub lost_shards: u64,
}

impl QueueBooks {
    /// All tasks that were ever stored.
    pub fn stored(&self) -> u64 {
        self.held.total + self.completed + self.dead + self.cancelled
    }
}

impl UnfinishedTasks {
    /// Unfinished tasks that Redis has.
    pub fn live(&self) -> u64 {
        self.waiting + self.assigned + self.delayed
    }

    pub fn off_bus(&self) -> u64 {
        self.fresh + self.parked + self.scheduled + self.missing
    }
}
