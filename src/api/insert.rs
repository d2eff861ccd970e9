//! Inserting tasks.

use std::time::Instant;

use tracing::Instrument as _;

use super::{
    access::reaches,
    error::Error,
    handle::{Api, span},
    items::{merge, split},
};
use crate::{
    model::{Caller, InsertAnswer, NewTask},
    pipelines::discovery,
    telemetry::metrics::{self, Dropped, Source},
};

impl Api {
    /// Stores the tasks that are new, and returns an answer for each, in order. An unreadable task
    /// (`Err`) is rejected, and so is a task for a queue that the caller does not reach.
    ///
    /// Fails if nothing was stored. If only a part was stored, the answer to each of the other
    /// tasks is `TRY_LATER`.
    pub async fn insert(
        &self,
        caller: &Caller,
        tasks: Vec<Result<NewTask, String>>,
    ) -> Result<Vec<InsertAnswer>, Error> {
        let discovery = self.discovery()?;
        // A request with NDJSON calls this for each batch of its lines: its token may have been
        // revoked since.
        self.authentication.still_valid(caller)?;
        let restricted = caller
            .access
            .restricted()
            .and_then(|_| caller.access.token())
            .map(|token| &token.scope);
        let may_be_stored = |task: Result<NewTask, String>| {
            let task = task.map_err(InsertAnswer::rejected)?;
            reaches(caller, &task.queue)
                .map_err(|denied| InsertAnswer::rejected(denied.to_string()))?;
            if let Some(scope) = restricted {
                discovery
                    .let_in(&task.queue, scope)
                    .map_err(InsertAnswer::rejected)?;
            }
            Ok(task)
        };
        let (tasks, known) = split(tasks.into_iter().map(may_be_stored).collect());
        let unreadable = known.len() - tasks.len();
        let mut answers = Vec::new();
        if !tasks.is_empty() {
            let started = Instant::now();
            let inserted = discovery
                .insert(tasks)
                .instrument(span("insert", caller))
                .await;
            metrics::discovery_insert(started.elapsed());
            answers = inserted?;
        }
        metrics::discovery_dropped(Source::Api, Dropped::Rejected, unreadable);
        Ok(merge(known, answers))
    }

    /// Fails if this process does not accept tasks.
    pub fn can_insert(&self) -> Result<(), Error> {
        self.discovery().map(drop)
    }

    pub(super) fn discovery(&self) -> Result<&discovery::Handle, Error> {
        self.discovery
            .as_ref()
            .ok_or(Error::NotRunHere("discovery"))
    }
}
