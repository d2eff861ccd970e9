//! The bus on Apache Kafka.

mod apart;
mod calls;
mod configs;
mod consumer;
mod detached;
mod events;
mod group;
mod properties;
mod topics;
mod trim;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use parking_lot::Mutex;
use rdkafka::{
    admin::AdminClient,
    consumer::{BaseConsumer, Consumer},
    error::{KafkaError, RDKafkaErrorCode},
    message::{Header, OwnedHeaders},
    producer::{DeliveryFuture, FutureProducer, FutureRecord, Producer},
};
use tokio::sync::OnceCell;

pub use self::properties::{RULES, resolved};
use self::{
    calls::{ANSWER_WITHIN, DELIVER_WITHIN, blocking, committed, index, offset, watermarks},
    configs::ClientConfigs,
    detached::Detached,
    events::ClientEvents,
    topics::TopicMetadata,
};
use super::{Apart, Bus, Error, Keep, Reading, Record, Result, Subscription, Topic};
use crate::{model::Offset, runtime};

/// Where the brokers are, and how to create topics there.
#[derive(Clone)]
pub struct Config {
    /// `host:port,host:port`
    pub brokers: String,
    /// librdkafka properties for every client, such as TLS and SASL. They cannot override those
    /// that taskd's guarantees depend on.
    pub properties: BTreeMap<String, String>,
    pub topic_prefix: String,
    /// The number of partitions of new topics. Existing topics keep theirs.
    pub partitions: u32,
    /// How long new topics keep reports.
    pub retention: Duration,
    /// Whether to create topic `events`, too. The name is common, so taskd does not touch an
    /// existing topic of that name unless it needs it.
    pub needs_events: bool,
}

pub struct Kafka {
    configs: ClientConfigs,
    events: ClientEvents,
    clients: Detached<Clients>,
    generation: String,
    partitions: HashMap<Topic, u32>,
    /// The number of partitions of `events` if it was not needed at the opening but requested later
    /// with [`Bus::ensure`].
    events_partitions: OnceCell<u32>,
    retention: Duration,
    /// Topics that were missing or had fewer partitions in the last check, and since when.
    reduced: Mutex<HashMap<Topic, Instant>>,
}

/// How long a topic must be missing or have fewer partitions before that counts. A broker that has
/// just started may not know the topic or its new partitions yet.
const REDUCED_FOR: Duration = Duration::from_secs(3);
/// How many accumulated events to take from an observer in each check of the topics.
const EVENTS_AT_ONCE: usize = 1000;

struct Clients {
    producer: Mutex<FutureProducer<ClientEvents>>,
    admin: AdminClient<ClientEvents>,
    /// Clients that only read committed offsets, created on the first request for a topic. They
    /// never join a group.
    observers: Mutex<HashMap<Topic, Arc<BaseConsumer<ClientEvents>>>>,
}

impl Kafka {
    /// Opens the bus and creates missing topics. [`Error::Misconfigured`] means that retrying will
    /// not help.
    pub async fn open(config: Config) -> Result<Self> {
        let Config {
            brokers,
            properties,
            topic_prefix,
            partitions,
            retention,
            needs_events,
        } = config;
        let configs = ClientConfigs {
            brokers,
            topic_prefix,
            properties,
        };
        let events = ClientEvents::default();
        let producer = Mutex::new(configs.producer(&events)?);
        let admin = configs.admin(&events)?;
        let clients = Detached::new(Clients {
            producer,
            admin,
            observers: Mutex::default(),
        });
        let producer = clients.producer.lock().clone();
        let wanted: Vec<Topic> = Topic::ALL
            .into_iter()
            .filter(|topic| *topic != Topic::Events || needs_events)
            .collect();
        let look = TopicMetadata {
            configs: &configs,
            producer: &producer,
            events: &events,
            wanted: &wanted,
        };
        let (generation, partitions) = look
            .find_or_create(&clients.admin, partitions, retention)
            .await?;
        topics::warn_of_settings(&configs, &clients.admin).await;
        events.opened();
        Ok(Self {
            configs,
            events,
            clients,
            generation,
            partitions,
            events_partitions: Default::default(),
            retention,
            reduced: Default::default(),
        })
    }

