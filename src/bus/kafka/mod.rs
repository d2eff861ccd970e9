//! The bus on Apache Kafka.

mod calls;
mod clients;
mod configs;
mod consumer;
mod detached;
mod events;
mod group;
mod logs;
mod properties;
mod publish;
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
    consumer::{BaseConsumer, Consumer},
    producer::Producer,
};

pub use self::properties::{RULES, resolved};
use self::{
    calls::{ANSWER_WITHIN, blocking, committed, offset, watermarks},
    clients::Clients,
    configs::ClientConfigs,
    detached::Detached,
    events::ClientEvents,
    logs::KafkaLogs,
    publish::Sent,
    topics::{TopicMetadata, Wanted},
};
use super::{Bus, Error, Keep, Log, Logs, Reader, Reading, Record, Result, Topic};
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
    clients: Arc<Clients>,
    logs: Arc<KafkaLogs>,
    generation: String,
    partitions: HashMap<Topic, u32>,
    /// Topics that were missing or had fewer partitions in the last check, and since when.
    reduced: Mutex<HashMap<Topic, Instant>>,
}

/// How long a topic must be missing or have fewer partitions before that counts. A broker that has
/// just started may not know the topic or its new partitions yet.
const REDUCED_FOR: Duration = Duration::from_secs(3);
/// How many accumulated events to take from an observer in each check of the topics.
const EVENTS_AT_ONCE: usize = 1000;

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
        let producer = configs.producer(&events)?;
        let clients = Arc::new(Clients {
            producer: Mutex::new(Detached::new(producer.clone())),
            admin: Detached::new(configs.admin(&events)?),
            observers: Detached::new(Mutex::default()),
            configs,
            events,
        });
        let logs = Arc::new(KafkaLogs::new(Arc::clone(&clients), retention));
        let made: Vec<Log> = Log::REPORTS
            .into_iter()
            .filter(|log| *log != Log::EVENTS || needs_events)
            .collect();
        let of_bus = Topic::ALL.map(|topic| Wanted::for_ever(topic.as_str(), partitions));
        let wanted: Vec<Wanted> = of_bus
            .into_iter()
            .chain(made.iter().map(|log| logs.wanted(log)))
            .collect();
        let look = TopicMetadata {
            configs: &clients.configs,
            producer: &producer,
            events: &clients.events,
            wanted: &wanted,
        };
        let (generation, found) = look.find_or_create(&clients.admin).await?;
        topics::warn_of_settings(&clients.configs, &clients.admin).await;
        clients.events.opened();
        logs.note_made(&found);
        let partitions = Topic::ALL
            .into_iter()
            .map(|topic| (topic, found[topic.as_str()]))
            .collect();
        Ok(Self {
            clients,
            logs,
            generation,
            partitions,
            reduced: Default::default(),
        })
    }

    /// Returns those of `topics` that do not exist. Creates nothing.
    pub async fn missing(config: Config, topics: &[&str]) -> Result<Vec<String>> {
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
        let wanted: Vec<Wanted> = topics
            .iter()
            .map(|name| Wanted::for_ever(name, 1))
            .collect();
        let look = TopicMetadata {
            configs: &configs,
            producer: &producer,
            events: &events,
            wanted: &wanted,
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

    fn observer(&self, topic: Topic) -> Result<Arc<BaseConsumer<ClientEvents>>> {
        let mut observers = self.clients.observers.lock();
        if let Some(observer) = observers.get(&topic) {
            return Ok(observer.clone());
        }
        // The observer's events are polled late, so they are not reported together with those of
        // the other clients.
        let observer = configs::create(
            &self.clients.configs.observer(topic),
            ClientEvents::default(),
        );
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
}

#[async_trait]
impl Bus for Kafka {
    /// The cluster's id. librdkafka's Rust client does not expose topic ids, so taskd recognises a
    /// recreated topic by its end offset: see [`Bus::lies_beyond`].
    fn generation(&self) -> &str {
        &self.generation
    }

    fn partitions(&self, topic: Topic) -> u32 {
        self.partitions[&topic]
    }

    fn logs(&self) -> Arc<dyn Logs> {
        self.logs.clone()
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
        let asked = records.iter().map(|record| record.partition);
        super::check_partitions(topic, asked, self.partitions(topic))?;
        let sent = |(place, record): (usize, &Record)| {
            let sent = Sent::new(record.partition, record.value.clone());
            match traceparents.get(&place) {
                Some(traceparent) => sent.with_header("traceparent", traceparent),
                None => sent,
            }
        };
        let sent = records.iter().enumerate().map(sent).collect();
        self.clients.publish(topic.into(), sent).await
    }

    /// Both ways of reading are the same on Kafka: each partition has one reader in the group,
    /// which reads it in order.
    async fn subscribe(&self, topic: Topic, _reading: Reading) -> Result<Box<dyn Reader>> {
        Ok(Box::new(consumer::Member::join(
            &self.clients.configs,
            self.clients.events.clone(),
            topic,
        )?))
    }

    async fn ends(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        let name = self.clients.configs.topic(topic);
        let extents = self.clients.extents(name, self.partitions(topic)).await;
        let extents = extents.map_err(Error::read(topic))?;
        Ok(extents
            .into_iter()
            .map(|extent| extent.map(|(_, last)| last))
            .collect())
    }

    async fn committed(&self, topic: Topic) -> Result<Vec<Option<Offset>>> {
        let observer = self.observer(topic)?;
        let name = self.clients.configs.topic(topic);
        let partitions = self.partitions(topic);
        let committed = blocking(move || committed(&*observer, &name, 0..partitions));
        let next = committed.await.map_err(Error::read(topic))?;
        Ok(next.into_iter().map(|(_, next)| offset(next - 1)).collect())
    }

    async fn lies_beyond(&self, topic: Topic, partition: u32, offset: Offset) -> Result<bool> {
        let producer = self.clients.producer();
        let name = self.clients.configs.topic(topic);
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
        let observer = self.observer(topic)?;
        let name = self.clients.configs.topic(topic);
        let partitions = self.partitions(topic);
        let asked = name.clone();
        let cuts = blocking(move || {
            let read = committed(&*observer, &asked, 0..partitions)?;
            trim::cuts(&observer, &asked, partitions, keep, Some(read))
        });
        let cuts = cuts.await.map_err(Error::trim(topic))?;
        let trimmed = trim::delete(&self.clients.admin, &name, &cuts).await;
        trimmed.map_err(Error::trim(topic))
    }

    async fn raise_partitions(&self, topic: Topic, count: u32) -> Result<()> {
        let name = self.clients.configs.topic(topic);
        Ok(topics::raise(&self.clients.configs, &self.clients.admin, &name, count).await?)
    }

    async fn check_partitions(&self) -> Result<()> {
        self.drain_observers();
        for topic in Topic::ALL {
            let observer = self.observer(topic)?;
            let name = self.clients.configs.topic(topic);
            let metadata =
                blocking(move || observer.fetch_metadata(Some(&name), ANSWER_WITHIN)).await;
            let metadata = metadata.map_err(Error::read(topic))?;
            let name = self.clients.configs.topic(topic);
            let known = self.partitions(topic);
            let found = topics::count(&metadata, &name);
            let fewer = found.filter(|found| *found < known);
            let is_reduced = topics::is_gone(&metadata, &name) || fewer.is_some();
            let mut reduced = self.reduced.lock();
            if !is_reduced {
                reduced.remove(&topic);
            } else if reduced.entry(topic).or_insert_with(Instant::now).elapsed() >= REDUCED_FOR {
                let gone = Error::Gone {
                    topic: topic.into(),
                };
                return Err(fewer.map_or(gone, |found| Error::Resized {
                    topic: topic.into(),
                    known,
                    found,
                }));
            }
            super::check_grown(topic, known, found)?;
        }
        Ok(())
    }

    async fn ping(&self) -> Option<Result<()>> {
        let topic = Topic::Pipeline;
        let observer = match self.observer(topic) {
            Ok(observer) => observer,
            Err(error) => return Some(Err(error)),
        };
        let name = self.clients.configs.topic(topic);
        let metadata =
            blocking(move || observer.fetch_metadata(Some(&name), runtime::ANSWER_WITHIN)).await;
        Some(metadata.map(drop).map_err(Error::read(topic)))
    }

    async fn close(&self) {
        let producer = self.clients.producer();
        let flushed = blocking(move || producer.flush(ANSWER_WITHIN)).await;
        if let Err(error) = flushed {
            tracing::warn!("what was last published may not have reached kafka: {error}");
        }
    }
}
