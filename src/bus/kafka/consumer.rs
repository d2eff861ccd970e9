//! A reader: a member of the topic's group.
//!
//! The group gives and takes partitions, and tells so while we poll. Records of a partition that was taken away are neither handed
//! out nor committed any more: its next reader begins at the committed place and would see it move back. What was already handed
//! out may be worked on here and there at once; only the caller's own fencing sorts that out.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use rdkafka::{
    ClientContext, Message as _, Offset as Position, TopicPartitionList,
    consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol, StreamConsumer},
    error::{KafkaError, RDKafkaErrorCode},
    message::BorrowedMessage,
    types::RDKafkaRespErr,
};

use super::{ANSWER_WITHIN, Names, blocking, index, offset, read};
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
    /// By partition, the place behind which the group has committed, as far as we know since we were given it.
    committed: HashMap<u32, i64>,
}

impl Member {
    pub(super) fn join(names: &Names, topic: Topic) -> Result<Self> {
        let mut config = names.group(topic);
        config.set("auto.offset.reset", "earliest").set("partition.assignment.strategy", "cooperative-sticky");
        config.set("session.timeout.ms", "10000").set("heartbeat.interval.ms", "2000");
        // What is fetched ahead is bounded; and when it was full, fetching goes on soon instead of after a second.
        config.set("queued.max.messages.kbytes", "32768").set("fetch.queue.backoff.ms", "10");
        let consumer: StreamConsumer<Group> =
            config.create_with_context(Group::default()).map_err(|e| read(topic, &e))?;
        let name = names.topic(topic);
        consumer.subscribe(&[&name]).map_err(|e| read(topic, &e))?;
        let (buffer, committed) = (VecDeque::new(), HashMap::new());
        Ok(Self { topic, name, consumer: Some(Arc::new(consumer)), buffer, committed })
    }

    fn consumer(&self) -> Arc<StreamConsumer<Group>> {
        self.consumer.clone().expect("is there until the drop")
    }

    /// Waits for a record, then takes those that are there already, until `max` are in the buffer.
    ///
    /// Cancel safe: what comes out of the stream is in the buffer before anything is awaited.
    async fn receive(&mut self, max: usize) -> Result<()> {
        let consumer = self.consumer();
        let mut stream = consumer.stream();
        while self.buffer.is_empty() {
            let Some(received) = stream.next().await else { return Ok(()) };
            self.take_in(&consumer, received)?;
        }
        while self.buffer.len() < max {
            let Some(Some(received)) = stream.next().now_or_never() else { break };
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
            Ok(record) => self.buffer.extend(message(&record)),
            Err(error) if is_passing(&error) => tracing::debug!(topic = %self.topic, "kafka: {error}"),
            Err(error) => return Err(read(self.topic, &error)),
        }
        Ok(())
    }

    fn forget_lost_partitions(&mut self, consumer: &StreamConsumer<Group>) {
        for partition in std::mem::take(&mut consumer.context().partitions().lost) {
            self.buffer.retain(|message| message.partition != partition);
            self.committed.remove(&partition);
        }
    }
}

fn message(record: &BorrowedMessage<'_>) -> Option<Message> {
    let partition = u32::try_from(record.partition()).ok()?;
    let value = Bytes::copy_from_slice(record.payload().unwrap_or_default());
    Some(Message { partition, offset: offset(record.offset())?, value })
}

/// One connection failed; librdkafka has others or makes a new one. When all have failed it says so in another way.
fn is_passing(error: &KafkaError) -> bool {
    use RDKafkaErrorCode::{BrokerTransportFailure, OperationTimedOut, Resolve};
    matches!(error, KafkaError::MessageConsumption(BrokerTransportFailure | OperationTimedOut | Resolve))
}

#[async_trait]
impl Subscription for Member {
    async fn next(&mut self, max: usize) -> Result<Vec<Message>> {
        let max = max.max(1);
        // Again when the partitions of all that was received were taken away meanwhile.
        while self.buffer.is_empty() {
            self.receive(max).await?;
        }
        Ok(self.buffer.drain(..max.min(self.buffer.len())).collect())
    }

    async fn commit(&mut self, messages: &[Message]) -> Result<()> {
        let (topic, consumer, name) = (self.topic, self.consumer(), self.name.clone());
        self.forget_lost_partitions(&consumer);
        let mut next = next_places(messages);
        next.retain(|partition, _| consumer.context().partitions().owned.contains(partition));
        let unknown = next.keys().copied().filter(|partition| !self.committed.contains_key(partition)).collect();
        let known = self.committed.clone();
        let done = blocking(move || commit(&consumer, &name, next, known, unknown));
        let done = done.await.map_err(|reason| Error::Commit { topic, reason })?;
        self.committed.extend(done.map_err(|e| Error::Commit { topic, reason: e.to_string() })?);
        Ok(())
    }

    fn tenure(&self, partition: u32) -> u64 {
        self.consumer().context().partitions().tenures.get(&partition).copied().unwrap_or(0)
    }

