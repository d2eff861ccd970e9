//! Inserts of tasks that may be new.
//!
//! In MySQL the unique key decides, and the row that exists afterwards tells which task owns the
//! key. If no row had the key, `seen` tells whether a removed task had it. In SQLite, the keys in
//! memory and `seen` decide before the insert.

use std::{
    collections::{HashMap, HashSet},
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{
    model::{KeyHash, QueueName, StoredStatus, TaskId},
    store::{
        Inserted, NewRow, Result, Turn, Unpublished,
        sql::{
            outbox::{
                batches,
                entries::{self, Entry},
            },
            rows::{headers_text, key_hash, status, task_id},
            session::{Recent, Session},
            statement::{Statement, Value, lists, pieces},
            tasks::{
                idempotency,
                keys::owners_by_memory,
                pending,
                retention::{Removed, removed},
                steps::Steps,
            },
        },
    },
};

/// The task that owns a key.
struct Owner {
    id: TaskId,
    status: StoredStatus,
    /// This transaction inserted it. A row left by an earlier attempt is not counted or published
    /// again.
    fresh: bool,
}

impl Owner {
    fn fresh(id: TaskId) -> Self {
        Self {
            id,
            status: StoredStatus::Unfinished,
            fresh: true,
        }
    }
}

impl From<Removed> for Owner {
    fn from(Removed { id, status }: Removed) -> Self {
        Self {
            id,
            status,
            fresh: false,
        }
    }
}

/// True while many of the latest keys belong to removed tasks.
///
/// In that case it is cheaper to look them up before the insert than to delete rows again after it.
#[derive(Default)]
pub(crate) struct OldKeys(AtomicBool);

impl OldKeys {
    fn are_many(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn note(&self, old: usize, of: usize) {
        self.0.store(old * 8 > of, Ordering::Relaxed);
    }
}

/// Stores new rows, with the fresh ones as this batch. Returns one answer per row.
pub(crate) async fn insert<S: Session>(
    session: &mut S,
    rows: &[&NewRow],
    batch: Turn,
    steps: &mut Steps,
    old_keys: &OldKeys,
) -> Result<Vec<Inserted>> {
    let keys = idempotency::take(session, rows).await?;
    let candidates = first_of_each_key(keys.unanswered(rows));
    let owners = insert_candidates(session, &candidates, batch, old_keys).await?;
    let is_fresh = |row: &&&NewRow| {
        owners
            .get(&row.task.key_hash)
            .is_some_and(|owner| owner.fresh)
    };
    let new: Vec<&NewRow> = candidates.iter().filter(is_fresh).copied().collect();
    new.iter().for_each(|row| steps.added(&row.task));
    pending::keep_deadlines(session, &new).await?;
    let (together, alone): (Vec<&NewRow>, Vec<&NewRow>) =
        new.into_iter().partition(|row| is_batched(row));
    batches::add(session, batch, &together).await?;
    let mut entries: Vec<Entry> = alone.into_iter().map(Entry::of_new).collect();
    entries.sort_unstable_by_key(Entry::task);
    entries::put(session, &entries).await?;
    let mut answers: Vec<Inserted> = rows.iter().map(|row| answer(row, &owners)).collect();
    keys.finish(session, rows, &mut answers).await?;
    Ok(answers)
}

/// Whether the row is published with its batch.
fn is_batched(row: &NewRow) -> bool {
    row.unpublished == Unpublished::Fresh
}

/// The first row of each key, sorted by key hash, because every transaction takes keys in this
/// order.
fn first_of_each_key(rows: Vec<&NewRow>) -> Vec<&NewRow> {
    let mut candidates = rows;
    candidates.sort_by_key(|row| row.task.key_hash); // stable: the first of equals stays first
    candidates.dedup_by_key(|row| row.task.key_hash);
    candidates
}

fn answer(row: &NewRow, owners: &HashMap<KeyHash, Owner>) -> Inserted {
    match owners.get(&row.task.key_hash) {
        Some(owner) if owner.id != row.task.id => Inserted::Duplicate {
            id: owner.id,
            status: owner.status,
        },
        // No owner: the id was already stored with another key. That row stays unchanged.
        _ => Inserted::New,
    }
}

/// Inserts those rows whose keys no task has or ever had. Returns the owner of each key.
async fn insert_candidates<S: Session>(
    session: &mut S,
    candidates: &[&NewRow],
    batch: Turn,
    old_keys: &OldKeys,
) -> Result<HashMap<KeyHash, Owner>> {
    match session.recent(&key_hashes(candidates)) {
        Some(recent) => insert_by_memory(session, candidates, batch, recent).await,
        None => insert_by_index(session, candidates, batch, old_keys).await,
    }
}

/// Inserts those rows that are new according to the keys in memory and `seen`.
async fn insert_by_memory<S: Session>(
    session: &mut S,
    candidates: &[&NewRow],
    batch: Turn,
    recent: Recent,
) -> Result<HashMap<KeyHash, Owner>> {
    let known = owners_by_memory(session, recent).await?;
    let mut new: Vec<&NewRow> = candidates
        .iter()
        .filter(|row| !known.contains_key(&row.task.key_hash))
        .copied()
        .collect();
    // Rows are stored in this order. Workers finish the tasks of a shard one after the other, and
    // then those of one insert share pages.
    new.sort_unstable_by(|a, b| place(a).cmp(&place(b)));
    if insert_tasks(session, &new, batch).await? < new.len() as u64 {
        // An id was already stored, with another key.
        let ids: Vec<TaskId> = new.iter().map(|row| row.task.id).collect();
        let mut stored = HashSet::new();
        for ids in lists(&ids) {
            let of_batch = Statement::new("SELECT id FROM tasks WHERE insertion = ? AND id IN ")
                .bind(batch)
                .list(ids);
            stored.extend(session.ids(of_batch).await?);
        }
        new.retain(|row| stored.contains(&row.task.id));
    }
    let keys: Vec<(KeyHash, TaskId)> = new
        .iter()
        .map(|row| (row.task.key_hash, row.task.id))
        .collect();
    if !keys.is_empty() {
        session.take_keys(&keys).await?;
    }
    let mut owners: HashMap<KeyHash, Owner> = known
        .into_iter()
        .map(|(hash, known)| (hash, known.into()))
        .collect();
    owners.extend(keys.into_iter().map(|(hash, id)| (hash, Owner::fresh(id))));
    Ok(owners)
}

fn place(row: &NewRow) -> (&QueueName, u32, TaskId) {
    (&row.task.queue, row.task.partition, row.task.id)
}

/// Inserts those rows that are new according to the unique index of `tasks`, unless `seen` has
/// their keys from removed tasks.
async fn insert_by_index<S: Session>(
    session: &mut S,
    candidates: &[&NewRow],
    batch: Turn,
    old_keys: &OldKeys,
) -> Result<HashMap<KeyHash, Owner>> {
    let mut old = HashMap::new();
    if old_keys.are_many() {
        old = removed(session, &key_hashes(candidates), "").await?;
    }
    let rest: Vec<&NewRow> = candidates
        .iter()
        .filter(|row| !old.contains_key(&row.task.key_hash))
        .copied()
        .collect();
    insert_tasks(session, &rest, batch).await?;
    let mut owners = owners(session, &key_hashes(&rest), batch).await?;
    // Looked up only now, with a lock: a removal that frees a key moves it to `seen` before another
    // row can take it.
    let fresh: Vec<&NewRow> = rest
        .into_iter()
        .filter(|row| {
            owners
                .get(&row.task.key_hash)
                .is_some_and(|owner| owner.fresh)
        })
        .collect();
    let taken = removed(session, &key_hashes(&fresh), S::FOR_SHARE).await?;
    if !taken.is_empty() {
        let back: Vec<TaskId> = fresh
            .iter()
            .filter(|row| taken.contains_key(&row.task.key_hash))
            .map(|row| row.task.id)
            .collect();
        for ids in lists(&back) {
            session
                .execute(Statement::new("DELETE FROM tasks WHERE id IN ").list(ids))
                .await?;
        }
        old.extend(taken);
    }
    old_keys.note(old.len(), candidates.len());
    owners.extend(
        old.into_iter()
            .map(|(hash, removed)| (hash, removed.into())),
    );
    Ok(owners)
}

fn key_hashes(rows: &[&NewRow]) -> Vec<KeyHash> {
    rows.iter().map(|row| row.task.key_hash).collect()
}

/// Inserts the rows. Returns how many were inserted, if the database reports that.
async fn insert_tasks<S: Session>(
    session: &mut S,
    candidates: &[&NewRow],
    insertion: Turn,
) -> Result<u64> {
    let mut inserted = 0;
    for piece in pieces(candidates, |row| row.task.weight()) {
        let insert = Statement::new(S::INSERT).sql(
            " INTO tasks (id, key_hash, queue, shard, task_key, replicas, priority, max_attempts, lease_ms, \
             not_before_ms, headers, traceparent, created_ms, updated_ms, insertion, on_bus, \
             payload_encoding, payload",
        );
        // Most tasks have no backoff, deadline or limit key, and pay nothing for them.
        let more = piece.iter().any(|row| has_more(row));
        let insert = insert.sql(if more {
            ", backoff, deadline_ms, limit_key)"
        } else {
            ")"
        });
        let rows = piece.iter().map(|row| {
            task_values(row, insertion)
                .into_iter()
                .chain(more.then(|| more_values(row)).into_iter().flatten())
        });
        let insert = insert.values_of(18 + 3 * usize::from(more), rows);
        inserted += session.execute(insert.sql(&S::keep_first("id"))).await?;
    }
    Ok(inserted)
}

fn task_values(row: &NewRow, insertion: Turn) -> [Value<'_>; 18] {
    let task = &row.task;
    [
        (&task.id).into(),
        (&task.key_hash).into(),
        (&task.queue).into(),
        task.partition.into(),
        (&task.key[..]).into(),
        task.replicas.into(),
        task.priority.into(),
        task.max_attempts.into(),
        task.lease_ms.into(),
        task.not_before_unix_ms.into(),
        headers_text(&task.headers).into(),
        task.traceparent.as_str().into(),
        task.created_unix_ms.into(),
        task.created_unix_ms.into(),
        insertion.into(),
        is_batched(row).into(),
        task.payload_encoding.into(),
        (&task.payload[..]).into(),
    ]
}

fn has_more(row: &NewRow) -> bool {
    row.task.backoff.is_some() || row.task.deadline_unix_ms > 0 || !row.task.limit_key.is_empty()
}

/// The backoff, the deadline and the limit key.
fn more_values(row: &NewRow) -> [Value<'_>; 3] {
    let backoff = row
        .task
        .backoff
        .map(|backoff| backoff.packed(backoff.give_up_after_ms).to_vec());
    [
        backoff.unwrap_or_default().into(),
        row.task.deadline_unix_ms.into(),
        row.task.limit_key.as_str().into(),
    ]
}

async fn owners<S: Session>(
    session: &mut S,
    hashes: &[KeyHash],
    insertion: Turn,
) -> Result<HashMap<KeyHash, Owner>> {
    let mut owners = HashMap::with_capacity(hashes.len());
    for hashes in lists(hashes) {
        let taken =
            Statement::new("SELECT key_hash, id, status, insertion FROM tasks WHERE key_hash IN ")
                .list(hashes);
        for (hash, id, number, inserted_by) in
            session.fetch::<(Vec<u8>, Vec<u8>, i64, i64)>(taken).await?
        {
            let owner = Owner {
                id: task_id(&id)?,
                status: status(number)?,
                fresh: inserted_by == insertion.0,
            };
            owners.insert(key_hash(&hash)?, owner);
        }
    }
    Ok(owners)
}
