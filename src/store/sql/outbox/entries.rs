//! The outbox: tasks that are to be published and are not in a batch, and the offsets of published
//! tasks.

use std::collections::{HashMap, HashSet};

use uuid::Uuid;

use crate::{
    model::{
        LimitHash, Priority, QueueName, SequenceHash, StoredStatus, TaskId, TaskRow, limit_hash,
    },
    store::{
        DUE_LOOKED_AT, Error, NewRow, OutboxRow, Published, Result, Turn, Unpublished,
        sql::{
            outbox::batches::{self, Batch, NEVER},
            rows::{TASK_COLUMNS, TaskColumns, columns, corrupt, number, queue_name, task_id},
            session::Session,
            statement::{Statement, Value, lists, pieces},
        },
    },
};

/// A row of table `outbox`.
pub(crate) struct Entry {
    task: TaskId,
    state: Unpublished,
    queue: QueueName,
    priority: Priority,
    due_ms: i64,
    turn: Turn,
    bytes: usize,
    /// Of a crowded task.
    limit: Option<LimitHash>,
    /// Of a task behind others: its sequence, and its place there.
    sequence: Option<(SequenceHash, i64)>,
}

impl Entry {
    pub(crate) fn turn(&self) -> Turn {
        self.turn
    }

    pub(crate) fn of_new(row: &NewRow) -> Self {
        let due_ms = match row.unpublished {
            Unpublished::Parked | Unpublished::Crowded | Unpublished::Behind => NEVER,
            _ => row.due_unix_ms,
        };
        let NewRow {
            task,
            unpublished: state,
            ..
        } = row;
        let (queue, priority) = (task.queue.clone(), task.priority);
        Self {
            task: task.id,
            state: *state,
            queue,
            priority,
            due_ms,
            turn: Turn::FIRST,
            bytes: task.weight(),
            limit: limit_of(*state, &task.queue, &task.limit_key),
            sequence: None,
        }
    }

    /// A task that waits behind others of its sequence.
    pub(crate) fn behind(
        task: TaskId,
        queue: QueueName,
        priority: Priority,
        bytes: usize,
        sequence: SequenceHash,
        place: i64,
    ) -> Self {
        Self {
            task,
            state: Unpublished::Behind,
            queue,
            priority,
            due_ms: NEVER,
            turn: Turn::FIRST,
            bytes,
            limit: None,
            sequence: Some((sequence, place)),
        }
    }

    /// A task whose turn in its sequence has come.
    pub(crate) fn released(
        task: TaskId,
        queue: QueueName,
        priority: Priority,
        bytes: usize,
        state: Unpublished,
        due_ms: i64,
        turn: Turn,
    ) -> Self {
        Self {
            task,
            state,
            queue,
            priority,
            due_ms,
            turn,
            bytes,
            limit: None,
            sequence: None,
        }
    }

    pub(crate) fn task(&self) -> TaskId {
        self.task
    }
}

/// The limit key for which a task waits in SQL.
fn limit_of(state: Unpublished, queue: &QueueName, limit_key: &str) -> Option<LimitHash> {
    (state == Unpublished::Crowded).then(|| limit_hash(queue, limit_key))
}

