//! The number of tasks per queue and status.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    config::EventQueues,
    model::{QueueName, StoredStatus, TaskId, TaskRow},
    store::{
        Result,
        sql::{
            session::Session,
            statement::{Statement, pieces},
            tasks::events::Happened,
        },
    },
};

/// The changes of a transaction in `queue_counts`, and their events.
pub(crate) struct Counts {
    changes: BTreeMap<(QueueName, StoredStatus), i64>,
    pub(crate) events: Happened,
}

impl Counts {
    /// Of a transaction that keeps events of these queues.
    pub(crate) fn with_events(queues: &Arc<EventQueues>) -> Self {
        Self {
            changes: BTreeMap::new(),
            events: Happened::in_queues(queues),
        }
    }

    pub(crate) fn added(&mut self, task: &TaskRow) {
        *self
            .changes
            .entry((task.queue.clone(), StoredStatus::Unfinished))
            .or_default() += 1;
        self.events.created(task);
    }

    pub(crate) fn moved(
        &mut self,
        id: TaskId,
        queue: &QueueName,
        from: StoredStatus,
        to: StoredStatus,
    ) {
        *self.changes.entry((queue.clone(), from)).or_default() -= 1;
        *self.changes.entry((queue.clone(), to)).or_default() += 1;
        self.events.moved(queue, id);
    }

    /// Writes the events and the changes: the last step of a transaction, so that it holds the few
    /// rows of the latter briefly.
    pub(crate) async fn store<S: Session>(self, session: &mut S) -> Result<()> {
        self.events.store(session).await?;
        let changed: Vec<_> = self
            .changes
            .into_iter()
            .filter(|(_, change)| *change != 0)
            .collect();
        for changed in pieces(&changed, |_| 0) {
            let rows = changed.iter().map(|((queue, status), change)| {
                [queue.into(), (*status).into(), (*change).into()]
            });
            let statement = Statement::new("INSERT INTO queue_counts (queue, status, count)")
                .values(rows)
                .sql(&S::add("queue, status", "count"));
            session.execute(statement).await?;
        }
        Ok(())
    }
}
