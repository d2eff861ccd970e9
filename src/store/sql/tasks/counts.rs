//! The number of tasks per queue and status.

use std::collections::BTreeMap;

use super::step::{StatusChange, Step};
use crate::{
    model::{QueueName, StoredStatus},
    store::{
        Result,
        sql::{
            session::Session,
            statement::{Statement, pieces},
        },
    },
};

/// The changes that a transaction makes to `queue_counts`.
#[derive(Default)]
pub(crate) struct Counts(BTreeMap<(QueueName, i64), i64>);

/// The status under which `queue_counts` has those unfinished tasks that wait behind others of their
/// sequences.
pub(crate) const BEHIND: i64 = 4;

impl Counts {
    fn count(&mut self, queue: &QueueName, status: StoredStatus, change: i64) {
        *self.0.entry((queue.clone(), status as i64)).or_default() += change;
    }

    /// Counts tasks that now wait behind others of their sequences, or no longer do.
    pub(crate) fn behind(&mut self, queue: &QueueName, change: i64) {
        *self.0.entry((queue.clone(), BEHIND)).or_default() += change;
    }
}

impl Step for Counts {
    fn hear(&mut self, change: &StatusChange<'_>) {
        match change {
            StatusChange::Added(task) => self.count(&task.queue, StoredStatus::Unfinished, 1),
            StatusChange::Moved {
                queue, from, to, ..
            } => {
                self.count(queue, *from, -1);
                self.count(queue, *to, 1);
            }
            // The counts cover all tasks that were ever stored.
            StatusChange::Removed { .. } => {}
        }
    }

    async fn store<S: Session>(self, session: &mut S) -> Result<()> {
        let changed: Vec<_> = self
            .0
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
