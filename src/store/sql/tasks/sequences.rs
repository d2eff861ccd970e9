//! Sequences: of the unfinished tasks of one, only the first, its *head*, leaves SQL.
//!
//! A row of `sequences` names the head. The other tasks are in the outbox in state `Behind`, each
//! with its place. The transaction that ends the head makes the first of them the next head, or
//! removes the row if there are none. A head that is dead and holds stays the head, until it is
//! sent again or removed. If it dies while it waits, it keeps its place and becomes the head like
//! the others. A task that is sent again while another one is the head waits at its old place.
//!
//! Whoever adds, ends, reopens or removes a task of a sequence locks tasks first, then the rows of
//! their sequences, sorted by hash, and then changes the outbox. So the rows in state `Behind` of a
//! sequence change only under the lock of its row.

use std::collections::{BTreeMap, HashSet};

use super::counts::Counts;
use crate::{
    model::{
        Priority, QueueName, SEQUENCE_HASH_BYTES, SequenceHash, StoredStatus, TaskId,
        sequence_hash as sequence_hash_of,
    },
    store::{
        NewRow, Result, Turn, Unpublished,
        sql::{
            outbox::entries::{self, Entry},
            rows::{corrupt, number, queue_name, task_id},
            session::Session,
            statement::{Statement, Value, lists, pieces},
        },
    },
};

/// For how long the tasks that a settlement releases are left to the caller, which publishes them.
const LEFT_TO_THE_CALLER_MS: i64 = 1000;

/// Places grow with time, so that a task that is sent again finds its old one even if its sequence
/// was gone meanwhile.
const PLACES_PER_MS: i64 = 1000;

/// What a task has to do with its sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    hash: SequenceHash,
    /// If it dies, the tasks after it wait.
    holds: bool,
    /// Its place when it last ended without being completed; 0: before all that wait.
    place: i64,
}

impl Member {
    /// `None` if the task is in no sequence.
    pub(crate) fn of(queue: &QueueName, name: &str, holds: i64, place: i64) -> Option<Self> {
        (!name.is_empty()).then(|| Self {
            hash: sequence_hash_of(queue, name),
            holds: holds != 0,
            place,
        })
    }

    /// The sequence that a dead task with this status may still hold up.
    pub(crate) fn held_when(&self, status: StoredStatus) -> bool {
        self.holds && status == StoredStatus::Dead
    }
}

/// A task whose turn has come.
pub(crate) struct Released {
    pub(crate) task: TaskId,
    pub(crate) turn: Turn,
    pub(crate) bytes: usize,
    pub(crate) unpublished: Unpublished,
}

/// The changes that a transaction makes to tasks of sequences.
#[derive(Default)]
pub(crate) struct Sequences {
    plans: BTreeMap<SequenceHash, Plan>,
    released: Vec<Released>,
}

/// The changes of one sequence.
#[derive(Default)]
struct Plan {
    queue: Option<QueueName>,
    /// Tasks that are final now.
    ended: Vec<Ended>,
    /// Tasks that are unfinished again.
    again: Vec<Again>,
    /// New tasks, in order.
    added: Vec<Added>,
}

struct Ended {
    task: TaskId,
    was_unfinished: bool,
    is_completed: bool,
    /// It keeps its place, or stays the head.
    holds: bool,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Again {
    /// Its old place.
    place: i64,
    task: TaskId,
    was_unfinished: bool,
}

struct Added {
    task: TaskId,
    priority: Priority,
    bytes: usize,
    created_ms: i64,
}

/// A row of `sequences`.
#[derive(Clone, PartialEq)]
struct Row {
    queue: QueueName,
    /// `None` after the head has ended.
    head: Option<TaskId>,
    place: i64,
    waiting: u64,
    last_place: i64,
}

type RowColumns = (Vec<u8>, String, Vec<u8>, i64, i64, i64);

impl Plan {
    /// The task that becomes the head if there is no row yet, and its place.
    fn first(&self) -> Option<(TaskId, i64)> {
        let again = self
            .again
            .iter()
            .min()
            .map(|again| (again.task, again.place));
        let added = self.added.first();
        again.or(added.map(|added| (added.task, added.created_ms.saturating_mul(PLACES_PER_MS))))
    }
}

impl Sequences {
    pub(crate) fn moved(
        &mut self,
        id: TaskId,
        queue: &QueueName,
        from: StoredStatus,
        to: StoredStatus,
        of: &Member,
    ) {
        let plan = self.plans.entry(of.hash).or_default();
        plan.queue = Some(queue.clone());
        let was_unfinished = !from.is_final();
        if to.is_final() {
            plan.ended.push(Ended {
                task: id,
                was_unfinished,
                is_completed: to == StoredStatus::Completed,
                holds: of.held_when(to),
            });
        } else {
            plan.again.push(Again {
                place: of.place,
                task: id,
                was_unfinished,
            });
        }
    }

