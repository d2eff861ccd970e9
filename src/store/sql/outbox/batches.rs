//! Batches: the fresh tasks of one insert, which are published together.
//!
//! One row says whether the batch is published, and where. This applies to a task as long as its
//! `on_bus` is 1 and its `pub_generation` is empty. A task leaves its batch for good when it
//! becomes final, is put into the outbox, or gets an offset of its own.

use std::collections::{BTreeMap, HashMap, HashSet};

use uuid::Uuid;

use crate::{
    model::{Offset, TaskId},
    store::{
        NewRow, Published, Result, Turn,
        sql::{
            backend::Backend,
            dialect::Dialect,
            rows::{corrupt, number, task_id},
            runner::Runner,
            session::{Columns, Session},
            statement::{Statement, lists, pieces},
        },
    },
};

/// The due time of a published batch, and of a parked row, which waits until its queue has room.
pub(crate) const NEVER: i64 = i64::MAX;

/// The maximum number of batches per statement.
const AT_ONCE: usize = 64;

/// For each partition, the last offset at which tasks of a batch were published.
pub(crate) type Places = BTreeMap<u32, Offset>;

/// Creates the number of a batch from 62 random bits, so that no other batch has it.
pub(crate) fn new_batch() -> Turn {
    let (_, random) = Uuid::new_v4().as_u64_pair();
    Turn(i64::MIN | (random >> 2).cast_signed())
}

/// Adds a batch with these rows. Does nothing if there are no rows.
pub(crate) async fn add<S: Session>(session: &mut S, batch: Turn, rows: &[&NewRow]) -> Result<()> {
    let ids = || rows.iter().map(|row| &row.task.id);
    let (Some(first), Some(last)) = (ids().min(), ids().max()) else {
        return Ok(());
    };
    let due_ms = rows.iter().map(|row| row.due_unix_ms).max().unwrap_or(0);
    let values = [
        batch.into(),
        first.into(),
        last.into(),
        (rows.len() as u64).into(),
        due_ms.into(),
    ];
    let add = Statement::new("INSERT INTO batches (batch, first_id, last_id, tasks, due_ms)");
    session.execute(add.values([values].into_iter())).await?;
    Ok(())
}

/// The published part of a batch.
#[derive(Default)]
struct Part {
    tasks: HashSet<TaskId>,
    places: Places,
}

/// Marks those batches that were published as a whole, and returns them.
pub(crate) async fn mark<S: Session>(
    session: &mut S,
    generation: &str,
    published: &[Published],
) -> Result<HashSet<Turn>> {
    let mut parts: BTreeMap<Turn, Part> = BTreeMap::new();
    for Published {
        partition,
        offset,
        tasks,
    } in published
    {
        for (id, turn) in tasks.iter().filter(|(_, turn)| turn.is_batch()) {
            let part = parts.entry(*turn).or_default();
            part.tasks.insert(*id);
            let last = part.places.entry(*partition).or_insert(*offset);
            *last = (*last).max(*offset);
        }
    }
    let mut whole = HashSet::new();
    for (batch, Part { tasks, places }) in parts {
        let text = places_text(&places);
        let mark =
            Statement::new("UPDATE batches SET generation = ?, places = ?, due_ms = ? WHERE batch = ? AND tasks = ?")
                .bind(generation.to_owned())
                .bind(text.clone())
                .bind(NEVER)
                .bind(batch)
                .bind(tasks.len() as u64)
                // Or already marked like this, by an attempt whose response was lost.
                .sql(" AND (generation = '' OR (generation = ? AND places = ?))")
                .bind(generation.to_owned())
                .bind(text);
        if session.execute(mark).await? > 0 {
            whole.insert(batch);
        }
    }
    Ok(whole)
}

fn places_text(places: &Places) -> String {
    let places: BTreeMap<u32, (u64, u64)> = places
        .iter()
        .map(|(partition, at)| (*partition, (at.major, at.minor)))
        .collect();
    serde_json::to_string(&places).expect("numbers are always JSON")
}

pub(crate) fn places(text: &str) -> Result<Places> {
    let places: BTreeMap<u32, (u64, u64)> =
        serde_json::from_str(text).map_err(|e| corrupt(format!("places of a batch: {e}")))?;
    Ok(places
        .into_iter()
        .map(|(partition, (major, minor))| (partition, Offset { major, minor }))
        .collect())
}

/// The offsets of those batches that were published in this generation of the topic.
pub(crate) async fn places_of<DB: Backend>(
    sql: &Runner<DB>,
    operation: &'static str,
    generation: &str,
    batches: &[Turn],
) -> Result<HashMap<Turn, Places>> {
    let mut found = HashMap::new();
    for batches in lists(batches) {
        let statement = Statement::new("SELECT batch, places FROM batches ")
            .sql(DB::Connection::BY_PRIMARY_KEY)
            .sql(" WHERE generation = ?")
            .bind(generation.to_owned())
            .sql(" AND batch IN ")
            .list(batches);
        for (batch, text) in sql.read::<(i64, String)>(operation, statement).await? {
            found.insert(Turn(batch), places(&text)?);
        }
    }
    Ok(found)
}

/// A batch, without its tasks.
pub(crate) struct Batch {
    pub(crate) number: Turn,
    pub(crate) due_ms: i64,
    /// How many tasks it had initially.
    pub(crate) tasks: u64,
    first: TaskId,
    last: TaskId,
}

type BatchColumns = (i64, i64, i64, Vec<u8>, Vec<u8>);

