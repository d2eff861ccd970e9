//! How executions start, and what operators want of them.

use super::{definitions, inbox, rows::execution_status};
use crate::{
    model::{Act, ExecutionId, ExecutionStatus, WorkflowVersion},
    store::{
        Happening, InboxRow, NewExecution, Result, StartedExecution,
        sql::{
            access::tokens,
            rows::execution_id,
            session::Session,
            statement::{Statement, Value, lists},
        },
    },
};

/// The execution with this given id: its id and its workflow.
async fn given<S: Session>(
    session: &mut S,
    given: &str,
) -> Result<Option<(ExecutionId, WorkflowVersion)>> {
    let select =
        Statement::new("SELECT id, namespace, name, version FROM executions WHERE given_id = ?")
            .bind(given.as_bytes());
    let rows: Vec<(Vec<u8>, String, String, String)> = session.fetch(select).await?;
    let Some((id, namespace, name, version)) = rows.into_iter().next() else {
        return Ok(None);
    };
    let workflow = WorkflowVersion {
        namespace,
        name,
        version,
    };
    Ok(Some((execution_id(&id)?, workflow)))
}

/// What a start means whose given id an execution has.
fn before(new: &NewExecution, id: ExecutionId, workflow: WorkflowVersion) -> StartedExecution {
    let names = |of: &WorkflowVersion| (of.namespace.clone(), of.name.clone());
    if id == new.id {
        StartedExecution::New
    } else if names(&workflow) == names(&new.workflow) {
        // The caller may want the latest version, which has changed since.
        StartedExecution::Before(id)
    } else {
        StartedExecution::OtherWorkflow(workflow)
    }
}

pub(crate) async fn start<S: Session>(
    session: &mut S,
    new: &NewExecution,
) -> Result<StartedExecution> {
    if let Some(text) = &new.given
        && let Some((id, workflow)) = given(session, text).await?
    {
        return Ok(before(new, id, workflow));
    }
    let stored = definitions::hash(session, &new.workflow, S::FOR_SHARE).await?;
    if stored.as_ref() != Some(&new.hash) {
        return Ok(StartedExecution::NoDefinition);
    }
    let mut values: Vec<Value<'_>> = vec![
        (&new.id).into(),
        new.workflow.namespace.as_str().into(),
        new.workflow.name.as_str().into(),
        new.workflow.version.as_str().into(),
        new.hash.as_str().into(),
        (ExecutionStatus::Pending as u32).into(),
        0_i64.into(),
        0_i64.into(),
        (&new.input[..]).into(),
        b"".as_slice().into(),
        new.traceparent.as_str().into(),
        new.created_unix_ms.into(),
        new.created_unix_ms.into(),
        0_i64.into(),
    ];
    let given_column = match &new.given {
        Some(given) => {
            values.push(given.as_bytes().into());
            ", given_id"
        }
        None => "",
    };
    let insert = Statement::new(
        "INSERT INTO executions (id, namespace, name, version, hash, status, seq, batch, input, summary, \
         traceparent, created_ms, updated_ms, ended_ms",
    );
    let insert = insert
        .sql(given_column)
        .sql(")")
        .values_of(values.len(), [values].into_iter())
        .sql(&S::keep_first("id"));
    session.execute(insert).await?;
    if let Some(text) = &new.given
        && let Some((id, workflow)) = given(session, text).await?
        && id != new.id
    {
        // Another start with the id was faster.
        return Ok(before(new, id, workflow));
    }
    let begins = Statement::new("SELECT seq FROM executions WHERE id = ?").bind(&new.id);
    let begins: Vec<(i64,)> = session.fetch(begins).await?;
    // Otherwise this call is being repeated, and somebody has already appended.
    if begins.first().is_some_and(|(seq,)| *seq == 0) {
        let row = InboxRow {
            execution: new.id,
            happening: Happening::Start,
            at_unix_ms: new.created_unix_ms,
        };
        inbox::add(session, &[row]).await?;
    }
    Ok(StartedExecution::New)
}

pub(crate) async fn cancel<S: Session>(
    session: &mut S,
    id: ExecutionId,
    act: &Act,
) -> Result<Option<ExecutionStatus>> {
    let status = Statement::new("SELECT status FROM executions WHERE id = ?")
        .bind(&id)
        .sql(S::FOR_UPDATE);
    let status: Vec<(i64,)> = session.fetch(status).await?;
    let Some((status,)) = status.into_iter().next() else {
        return Ok(None);
    };
    let status = execution_status(status)?;
    if !status.is_final() {
        // Before the ends of steps, of which there may be many.
        let first = Statement::new("SELECT MIN(at_ms) FROM execution_inbox WHERE execution = ?");
        let first: Vec<(Option<i64>,)> = session.fetch(first.bind(&id)).await?;
        let first = first.first().and_then(|(at_ms,)| *at_ms);
        let row = InboxRow {
            execution: id,
            happening: Happening::Cancel,
            at_unix_ms: first.unwrap_or_else(|| act.at_unix_ms()),
        };
        inbox::add(session, &[row]).await?;
        tokens::keep(session, act).await?;
    }
    Ok(Some(status))
}

/// Adds [`Happening::LookAgain`] to the inboxes of those executions that are open.
pub(crate) async fn wake<S: Session>(session: &mut S, ids: &[ExecutionId]) -> Result<()> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    for ids in lists(&ids) {
        let open = Statement::new("SELECT id, updated_ms FROM executions ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE status < ? AND id IN ")
            .bind(ExecutionStatus::Completed as u32)
            .list(ids)
            .sql(" ORDER BY id")
            .sql(S::FOR_UPDATE);
        let mut rows = Vec::new();
        for (id, at_unix_ms) in session.fetch::<(Vec<u8>, i64)>(open).await? {
            rows.push(InboxRow {
                execution: execution_id(&id)?,
                happening: Happening::LookAgain,
                at_unix_ms,
            });
        }
        inbox::add(session, &rows).await?;
    }
    Ok(())
}
