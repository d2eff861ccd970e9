//! What finished long ago: removed, but for its key.
//!
//! A key stands in `tasks` or in `seen`, never in both, and moves once, in one transaction. An insert asks the unique key of `tasks` first and
//! `seen` then, as of that moment: where a removal has freed the key, it has committed the move, and `seen` has it.

use std::{collections::HashMap, time::Duration};

use super::{
    outbox,
    rows::{key_hash, status, task_id},
    statement::{Session, Statement, lists, pieces},
};
use crate::model::{KeyHash, StoredStatus, TaskId};
use crate::store::Result;

/// What is known of a task that was removed.
#[derive(Clone, Copy)]
pub(super) struct Removed {
    pub(super) id: TaskId,
    pub(super) status: StoredStatus,
}

/// Those of the keys whose tasks were removed. `lock` is [`super::Dialect::FOR_SHARE`] or empty.
pub(super) async fn removed<S: Session>(
    session: &mut S,
    hashes: &[KeyHash],
    lock: &str,
) -> Result<HashMap<KeyHash, Removed>> {
    let mut found = HashMap::new();
    for hashes in lists(hashes) {
        let statement = Statement::new("SELECT key_hash, task_id, status FROM seen ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE key_hash IN ")
            .list(hashes)
            .sql(lock);
        for (hash, id, number) in session.fetch::<(Vec<u8>, Vec<u8>, i64)>(statement).await? {
            found.insert(key_hash(&hash)?, Removed { id: task_id(&id)?, status: status(number)? });
        }
    }
    Ok(found)
}

/// The first tasks to finish, at least `age` ago by the database's clock.
pub(super) fn finished<'a, S: Session>(age: Duration, limit: u32) -> Statement<'a> {
    // Each status has a stretch of the index of its own, in order.
    let of_status = |status: StoredStatus| {
        Statement::new("SELECT * FROM (SELECT id, updated_ms FROM tasks ")
            .sql(&S::by_index("tasks_finished"))
            // SQLite takes a partial index only for a condition that has its words.
            .sql(" WHERE status <> 0 AND status = ? AND ")
            .bind(status)
            .append(old_enough::<S>(age))
            .sql(" ORDER BY updated_ms LIMIT ?)")
            .bind(limit)
    };
    Statement::new("SELECT id FROM (")
        .append(of_status(StoredStatus::Completed))
        .sql(" AS completed UNION ALL ")
        .append(of_status(StoredStatus::Dead))
        .sql(" AS dead UNION ALL ")
        .append(of_status(StoredStatus::Cancelled))
        .sql(" AS cancelled) AS finished ORDER BY updated_ms LIMIT ?")
        .bind(limit)
}

fn old_enough<'a, S: Session>(age: Duration) -> Statement<'a> {
    let age_ms = i64::try_from(age.as_millis()).unwrap_or(i64::MAX);
    Statement::new("updated_ms <= ").sql(S::NOW_MS).sql(" - ?").bind(age_ms)
}

/// Removes those of `ids` that are still as long finished, with all that belongs to them, and keeps their keys; how many.
pub(super) async fn remove<S: Session>(session: &mut S, ids: &[TaskId], age: Duration) -> Result<u64> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    let mut count = 0;
    for ids in lists(&ids) {
        let still = Statement::new("SELECT key_hash, id, status FROM tasks WHERE status <> 0 AND ")
            .append(old_enough::<S>(age))
            .sql(" AND id IN ")
            .list(ids)
            .sql(" ORDER BY id")
            .sql(S::FOR_UPDATE);
        let mut moved = Vec::new();
        for (hash, id, number) in session.fetch::<(Vec<u8>, Vec<u8>, i64)>(still).await? {
            moved.push((key_hash(&hash)?, task_id(&id)?, status(number)?));
        }
        if moved.is_empty() {
            continue;
        }
        moved.sort_unstable_by_key(|(hash, ..)| *hash);
        for piece in pieces(&moved, |_| 0) {
            let rows = piece.iter().map(|(hash, id, status)| [hash.into(), id.into(), (*status).into()]);
            let keep = Statement::new("INSERT INTO seen (key_hash, task_id, status)").values(rows);
            session.execute(keep.sql(&S::keep_first("status"))).await?;
        }
        let ids: Vec<TaskId> = moved.iter().map(|(_, id, _)| *id).collect();
        for table in ["DELETE FROM results WHERE task_id IN ", "DELETE FROM tasks WHERE id IN "] {
            session.execute(Statement::new(table).list(&ids)).await?;
        }
        // What is final has left it; a row without its task would stand in the way for ever.
        outbox::remove(session, &ids).await?;
        count += ids.len() as u64;
    }
    Ok(count)
}
