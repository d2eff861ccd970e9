//! A reader: a member of the topic's group.
//!
//! The group gives and takes partitions, and tells so while we poll. Records of a partition that was taken away are neither handed
//! out nor committed any more: its next reader begins at the committed place and would see it move back. What was already handed
//! out may be worked on here and there at once; only the caller's own fencing sorts that out.
//!
//! A commit that meets a change in the group is not an error: what is done stays noted and is committed with the next commit, while we
//! wait for records, when the partition is given up, or when we leave. A member that the group has forgotten joins again by itself.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use rdkafka::{
    ClientContext, Message as _, Offset as Position, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol, StreamConsumer},
    error::{KafkaError, RDKafkaErrorCode},
    message::BorrowedMessage,
    types::RDKafkaRespErr,
};

use super::{
    ANSWER_WITHIN, blocking,
    client::{Names, Voice, create},
    index, offset, read,
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
    /// A commit under way. Lives here and not in the caller's future: it must not reach the broker after we have given a partition up.
    committing: Option<Committing>,
    /// When a commit that met a change in the group is tried again, while no records come.
    commit_again_at: tokio::time::Instant,
}

type Committing = Pin<Box<dyn Future<Output = Result<Result<(), KafkaError>, String>> + Send>>;

const COMMIT_AGAIN_AFTER: Duration = Duration::from_millis(100);

