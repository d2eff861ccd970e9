//! Walks over the tasks on the bus: queue by queue, in each by id.
//!
//! The index of a queue's unfinished tasks is the only one that has them (ADR 61). So a walk knows its queues before it
//! begins.

use std::collections::HashMap;

use super::{
    backend::Backend,
    dialect::Dialect,
    groups::FIRST,
    runner::Runner,
    session::Columns,
    statement::{Statement, pieces},
};
use crate::{
    model::{QueueName, StoredStatus, TaskId},
    store::{Result, Walked},
};

/// Queues in one statement.
const AT_ONCE: usize = 64;

/// A walk over the tasks up to `upto`.
pub(super) struct Walk<'a> {
    pub(super) name: &'static str,
    /// The queues in their order, each with the number of its unfinished tasks, which may be wrong. If that of `after`
    /// is not among them, all lie behind it.
    pub(super) queues: &'a [(QueueName, u64)],
    pub(super) upto: &'a TaskId,
}

impl Walk<'_> {
    /// Reads `columns` of the first `limit` tasks behind `after` that meet `condition`, which begins with AND or is
    /// empty. `place` is the queue and the id in the columns.
    pub(super) async fn page<DB: Backend, T: Columns>(
        &self,
        sql: &Runner<DB>,
        columns: &str,
        condition: &str,
        after: Option<&Walked>,
        limit: usize,
        place: fn(&T) -> (&str, &[u8]),
    ) -> Result<Vec<T>> {
        let select = format!(
            "SELECT * FROM (SELECT {columns} FROM tasks {} AND on_bus = 1{condition} \
             AND queue = ? AND id > ? AND id <= ? ORDER BY id LIMIT ?) AS page",
            DB::Connection::of_status(StoredStatus::Unfinished)
        );
        let begun = after.and_then(|after| self.queues.iter().position(|(queue, _)| *queue == after.queue));
        let (mut rest, mut page) = (&self.queues[begun.unwrap_or(0)..], Vec::new());
        while page.len() < limit && !rest.is_empty() {
            let missing = limit - page.len();
            let (some, behind) = rest.split_at(enough(rest, missing as u64));
            for some in pieces(some, |_| 0) {
                let ranges = some.iter().map(|(queue, _)| {
                    let beyond = after.filter(|after| after.queue == *queue).map_or(&FIRST, |after| &after.id);
                    [queue.into(), beyond.into(), self.upto.into(), (missing as u64).into()]
                });
                let mut read: Vec<T> =
                    sql.read(self.name, Statement::new("").rows(&select, " UNION ALL ", ranges)).await?;
                // SQL does not promise in which order the parts of a union come.
                let turns: HashMap<&str, usize> = some.iter().map(|(queue, _)| queue.as_str()).zip(0..).collect();
                read.sort_by(|a, b| {
                    let ((queue, id), (other, other_id)) = (place(a), place(b));
                    (turns.get(queue), id).cmp(&(turns.get(other), other_id))
                });
                page.append(&mut read);
            }
            rest = behind;
        }
        page.truncate(limit);
        Ok(page)
    }
}

/// How many of the next queues go into a statement, so that it reads few tasks too many.
fn enough(queues: &[(QueueName, u64)], tasks: u64) -> usize {
    let mut counted = 0;
    let few = queues.iter().take(AT_ONCE).take_while(|(_, count)| {
        let is_short = counted < tasks;
        counted += count;
        is_short
    });
    few.count()
}
