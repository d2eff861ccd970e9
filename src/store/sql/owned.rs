//! The owners of keys: tasks, or what is left of removed ones. Tasks that are final since lately.

use std::time::Duration;

use async_trait::async_trait;

use super::{
    SqlStore,
    backend::Backend,
    retention::before,
    rows::{key_hash, status, task_id},
    statement::{Statement, lists},
};
use crate::{
    model::{KeyHash, StoredStatus, TaskId},
    store::{KeyOwners, Result},
};

#[async_trait]
impl<DB: Backend> KeyOwners for SqlStore<DB> {
    async fn key_owners(&self, keys: &[KeyHash]) -> Result<Vec<(KeyHash, TaskId, StoredStatus)>> {
        const STORED: &str = "SELECT key_hash, id, status FROM tasks WHERE key_hash IN ";
        const REMOVED: &str = "SELECT key_hash, task_id, status FROM seen WHERE key_hash IN ";
        let mut owners = Vec::new();
        for keys in lists(keys) {
            for text in [STORED, REMOVED] {
                let statement = Statement::new(text).list(keys);
                for (hash, id, number) in self.sql.read::<(Vec<u8>, Vec<u8>, i64)>("key_owners", statement).await? {
                    owners.push((key_hash(&hash)?, task_id(&id)?, status(number)?));
                }
            }
        }
        Ok(owners)
    }
    async fn lately_final(&self, ids: &[TaskId], age: Duration) -> Result<Vec<TaskId>> {
        let mut lately = Vec::new();
        for ids in lists(ids) {
            let statement = Statement::new("SELECT id FROM tasks WHERE status <> 0 AND updated_ms > ")
                .append(before::<DB::Connection>(age))
                .sql(" AND id IN ")
                .list(ids);
            for (id,) in self.sql.read::<(Vec<u8>,)>("lately_final", statement).await? {
                lately.push(task_id(&id)?);
            }
        }
        Ok(lately)
    }
}
