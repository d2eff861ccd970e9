//! Walks over unfinished tasks: queue by queue, in each by id.
//!
//! They read the index that has a queue's unfinished tasks in the order of ids (ADR 26). So a walk
//! learns its queues first.

use std::collections::HashMap;

use crate::{
    model::{QueueName, StoredStatus, TaskId},
    store::{
        Result, Walked,
        sql::{
            backend::Backend,
            dialect::Dialect,
            rows::{queue_name, task_id},
            runner::Runner,
            session::Columns,
            statement::{Statement, pieces},
        },
    },
};

/// Queues in one statement, and statements for one page.
const AT_ONCE: usize = 64;
const STATEMENTS: usize = 16;
/// Queues that a page may come to.
pub(crate) const QUEUES: usize = AT_ONCE * STATEMENTS;

/// A walk over the tasks up to `upto`.
pub(crate) struct Walk<'a> {
    pub(crate) name: &'static str,
    /// The queues in their order, each with the number of its unfinished tasks, which may be wrong.
    /// If that of `after` is not among them, all lie behind it.
    pub(crate) queues: &'a [(QueueName, u64)],
    pub(crate) after: Option<&'a Walked>,
    pub(crate) upto: &'a TaskId,
}

/// A part of the tasks of a walk.
pub(crate) struct Page<T> {
    pub(crate) rows: Vec<T>,
    /// Where the next page begins; `None`: this is the last one.
    pub(crate) next: Option<Walked>,
}

impl Walk<'_> {
    /// Reads `columns` of the next `limit` unfinished tasks, also of those that are not on the bus.
    /// `place` is the queue and the id in the columns.
    pub(crate) async fn page<DB: Backend, T: Columns>(
        &self,
        sql: &Runner<DB>,
        columns: &str,
        limit: usize,
        place: fn(&T) -> (&str, &[u8]),
    ) -> Result<Page<T>> {
        let select = format!(
            "SELECT * FROM (SELECT {columns} FROM tasks {} \
             AND queue = ? AND id > ? AND id <= ? ORDER BY id LIMIT ?) AS page",
            DB::Connection::of_status(StoredStatus::Unfinished)
        );
        let begun = self.after.and_then(|after| {
            self.queues
                .iter()
                .position(|(queue, _)| *queue == after.queue)
        });
        let (mut rest, mut rows) = (&self.queues[begun.unwrap_or(0)..], Vec::new());
        for _ in 0..STATEMENTS {
            if rows.len() >= limit || rest.is_empty() {
                break;
            }
            let missing = limit - rows.len();
            let some = enough(rest, missing as u64);
            let ranges = some.iter().map(|(queue, _)| {
                let beyond = self
                    .after
                    .filter(|after| after.queue == *queue)
                    .map_or(&TaskId::FIRST, |after| &after.id);
                [
                    queue.into(),
                    beyond.into(),
                    self.upto.into(),
                    (missing as u64).into(),
                ]
            });
            let mut read: Vec<T> = sql
                .read(
                    self.name,
                    Statement::new("").rows(&select, " UNION ALL ", ranges),
                )
                .await?;
            // SQL does not promise in which order the parts of a union come.
            let turns: HashMap<&str, usize> = some
                .iter()
                .map(|(queue, _)| queue.as_str())
                .zip(0..)
                .collect();
            read.sort_by(|a, b| {
                let ((queue, id), (other, other_id)) = (place(a), place(b));
                (turns.get(queue), id).cmp(&(turns.get(other), other_id))
            });
            rows.append(&mut read);
            rest = &rest[some.len()..];
        }
        let mut next = rest.first().map(|(queue, _)| Walked::before(queue));
        if rows.len() >= limit {
            rows.truncate(limit);
            if let Some((queue, id)) = rows.last().map(place) {
                next = Some(Walked {
                    queue: queue_name(queue)?,
                    id: task_id(id)?,
                });
            }
        }
        Ok(Page { rows, next })
    }
}

/// The first of the queues for one statement, so that it reads few tasks too many.
fn enough(queues: &[(QueueName, u64)], tasks: u64) -> &[(QueueName, u64)] {
    let mut counted = 0;
    let few = queues.iter().take(AT_ONCE).take_while(|(_, count)| {
        let is_short = counted < tasks;
        counted += count;
        is_short
    });
    // A statement has one of a few sizes.
    pieces(&queues[..few.count()], |_| 0)
        .next()
        .unwrap_or_default()
}

/// The greatest id of a stored task.
pub(crate) async fn last_id<DB: Backend>(sql: &Runner<DB>) -> Result<Option<TaskId>> {
    let last = Statement::new("SELECT id FROM tasks ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE id <= ? ORDER BY id DESC LIMIT 1")
        .bind(&TaskId::LAST);
    Ok(sql.ids("last_id", last).await?.first().copied())
}
