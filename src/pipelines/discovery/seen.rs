//! Keys that a filter knows: their tasks need no row in SQL.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    sync::atomic::{AtomicU32, Ordering},
};

use super::room::discovered;
use crate::{
    config::{Dedup, Queues},
    dedup::{Filter, bits},
    model::{KeyHash, QueueName, StoredStatus, TaskId, TaskRow},
    pipelines::context::Context,
    store::{Inserted, Settled, Settlement, Tasks},
};

/// Up to this many tasks skip the filter while keys are new: SQL decides about them as fast.
const SMALL: usize = 4;
/// The number of transactions that ask the filter after a duplicate was seen.
const ASK_AFTER_DUPLICATE: u32 = 100;

/// The task that has a key.
pub(super) type Owner = (TaskId, StoredStatus);

/// Decides when few tasks ask the filter: that saves SQL work if keys are often repeated.
#[derive(Default)]
pub(super) struct Asking {
    transactions_left: AtomicU32,
}

impl Asking {
    /// Returns for each row the task that has its key, if a filter knows the key. SQL decides about
    /// the others.
    pub(super) async fn owners(&self, context: &Context, rows: &[&TaskRow]) -> Vec<Option<Owner>> {
        let with_keys = rows.iter().filter(|row| row.has_key()).count();
        match with_keys > 0 && self.is_about(with_keys) {
            true => {
                owners(
                    &context.filter,
                    &*context.store,
                    &context.settings.queues,
                    rows,
                )
                .await
            }
            false => vec![None; rows.len()],
        }
    }

    fn is_about(&self, rows: usize) -> bool {
        self.transactions_left.load(Ordering::Relaxed) > 0 || rows > SMALL
    }

    /// Records how many tasks of a transaction were duplicates.
    pub(super) fn note(&self, duplicates: usize) {
        let left = match duplicates {
            0 => self
                .transactions_left
                .load(Ordering::Relaxed)
                .saturating_sub(1),
            _ => ASK_AFTER_DUPLICATE,
        };
        self.transactions_left.store(left, Ordering::Relaxed);
    }
}

/// Returns the answers to some rows, in order. `inserted` are those to the rows whose keys no
/// filter knows.
pub(super) fn answers(
    seen: &[Option<Owner>],
    inserted: impl IntoIterator<Item = Inserted>,
) -> Vec<Inserted> {
    let mut inserted = inserted.into_iter();
    let answer = |seen: &Option<Owner>| match seen {
        Some((id, status)) => Some(Inserted::Duplicate {
            id: *id,
            status: *status,
        }),
        None => inserted.next(),
    };
    seen.iter().filter_map(answer).collect()
}

/// Returns the reports without the discovered tasks whose keys the filter knows. `seen` has an
/// entry for each of the tasks.
pub(super) fn without<'r>(
    reports: &'r [Settlement],
    seen: &[Option<Owner>],
) -> Cow<'r, [Settlement]> {
    if seen.iter().all(Option::is_none) {
        return Cow::Borrowed(reports);
    }
    let mut reports = reports.to_vec();
    let mut seen = seen.iter();
    for report in &mut reports {
        if let Settlement::Completed { discovered, .. } = report {
            discovered.retain(|_| seen.next().is_none_or(Option::is_none));
        }
    }
    Cow::Owned(reports)
}

/// Adds the answers to the tasks that were left out, except for a report that changed nothing.
pub(super) fn add_answers(
    reports: &[Settlement],
    mut seen: &[Option<Owner>],
    settled: &mut [Settled],
) {
    for (report, settled) in reports.iter().zip(settled) {
        let (of_report, rest) = seen.split_at(discovered(report).len());
        seen = rest;
        if !settled.repeated && !settled.unknown {
            settled.discovered = answers(of_report, settled.discovered.drain(..));
        }
    }
}