impl Member {
    pub(super) fn join(names: &Names, voice: Voice, topic: Topic) -> Result<Self> {
        let group = Group { voice, partitions: Mutex::default() };
        let consumer: StreamConsumer<Group> =
            create(&names.member(topic), group).map_err(|reason| Error::Read { topic, reason })?;
        let name = names.topic(topic);
        consumer.subscribe(&[&name]).map_err(|e| read(topic, &e))?;
        let (consumer, commit_again_at) = (Some(Arc::new(consumer)), tokio::time::Instant::now());
        Ok(Self { topic, name, consumer, buffer: VecDeque::new(), committing: None, commit_again_at })
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
            let received = if consumer.context().partitions().done.is_empty() {
                stream.next().await
            } else {
                match tokio::time::timeout_at(self.commit_again_at, stream.next()).await {
                    Ok(received) => received,
                    Err(_nothing_came) => {
                        self.commit_what_is_done().await?;
                        continue;
                    }
                }
            };
            let Some(received) = received else { return Ok(()) };
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

    /// Commits what is noted as done, of partitions that are ours. That the group is changing is not an error: it stays noted.
    ///
    /// Cancel safe: what is under way is awaited by the next call. Nothing is polled meanwhile, so no partition is given up either.
    async fn commit_what_is_done(&mut self) -> Result<()> {
        let (topic, consumer, name) = (self.topic, self.consumer(), self.name.clone());
        let committing = match &mut self.committing {
            Some(committing) => committing,
            None if consumer.context().partitions().done.is_empty() => return Ok(()),
            None => self.committing.insert(Box::pin(blocking(move || commit(&consumer, &name)))),
        };
        let done = committing.await;
        self.committing = None;
        match done.map_err(|reason| Error::Commit { topic, reason })? {
            Ok(()) => Ok(()),
            Err(KafkaError::ConsumerCommit(code) | KafkaError::OffsetFetch(code)) if is_rebalance(code) => {
                tracing::debug!(%topic, "kafka: the commit waits for the group: {code}");
                self.commit_again_at = tokio::time::Instant::now() + COMMIT_AGAIN_AFTER;
                Ok(())
            }
            Err(error) => Err(Error::Commit { topic, reason: error.to_string() }),
        }
    }

    fn forget_lost_partitions(&mut self, consumer: &StreamConsumer<Group>) {
        for partition in std::mem::take(&mut consumer.context().partitions().lost) {
            self.buffer.retain(|message| message.partition != partition);
        }
    }
}

fn message(record: &BorrowedMessage<'_>) -> Option<Message> {
    let partition = u32::try_from(record.partition()).ok()?;
    let value = Bytes::copy_from_slice(record.payload().unwrap_or_default());
    Some(Message { partition, offset: offset(record.offset())?, value })
}

/// Connections failed, and librdkafka makes new ones: a member that waits for its brokers keeps its place in the group, one that is made
/// anew waits until the group has given up the old one. Or the group has changed without us, and librdkafka joins it again.
fn is_passing(error: &KafkaError) -> bool {
    use RDKafkaErrorCode::{AllBrokersDown, BrokerTransportFailure, OperationTimedOut, PollExceeded, Resolve};
    match error {
        KafkaError::MessageConsumption(code) => {
            let is_away = matches!(code, AllBrokersDown | BrokerTransportFailure | OperationTimedOut | Resolve);
            is_away || *code == PollExceeded || is_rebalance(*code)
        }
        _ => false,
    }
}

/// The group is being shared out anew, or has been, and we do not know yet what is ours.
fn is_rebalance(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode::{IllegalGeneration, RebalanceInProgress, UnknownMemberId};
    matches!(code, RebalanceInProgress | IllegalGeneration | UnknownMemberId)
}

#[async_trait]
impl Subscription for Member {
    async fn next(&mut self, max: usize) -> Result<Vec<Message>> {
        let max = max.max(1);
        if self.committing.is_some() {
            self.commit_what_is_done().await?;
        }
        // Again when the partitions of all that was received were taken away meanwhile.
        while self.buffer.is_empty() {
            self.receive(max).await?;
        }
        Ok(self.buffer.drain(..max.min(self.buffer.len())).collect())
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

/// Commits what is noted as done and further on than what is committed. Blocks.
fn commit(consumer: &StreamConsumer<Group>, topic: &str) -> Result<(), KafkaError> {
    let unknown = consumer.context().partitions().unknown();
    if !unknown.is_empty() {
        let committed = super::committed(consumer, topic, unknown)?;
        let committed = committed.into_iter().map(|(partition, place)| {
            // A committed place beyond the end belongs to a deleted topic. Nothing of this topic is committed yet.
            let (_, end) = super::watermarks(consumer.client(), topic, partition)?;
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

fn places(topic: &str, next: &BTreeMap<u32, i64>) -> Result<TopicPartitionList, KafkaError> {
    let mut list = TopicPartitionList::new();
    for (partition, next) in next {
        list.add_partition_offset(topic, index(*partition), Position::Offset(*next))?;
    }
    Ok(list)
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

/// What the group tells us. All of it changes in [`Partitions::given`] and [`Partitions::taken`], which librdkafka calls from within our
/// polling, and so never while the reader does something else.
struct Group {
    voice: Voice,
    partitions: Mutex<Partitions>,
}

#[derive(Default)]
struct Partitions {
    owned: BTreeSet<u32>,
    /// How often each was given to us.
    tenures: HashMap<u32, u64>,
    /// Taken away since the reader last looked.
    lost: BTreeSet<u32>,
    /// Where to begin with partitions that are not given to us yet, instead of at what is committed.
    begin_at: HashMap<u32, Position>,
    /// Of partitions that are ours: the place behind what was dealt with, where it is not committed yet.
    done: BTreeMap<u32, i64>,
    /// Of partitions that are ours: the place behind which the group has committed, where we have asked or done it.
    committed: HashMap<u32, i64>,
}

impl Group {
    fn partitions(&self) -> MutexGuard<'_, Partitions> {
        self.partitions.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// What was dealt with there and is to be committed still.
    fn taken(&mut self, list: &TopicPartitionList) -> BTreeMap<u32, i64> {
        let mut done = BTreeMap::new();
        for partition in numbers(list) {
            self.owned.remove(&partition);
            self.lost.insert(partition);
            let (noted, committed) = (self.done.remove_entry(&partition), self.committed.remove(&partition));
            // What was handed out before we lost the partition once already may be far behind what others have committed since.
            done.extend(noted.filter(|_| committed.is_some()));
        }
        done
    }

    /// These places are behind what was dealt with.
    fn note(&mut self, next: BTreeMap<u32, i64>) {
        for (partition, next) in next {
            let is_news = self.committed.get(&partition).is_none_or(|committed| *committed < next);
            if is_news && self.owned.contains(&partition) {
                let noted = self.done.entry(partition).or_insert(next);
                *noted = next.max(*noted);
            }
        }
    }

    /// Where something is noted, and nobody knows from which place on it is news.
    fn unknown(&self) -> Vec<u32> {
        self.done.keys().copied().filter(|partition| !self.committed.contains_key(partition)).collect()
    }

    fn committed_to(&mut self, next: impl IntoIterator<Item = (u32, i64)>) {
        self.committed.extend(next);
        let committed = &self.committed;
        self.done.retain(|partition, next| committed.get(partition).is_none_or(|committed| *committed < *next));
    }
}

/// Commits what is done before the partitions are given up, so that their next reader does not do it again. Not waited for: librdkafka
/// gives nothing up while a commit is under way. Where the group has given them to somebody else already, it is too late.
fn hand_over(consumer: &BaseConsumer<Group>, list: &TopicPartitionList, done: &BTreeMap<u32, i64>) {
    if done.is_empty() || consumer.assignment_lost() {
        return;
    }
    let topic = list.elements().first().map(|element| element.topic().to_owned()).unwrap_or_default();
    let sent = places(&topic, done).and_then(|list| consumer.commit(&list, CommitMode::Async));
    if let Err(error) = sent {
        tracing::debug!("kafka: what was done in {topic} is not committed, and will be done again: {error}");
    }
}

fn numbers(list: &TopicPartitionList) -> Vec<u32> {
    list.elements().iter().filter_map(|element| u32::try_from(element.partition()).ok()).collect()
}

impl ClientContext for Group {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.voice.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.voice.error(error, reason);
    }
}

impl ConsumerContext for Group {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, event: RDKafkaRespErr, list: &mut TopicPartitionList) {
        let cooperative = matches!(consumer.rebalance_protocol(), RebalanceProtocol::Cooperative);
        let done = match event {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => {
                self.partitions().given(list);
                if cooperative { consumer.incremental_assign(list) } else { consumer.assign(list) }
            }
            _ => {
                let done = self.partitions().taken(list);
                hand_over(consumer, list, &done);
                if cooperative { consumer.incremental_unassign(list) } else { consumer.unassign() }
            }
        };
        if let Err(error) = done {
            tracing::error!("the kafka consumer did not follow its group: {error}");
        }
    }
}
