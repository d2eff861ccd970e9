//! Bulk changes. A page of tasks is changed first. Then one statement stores the progress, if the
//! cursor is still where the page began, so that a page that was changed twice is counted once.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};
use serde::{Deserialize, Serialize};
use uuid::{Timestamp, Uuid};

use crate::{
    config::EventQueues,
    model::{
        Act, BulkChange, BulkProgress, BulkState, QueueName, SecretHash, TaskCursor, TaskFilter,
        TaskId, TaskStatus, WorkerName,
    },
    store::{
        AddedBulk, BULK_CHANGES_STAY, MOST_BULK_CHANGES, Result, Retried,
        sql::{
            access::tokens,
            backend::Backend,
            dialect::Dialect,
            pages,
            rows::{columns, corrupt, number, status, task_id},
            runner::Runner,
            session::Session,
            statement::{Statement, Value, lists},
            tasks::{again, steps::Steps, trees::Ends},
        },
    },
};

const COLUMNS: &str = "id, what, filter, who, scope, token, state, position, looked_at, matched, changed, \
     failed, last_error, created_ms, updated_ms";

pub(crate) async fn bulk_change<DB: Backend>(
    sql: &Runner<DB>,
    id: Uuid,
) -> Result<Option<BulkChange>> {
    let found = select("WHERE id = ?").bind(&id);
    sql.read::<Columns>("bulk", found)
        .await?
        .into_iter()
        .next()
        .map(BulkChange::try_from)
        .transpose()
}

pub(crate) async fn bulk_changes<DB: Backend>(
    sql: &Runner<DB>,
    before: Option<Uuid>,
    limit: u32,
) -> Result<Vec<BulkChange>> {
    let page = pages::latest(select(""), before, limit);
    Ok(readable(sql.read("bulk", page).await?))
}

pub(crate) async fn running_bulk_changes<DB: Backend>(sql: &Runner<DB>) -> Result<Vec<BulkChange>> {
    let running = select(&DB::Connection::by_index("bulk_changes_state"))
        .sql(" WHERE state = 0 ORDER BY id LIMIT ?")
        // Two concurrent calls may exceed the maximum by one.
        .bind(2 * MOST_BULK_CHANGES);
    Ok(readable(sql.read("running_bulk_changes", running).await?))
}

pub(crate) async fn advance_bulk_change<DB: Backend>(
    sql: &Runner<DB>,
    bulk: &BulkChange,
    from: Option<TaskCursor>,
) -> Result<bool> {
    let advance = sql.run("advance_bulk_change", (bulk.clone(), from), |session, (bulk, from)| {
        Box::pin(async move {
            let BulkProgress { cursor, looked_at, matched, changed, failed, last_error } = &bulk.progress;
            const SET: &str = "UPDATE bulk_changes SET state = ?, position = ?, looked_at = ?, matched = ?, changed = ?, \
                 failed = ?, last_error = ?, updated_ms = ? WHERE id = ? AND state = 0 AND position = ?";
            let set = Statement::new(SET)
                .bind(bulk.state as u32)
                .bind(position(cursor.as_ref()))
                .bind(*looked_at)
                .bind(*matched)
                .bind(*changed)
                .bind(*failed)
                .bind(last_error.as_str())
                .bind(bulk.updated_unix_ms)
                .bind(&bulk.id)
                .bind(position(from.as_ref()));
            Ok(session.execute(set).await? > 0)
        })
    });
    advance.await
}

