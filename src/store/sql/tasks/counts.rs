//! The number of tasks per queue and status.

use std::{collections::BTreeMap, sync::Arc};

use super::events::Happened;
use crate::config::EventQueues;
use crate::model::{QueueName, StoredStatus, TaskId, TaskRow};
use crate::store::sql::{
    rows::{queue_name, status},
    session::Session,
    statement::{Statement, pieces},
};
use crate::store::{Error, QueueCount, Result};

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

/// The columns of a [`QueueCount`].
pub(crate) type CountColumns = (String, i64, i64);

impl TryFrom<CountColumns> for QueueCount {
    type Error = Error;

    fn try_from((queue, n, count): CountColumns) -> Result<Self> {
        // A wrong count concerns its queue alone, until `fsck` writes the right one.
        Ok(Self {
            queue: queue_name(&queue)?,
            status: status(n)?,
            count: count.max(0).unsigned_abs(),
        })
    }
}

fn select<'a>() -> Statement<'a> {
    Statement::new("SELECT queue, status, count FROM queue_counts ")
}

/// The counts of `queues`, or of every queue that ever was.
pub(crate) fn of(queues: Option<&[QueueName]>) -> Statement<'_> {
    let counts = select().sql("WHERE count <> 0");
    match queues {
        Some(queues) => counts.sql(" AND queue IN ").list(queues),
        None => counts,
    }
}

/// The first queues with unfinished tasks, each with their number, which is wrong if it is below
/// zero.
pub(crate) fn queues_from<'a, S: Session>(first: &'a str, limit: usize) -> Statement<'a> {
    let unfinished = unfinished::<S>().sql(" AND queue >= ? ORDER BY queue LIMIT ?");
    unfinished.bind(first).bind(limit as u64)
}

/// The counts of unfinished tasks other than zero, by an index that contains nothing else.
pub(crate) fn unfinished<'a, S: Session>() -> Statement<'a> {
    select()
        .sql(&S::by_index("queue_counts_unfinished"))
        .sql(" WHERE ")
        .sql(S::IS_UNFINISHED)
}
