//! The steps that run before a transaction commits which changes the status of tasks.
//!
//! Five kinds of transactions do: inserts, settlements, retries, changes and removals. Each makes
//! its [`Steps`], tells them of every task that was added, ended, came back or was removed, and
//! stores them last.

use std::sync::Arc;

use crate::{
    config::EventQueues,
    model::{QueueName, StoredStatus, TaskId, TaskRow},
    store::{
        Result,
        sql::{
            session::Session,
            tasks::{
                counts::Counts,
                events::Events,
                step::{StatusChange, Step},
            },
        },
    },
};

/// The steps of a transaction, in their order.
///
/// Another step is another field: it hears of each change in [`Self::hear`], and has its turn in
/// [`Self::store`].
pub(crate) struct Steps {
    events: Events,
    /// The last one, so that the transaction holds the few rows of the counts briefly.
    counts: Counts,
}

impl Steps {
    /// The steps of a transaction that keeps events of these queues.
    pub(crate) fn new(events: &Arc<EventQueues>) -> Self {
        Self {
            events: Events::in_queues(events),
            counts: Counts::default(),
        }
    }

    /// The transaction adds a task.
    pub(crate) fn added(&mut self, task: &TaskRow) {
        self.hear(&StatusChange::Added(task));
    }

    /// The transaction ends a task, or lets it come back.
    pub(crate) fn moved(
        &mut self,
        id: TaskId,
        queue: &QueueName,
        from: StoredStatus,
        to: StoredStatus,
    ) {
        self.hear(&StatusChange::Moved {
            id,
            queue,
            from,
            to,
        });
    }

    /// The transaction removes a finished task.
    pub(crate) fn removed(&mut self, id: TaskId, status: StoredStatus) {
        self.hear(&StatusChange::Removed { id, status });
    }

    /// A worker got the last credit of a task.
    pub(crate) fn completed_by(
        &mut self,
        id: TaskId,
        queue: &QueueName,
        worker: &str,
        attempt: u32,
    ) {
        self.events.completed_by(id, queue, worker, attempt);
    }

    fn hear(&mut self, change: &StatusChange<'_>) {
        self.events.hear(change);
        self.counts.hear(change);
    }

    /// Runs the steps: the last statements of the transaction.
    pub(crate) async fn store<S: Session>(self, session: &mut S) -> Result<()> {
        self.events.store(session).await?;
        self.counts.store(session).await
    }
}
