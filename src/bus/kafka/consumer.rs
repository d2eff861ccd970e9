//! A reader: a member of the topic's group.
//!
//! The group assigns and revokes partitions, and says so while the reader polls. The reader neither
//! answers nor commits records of a revoked partition: its next owner begins at the committed
//! offset, which must not move back. Two owners may process records that were answered before; only
//! the caller's fencing decides then.
//!
//! A commit during a change of the group is no error. The reader keeps the processed offsets and
//! commits them with the next commit, during its wait for records, when it gives the partition up,
//! or when it leaves. A member that the group has forgotten joins again by itself.
//!
//! A transaction of another program leaves offsets that no reader gets: its marker, and its records
//! if it was aborted. The reader commits them once a second, where it has processed all records
//! before them. Otherwise a topic that ends with a transaction would never count as read.

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
    bus::{Error, Message, Result, Subscription, Topic},
    model::Offset,
};

pub(super) struct Member {
    topic: Topic,
    name: String,
    /// `None` only while it is dropped.
    consumer: Option<Arc<StreamConsumer<Group>>>,
    buffer: VecDeque<Message>,
    /// Partitions that were paused since the last read. librdkafka keeps one paused even while
    /// another member has it.
    paused: BTreeSet<u32>,
    /// A commit in flight. It lives here, because a commit of a dropped future could reach the
    /// broker too late: after the reader gave a partition up.
    committing: Option<Committing>,
    /// The next try of a commit that met a change of the group, while no records come.
    commit_again_at: tokio::time::Instant,
    /// The next look for offsets that no reader gets.
    look_at: tokio::time::Instant,
}

type Committing = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

const COMMIT_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// A look asks librdkafka, and no broker. `enable.partition.eof` would cost an event each time that
/// a reader is at the end, so with nearly each record.
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

    /// Waits for a record, then takes the available ones, until the buffer has `max`.
    ///
    /// Cancel safe: a record of the stream is in the buffer before the next await.
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

    /// Pauses the partitions that the member owns now.
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

    /// Commits the processed offsets of owned partitions. If the group is changing, they stay
    /// noted. Once a second it looks for offsets that no reader gets, too.
    ///
    /// Cancel safe: the next call awaits the commit in flight. Nothing polls meanwhile, so no
    /// partition is revoked.
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

/// True if librdkafka recovers from the error by itself: it makes new connections, and joins the
/// group again.
///
/// A member that waits for its brokers keeps its place in the group. A new one would wait until the
/// group gives up the old one.
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

/// True if the group is changing, or has changed, so that this member does not know its partitions
/// yet.
fn is_rebalance(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode::{IllegalGeneration, RebalanceInProgress, UnknownMemberId};
    matches!(
        code,
        RebalanceInProgress | IllegalGeneration | UnknownMemberId
    )
}

#[async_trait]
impl Subscription for Member {
    async fn next(&mut self, max: usize) -> Result<Vec<Message>> {
        let max = max.max(1);
        let consumer = self.consumer();
        self.resume(&consumer).map_err(Error::read(self.topic))?;
        // A busy reader never waits long enough for a look.
        if self.committing.is_some() || self.is_look_due() {
            self.commit_what_is_done().await?;
        }
        // Records that came while it stayed may be of a partition that was revoked since.
        self.forget_lost_partitions(&consumer);
        // Again if the partitions of all received records were revoked meanwhile.
        while self.buffer.is_empty() {
            self.receive(max).await?;
        }
        Ok(self.buffer.drain(..max.min(self.buffer.len())).collect())
    }

    /// The records that were on their way wait in the buffer.
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

    /// Keeps the offset for a partition that the group has not assigned yet.
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
    /// To leave the group waits for the broker, which must not block the runtime.
    fn drop(&mut self) {
        if let (Some(consumer), Ok(runtime)) =
            (self.consumer.take(), tokio::runtime::Handle::try_current())
        {
            drop(runtime.spawn_blocking(move || drop(consumer)));
        }
    }
}

/// The offset behind the messages, by partition.
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

/// Commits the processed offsets that are beyond the committed ones. Blocks.
///
/// `looks`: also those behind records that no reader gets. Nothing polls meanwhile, so all that
/// librdkafka counts as read has been received.
fn commit(consumer: &StreamConsumer<Group>, topic: &str, looks: bool) -> Result<(), KafkaError> {
    if looks {
        let positions = consumer.position()?;
        consumer.context().partitions().note_positions(&positions);
    }
    let unknown = consumer.context().partitions().unknown();
    if !unknown.is_empty() {
        let committed = committed(consumer, topic, unknown)?;
        let committed = committed.into_iter().map(|(partition, place)| {
            // A committed offset beyond the end belongs to a deleted topic. Nothing of this topic
            // is committed yet.
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

/// Blocks. A partition that was just assigned refuses until it has looked up where it begins.
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
