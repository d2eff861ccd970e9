//! Publishes rows of the outbox to the bus, and ends tasks that the bus will never accept.

use std::{collections::HashSet, sync::Arc};

use super::error::Error;
use crate::{
    dedup::Filter,
    model::{DeadLetter, NewTask, TaskId, TaskRow},
    pipelines::{
        context::Context,
        publishing::{DeadLetters, Last, Publisher},
    },
    runtime::Clock,
    store::{Settlement, Tasks, Turn},
    telemetry::metrics::{self, Republished, Watched},
};

#[derive(Clone)]
pub(super) struct Republish {
    store: Arc<dyn Tasks>,
    publisher: Publisher,
    letters: DeadLetters,
    filter: Filter,
    clock: Clock,
}

impl Republish {
    pub(super) fn new(context: &Context) -> Self {
        let Context {
            store,
            publisher,
            letters,
            filter,
            clock,
            ..
        } = context.clone();
        Self {
            store,
            publisher,
            letters,
            filter,
            clock,
        }
    }

    /// Publishes rows, and ends tasks that are too large for the bus. Adds rows that SQL refuses to
    /// mark to `refused`. Returns the last offset per partition.
    pub(super) async fn publish(
        &self,
        rows: &[(&TaskRow, Turn)],
        why: Republished,
        refused: &mut HashSet<TaskId>,
    ) -> Result<Last, Error> {
        // A scheduled row was not published before, unless it is late. Any other row may have been,
        // even a fresh one, if only its mark is missing.
        let again = why != Republished::Scheduled;
        let outcome = self.publisher.publish_around_refused(rows, again).await?;
        let published = rows.len() - outcome.stay.len() - outcome.too_large.len();
        metrics::outbox_republished(why, published);
        refused.extend(outcome.stay);
        self.give_up(rows, &outcome.too_large).await?;
        Ok(outcome.last)
    }

    /// Marks tasks as dead that are too large for the bus. After a crash in between, their letters
    /// are sent again.
    async fn give_up(
        &self,
        rows: &[(&TaskRow, Turn)],
        too_large: &[(TaskId, String)],
    ) -> Result<(), Error> {
        if too_large.is_empty() {
            return Ok(());
        }
        let at_unix_ms = self.clock.now_unix_ms();
        let mut letters = Vec::new();
        let mut deaths = Vec::new();
        let mut keys = Vec::new();
        for (id, reason) in too_large {
            let Some((task, _)) = rows.iter().find(|(task, _)| task.id == *id) else {
                continue;
            };
            tracing::error!(%id, "task {id} cannot be published, and is dead: {reason}");
            letters.push(DeadLetter {
                reason: reason.clone(),
                at_unix_ms,
                task_id: Some(*id),
                queue: task.queue.as_str().to_owned(),
                task: Some(NewTask::from(*task)),
                ..Default::default()
            });
            let reason = reason.clone();
            let history = Vec::new();
            deaths.push(Settlement::Died {
                id: *id,
                reason,
                attempts: 0,
                history,
                epoch: None,
                at_unix_ms,
            });
            keys.push((task.queue.clone(), task.key_hash));
        }
        self.letters.send(letters).await?;
        self.store.settle(&deaths).await?;
        metrics::watchdog_handled(Watched::Dead, too_large.len());
        if let Err(error) = self.filter.forget(&keys).await {
            tracing::debug!(
                "could not take {} keys out of the filter: {error}",
                keys.len()
            );
        }
        Ok(())
    }
}