    /// Returns those of `topics` that do not exist. Creates nothing.
    pub async fn missing(config: Config, topics: &[Topic]) -> Result<Vec<Topic>> {
        let Config {
            brokers,
            properties,
            topic_prefix,
            ..
        } = config;
        let configs = ClientConfigs {
            brokers,
            topic_prefix,
            properties,
        };
        let events = ClientEvents::default();
        let producer = Detached::new(configs.producer(&events)?);
        let look = TopicMetadata {
            configs: &configs,
            producer: &producer,
            events: &events,
            wanted: topics,
        };
        Ok(look.missing().await?)
    }

    /// Finds mistakes in the properties without a broker.
    pub fn check(config: &Config) -> Result<()> {
        let Config {
            brokers,
            properties,
            topic_prefix,
            ..
        } = config.clone();
        Ok(ClientConfigs {
            brokers,
            topic_prefix,
            properties,
        }
        .check()?)
    }

    /// True for the topics that this process reads or writes.
    fn uses(&self, topic: Topic) -> bool {
        self.partitions.contains_key(&topic) || self.events_partitions.initialized()
    }

    fn producer(&self) -> FutureProducer<ClientEvents> {
        self.clients.producer.lock().clone()
    }

    /// Replaces the producer after a fatal error, because it would reject all records from then on.
    fn replace_producer_if_broken(&self) {
        let mut producer = self.clients.producer.lock();
        if let Some((code, reason)) = producer.client().fatal_error() {
            tracing::warn!("the kafka producer is replaced after {code}: {reason}");
            match self.configs.producer(&self.events) {
                Ok(new) => *producer = new,
                Err(error) => tracing::error!("no new kafka producer: {error}"),
            }
        }
    }

    fn observer(&self, topic: Topic) -> Result<Arc<BaseConsumer<ClientEvents>>> {
        let mut observers = self.clients.observers.lock();
        if let Some(observer) = observers.get(&topic) {
            return Ok(observer.clone());
        }
        // The observer's events are polled late, so they are not reported together with those of
        // the other clients.
        let observer = configs::create(&self.configs.observer(topic), ClientEvents::default());
        let observer: BaseConsumer<ClientEvents> = observer.map_err(Error::read(topic))?;
        Ok(observers.entry(topic).or_insert(Arc::new(observer)).clone())
    }

    /// Polls and discards the observers' events. Nothing else polls them, and connection errors
    /// would accumulate.
    fn drain_observers(&self) {
        for observer in self.clients.observers.lock().values() {
            let mut events =
                std::iter::repeat_with(|| observer.poll(Duration::ZERO)).take(EVENTS_AT_ONCE);
            while events.next().flatten().is_some() {}
        }
    }

    async fn publish_all(
        &self,
        topic: Topic,
        records: &[Record],
        traceparents: &BTreeMap<usize, String>,
        keys: &[String],
    ) -> Result<Vec<Offset>> {
        super::check_partitions(topic, records, self.partitions(topic))?;
        let published = publish(
            &self.producer(),
            &self.configs.topic(topic),
            records,
            traceparents,
            keys,
        )
        .await;
        published.map_err(|error| {
            self.replace_producer_if_broken();
            match error {
                KafkaError::MessageProduction(RDKafkaErrorCode::MessageSizeTooLarge) => {
                    Error::TooLarge {
                        topic,
                        cause: error.into(),
                    }
                }
                _ => Error::publish(topic)(error),
            }
        })
    }
}

/// The parts of a record other than its value.
#[derive(Clone, Copy)]
struct Beside<'a> {
    traceparent: Option<&'a String>,
    key: Option<&'a str>,
}

