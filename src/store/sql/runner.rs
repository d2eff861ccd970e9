//! Runs the operations of a store. Each has a name, under which the metrics record its duration and
//! its retries.

use std::{future::Future, time::Instant};

use futures::FutureExt as _;

use super::{
    backend::{Backend, Steps, Work},
    retry::{Outage, repeating},
    rows::task_ids,
    session::Columns,
    statement::Statement,
};
use crate::{
    model::TaskId,
    runtime::ANSWER_WITHIN,
    store::{Error, Result},
    telemetry::metrics,
};

/// A database, and what is known about its outage.
pub(super) struct Runner<DB>(pub(super) DB, pub(super) Outage);

impl<DB: Backend> Runner<DB> {
    /// Runs `steps` in one transaction, and repeats it as a whole after a transient error.
    pub(super) async fn run<I, T>(
        &self,
        name: &'static str,
        input: I,
        steps: Steps<DB::Connection, I, T>,
    ) -> Result<T>
    where
        I: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.run_work(name, Work::new(input, steps)).await
    }

    /// Like [`Self::run`], for transactions that insert tasks or change which filters they match:
    /// see [`super::tasks::era`].
    pub(super) async fn run_in_era<I, T>(
        &self,
        name: &'static str,
        input: I,
        steps: Steps<DB::Connection, I, T>,
    ) -> Result<T>
    where
        I: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.run_work(name, Work::in_era(input, steps)).await
    }

    async fn run_work<I, T>(
        &self,
        name: &'static str,
        work: Work<DB::Connection, I, T>,
    ) -> Result<T>
    where
        I: Send + Sync + 'static,
        T: Send + 'static,
    {
        timed(name, repeating(name, &self.1, || self.0.transact(&work))).await
    }

    /// Runs one read-only statement as part of the operation `name`.
    pub(super) async fn read<T: Columns>(
        &self,
        name: &'static str,
        statement: Statement<'_>,
    ) -> Result<Vec<T>> {
        timed(
            name,
            repeating(name, &self.1, || self.0.read(statement.clone())),
        )
        .await
    }

    /// Checks once whether the database responds. If it does not, later calls give up sooner.
    pub(super) async fn ping(&self) -> Result<()> {
        let answer = tokio::time::timeout(ANSWER_WITHIN, self.0.ping()).await;
        let answer = answer.unwrap_or_else(|_| Err(Error::timed_out()));
        self.1.note(answer.as_ref().err());
        answer
    }

    /// Reads the result of a statement that selects only ids.
    pub(super) async fn ids(
        &self,
        name: &'static str,
        statement: Statement<'_>,
    ) -> Result<Vec<TaskId>> {
        task_ids(self.read(name, statement).await?)
    }
}

fn timed<T>(name: &'static str, operation: impl Future<Output = T>) -> impl Future<Output = T> {
    let began = Instant::now();
    operation.inspect(move |_| metrics::sql_operation(name, began.elapsed()))
}
