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
    calls::{ANSWER_WITHIN, committed, index, of_its_leader, watermarks},
    events::ClientEvents,
};
use crate::{
    bus::{Keep, Topic},
    model::millis,
};

/// For each partition with records to delete: the first offset to keep, and the number of records
/// to delete. Blocks.
pub(super) fn cuts(
    observer: &BaseConsumer<ClientEvents>,
    topic: Topic,
    name: &str,
    partitions: u32,
    keep: Keep,
) -> Result<Vec<(u32, i64, u64)>, KafkaError> {
    // Fetch the extents first: if all records are too old, everything up to this end is deleted,
    // and records published since then stay.
    let extents = (0..partitions).map(|partition| watermarks(observer.client(), name, partition));
    let extents = extents.collect::<Result<Vec<_>, _>>()?;
    let old = places_of_age(observer, name, partitions, keep)?;
    let committed = committed(observer, name, 0..partitions)?;
    let mut cuts = Vec::new();
    for (((partition, committed), old), (low, high)) in committed.into_iter().zip(old).zip(extents)
    {
        let too_many = high.saturating_sub(i64::try_from(keep.records).unwrap_or(i64::MAX));
        let cut = old.unwrap_or(high).max(too_many);
        // A committed offset beyond the end belongs to a deleted topic of the same name: no record
        // of this one counts as read.
        let committed = if committed > high { low } else { committed };
        let cut = if topic.is_read() {
            cut.min(committed)
        } else {
            cut
        };
        if let Ok(count @ 1..) = u64::try_from(cut - low) {
            cuts.push((partition, cut, count));
        }
    }
    Ok(cuts)
}

/// The offset of the first record that is not too old, for each partition. `None` if all records
/// are too old.
fn places_of_age(
    observer: &BaseConsumer<ClientEvents>,
    name: &str,
    partitions: u32,
    keep: Keep,
) -> Result<Vec<Option<i64>>, KafkaError> {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let since = millis(now.saturating_sub(keep.age));
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

pub(super) async fn delete(
    admin: &AdminClient<ClientEvents>,
    name: &str,
    cuts: &[(u32, i64, u64)],
) -> Result<(), KafkaError> {
    let mut list = TopicPartitionList::new();
    for (partition, cut, _count) in cuts {
        list.add_partition_offset(name, index(*partition), Position::Offset(*cut))?;
    }
    let options = AdminOptions::new()
        .request_timeout(Some(ANSWER_WITHIN))
        .operation_timeout(Some(ANSWER_WITHIN));
    let deleted = admin.delete_records(&list, &options).await?;
    deleted
        .elements()
        .iter()
        .try_for_each(|element| element.error())
}