pub(crate) async fn stop_bulk_change<DB: Backend>(
    sql: &Runner<DB>,
    id: Uuid,
    at_unix_ms: i64,
    why: Option<&str>,
    act: &Act,
) -> Result<Option<BulkChange>> {
    let input = (id, at_unix_ms, why.map(str::to_owned), act.clone());
    let stop = sql.run("stop_bulk_change", input, |session, (id, at, why, act)| {
        Box::pin(async move {
            let mut stop = Statement::new("UPDATE bulk_changes SET state = ?, updated_ms = ?")
                .bind(BulkState::Stopped as u32)
                .bind(*at);
            if let Some(why) = why {
                stop = stop.sql(", last_error = ?").bind(why.as_str());
            }
            let stop = stop.sql(" WHERE id = ? AND state = 0").bind(id);
            if session.execute(stop).await? > 0 {
                tokens::keep(session, act).await?;
            }
            Ok(())
        })
    });
    stop.await?;
    bulk_change(sql, id).await
}

fn select<'a>(rest: &str) -> Statement<'a> {
    Statement::new(format!("SELECT {COLUMNS} FROM bulk_changes {rest}"))
}

fn position(cursor: Option<&TaskCursor>) -> &[u8] {
    cursor.map_or(&[], |TaskCursor(id)| id.as_bytes())
}

pub(crate) async fn add<S: Session>(
    session: &mut S,
    bulk: &BulkChange,
    most_of_token: u32,
    act: &Act,
) -> Result<AddedBulk> {
    const RUNNING: &str = "SELECT COUNT(*) FROM bulk_changes WHERE state = 0 AND id <> ?";
    if count(session, Statement::new(RUNNING).bind(&bulk.id)).await? >= i64::from(MOST_BULK_CHANGES)
    {
        return Ok(AddedBulk::NoRoom);
    }
    if let Some(token) = &bulk.token {
        let of_token = Statement::new(RUNNING)
            .bind(&bulk.id)
            .sql(" AND token = ?")
            .bind(&token.0[..]);
        if count(session, of_token).await? >= i64::from(most_of_token) {
            return Ok(AddedBulk::NoRoomForToken);
        }
    }
    let BulkProgress {
        cursor,
        looked_at,
        matched,
        changed,
        failed,
        last_error,
    } = &bulk.progress;
    let row: [Value<'_>; 15] = [
        (&bulk.id).into(),
        bulk.change.to_string().into(),
        filter_text(&bulk.filter).into(),
        bulk.who.as_str().into(),
        bulk.scope.to_string().into(),
        bulk.token.as_ref().map_or(&[][..], |token| &token.0).into(),
        (bulk.state as u32).into(),
        position(cursor.as_ref()).into(),
        (*looked_at).into(),
        (*matched).into(),
        (*changed).into(),
        (*failed).into(),
        last_error.as_str().into(),
        bulk.created_unix_ms.into(),
        bulk.updated_unix_ms.into(),
    ];
    let insert =
        Statement::new(format!("INSERT INTO bulk_changes ({COLUMNS})")).values([row].into_iter());
    // A repeated call finds its own row.
    session.execute(insert.sql(&S::keep_first("id"))).await?;
    tokens::keep(session, act).await?;
    let old_ms = bulk
        .created_unix_ms
        .unsigned_abs()
        .saturating_sub(BULK_CHANGES_STAY.as_millis() as u64);
    let old = Uuid::new_v7(Timestamp::from_unix_time(old_ms / 1000, 0, 0, 0));
    session
        .execute(Statement::new("DELETE FROM bulk_changes WHERE id < ? AND state <> 0").bind(&old))
        .await?;
    Ok(AddedBulk::Yes)
}

async fn count<S: Session>(session: &mut S, statement: Statement<'_>) -> Result<i64> {
    let counts: Vec<(i64,)> = session.fetch(statement).await?;
    Ok(counts.first().map_or(0, |(count,)| *count))
}

/// The tasks to send again, each with the act that is recorded for it.
pub(crate) type Acts = BTreeMap<TaskId, Act>;

