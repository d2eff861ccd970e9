//! A reader, which is a member of the topic's consumer group.
//!
//! The group assigns and revokes partitions, and reports it while the reader polls. After a
//! partition is revoked, the reader neither returns nor commits its records: the next owner begins
//! at the committed offset, which must not move back. Records that were returned before the
//! revocation may be processed by both owners; in that case only the caller's fencing prevents
//! duplicates.
//!
//! A commit that fails during a rebalance is not an error. The reader keeps the processed offsets
//! and commits them with the next commit, while it waits for records, when it gives up the
//! partition, or when it leaves. A member that the group has expelled rejoins by itself.
//!
//! A transaction of another program leaves offsets that are never delivered: its marker, and its
//! records if it was aborted. Once a second the reader commits past them if it has processed all
//! records before them. Otherwise a topic that ends with a transaction would never count as fully
//! read.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use rdkafka::{
    Message as _, Offset as Position, TopicPartitionList,
    consumer::{CommitMode, Consumer, StreamConsumer},
    error::{KafkaError, RDKafkaErrorCode},
    message::BorrowedMessage,
};

use super::{
    calls::{ANSWER_WITHIN, Failure, blocking, committed, index, offset, watermarks},
    configs::{ClientConfigs, create},
    events::ClientEvents,
    group::{Group, places},
};
use crate::{
    bus::{Error, Message, Reader, Result, Topic},
    model::Offset,
};

pub(super) struct Member {
    topic: Topic,
    name: String,
    /// `None` only while the member is being dropped.
    consumer: Option<Arc<StreamConsumer<Group>>>,
    buffer: VecDeque<Message>,
    /// Partitions that have been paused since the last read. librdkafka keeps a partition paused
    /// even while another member owns it.
    paused: BTreeSet<u32>,
    /// A commit in flight. It is kept here because a commit whose future was dropped could still
    /// reach the broker after the reader has given up a partition.
    committing: Option<Committing>,
    /// When to retry a commit that failed during a rebalance, if no records arrive.
    commit_again_at: tokio::time::Instant,
    /// When to check next for offsets that are never delivered.
    look_at: tokio::time::Instant,
}

type Committing = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