    /// Of a partition that we are not given yet, the place is kept until we are.
    async fn seek(&mut self, partition: u32, after: Option<Offset>) -> Result<()> {
        let (topic, consumer, name) = (self.topic, self.consumer(), self.name.clone());
        let place = match after {
            Some(after) => Position::Offset(i64::try_from(after.major).unwrap_or(i64::MAX).saturating_add(1)),
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
        sought.map_err(|reason| Error::Read { topic, reason })?.map_err(|e| read(topic, &e))?;
        self.buffer.retain(|message| message.partition != partition);
        Ok(())
    }
}

impl Drop for Member {
    /// Leaving the group waits for the broker, which must not hold up the runtime.
    fn drop(&mut self) {
        if let (Some(consumer), Ok(runtime)) = (self.consumer.take(), tokio::runtime::Handle::try_current()) {
            drop(runtime.spawn_blocking(move || drop(consumer)));
        }
    }
}

/// By partition, the place behind the messages.
fn next_places(messages: &[Message]) -> BTreeMap<u32, i64> {
    let next = |offset: Offset| i64::try_from(offset.major).unwrap_or(i64::MAX).saturating_add(1);
    crate::bus::highest(messages).into_iter().map(|(partition, offset)| (partition, next(offset))).collect()
}

/// Commits what is further on than what was committed, and says what is committed now. Blocks.
fn commit(
    consumer: &StreamConsumer<Group>,
    topic: &str,
    mut next: BTreeMap<u32, i64>,
    mut committed: HashMap<u32, i64>,
    unknown: Vec<u32>,
) -> Result<HashMap<u32, i64>, KafkaError> {
    if !unknown.is_empty() {
        committed.extend(super::committed(consumer, topic, unknown)?);
    }
    next.retain(|partition, next| committed.get(partition).is_none_or(|committed| *next > *committed));
    if next.is_empty() {
        return Ok(committed);
    }
    let mut list = TopicPartitionList::new();
    for (partition, next) in &next {
        list.add_partition_offset(topic, index(*partition), Position::Offset(*next))?;
    }
    consumer.commit(&list, CommitMode::Sync)?;
    committed.extend(next);
    Ok(committed)
}

/// Blocks. A partition that we were given a moment ago still looks up where it begins, and refuses meanwhile.
fn seek(consumer: &StreamConsumer<Group>, topic: &str, partition: u32, place: Position) -> Result<(), KafkaError> {
    let deadline = Instant::now() + ANSWER_WITHIN;
    loop {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(topic, index(partition), place)?;
        let sought = consumer.seek_partitions(list, ANSWER_WITHIN);
        let sought = sought.and_then(|list| list.elements().iter().try_for_each(|element| element.error()));
        match sought {
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            sought => return sought,
        }
    }
}

/// What the group tells us.
#[derive(Default)]
struct Group(Mutex<Partitions>);

#[derive(Default)]
struct Partitions {
    owned: BTreeSet<u32>,
    /// How often each was given to us.
    tenures: HashMap<u32, u64>,
    /// Taken away since the reader last looked.
    lost: BTreeSet<u32>,
    /// Where to begin with partitions that are not given to us yet, instead of at what is committed.
    begin_at: HashMap<u32, Position>,
}

impl Group {
    fn partitions(&self) -> MutexGuard<'_, Partitions> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Partitions {
    fn given(&mut self, list: &mut TopicPartitionList) {
        for partition in numbers(list) {
            self.owned.insert(partition);
            *self.tenures.entry(partition).or_default() += 1;
            let topic = list.elements().first().map(|element| element.topic().to_owned()).unwrap_or_default();
            let Some(place) = self.begin_at.remove(&partition) else { continue };
            if let Err(error) = list.set_partition_offset(&topic, index(partition), place) {
                tracing::error!("partition {partition} of {topic} begins at what is committed: {error}");
            }
        }
    }

    fn taken(&mut self, list: &TopicPartitionList) {
        for partition in numbers(list) {
            self.owned.remove(&partition);
            self.lost.insert(partition);
        }
    }
}

fn numbers(list: &TopicPartitionList) -> Vec<u32> {
    list.elements().iter().filter_map(|element| u32::try_from(element.partition()).ok()).collect()
}

impl ClientContext for Group {}

impl ConsumerContext for Group {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, event: RDKafkaRespErr, list: &mut TopicPartitionList) {
        let cooperative = matches!(consumer.rebalance_protocol(), RebalanceProtocol::Cooperative);
        let done = match event {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => {
                self.partitions().given(list);
                if cooperative { consumer.incremental_assign(list) } else { consumer.assign(list) }
            }
            _ => {
                self.partitions().taken(list);
                if cooperative { consumer.incremental_unassign(list) } else { consumer.unassign() }
            }
        };
        if let Err(error) = done {
            tracing::error!("the kafka consumer did not follow its group: {error}");
        }
    }
}