    /// Records that a final task is removed.
    pub(crate) fn removed(&mut self, id: TaskId, queue: &QueueName, of: &Member) {
        let plan = self.plans.entry(of.hash).or_default();
        plan.queue = Some(queue.clone());
        plan.ended.push(Ended {
            task: id,
            was_unfinished: false,
            is_completed: true,
            holds: false,
        });
    }

    fn added(&mut self, row: &NewRow) {
        let task = &row.task;
        let Some(sequence) = &task.sequence else {
            return;
        };
        let plan = self
            .plans
            .entry(sequence_hash_of(&task.queue, &sequence.name))
            .or_default();
        plan.queue = Some(task.queue.clone());
        plan.added.push(Added {
            task: task.id,
            priority: task.priority,
            bytes: task.weight(),
            created_ms: task.created_unix_ms,
        });
    }

    /// The tasks whose turn has come so far.
    pub(crate) fn take_released(&mut self) -> Vec<Released> {
        std::mem::take(&mut self.released)
    }

    /// Carries out what was recorded, and adds these new rows, in order. Returns the tasks that
    /// wait behind others of their sequences. Does nothing if no task is in a sequence.
    ///
    /// `at_ms` is the time of the caller if it publishes what is released.
    pub(crate) async fn apply<S: Session>(
        &mut self,
        session: &mut S,
        added: &[&NewRow],
        at_ms: Option<i64>,
        counts: &mut Counts,
    ) -> Result<HashSet<TaskId>> {
        added.iter().for_each(|row| self.added(row));
        if self.plans.is_empty() {
            return Ok(HashSet::new());
        }
        let plans = std::mem::take(&mut self.plans);
        let mut rows = lock(session, &plans).await?;
        let before = rows.clone();
        leave(session, &plans, &mut rows, counts).await?;
        let behind = join(session, &plans, &mut rows, counts).await?;
        let released = release(session, &mut rows, at_ms, counts).await?;
        self.released.extend(released);
        store(session, &before, &rows).await?;
        Ok(behind)
    }
}

/// Locks the rows of these sequences. Makes a row for each that gets a task and has none, with this
/// task as its head.
async fn lock<S: Session>(
    session: &mut S,
    plans: &BTreeMap<SequenceHash, Plan>,
) -> Result<BTreeMap<SequenceHash, Row>> {
    let mut made = Vec::new();
    for (hash, plan) in plans {
        if let (Some((head, place)), Some(queue)) = (plan.first(), &plan.queue) {
            made.push((hash, queue, head, place));
        }
    }
    let hashes: Vec<Value<'_>> = plans.keys().map(|hash| hash[..].into()).collect();
    let all_are_made = made.len() == plans.len();
    if !made.is_empty() && !all_are_made && !S::FOR_UPDATE.is_empty() {
        // The INSERT locks only those that get a task, and all are to be locked by hash.
        for hashes in lists(&hashes) {
            let first = Statement::new("SELECT hash FROM sequences ")
                .sql(S::BY_PRIMARY_KEY)
                .sql(" WHERE hash IN ")
                .list(hashes)
                .sql(" ORDER BY hash")
                .sql(S::FOR_UPDATE);
            session.fetch::<(Vec<u8>,)>(first).await?;
        }
    }
    for piece in pieces(&made, |_| 0) {
        let rows = piece.iter().map(|(hash, queue, head, place)| {
            [
                hash[..].into(),
                (*queue).into(),
                head.into(),
                (*place).into(),
                0_u64.into(),
                (*place).into(),
            ]
        });
        let make = Statement::new(INSERT).values(rows);
        // Adds nothing, and so only locks a row that exists.
        session
            .execute(make.sql(&S::add("hash", "waiting_tasks")))
            .await?;
    }
    let mut rows = BTreeMap::new();
    for hashes in lists(&hashes) {
        let found = Statement::new(
            "SELECT hash, queue, head, place, waiting_tasks, last_place FROM sequences ",
        )
        .sql(S::BY_PRIMARY_KEY)
        .sql(" WHERE hash IN ")
        .list(hashes)
        .sql(" ORDER BY hash")
        .sql(S::FOR_UPDATE);
        for (hash, queue, head, place, waiting, last_place) in
            session.fetch::<RowColumns>(found).await?
        {
            let row = Row {
                queue: queue_name(&queue)?,
                head: Some(task_id(&head)?),
                place,
                waiting: number(waiting.max(0))?,
                last_place,
            };
            rows.insert(sequence_hash(&hash)?, row);
        }
    }
    Ok(rows)
}

const INSERT: &str = "INSERT INTO sequences (hash, queue, head, place, waiting_tasks, last_place)";

pub(crate) fn sequence_hash(bytes: &[u8]) -> Result<SequenceHash> {
    bytes.try_into().map_err(|_| {
        corrupt(format!(
            "the hash of a sequence has {} bytes instead of {SEQUENCE_HASH_BYTES}",
            bytes.len()
        ))
    })
}

/// Takes the tasks that have ended out of their sequences, except dead ones that hold. The places of
/// those that may be sent again go into their rows.
async fn leave<S: Session>(
    session: &mut S,
    plans: &BTreeMap<SequenceHash, Plan>,
    rows: &mut BTreeMap<SequenceHash, Row>,
    counts: &mut Counts,
) -> Result<()> {
    let mut places: Vec<(TaskId, i64)> = Vec::new();
    let mut others: BTreeMap<TaskId, (SequenceHash, &Ended)> = BTreeMap::new();
    for (hash, plan) in plans {
        let Some(row) = rows.get_mut(hash) else {
            continue;
        };
        for ended in &plan.ended {
            if row.head != Some(ended.task) {
                others.insert(ended.task, (*hash, ended));
            } else if !ended.holds {
                row.head = None;
                if !ended.is_completed {
                    places.push((ended.task, row.place));
                }
            }
        }
    }
    let ids: Vec<TaskId> = others.keys().copied().collect();
    for ids in lists(&ids) {
        let waited = Statement::new("SELECT task_id, place FROM outbox ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE state = 5 AND task_id IN ")
            .list(ids);
        let mut gone = Vec::new();
        for (id, place) in session.fetch::<(Vec<u8>, i64)>(waited).await? {
            let id = task_id(&id)?;
            let (hash, ended) = others[&id];
            let Some(row) = rows.get_mut(&hash) else {
                continue;
            };
            if ended.was_unfinished {
                counts.behind(&row.queue, -1);
            }
            if ended.holds {
                continue;
            }
            row.waiting = row.waiting.saturating_sub(1);
            places.push((id, place));
            gone.push(id);
        }
        entries::remove(session, &gone).await?;
    }
    for places in pieces(&places, |_| 0) {
        let cases = places
            .iter()
            .map(|(id, place)| -> [Value<'_>; 2] { [id.into(), (*place).into()] });
        let ids: Vec<TaskId> = places.iter().map(|(id, _)| *id).collect();
        let keep = Statement::new("UPDATE tasks SET sequence_place = CASE id ")
            .rows("WHEN ? THEN ? ", "", cases)
            .sql("END WHERE id IN ")
            .list(&ids);
        session.execute(keep).await?;
    }
    Ok(())
}

/// Adds tasks to their sequences. Returns those that wait.
async fn join<S: Session>(
    session: &mut S,
    plans: &BTreeMap<SequenceHash, Plan>,
    rows: &mut BTreeMap<SequenceHash, Row>,
    counts: &mut Counts,
) -> Result<HashSet<TaskId>> {
    let mut behind = HashSet::new();
    let mut entries = Vec::new();
    let mut again: Vec<(TaskId, SequenceHash, i64)> = Vec::new();
    let mut added: Vec<TaskId> = Vec::new();
    let sent_again = plans.values().flat_map(|plan| &plan.again);
    let sent_again: Vec<TaskId> = sent_again.map(|again| again.task).collect();
    let wait_already = entries::behind_among(session, &sent_again).await?;
    for (hash, plan) in plans {
        let Some(row) = rows.get_mut(hash) else {
            continue;
        };
        for one in &plan.again {
            // The head that was dead or had completed too early goes on as the head.
            if row.head == Some(one.task) {
                continue;
            }
            behind.insert(one.task);
            let waits_already = wait_already.contains(&one.task);
            if !waits_already || !one.was_unfinished {
                counts.behind(&row.queue, 1);
            }
            if !waits_already {
                again.push((one.task, *hash, one.place));
                row.waiting += 1;
            }
        }
        for task in &plan.added {
            if row.head == Some(task.task) {
                continue;
            }
            let now = task.created_ms.saturating_mul(PLACES_PER_MS);
            row.last_place = now.max(row.last_place.saturating_add(1));
            if row.head.is_none() && row.waiting == 0 {
                row.head = Some(task.task);
                row.place = row.last_place;
                continue;
            }
            row.waiting += 1;
            counts.behind(&row.queue, 1);
            behind.insert(task.task);
            added.push(task.task);
            entries.push(Entry::behind(
                task.task,
                row.queue.clone(),
                task.priority,
                task.bytes,
                *hash,
                row.last_place,
            ));
        }
    }
    added.sort_unstable();
    for ids in lists(&added) {
        // They were inserted as members of the batch.
        let off_bus =
            Statement::new("UPDATE tasks SET on_bus = 0 WHERE on_bus = 1 AND id IN ").list(ids);
        session.execute(off_bus).await?;
    }
    entries.extend(entries::behind_again(session, &again).await?);
    entries.sort_unstable_by_key(Entry::task);
    entries::put(session, &entries).await?;
    Ok(behind)
}

/// The first task behind in a sequence: the sequence, the task, its place, its weight, its priority.
type FirstColumns = (Vec<u8>, Vec<u8>, i64, i64, i64);

/// Of a task that may become the head: its id, `not_before_ms`, its credits, its epoch, its status,
/// and whether it holds if it is dead.
type NextColumns = (Vec<u8>, i64, i64, i64, i64, i64);

/// The first task behind in a sequence.
struct Next {
    hash: SequenceHash,
    place: i64,
    bytes: usize,
    priority: Priority,
}

/// Makes the first task behind the head of each sequence that has none.
async fn release<S: Session>(
    session: &mut S,
    rows: &mut BTreeMap<SequenceHash, Row>,
    at_ms: Option<i64>,
    counts: &mut Counts,
) -> Result<Vec<Released>> {
    let mut vacant: Vec<SequenceHash> = rows
        .iter()
        .filter(|(_, row)| row.head.is_none() && row.waiting > 0)
        .map(|(hash, _)| *hash)
        .collect();
    let mut released = Vec::with_capacity(vacant.len());
    let mut entries = Vec::with_capacity(vacant.len());
    // Each round gives a sequence its head, or removes the row of a task that cannot be one.
    while !vacant.is_empty() {
        let mut next = first_behind(session, &vacant).await?;
        vacant.clear();
        let ids: Vec<TaskId> = next.keys().copied().collect();
        let mut no_longer_behind = Vec::new();
        for ids in lists(&ids) {
            let tasks = Statement::new(
                "SELECT id, not_before_ms, completed, epoch, status, COALESCE(on_dead, 0) FROM tasks ",
            )
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids);
            for (id, not_before_ms, completed, epoch, status, holds) in
                session.fetch::<NextColumns>(tasks).await?
            {
                let id = task_id(&id)?;
                let is_unfinished = status == StoredStatus::Unfinished as i64;
                let holds = status == StoredStatus::Dead as i64 && holds != 0;
                if !is_unfinished && !holds {
                    continue;
                }
                let Some(next) = next.remove(&id) else {
                    continue;
                };
                let Some(row) = rows.get_mut(&next.hash) else {
                    continue;
                };
                row.head = Some(id);
                row.place = next.place;
                row.waiting = row.waiting.saturating_sub(1);
                if holds {
                    // It died while it waited, and has not been counted since.
                    no_longer_behind.push(id);
                    continue;
                }
                counts.behind(&row.queue, -1);
                let is_as_new = completed == 0 && epoch == 0;
                let (unpublished, due_ms) = if not_before_ms > 0 {
                    (Unpublished::Scheduled, not_before_ms)
                } else if is_as_new {
                    let left_until = at_ms.map(|at| at.saturating_add(LEFT_TO_THE_CALLER_MS));
                    (Unpublished::Fresh, left_until.unwrap_or(0))
                } else {
                    (Unpublished::Missing, 0)
                };
                let turn = entries::new_turn();
                entries.push(Entry::released(
                    id,
                    row.queue.clone(),
                    next.priority,
                    next.bytes,
                    unpublished,
                    due_ms,
                    turn,
                ));
                released.push(Released {
                    task: id,
                    turn,
                    bytes: next.bytes,
                    unpublished,
                });
            }
        }
        // Somebody has deleted or ended these tasks by hand.
        for (id, next) in next {
            if let Some(row) = rows.get_mut(&next.hash) {
                row.waiting = row.waiting.saturating_sub(1);
            }
            no_longer_behind.push(id);
            vacant.push(next.hash);
        }
        no_longer_behind.sort_unstable();
        entries::remove(session, &no_longer_behind).await?;
    }
    entries.sort_unstable_by_key(Entry::task);
    entries::put(session, &entries).await?;
    Ok(released)
}

/// The first task behind in each of these sequences, if there is one.
async fn first_behind<S: Session>(
    session: &mut S,
    sequences: &[SequenceHash],
) -> Result<BTreeMap<TaskId, Next>> {
    let select = format!(
        "SELECT * FROM (SELECT sequence_hash, task_id, place, bytes, priority FROM outbox {} \
         WHERE state = 5 AND sequence_hash = ? ORDER BY place, task_id LIMIT 1) AS first_behind",
        S::by_index("outbox_behind")
    );
    let mut next = BTreeMap::new();
    for sequences in pieces(sequences, |_| 0) {
        let hashes = sequences
            .iter()
            .map(|hash| -> [Value<'_>; 1] { [hash[..].into()] });
        let found = Statement::new("").rows(&select, " UNION ALL ", hashes);
        for (hash, id, place, bytes, priority) in session.fetch::<FirstColumns>(found).await? {
            let first = Next {
                hash: sequence_hash(&hash)?,
                place,
                bytes: number(bytes)?,
                priority: Priority::from_number(priority),
            };
            next.insert(task_id(&id)?, first);
        }
    }
    Ok(next)
}

/// Stores the rows that have changed, and removes those of sequences without a task.
async fn store<S: Session>(
    session: &mut S,
    before: &BTreeMap<SequenceHash, Row>,
    rows: &BTreeMap<SequenceHash, Row>,
) -> Result<()> {
    let mut changed = Vec::new();
    let mut gone: Vec<Value<'_>> = Vec::new();
    for (hash, row) in rows {
        match &row.head {
            None => gone.push(hash[..].into()),
            Some(head) if before.get(hash) != Some(row) => changed.push((hash, head, row)),
            Some(_) => {}
        }
    }
    for piece in pieces(&changed, |_| 0) {
        let values = piece.iter().map(|(hash, head, row)| {
            [
                hash[..].into(),
                (&row.queue).into(),
                (*head).into(),
                row.place.into(),
                row.waiting.into(),
                row.last_place.into(),
            ]
        });
        let replaced = ["head", "place", "waiting_tasks", "last_place"];
        let change = Statement::new(INSERT).values(values);
        session
            .execute(change.sql(&S::replace("hash", &replaced)))
            .await?;
    }
    for hashes in lists(&gone) {
        let remove = Statement::new("DELETE FROM sequences WHERE hash IN ").list(hashes);
        session.execute(remove).await?;
    }
    Ok(())
}

/// Gives a sequence the head that it must have, and the right number of waiting tasks. Returns
/// whether anything was wrong. Unlike all other statements, this reads all that wait in the sequence.
pub(crate) async fn mend<S: Session>(
    session: &mut S,
    hash: &SequenceHash,
    queue: &QueueName,
    counts: &mut Counts,
) -> Result<bool> {
    // Makes the row if there is none, so that nobody else makes one meanwhile.
    let first = Statement::new("SELECT task_id, place FROM outbox ")
        .sql(&S::by_index("outbox_behind"))
        .sql(" WHERE state = 5 AND sequence_hash = ? ORDER BY place, task_id LIMIT 1")
        .bind(&hash[..]);
    for (first, place) in session.fetch::<(Vec<u8>, i64)>(first).await? {
        let first = task_id(&first)?;
        let row: [Value<'_>; 6] = [
            hash[..].into(),
            queue.into(),
            (&first).into(),
            place.into(),
            0_u64.into(),
            place.into(),
        ];
        let make = Statement::new(INSERT).values([row].into_iter());
        session
            .execute(make.sql(&S::add("hash", "waiting_tasks")))
            .await?;
    }
    let found = Statement::new(
        "SELECT hash, queue, head, place, waiting_tasks, last_place FROM sequences WHERE hash = ?",
    )
    .bind(&hash[..])
    .sql(S::FOR_UPDATE);
    let stored: Option<RowColumns> = session.fetch(found).await?.into_iter().next();
    let waiting = Statement::new("SELECT COUNT(*), COALESCE(MAX(place), 0) FROM outbox ")
        .sql(&S::by_index("outbox_behind"))
        .sql(" WHERE state = 5 AND sequence_hash = ?")
        .bind(&hash[..]);
    let waiting: Vec<(i64, i64)> = session.fetch(waiting).await?;
    let (waiting, last_place) = waiting.first().copied().unwrap_or_default();
    let mut row = Row {
        queue: queue.clone(),
        head: None,
        place: 0,
        waiting: number(waiting)?,
        last_place,
    };
    let mut before = BTreeMap::new();
    if let Some((_, _, head, place, stored_waiting, last_place)) = stored {
        let head = task_id(&head)?;
        row.place = place;
        row.last_place = row.last_place.max(last_place);
        if goes_first(session, &head).await? {
            row.head = Some(head);
        }
        let stored = Row {
            queue: queue.clone(),
            head: Some(head),
            place,
            waiting: number(stored_waiting.max(0))?,
            last_place,
        };
        before.insert(*hash, stored);
    } else if row.waiting == 0 {
        return Ok(false);
    }
    let has_no_head = row.head.is_none();
    let mut rows = BTreeMap::from([(*hash, row)]);
    release(session, &mut rows, None, counts).await?;
    let was_wrong = has_no_head || before != rows;
    store(session, &before, &rows).await?;
    Ok(was_wrong)
}

/// Whether a task can be the head of its sequence: it is unfinished and does not wait, or it is dead
/// and holds up the others.
async fn goes_first<S: Session>(session: &mut S, id: &TaskId) -> Result<bool> {
    let task = Statement::new(
        "SELECT status, COALESCE(on_dead, 0), (SELECT COUNT(*) FROM outbox WHERE state = 5 AND task_id = tasks.id) \
         FROM tasks WHERE id = ?",
    )
    .bind(id);
    let task: Vec<(i64, i64, i64)> = session.fetch(task).await?;
    Ok(task.first().is_some_and(|(status, holds, behind)| {
        let is_unfinished = *status == StoredStatus::Unfinished as i64;
        let holds = *status == StoredStatus::Dead as i64 && *holds != 0;
        *behind == 0 && (is_unfinished || holds)
    }))
}