const COMMIT_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// How often to check for offsets that are never delivered. The check asks only librdkafka, not the
/// brokers. `enable.partition.eof` would instead cost an event each time that a reader reaches the
/// end, which is after almost every record.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl Member {
    pub(super) fn join(
        configs: &ClientConfigs,
        events: ClientEvents,
        topic: Topic,
    ) -> Result<Self> {
        let group = Group::new(events);
        let consumer: StreamConsumer<Group> =
            create(&configs.member(topic), group).map_err(Error::read(topic))?;
        let name = configs.topic(topic);
        consumer.subscribe(&[&name]).map_err(Error::read(topic))?;
        let consumer = Some(Arc::new(consumer));
        let now = tokio::time::Instant::now();
        let commit_again_at = now;
        let look_at = now + LOOK_EVERY;
        Ok(Self {
            topic,
            name,
            consumer,
            buffer: Default::default(),
            paused: Default::default(),
            committing: Default::default(),
            commit_again_at,
            look_at,
        })
    }

    fn consumer(&self) -> Arc<StreamConsumer<Group>> {
        self.consumer.clone().expect("is there until the drop")
    }

    /// Waits for a record, then takes those that are available, until the buffer holds `max`.
    ///
    /// Cancel safe: a record taken from the stream is in the buffer before the next await.
    async fn receive(&mut self, max: usize) -> Result<()> {
        let consumer = self.consumer();
        let mut stream = consumer.stream();
        while self.buffer.is_empty() {
            let is_committed = consumer.context().partitions().done.is_empty();
            let until = if is_committed {
                self.look_at
            } else {
                self.look_at.min(self.commit_again_at)
            };
            let Ok(received) = tokio::time::timeout_at(until, stream.next()).await else {
                self.commit_what_is_done().await?;
                continue;
            };
            let Some(received) = received else {
                return Ok(());
            };
            self.take_in(&consumer, received)?;
        }
        while self.buffer.len() < max {
            let Some(Some(received)) = stream.next().now_or_never() else {
                break;
            };
            self.take_in(&consumer, received)?;
        }
        self.forget_lost_partitions(&consumer);
        Ok(())
    }

    fn take_in(
        &mut self,
        consumer: &StreamConsumer<Group>,
        received: Result<BorrowedMessage<'_>, KafkaError>,
    ) -> Result<()> {
        self.forget_lost_partitions(consumer);
        match received {
            Ok(record) => {
                let Some(message) = message(&record) else {
                    return Ok(());
                };
                consumer
                    .context()
                    .partitions()
                    .received(message.partition, record.offset().saturating_add(1));
                self.buffer.push_back(message);
            }
            Err(error) if is_passing(&error) => {
                tracing::debug!(topic = %self.topic, "kafka: {error}")
            }
            Err(error) => return Err(Error::read(self.topic)(error)),
        }
        Ok(())
    }

    /// Pauses the partitions that the member owns at present.
    fn pause(&mut self, consumer: &StreamConsumer<Group>) -> Result<(), KafkaError> {
        let owned = consumer.context().partitions().owned.clone();
        let running: Vec<u32> = owned.difference(&self.paused).copied().collect();
        if !running.is_empty() {
            consumer.pause(&self.list(&running))?;
            self.paused.extend(running);
        }
        Ok(())
    }

    fn resume(&mut self, consumer: &StreamConsumer<Group>) -> Result<(), KafkaError> {
        if !self.paused.is_empty() {
            consumer.resume(&self.list(&self.paused))?;
            self.paused.clear();
        }
        Ok(())
    }

    fn list<'a>(&self, partitions: impl IntoIterator<Item = &'a u32>) -> TopicPartitionList {
        let mut list = TopicPartitionList::new();
        for partition in partitions {
            list.add_partition(&self.name, index(*partition));
        }
        list
    }

    fn is_look_due(&self) -> bool {
        self.look_at <= tokio::time::Instant::now()
    }

    /// Commits the processed offsets of owned partitions. If the group is rebalancing, they are
    /// kept for the next commit. Once a second this also covers offsets that are never delivered.
    ///
    /// Cancel safe: the next call awaits the commit that is in flight. Until then nothing polls, so
    /// no partition is revoked.
    async fn commit_what_is_done(&mut self) -> Result<()> {
        let topic = self.topic;
        let consumer = self.consumer();
        let name = self.name.clone();
        let looks = self.is_look_due();
        let committing = match &mut self.committing {
            Some(committing) => committing,
            None if !looks && consumer.context().partitions().done.is_empty() => return Ok(()),
            None => {
                if looks {
                    self.look_at = tokio::time::Instant::now() + LOOK_EVERY;
                }
                self.committing
                    .insert(Box::pin(blocking(move || commit(&consumer, &name, looks))))
            }
        };
        let done = committing.await;
        self.committing = None;
        match done {
            Ok(()) => Ok(()),
            Err(Failure::Kafka(
                KafkaError::ConsumerCommit(code) | KafkaError::OffsetFetch(code),
            )) if is_rebalance(code) => {
                tracing::debug!(%topic, "kafka: the commit waits for the group: {code}");
                self.commit_again_at = tokio::time::Instant::now() + COMMIT_AGAIN_AFTER;
                Ok(())
            }
            Err(error) => Err(Error::commit(topic)(error)),
        }
    }

    fn forget_lost_partitions(&mut self, consumer: &StreamConsumer<Group>) {
        for partition in std::mem::take(&mut consumer.context().partitions().lost) {
            self.buffer.retain(|message| message.partition != partition);
        }
    }
}

pub(super) fn message(record: &BorrowedMessage<'_>) -> Option<Message> {
    let partition = u32::try_from(record.partition()).ok()?;
    let value = Bytes::copy_from_slice(record.payload().unwrap_or_default());
    Some(Message {
        partition,
        offset: offset(record.offset())?,
        value,
    })
}

/// True if librdkafka recovers from the error by itself, by reconnecting or by rejoining the group.
///
/// A member that waits for its brokers keeps its membership. A new member would have to wait until
/// the group expels the old one.
pub(super) fn is_passing(error: &KafkaError) -> bool {
    use RDKafkaErrorCode::{
        AllBrokersDown, BrokerTransportFailure, OperationTimedOut, PollExceeded, Resolve,
    };
    match error {
        KafkaError::MessageConsumption(code) => {
            let is_away = matches!(
                code,
                AllBrokersDown | BrokerTransportFailure | OperationTimedOut | Resolve
            );
            is_away || *code == PollExceeded || is_rebalance(*code)
        }
        _ => false,
    }
}

/// True if the group is rebalancing or has rebalanced, so that this member does not know its
/// partitions yet.
fn is_rebalance(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode::{IllegalGeneration, RebalanceInProgress, UnknownMemberId};
    matches!(
        code,
        RebalanceInProgress | IllegalGeneration | UnknownMemberId
    )
}

#[async_trait]
impl Reader for Member {
    async fn next(&mut self, max: usize) -> Result<Vec<Message>> {
        let max = max.max(1);
        let consumer = self.consumer();
        self.resume(&consumer).map_err(Error::read(self.topic))?;
        // A busy reader never waits long enough in `receive` for the check to run there.
        if self.committing.is_some() || self.is_look_due() {
            self.commit_what_is_done().await?;
        }
        // Records that arrived during `stay` may belong to a partition that has been revoked since.
        self.forget_lost_partitions(&consumer);
        // Repeats if the partitions of all received records were revoked in the meantime.
        while self.buffer.is_empty() {
            self.receive(max).await?;
        }
        Ok(self.buffer.drain(..max.min(self.buffer.len())).collect())
    }