async fn owners(
    filter: &Filter,
    store: &dyn Tasks,
    queues: &Queues,
    rows: &[&TaskRow],
) -> Vec<Option<Owner>> {
    let (numbers, hashes): (Vec<usize>, Vec<usize>) = (0..rows.len())
        .filter(|place| rows[*place].has_key())
        .partition(|place| has_bitmap(queues, &rows[*place].queue));
    let mut owners = vec![None; rows.len()];
    let keys: Vec<_> = hashes
        .iter()
        .map(|place| (rows[*place].queue.clone(), rows[*place].key_hash))
        .collect();
    if !keys.is_empty() {
        let seen = filter.seen(&keys).await.unwrap_or_else(|error| {
            tracing::debug!("the filter does not answer, SQL decides: {error}");
            vec![None; keys.len()]
        });
        for (place, id) in hashes.into_iter().zip(seen) {
            // Treated as unfinished: the filter does not know the status, but it forgets the keys
            // of dead tasks.
            owners[place] = id.map(|id| (id, StoredStatus::Unfinished));
        }
    }
    if !numbers.is_empty() {
        let known = owners_of_numbers(filter, store, rows, &numbers).await;
        numbers
            .into_iter()
            .for_each(|place| owners[place] = known.get(&rows[place].key_hash).copied());
    }
    for (owner, row) in owners.iter_mut().zip(rows) {
        // A report that is delivered again brings the same tasks as before. They are not
        // duplicates, and SQL may not have them yet.
        owner.take_if(|(id, _)| *id == row.id);
    }
    owners
}

/// Asks SQL about the numbers whose bits are set, because a bit may be wrong and does not say which
/// task has the number.
async fn owners_of_numbers(
    filter: &Filter,
    store: &dyn Tasks,
    rows: &[&TaskRow],
    places: &[usize],
) -> HashMap<KeyHash, Owner> {
    let mut seen = Vec::new();
    for (queue, numbered) in by_queue(places.iter().map(|place| rows[*place])) {
        let numbers: Vec<u64> = numbered.iter().map(|(number, _)| *number).collect();
        match filter.seen_numbers(queue, &numbers).await {
            Ok(bits) => seen.extend(
                numbered
                    .iter()
                    .zip(bits)
                    .filter(|(_, bit)| *bit)
                    .map(|((_, hash), _)| *hash),
            ),
            Err(error) => tracing::debug!("the filter does not answer, SQL decides: {error}"),
        }
    }
    if seen.is_empty() {
        return HashMap::new();
    }
    match store.key_owners(&seen).await {
        Ok(owners) => owners
            .into_iter()
            .map(|(hash, id, status)| (hash, (id, status)))
            .collect(),
        Err(error) => {
            tracing::debug!(
                "SQL does not say which tasks have {} keys: {error}",
                seen.len()
            );
            HashMap::new()
        }
    }
}

/// True if the queue's filter is a bitmap.
pub(super) fn has_bitmap(queues: &Queues, queue: &QueueName) -> bool {
    queues.get(queue).dedup == Dedup::Bitmap
}

/// Groups the rows whose keys are numbers by queue.
fn by_queue<'r>(
    rows: impl Iterator<Item = &'r TaskRow>,
) -> BTreeMap<&'r QueueName, Vec<(u64, KeyHash)>> {
    let mut numbers: BTreeMap<&QueueName, Vec<(u64, KeyHash)>> = BTreeMap::new();
    for row in rows {
        if let Some(number) = bits::number(&row.key) {
            numbers
                .entry(&row.queue)
                .or_default()
                .push((number, row.key_hash));
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_tasks_ask_the_filter_for_a_while_after_a_duplicate() {
        let asking = Asking::default();
        assert!(!asking.is_about(SMALL) && asking.is_about(SMALL + 1));
        asking.note(0);
        assert!(!asking.is_about(1));
        asking.note(1);
        for _ in 0..ASK_AFTER_DUPLICATE {
            assert!(asking.is_about(1));
            asking.note(0);
        }
        assert!(!asking.is_about(1));
    }
}
