//! The part of the store that remembers what happened to tasks.

use std::time::Duration;

use async_trait::async_trait;

use super::Result;
use crate::model::{Act, Attempt, FailedAttempt, TaskId};

/// How many failed attempts of a task stay; the earliest ones go first.
pub const FAILURES_STAY: u32 = 100;

/// The attempts of a task that are over, the earliest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attempts {
    /// At most [`FAILURES_STAY`].
    pub failed: Vec<Attempt>,
    /// The last `limit` attempts.
    pub completed: Vec<Attempt>,
    /// How many results the task has.
    pub results: u32,
}

/// Histories of tasks: failed attempts, and the acts of operators.
#[async_trait]
pub trait History: Send + Sync {
    /// Keeps failed attempts of stored tasks. One that is kept already stays as it is.
    async fn keep_failures(&self, failures: &[FailedAttempt]) -> Result<()>;

    /// The attempts of a task that are over.
    async fn attempts(&self, id: TaskId, limit: u32) -> Result<Attempts>;

    /// Removes at most `limit` failed attempts that are at least `age` old, by the database's
    /// clock. Answers how many.
    async fn remove_old_failures(&self, age: Duration, limit: u32) -> Result<u64>;

    /// Records acts that change no token. One that is recorded already stays as it is.
    async fn keep_acts(&self, acts: &[Act]) -> Result<()>;

    /// The last acts with this target, the earliest first.
    async fn acts_on(&self, target: &str, limit: u32) -> Result<Vec<Act>>;

    /// The time from which lease tokens may say when their leases were given. An older taskd
    /// refuses them.
    async fn lease_times_from(&self) -> Result<i64>;
}