/// Adds the entries, or updates existing ones.
pub(crate) async fn put<S: Session>(session: &mut S, entries: &[Entry]) -> Result<()> {
    // Most rows have no limit key, and pay nothing for it.
    let any_crowded = entries.iter().any(|entry| entry.limit.is_some());
    // And most are in no sequence.
    let any_behind = entries.iter().any(|entry| entry.sequence.is_some());
    for piece in pieces(entries, |_| 0) {
        let rows = piece.iter().map(|entry| {
            let Entry {
                task,
                state,
                queue,
                priority,
                due_ms,
                turn,
                bytes,
                limit,
                sequence,
            } = entry;
            let bytes = *bytes as u64;
            let mut values: Vec<Value<'_>> = vec![
                task.into(),
                (*state).into(),
                queue.into(),
                (*priority).into(),
                (*due_ms).into(),
                turn.into(),
                bytes.into(),
            ];
            if any_crowded {
                values.push(limit.as_ref().map_or(&[][..], |limit| &limit[..]).into());
            }
            if any_behind {
                let hash = sequence.as_ref().map_or(&[][..], |(hash, _)| &hash[..]);
                values.push(hash.into());
                values.push(sequence.map_or(0, |(_, place)| place).into());
            }
            values
        });
        let mut columns = "task_id, state, queue, priority, due_ms, turn, bytes".to_owned();
        let mut replaced = vec!["state", "due_ms", "turn"];
        if any_crowded {
            columns += ", limit_hash";
            replaced.push("limit_hash");
        }
        if any_behind {
            columns += ", sequence_hash, place";
            replaced.extend(["sequence_hash", "place"]);
        }
        let count = columns.split(',').count();
        let statement = Statement::new(format!("INSERT INTO outbox ({columns})"))
            .values_of(count, rows)
            .sql(&S::replace("task_id", &replaced));
        session.execute(statement).await?;
    }
    Ok(())
}

/// Removes the rows of these tasks.
pub(crate) async fn remove<S: Session>(session: &mut S, ids: &[TaskId]) -> Result<()> {
    for ids in lists(ids) {
        session
            .execute(Statement::new("DELETE FROM outbox WHERE task_id IN ").list(ids))
            .await?;
    }
    Ok(())
}

/// Removes the rows of these tasks that have ended. A dead one that waited, and holds those after it
/// in its sequence, keeps its row.
pub(crate) async fn remove_ended<S: Session>(session: &mut S, ids: &[TaskId]) -> Result<()> {
    for ids in lists(ids) {
        let remove = Statement::new("DELETE FROM outbox WHERE state <> 5 AND task_id IN ");
        session.execute(remove.list(ids)).await?;
    }
    Ok(())
}

/// Stores the offsets of batches and of single tasks, and removes the outbox rows of the latter.
pub(crate) async fn mark_published<S: Session>(
    session: &mut S,
    generation: &str,
    published: &[Published],
) -> Result<()> {
    let whole = batches::mark(session, generation, published).await?;
    lock(session, published, &whole).await?;
    for published in published {
        mark_tasks(session, generation, published, &whole).await?;
    }
    Ok(())
}

