//! Removal of tasks that finished long ago. Their keys stay, except that the key of a dead task is
//! removed with its letter: from then on nobody can send the task again, so its key may be inserted
//! again. A purge keeps the key.
//!
//! In MySQL a key is in `tasks` or in `seen`, never in both, and moves once, in one transaction. An
//! insert asks the unique key of `tasks` first, and then `seen` in its present state. A removal
//! that has freed the key has committed, so `seen` has the key. In SQLite `seen` may also have the
//! key of a stored task, with status 0.

use std::{collections::HashMap, time::Duration};

use super::{
    belongs::{BELONGS_COLUMNS, BelongsColumns},
    steps::Steps,
    unread::unread,
};
use crate::{
    model::{KeyHash, StoredStatus, TaskId, millis},
    store::{
        CompletedPage, Result,
        sql::{
            executions::inbox,
            outbox::entries,
            rows::{columns, key_hash, queue_name, status, task_id},
            session::Session,
            statement::{Statement, lists, pieces},
        },
    },
};

/// How long a task without a key stays after its end, even if less is kept of others. Nothing remains
/// of it, so an insert that is still on its way, for example from a feeder that was suspended, would
/// store the same task once more, and it would be processed again. The task of a record also stays
/// until the position of its subscription has passed the record, and that of a step until its
/// execution knows of its end.
const KEYLESS_STAYS: Duration = Duration::from_secs(3600);

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

/// A finished task that may be removed.
pub(crate) struct Candidate {
    pub(crate) id: TaskId,
    /// Whether it finished long enough ago.
    pub(crate) is_old: bool,
    /// It has no key, and [`KEYLESS_STAYS`] is not over.
    pub(crate) waits: bool,
    pub(crate) ended_unix_ms: i64,
}

/// A row of [`finished`] or [`completed`].
pub(crate) type CandidateRow = (Vec<u8>, Vec<u8>, i64, i64, i64);

impl Candidate {
    pub(crate) fn read(row: &CandidateRow) -> Result<Self> {
        let (id, hash, ended_unix_ms, is_old, is_settled) = row;
        let has_no_key = key_hash(hash)?.task_without_key().is_some();
        Ok(Self {
            id: task_id(id)?,
            is_old: *is_old != 0,
            waits: has_no_key && *is_settled == 0,
            ended_unix_ms: *ended_unix_ms,
        })
    }
}

/// The tasks that finished earliest, at least `age` ago by the database's clock, and not before
/// `from_unix_ms`.
pub(crate) fn finished<'a, S: Session>(
    age: Duration,
    from_unix_ms: i64,
    limit: u32,
) -> Statement<'a> {
    // The index has a sorted range for each status.
    let of_status = |status: StoredStatus| {
        Statement::new("SELECT * FROM (SELECT id, key_hash, updated_ms FROM tasks ")
            .sql(&S::by_index("tasks_finished"))
            // SQLite only uses a partial index for a condition that repeats the one of the index.
            .sql(" WHERE status <> 0 AND status = ? AND ")
            .bind(status)
            .append(old_enough::<S>(age))
            .sql(" AND updated_ms >= ?")
            .bind(from_unix_ms)
            .sql(" ORDER BY updated_ms LIMIT ?)")
            .bind(limit)
    };
    Statement::new("SELECT id, key_hash, updated_ms, 1 AS is_old, ")
        .append(old_enough::<S>(KEYLESS_STAYS))
        .sql(" AS is_settled FROM (")
        .append(of_status(StoredStatus::Completed))
        .sql(" AS completed UNION ALL ")
        .append(of_status(StoredStatus::Dead))
        .sql(" AS dead UNION ALL ")
        .append(of_status(StoredStatus::Cancelled))
        .sql(" AS cancelled) AS finished ORDER BY updated_ms LIMIT ?")
        .bind(limit)
}

