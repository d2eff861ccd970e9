//! The steps that run just before the commit of a transaction that changes the status of tasks.
//!
//! There are five kinds of such transactions: inserts, settlements, retries, changes and removals.
//! Each creates [`Steps`], tells them of every task that it adds, ends, reopens or removes, and
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

/// The steps of a transaction, in order.
///
/// To add a step, add a field, and call it in [`Self::hear`] for each change and in
/// [`Self::store`].
pub(crate) struct Steps {
    events: Events,
    /// Stored last, so that the transaction locks the few rows of the counts only briefly.
    counts: Counts,
}

impl Steps {
    /// The steps of a transaction that stores the events of these queues.
    pub(crate) fn new(events: &Arc<EventQueues>) -> Self {
        Self {
            events: Events::in_queues(events),
            counts: Counts::default(),
        }
    }

    /// Records that the transaction adds a task.
    pub(crate) fn added(&mut self, task: &TaskRow) {
        self.hear(&StatusChange::Added(task));
    }

    /// Records that the transaction ends a task or makes it unfinished again.
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

    /// Records that the transaction removes a finished task.
    pub(crate) fn removed(&mut self, id: TaskId, status: StoredStatus) {
        self.hear(&StatusChange::Removed { id, status });
    }

    /// Records which worker got the last credit of a task.
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

    /// Runs the steps, as the last statements of the transaction.
    pub(crate) async fn store<S: Session>(self, session: &mut S) -> Result<()> {
        self.events.store(session).await?;
        self.counts.store(session).await
    }
}
