//! The bus on Apache Kafka.
//!
//! librdkafka answers some questions only by blocking; those run on threads for blocking work, each with a deadline.

mod client;
mod consumer;
mod topics;
mod trim;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use client::{Detached, Names, Voice};
use rdkafka::{
    ClientContext, Offset as Position, TopicPartitionList,
    admin::AdminClient,
    client::Client,
    consumer::{BaseConsumer, Consumer},
    error::{KafkaError, RDKafkaErrorCode},
    producer::{DeliveryFuture, FutureProducer, FutureRecord, Producer},
};

use super::{Bus, Error, Keep, Reading, Record, Result, Subscription, Topic};
use crate::model::Offset;

/// How long a broker may take to answer a question.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// How long a record may take to be written, a change of leader included.
const DELIVER_WITHIN: Duration = Duration::from_secs(30);
/// A record is one task, or reports of half a MiB and one more: each of `model::MAX_RECORD_BYTES` at most, and protobuf around it.
const MAX_RECORD_BYTES: &str = "16777216";

/// How to come to a Kafka, and what to make there.
#[derive(Clone)]
pub struct Config {
    /// `host:port,host:port`
    pub brokers: String,
    /// librdkafka's, for each client: TLS, SASL. What taskd's promises rest on is not taken from here.
    pub properties: BTreeMap<String, String>,
    pub topic_prefix: String,
    /// For topics that do not exist yet; the others keep theirs.
    pub partitions: u32,
    /// How long reports stay, in topics that do not exist yet.
    pub retention: Duration,
}

pub struct Kafka {
    names: Names,
    voice: Voice,
    clients: Detached<Clients>,
    generation: String,
    partitions: HashMap<Topic, u32>,
    /// Topics that were not there at the last look.
    missing: Mutex<HashSet<Topic>>,
}

struct Clients {
    producer: Mutex<FutureProducer<Voice>>,
    admin: AdminClient<Voice>,
    /// Never joins the groups; only asks what they have committed. By topic, made when first asked.
    observers: Mutex<HashMap<Topic, Arc<BaseConsumer<Voice>>>>,
}

impl Kafka {
    /// Makes the topics that are missing. `Error::Misconfigured` when the brokers refuse us for what we are, not for when we come.
    pub async fn open(config: Config) -> Result<Self> {
        let Config { brokers, properties, topic_prefix, partitions, retention } = config;
        let (names, voice) = (Names { brokers, topic_prefix, properties }, Voice::default());
        let (producer, admin) = (names.producer(&voice)?, names.admin(&voice)?);
        let (generation, found) = topics::look(&names, &producer, &voice).await?;
        let missing: Vec<Topic> = Topic::ALL.into_iter().filter(|topic| !found.contains_key(topic)).collect();
        let partitions = if missing.is_empty() {
            found
        } else {
            topics::create(&names, &admin, &missing, partitions, retention).await?;
            topics::wait_for_all(&names, &producer, &voice).await?
        };
        topics::warn_of_retention(&names, &admin).await;
        voice.opened();
        let clients = Clients { producer: Mutex::new(producer), admin, observers: Mutex::default() };
        let clients = Detached::new(clients);
        Ok(Self { names, voice, clients, generation, partitions, missing: Mutex::default() })
    }

    /// Finds mistakes in the properties without a broker.
    pub fn check(config: &Config) -> Result<()> {
        let Config { brokers, properties, topic_prefix, .. } = config.clone();
        Names { brokers, topic_prefix, properties }.check()
    }

    fn producer(&self) -> FutureProducer<Voice> {
        self.clients.producer.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// After a fatal error a producer refuses everything for ever.
    fn replace_producer_if_broken(&self) {
        let mut producer = self.clients.producer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((code, reason)) = producer.client().fatal_error() {
            tracing::warn!("the kafka producer is replaced after {code}: {reason}");
            match self.names.producer(&self.voice) {
                Ok(new) => *producer = new,
                Err(error) => tracing::error!("no new kafka producer: {error}"),
            }
        }
    }

    fn observer(&self, topic: Topic) -> Result<Arc<BaseConsumer<Voice>>> {
        let mut observers = self.clients.observers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(observer) = observers.get(&topic) {
            return Ok(observer.clone());
        }
        let observer: BaseConsumer<Voice> = client::create(&self.names.observer(topic), self.voice.clone())
            .map_err(|reason| Error::Read { topic, reason })?;
        Ok(observers.entry(topic).or_insert(Arc::new(observer)).clone())
    }
}

/// Runs what blocks. The deadline is for calls of librdkafka that take none; one that overruns it ends on its own thread.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    match tokio::time::timeout(ANSWER_WITHIN * 2, tokio::task::spawn_blocking(call)).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(panicked)) => Err(panicked.to_string()),
        Err(_) => Err(format!("no answer from kafka within {:?}", ANSWER_WITHIN * 2)),
    }
}