/// A page of completed tasks.
///
/// By the index of the queue's completed tasks: a page costs as much as its limit, whatever other
/// queues keep.
pub(crate) fn completed<S: Session>(page: &CompletedPage) -> Statement<'_> {
    Statement::new("SELECT id, key_hash, updated_ms, ")
        .append(old_enough::<S>(page.age))
        .sql(" AS is_old, ")
        .append(old_enough::<S>(KEYLESS_STAYS))
        .sql(" AS is_settled FROM (SELECT id, key_hash, updated_ms FROM tasks ")
        .sql(&S::of_status(StoredStatus::Completed))
        .sql(" AND queue = ? AND id > ? AND id < ? ORDER BY id LIMIT ?) AS page ORDER BY id")
        .bind(&page.queue)
        .bind(&page.after)
        .bind(&page.below)
        .bind(page.limit)
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
    /// Whether a task with this key stays for [`KEYLESS_STAYS`].
    fn waits_for(self, hash: KeyHash) -> bool {
        match self {
            Self::Old(_) => hash.task_without_key().is_some(),
            Self::Dead => false,
        }
    }

    /// Whether inserting the key of a removed task remains a duplicate.
    fn keeps_key_of(self, status: StoredStatus) -> bool {
        match self {
            Self::Old(_) => status != StoredStatus::Dead,
            Self::Dead => true,
        }
    }
}

columns! {
    struct FinishedColumns {
        #[flatten]
        belongs: BelongsColumns,
        key_hash: Vec<u8>,
        id: Vec<u8>,
        status: i64,
        queue: String,
        is_settled: i64,
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
    let mut all_removed = Vec::new();
    for ids in lists(&ids) {
        let condition = match which {
            Which::Old(age) => old_enough::<S>(age),
            Which::Dead => Statement::new("status = 2"),
        };
        let still = Statement::new(format!(
            "SELECT key_hash, id, status, queue, {BELONGS_COLUMNS}, "
        ))
        .append(old_enough::<S>(KEYLESS_STAYS))
        .sql(" AS is_settled FROM tasks ")
        .sql(S::BY_PRIMARY_KEY)
        .sql(" WHERE status <> 0 AND ")
        .append(condition)
        .sql(" AND id IN ")
        .list(ids)
        .sql(" ORDER BY id")
        .sql(S::FOR_UPDATE);
        let mut moved = Vec::new();
        let mut settled = Vec::new();
        let mut without_key = Vec::new();
        let mut steps_of = Vec::new();
        for columns in session.fetch::<FinishedColumns>(still).await? {
            let hash = key_hash(&columns.key_hash)?;
            if columns.is_settled == 0 && which.waits_for(hash) {
                continue;
            }
            let id = task_id(&columns.id)?;
            let status = status(columns.status)?;
            let queue = queue_name(&columns.queue)?;
            let belongs = columns.belongs.of(&queue)?;
            if which.waits_for(hash) {
                without_key.push(id);
                steps_of.extend(belongs.execution.map(|execution| (execution, id)));
            }
            settled.push((queue, belongs));
            moved.push((hash, id, status));
        }
        if !without_key.is_empty() {
            let mut unread = unread(session, &without_key).await?;
            if !steps_of.is_empty() {
                unread.extend(inbox::unconsumed(session, &steps_of).await?);
            }
            let mut kept = moved.iter().map(|(_, id, _)| !unread.contains(id));
            settled.retain(|_| kept.next().unwrap_or(true));
            moved.retain(|(_, id, _)| !unread.contains(id));
        }
        for ((_, id, status), (queue, belongs)) in moved.iter().zip(&settled) {
            steps.removed(*id, queue, *status, belongs);
        }
        if moved.is_empty() {
            continue;
        }
        let mut kept = moved.clone();
        kept.retain(|(hash, _, status)| {
            hash.task_without_key().is_none() && which.keeps_key_of(*status)
        });
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
        all_removed.extend(ids);
    }
    // After all locks of tasks.
    steps.sequences(session, &[], None).await?;
    // A final task should not be in the outbox. If it were, its row would stay there forever.
    entries::remove(session, &all_removed).await?;
    Ok(all_removed.len() as u64)
}
