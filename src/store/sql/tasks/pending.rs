//! The rows of pending changes.

use std::collections::BTreeMap;

use crate::{
    model::{ChangeKind, TaskId},
    store::{
        KeptChange, NewRow, Result, Turn,
        sql::{
            outbox::entries,
            rows::task_id,
            session::Session,
            statement::{Statement, lists, pieces},
        },
    },
};

/// A pending change: the task, its turn, and its time.
pub(crate) type Row = (TaskId, Turn, i64);

/// Stores pending changes of a kind. Each replaces an earlier one of the same task.
pub(crate) async fn keep<S: Session>(
    session: &mut S,
    kind: ChangeKind,
    wishes: &[Row],
) -> Result<()> {
    for piece in pieces(wishes, |_| 0) {
        let kind = i64::from(kind as u8);
        let rows = piece
            .iter()
            .map(|(id, turn, at_ms)| [id.into(), kind.into(), (*turn).into(), (*at_ms).into()]);
        let keep = Statement::new("INSERT INTO changes (task_id, kind, turn, at_ms)")
            .values(rows)
            .sql(&S::replace("task_id, kind", &["turn", "at_ms"]));
        session.execute(keep).await?;
    }
    Ok(())
}

/// Stores the deadlines of new tasks.
pub(crate) async fn keep_deadlines<S: Session>(session: &mut S, new: &[&NewRow]) -> Result<()> {
    let with = new.iter().filter(|row| row.task.deadline_unix_ms > 0);
    let mut deadlines: Vec<Row> = with
        .map(|row| (row.task.id, entries::new_turn(), row.task.deadline_unix_ms))
        .collect();
    deadlines.sort_unstable_by_key(|(id, ..)| *id);
    keep(session, ChangeKind::Deadline, &deadlines).await
}

/// Moves pending changes of a kind to other times, unless later changes have replaced them.
pub(crate) async fn postpone<S: Session>(
    session: &mut S,
    kind: ChangeKind,
    wishes: &[Row],
) -> Result<()> {
    for (id, turn, at_ms) in wishes {
        let postpone = Statement::new(
            "UPDATE changes SET at_ms = ? WHERE task_id = ? AND kind = ? AND turn = ?",
        );
        session
            .execute(
                postpone
                    .bind(*at_ms)
                    .bind(id)
                    .bind(i64::from(kind as u8))
                    .bind(*turn),
            )
            .await?;
    }
    Ok(())
}

/// Removes the pending changes of these tasks, because the tasks are final.
pub(crate) async fn remove<S: Session>(session: &mut S, ids: &[TaskId]) -> Result<()> {
    for ids in lists(ids) {
        session
            .execute(Statement::new("DELETE FROM changes WHERE task_id IN ").list(ids))
            .await?;
    }
    Ok(())
}

/// Removes pending changes, unless later changes have replaced them.
pub(crate) async fn remove_turns<S: Session>(
    session: &mut S,
    wishes: &[(TaskId, Turn)],
) -> Result<()> {
    let mut wishes = wishes.to_vec();
    wishes.sort_unstable();
    for wishes in lists(&wishes) {
        let (ids, turns): (Vec<TaskId>, Vec<Turn>) = wishes.iter().copied().unzip();
        // Turns are random, so no other row has this one.
        let remove = Statement::new("DELETE FROM changes WHERE task_id IN ").list(&ids);
        session
            .execute(remove.sql(" AND turn IN ").list(&turns))
            .await?;
    }
    Ok(())
}

/// Marks which of these changes replace an earlier one. The tasks must be locked.
pub(crate) async fn note_earlier<S: Session>(
    session: &mut S,
    kind: ChangeKind,
    kept: &mut BTreeMap<TaskId, KeptChange>,
    now_ms: i64,
) -> Result<()> {
    let ids: Vec<TaskId> = kept.keys().copied().collect();
    for ids in lists(&ids) {
        let earlier = Statement::new("SELECT task_id, at_ms FROM changes ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE kind = ?")
            .bind(i64::from(kind as u8))
            .sql(" AND task_id IN ")
            .list(ids);
        for (id, at_ms) in session.fetch::<(Vec<u8>, i64)>(earlier).await? {
            if let Some(kept) = kept.get_mut(&task_id(&id)?) {
                kept.is_second = true;
                if kind == ChangeKind::Reservation {
                    // It is not known yet which of the two the queue has.
                    kept.at_unix_ms = kept.at_unix_ms.min(at_ms.max(now_ms));
                }
            }
        }
    }
    Ok(())
}
