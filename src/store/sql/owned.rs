//! The owners of keys: tasks, or what is left of removed ones.

use async_trait::async_trait;

use super::{
    SqlStore,
    backend::Backend,
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
}
