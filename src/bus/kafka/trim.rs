//! Deletion of old records. taskd does it, because the broker does not know which records have been
//! read.

use std::time::{SystemTime, UNIX_EPOCH};

use rdkafka::{
    Offset as Position, TopicPartitionList,
    admin::{AdminClient, AdminOptions},
    consumer::{BaseConsumer, Consumer},
    error::KafkaError,
};

use super::{
    calls::{ANSWER_WITHIN, index, of_its_leader, watermarks},
    events::ClientEvents,
};
use crate::{bus::Keep, model::millis};

/// For each partition with records to delete: the first offset to keep, and the number of records
/// to delete. With committed offsets, the records after them stay. Blocks.
pub(super) fn cuts(
    observer: &BaseConsumer<ClientEvents>,
    name: &str,
    partitions: u32,
    keep: Keep,
    committed: Option<Vec<(u32, i64)>>,
) -> Result<Vec<(u32, i64, u64)>, KafkaError> {
    // Fetch the extents first: if all records are too old, everything up to this end is deleted,
    // and records published since then stay.
    let extents = (0..partitions).map(|partition| watermarks(observer.client(), name, partition));
    let extents = extents.collect::<Result<Vec<_>, _>>()?;
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let since = millis(now.saturating_sub(keep.age));
    let old = places_at(observer, name, partitions, since)?;
    let mut cuts = Vec::new();
    for ((partition, old), (low, high)) in (0..).zip(old).zip(extents) {
        let too_many = high.saturating_sub(i64::try_from(keep.records).unwrap_or(i64::MAX));
        let cut = old.unwrap_or(high).max(too_many);
        let read = committed
            .as_ref()
            .map(|committed| committed[partition as usize].1);
        // A committed offset beyond the end belongs to a deleted topic of the same name: no record
        // of this one counts as read.
        let read = read.map(|read| if read > high { low } else { read });
        let cut = cut.min(read.unwrap_or(high));
        if let Ok(count @ 1..) = u64::try_from(cut - low) {
            cuts.push((partition, cut, count));
        }
    }
    Ok(cuts)
}

/// The offset of the first record since a time in unix ms, for each partition. `None` if all
/// records are older. Blocks.
pub(super) fn places_at(
    observer: &BaseConsumer<ClientEvents>,
    name: &str,
    partitions: u32,
    since: i64,
) -> Result<Vec<Option<i64>>, KafkaError> {
    let mut list = TopicPartitionList::new();
    for partition in 0..partitions {
        // This call takes a timestamp in place of the offset.
        list.add_partition_offset(name, index(partition), Position::Offset(since))?;
    }
    let answer = of_its_leader(|| observer.offsets_for_times(list.clone(), ANSWER_WITHIN))?;
    let place = |partition| match answer.find_partition(name, index(partition)) {
        Some(found) => found.error().map(|()| match found.offset() {
            Position::Offset(place) => Some(place),
            _ => None,
        }),
        None => Ok(Some(0)),
    };
    (0..partitions).map(place).collect()
}

/// Deletes the records before the cuts. Returns how many.
pub(super) async fn delete(
    admin: &AdminClient<ClientEvents>,
    name: &str,
    cuts: &[(u32, i64, u64)],
) -> Result<u64, KafkaError> {
    if cuts.is_empty() {
        return Ok(0);
    }
    let mut list = TopicPartitionList::new();
    for (partition, cut, _count) in cuts {
        list.add_partition_offset(name, index(*partition), Position::Offset(*cut))?;
    }
    let options = AdminOptions::new()
        .request_timeout(Some(ANSWER_WITHIN))
        .operation_timeout(Some(ANSWER_WITHIN));
    let deleted = admin.delete_records(&list, &options).await?;
    for element in deleted.elements() {
        element.error()?;
    }
    Ok(cuts.iter().map(|(_, _, count)| count).sum())
}
