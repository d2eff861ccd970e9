//! Removal of tasks that finished long ago. Their keys stay, except that the key of a dead task is
//! removed with its letter: from then on nobody can send the task again, so its key may be inserted
//! again. A purge keeps the key.
//!
//! In MySQL a key is in `tasks` or in `seen`, never in both, and moves once, in one transaction. An
//! insert asks the unique key of `tasks` first, and then `seen` in its present state. A removal
//! that has freed the key has committed, so `seen` has the key. In SQLite `seen` may also have the
//! key of a stored task, with status 0.

use std::{collections::HashMap, time::Duration};

use super::steps::Steps;
use crate::{
    model::{KeyHash, StoredStatus, TaskId, millis},
    store::{
        Result,
        sql::{
            outbox::entries,
            rows::{key_hash, status, task_id},
            session::Session,
            statement::{Statement, lists, pieces},
        },
    },
};

/// A removed task. In SQLite, status 0 means that the task was not removed.
#[derive(Clone, Copy)]
pub(crate) struct Removed {
    pub(crate) id: TaskId,
    pub(crate) status: StoredStatus,
}

/// The removed tasks that had these keys. `lock` is `Dialect::FOR_SHARE` or empty.
pub(crate) async fn removed<S: Session>(
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
            found.insert(
                key_hash(&hash)?,
                Removed {
                    id: task_id(&id)?,
                    status: status(number)?,
                },
            );
        }
    }
    Ok(found)
}

/// The tasks that finished earliest, at least `age` ago by the database's clock.
pub(crate) fn finished<'a, S: Session>(age: Duration, limit: u32) -> Statement<'a> {
    // The index has a sorted range for each status.
    let of_status = |status: StoredStatus| {
        Statement::new("SELECT * FROM (SELECT id, updated_ms FROM tasks ")
            .sql(&S::by_index("tasks_finished"))
            // SQLite only uses a partial index for a condition that repeats the one of the index.
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
    Statement::new("updated_ms <= ").append(before::<S>(age))
}

/// The time `age` ago by the database's clock.
pub(crate) fn before<'a, S: Session>(age: Duration) -> Statement<'a> {
    let age_ms = millis(age);
    Statement::new(S::NOW_MS).sql(" - ?").bind(age_ms)
}

/// Which finished tasks to remove.
#[derive(Clone, Copy)]
pub(crate) enum Which {
    /// Tasks that finished at least this long ago.
    Old(Duration),
    /// Dead tasks.
    Dead,
}

impl Which {
    /// Whether inserting the key of a removed task remains a duplicate.
    fn keeps_key_of(self, status: StoredStatus) -> bool {
        match self {
            Self::Old(_) => status != StoredStatus::Dead,
            Self::Dead => true,
        }
    }
}

/// Removes those of `ids` that `which` selects, with their letters and histories. Returns how many.
pub(crate) async fn remove<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    which: Which,
    steps: &mut Steps,
) -> Result<u64> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    let mut count = 0;
    for ids in lists(&ids) {
        let condition = match which {
            Which::Old(age) => old_enough::<S>(age),
            Which::Dead => Statement::new("status = 2"),
        };
        let still = Statement::new("SELECT key_hash, id, status FROM tasks ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE status <> 0 AND ")
            .append(condition)
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
        let mut kept = moved.clone();
        kept.retain(|(.., status)| which.keeps_key_of(*status));
        kept.sort_unstable_by_key(|(hash, ..)| *hash);
        for piece in pieces(&kept, |_| 0) {
            let rows = piece
                .iter()
                .map(|(hash, id, status)| [hash.into(), id.into(), (*status).into()]);
            let keep = Statement::new("INSERT INTO seen (key_hash, task_id, status)").values(rows);
            session
                .execute(keep.sql(&S::replace("key_hash", &["task_id", "status"])))
                .await?;
        }
        for (_, id, status) in &moved {
            steps.removed(*id, *status);
        }
        let ids: Vec<TaskId> = moved.iter().map(|(_, id, _)| *id).collect();
        // Deleted before the tasks, because SQLite finds results through the rows of tasks.
        session
            .execute(Statement::new("DELETE FROM results WHERE ").append(S::of_tasks(&ids)))
            .await?;
        const TABLES: [&str; 4] = [
            "DELETE FROM tasks WHERE id IN ",
            "DELETE FROM letters WHERE id IN ",
            "DELETE FROM history WHERE task_id IN ",
            "DELETE FROM changes WHERE task_id IN ",
        ];
        for table in TABLES {
            session.execute(Statement::new(table).list(&ids)).await?;
        }
        // A final task should not be in the outbox. If it were, its row would stay there forever.
        entries::remove(session, &ids).await?;
        count += ids.len() as u64;
    }
    Ok(count)
}
