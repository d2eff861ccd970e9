//! The owners of keys.
//!
//! If `tasks` has a unique index of keys, that index and, for removed tasks, `seen` are queried.
//! Otherwise the database keeps the latest keys in memory, and `seen` has all others.

use std::collections::HashMap;

use crate::{
    model::{KeyHash, StoredStatus, TaskId},
    store::{
        Result,
        sql::{
            backend::Backend,
            dialect::Dialect,
            rows::{key_hash, status, task_id},
            runner::Runner,
            session::{Recent, Session},
            statement::{Statement, lists},
            tasks::retention::{Removed, removed},
        },
    },
};

/// The owners of keys: those in memory, checked against SQL, and the others from `seen`.
///
/// A key whose task no longer exists is free, because somebody has deleted the task from the
/// database.
pub(crate) async fn owners_by_memory<S: Session>(
    session: &mut S,
    Recent {
        owners: recent,
        others,
    }: Recent,
) -> Result<HashMap<KeyHash, Removed>> {
    let stored = |(hash, id)| {
        (
            hash,
            Removed {
                id,
                status: StoredStatus::Unfinished,
            },
        )
    };
    let mut owners: HashMap<KeyHash, Removed> = recent.into_iter().map(stored).collect();
    owners.extend(removed(session, &others, "").await?);
    let open = |owner: &&Removed| owner.status == StoredStatus::Unfinished;
    let mut ids: Vec<TaskId> = owners.values().filter(open).map(|owner| owner.id).collect();
    ids.sort_unstable();
    let mut statuses = HashMap::with_capacity(ids.len());
    for ids in lists(&ids) {
        let found = Statement::new("SELECT id, status FROM tasks WHERE id IN ").list(ids);
        for (id, number) in session.fetch::<(Vec<u8>, i64)>(found).await? {
            statuses.insert(task_id(&id)?, status(number)?);
        }
    }
    let is_gone = |owner: &Removed| {
        owner.status == StoredStatus::Unfinished && !statuses.contains_key(&owner.id)
    };
    let gone: Vec<KeyHash> = owners
        .iter()
        .filter(|(_, owner)| is_gone(owner))
        .map(|(hash, _)| *hash)
        .collect();
    // Memory still has the keys of recently removed tasks.
    owners.extend(removed(session, &gone, "").await?);
    owners.retain(|_, owner| match statuses.get(&owner.id) {
        Some(status) => {
            owner.status = *status;
            true
        }
        None => owner.status != StoredStatus::Unfinished,
    });
    Ok(owners)
}

/// The tasks that have or had these keys, each with its last status.
pub(crate) async fn owners<DB: Backend>(
    sql: &Runner<DB>,
    name: &'static str,
    keys: &[KeyHash],
) -> Result<Vec<(KeyHash, TaskId, StoredStatus)>> {
    type Row = (Vec<u8>, Vec<u8>, i64);
    let mut owners = HashMap::new();
    for keys in lists(keys) {
        // Queried before `seen`, because keys move from memory to `seen`.
        let stored = match sql.0.recent(keys).await? {
            Some(recent) => {
                let mut ids: Vec<TaskId> = recent.owners.into_values().collect();
                ids.extend(keys.iter().filter_map(KeyHash::task_without_key));
                let by_id = Statement::new("SELECT key_hash, id, status FROM tasks WHERE id IN ");
                if ids.is_empty() {
                    Vec::new()
                } else {
                    sql.read::<Row>(name, by_id.list(&ids)).await?
                }
            }
            None => {
                let by_key =
                    Statement::new("SELECT key_hash, id, status FROM tasks WHERE key_hash IN ");
                sql.read::<Row>(name, by_key.list(keys)).await?
            }
        };
        let seen = Statement::new(DB::Connection::SEEN_KEYS).list(keys);
        for (hash, id, number) in stored.into_iter().chain(sql.read::<Row>(name, seen).await?) {
            owners.insert(key_hash(&hash)?, (task_id(&id)?, status(number)?));
        }
    }
    Ok(owners
        .into_iter()
        .map(|(hash, (id, status))| (hash, id, status))
        .collect())
}
