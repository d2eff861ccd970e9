//! How executions are removed, with all that they own.

use std::time::Duration;

use super::{inbox, rows::execution_ids};
use crate::{
    model::{Act, ExecutionId, ExecutionStatus},
    store::{
        Deleted, Result,
        sql::{
            access::tokens,
            backend::Backend,
            dialect::Dialect,
            rows::{execution_id, number},
            runner::Runner,
            session::Session,
            statement::{Statement, lists},
            tasks::retention,
        },
    },
};

/// How many entries of logs a transaction removes, roughly. On SQLite nothing else is stored meanwhile.
const ENTRIES_AT_ONCE: u64 = 5_000;

/// The executions that ended earliest, at least `age` ago by the database's clock, with the lengths of
/// their logs.
pub(crate) async fn old<DB: Backend>(
    sql: &Runner<DB>,
    name: &'static str,
    age: Duration,
    limit: u32,
) -> Result<Vec<(ExecutionId, u64)>> {
    let old = Statement::new("SELECT id, seq FROM executions ")
        .sql(&DB::Connection::by_index("executions_ended"))
        .sql(" WHERE ended_ms > 0 AND ended_ms <= ")
        .append(retention::before::<DB::Connection>(age))
        .sql(" ORDER BY ended_ms LIMIT ?")
        .bind(limit);
    let mut found = Vec::new();
    for (id, seq) in sql.read::<(Vec<u8>, i64)>(name, old).await? {
        found.push((execution_id(&id)?, number(seq)?));
    }
    Ok(found)
}

/// Removes these executions, which have ended, with their logs. Returns how many.
pub(crate) async fn remove_all<DB: Backend>(
    sql: &Runner<DB>,
    name: &'static str,
    executions: &[(ExecutionId, u64)],
) -> Result<u64> {
    let mut removed = 0;
    let mut some = Vec::new();
    let mut entries = 0;
    for (id, seq) in executions {
        entries += remove_beginning(sql, name, *id, *seq).await?;
        some.push(*id);
        if entries >= ENTRIES_AT_ONCE {
            removed += remove_some(sql, name, std::mem::take(&mut some)).await?;
            entries = 0;
        }
    }
    Ok(removed + remove_some(sql, name, some).await?)
}

/// Removes all entries of a log except the last ones. Returns how many are left.
pub(crate) async fn remove_beginning<DB: Backend>(
    sql: &Runner<DB>,
    name: &'static str,
    id: ExecutionId,
    seq: u64,
) -> Result<u64> {
    let mut before = 0;
    while seq - before > ENTRIES_AT_ONCE {
        let after = before;
        before += ENTRIES_AT_ONCE;
        sql.run(name, (id, after, before), |session, (id, after, before)| {
            Box::pin(async move {
                let remove = Statement::new(
                    "DELETE FROM execution_events WHERE execution = ? AND seq > ? AND seq <= ?",
                );
                let remove = remove.bind(id).bind(*after).bind(*before);
                session.execute(remove).await
            })
        })
        .await?;
    }
    Ok(seq - before)
}

async fn remove_some<DB: Backend>(
    sql: &Runner<DB>,
    name: &'static str,
    ids: Vec<ExecutionId>,
) -> Result<u64> {
    if ids.is_empty() {
        return Ok(0);
    }
    sql.run(name, ids, |session, ids| Box::pin(remove(session, ids)))
        .await
}

/// Removes those of these executions that have ended.
async fn remove<S: Session>(session: &mut S, ids: &[ExecutionId]) -> Result<u64> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    let mut removed = 0;
    for ids in lists(&ids) {
        let ended = Statement::new("SELECT id FROM executions ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE status >= ? AND id IN ")
            .bind(ExecutionStatus::Completed as u32)
            .list(ids)
            .sql(" ORDER BY id")
            .sql(S::FOR_UPDATE);
        let ended = execution_ids(session.fetch(ended).await?)?;
        if ended.is_empty() {
            continue;
        }
        let events = Statement::new("DELETE FROM execution_events WHERE execution IN ");
        session.execute(events.list(&ended)).await?;
        inbox::clear(session, &ended).await?;
        let rows = Statement::new("DELETE FROM executions WHERE id IN ");
        removed += session.execute(rows.list(&ended)).await?;
    }
    Ok(removed)
}

/// Removes one execution, and records the act.
pub(crate) async fn delete<S: Session>(
    session: &mut S,
    id: ExecutionId,
    act: &Act,
) -> Result<Deleted> {
    if remove(session, &[id]).await? > 0 {
        tokens::keep(session, act).await?;
        return Ok(Deleted::Yes);
    }
    let is_there = Statement::new("SELECT COUNT(*) FROM executions WHERE id = ?").bind(&id);
    if tokens::count(session, is_there).await? > 0 {
        return Ok(Deleted::Running);
    }
    // The response to the COMMIT of this call may have been lost.
    Ok(match tokens::is_recorded(session, act).await? {
        true => Deleted::Yes,
        false => Deleted::Unknown,
    })
}