/// Locks the tasks that are marked one by one, sorted by id over all offsets, because a task may
/// occur at several offsets.
async fn lock<S: Session>(
    session: &mut S,
    published: &[Published],
    whole: &HashSet<Turn>,
) -> Result<()> {
    if S::FOR_UPDATE.is_empty() || published.len() < 2 {
        return Ok(());
    }
    let tasks = published.iter().flat_map(|published| &published.tasks);
    let mut ids: Vec<TaskId> = tasks
        .filter(|(_, turn)| !whole.contains(turn))
        .map(|(id, _)| *id)
        .collect();
    ids.sort_unstable();
    ids.dedup();
    for ids in lists(&ids) {
        let lock = Statement::new("SELECT id FROM tasks ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids);
        session
            .ids(lock.sql(" ORDER BY id").sql(S::FOR_UPDATE))
            .await?;
    }
    Ok(())
}

/// Marks each task individually, except those of batches that were marked as a whole.
async fn mark_tasks<S: Session>(
    session: &mut S,
    generation: &str,
    published: &Published,
    whole: &HashSet<Turn>,
) -> Result<()> {
    let tasks = published
        .tasks
        .iter()
        .filter(|(_, turn)| !whole.contains(turn));
    let mut tasks: Vec<(TaskId, Turn)> = tasks.copied().collect();
    tasks.sort_unstable();
    for tasks in lists(&tasks) {
        let (ids, turns) = apart(tasks);
        let moved = move_forward(session, generation, published, &ids).await?;
        // A task that was not moved is final, or is already marked with a later offset, because a
        // batch and its retry may overtake each other.
        if moved < ids.len() as u64 {
            let stay = Statement::new("UPDATE tasks SET on_bus = 1 WHERE status = 0 AND id IN ")
                .list(&ids);
            session.execute(stay).await?;
        }
        if remove_turns(session, &ids, &turns).await? < ids.len() as u64 {
            let came_back =
                Statement::new("UPDATE tasks SET on_bus = 0 WHERE on_bus = 1 AND id IN ")
                    .list(&ids)
                    .sql(" AND EXISTS (SELECT 1 FROM outbox WHERE task_id = id)");
            session.execute(came_back).await?;
        }
    }
    Ok(())
}

/// Splits sorted pairs into two lists without repetitions.
fn apart(pairs: &[(TaskId, Turn)]) -> (Vec<TaskId>, Vec<Turn>) {
    let (mut ids, mut turns): (Vec<TaskId>, Vec<Turn>) = pairs.iter().copied().unzip();
    ids.dedup();
    turns.sort_unstable();
    turns.dedup();
    (ids, turns)
}

/// Removes the rows of these tasks that still have one of these turns. Turns are random, so a row
/// that has come back in the meantime cannot have the turn of another row. A task that waits behind
/// others of its sequence is not on the bus, whoever marks it.
async fn remove_turns<S: Session>(session: &mut S, ids: &[TaskId], turns: &[Turn]) -> Result<u64> {
    let remove = Statement::new("DELETE FROM outbox WHERE task_id IN ")
        .list(ids)
        .sql(" AND state <> 5 AND turn IN ")
        .list(turns);
    session.execute(remove).await
}

/// Removes rows that have no unfinished task, unless they have come back since.
pub(crate) async fn remove_over<S: Session>(
    session: &mut S,
    over: &[(TaskId, Turn)],
) -> Result<()> {
    let mut over = over.to_vec();
    over.sort_unstable();
    for over in lists(&over) {
        let (ids, turns) = apart(over);
        remove_turns(session, &ids, &turns).await?;
    }
    Ok(())
}

/// Moves the tasks to `offset`. Returns how many of them are neither final nor already beyond it.
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
    session.execute(statement).await
}

/// Those of these tasks that wait behind others of their sequences.
pub(crate) async fn behind_among<S: Session>(
    session: &mut S,
    ids: &[TaskId],
) -> Result<HashSet<TaskId>> {
    let mut behind = HashSet::new();
    for ids in lists(ids) {
        let found = Statement::new("SELECT task_id FROM outbox ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE state = 5 AND task_id IN ")
            .list(ids);
        behind.extend(session.ids(found).await?);
    }
    Ok(behind)
}

/// Those of these stored tasks that nobody may publish now: they wait behind others of their
/// sequences, have ended, or are gone.
pub(crate) async fn not_to_publish<S: Session>(
    session: &mut S,
    ids: &[TaskId],
) -> Result<HashSet<TaskId>> {
    let mut not: HashSet<TaskId> = ids.iter().copied().collect();
    for ids in lists(ids) {
        let may_go = Statement::new("SELECT id FROM tasks ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE status = 0 AND (SELECT COUNT(*) FROM outbox WHERE task_id = id AND state = 5) = 0")
            .sql(" AND id IN ")
            .list(ids);
        for id in session.ids(may_go).await? {
            not.remove(&id);
        }
    }
    Ok(not)
}

/// The entries of tasks that wait behind others of their sequences again, at their old places.
pub(crate) async fn behind_again<S: Session>(
    session: &mut S,
    again: &[(TaskId, SequenceHash, i64)],
) -> Result<Vec<Entry>> {
    let mut entries = Vec::with_capacity(again.len());
    let mut places: HashMap<TaskId, (SequenceHash, i64)> = again
        .iter()
        .map(|(id, hash, place)| (*id, (*hash, *place)))
        .collect();
    let mut ids: Vec<TaskId> = places.keys().copied().collect();
    ids.sort_unstable();
    for ids in lists(&ids) {
        let tasks = Statement::new(
            "SELECT id, queue, priority, LENGTH(task_key) + LENGTH(headers) + LENGTH(payload) FROM tasks ",
        )
        .sql(S::BY_PRIMARY_KEY)
        .sql(" WHERE id IN ")
        .list(ids);
        for (id, queue, priority, bytes) in
            session.fetch::<(Vec<u8>, String, i64, i64)>(tasks).await?
        {
            let id = task_id(&id)?;
            let Some((hash, place)) = places.remove(&id) else {
                continue;
            };
            let mut entry = Entry::behind(
                id,
                queue_name(&queue)?,
                Priority::from_number(priority),
                number(bytes)?,
                hash,
                place,
            );
            // Its first record may be on the bus still.
            entry.turn = new_turn();
            entries.push(entry);
        }
    }
    Ok(entries)
}

