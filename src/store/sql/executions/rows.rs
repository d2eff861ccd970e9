//! The rows of executions and of their logs, and lists of them.

use std::collections::HashSet;

use crate::{
    model::{ExecutionId, ExecutionPages, ExecutionStatus, WorkflowVersion},
    store::{
        Error, ListedExecution, OpenExecution, PAGE_BYTES, Result, StoredEntry, StoredExecution,
        sql::{
            backend::Backend,
            dialect::Dialect,
            rows::{columns, corrupt, execution_id, number},
            runner::Runner,
            statement::{Statement, lists},
        },
    },
};

/// The columns of [`ExecutionColumns`].
const COLUMNS: &str = "id, given_id, namespace, name, version, hash, status, seq, traceparent, created_ms, \
     updated_ms, ended_ms";

columns! {
    pub(crate) struct ExecutionColumns {
        id: Vec<u8>,
        given_id: Option<Vec<u8>>,
        namespace: String,
        name: String,
        version: String,
        hash: String,
        status: i64,
        seq: i64,
        traceparent: String,
        created_ms: i64,
        updated_ms: i64,
        ended_ms: i64,
    }
}

columns! {
    struct WholeColumns {
        #[flatten]
        listed: ExecutionColumns,
        input: Vec<u8>,
        summary: Vec<u8>,
    }
}

pub(crate) fn execution_ids(rows: Vec<(Vec<u8>,)>) -> Result<Vec<ExecutionId>> {
    rows.iter().map(|(id,)| execution_id(id)).collect()
}

pub(crate) fn execution_status(number: i64) -> Result<ExecutionStatus> {
    ExecutionStatus::from_number(number)
        .ok_or_else(|| corrupt(format!("the status {number} of an execution")))
}

impl TryFrom<ExecutionColumns> for ListedExecution {
    type Error = Error;

    fn try_from(columns: ExecutionColumns) -> Result<Self> {
        let given = columns.given_id.map(|given| {
            String::from_utf8(given).map_err(|error| corrupt(format!("a given id: {error}")))
        });
        Ok(Self {
            id: execution_id(&columns.id)?,
            given: given.transpose()?,
            workflow: WorkflowVersion {
                namespace: columns.namespace,
                name: columns.name,
                version: columns.version,
            },
            hash: columns.hash,
            status: execution_status(columns.status)?,
            seq: number(columns.seq)?,
            traceparent: columns.traceparent,
            created_unix_ms: columns.created_ms,
            updated_unix_ms: columns.updated_ms,
            ended_unix_ms: columns.ended_ms,
        })
    }
}

fn listed(rows: Vec<ExecutionColumns>) -> Result<Vec<ListedExecution>> {
    rows.into_iter().map(ListedExecution::try_from).collect()
}

pub(crate) async fn by_id<DB: Backend>(
    sql: &Runner<DB>,
    ids: &[ExecutionId],
) -> Result<Vec<ListedExecution>> {
    let mut found = Vec::with_capacity(ids.len());
    for ids in lists(ids) {
        let by_id = Statement::new(format!("SELECT {COLUMNS} FROM executions "))
            .sql(DB::Connection::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids);
        found.extend(listed(sql.read("executions", by_id).await?)?);
    }
    Ok(found)
}

pub(crate) async fn one<DB: Backend>(
    sql: &Runner<DB>,
    id: ExecutionId,
) -> Result<Option<StoredExecution>> {
    let select = format!("SELECT {COLUMNS}, input, summary FROM executions WHERE id = ?");
    let select = Statement::new(select).bind(&id);
    let rows: Vec<WholeColumns> = sql.read("execution", select).await?;
    let Some(row) = rows.into_iter().next() else {
        return Ok(None);
    };
    Ok(Some(StoredExecution {
        listed: row.listed.try_into()?,
        input: row.input.into(),
        summary: row.summary.into(),
    }))
}