    /// Records that were already being fetched go into the buffer.
    async fn stay(&mut self) -> Result<()> {
        let consumer = self.consumer();
        let until = tokio::time::Instant::now() + LOOK_EVERY;
        self.pause(&consumer).map_err(Error::read(self.topic))?;
        if self.committing.is_some() || self.is_look_due() {
            self.commit_what_is_done().await?;
        }
        if let Ok(Some(received)) = tokio::time::timeout_at(until, consumer.stream().next()).await {
            self.take_in(&consumer, received)?;
        }
        self.forget_lost_partitions(&consumer);
        Ok(())
    }

    async fn commit(&mut self, messages: &[Message]) -> Result<()> {
        let consumer = self.consumer();
        if self.committing.is_some() {
            self.commit_what_is_done().await?;
        }
        self.forget_lost_partitions(&consumer);
        consumer.context().partitions().note(next_places(messages));
        self.commit_what_is_done().await
    }

    fn tenure(&self, partition: u32) -> u64 {
        self.consumer()
            .context()
            .partitions()
            .tenures
            .get(&partition)
            .copied()
            .unwrap_or(0)
    }

    /// If the group has not assigned the partition yet, the offset is kept until it does.
    async fn seek(&mut self, partition: u32, after: Option<Offset>) -> Result<()> {
        let topic = self.topic;
        let consumer = self.consumer();
        let name = self.name.clone();
        let place = match after {
            Some(after) => Position::Offset(
                i64::try_from(after.major)
                    .unwrap_or(i64::MAX)
                    .saturating_add(1),
            ),
            None => Position::Beginning,
        };
        {
            let mut partitions = consumer.context().partitions();
            if !partitions.owned.contains(&partition) {
                partitions.begin_at.insert(partition, place);
                return Ok(());
            }
        }
        let sought = blocking(move || seek(&consumer, &name, partition, place)).await;
        sought.map_err(Error::read(topic))?;
        self.consumer().context().partitions().sought(partition);
        self.buffer.retain(|message| message.partition != partition);
        Ok(())
    }
}

impl Drop for Member {
    /// Leaving the group waits for the broker, which must not block the runtime.
    fn drop(&mut self) {
        if let (Some(consumer), Ok(runtime)) =
            (self.consumer.take(), tokio::runtime::Handle::try_current())
        {
            drop(runtime.spawn_blocking(move || drop(consumer)));
        }
    }
}

/// The offset after the messages, for each partition.
fn next_places(messages: &[Message]) -> BTreeMap<u32, i64> {
    let next = |offset: Offset| {
        i64::try_from(offset.major)
            .unwrap_or(i64::MAX)
            .saturating_add(1)
    };
    crate::bus::highest(messages)
        .into_iter()
        .map(|(partition, offset)| (partition, next(offset)))
        .collect()
}

/// Commits the processed offsets that are higher than the committed ones. Blocks.
///
/// If `looks`, it also commits offsets past records that are never delivered. Nothing polls in the
/// meantime, so everything that librdkafka counts as read has been received.
fn commit(consumer: &StreamConsumer<Group>, topic: &str, looks: bool) -> Result<(), KafkaError> {
    if looks {
        let positions = consumer.position()?;
        consumer.context().partitions().note_positions(&positions);
    }
    let unknown = consumer.context().partitions().unknown();
    if !unknown.is_empty() {
        let committed = committed(consumer, topic, unknown)?;
        let committed = committed.into_iter().map(|(partition, place)| {
            // A committed offset beyond the end of the topic belongs to a deleted topic of the same
            // name. Nothing is committed in this one yet.
            let (_, end) = watermarks(consumer.client(), topic, partition)?;
            Ok((partition, if place > end { 0 } else { place }))
        });
        let committed = committed.collect::<Result<Vec<_>, KafkaError>>()?;
        consumer.context().partitions().committed_to(committed);
    }
    let next = consumer.context().partitions().done.clone();
    if next.is_empty() {
        return Ok(());
    }
    consumer.commit(&places(topic, &next)?, CommitMode::Sync)?;
    consumer.context().partitions().committed_to(next);
    Ok(())
}

/// Blocks. Retries, because a partition that was just assigned rejects seeks until it has fetched
/// its starting offset.
fn seek(
    consumer: &StreamConsumer<Group>,
    topic: &str,
    partition: u32,
    place: Position,
) -> Result<(), KafkaError> {
    let deadline = Instant::now() + ANSWER_WITHIN;
    loop {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(topic, index(partition), place)?;
        let sought = consumer.seek_partitions(list, ANSWER_WITHIN);
        let sought = sought.and_then(|list| {
            list.elements()
                .iter()
                .try_for_each(|element| element.error())
        });
        match sought {
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            sought => return sought,
        }
    }
}