/// Puts the unfinished ones of `ids` into the outbox, with a new turn. Fresh and missing ones
/// become due at `due_ms`. Those that wait behind others of their sequences go on waiting.
pub(crate) async fn unpublish<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    why: Unpublished,
    due_ms: i64,
) -> Result<()> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    for ids in lists(&ids) {
        let unfinished = Statement::new(
            "SELECT id, queue, priority, not_before_ms, LENGTH(task_key) + LENGTH(headers) + LENGTH(payload), \
             COALESCE(limit_key, ''), COALESCE(sequence, '')",
        )
        .sql(" FROM tasks ")
        .sql(S::BY_PRIMARY_KEY)
        .sql(" WHERE status = 0 AND id IN ")
        .list(ids)
        .sql(" ORDER BY id")
        .sql(S::FOR_UPDATE);
        type Columns = (Vec<u8>, String, i64, i64, i64, String, String);
        let mut unfinished: Vec<Columns> = session.fetch(unfinished).await?;
        let mut in_sequences = Vec::new();
        for (id, .., sequence) in &unfinished {
            if !sequence.is_empty() {
                in_sequences.push(task_id(id)?);
            }
        }
        // A late record of a task that was sent again must not let it overtake the others.
        let behind = behind_among(session, &in_sequences).await?;
        unfinished.retain(|(id, ..)| task_id(id).map_or(true, |id| !behind.contains(&id)));
        let entries = unfinished.into_iter().map(
            |(id, queue, priority, not_before_ms, bytes, limit_key, _)| {
                let due_ms = match why {
                    Unpublished::Parked | Unpublished::Crowded | Unpublished::Behind => NEVER,
                    Unpublished::Scheduled => not_before_ms,
                    Unpublished::Fresh | Unpublished::Missing => due_ms,
                };
                let (queue, priority) = (queue_name(&queue)?, Priority::from_number(priority));
                let limit = limit_of(why, &queue, &limit_key);
                Ok(Entry {
                    task: task_id(&id)?,
                    state: why,
                    queue,
                    priority,
                    due_ms,
                    turn: new_turn(),
                    bytes: number(bytes)?,
                    limit,
                    sequence: None,
                })
            },
        );
        let entries = entries.collect::<Result<Vec<_>>>()?;
        put(session, &entries).await?;
        let off_bus =
            Statement::new("UPDATE tasks SET on_bus = 0 WHERE on_bus = 1 AND id IN ").list(ids);
        session.execute(off_bus).await?;
    }
    Ok(())
}

/// Creates a turn from 62 random bits, so that no other row and no other stay has it.
pub(crate) fn new_turn() -> Turn {
    let (_, random) = Uuid::new_v4().as_u64_pair();
    Turn((random & (u64::MAX >> 2)).cast_signed())
}

/// A row of a page whose task has not been read yet.
pub(crate) struct Listed {
    pub(crate) task: TaskId,
    pub(crate) turn: Turn,
    pub(crate) bytes: usize,
    pub(crate) due_ms: i64,
    unpublished: Unpublished,
}

impl Listed {
    /// A task of a batch.
    pub(crate) fn of_batch(batch: &Batch, task: TaskId, bytes: usize) -> Self {
        Self {
            task,
            turn: batch.number,
            bytes,
            due_ms: batch.due_ms,
            unpublished: Unpublished::Fresh,
        }
    }

    pub(crate) fn with(&self, (task, is_as_new): (TaskRow, bool)) -> OutboxRow {
        OutboxRow {
            task,
            is_as_new,
            unpublished: self.unpublished,
            turn: self.turn,
        }
    }
}

