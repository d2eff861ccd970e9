//! The owners of keys: tasks, or what is left of removed ones. Tasks that are final since lately.

use std::time::Duration;

use async_trait::async_trait;

use super::{keys, retention::before};
use crate::store::sql::{
    SqlStore,
    backend::Backend,
    statement::{Statement, lists},
};
use crate::{
    model::{KeyHash, StoredStatus, TaskId},
    store::{KeyOwners, Result},
};

#[async_trait]
impl<DB: Backend> KeyOwners for SqlStore<DB> {
    async fn key_owners(&self, keys: &[KeyHash]) -> Result<Vec<(KeyHash, TaskId, StoredStatus)>> {
        keys::owners(&self.sql, "key_owners", keys).await
    }
    async fn lately_final(&self, ids: &[TaskId], age: Duration) -> Result<Vec<TaskId>> {
        let mut lately = Vec::new();
        for ids in lists(ids) {
            let statement =
                Statement::new("SELECT id FROM tasks WHERE status <> 0 AND updated_ms > ")
                    .append(before::<DB::Connection>(age))
                    .sql(" AND id IN ")
                    .list(ids);
            lately.extend(self.sql.ids("lately_final", statement).await?);
        }
        Ok(lately)
    }
}
