//! The member's view of its group: which partitions it owns, and which offsets it has processed
//! there.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use parking_lot::{Mutex, MutexGuard};
use rdkafka::{
    ClientContext, Offset as Position, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol},
    error::KafkaError,
    types::RDKafkaRespErr,
};

use super::{calls::index, events::ClientEvents};

/// The member's view of its group.
///
/// The view changes in [`Partitions::assigned`] and [`Partitions::revoked`]. librdkafka calls them
/// only while the reader polls.
pub(super) struct Group {
    events: ClientEvents,
    partitions: Mutex<Partitions>,
}

#[derive(Default)]
pub(super) struct Partitions {
    pub(super) owned: BTreeSet<u32>,
    /// How often the group has assigned or revoked each partition.
    pub(super) tenures: HashMap<u32, u64>,
    /// Partitions revoked since the reader last checked.
    pub(super) lost: BTreeSet<u32>,
    /// Where to start reading partitions that are not assigned yet, instead of at the committed
    /// offset.
    pub(super) begin_at: HashMap<u32, Position>,
    /// The offset after the last processed record, for each owned partition where it is not
    /// committed yet.
    pub(super) done: BTreeMap<u32, i64>,
    /// The group's committed offset, for each owned partition for which the member has fetched or
    /// committed it.
    committed: HashMap<u32, i64>,
    /// The offset after the last received record, for each owned partition that has received but
    /// unprocessed records.
    in_hand: HashMap<u32, i64>,
}

impl Group {
    pub(super) fn new(events: ClientEvents) -> Self {
        Self {
            events,
            partitions: Mutex::default(),
        }
    }

    pub(super) fn partitions(&self) -> MutexGuard<'_, Partitions> {
        self.partitions.lock()
    }
}

impl Partitions {
    fn assigned(&mut self, list: &mut TopicPartitionList) {
        for partition in numbers(list) {
            self.owned.insert(partition);
            *self.tenures.entry(partition).or_default() += 1;
            let topic = list
                .elements()
                .first()
                .map(|element| element.topic().to_owned())
                .unwrap_or_default();
            let Some(place) = self.begin_at.remove(&partition) else {
                continue;
            };
            if let Err(error) = list.set_partition_offset(&topic, index(partition), place) {
                tracing::error!(
                    "partition {partition} of {topic} begins at what is committed: {error}"
                );
            }
        }
    }

    /// Removes the revoked partitions. Returns their processed offsets that are not committed yet.
    fn revoked(&mut self, list: &TopicPartitionList) -> BTreeMap<u32, i64> {
        let mut done = BTreeMap::new();
        for partition in numbers(list) {
            self.owned.remove(&partition);
            self.lost.insert(partition);
            *self.tenures.entry(partition).or_default() += 1;
            let noted = self.done.remove_entry(&partition);
            let committed = self.committed.remove(&partition);
            self.in_hand.remove(&partition);
            // Left out if the committed offset is unknown: the offset may date from before an
            // earlier revocation, and other members may have committed a much later one since.
            done.extend(noted.filter(|_| committed.is_some()));
        }
        done
    }

    /// Remembers the offsets after processed records, to be committed.
    ///
    /// An offset at or before the committed one means that the reader has sought back, or that the
    /// topic was recreated and assigns its offsets again. The next commit then asks the broker
    /// which offset is committed.
    pub(super) fn note(&mut self, next: BTreeMap<u32, i64>) {
        for (partition, next) in next
            .into_iter()
            .filter(|(partition, _)| self.owned.contains(partition))
        {
            if self
                .committed
                .get(&partition)
                .is_some_and(|committed| next <= *committed)
            {
                self.committed.remove(&partition);
            }
            if self.in_hand.get(&partition) == Some(&next) {
                self.in_hand.remove(&partition);
            }
            let noted = self.done.entry(partition).or_insert(next);
            *noted = next.max(*noted);
        }
    }

    /// Remembers that a record was received. `next` is the offset after it.
    pub(super) fn received(&mut self, partition: u32, next: i64) {
        if self.owned.contains(&partition) {
            self.in_hand.insert(partition, next);
        }
    }

