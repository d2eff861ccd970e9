//! The owners of keys, and tasks that are final since lately.

use std::time::Duration;

use async_trait::async_trait;

use super::Result;
use crate::model::{KeyHash, StoredStatus, TaskId};

/// The part of the store that says which task has a key, and what became of it.
#[async_trait]
pub trait KeyOwners: Send + Sync {
    /// The tasks that have or had these keys, each with its last status, in any order. Leaves out a
    /// key that no task ever had.
    async fn key_owners(&self, keys: &[KeyHash]) -> Result<Vec<(KeyHash, TaskId, StoredStatus)>>;

    /// The tasks among `ids` that became final less than `age` ago, by the database's clock; in any
    /// order.
    async fn lately_final(&self, ids: &[TaskId], age: Duration) -> Result<Vec<TaskId>>;
}
