//! The events of a transaction, stored as rows of `kept_events` before the transaction updates its
//! counts.
//!
//! Two changes of one task are in two transactions, and the second one has waited for the first,
//! because each locks the task or inserts it. The row of the second one is inserted after that, so
//! it has the higher number.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;

use crate::{
    config::EventQueues,
    model::{
        EventRecord, MOST_KEPT_TOGETHER, QueueName, StoredStatus, TaskId, TaskRow, TaskStatus,
        TreeEnd,
    },
    store::{
        Result,
        sql::{
            rows::{columns, number, queue_name, status, task_id},
            session::Session,
            statement::{Statement, lists, pieces},
            tasks::step::{StatusChange, Step},
        },
    },
    wire,
};

/// The size of its events at which a row ends.
const ROW_BYTES: usize = 64 << 10;

/// The events of a transaction.
#[derive(Default)]
pub(crate) struct Events {
    queues: Arc<EventQueues>,
    created: Vec<EventRecord>,
    /// Tasks whose status changed.
    moved: Vec<TaskId>,
    /// The ends of trees. They come last, because the last task of a tree ends before it.
    trees: Vec<EventRecord>,
    /// The worker and the attempt of each task's last credit.
    credited: HashMap<TaskId, (String, u32)>,
}

impl Events {
    pub(crate) fn in_queues(queues: &Arc<EventQueues>) -> Self {
        Self {
            queues: Arc::clone(queues),
            ..Self::default()
        }
    }

    /// Records which worker got the last credit of a task, because the event of the completion
    /// names it.
    pub(crate) fn completed_by(
        &mut self,
        id: TaskId,
        queue: &QueueName,
        worker: &str,
        attempt: u32,
    ) {
        if self.queues.is_on(queue) {
            self.credited.insert(id, (worker.to_owned(), attempt));
        }
    }

    /// Records the end of a tree: an event of its root.
    pub(crate) fn tree_ended(&mut self, end: &TreeEnd) {
        if self.queues.is_on(&end.queue) {
            self.trees.push(EventRecord {
                at_unix_ms: end.ended_unix_ms,
                epoch: end.epoch,
                tree: Some(end.state),
                ..EventRecord::new(end.tree, end.queue.clone())
            });
        }
    }

    fn created(&mut self, task: &TaskRow) {
        self.created.push(EventRecord {
            key: task.key.clone(),
            status: waiting(task.not_before_unix_ms, task.created_unix_ms),
            at_unix_ms: task.created_unix_ms,
            ..EventRecord::new(task.id, task.queue.clone())
        });
    }
}

impl Step for Events {
    fn hear(&mut self, change: &StatusChange<'_>) {
        match change {
            StatusChange::Added(task) if self.queues.is_on(&task.queue) => self.created(task),
            StatusChange::Moved { id, queue, .. } if self.queues.is_on(queue) => {
                self.moved.push(*id);
            }
            _ => {}
        }
    }

    /// Stores the events. By now the rows of the tasks have their final values.
    async fn store<S: Session>(self, session: &mut S) -> Result<()> {
        let Self {
            created: mut events,
            mut moved,
            mut credited,
            trees,
            ..
        } = self;
        moved.sort_unstable();
        moved.dedup();
        for ids in lists(&moved) {
            let moved = Statement::new(
                "SELECT id, queue, task_key, status, attempts, reason, epoch, not_before_ms, updated_ms FROM tasks ",
            )
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids)
            .sql(" ORDER BY id");
            for columns in session.fetch::<MovedColumns>(moved).await? {
                events.push(columns.into_event(&mut credited)?);
            }
        }
        events.extend(trees);
        if events.is_empty() {
            return Ok(());
        }
        let rows = rows(&events);
        for piece in pieces(&rows, |(_, records)| records.len()) {
            let values = piece
                .iter()
                .map(|(at_ms, records)| [(*at_ms).into(), (&records[..]).into()]);
            session
                .execute(Statement::new("INSERT INTO kept_events (at_ms, records)").values(values))
                .await?;
        }
        Ok(())
    }
}

/// Packs these events into rows, each with the time of its first event.
fn rows(events: &[EventRecord]) -> Vec<(i64, Bytes)> {
    let (mut rows, mut row, mut bytes, mut at_ms) = (Vec::new(), Vec::new(), 0, 0);
    for event in events {
        let record = wire::event_record(event);
        if row.len() == MOST_KEPT_TOGETHER || bytes + record.len() > ROW_BYTES && !row.is_empty() {
            rows.push((at_ms, wire::kept_events(std::mem::take(&mut row))));
            bytes = 0;
        }
        if row.is_empty() {
            at_ms = event.at_unix_ms;
        }
        bytes += record.len();
        row.push(record);
    }
    if !row.is_empty() {
        rows.push((at_ms, wire::kept_events(row)));
    }
    rows
}

/// The status of a new or unfinished task.
fn waiting(not_before_unix_ms: i64, now_unix_ms: i64) -> TaskStatus {
    if not_before_unix_ms > now_unix_ms {
        TaskStatus::Delayed
    } else {
        TaskStatus::Pending
    }
}

columns! {
    struct MovedColumns {
        id: Vec<u8>,
        queue: String,
        task_key: Vec<u8>,
        status: i64,
        attempts: i64,
        reason: String,
        epoch: i64,
        not_before_ms: i64,
        updated_ms: i64,
    }
}

impl MovedColumns {
    fn into_event(self, credited: &mut HashMap<TaskId, (String, u32)>) -> Result<EventRecord> {
        let (id, stored) = (task_id(&self.id)?, status(self.status)?);
        let status = TaskStatus::of_end(stored)
            .unwrap_or_else(|| waiting(self.not_before_ms, self.updated_ms));
        let credit = credited
            .remove(&id)
            .filter(|_| stored == StoredStatus::Completed);
        let (worker, attempt) = credit.unwrap_or_default();
        Ok(EventRecord {
            key: self.task_key.into(),
            status,
            at_unix_ms: self.updated_ms,
            epoch: number(self.epoch)?,
            worker,
            attempt,
            attempts: number(self.attempts)?,
            reason: self.reason,
            ..EventRecord::new(id, queue_name(&self.queue)?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_bounded_and_leave_nothing_out() {
        let event = |key: usize| EventRecord {
            key: vec![b'k'; key].into(),
            ..EventRecord::new(TaskId::new(), QueueName::new("q").unwrap())
        };
        let sizes = |events: &[EventRecord]| {
            let read = |(_, row): (i64, Bytes)| wire::read_kept_events(row).unwrap().len();
            rows(events).into_iter().map(read).collect::<Vec<_>>()
        };
        assert_eq!(sizes(&[]), [0; 0]);
        assert_eq!(
            sizes(&vec![event(1); 2 * MOST_KEPT_TOGETHER + 1]),
            [MOST_KEPT_TOGETHER, MOST_KEPT_TOGETHER, 1]
        );
        assert_eq!(sizes(&[event(ROW_BYTES), event(1), event(1)]), [1, 2]);
    }
}
