//! Walks over unfinished tasks: queue by queue, and by id within each queue.
//!
//! They use the index that sorts the unfinished tasks of a queue by id (ADR 26), so a walk needs to
//! know its queues first.

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

/// The maximum number of queues in one statement, and of statements for one page.
const AT_ONCE: usize = 64;
const STATEMENTS: usize = 16;
/// The maximum number of queues that a page reaches.
pub(crate) const QUEUES: usize = AT_ONCE * STATEMENTS;

/// A walk over the tasks with ids up to `upto`.
pub(crate) struct Walk<'a> {
    pub(crate) name: &'static str,
    /// The queues in the order of the walk, each with the number of its unfinished tasks, which may
    /// be wrong. If the queue of `after` is not among them, all of them come after it.
    pub(crate) queues: &'a [(QueueName, u64)],
    pub(crate) after: Option<&'a Walked>,
    pub(crate) upto: &'a TaskId,
}

/// A page of the tasks of a walk.
pub(crate) struct Page<T> {
    pub(crate) rows: Vec<T>,
    /// Where the next page begins, or `None` if this is the last one.
    pub(crate) next: Option<Walked>,
}

impl Walk<'_> {
    /// Reads `columns` of the next `limit` unfinished tasks, including those that are not on the
    /// bus. `place` extracts queue and id from the columns.
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
            // SQL does not guarantee the order of the parts of a union.
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

/// The first queues, as many as one statement needs for `tasks` tasks without reading many more.
fn enough(queues: &[(QueueName, u64)], tasks: u64) -> &[(QueueName, u64)] {
    let mut counted = 0;
    let few = queues.iter().take(AT_ONCE).take_while(|(_, count)| {
        let is_short = counted < tasks;
        counted += count;
        is_short
    });
    // Statements come in a few sizes only.
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