pub(crate) async fn retry<S: Session>(
    session: &mut S,
    acts: &Acts,
    now_ms: i64,
    as_of_ms: Option<i64>,
    events: &Arc<EventQueues>,
) -> Result<(Vec<Retried>, Ends)> {
    let mut steps = Steps::new(events);
    let ids: Vec<TaskId> = acts.keys().copied().collect();
    let mut retried = again::retry(session, &ids, now_ms, as_of_ms, &mut steps).await?;
    let done: HashSet<TaskId> = retried.iter().map(|retried| retried.id).collect();
    let (done, others): (Vec<_>, Vec<_>) = acts.iter().partition(|(id, _)| done.contains(id));
    retried.extend(sent_before(session, &others).await?);
    let done: Vec<Act> = done.into_iter().map(|(_, act)| act.clone()).collect();
    tokens::keep_all(session, &done).await?;
    let ended = steps.store(session).await?;
    Ok((retried, ended))
}

/// The tasks whose acts are already recorded, because an earlier attempt of this call has sent them
/// again.
async fn sent_before<S: Session>(
    session: &mut S,
    acts: &[(&TaskId, &Act)],
) -> Result<Vec<Retried>> {
    let recorded = tokens::recorded(session, acts.iter().map(|(_, act)| *act)).await?;
    let ids = acts
        .iter()
        .filter(|(_, act)| recorded.contains(&act.id))
        .map(|(id, _)| **id);
    let (ids, mut sent) = (ids.collect::<Vec<TaskId>>(), Vec::new());
    for ids in lists(&ids) {
        let found = Statement::new("SELECT id, status FROM tasks WHERE id IN ").list(ids);
        for (id, stored) in session.fetch::<(Vec<u8>, i64)>(found).await? {
            sent.push(Retried {
                id: task_id(&id)?,
                status: status(stored)?,
            });
        }
    }
    Ok(sent)
}

columns! {
    pub(crate) struct Columns {
        id: Vec<u8>,
        what: String,
        filter: String,
        who: String,
        scope: String,
        token: Vec<u8>,
        state: i64,
        position: Vec<u8>,
        looked_at: i64,
        matched: i64,
        changed: i64,
        failed: i64,
        last_error: String,
        created_ms: i64,
        updated_ms: i64,
    }
}

/// The bulk changes that this version of taskd understands.
fn readable(rows: Vec<Columns>) -> Vec<BulkChange> {
    let read = |columns: Columns| {
        let id = Uuid::from_slice(&columns.id).unwrap_or_default();
        BulkChange::try_from(columns)
            .inspect_err(|error| {
                tracing::warn!("the bulk change {id} is left to a later taskd: {error}")
            })
            .ok()
    };
    rows.into_iter().filter_map(read).collect()
}

impl TryFrom<Columns> for BulkChange {
    type Error = crate::store::Error;

    fn try_from(columns: Columns) -> Result<Self> {
        let cursor = if columns.position.is_empty() {
            None
        } else {
            Some(TaskCursor(task_id(&columns.position)?))
        };
        let state = BulkState::from_number(columns.state);
        Ok(Self {
            id: Uuid::from_slice(&columns.id)
                .map_err(|_| corrupt("a bulk change's id is a UUID"))?,
            change: columns.what.parse().map_err(|e: String| corrupt(e))?,
            filter: filter_of(&columns.filter)?,
            who: columns.who,
            scope: columns.scope.parse().map_err(|e: String| corrupt(e))?,
            token: token_of(&columns.token)?,
            state: state
                .ok_or_else(|| corrupt(format!("a bulk change in state {}", columns.state)))?,
            progress: BulkProgress {
                cursor,
                looked_at: number(columns.looked_at)?,
                matched: number(columns.matched)?,
                changed: number(columns.changed)?,
                failed: number(columns.failed)?,
                last_error: columns.last_error,
            },
            created_unix_ms: columns.created_ms,
            updated_unix_ms: columns.updated_ms,
        })
    }
}

