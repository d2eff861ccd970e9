//! Inserting tasks.

use std::time::Instant;

use tracing::Instrument as _;

use super::{
    access::reaches,
    error::Error,
    handle::{Api, span},
    items::{merge, split},
    trees::AskedTree,
};
use crate::{
    model::{Caller, InsertAnswer, NewTask, TaskTree},
    pipelines::{admission::Stages, discovery},
    telemetry::metrics::{self, Dropped, Source},
};

/// Gives tasks of stages what their topologies say, and those of start stages a tree.
fn complete_for_stages(stages: &Stages, tasks: &mut [Result<NewTask, InsertAnswer>]) {
    if stages.is_empty() {
        return;
    }
    for checked in tasks.iter_mut() {
        let Ok(task) = checked else { continue };
        let Some((topology, stage)) = stages.of(&task.queue) else {
            continue;
        };
        if let Err(why) = topology.complete_insert(stage, task) {
            *checked = Err(InsertAnswer::rejected(why));
        }
    }
}

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
            if let Some(TaskTree::Root(tree)) = task.tree.as_deref()
                && !tree.then.is_empty()
            {
                reaches(caller, &tree.then)
                    .map_err(|denied| InsertAnswer::rejected(format!("tree.then: {denied}")))?;
                if let Some(scope) = restricted {
                    discovery
                        .let_in(&tree.then, scope)
                        .map_err(|why| InsertAnswer::rejected(format!("tree.then: {why}")))?;
                }
            }
            if let Some(scope) = restricted {
                discovery
                    .let_in(&task.queue, scope)
                    .map_err(InsertAnswer::rejected)?;
            }
            Ok(task)
        };
        let mut checked: Vec<Result<NewTask, InsertAnswer>> =
            tasks.into_iter().map(may_be_stored).collect();
        complete_for_stages(&discovery.stages(), &mut checked);
        // Most inserts have nothing to do with trees, and their calls stay small.
        if AskedTree::is_asked_for(&checked) {
            return Box::pin(self.insert_in_trees(caller, checked)).await;
        }
        let (tasks, known) = split(checked);
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

    /// Inserts tasks of which some ask for trees, and names the trees in the answers.
    async fn insert_in_trees(
        &self,
        caller: &Caller,
        mut checked: Vec<Result<NewTask, InsertAnswer>>,
    ) -> Result<Vec<InsertAnswer>, Error> {
        self.refuse_trees(caller, &mut checked).await?;
        let asked = AskedTree::of_all(&checked);
        let (tasks, known) = split(checked);
        let unreadable = known.len() - tasks.len();
        let mut answers = Vec::new();
        if !tasks.is_empty() {
            let started = Instant::now();
            let inserted = self
                .discovery()?
                .insert(tasks)
                .instrument(span("insert", caller))
                .await;
            metrics::discovery_insert(started.elapsed());
            answers = inserted?;
        }
        metrics::discovery_dropped(Source::Api, Dropped::Rejected, unreadable);
        let mut answers = merge(known, answers);
        // The tasks are stored, so the call has succeeded.
        if let Err(error) = self.name_trees(&asked, &mut answers).await {
            tracing::debug!("cannot read the trees of inserted tasks: {error}");
        }
        Ok(answers)
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
