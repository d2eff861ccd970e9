//! Keys that a filter knows.

use std::collections::{BTreeMap, HashMap};

use crate::{
    config::{Dedup, Queues},
    dedup::{self, Filter, bits},
    model::{KeyHash, QueueName, StoredStatus, TaskId, TaskRow},
    store::Store,
};

/// The task that has a key.
pub(super) type Owner = (TaskId, StoredStatus);

/// Per row, the task that has its key, where a filter knows the key. SQL decides about the others.
pub(super) async fn owners(
    filter: &Filter,
    store: &dyn Store,
    queues: &Queues,
    rows: &[&TaskRow],
) -> Vec<Option<Owner>> {
    let (numbers, hashes): (Vec<usize>, Vec<usize>) =
        (0..rows.len()).partition(|place| has_bitmap(queues, &rows[*place].queue));
    let mut owners = vec![None; rows.len()];
    let keys: Vec<_> = hashes.iter().map(|place| (rows[*place].queue.clone(), rows[*place].key_hash)).collect();
    if !keys.is_empty() {
        let seen = filter.seen(&keys).await.unwrap_or_else(|error| {
            tracing::debug!("the filter does not answer, SQL decides: {error}");
            vec![None; keys.len()]
        });
        for (place, id) in hashes.into_iter().zip(seen) {
            // The keys of dead tasks leave this filter.
            owners[place] = id.map(|id| (id, StoredStatus::Unfinished));
        }
    }
    if !numbers.is_empty() {
        let known = owners_of_numbers(filter, store, rows, &numbers).await;
        numbers.into_iter().for_each(|place| owners[place] = known.get(&rows[place].key_hash).copied());
    }
    owners
}

/// SQL's answer about the numbers whose bits are set. A bit may be wrong, and names no task.
async fn owners_of_numbers(
    filter: &Filter,
    store: &dyn Store,
    rows: &[&TaskRow],
    places: &[usize],
) -> HashMap<KeyHash, Owner> {
    let mut seen = Vec::new();
    for (queue, numbered) in by_queue(places.iter().map(|place| rows[*place])) {
        let numbers: Vec<u64> = numbered.iter().map(|(number, _)| *number).collect();
        match filter.seen_numbers(queue, &numbers).await {
            Ok(bits) => seen.extend(numbered.iter().zip(bits).filter(|(_, bit)| *bit).map(|((_, hash), _)| *hash)),
            Err(error) => tracing::debug!("the filter does not answer, SQL decides: {error}"),
        }
    }
    if seen.is_empty() {
        return HashMap::new();
    }
    match store.key_owners(&seen).await {
        Ok(owners) => owners.into_iter().map(|(hash, id, status)| (hash, (id, status))).collect(),
        Err(error) => {
            tracing::debug!("SQL does not say which tasks have {} keys: {error}", seen.len());
            HashMap::new()
        }
    }
}

/// True if the queue's filter is a bitmap.
pub(super) fn has_bitmap(queues: &Queues, queue: &QueueName) -> bool {
    queues.get(queue).dedup == Dedup::Bitmap
}

/// Marks the numbers among the keys of stored tasks.
pub(super) async fn mark_numbers(filter: &Filter, queues: &Queues, rows: &[&TaskRow]) -> dedup::Result<()> {
    for (queue, numbered) in by_queue(rows.iter().copied()) {
        let numbers: Vec<u64> = numbered.into_iter().map(|(number, _)| number).collect();
        filter.mark_numbers(queue, &numbers, queues.get(queue).filter_keys).await?;
    }
    Ok(())
}

/// The rows whose keys are numbers.
fn by_queue<'r>(rows: impl Iterator<Item = &'r TaskRow>) -> BTreeMap<&'r QueueName, Vec<(u64, KeyHash)>> {
    let mut numbers: BTreeMap<&QueueName, Vec<(u64, KeyHash)>> = BTreeMap::new();
    for row in rows {
        if let Some(number) = bits::number(&row.key) {
            numbers.entry(&row.queue).or_default().push((number, row.key_hash));
        }
    }
    numbers
}