/// Puts the record into the producer's queue, waiting while the queue is full.
async fn enqueue(
    producer: &FutureProducer<ClientEvents>,
    topic: &str,
    record: &Record,
    Beside { traceparent, key }: Beside<'_>,
) -> Result<DeliveryFuture, KafkaError> {
    let deadline = Instant::now() + DELIVER_WITHIN;
    loop {
        let mut sent = FutureRecord::<str, [u8]>::to(topic)
            .partition(index(record.partition))
            .payload(&record.value);
        if let Some(key) = key {
            sent = sent.key(key);
        }
        if let Some(traceparent) = traceparent {
            sent = sent.headers(OwnedHeaders::new().insert(Header {
                key: "traceparent",
                value: Some(traceparent),
            }));
        }
        match producer.send_result(sent) {
            Ok(delivery) => return Ok(delivery),
            Err((error, _)) if !is_queue_full(&error) || Instant::now() > deadline => {
                return Err(error);
            }
            // librdkafka does not notify us when its queue has room. Sending a full queue takes
            // many milliseconds.
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

fn is_queue_full(error: &KafkaError) -> bool {
    matches!(
        error,
        KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull)
    )
}

/// Waits for all deliveries even after a failure, so that no record of the first attempt is in
/// flight during a retry.
async fn delivered(deliveries: Vec<DeliveryFuture>) -> Result<Vec<Offset>, KafkaError> {
    let mut offsets = Ok(Vec::with_capacity(deliveries.len()));
    for delivery in deliveries {
        let place = match delivery.await {
            Ok(Ok(delivery)) => {
                offset(delivery.offset).ok_or(KafkaError::MessageProduction(RDKafkaErrorCode::Fail))
            }
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

async fn publish(
    producer: &FutureProducer<ClientEvents>,
    topic: &str,
    records: &[Record],
    traceparents: &BTreeMap<usize, String>,
    keys: &[String],
) -> Result<Vec<Offset>, KafkaError> {
    let mut deliveries = Vec::with_capacity(records.len());
    let mut refused = None;
    for (place, record) in records.iter().enumerate() {
        let beside = Beside {
            traceparent: traceparents.get(&place),
            key: keys.get(place).map(String::as_str),
        };
        match enqueue(producer, topic, record, beside).await {
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
    /// The cluster's id. librdkafka's Rust client does not expose topic ids, so taskd recognises a
    /// recreated topic by its end offset: see [`Bus::lies_beyond`].
    fn generation(&self) -> &str {
        &self.generation
    }

    fn partitions(&self, topic: Topic) -> u32 {
        self.partitions
            .get(&topic)
            .or_else(|| self.events_partitions.get())
            .copied()
            .unwrap_or(1)
    }

    async fn ensure(&self, topic: Topic) -> Result<()> {
        if self.uses(topic) {
            return Ok(());
        }
        let found = self.events_partitions.get_or_try_init(|| async {
            let producer = self.producer();
            let look = TopicMetadata {
                configs: &self.configs,
                producer: &producer,
                events: &self.events,
                wanted: &[Topic::Events],
            };
            let (_, found) = look
                .find_or_create(&self.clients.admin, 1, self.retention)
                .await?;
            Ok::<_, Error>(found[&Topic::Events])
        });
        found.await.map(drop)
    }

    async fn publish(&self, topic: Topic, records: &[Record]) -> Result<Vec<Offset>> {
        self.publish_traced(topic, records, &BTreeMap::new()).await
    }

    async fn publish_traced(
        &self,
        topic: Topic,
        records: &[Record],
        traceparents: &BTreeMap<usize, String>,
    ) -> Result<Vec<Offset>> {
        self.publish_all(topic, records, traceparents, &[]).await
    }

    async fn publish_keyed(
        &self,
        topic: Topic,
        records: &[Record],
        keys: &[String],
    ) -> Result<Vec<Offset>> {
        self.publish_all(topic, records, &BTreeMap::new(), keys)
            .await
    }

    /// Both ways of reading are the same on Kafka: each partition has one reader in the group,
    /// which reads it in order.
    async fn subscribe(&self, topic: Topic, _reading: Reading) -> Result<Box<dyn Subscription>> {
        Ok(Box::new(consumer::Member::join(
            &self.configs,
            self.events.clone(),
            topic,
        )?))
    }

    async fn read_apart(&self, topic: Topic, after: Vec<Option<Offset>>) -> Result<Box<dyn Apart>> {
        let reader = apart::ApartReader::new(&self.configs, topic, &after)?;
        Ok(Box::new(reader))
    }

    async fn starts(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        let producer = self.producer();
        let name = self.configs.topic(topic);
        let partitions = self.partitions(topic);
        let starts = blocking(move || {
            let start = |partition| {
                let (low, high) = watermarks(producer.client(), &name, partition)?;
                Ok(if low < high { offset(low) } else { None })
            };
            (0..partitions)
                .map(start)
                .collect::<Result<_, KafkaError>>()
        });
        starts.await.map_err(Error::read(topic))
    }

    async fn ends(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        let producer = self.producer();
        let name = self.configs.topic(topic);
        let partitions = self.partitions(topic);
        let ends = blocking(move || {
            let end = |partition| {
                let (low, high) = watermarks(producer.client(), &name, partition)?;
                // Retention may have emptied the partition. In that case nobody can read up to its
                // last record.
                Ok(if low < high { offset(high - 1) } else { None })
            };
            (0..partitions).map(end).collect::<Result<_, KafkaError>>()
        });
        ends.await.map_err(Error::read(topic))
    }

    async fn committed(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        let observer = self.observer(topic)?;
        let name = self.configs.topic(topic);
        let partitions = self.partitions(topic);
        let committed = blocking(move || committed(&*observer, &name, 0..partitions));
        let next = committed.await.map_err(Error::read(topic))?;
        Ok(next.into_iter().map(|(_, next)| offset(next - 1)).collect())
    }

    async fn lies_beyond(&self, topic: Topic, partition: u32, offset: Offset) -> Result<bool> {
        let producer = self.producer();
        let name = self.configs.topic(topic);
        let extent = blocking(move || watermarks(producer.client(), &name, partition)).await;
        let (_, next) = extent.map_err(Error::read(topic))?;
        Ok(u64::try_from(next).is_ok_and(|next| offset.major >= next))
    }

    async fn backlog(&self, topic: Topic) -> Result<u64> {
        let ends = self.ends(topic).await?;
        let committed = self.committed(topic).await?;
        let next = |offset: Option<Offset>| offset.map_or(0, |offset| offset.major + 1);
        Ok(ends
            .into_iter()
            .zip(committed)
            .map(|(end, done)| next(end).saturating_sub(next(done)))
            .sum())
    }

    async fn trim(&self, topic: Topic, keep: Keep) -> Result<u64> {
        if topic == Topic::Events {
            return Ok(0);
        }
        let observer = self.observer(topic)?;
        let name = self.configs.topic(topic);
        let partitions = self.partitions(topic);
        let asked = name.clone();
        let cuts = blocking(move || trim::cuts(&observer, topic, &asked, partitions, keep)).await;
        let cuts = cuts.map_err(Error::trim(topic))?;
        if !cuts.is_empty() {
            trim::delete(&self.clients.admin, &name, &cuts)
                .await
                .map_err(Error::trim(topic))?;
        }
        Ok(cuts.iter().map(|(_, _, count)| count).sum())
    }

    async fn raise_partitions(&self, topic: Topic, count: u32) -> Result<()> {
        Ok(topics::raise(&self.configs, &self.clients.admin, topic, count).await?)
    }

    async fn check_partitions(&self) -> Result<()> {
        self.drain_observers();
        for topic in Topic::ALL.into_iter().filter(|topic| self.uses(*topic)) {
            let observer = self.observer(topic)?;
            let name = self.configs.topic(topic);
            let metadata =
                blocking(move || observer.fetch_metadata(Some(&name), ANSWER_WITHIN)).await;
            let metadata = metadata.map_err(Error::read(topic))?;
            let name = self.configs.topic(topic);
            let known = self.partitions(topic);
            let found = topics::count(&metadata, &name);
            let fewer = found.filter(|found| *found < known);
            let is_reduced = topics::is_gone(&metadata, &name) || fewer.is_some();
            let mut reduced = self.reduced.lock();
            if !is_reduced {
                reduced.remove(&topic);
            } else if reduced.entry(topic).or_insert_with(Instant::now).elapsed() >= REDUCED_FOR {
                let gone = Error::Gone { topic };
                return Err(fewer.map_or(gone, |found| Error::Resized {
                    topic,
                    known,
                    found,
                }));
            }
            if topic.is_read() {
                super::check_grown(topic, known, found)?;
            }
        }
        Ok(())
    }

    async fn ping(&self) -> Option<Result<()>> {
        let topic = Topic::Pipeline;
        let observer = match self.observer(topic) {
            Ok(observer) => observer,
            Err(error) => return Some(Err(error)),
        };
        let name = self.configs.topic(topic);
        let metadata =
            blocking(move || observer.fetch_metadata(Some(&name), runtime::ANSWER_WITHIN)).await;
        Some(metadata.map(drop).map_err(Error::read(topic)))
    }

    async fn close(&self) {
        let producer = self.producer();
        let flushed = blocking(move || producer.flush(ANSWER_WITHIN)).await;
        if let Err(error) = flushed {
            tracing::warn!("what was last published may not have reached kafka: {error}");
        }
    }
}