fn token_of(hash: &[u8]) -> Result<Option<SecretHash>> {
    if hash.is_empty() {
        return Ok(None);
    }
    let hash = hash
        .try_into()
        .map_err(|_| corrupt("the hash of a bulk change's token has 32 bytes"))?;
    Ok(Some(SecretHash(hash)))
}

/// A filter as stored in SQL. A field that is unknown here means that a later version of taskd
/// added the bulk change.
#[derive(Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
struct StoredFilter {
    #[serde(skip_serializing_if = "Option::is_none")]
    queue: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    statuses: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_base64: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    key_prefix_base64: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    headers: Vec<(String, String)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since_unix_ms: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    until_unix_ms: Option<i64>,
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    as_of_unix_ms: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tree: Option<String>,
}

fn filter_text(filter: &TaskFilter) -> String {
    let stored = StoredFilter {
        queue: filter.queue.as_ref().map(|queue| queue.as_str().to_owned()),
        statuses: filter
            .statuses
            .iter()
            .map(|status| status.as_str().to_owned())
            .collect(),
        key_base64: filter.key.as_ref().map(|key| BASE64.encode(key)),
        key_prefix_base64: BASE64.encode(&filter.key_prefix),
        headers: filter.headers.clone(),
        worker: filter
            .worker
            .as_ref()
            .map(|worker| worker.as_str().to_owned()),
        since_unix_ms: filter.since_unix_ms,
        until_unix_ms: filter.until_unix_ms,
        reason: filter.reason.clone(),
        as_of_unix_ms: filter.as_of_unix_ms,
        tree: filter.tree.map(|tree| tree.to_string()),
    };
    serde_json::to_string(&stored).expect("texts and numbers are always JSON")
}

fn filter_of(text: &str) -> Result<TaskFilter> {
    let wrong =
        |error: &dyn std::fmt::Display| corrupt(format!("the filter of a bulk change: {error}"));
    let stored: StoredFilter = serde_json::from_str(text).map_err(|error| wrong(&error))?;
    let bytes = |text: &str| BASE64.decode(text).map_err(|error| wrong(&error));
    Ok(TaskFilter {
        queue: stored
            .queue
            .map(|queue| QueueName::new(&queue))
            .transpose()
            .map_err(|error| wrong(&error))?,
        statuses: TaskStatus::list(&stored.statuses.join(",")).map_err(|error| wrong(&error))?,
        key: stored
            .key_base64
            .map(|key| bytes(&key))
            .transpose()?
            .map(Into::into),
        key_prefix: bytes(&stored.key_prefix_base64)?.into(),
        headers: stored.headers,
        worker: stored
            .worker
            .map(|worker| WorkerName::new(&worker))
            .transpose()
            .map_err(|error| wrong(&error))?,
        since_unix_ms: stored.since_unix_ms,
        until_unix_ms: stored.until_unix_ms,
        reason: stored.reason,
        as_of_unix_ms: stored.as_of_unix_ms,
        tree: stored
            .tree
            .map(|tree| tree.parse())
            .transpose()
            .map_err(|error: uuid::Error| wrong(&error))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_read_as_it_was_written_and_one_of_a_later_taskd_is_not() {
        let filter = TaskFilter {
            queue: QueueName::new("q").ok(),
            statuses: vec![TaskStatus::Dead],
            key: Some(b"\xff".to_vec().into()),
            key_prefix: "a".into(),
            headers: vec![("h".into(), "v".into())],
            worker: WorkerName::new("w").ok(),
            since_unix_ms: Some(1),
            until_unix_ms: Some(2),
            reason: "timeout".into(),
            as_of_unix_ms: Some(3),
            tree: Some(TaskId::new()),
        };
        assert_eq!(filter_of(&filter_text(&filter)).unwrap(), filter);
        assert_eq!(
            filter_of(&filter_text(&TaskFilter::default())).unwrap(),
            TaskFilter::default()
        );
        assert!(filter_of(r#"{"queue":"q","colour":"red"}"#).is_err());
    }
}