fn read(topic: Topic, error: &KafkaError) -> Error {
    Error::Read { topic, reason: error.to_string() }
}

/// A partition as librdkafka counts it.
fn index(partition: u32) -> i32 {
    i32::try_from(partition).unwrap_or(i32::MAX)
}

/// A place as librdkafka says it; `None` for its special values.
fn offset(raw: i64) -> Option<Offset> {
    u64::try_from(raw).ok().map(|major| Offset { major, minor: 0 })
}

/// Puts the record into the producer's queue, when it is full as soon as there is room.
async fn enqueue(producer: &FutureProducer<Voice>, topic: &str, record: &Record) -> Result<DeliveryFuture, KafkaError> {
    let deadline = Instant::now() + DELIVER_WITHIN;
    loop {
        let sent = FutureRecord::<(), [u8]>::to(topic).partition(index(record.partition)).payload(&record.value);
        match producer.send_result(sent) {
            Ok(delivery) => return Ok(delivery),
            Err((error, _)) if !is_queue_full(&error) || Instant::now() > deadline => return Err(error),
            // librdkafka does not say when there is room; a full queue takes many milliseconds to send.
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

fn is_queue_full(error: &KafkaError) -> bool {
    matches!(error, KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull))
}

/// Waits for all, also behind one that failed: when the caller publishes again, nothing of the first time may still be on its way.
async fn delivered(deliveries: Vec<DeliveryFuture>) -> Result<Vec<Offset>, KafkaError> {
    let mut offsets = Ok(Vec::with_capacity(deliveries.len()));
    for delivery in deliveries {
        let place = match delivery.await {
            Ok(Ok(delivery)) => offset(delivery.offset).ok_or(KafkaError::MessageProduction(RDKafkaErrorCode::Fail)),
            Ok(Err((error, _))) => Err(error),
            Err(_) => Err(KafkaError::Canceled),
        };
        match (place, &mut offsets) {
            (Ok(place), Ok(offsets)) => offsets.push(place),
            (Err(error), Ok(_)) => offsets = Err(error),
            (_, Err(_)) => {}
        }
    }
    offsets
}

async fn publish(producer: &FutureProducer<Voice>, topic: &str, records: &[Record]) -> Result<Vec<Offset>, KafkaError> {
    let mut deliveries = Vec::with_capacity(records.len());
    let mut refused = None;
    for record in records {
        match enqueue(producer, topic, record).await {
            Ok(delivery) => deliveries.push(delivery),
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    let offsets = delivered(deliveries).await;
    refused.map_or(offsets, Err)
}

#[async_trait]
impl Bus for Kafka {
    /// The cluster's id. The Rust client of librdkafka does not expose topic ids, so taskd recognises a topic made anew
    /// by its end: see [`Bus::lies_beyond`].
    fn generation(&self) -> &str {
        &self.generation
    }

    fn partitions(&self, topic: Topic) -> u32 {
        self.partitions[&topic]
    }

    async fn publish(&self, topic: Topic, records: &[Record]) -> Result<Vec<Offset>> {
        super::check_partitions(topic, records, self.partitions(topic))?;
        let published = publish(&self.producer(), &self.names.topic(topic), records).await;
        published.map_err(|error| {
            self.replace_producer_if_broken();
            let reason = error.to_string();
            match error {
                KafkaError::MessageProduction(RDKafkaErrorCode::MessageSizeTooLarge) => {
                    Error::TooLarge { topic, reason }
                }
                _ => Error::Publish { topic, reason },
            }
        })
    }

    /// On Kafka both readings are the same: a partition has one reader in the group, who reads it in order.
    async fn subscribe(&self, topic: Topic, _reading: Reading) -> Result<Box<dyn Subscription>> {
        Ok(Box::new(consumer::Member::join(&self.names, self.voice.clone(), topic)?))
    }

    async fn ends(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        let (producer, name, partitions) = (self.producer(), self.names.topic(topic), self.partitions(topic));
        let ends = blocking(move || {
            let end = |partition| {
                let (low, high) = watermarks(producer.client(), &name, partition)?;
                // Retention may have emptied it: nobody can read up to the last record then.
                Ok(if low < high { offset(high - 1) } else { None })
            };
            (0..partitions).map(end).collect::<Result<_, KafkaError>>()
        });
        ends.await.map_err(|reason| Error::Read { topic, reason })?.map_err(|e| read(topic, &e))
    }

    async fn committed(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        let (observer, name, partitions) = (self.observer(topic)?, self.names.topic(topic), self.partitions(topic));
        let committed = blocking(move || committed(&*observer, &name, 0..partitions));
        let committed = committed.await.map_err(|reason| Error::Read { topic, reason })?;
        let next = committed.map_err(|e| read(topic, &e))?;
        Ok(next.into_iter().map(|(_, next)| offset(next - 1)).collect())
    }

    async fn lies_beyond(&self, topic: Topic, partition: u32, offset: Offset) -> Result<bool> {
        let (producer, name) = (self.producer(), self.names.topic(topic));
        let extent = blocking(move || watermarks(producer.client(), &name, partition)).await;
        let (_, next) = extent.map_err(|reason| Error::Read { topic, reason })?.map_err(|e| read(topic, &e))?;
        Ok(u64::try_from(next).is_ok_and(|next| offset.major >= next))
    }

    async fn backlog(&self, topic: Topic) -> Result<u64> {
        let (ends, committed) = (self.ends(topic).await?, self.committed(topic).await?);
        let next = |offset: Option<Offset>| offset.map_or(0, |offset| offset.major + 1);
        Ok(ends.into_iter().zip(committed).map(|(end, done)| next(end).saturating_sub(next(done))).sum())
    }

    async fn trim(&self, topic: Topic, keep: Keep) -> Result<u64> {
        let failed = |reason: String| Error::Trim { topic, reason };
        let (observer, name, partitions) = (self.observer(topic)?, self.names.topic(topic), self.partitions(topic));
        let asked = name.clone();
        let cuts = blocking(move || trim::cuts(&observer, topic, &asked, partitions, keep)).await.map_err(failed)?;
        let cuts = cuts.map_err(|e| failed(e.to_string()))?;
        if !cuts.is_empty() {
            trim::delete(&self.clients.admin, &name, &cuts).await.map_err(|e| failed(e.to_string()))?;
        }
        Ok(cuts.iter().map(|(_, _, count)| count).sum())
    }

    async fn raise_partitions(&self, topic: Topic, count: u32) -> Result<()> {
        topics::raise(&self.names, &self.clients.admin, topic, count).await
    }

    async fn check_partitions(&self) -> Result<()> {
        for topic in Topic::ALL {
            let (observer, name) = (self.observer(topic)?, self.names.topic(topic));
            let metadata = blocking(move || observer.fetch_metadata(Some(&name), ANSWER_WITHIN)).await;
            let metadata = metadata.map_err(|reason| Error::Read { topic, reason })?.map_err(|e| read(topic, &e))?;
            let (name, mut missing) =
                (self.names.topic(topic), self.missing.lock().unwrap_or_else(PoisonError::into_inner));
            // A broker that has just started may not know a topic yet: the second look counts.
            match topics::is_gone(&metadata, &name) {
                true if !missing.insert(topic) => return Err(Error::Gone { topic }),
                true => {}
                false => drop(missing.remove(&topic)),
            }
            if topic.is_read() {
                super::check_grown(topic, self.partitions(topic), topics::count(&metadata, &name))?;
            }
        }
        Ok(())
    }

    async fn close(&self) {
        let producer = self.producer();
        let flushed = blocking(move || producer.flush(ANSWER_WITHIN)).await;
        if let Err(reason) = flushed.and_then(|flushed| flushed.map_err(|e| e.to_string())) {
            tracing::warn!("what was last published may not have reached kafka: {reason}");
        }
    }
}

/// The first place of a partition and the one behind its last. Blocks.
fn watermarks<C: ClientContext>(client: &Client<C>, topic: &str, partition: u32) -> Result<(i64, i64), KafkaError> {
    of_its_leader(|| client.fetch_watermarks(topic, index(partition), ANSWER_WITHIN))
}

/// Blocks. Asks again while a partition changes its leader, or has none because it was just made.
fn of_its_leader<T>(mut ask: impl FnMut() -> Result<T, KafkaError>) -> Result<T, KafkaError> {
    let deadline = Instant::now() + ANSWER_WITHIN;
    loop {
        match ask() {
            Err(KafkaError::MetadataFetch(
                RDKafkaErrorCode::NotLeaderForPartition | RDKafkaErrorCode::LeaderNotAvailable,
            )) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
            answer => return answer,
        }
    }
}

/// The place behind what the group has committed, 0 when it has not, by partition. Blocks.
fn committed<C: rdkafka::consumer::ConsumerContext>(
    consumer: &impl Consumer<C>,
    topic: &str,
    partitions: impl IntoIterator<Item = u32>,
) -> Result<Vec<(u32, i64)>, KafkaError> {
    let mut list = TopicPartitionList::new();
    let partitions: Vec<u32> = partitions.into_iter().collect();
    for partition in &partitions {
        list.add_partition(topic, index(*partition));
    }
    let answer = consumer.committed_offsets(list, ANSWER_WITHIN)?;
    let next = |partition: u32| {
        let found = answer.find_partition(topic, index(partition));
        let found = found.map(|found| found.error().map(|()| found.offset())).transpose()?;
        Ok((partition, if let Some(Position::Offset(next)) = found { next } else { 0 }))
    };
    partitions.into_iter().map(next).collect()
}
