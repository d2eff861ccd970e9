//! What is still to be published, and where the rest was.

use uuid::Uuid;

use super::{
    rows::{TASK_COLUMNS, TaskColumns, corrupt, queue_name, task_id},
    statement::{Session, Statement, lists, pieces},
};
use crate::model::{Priority, QueueName, StoredStatus, TaskId};
use crate::store::{Error, NewRow, OutboxRow, Published, Result, Turn, Unpublished};

/// When a parked row is due: it waits for room, not for a time.
const NEVER: i64 = i64::MAX;

/// A row of the table.
pub(super) struct Entry {
    task: TaskId,
    state: Unpublished,
    queue: QueueName,
    priority: Priority,
    due_ms: i64,
    turn: Turn,
}

impl Entry {
    pub(super) fn of_new(row: &NewRow) -> Self {
        let due_ms = if row.unpublished == Unpublished::Parked { NEVER } else { row.due_unix_ms };
        let NewRow { task, unpublished: state, .. } = row;
        let (queue, priority) = (task.queue.clone(), task.priority);
        Self { task: task.id, state: *state, queue, priority, due_ms, turn: Turn::FIRST }
    }

    pub(super) fn task(&self) -> TaskId {
        self.task
    }
}

/// Adds the entries, or changes those that are there.
pub(super) async fn put<S: Session>(session: &mut S, entries: &[Entry]) -> Result<()> {
    for piece in pieces(entries, |_| 0) {
        let rows = piece.iter().map(|entry| {
            let Entry { task, state, queue, priority, due_ms, turn } = entry;
            [task.into(), (*state).into(), queue.into(), (*priority).into(), (*due_ms).into(), turn.into()]
        });
        let statement = Statement::new("INSERT INTO outbox (task_id, state, queue, priority, due_ms, turn)")
            .values(rows)
            .sql(&S::replace("task_id", &["state", "due_ms", "turn"]));
        session.execute(statement).await?;
    }
    Ok(())
}

pub(super) async fn remove<S: Session>(session: &mut S, ids: &[TaskId]) -> Result<()> {
    for ids in lists(ids) {
        session.execute(Statement::new("DELETE FROM outbox WHERE task_id IN ").list(ids)).await?;
    }
    Ok(())
}

pub(super) async fn mark_published<S: Session>(session: &mut S, generation: &str, published: &Published) -> Result<()> {
    let mut tasks = published.tasks.clone();
    tasks.sort_unstable();
    for tasks in lists(&tasks) {
        let (mut ids, mut turns): (Vec<TaskId>, Vec<Turn>) = tasks.iter().copied().unzip();
        ids.dedup();
        turns.sort_unstable();
        turns.dedup();
        let moved = move_forward(session, generation, published, &ids).await?;
        // What did not move is final, or was marked at a later place: a batch and a retry of it may overtake each other.
        if moved < ids.len() as u64 {
            let stay = Statement::new("UPDATE tasks SET on_bus = 1 WHERE status = 0 AND id IN ").list(&ids);
            session.execute(stay).await?;
        }
        // A turn is random, so that of another row here is never that of a row which came back meanwhile.
        let remove =
            Statement::new("DELETE FROM outbox WHERE task_id IN ").list(&ids).sql(" AND turn IN ").list(&turns);
        if session.execute(remove).await? < ids.len() as u64 {
            let came_back = Statement::new("UPDATE tasks SET on_bus = 0 WHERE on_bus = 1 AND id IN ")
                .list(&ids)
                .sql(" AND EXISTS (SELECT 1 FROM outbox WHERE task_id = id)");
            session.execute(came_back).await?;
        }
    }
    Ok(())
}

/// Answers how many it found that are not final and not yet further.
async fn move_forward<S: Session>(
    session: &mut S,
    generation: &str,
    published: &Published,
    ids: &[TaskId],
) -> Result<u64> {
    let (major, minor) = (published.offset.major, published.offset.minor);
    let statement = Statement::new("UPDATE tasks SET on_bus = 1, pub_generation = ?, pub_major = ?, pub_minor = ?")
        .bind(generation.to_owned())
        .bind(major)
        .bind(minor)
        .sql(" WHERE status = 0 AND (pub_generation <> ? OR pub_major < ? OR (pub_major = ? AND pub_minor <= ?))")
        .bind(generation.to_owned())
        .bind(major)
        .bind(major)
        .bind(minor)
        .sql(" AND id IN ")
        .list(ids);
    Ok(session.execute(statement).await?)
}

