//! How many tasks the queues had: each ten seconds of the last hour, and each five minutes of the
//! last day.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Rfc3339, rfc_3339};

/// A span of time whose depths are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DepthSpan {
    Hour,
    Day,
}

impl DepthSpan {
    pub const ALL: [Self; 2] = [Self::Hour, Self::Day];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hour => "hour",
            Self::Day => "day",
        }
    }

    pub fn ms(self) -> i64 {
        match self {
            Self::Hour => 3_600_000,
            Self::Day => 24 * 3_600_000,
        }
    }

    /// The time between two entries.
    pub fn step_ms(self) -> i64 {
        match self {
            Self::Hour => 10_000,
            Self::Day => 300_000,
        }
    }

    /// The entries that are kept.
    pub fn entries(self) -> i64 {
        self.ms() / self.step_ms()
    }
}

/// The tasks of a queue at a time: the first four are what it has, the others totals. Redis keeps
/// them as an array.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "[u64; 7]", into = "[u64; 7]")]
pub struct QueueDepths {
    pub pending: u64,
    pub waiting: u64,
    pub assigned: u64,
    pub delayed: u64,
    pub completed: u64,
    pub dead: u64,
    pub cancelled: u64,
}

impl From<[u64; 7]> for QueueDepths {
    fn from(numbers: [u64; 7]) -> Self {
        let [
            pending,
            waiting,
            assigned,
            delayed,
            completed,
            dead,
            cancelled,
        ] = numbers;
        Self {
            pending,
            waiting,
            assigned,
            delayed,
            completed,
            dead,
            cancelled,
        }
    }
}

impl From<QueueDepths> for [u64; 7] {
    fn from(depths: QueueDepths) -> Self {
        [
            depths.pending,
            depths.waiting,
            depths.assigned,
            depths.delayed,
            depths.completed,
            depths.dead,
            depths.cancelled,
        ]
    }
}

impl QueueDepths {
    pub fn unfinished(&self) -> u64 {
        self.pending + self.waiting + self.assigned + self.delayed
    }

    /// Sets `pending` from the number of unfinished tasks in SQL, after the other numbers were read
    /// in Redis.
    pub fn set_unfinished(&mut self, unfinished: u64) {
        // A task that ended between the two reads was assigned before. It is counted once, as
        // ended, so that the number of inserted tasks does not fall afterwards.
        let at_rest = self.waiting + self.delayed;
        self.assigned = self.assigned.min(unfinished.saturating_sub(at_rest));
        self.pending = unfinished.saturating_sub(at_rest + self.assigned);
    }

    /// The tasks that have ended.
    pub fn ended(&self) -> u64 {
        self.completed + self.dead + self.cancelled
    }

    /// The tasks that were ever inserted.
    pub fn inserted(&self) -> u64 {
        self.unfinished() + self.ended()
    }

    pub fn add(&mut self, other: &Self) {
        self.pending += other.pending;
        self.waiting += other.waiting;
        self.assigned += other.assigned;
        self.delayed += other.delayed;
        self.completed += other.completed;
        self.dead += other.dead;
        self.cancelled += other.cancelled;
    }
}

/// The depths of all queues at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DepthEntry {
    #[serde(rename = "at")]
    pub at_unix_ms: i64,
    /// By the name of the queue. The sum of those that have no place is at the empty name.
    pub queues: Vec<(String, QueueDepths)>,
}

/// The depths of all queues in both spans, the oldest entry first.
#[derive(Clone, Debug, Default)]
pub struct DepthEntries {
    pub hour: Vec<Arc<DepthEntry>>,
    pub day: Vec<Arc<DepthEntry>>,
}

impl DepthEntries {
    pub fn of(&self, span: DepthSpan) -> &[Arc<DepthEntry>] {
        match span {
            DepthSpan::Hour => &self.hour,
            DepthSpan::Day => &self.day,
        }
    }
}

/// The tasks of a queue, or of several, at a time.
#[derive(Clone, Debug, JsonSchema, PartialEq, Eq, Serialize)]
pub struct HistoryPoint {
    #[serde(rename = "at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub at_unix_ms: i64,
    pub pending: u64,
    pub waiting: u64,
    pub assigned: u64,
    pub delayed: u64,
    /// All tasks that were inserted until then. For several queues, this and the following totals
    /// begin at any number: only their differences count.
    pub inserted: u64,
    /// All that were completed until then, and so on. So rates are differences.
    pub completed: u64,
    pub dead: u64,
    pub cancelled: u64,
}

impl HistoryPoint {
    pub fn new(at_unix_ms: i64, depths: &QueueDepths) -> Self {
        Self {
            at_unix_ms,
            pending: depths.pending,
            waiting: depths.waiting,
            assigned: depths.assigned,
            delayed: depths.delayed,
            inserted: depths.inserted(),
            completed: depths.completed,
            dead: depths.dead,
            cancelled: depths.cancelled,
        }
    }
}

/// How many tasks there were, the oldest point first. It begins anew when Redis loses it.
#[derive(Clone, Debug, Default, JsonSchema, Serialize)]
pub struct History {
    /// The last hour, a point each 10 seconds.
    pub hour: Vec<HistoryPoint>,
    /// The last day, a point each 5 minutes.
    pub day: Vec<HistoryPoint>,
    /// Without a queue, if there were more queues than have a place: the totals lack some of them,
    /// and if the token reaches only some queues, all numbers do.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
}
