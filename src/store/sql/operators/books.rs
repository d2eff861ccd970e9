//! The counts of the books.

use std::collections::BTreeMap;

use crate::{
    model::{QueueName, TaskId},
    store::{
        OffBusCounts, Result, TurnedAway, TurnedAwayCounts, Unpublished,
        sql::{
            backend::Backend,
            dialect::Dialect,
            outbox::{batches, entries},
            queue_counts::{self, CountColumns},
            rows::{corrupt, number, queue_name},
            runner::Runner,
            session::Session,
            statement::{Statement, lists, pieces},
        },
    },
};

/// How many tasks of unpublished batches [`crate::store::Operators::off_bus`] counts at most. A
/// batch is about to be published, so an exact number would soon be out of date.
const FRESH_COUNTED: usize = 100_000;

/// The maximum number of outbox rows that one statement counts.
const COUNTED_AT_ONCE: u64 = 100_000;

pub(crate) async fn off_bus<DB: Backend>(sql: &Runner<DB>) -> Result<OffBusCounts> {
    let mut counts = OffBusCounts::new();
    count_fresh(sql, &mut counts).await?;
    count_outbox(sql, &mut counts).await?;
    Ok(counts)
}

/// Adds the counts, sorted by queue, because every transaction locks the rows in this order.
pub(crate) async fn add<S: Session>(session: &mut S, counts: &TurnedAwayCounts) -> Result<()> {
    let counts: Vec<_> = counts.iter().collect();
    for piece in pieces(&counts, |_| 0) {
        let rows = piece.iter().map(|((queue, why), count)| {
            [
                queue.as_ref().map_or("", QueueName::as_str).into(),
                (*why as u32).into(),
                (**count).into(),
            ]
        });
        let add = Statement::new("INSERT INTO turned_away (queue, kind, count)").values(rows);
        session
            .execute(add.sql(&S::add("queue, kind", "count")))
            .await?;
    }
    Ok(())
}

pub(crate) async fn turned_away<DB: Backend>(
    sql: &Runner<DB>,
    queues: &[QueueName],
) -> Result<TurnedAwayCounts> {
    let (mut names, mut counts) = (vec![""], TurnedAwayCounts::new());
    names.extend(queues.iter().map(QueueName::as_str));
    for names in lists(&names) {
        let found = Statement::new("SELECT queue, kind, count FROM turned_away ")
            .sql(DB::Connection::BY_PRIMARY_KEY)
            .sql(" WHERE queue IN ")
            .list(names);
        for (queue, kind, count) in sql.read::<(String, i64, i64)>("turned_away", found).await? {
            let why = TurnedAway::ALL.into_iter().find(|why| *why as i64 == kind);
            let why = why.ok_or_else(|| corrupt(format!("turned away by the reason {kind}")))?;
            let queue = if queue.is_empty() {
                None
            } else {
                Some(queue_name(&queue)?)
            };
            counts.insert((queue, why), number(count)?);
        }
    }
    Ok(counts)
}

/// Counts the tasks of the first unpublished batches.
async fn count_fresh<DB: Backend>(sql: &Runner<DB>, counts: &mut OffBusCounts) -> Result<()> {
    const NAME: &str = "off_bus";
    let due = batches::unpublished(sql, NAME, i64::MIN..=i64::MAX, FRESH_COUNTED).await?;
    for (queue, count) in batches::waiting_by_queue(sql, NAME, &due).await? {
        *counts
            .entry((queue_name(&queue)?, Unpublished::Fresh))
            .or_default() += number::<u64>(count)?;
    }
    Ok(())
}

/// Counts the outbox piece by piece, in the order of its primary key.
async fn count_outbox<DB: Backend>(sql: &Runner<DB>, counts: &mut OffBusCounts) -> Result<()> {
    let mut after = TaskId::FIRST;
    loop {
        let last = last_of_piece(sql, after).await?;
        for ((queue, state), count) in count_piece(sql, after, last).await? {
            *counts.entry((queue, state)).or_default() += count;
        }
        let Some(last) = last else { break };
        after = last;
    }
    // Some of the rows may be those of dead tasks that hold up their sequences.
    let waiting = counts.len();
    counts.retain(|(_, state), _| *state != Unpublished::Behind);
    if counts.len() == waiting {
        return Ok(());
    }
    let behind = queue_counts::behind::<DB::Connection>();
    for (queue, _, count) in sql.read::<CountColumns>("off_bus", behind).await? {
        let count = number(count.max(0))?;
        counts.insert((queue_name(&queue)?, Unpublished::Behind), count);
    }
    Ok(())
}

/// The last row of the piece after `after`, or `None` if the rest fits into one piece.
async fn last_of_piece<DB: Backend>(sql: &Runner<DB>, after: TaskId) -> Result<Option<TaskId>> {
    let last = Statement::new("SELECT task_id FROM outbox ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE task_id > ? ORDER BY task_id LIMIT 1 OFFSET ?")
        .bind(&after)
        .bind(COUNTED_AT_ONCE - 1);
    Ok(sql.ids("off_bus", last).await?.first().copied())
}

async fn count_piece<DB: Backend>(
    sql: &Runner<DB>,
    after: TaskId,
    last: Option<TaskId>,
) -> Result<OffBusCounts> {
    let last = last.unwrap_or(TaskId::LAST);
    let count = Statement::new("SELECT queue, state, COUNT(*) FROM outbox ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE task_id > ? AND task_id <= ? GROUP BY queue, state")
        .bind(&after)
        .bind(&last);
    let mut counts = BTreeMap::new();
    for (queue, state, count) in sql.read::<(String, i64, i64)>("off_bus", count).await? {
        counts.insert(
            (queue_name(&queue)?, entries::unpublished(state)?),
            number(count)?,
        );
    }
    Ok(counts)
}
