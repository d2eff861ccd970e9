//! The books: what came in, what went out, and where the rest is.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::QueueName;

/// Whether the books of a queue balance.
#[derive(Clone, Copy, Debug, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum BooksState {
    /// Each unfinished task is in SQL's outbox or live in Redis.
    Balanced,
    /// Some tasks are between the two, so the counts do not add up at this moment.
    Moving,
    /// The counts do not add up, and no task is in transit.
    Unbalanced,
}

/// The books of all queues, or of some.
#[derive(Clone, Debug, PartialEq)]
pub struct Books {
    pub at_unix_ms: i64,
    /// The records waiting on the bus, for all queues. `None` if the caller may not access all
    /// queues.
    pub bus: Option<BusBacklog>,
    /// Rejected tasks whose queue this process does not know.
    pub rejected_elsewhere: u64,
    /// By name.
    pub queues: Vec<QueueBooks>,
}

/// Records on the bus that have not been processed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BusBacklog {
    /// Records of `pipeline` that no fanout has processed.
    pub pipeline: u64,
    /// Records of `task-results` that have not been settled.
    pub task_results: u64,
}

/// The books of a queue, in tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueBooks {
    pub queue: QueueName,
    pub state: BooksState,
    /// Inserted or discovered tasks that were not stored.
    pub duplicates: u64,
    pub rejected: u64,
    /// Finished tasks, including those that have since been removed.
    pub completed: u64,
    pub dead: u64,
    pub cancelled: u64,
    /// Tasks that are stored and unfinished.
    pub held: UnfinishedTasks,
}

/// Where the unfinished tasks of a queue are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnfinishedTasks {
    pub total: u64,
    /// In SQL's outbox, or in a batch that has not been published.
    pub fresh: u64,
    pub parked: u64,
    /// Enough tasks of their limit keys are in Redis.
    pub crowded: u64,
    /// Behind others of their sequences.
    pub behind: u64,
    pub scheduled: u64,
    pub missing: u64,
    /// Live in Redis: with a replica to claim, with all remaining replicas leased, or with no
    /// replica due yet.
    pub waiting: u64,
    /// Those of them that wait behind their limit keys, and items there that count no more.
    pub behind_limits: u64,
    pub assigned: u64,
    pub delayed: u64,
    /// The remaining tasks: on the bus, or finished with a report that has not reached SQL.
    /// Negative if some tasks are counted in two places.
    pub between: i64,
    /// The number of leases. A task may have several.
    pub leases: u64,
    /// The number of entries in the shards' outboxes. An entry holds all reports of one call.
    pub reports: u64,
    /// The number of elements in each lane, including spent ones.
    pub lanes: BTreeMap<&'static str, u64>,
    /// Shards that Redis has lost.
    pub lost_shards: u64,
}

impl QueueBooks {
    /// All tasks ever stored.
    pub fn stored(&self) -> u64 {
        self.held.total + self.completed + self.dead + self.cancelled
    }
}

impl UnfinishedTasks {
    /// The number of unfinished tasks in Redis.
    pub fn live(&self) -> u64 {
        self.waiting + self.assigned + self.delayed
    }

    pub fn off_bus(&self) -> u64 {
        self.fresh + self.parked + self.crowded + self.behind + self.scheduled + self.missing
    }
}
