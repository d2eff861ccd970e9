//! Reads the number of tasks per queue and status.

use super::{
    rows::{queue_name, status},
    session::Session,
    statement::Statement,
};
use crate::{
    model::QueueName,
    store::{Error, QueueCount, Result},
};

/// The columns of a [`QueueCount`].
pub(super) type CountColumns = (String, i64, i64);

impl TryFrom<CountColumns> for QueueCount {
    type Error = Error;

    fn try_from((queue, n, count): CountColumns) -> Result<Self> {
        // A wrong count affects only its own queue, until `fsck` corrects it.
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

/// The counts of `queues`, or of every queue that ever existed.
pub(super) fn of(queues: Option<&[QueueName]>) -> Statement<'_> {
    let counts = select().sql("WHERE count <> 0 AND status < 4");
    match queues {
        Some(queues) => counts.sql(" AND queue IN ").list(queues),
        None => counts,
    }
}

/// The first names that begin so, of all queues that ever existed.
pub(super) fn names<'a>(beginning: &'a str, limit: u32) -> Statement<'a> {
    // Names have ASCII characters only, and this one follows all of them.
    let end = format!("{beginning}\u{7f}");
    Statement::new("SELECT DISTINCT queue FROM queue_counts WHERE queue >= ? AND queue < ?")
        .sql(" ORDER BY queue LIMIT ?")
        .bind(beginning)
        .bind(end)
        .bind(limit)
}

/// How many unfinished tasks of each queue wait behind others of their sequences.
pub(super) fn behind<'a, S: Session>() -> Statement<'a> {
    Statement::new(
        "SELECT behind.queue, behind.status, behind.count FROM (SELECT queue FROM queue_counts ",
    )
    .sql(&S::by_index("queue_counts_unfinished"))
    .sql(" WHERE ")
    .sql(S::IS_UNFINISHED)
    .sql(") AS unfinished JOIN queue_counts AS behind ON behind.queue = unfinished.queue")
    .sql(" WHERE behind.status = 4 AND behind.count <> 0")
}

/// The first queues that have unfinished tasks, each with their number. A negative number is wrong.
pub(super) fn queues_from<'a, S: Session>(first: &'a str, limit: usize) -> Statement<'a> {
    let unfinished = unfinished::<S>().sql(" AND queue >= ? ORDER BY queue LIMIT ?");
    unfinished.bind(first).bind(limit as u64)
}

/// The nonzero counts of unfinished tasks, by an index that contains nothing else.
pub(super) fn unfinished<'a, S: Session>() -> Statement<'a> {
    select()
        .sql(&S::by_index("queue_counts_unfinished"))
        .sql(" WHERE ")
        .sql(S::IS_UNFINISHED)
}
