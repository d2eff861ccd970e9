//! Deletes what nobody needs any more. The broker does not do it by itself: it does not know what was read.

use std::time::{SystemTime, UNIX_EPOCH};

use rdkafka::{
    Offset as Position, TopicPartitionList,
    admin::{AdminClient, AdminOptions},
    consumer::{BaseConsumer, Consumer},
    error::KafkaError,
};

use super::{ANSWER_WITHIN, client::Voice, index};
use crate::bus::{Keep, Topic};

/// By partition that has something to delete: the first place that stays, and how many go. Blocks.
pub(super) fn cuts(
    observer: &BaseConsumer<Voice>,
    topic: Topic,
    name: &str,
    partitions: u32,
    keep: Keep,
) -> Result<Vec<(u32, i64, u64)>, KafkaError> {
    // Asked in this order: where all records are too old, the cut is the end as it was before that was known. What came meanwhile stays.
    let extents = (0..partitions).map(|partition| super::watermarks(observer.client(), name, partition));
    let extents = extents.collect::<Result<Vec<_>, _>>()?;
    let old = places_of_age(observer, name, partitions, keep)?;
    let committed = super::committed(observer, name, 0..partitions)?;
    let mut cuts = Vec::new();
    for (((partition, committed), old), (low, high)) in committed.into_iter().zip(old).zip(extents) {
        let too_many = high.saturating_sub(i64::try_from(keep.records).unwrap_or(i64::MAX));
        let cut = old.unwrap_or(high).max(too_many);
        // A committed place beyond the end belongs to a deleted topic: nothing of this one counts as read.
        let committed = if committed > high { low } else { committed };
        let cut = if topic.is_read() { cut.min(committed) } else { cut };
        if let Ok(count @ 1..) = u64::try_from(cut - low) {
            cuts.push((partition, cut, count));
        }
    }
    Ok(cuts)
}

/// By partition, where the first record stands that is not too old; `None` when all are.
fn places_of_age(
    observer: &BaseConsumer<Voice>,
    name: &str,
    partitions: u32,
    keep: Keep,
) -> Result<Vec<Option<i64>>, KafkaError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since = i64::try_from(now.saturating_sub(keep.age).as_millis()).unwrap_or(i64::MAX);
    let mut list = TopicPartitionList::new();
    for partition in 0..partitions {
        // Here a place is a time.
        list.add_partition_offset(name, index(partition), Position::Offset(since))?;
    }
    let answer = super::of_its_leader(|| observer.offsets_for_times(list.clone(), ANSWER_WITHIN))?;
    let place = |partition| match answer.find_partition(name, index(partition)) {
        Some(found) => found.error().map(|()| match found.offset() {
            Position::Offset(place) => Some(place),
            _ => None,
        }),
        None => Ok(Some(0)),
    };
    (0..partitions).map(place).collect()
}

pub(super) async fn delete(admin: &AdminClient<Voice>, name: &str, cuts: &[(u32, i64, u64)]) -> Result<(), KafkaError> {
    let mut list = TopicPartitionList::new();
    for (partition, cut, _count) in cuts {
        list.add_partition_offset(name, index(*partition), Position::Offset(*cut))?;
    }
    let options = AdminOptions::new().request_timeout(Some(ANSWER_WITHIN)).operation_timeout(Some(ANSWER_WITHIN));
    let deleted = admin.delete_records(&list, &options).await?;
    deleted.elements().iter().try_for_each(|element| element.error())
}
