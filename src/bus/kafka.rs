//! The bus on Apache Kafka.
//!
//! librdkafka answers some questions only by blocking; those run on threads for blocking work, each with a deadline.

mod consumer;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use rdkafka::{
    ClientConfig, Offset as Position, TopicPartitionList,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
    consumer::{BaseConsumer, Consumer},
    error::{KafkaError, RDKafkaErrorCode},
    metadata::Metadata,
    producer::{DeliveryFuture, FutureProducer, FutureRecord, Producer},
};

use super::{Bus, Error, Reading, Record, Result, Subscription, Topic};
use crate::model::Offset;

/// How long a broker may take to answer a question.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// How long a record may take to be written, a change of leader included.
const DELIVER_WITHIN: Duration = Duration::from_secs(30);
/// A record is one task, or reports of half a MiB and one more: each of `model::MAX_RECORD_BYTES` at most, and protobuf around it.
const MAX_RECORD_BYTES: &str = "16777216";

pub struct Kafka {
    names: Names,
    producer: Mutex<FutureProducer>,
    /// Never joins the groups; only asks what they have committed. By topic, made when first asked.
    observers: Mutex<HashMap<Topic, Arc<BaseConsumer>>>,
    generation: String,
    partitions: HashMap<Topic, u32>,
}

/// Where the brokers are and what things are called there.
#[derive(Clone)]
struct Names {
    brokers: String,
    topic_prefix: String,
}

impl Names {
    fn topic(&self, topic: Topic) -> String {
        format!("{}{topic}", self.topic_prefix)
    }

    fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.brokers).set("client.id", "taskd");
        config.set("socket.timeout.ms", ANSWER_WITHIN.as_millis().to_string());
        config.set("message.max.bytes", MAX_RECORD_BYTES);
        config
    }

    /// A member, or an observer, of the group that all taskd processes share for the topic.
    fn group(&self, topic: Topic) -> ClientConfig {
        let mut config = self.client();
        config.set("group.id", format!("{}taskd-{topic}", self.topic_prefix));
        config.set("enable.auto.commit", "false").set("enable.auto.offset.store", "false");
        config
    }

    fn producer(&self) -> Result<FutureProducer> {
        let mut config = self.client();
        // Idempotent: what the client sends again after an error is neither written twice nor out of order.
        config.set("enable.idempotence", "true").set("acks", "all");
        config.set("compression.type", "zstd").set("linger.ms", "1");
        config.set("message.timeout.ms", DELIVER_WITHIN.as_millis().to_string());
        config.create().map_err(|e| self.setup(&e))
    }

    fn setup(&self, error: &KafkaError) -> Error {
        Error::Setup(format!("kafka at {}: {error}", self.brokers))
    }
}

impl Kafka {
    /// `partitions` counts for topics that do not exist yet; the others keep theirs.
    pub async fn open(brokers: &str, topic_prefix: &str, partitions: u32) -> Result<Self> {
        let names = Names { brokers: brokers.to_owned(), topic_prefix: topic_prefix.to_owned() };
        let producer = names.producer()?;
        let (generation, found) = look(&names, &producer).await?;
        let missing: Vec<Topic> = Topic::ALL.into_iter().filter(|topic| !found.contains_key(topic)).collect();
        let partitions = if missing.is_empty() {
            found
        } else {
            create_topics(&names, &missing, partitions).await?;
            wait_for_topics(&names, &producer).await?
        };
        Ok(Self { names, producer: Mutex::new(producer), observers: Mutex::default(), generation, partitions })
    }

