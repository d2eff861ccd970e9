//! Finds, creates, checks and enlarges topics.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use rdkafka::{
    admin::{
        AdminClient, AdminOptions, AlterConfig, ConfigSource, NewPartitions, NewTopic,
        ResourceSpecifier, TopicReplication,
    },
    error::{KafkaError, RDKafkaErrorCode},
    metadata::Metadata,
    producer::{FutureProducer, Producer},
    types::RDKafkaRespErr,
};

use super::{
    calls::{ANSWER_WITHIN, Failure, MAX_RECORD_BYTES, blocking, index},
    configs::ClientConfigs,
    events::ClientEvents,
};
use crate::bus::Topic;

type Result<T> = std::result::Result<T, Failure>;

/// How long each attempt to get the cluster's id waits. Between attempts taskd checks whether the
/// brokers have refused the connection.
const STEP: Duration = Duration::from_millis(500);
/// The minimum and maximum age at which the broker starts a new segment of `events`, so that it can
/// delete the previous one. A shorter age costs more files.
const SEGMENTS: (Duration, Duration) = (Duration::from_secs(600), Duration::from_secs(24 * 3600));

/// A request for the metadata of topics.
#[derive(Clone, Copy)]
pub(super) struct TopicMetadata<'a> {
    pub(super) configs: &'a ClientConfigs,
    pub(super) producer: &'a FutureProducer<ClientEvents>,
    pub(super) events: &'a ClientEvents,
    pub(super) wanted: &'a [Wanted],
}

/// A topic, and the settings to make it with if it does not exist.
#[derive(Clone)]
pub(super) struct Wanted {
    /// Without the prefix.
    pub(super) name: String,
    pub(super) partitions: u32,
    /// How long the broker keeps records; `None`: for ever.
    pub(super) age: Option<Duration>,
    /// How many bytes of a partition the broker keeps; `None`: all.
    pub(super) bytes: Option<u64>,
    /// Whether only the broker deletes old records, which it does in whole segments.
    pub(super) is_left_to_broker: bool,
}

impl Wanted {
    /// A topic of which the broker deletes nothing, because only taskd knows what has been read.
    pub(super) fn for_ever(name: &str, partitions: u32) -> Self {
        Self {
            name: name.to_owned(),
            partitions,
            age: None,
            bytes: None,
            is_left_to_broker: false,
        }
    }
}