/// The columns of [`Listed`].
pub(crate) type ListedColumns = (Vec<u8>, i64, i64, i64, i64);

impl TryFrom<ListedColumns> for Listed {
    type Error = Error;

    fn try_from((task, state, turn, bytes, due_ms): ListedColumns) -> Result<Self> {
        let (task, unpublished) = (task_id(&task)?, unpublished(state)?);
        Ok(Self {
            task,
            turn: Turn(turn),
            bytes: number(bytes)?,
            due_ms,
            unpublished,
        })
    }
}

pub(crate) fn unpublished(state: i64) -> Result<Unpublished> {
    let all = [
        Unpublished::Fresh,
        Unpublished::Parked,
        Unpublished::Scheduled,
        Unpublished::Missing,
        Unpublished::Crowded,
        Unpublished::Behind,
    ];
    all.into_iter()
        .find(|known| *known as i64 == state)
        .ok_or_else(|| corrupt(format!("outbox state {state}")))
}

fn page<'a, S: Session>(index: &str) -> Statement<'a> {
    Statement::new("SELECT task_id, state, turn, bytes, due_ms FROM outbox ")
        .sql(&S::by_index(index))
}

/// The first due rows.
pub(crate) fn due<'a, S: Session>(now_ms: i64, limit: usize) -> Statement<'a> {
    page::<S>("outbox_due")
        .sql(" WHERE due_ms <= ? ORDER BY due_ms, task_id LIMIT ?")
        .bind(now_ms.min(NEVER - 1))
        .bind(limit as u64)
}

/// The first parked rows of the queue.
pub(crate) fn parked<S: Session>(queue: &QueueName, limit: usize) -> Statement<'_> {
    page::<S>("outbox_parked")
        .sql(" WHERE state = 1 AND queue = ? ORDER BY priority, task_id LIMIT ?")
        .bind(queue)
        .bind(limit as u64)
}

/// A row that is due later.
pub(crate) struct Later {
    pub(crate) due_unix_ms: i64,
    pub(crate) task: TaskId,
    pub(crate) unpublished: Unpublished,
}

/// The rows after this one, sorted by due time, without parked ones.
pub(crate) fn later<'a, S: Session>(due_ms: i64, task: &'a TaskId, limit: usize) -> Statement<'a> {
    Statement::new("SELECT due_ms, task_id, state FROM outbox ")
        .sql(&S::by_index("outbox_due"))
        .sql(" WHERE due_ms >= ? AND due_ms < ? AND (due_ms > ? OR task_id > ?) ORDER BY due_ms, task_id LIMIT ?")
        .bind(due_ms)
        .bind(NEVER)
        .bind(due_ms)
        .bind(task)
        .bind(limit as u64)
}

pub(crate) fn later_row((due_unix_ms, task, state): (i64, Vec<u8>, i64)) -> Result<Later> {
    Ok(Later {
        due_unix_ms,
        task: task_id(&task)?,
        unpublished: unpublished(state)?,
    })
}

/// Makes those of the rows that are fresh and due later than `later_than_ms` due at `to_ms`.
/// Returns how many.
pub(crate) async fn bring_forward<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    later_than_ms: i64,
    to_ms: i64,
) -> Result<u64> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    let mut changed = 0;
    for ids in lists(&ids) {
        let statement = Statement::new(
            "UPDATE outbox SET due_ms = ? WHERE state = ? AND due_ms > ? AND task_id IN ",
        )
        .bind(to_ms)
        .bind(Unpublished::Fresh)
        .bind(later_than_ms)
        .list(ids);
        changed += session.execute(statement).await?;
    }
    Ok(changed)
}

/// The first parked task of the queue in each priority.
pub(crate) fn oldest_parked<S: Session>(queue: &QueueName) -> Statement<'_> {
    let of_priority = |priority: Priority| {
        Statement::new("SELECT MIN(task_id) FROM outbox ")
            .sql(&S::by_index("outbox_parked"))
            .sql(" WHERE state = 1 AND queue = ? AND priority = ?")
            .bind(queue)
            .bind(priority)
    };
    let [high, medium, low] = Priority::ALL.map(of_priority);
    high.sql(" UNION ALL ")
        .append(medium)
        .sql(" UNION ALL ")
        .append(low)
}

