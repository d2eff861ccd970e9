//! Executions of workflows.

mod append;
mod definitions;
pub(super) mod ends;
pub(super) mod inbox;
mod removal;
mod rows;
mod start;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;

use super::{
    SqlStore, backend::Backend, outbox::batches, rows::number, statement::Statement,
    tasks::trees::note_ends,
};
use crate::{
    model::{Act, ExecutionId, ExecutionPages, ExecutionStatus, WorkflowVersion},
    store::{
        Append, Appended, Deleted, ExecutionCounts, Executions, InboxPage, InboxRow,
        KeptDefinition, ListedDefinition, ListedExecution, NewExecution, OpenExecution, Result,
        StartedExecution, Stored, StoredDefinition, StoredEntry, StoredExecution, Timer,
        sql::dialect::Dialect as _,
    },
};

#[async_trait]
impl<DB: Backend> Executions for SqlStore<DB> {
    async fn keep_definition(
        &self,
        definition: &StoredDefinition,
        act: &Act,
    ) -> Result<KeptDefinition> {
        let kept = (definition.clone(), act.clone());
        self.sql
            .run("keep_definition", kept, |session, (definition, act)| {
                Box::pin(definitions::keep(session, definition, act))
            })
            .await
    }

    async fn definition(&self, workflow: &WorkflowVersion) -> Result<Option<StoredDefinition>> {
        definitions::one(&self.sql, workflow).await
    }

    async fn definitions(
        &self,
        of: (Option<&str>, Option<&str>),
        after: Option<&WorkflowVersion>,
        limit: u32,
    ) -> Result<Vec<ListedDefinition>> {
        definitions::page(&self.sql, of, after, limit).await
    }

    async fn delete_definition(&self, workflow: &WorkflowVersion, act: &Act) -> Result<Deleted> {
        let deleted = (workflow.clone(), act.clone());
        self.sql
            .run("delete_definition", deleted, |session, (workflow, act)| {
                Box::pin(definitions::delete(session, workflow, act))
            })
            .await
    }

    async fn start_execution(&self, execution: &NewExecution) -> Result<StartedExecution> {
        self.sql
            .run(
                "start_execution",
                execution.clone(),
                |session, execution| Box::pin(start::start(session, execution)),
            )
            .await
    }

    async fn append(&self, appends: &[Append]) -> Result<Stored<Appended>> {
        let mut appends = appends.to_vec();
        for append in &mut appends {
            for step in &mut append.steps {
                step.task.execution = Some(append.execution);
            }
        }
        // All attempts have one batch: a later one finds there what an earlier one has committed.
        let batch = batches::new_batch();
        let input = (
            appends,
            batch,
            Arc::clone(&self.old_keys),
            self.event_queues(),
        );
        let append = self.sql.run_in_era(
            "append",
            input,
            |session, (appends, batch, old_keys, events)| {
                Box::pin(append::append(session, appends, *batch, old_keys, events))
            },
        );
        let (stored, ends) = append.await?;
        note_ends(&ends);
        Ok(stored)
    }

    async fn inbox(
        &self,
        after: Option<&InboxRow>,
        without: &[ExecutionId],
        limit: u32,
    ) -> Result<InboxPage> {
        inbox::page(&self.sql, after, without, limit).await
    }

    async fn due_timers(
        &self,
        now_unix_ms: i64,
        after: Option<&Timer>,
        limit: u32,
    ) -> Result<Vec<Timer>> {
        inbox::due_timers(&self.sql, now_unix_ms, after, limit).await
    }

    async fn executions_by_id(&self, ids: &[ExecutionId]) -> Result<Vec<ListedExecution>> {
        rows::by_id(&self.sql, ids).await
    }

    async fn execution(&self, id: ExecutionId) -> Result<Option<StoredExecution>> {
        rows::one(&self.sql, id).await
    }

    async fn execution_given(&self, given: &str) -> Result<Option<ExecutionId>> {
        let select =
            Statement::new("SELECT id FROM executions WHERE given_id = ?").bind(given.as_bytes());
        let found = self.sql.read("execution_given", select).await?;
        Ok(rows::execution_ids(found)?.into_iter().next())
    }

    async fn executions(&self, pages: &ExecutionPages) -> Result<Vec<ListedExecution>> {
        rows::page(&self.sql, pages).await
    }

    async fn entries(&self, id: ExecutionId, after: u64, limit: u32) -> Result<Vec<StoredEntry>> {
        rows::entries(&self.sql, id, after, limit).await
    }

    async fn cancel_execution(
        &self,
        id: ExecutionId,
        act: &Act,
    ) -> Result<Option<ExecutionStatus>> {
        let cancelled = (id, act.clone());
        self.sql
            .run("cancel_execution", cancelled, |session, (id, act)| {
                Box::pin(start::cancel(session, *id, act))
            })
            .await
    }

    async fn delete_execution(&self, id: ExecutionId, act: &Act) -> Result<Deleted> {
        const NAME: &str = "delete_execution";
        for listed in rows::by_id(&self.sql, &[id]).await? {
            if listed.status.is_final() {
                removal::remove_beginning(&self.sql, NAME, id, listed.seq).await?;
            }
        }
        let deleted = (id, act.clone());
        self.sql
            .run(NAME, deleted, |session, (id, act)| {
                Box::pin(removal::delete(session, *id, act))
            })
            .await
    }

    async fn remove_ended_executions(&self, age: Duration, limit: u32) -> Result<u64> {
        const NAME: &str = "remove_ended_executions";
        let old = removal::old(&self.sql, NAME, age, limit).await?;
        removal::remove_all(&self.sql, NAME, &old).await
    }

    async fn execution_counts(&self) -> Result<ExecutionCounts> {
        const NAME: &str = "execution_counts";
        let open = Statement::new("SELECT COUNT(*) FROM executions ")
            .sql(&DB::Connection::by_index("executions_status"))
            .sql(" WHERE status < ?")
            .bind(ExecutionStatus::Completed as u32);
        let timers = Statement::new("SELECT COUNT(*) FROM execution_timers ")
            .sql(&DB::Connection::by_index("execution_timers_due"))
            .sql(" WHERE due_ms >= 0");
        let mut counts = [0, 0];
        for (count, statement) in counts.iter_mut().zip([open, timers]) {
            let rows: Vec<(i64,)> = self.sql.read(NAME, statement).await?;
            *count = rows.first().map_or(Ok(0), |(count,)| number(*count))?;
        }
        let [open, timers] = counts;
        Ok(ExecutionCounts { open, timers })
    }

    async fn open_executions(
        &self,
        after: Option<ExecutionId>,
        limit: u32,
    ) -> Result<Vec<OpenExecution>> {
        rows::open(&self.sql, after, limit).await
    }

    async fn wake_executions(&self, ids: &[ExecutionId]) -> Result<()> {
        self.sql
            .run("wake_executions", ids.to_vec(), |session, ids| {
                Box::pin(start::wake(session, ids))
            })
            .await
    }
}