impl TopicMetadata<'_> {
    /// Finds the wanted topics and creates those that are missing. Returns the cluster's id, and
    /// the topics with their numbers of partitions.
    pub(super) async fn find_or_create(
        self,
        admin: &AdminClient<ClientEvents>,
    ) -> Result<(String, HashMap<String, u32>)> {
        let (id, found) = self.look().await?;
        let missing: Vec<&Wanted> = self
            .wanted
            .iter()
            .filter(|wanted| !found.contains_key(&wanted.name))
            .collect();
        if missing.is_empty() {
            return Ok((id, found));
        }
        create(self.configs, admin, &missing).await?;
        Ok((id, self.wait_for_all().await?))
    }

    /// The cluster's id, and the topics that are ready for use with their numbers of partitions.
    pub(super) async fn look(self) -> Result<(String, HashMap<String, u32>)> {
        let (id, found) = self.ask(count).await?;
        Ok((
            id,
            found
                .into_iter()
                .filter_map(|(topic, count)| Some((topic, count?)))
                .collect(),
        ))
    }

    /// The topics that do not exist. An existing topic is not included even if it is not ready yet.
    pub(super) async fn missing(self) -> Result<Vec<String>> {
        let (_, found) = self.ask(is_there).await?;
        Ok(found
            .into_iter()
            .filter(|(_, is_there)| !is_there)
            .map(|(topic, _)| topic)
            .collect())
    }

    /// The cluster's id, and what `read` takes from the brokers' metadata for each topic.
    async fn ask<T: Send + 'static>(
        self,
        read: fn(&Metadata, &str) -> T,
    ) -> Result<(String, Vec<(String, T)>)> {
        let configs = self.configs.clone();
        let producer = self.producer.clone();
        let events = self.events.clone();
        let wanted = self.wanted.to_vec();
        let answer = blocking(move || {
            let id = cluster_id(&configs, &producer, &events)?;
            // Fetches all topics, because asking for a missing topic may create it with the
            // broker's default number of partitions.
            let metadata = producer
                .client()
                .fetch_metadata(None, ANSWER_WITHIN)
                .map_err(at(&configs))?;
            let read = |wanted: Wanted| {
                let found = read(&metadata, &configs.name(&wanted.name));
                (wanted.name, found)
            };
            Ok::<_, Failure>((id, wanted.into_iter().map(read).collect()))
        });
        answer.await
    }

    /// Waits until new topics are ready. The brokers need a moment to elect their leaders.
    async fn wait_for_all(self) -> Result<HashMap<String, u32>> {
        let deadline = Instant::now() + ANSWER_WITHIN;
        loop {
            let (_, found) = self.look().await?;
            if found.len() == self.wanted.len() {
                return Ok(found);
            }
            if Instant::now() > deadline {
                let missing = self
                    .wanted
                    .iter()
                    .find(|wanted| !found.contains_key(&wanted.name));
                let topic = missing
                    .map(|wanted| self.configs.name(&wanted.name))
                    .unwrap_or_default();
                return Err(Failure::NotReady {
                    topic,
                    within: ANSWER_WITHIN,
                });
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Blocks.
fn cluster_id(
    configs: &ClientConfigs,
    producer: &FutureProducer<ClientEvents>,
    events: &ClientEvents,
) -> Result<String> {
    let deadline = Instant::now() + ANSWER_WITHIN;
    while Instant::now() < deadline {
        if let Some(id) = producer.client().fetch_cluster_id(STEP) {
            return Ok(id);
        }
        if let Some(reason) = events.refusal() {
            return Err(Failure::Refused {
                brokers: configs.brokers.clone(),
                reason,
            });
        }
    }
    Err(Failure::Away {
        brokers: configs.brokers.clone(),
        within: ANSWER_WITHIN,
    })
}

/// The number of partitions, or `None` if the topic does not exist or is not ready for use.
pub(super) fn count(metadata: &Metadata, name: &str) -> Option<u32> {
    let found = metadata
        .topics()
        .iter()
        .find(|found| found.name() == name && found.error().is_none())?;
    u32::try_from(found.partitions().len())
        .ok()
        .filter(|count| *count > 0)
}

fn is_there(metadata: &Metadata, name: &str) -> bool {
    metadata.topics().iter().any(|found| found.name() == name) && !is_gone(metadata, name)
}

/// True if the brokers report that the topic does not exist. A topic that is not ready yet does
/// exist.
pub(super) fn is_gone(metadata: &Metadata, name: &str) -> bool {
    let found = metadata.topics().iter().find(|found| found.name() == name);
    found.is_some_and(|found| {
        found.error() == Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART)
    })
}

fn at(configs: &ClientConfigs) -> impl FnOnce(KafkaError) -> Failure {
    let brokers = configs.brokers.clone();
    move |cause| Failure::At { brokers, cause }
}

fn options() -> AdminOptions {
    AdminOptions::new()
        .request_timeout(Some(ANSWER_WITHIN))
        .operation_timeout(Some(ANSWER_WITHIN))
}

async fn create(
    configs: &ClientConfigs,
    admin: &AdminClient<ClientEvents>,
    missing: &[&Wanted],
) -> Result<()> {
    let values = |wanted: &&Wanted| (configs.name(&wanted.name), Bounds::of(wanted));
    let values: Vec<(String, Bounds)> = missing.iter().map(values).collect();
    let new = missing.iter().zip(&values).map(|(wanted, (name, bounds))| {
        // -1 is the cluster's default replication factor. No fixed number suits every cluster, and
        // with a single replica one failed disk would lose tasks.
        let new = NewTopic::new(name, index(wanted.partitions), TopicReplication::Fixed(-1));
        let mut new = new
            .set("max.message.bytes", MAX_RECORD_BYTES)
            .set("cleanup.policy", "delete");
        for (config, value) in &bounds.0 {
            new = new.set(config, value);
        }
        new
    });
    let new: Vec<_> = new.collect();
    for created in admin
        .create_topics(&new, &options())
        .await
        .map_err(at(configs))?
    {
        match created {
            // Another process was faster.
            Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
            Err((topic, code)) => return Err(Failure::NotCreated { topic, code }),
        }
    }
    Ok(())
}

/// The configs of a topic that follow from its bounds.
struct Bounds(Vec<(&'static str, String)>);

impl Bounds {
    fn of(wanted: &Wanted) -> Self {
        let or_none = |value: Option<String>| value.unwrap_or_else(|| "-1".to_owned());
        let mut bounds = vec![
            (
                "retention.ms",
                or_none(wanted.age.map(|age| age.as_millis().to_string())),
            ),
            (
                "retention.bytes",
                or_none(wanted.bytes.map(|bytes| bytes.to_string())),
            ),
        ];
        if let Some(bytes) = wanted.bytes {
            // Kafka deletes whole segments only.
            let segment = (bytes / 4).clamp(1 << 20, 1 << 30);
            bounds.push(("segment.bytes", segment.to_string()));
        }
        if wanted.is_left_to_broker {
            let segment = wanted.age.unwrap_or(SEGMENTS.1);
            let segment = segment.clamp(SEGMENTS.0, SEGMENTS.1).as_millis();
            bounds.push(("segment.ms", segment.to_string()));
        }
        Self(bounds)
    }
}

/// Gives a topic that exists the configs that follow from its bounds. What others have set stays.
pub(super) async fn change(
    configs: &ClientConfigs,
    admin: &AdminClient<ClientEvents>,
    wanted: &Wanted,
) -> Result<()> {
    let name = configs.name(&wanted.name);
    let asked = [ResourceSpecifier::Topic(&name)];
    let answers = admin.describe_configs(&asked, &options()).await;
    let refused = |code| Failure::NotChanged {
        topic: name.clone(),
        code,
    };
    let mut entries = Vec::new();
    for answer in answers.map_err(at(configs))? {
        entries.extend(answer.map_err(refused)?.entries);
    }
    let bounds = Bounds::of(wanted);
    let is_there = |(config, value): &(&str, String)| {
        entries
            .iter()
            .any(|entry| entry.name == *config && entry.value.as_ref() == Some(value))
    };
    if bounds.0.iter().all(is_there) {
        return Ok(());
    }
    // What the call leaves out becomes the default again.
    let mut change = AlterConfig::new(ResourceSpecifier::Topic(&name));
    for entry in &entries {
        if let (ConfigSource::DynamicTopic, Some(value)) = (&entry.source, &entry.value) {
            change = change.set(&entry.name, value);
        }
    }
    for (config, value) in &bounds.0 {
        change = change.set(config, value);
    }
    for changed in admin
        .alter_configs([&change], &options())
        .await
        .map_err(at(configs))?
    {
        changed.map_err(|(_, code)| refused(code))?;
    }
    Ok(())
}

/// Warns if retention may delete records before taskd reads them, and if the maximum record size is
/// smaller than taskd's: a larger report would stay in its shard and block those after it.
pub(super) async fn warn_of_settings(configs: &ClientConfigs, admin: &AdminClient<ClientEvents>) {
    let read = Topic::ALL.map(|topic| configs.topic(topic));
    let asked: Vec<_> = read
        .iter()
        .map(|name| ResourceSpecifier::Topic(name))
        .collect();
    let answers = match admin.describe_configs(&asked, &options()).await {
        Ok(answers) => answers,
        // A user may be allowed to read and write, but not to describe configurations.
        Err(error) => {
            return tracing::debug!("kafka does not say how long it keeps our topics: {error}");
        }
    };
    for (name, answer) in read.iter().zip(answers) {
        let Ok(config) = answer else { continue };
        let value = |key: &str| {
            config
                .get(key)
                .and_then(|entry| entry.value.as_deref())
                .unwrap_or_default()
        };
        let [most, wanted] =
            [value("max.message.bytes"), MAX_RECORD_BYTES].map(|bytes| bytes.parse::<u64>().ok());
        if most.is_some_and(|most| Some(most) < wanted) {
            tracing::warn!(
                "kafka takes no record of more than {} bytes for {name}: set max.message.bytes={MAX_RECORD_BYTES} \
                 there, or payloads and results that are larger get no further",
                value("max.message.bytes")
            );
        }
        let by_age_or_size = ["retention.ms", "retention.bytes"]
            .into_iter()
            .find(|key| !matches!(value(key), "-1" | ""));
        let key = by_age_or_size.or_else(|| {
            value("cleanup.policy")
                .contains("compact")
                .then_some("cleanup.policy")
        });
        if let Some(key) = key {
            tracing::warn!(
                "kafka may delete records of {name} before they are read ({key} = {}): set retention.ms=-1, \
                 retention.bytes=-1 and cleanup.policy=delete there; taskd deletes what it has read",
                value(key)
            );
        }
    }
}

/// Raises the topic's number of partitions to `count`.
pub(super) async fn raise(
    configs: &ClientConfigs,
    admin: &AdminClient<ClientEvents>,
    name: &str,
    count: u32,
) -> Result<()> {
    let new = NewPartitions::new(name, count as usize);
    for raised in admin
        .create_partitions([&new], &options())
        .await
        .map_err(at(configs))?
    {
        raised.map_err(|(topic, code)| Failure::NotRaised { topic, count, code })?;
    }
    Ok(())
}