/// The oldest task of each queue among the first due rows, without scheduled ones.
pub(crate) fn oldest_due<'a, S: Session>(now_ms: i64) -> Statement<'a> {
    Statement::new("SELECT queue, MIN(task_id) FROM (SELECT queue, task_id, state FROM outbox ")
        .sql(&S::by_index("outbox_due"))
        .sql(" WHERE due_ms <= ? ORDER BY due_ms, task_id LIMIT ?) AS due WHERE state <> ? GROUP BY queue")
        .bind(now_ms.min(NEVER - 1))
        .bind(DUE_LOOKED_AT)
        .bind(Unpublished::Scheduled)
}

columns! {
    pub(crate) struct UnfinishedColumns {
        #[flatten]
        pub(crate) task: TaskColumns,
        status: i64,
        completed: i64,
        epoch: i64,
    }
}

impl UnfinishedColumns {
    pub(crate) fn is_final(&self) -> bool {
        self.status != StoredStatus::Unfinished as i64
    }

    pub(crate) fn is_as_new(&self) -> bool {
        self.completed == 0 && self.epoch == 0
    }
}

/// Tasks with their state, in any order.
pub(crate) fn tasks(ids: &[TaskId]) -> Statement<'_> {
    Statement::new(format!(
        "SELECT {TASK_COLUMNS}, status, completed, epoch FROM tasks WHERE id IN "
    ))
    .list(ids)
}

/// The first queue after `last` that has parked rows.
pub(crate) fn next_parked_queue<'a, S: Session>(last: Option<&'a QueueName>) -> Statement<'a> {
    Statement::new("SELECT MIN(queue) FROM outbox ")
        .sql(&S::by_index("outbox_parked"))
        .sql(" WHERE state = 1 AND queue > ?")
        .bind(last.map_or("", QueueName::as_str))
}

/// The first queue after `last` that has crowded rows.
pub(crate) fn next_crowded_queue<'a, S: Session>(last: Option<&'a QueueName>) -> Statement<'a> {
    Statement::new("SELECT MIN(queue) FROM outbox ")
        .sql(&S::by_index("outbox_crowded"))
        .sql(" WHERE state = 4 AND queue > ?")
        .bind(last.map_or("", QueueName::as_str))
}

/// The first limit key of the queue after `after` that has crowded rows.
pub(crate) fn next_crowded_key<'a, S: Session>(
    queue: &'a QueueName,
    after: Option<&'a LimitHash>,
) -> Statement<'a> {
    Statement::new("SELECT MIN(limit_hash) FROM outbox ")
        .sql(&S::by_index("outbox_crowded"))
        .sql(" WHERE state = 4 AND queue = ? AND limit_hash > ?")
        .bind(queue)
        .bind(after.map_or(&[][..], |after| &after[..]))
}

/// The first crowded rows of a limit key.
pub(crate) fn crowded<'a, S: Session>(
    queue: &'a QueueName,
    key: &'a LimitHash,
    limit: usize,
) -> Statement<'a> {
    page::<S>("outbox_crowded")
        .sql(" WHERE state = 4 AND queue = ? AND limit_hash = ? ORDER BY priority, task_id LIMIT ?")
        .bind(queue)
        .bind(&key[..])
        .bind(limit as u64)
}

/// How many crowded rows a limit key has, `most` at most.
pub(crate) fn count_crowded<'a, S: Session>(
    queue: &'a QueueName,
    key: &'a LimitHash,
    most: u64,
) -> Statement<'a> {
    Statement::new("SELECT COUNT(*) FROM (SELECT task_id FROM outbox ")
        .sql(&S::by_index("outbox_crowded"))
        .sql(" WHERE state = 4 AND queue = ? AND limit_hash = ? LIMIT ?) AS counted")
        .bind(queue)
        .bind(&key[..])
        .bind(most)
}