    fn producer(&self) -> FutureProducer {
        self.producer.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// After a fatal error a producer refuses everything for ever.
    fn replace_producer_if_broken(&self) {
        let mut producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((code, reason)) = producer.client().fatal_error() {
            tracing::warn!("the kafka producer is replaced after {code}: {reason}");
            match self.names.producer() {
                Ok(new) => *producer = new,
                Err(error) => tracing::error!("no new kafka producer: {error}"),
            }
        }
    }

    fn observer(&self, topic: Topic) -> Result<Arc<BaseConsumer>> {
        let mut observers = self.observers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(observer) = observers.get(&topic) {
            return Ok(observer.clone());
        }
        let observer: BaseConsumer = self.names.group(topic).create().map_err(|e| read(topic, &e))?;
        Ok(observers.entry(topic).or_insert(Arc::new(observer)).clone())
    }
}

/// The cluster's id, and our topics with their partitions.
async fn look(names: &Names, producer: &FutureProducer) -> Result<(String, HashMap<Topic, u32>)> {
    let (asked, producer) = (names.clone(), producer.clone());
    let answer = blocking(move || {
        let Some(id) = producer.client().fetch_cluster_id(ANSWER_WITHIN) else {
            return Err(Error::Setup(format!("no answer from kafka at {} within {ANSWER_WITHIN:?}", asked.brokers)));
        };
        // All topics: a question about one that does not exist may create it, with the broker's number of partitions.
        let metadata = producer.client().fetch_metadata(None, ANSWER_WITHIN).map_err(|e| asked.setup(&e))?;
        Ok((id, existing(&asked, &metadata)))
    });
    answer.await.unwrap_or_else(|e| Err(Error::Setup(e)))
}

/// Our topics that are ready for use, with their partitions.
fn existing(names: &Names, metadata: &Metadata) -> HashMap<Topic, u32> {
    let partitions = |topic: Topic| {
        let name = names.topic(topic);
        let found = metadata.topics().iter().find(|found| found.name() == name && found.error().is_none())?;
        let count = u32::try_from(found.partitions().len()).ok().filter(|count| *count > 0)?;
        Some((topic, count))
    };
    Topic::ALL.into_iter().filter_map(partitions).collect()
}

async fn create_topics(names: &Names, missing: &[Topic], partitions: u32) -> Result<()> {
    let admin: AdminClient<DefaultClientContext> = names.client().create().map_err(|e| names.setup(&e))?;
    let topics: Vec<(String, i32)> =
        missing.iter().map(|topic| (names.topic(*topic), index(topic.partitions(partitions)))).collect();
    let new = topics.iter().map(|(name, partitions)| {
        // -1: as many replicas as the cluster gives by default. A number of ours would be wrong on somebody's cluster, and one
        // replica loses tasks with one disk.
        let topic = NewTopic::new(name, *partitions, TopicReplication::Fixed(-1));
        topic.set("max.message.bytes", MAX_RECORD_BYTES)
    });
    let new: Vec<_> = new.collect();
    let options = AdminOptions::new().request_timeout(Some(ANSWER_WITHIN)).operation_timeout(Some(ANSWER_WITHIN));
    for created in admin.create_topics(&new, &options).await.map_err(|e| names.setup(&e))? {
        match created {
            // Another process was quicker.
            Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
            Err((topic, code)) => return Err(Error::Setup(format!("kafka does not create topic {topic}: {code}"))),
        }
    }
    Ok(())
}

/// A topic that was just created takes a moment until the brokers agree on who leads it.
async fn wait_for_topics(names: &Names, producer: &FutureProducer) -> Result<HashMap<Topic, u32>> {
    let deadline = Instant::now() + ANSWER_WITHIN;
    loop {
        let (_, found) = look(names, producer).await?;
        if found.len() == Topic::ALL.len() {
            return Ok(found);
        }
        if Instant::now() > deadline {
            let missing = Topic::ALL.into_iter().find(|topic| !found.contains_key(topic));
            let missing = missing.map(|topic| names.topic(topic)).unwrap_or_default();
            return Err(Error::Setup(format!("kafka's topic {missing} is not ready after {ANSWER_WITHIN:?}")));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
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
async fn enqueue(producer: &FutureProducer, topic: &str, record: &Record) -> Result<DeliveryFuture, KafkaError> {
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

async fn publish(producer: &FutureProducer, topic: &str, records: &[Record]) -> Result<Vec<Offset>, KafkaError> {
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
    /// The cluster's id. A topic that somebody deletes and creates again in the same cluster is not noticed.
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
        Ok(Box::new(consumer::Member::join(&self.names, topic)?))
    }

    async fn ends(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        let (producer, name, partitions) = (self.producer(), self.names.topic(topic), self.partitions(topic));
        let ends = blocking(move || {
            let end = |partition| {
                let (low, high) = producer.client().fetch_watermarks(&name, index(partition), ANSWER_WITHIN)?;
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

    async fn backlog(&self, topic: Topic) -> Result<u64> {
        let (ends, committed) = (self.ends(topic).await?, self.committed(topic).await?);
        let next = |offset: Option<Offset>| offset.map_or(0, |offset| offset.major + 1);
        Ok(ends.into_iter().zip(committed).map(|(end, done)| next(end).saturating_sub(next(done))).sum())
    }

    async fn close(&self) {
        let producer = self.producer();
        let flushed = blocking(move || producer.flush(ANSWER_WITHIN)).await;
        if let Err(reason) = flushed.and_then(|flushed| flushed.map_err(|e| e.to_string())) {
            tracing::warn!("what was last published may not have reached kafka: {reason}");
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