    /// Forgets received records of a partition that is now read from another offset.
    pub(super) fn sought(&mut self, partition: u32) {
        self.in_hand.remove(&partition);
    }

    /// Remembers librdkafka's read positions for partitions without received but unprocessed
    /// records.
    ///
    /// Such a position is beyond the last processed record if a transaction ended there: its
    /// marker, and its records if it was aborted, are never delivered.
    pub(super) fn note_positions(&mut self, positions: &TopicPartitionList) {
        for (partition, next) in numbered(positions) {
            let Position::Offset(next) = next else {
                continue;
            };
            let is_news = self
                .committed
                .get(&partition)
                .is_none_or(|committed| *committed < next);
            if is_news && self.owned.contains(&partition) && !self.in_hand.contains_key(&partition)
            {
                let noted = self.done.entry(partition).or_insert(next);
                *noted = next.max(*noted);
            }
        }
    }

    /// The partitions that have offsets to commit but whose committed offset is unknown.
    pub(super) fn unknown(&self) -> Vec<u32> {
        self.done
            .keys()
            .copied()
            .filter(|partition| !self.committed.contains_key(partition))
            .collect()
    }

    pub(super) fn committed_to(&mut self, next: impl IntoIterator<Item = (u32, i64)>) {
        self.committed.extend(next);
        let committed = &self.committed;
        self.done.retain(|partition, next| {
            committed
                .get(partition)
                .is_none_or(|committed| *committed < *next)
        });
    }
}

/// Commits processed offsets before the partitions are given up, so that the next reader does not
/// repeat the work.
///
/// Nothing awaits this commit, because librdkafka cannot give up a partition while a commit is
/// running. The commit comes too late if the group has already assigned the partitions to another
/// member.
fn hand_over(consumer: &BaseConsumer<Group>, list: &TopicPartitionList, done: &BTreeMap<u32, i64>) {
    if done.is_empty() || consumer.assignment_lost() {
        return;
    }
    let topic = list
        .elements()
        .first()
        .map(|element| element.topic().to_owned())
        .unwrap_or_default();
    let sent = places(&topic, done).and_then(|list| consumer.commit(&list, CommitMode::Async));
    if let Err(error) = sent {
        tracing::debug!(
            "kafka: what was done in {topic} is not committed, and will be done again: {error}"
        );
    }
}

/// The partitions of the list.
fn numbers(list: &TopicPartitionList) -> Vec<u32> {
    numbered(list)
        .into_iter()
        .map(|(partition, _)| partition)
        .collect()
}

/// The partitions of the list, each with its offset.
fn numbered(list: &TopicPartitionList) -> Vec<(u32, Position)> {
    let number = |partition| u32::try_from(partition).ok();
    list.elements()
        .iter()
        .filter_map(|element| Some((number(element.partition())?, element.offset())))
        .collect()
}

impl ClientContext for Group {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.events.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.events.error(error, reason);
    }
}

impl ConsumerContext for Group {
    fn rebalance(
        &self,
        consumer: &BaseConsumer<Self>,
        event: RDKafkaRespErr,
        list: &mut TopicPartitionList,
    ) {
        let cooperative = matches!(
            consumer.rebalance_protocol(),
            RebalanceProtocol::Cooperative
        );
        let followed = match event {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => {
                self.partitions().assigned(list);
                if cooperative {
                    consumer.incremental_assign(list)
                } else {
                    consumer.assign(list)
                }
            }
            _ => {
                let done = self.partitions().revoked(list);
                hand_over(consumer, list, &done);
                if cooperative {
                    consumer.incremental_unassign(list)
                } else {
                    consumer.unassign()
                }
            }
        };
        if let Err(error) = followed {
            tracing::error!("the kafka consumer did not follow its group: {error}");
        }
    }
}

/// Converts the offsets to a librdkafka list.
pub(super) fn places(
    topic: &str,
    next: &BTreeMap<u32, i64>,
) -> Result<TopicPartitionList, KafkaError> {
    let mut list = TopicPartitionList::new();
    for (partition, next) in next {
        list.add_partition_offset(topic, index(*partition), Position::Offset(*next))?;
    }
    Ok(list)
}