pub(crate) async fn page<DB: Backend>(
    sql: &Runner<DB>,
    pages: &ExecutionPages,
) -> Result<Vec<ListedExecution>> {
    let by_index = DB::Connection::by_index;
    let index = match (&pages.workflow, pages.status) {
        (Some(_), None) => by_index("executions_workflow"),
        (Some(_), Some(_)) => by_index("executions_workflow_status"),
        (None, Some(_)) => by_index("executions_status"),
        (None, None) => DB::Connection::BY_PRIMARY_KEY.to_owned(),
    };
    let since = pages
        .since_unix_ms
        .map_or(ExecutionId::FIRST, ExecutionId::first_of);
    let until = pages
        .until_unix_ms
        .map_or(ExecutionId::LAST, ExecutionId::first_of);
    let before = pages.after.map_or(until, |after| after.min(until));
    let mut page = Statement::new(format!("SELECT {COLUMNS} FROM executions {index}"))
        .sql(" WHERE id >= ? AND id < ?")
        .bind(&since)
        .bind(&before);
    if let Some((namespace, name)) = &pages.workflow {
        page = page
            .sql(" AND namespace = ? AND name = ?")
            .bind(namespace.as_str())
            .bind(name.as_str());
    }
    if let Some(status) = pages.status {
        page = page.sql(" AND status = ?").bind(status as u32);
    }
    let page = page.sql(" ORDER BY id DESC LIMIT ?").bind(pages.limit);
    listed(sql.read("executions", page).await?)
}

pub(crate) async fn entries<DB: Backend>(
    sql: &Runner<DB>,
    id: ExecutionId,
    after: u64,
    limit: u32,
) -> Result<Vec<StoredEntry>> {
    // The page is cut before its entries are read.
    let sizes = Statement::new("SELECT seq, LENGTH(entry) FROM execution_events ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE execution = ? AND seq > ? ORDER BY seq LIMIT ?")
        .bind(&id)
        .bind(after)
        .bind(limit);
    let mut bytes = 0;
    let mut last = None;
    for (seq, size) in sql.read::<(i64, i64)>("entries", sizes).await? {
        bytes += number::<usize>(size)?;
        if last.is_some() && bytes > PAGE_BYTES {
            break;
        }
        last = Some(seq);
    }
    let Some(last) = last else {
        return Ok(Vec::new());
    };
    let page = Statement::new("SELECT seq, entry FROM execution_events ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE execution = ? AND seq > ? AND seq <= ? ORDER BY seq")
        .bind(&id)
        .bind(after)
        .bind(last);
    let mut entries = Vec::new();
    for (seq, entry) in sql.read::<(i64, Vec<u8>)>("entries", page).await? {
        entries.push(StoredEntry {
            seq: number(seq)?,
            entry: entry.into(),
        });
    }
    Ok(entries)
}

/// The statuses of executions that have not ended.
const OPEN: [ExecutionStatus; 3] = [
    ExecutionStatus::Pending,
    ExecutionStatus::Running,
    ExecutionStatus::Waiting,
];

pub(crate) async fn open<DB: Backend>(
    sql: &Runner<DB>,
    after: Option<ExecutionId>,
    limit: u32,
) -> Result<Vec<OpenExecution>> {
    let after = after.unwrap_or(ExecutionId::FIRST);
    let of_status = |status: ExecutionStatus| {
        Statement::new("SELECT * FROM (SELECT id FROM executions ")
            .sql(&DB::Connection::by_index("executions_status"))
            .sql(" WHERE status = ? AND id > ? ORDER BY id LIMIT ?)")
            .bind(status as u32)
            .bind(&after)
            .bind(limit)
    };
    let [pending, running, waiting] = OPEN.map(of_status);
    let open = Statement::new(
        "SELECT id, EXISTS (SELECT 1 FROM execution_inbox WHERE execution = page.id), \
         EXISTS (SELECT 1 FROM execution_timers WHERE execution = page.id) FROM (",
    )
    .append(pending)
    .sql(" AS pending UNION ALL ")
    .append(running)
    .sql(" AS running UNION ALL ")
    .append(waiting)
    .sql(" AS waiting) AS page ORDER BY id LIMIT ?")
    .bind(limit);
    let mut executions = Vec::new();
    let mut quiet = Vec::new();
    let mut with_timers = HashSet::new();
    for (id, is_due, has_timer) in sql
        .read::<(Vec<u8>, i64, i64)>("open_executions", open)
        .await?
    {
        let id = execution_id(&id)?;
        if has_timer != 0 {
            with_timers.insert(id);
        }
        match is_due != 0 {
            true => executions.push(OpenExecution::Due(id)),
            false => quiet.push(id),
        }
    }
    for ids in lists(&quiet) {
        let rows = Statement::new("SELECT id, status, seq, summary FROM executions ")
            .sql(DB::Connection::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids);
        for (id, status, seq, summary) in sql
            .read::<(Vec<u8>, i64, i64, Vec<u8>)>("open_executions", rows)
            .await?
        {
            let id = execution_id(&id)?;
            executions.push(OpenExecution::Quiet {
                id,
                status: execution_status(status)?,
                has_timer: with_timers.contains(&id),
                seq: number(seq)?,
                summary: summary.into(),
            });
        }
    }
    executions.sort_unstable_by_key(OpenExecution::id);
    Ok(executions)
}