/// Puts what is unfinished back.
pub(super) async fn unpublish<S: Session>(session: &mut S, ids: &[TaskId], why: Unpublished) -> Result<()> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    for ids in lists(&ids) {
        let unfinished =
            Statement::new("SELECT id, queue, priority, not_before_ms FROM tasks WHERE status = 0 AND id IN ")
                .list(ids)
                .sql(" ORDER BY id")
                .sql(S::FOR_UPDATE);
        let unfinished: Vec<(Vec<u8>, String, i64, i64)> = session.fetch(unfinished).await?;
        let entries = unfinished.into_iter().map(|(id, queue, priority, not_before_ms)| {
            let due_ms = match why {
                Unpublished::Parked => NEVER,
                Unpublished::Scheduled => not_before_ms,
                Unpublished::Fresh | Unpublished::Missing => 0,
            };
            let (queue, priority) = (queue_name(&queue)?, Priority::from_number(priority));
            Ok(Entry { task: task_id(&id)?, state: why, queue, priority, due_ms, turn: new_turn() })
        });
        let entries = entries.collect::<Result<Vec<_>>>()?;
        put(session, &entries).await?;
        let off_bus = Statement::new("UPDATE tasks SET on_bus = 0 WHERE on_bus = 1 AND id IN ").list(ids);
        session.execute(off_bus).await?;
    }
    Ok(())
}

/// 62 random bits: never that of another row or another time.
fn new_turn() -> Turn {
    let (_, random) = Uuid::new_v4().as_u64_pair();
    Turn((random & (u64::MAX >> 2)).cast_signed())
}

#[derive(sqlx::FromRow)]
pub(super) struct OutboxColumns {
    #[sqlx(flatten)]
    task: TaskColumns,
    status: i64,
    state: i64,
    turn: i64,
}

impl TryFrom<OutboxColumns> for OutboxRow {
    type Error = Error;

    fn try_from(columns: OutboxColumns) -> Result<Self> {
        let (unpublished, turn) = (unpublished(columns.state)?, Turn(columns.turn));
        Ok(Self { task: columns.task.try_into()?, unpublished, turn })
    }
}

fn unpublished(state: i64) -> Result<Unpublished> {
    let all = [Unpublished::Fresh, Unpublished::Parked, Unpublished::Scheduled, Unpublished::Missing];
    all.into_iter().find(|known| *known as i64 == state).ok_or_else(|| corrupt(format!("outbox state {state}")))
}

/// Those of a page whose task is final.
pub(super) fn finals(rows: &[OutboxColumns]) -> Result<Vec<TaskId>> {
    let is_final = |row: &&OutboxColumns| row.status != StoredStatus::Unfinished as i64;
    rows.iter().filter(is_final).map(|row| row.task.id()).collect()
}

/// The page first, its tasks then: so the index of the outbox gives the order.
fn page<'a, S: Session>(index: &str, condition: Statement<'a>, limit: u32, order: &str) -> Statement<'a> {
    Statement::new(format!("SELECT {TASK_COLUMNS}, status, state, turn FROM "))
        .sql("(SELECT task_id, state, due_ms, turn FROM outbox ")
        .sql(&S::by_index(index))
        .append(condition)
        .sql(" LIMIT ?")
        .bind(limit)
        .sql(") AS page JOIN tasks ON id = task_id ORDER BY ")
        .sql(order)
}

pub(super) fn due<'a, S: Session>(now_ms: i64, limit: u32) -> Statement<'a> {
    let condition = Statement::new(" WHERE due_ms <= ? ORDER BY due_ms, task_id").bind(now_ms.min(NEVER - 1));
    page::<S>("outbox_due", condition, limit, "due_ms, id")
}

pub(super) fn parked<S: Session>(queue: &QueueName, limit: u32) -> Statement<'_> {
    let condition = Statement::new(" WHERE state = 1 AND queue = ? ORDER BY priority, task_id").bind(queue);
    page::<S>("outbox_parked", condition, limit, "tasks.priority, id")
}

/// The first queue with parked rows behind `last`.
pub(super) fn next_parked_queue<'a, S: Session>(last: Option<&'a QueueName>) -> Statement<'a> {
    Statement::new("SELECT MIN(queue) FROM outbox ")
        .sql(&S::by_index("outbox_parked"))
        .sql(" WHERE state = 1 AND queue > ?")
        .bind(last.map_or("", QueueName::as_str))
}
