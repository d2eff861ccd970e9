//! Inserts of tasks that may be new.
//!
//! In MySQL the unique key decides, and the row that exists afterwards tells which task owns the
//! key. If no row had the key, `seen` tells whether a removed task had it. In SQLite, the keys in
//! memory and `seen` decide before the insert.
//!
//! A task without a key is known by its id, which is unique. So nothing but its row remembers it.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{
    model::{KeyHash, LetterId, QueueName, RowTree, StoredStatus, TaskId},
    store::{
        Inserted, NewRow, Result, Turn,
        sql::{
            outbox::{
                batches,
                entries::{self, Entry},
            },
            rows::{key_hash, status, task_id},
            session::{Recent, Session},
            statement::{Statement, lists},
            tasks::{
                idempotency,
                keys::owners_by_memory,
                new_rows::insert_rows,
                pending,
                retention::{Removed, removed},
                steps::Steps,
                trees,
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

/// Stores new rows, with the fresh ones as this batch. Returns one answer per row, and those tasks
/// that the caller must not publish: see [`Stored::behind`](crate::store::Stored::behind). Carries
/// out all that `steps` have of sequences; `at_ms` as in [`Steps::sequences`].
pub(crate) async fn insert<S: Session>(
    session: &mut S,
    rows: &[&NewRow],
    batch: Turn,
    steps: &mut Steps,
    old_keys: &OldKeys,
    at_ms: Option<i64>,
) -> Result<(Vec<Inserted>, HashSet<TaskId>)> {
    let keys = idempotency::take(session, rows).await?;
    let closed = closed_trees(session, rows).await?;
    let (refused, unanswered): (Vec<&NewRow>, Vec<&NewRow>) = keys
        .unanswered(rows)
        .into_iter()
        .partition(|row| joins_one_of(row, &closed));
    let sent_again = letters_of(&unanswered);
    let candidates = first_of_each_key(unanswered);
    let mut owners = insert_candidates(session, &candidates, batch, old_keys).await?;
    // A task that is stored already remains a duplicate.
    for (hash, owner) in known_owners(session, &refused, batch).await? {
        owners.entry(hash).or_insert(owner);
    }
    let is_known = |row: &NewRow| owners.contains_key(&row.task.key_hash);
    let known: Vec<&NewRow> = refused.into_iter().filter(|row| is_known(row)).collect();
    let is_fresh = |row: &&&NewRow| {
        owners
            .get(&row.task.key_hash)
            .is_some_and(|owner| owner.fresh)
    };
    let new: Vec<&NewRow> = candidates.iter().filter(is_fresh).copied().collect();
    new.iter().for_each(|row| steps.added(&row.task));
    remove_letters(session, &sent_again, steps).await?;
    pending::keep_deadlines(session, &new).await?;
    let sequenced = in_sequences(rows, &new);
    let mut behind = steps.sequences(session, &sequenced, at_ms).await?;
    let stored_before = stored_before(&[&candidates[..], &known].concat(), &owners);
    behind.extend(entries::not_to_publish(session, &stored_before).await?);
    let (together, alone): (Vec<&NewRow>, Vec<&NewRow>) = new
        .into_iter()
        .filter(|row| !behind.contains(&row.task.id))
        .partition(|row| row.is_batched());
    batches::add(session, batch, &together).await?;
    let mut entries: Vec<Entry> = alone.into_iter().map(Entry::of_new).collect();
    entries.sort_unstable_by_key(Entry::task);
    entries::put(session, &entries).await?;
    let mut answers = Vec::with_capacity(rows.len());
    for row in rows {
        if joins_one_of(row, &closed) && !owners.contains_key(&row.task.key_hash) {
            answers.push(Inserted::TreeClosed);
            continue;
        }
        answers.push(answer(row, &owners));
        if !row.task.has_key()
            && let Some(owner) = owners.get_mut(&row.task.key_hash)
        {
            // A later row with this id is the same task.
            owner.fresh = false;
        }
    }
    keys.finish(session, rows, &mut answers).await?;
    Ok((answers, behind))
}

/// The tasks that an earlier attempt has stored, or somebody else who reads the same records, and
/// that are answered as new.
fn stored_before(candidates: &[&NewRow], owners: &HashMap<KeyHash, Owner>) -> Vec<TaskId> {
    let mut ids = Vec::new();
    for row in candidates {
        let is_stored_before = match owners.get(&row.task.key_hash) {
            Some(owner) => owner.id == row.task.id && !owner.fresh,
            None => true,
        };
        if is_stored_before && row.task.has_key() {
            ids.push(row.task.id);
        }
    }
    ids
}

/// The trees that some of these rows join, and that take nothing more: they have ended, are being
/// cancelled, or were removed. A tree whose root is among the rows is about to begin.
async fn closed_trees<S: Session>(session: &mut S, rows: &[&NewRow]) -> Result<HashSet<TaskId>> {
    let mut joined = HashSet::new();
    let mut begun = HashSet::new();
    for row in rows {
        match row.task.tree.as_deref() {
            Some(RowTree::Joins(tree)) => drop(joined.insert(*tree)),
            Some(RowTree::Root(_)) => drop(begun.insert(row.task.id)),
            Some(RowTree::Sent(_) | RowTree::Discovered { .. } | RowTree::Returns { .. })
            | None => {}
        }
    }
    joined.retain(|tree| !begun.contains(tree));
    if joined.is_empty() {
        return Ok(joined);
    }
    let ids: Vec<TaskId> = joined.iter().copied().collect();
    let facts = trees::facts(session, &ids).await?;
    joined.retain(|tree| facts.get(tree).is_none_or(|facts| facts.is_closed()));
    Ok(joined)
}

/// The letters whose tasks these rows send again, each with its tree and the time.
fn letters_of(rows: &[&NewRow]) -> BTreeMap<LetterId, (TaskId, i64)> {
    let of_row = |row: &&NewRow| match row.task.tree.as_deref() {
        Some(RowTree::Returns { tree, letter }) => {
            Some((*letter, (*tree, row.task.created_unix_ms)))
        }
        _ => None,
    };
    rows.iter().filter_map(of_row).collect()
}

/// Removes letters whose tasks are stored now, or were before, and tells their trees.
async fn remove_letters<S: Session>(
    session: &mut S,
    letters: &BTreeMap<LetterId, (TaskId, i64)>,
    steps: &mut Steps,
) -> Result<()> {
    let ids: Vec<LetterId> = letters.keys().copied().collect();
    for ids in lists(&ids) {
        let there = Statement::new("SELECT id FROM letters ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids)
            .sql(" ORDER BY id")
            .sql(S::FOR_UPDATE);
        let there = session.ids(there).await?;
        for (tree, at_ms) in there.iter().filter_map(|id| letters.get(id)) {
            steps.letter_gone(*tree, *at_ms);
        }
        for there in lists(&there) {
            session
                .execute(Statement::new("DELETE FROM letters WHERE id IN ").list(there))
                .await?;
        }
    }
    Ok(())
}

/// Whether a row joins one of these trees.
fn joins_one_of(row: &NewRow, trees: &HashSet<TaskId>) -> bool {
    match row.task.tree.as_deref() {
        Some(RowTree::Joins(tree)) => trees.contains(tree),
        _ => false,
    }
}

/// Those of the new rows that are in sequences, each once, in the order of the call.
fn in_sequences<'a>(rows: &[&'a NewRow], new: &[&NewRow]) -> Vec<&'a NewRow> {
    let with_sequence = new.iter().filter(|row| row.task.sequence.is_some());
    let mut ids: HashSet<TaskId> = with_sequence.map(|row| row.task.id).collect();
    let mut sequenced = Vec::with_capacity(ids.len());
    if !ids.is_empty() {
        sequenced.extend(rows.iter().filter(|row| ids.remove(&row.task.id)).copied());
    }
    sequenced
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
        Some(owner) if owner.fresh => Inserted::New,
        _ if !row.task.has_key() => Inserted::Repeated { id: row.task.id },
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
    match session.recent(&keys_of(candidates)) {
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
    if insert_rows(session, &new, batch).await? < new.len() as u64 {
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
        .filter(|row| row.task.has_key())
        .map(|row| (row.task.key_hash, row.task.id))
        .collect();
    if !keys.is_empty() {
        session.take_keys(&keys).await?;
    }
    let mut owners: HashMap<KeyHash, Owner> = known
        .into_iter()
        .map(|(hash, known)| (hash, known.into()))
        .collect();
    owners.extend(
        new.iter()
            .map(|row| (row.task.key_hash, Owner::fresh(row.task.id))),
    );
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
    if candidates.is_empty() {
        return Ok(HashMap::new());
    }
    let mut old = HashMap::new();
    if old_keys.are_many() {
        old = removed(session, &keys_of(candidates), "").await?;
    }
    let rest: Vec<&NewRow> = candidates
        .iter()
        .filter(|row| !old.contains_key(&row.task.key_hash))
        .copied()
        .collect();
    insert_rows(session, &rest, batch).await?;
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
    let taken = removed(session, &keys_of(&fresh), S::FOR_SHARE).await?;
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

/// The tasks that own the keys of these rows, which are not to be stored.
async fn known_owners<S: Session>(
    session: &mut S,
    rows: &[&NewRow],
    batch: Turn,
) -> Result<HashMap<KeyHash, Owner>> {
    if rows.is_empty() {
        return Ok(HashMap::new());
    }
    let keys = keys_of(rows);
    let mut known: HashMap<KeyHash, Owner> = HashMap::new();
    let removed = match session.recent(&keys) {
        Some(recent) => owners_by_memory(session, recent).await?,
        None => {
            known = owners(session, &keys, batch).await?;
            removed(session, &keys, "").await?
        }
    };
    for (hash, owner) in removed {
        known.entry(hash).or_insert(owner.into());
    }
    let without_key: HashMap<TaskId, KeyHash> = rows
        .iter()
        .filter(|row| !row.task.has_key())
        .map(|row| (row.task.id, row.task.key_hash))
        .collect();
    let ids: Vec<TaskId> = without_key.keys().copied().collect();
    for ids in lists(&ids) {
        let stored = Statement::new("SELECT id, status FROM tasks WHERE id IN ").list(ids);
        for (id, number) in session.fetch::<(Vec<u8>, i64)>(stored).await? {
            let id = task_id(&id)?;
            if let Some(hash) = without_key.get(&id) {
                let status = status(number)?;
                let owner = Removed { id, status };
                known.insert(*hash, owner.into());
            }
        }
    }
    Ok(known)
}

fn key_hashes(rows: &[&NewRow]) -> Vec<KeyHash> {
    rows.iter().map(|row| row.task.key_hash).collect()
}

/// The hashes of those rows that have keys.
fn keys_of(rows: &[&NewRow]) -> Vec<KeyHash> {
    rows.iter()
        .filter(|row| row.task.has_key())
        .map(|row| row.task.key_hash)
        .collect()
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
