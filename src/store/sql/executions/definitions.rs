//! Definitions of workflows.

use crate::{
    model::{Act, ExecutionStatus, WorkflowVersion},
    store::{
        Deleted, KeptDefinition, ListedDefinition, Result, StoredDefinition,
        sql::{
            access::tokens,
            backend::Backend,
            dialect::Dialect,
            rows::columns,
            runner::Runner,
            session::Session,
            statement::{Statement, Value},
        },
    },
};

columns! {
    struct ListedColumns {
        namespace: String,
        name: String,
        version: String,
        hash: String,
        deployed_by: String,
        deployed_ms: i64,
    }
}

columns! {
    struct DefinitionColumns {
        #[flatten]
        listed: ListedColumns,
        content: String,
        documents: String,
    }
}

const LISTED_COLUMNS: &str = "namespace, name, version, hash, deployed_by, deployed_ms";

impl From<ListedColumns> for ListedDefinition {
    fn from(columns: ListedColumns) -> Self {
        Self {
            workflow: WorkflowVersion {
                namespace: columns.namespace,
                name: columns.name,
                version: columns.version,
            },
            hash: columns.hash,
            deployed_by: columns.deployed_by,
            deployed_unix_ms: columns.deployed_ms,
        }
    }
}

/// Completes a statement whose condition begins with one definition.
fn of<'a>(statement: impl Into<String>, workflow: &'a WorkflowVersion) -> Statement<'a> {
    Statement::new(statement)
        .sql(" WHERE namespace = ? AND name = ? AND version = ?")
        .bind(workflow.namespace.as_str())
        .bind(workflow.name.as_str())
        .bind(workflow.version.as_str())
}

/// The hash of a definition, with this lock.
pub(crate) async fn hash<S: Session>(
    session: &mut S,
    workflow: &WorkflowVersion,
    lock: &str,
) -> Result<Option<String>> {
    let hash = of("SELECT hash FROM definitions", workflow).sql(lock);
    let rows: Vec<(String,)> = session.fetch(hash).await?;
    Ok(rows.into_iter().next().map(|(hash,)| hash))
}

pub(crate) async fn keep<S: Session>(
    session: &mut S,
    definition: &StoredDefinition,
    act: &Act,
) -> Result<KeptDefinition> {
    let workflow = &definition.workflow;
    let stored = hash(session, workflow, "").await?;
    if stored.is_none() {
        let row: [Value<'_>; 8] = [
            workflow.namespace.as_str().into(),
            workflow.name.as_str().into(),
            workflow.version.as_str().into(),
            definition.hash.as_str().into(),
            definition.text.as_str().into(),
            definition.documents.as_str().into(),
            definition.deployed_by.as_str().into(),
            definition.deployed_unix_ms.into(),
        ];
        let insert = Statement::new(
            "INSERT INTO definitions (namespace, name, version, hash, content, documents, deployed_by, \
             deployed_ms)",
        );
        let insert = insert.values([row].into_iter()).sql(&S::keep_first("hash"));
        session.execute(insert).await?;
        // Somebody else may have deployed another text under this version meanwhile.
        if hash(session, workflow, "").await?.as_ref() == Some(&definition.hash) {
            tokens::keep(session, act).await?;
            return Ok(KeptDefinition::New);
        }
        return Ok(KeptDefinition::Other);
    }
    if stored.as_ref() != Some(&definition.hash) {
        return Ok(KeptDefinition::Other);
    }
    // The response to the COMMIT of this call may have been lost.
    Ok(match tokens::is_recorded(session, act).await? {
        true => KeptDefinition::New,
        false => KeptDefinition::Same,
    })
}

pub(crate) async fn one<DB: Backend>(
    sql: &Runner<DB>,
    workflow: &WorkflowVersion,
) -> Result<Option<StoredDefinition>> {
    let select = format!("SELECT {LISTED_COLUMNS}, content, documents FROM definitions");
    let rows: Vec<DefinitionColumns> = sql.read("definition", of(select, workflow)).await?;
    Ok(rows.into_iter().next().map(|row| {
        let listed = ListedDefinition::from(row.listed);
        StoredDefinition {
            workflow: listed.workflow,
            hash: listed.hash,
            text: row.content,
            documents: row.documents,
            deployed_by: listed.deployed_by,
            deployed_unix_ms: listed.deployed_unix_ms,
        }
    }))
}

pub(crate) async fn page<DB: Backend>(
    sql: &Runner<DB>,
    (namespace, name): (Option<&str>, Option<&str>),
    after: Option<&WorkflowVersion>,
    limit: u32,
) -> Result<Vec<ListedDefinition>> {
    let mut page = Statement::new(format!("SELECT {LISTED_COLUMNS} FROM definitions "))
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE (namespace, name, version) > (?, ?, ?)");
    let start = ["", "", ""];
    let after = after.map_or(start, |after| {
        [
            after.namespace.as_str(),
            after.name.as_str(),
            after.version.as_str(),
        ]
    });
    for text in after {
        page = page.bind(text);
    }
    for (condition, text) in [(" AND namespace = ?", namespace), (" AND name = ?", name)] {
        if let Some(text) = text {
            page = page.sql(condition).bind(text);
        }
    }
    let page = page
        .sql(" ORDER BY namespace, name, version LIMIT ?")
        .bind(limit);
    let rows: Vec<ListedColumns> = sql.read("definitions", page).await?;
    Ok(rows.into_iter().map(ListedDefinition::from).collect())
}

pub(crate) async fn delete<S: Session>(
    session: &mut S,
    workflow: &WorkflowVersion,
    act: &Act,
) -> Result<Deleted> {
    // From here on nobody starts an execution of it.
    if hash(session, workflow, S::FOR_UPDATE).await?.is_none() {
        return Ok(match tokens::is_recorded(session, act).await? {
            true => Deleted::Yes,
            false => Deleted::Unknown,
        });
    }
    let open = format!(
        "SELECT COUNT(*) FROM executions {}",
        S::by_index("executions_workflow_status")
    );
    let open = of(open, workflow)
        .sql(" AND status < ?")
        .bind(ExecutionStatus::Completed as u32);
    if tokens::count(session, open).await? > 0 {
        return Ok(Deleted::Running);
    }
    session
        .execute(of("DELETE FROM definitions", workflow))
        .await?;
    tokens::keep(session, act).await?;
    Ok(Deleted::Yes)
}
