//! Recounts, and a search for unfinished tasks that nobody would publish.

use crate::{
    model::{QueueName, StoredStatus, TaskId},
    store::{
        Result, WrongCount,
        sql::{
            backend::Backend,
            dialect::Dialect,
            queue_counts,
            rows::{queue_name, task_id},
            runner::Runner,
            session::Session,
            statement::Statement,
            tasks::counts::BEHIND,
        },
    },
};

/// The maximum number of rows of `tasks` that one statement of
/// [`crate::store::Operators::stranded`] reads.
const GONE_OVER: u64 = 20_000;

pub(crate) async fn wrong_counts<DB: Backend>(sql: &Runner<DB>) -> Result<Vec<WrongCount>> {
    let mut all = Vec::new();
    for (are_behind, wrong) in [
        (false, select_wrong::<DB::Connection>()),
        (true, select_wrong_behind::<DB::Connection>()),
    ] {
        for (queue, kept, counted) in sql.read("wrong_counts", wrong).await? {
            let queue: String = queue;
            all.push(WrongCount {
                queue: queue_name(&queue)?,
                kept,
                counted,
                are_behind,
            });
        }
    }
    Ok(all)
}

/// Counts the unfinished tasks that wait behind others of their sequences, by queue.
fn counted_behind<'a, S: Session>() -> Statement<'a> {
    Statement::new("SELECT tasks.queue, 0 AS kept, COUNT(*) AS counted FROM outbox ")
        .sql(&S::by_index("outbox_behind"))
        .sql(" CROSS JOIN tasks ON id = task_id WHERE state = 5 AND status = 0")
}

fn select_wrong_behind<'a, S: Session>() -> Statement<'a> {
    Statement::new("SELECT queue, CAST(SUM(kept) AS SIGNED), CAST(SUM(counted) AS SIGNED) FROM (")
        .append(counted_behind::<S>())
        .sql(" GROUP BY tasks.queue UNION ALL SELECT queue, count, 0 FROM (")
        .append(queue_counts::behind::<S>())
        .sql(") AS kept_behind) AS numbers GROUP BY queue HAVING SUM(kept) <> SUM(counted)")
}

/// Counts the unfinished tasks by queue: those on the bus, and those in the outbox. A row of the
/// outbox may outlive its task, hence the join.
fn counted<'a, S: Session>() -> [Statement<'a>; 2] {
    let on_bus =
        Statement::new("SELECT queue, 0 AS kept, COUNT(*) AS counted FROM tasks ").sql(S::ON_BUS);
    let in_outbox = Statement::new("SELECT tasks.queue, 0, COUNT(*) FROM outbox ")
        .sql(S::BY_PRIMARY_KEY)
        .sql(" CROSS JOIN tasks ON id = task_id WHERE task_id > ? AND status = 0 AND on_bus = 0")
        .bind(&TaskId::FIRST);
    [on_bus, in_outbox]
}

fn select_wrong<'a, S: Session>() -> Statement<'a> {
    let [on_bus, in_outbox] = counted::<S>();
    Statement::new("SELECT queue, CAST(SUM(kept) AS SIGNED), CAST(SUM(counted) AS SIGNED) FROM (")
        .append(on_bus)
        .sql(" GROUP BY queue UNION ALL ")
        .append(in_outbox)
        .sql(" GROUP BY tasks.queue UNION ALL SELECT queue, count, 0 FROM queue_counts WHERE status = 0")
        .sql(") AS numbers GROUP BY queue HAVING SUM(kept) <> SUM(counted)")
}

/// Stores the correct counts of a queue. Locks the row of a count first, and creates it if there is
/// none.
///
/// Transactions change counts in their last step. One that has already changed tasks waits for the
/// lock, and then adds to the corrected count.
pub(crate) async fn correct<S: Session>(session: &mut S, queue: &QueueName) -> Result<()> {
    lock_count(session, queue, StoredStatus::Unfinished as i64).await?;
    let [on_bus, in_outbox] = counted::<S>();
    let count = Statement::new("SELECT CAST(SUM(counted) AS SIGNED) FROM (")
        .append(
            on_bus
                .sql(" AND queue = ? GROUP BY queue UNION ALL ")
                .bind(queue),
        )
        .append(
            in_outbox
                .sql(" AND tasks.queue = ? GROUP BY tasks.queue) AS numbers")
                .bind(queue),
        );
    let count: Vec<(Option<i64>,)> = session.fetch(count).await?;
    let right = count.first().and_then(|(count,)| *count).unwrap_or(0);
    let write = Statement::new("UPDATE queue_counts SET count = ? WHERE status = 0 AND queue = ?");
    session.execute(write.bind(right).bind(queue)).await?;
    lock_count(session, queue, BEHIND).await?;
    let count = counted_behind::<S>().sql(" AND tasks.queue = ? GROUP BY tasks.queue");
    let count: Vec<(String, i64, i64)> = session.fetch(count.bind(queue)).await?;
    let right = count.first().map_or(0, |(.., count)| *count);
    let write = Statement::new("UPDATE queue_counts SET count = ? WHERE status = ? AND queue = ?");
    session
        .execute(write.bind(right).bind(BEHIND).bind(queue))
        .await?;
    Ok(())
}

async fn lock_count<S: Session>(session: &mut S, queue: &QueueName, status: i64) -> Result<()> {
    let lock = Statement::new("INSERT INTO queue_counts (queue, status, count)")
        .values([[queue.into(), status.into(), 0_i64.into()]].into_iter())
        .sql(&S::add("queue, status", "count"));
    session.execute(lock).await?;
    Ok(())
}

pub(crate) async fn stranded<DB: Backend>(
    sql: &Runner<DB>,
    after: Option<TaskId>,
) -> Result<(Vec<(QueueName, TaskId)>, Option<TaskId>)> {
    const NAME: &str = "stranded";
    let after = after.unwrap_or(TaskId::FIRST);
    let last = Statement::new("SELECT id FROM tasks ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE id > ? ORDER BY id LIMIT 1 OFFSET ?")
        .bind(&after)
        .bind(GONE_OVER - 1);
    let next = sql.ids(NAME, last).await?.first().copied();
    let upto = next.unwrap_or(TaskId::LAST);
    let found = Statement::new("SELECT queue, id FROM tasks ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE id > ? AND id <= ? AND status = 0 AND on_bus = 0")
        // MariaDB would turn NOT EXISTS into a join that reads the whole outbox.
        .sql(" AND (SELECT task_id FROM outbox ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE task_id = id) IS NULL")
        .bind(&after)
        .bind(&upto);
    let found: Vec<(String, Vec<u8>)> = sql.read(NAME, found).await?;
    let read = |(queue, id): (String, Vec<u8>)| Ok((queue_name(&queue)?, task_id(&id)?));
    Ok((found.into_iter().map(read).collect::<Result<_>>()?, next))
}