impl Batch {
    fn read((number_, due_ms, tasks, first, last): BatchColumns) -> Result<Self> {
        let (first, last) = (task_id(&first)?, task_id(&last)?);
        Ok(Self {
            number: Turn(number_),
            due_ms,
            tasks: number(tasks)?,
            first,
            last,
        })
    }
}

/// The first unpublished batches that are due in this range of times, enough for `tasks` tasks.
pub(crate) async fn unpublished<DB: Backend>(
    sql: &Runner<DB>,
    operation: &'static str,
    due_ms: std::ops::RangeInclusive<i64>,
    tasks: usize,
) -> Result<Vec<Batch>> {
    let statement = Statement::new("SELECT batch, due_ms, tasks, first_id, last_id FROM batches ")
        .sql(&DB::Connection::by_index("batches_due"))
        // SQLite only uses a partial index for a condition that repeats the one of the index.
        .sql(" WHERE generation = '' AND due_ms >= ? AND due_ms <= ? ORDER BY due_ms LIMIT ?")
        .bind(*due_ms.start())
        .bind((*due_ms.end()).min(NEVER - 1))
        .bind(tasks as u64);
    let (mut batches, mut so_far) = (Vec::new(), 0);
    for columns in sql.read::<BatchColumns>(operation, statement).await? {
        if so_far >= tasks as u64 {
            break;
        }
        let batch = Batch::read(columns)?;
        so_far += batch.tasks;
        batches.push(batch);
    }
    Ok(batches)
}

/// Reads `columns` of all tasks that wait in these batches, in any order.
pub(crate) async fn waiting_in<DB: Backend, T: Columns>(
    sql: &Runner<DB>,
    operation: &'static str,
    columns: &str,
    batches: &[Batch],
) -> Result<Vec<T>> {
    look_into(sql, operation, &waiting::<DB>(columns), batches).await
}

/// The number of tasks that wait in these batches, by queue. A queue may be returned several times.
pub(crate) async fn waiting_by_queue<DB: Backend>(
    sql: &Runner<DB>,
    operation: &'static str,
    batches: &[Batch],
) -> Result<Vec<(String, i64)>> {
    let waiting = waiting::<DB>("queue, COUNT(*) AS waiting");
    let select = format!("SELECT * FROM ({waiting} GROUP BY queue) AS of_batch");
    look_into(sql, operation, &select, batches).await
}

/// Those of these batches that have a task on the bus.
///
/// This includes tasks with an offset of their own, because the offset of the batch may be higher,
/// and the offset of a task must not decrease.
pub(crate) async fn needed<DB: Backend>(
    sql: &Runner<DB>,
    operation: &'static str,
    batches: &[Batch],
) -> Result<HashSet<Turn>> {
    let first = format!(
        "SELECT * FROM ({} LIMIT 1) AS first_task",
        of_batch::<DB>("insertion")
    );
    let needed: Vec<(i64,)> = look_into(sql, operation, &first, batches).await?;
    Ok(needed.into_iter().map(|(batch,)| Turn(batch)).collect())
}

/// Selects the tasks that wait in one batch.
fn waiting<DB: Backend>(columns: &str) -> String {
    format!("{} AND pub_generation = ''", of_batch::<DB>(columns))
}

/// Selects the tasks of one batch that are not in the outbox.
fn of_batch<DB: Backend>(columns: &str) -> String {
    let index = DB::Connection::BY_IDS_ON_BUS;
    format!(
        "SELECT {columns} FROM tasks {index} WHERE on_bus = 1 AND id >= ? AND id <= ? AND insertion = ?"
    )
}

/// Runs `select` for each batch, with several batches in one statement.
async fn look_into<DB: Backend, T: Columns>(
    sql: &Runner<DB>,
    operation: &'static str,
    select: &str,
    batches: &[Batch],
) -> Result<Vec<T>> {
    let mut found = Vec::new();
    for some in batches.chunks(AT_ONCE) {
        for some in pieces(some, |_| 0) {
            let ranges = some.iter().map(|batch| {
                [
                    (&batch.first).into(),
                    (&batch.last).into(),
                    batch.number.into(),
                ]
            });
            let statement = Statement::new("").rows(select, " UNION ALL ", ranges);
            found.extend(sql.read::<T>(operation, statement).await?);
        }
    }
    Ok(found)
}

/// Makes unpublished batches due.
pub(crate) async fn bring_forward<S: Session>(
    session: &mut S,
    batches: &[Turn],
    to_ms: i64,
) -> Result<()> {
    for batches in lists(batches) {
        let statement =
            Statement::new("UPDATE batches SET due_ms = ? WHERE generation = '' AND batch IN ")
                .bind(to_ms);
        session.execute(statement.list(batches)).await?;
    }
    Ok(())
}

/// Removes batches that no task needs. None ever will, because tasks only leave a batch.
pub(crate) async fn remove<S: Session>(session: &mut S, batches: &[Turn]) -> Result<()> {
    for batches in lists(batches) {
        session
            .execute(Statement::new("DELETE FROM batches WHERE batch IN ").list(batches))
            .await?;
    }
    Ok(())
}

/// The first published batches after `after`.
pub(crate) async fn published<DB: Backend>(
    sql: &Runner<DB>,
    operation: &'static str,
    after: Option<Turn>,
    limit: u32,
) -> Result<Vec<Batch>> {
    let statement = Statement::new("SELECT batch, due_ms, tasks, first_id, last_id FROM batches ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE batch > ? AND generation <> '' ORDER BY batch LIMIT ?")
        .bind(after.unwrap_or(Turn(i64::MIN)))
        .bind(limit);
    sql.read::<BatchColumns>(operation, statement)
        .await?
        .into_iter()
        .map(Batch::read)
        .collect()
}
