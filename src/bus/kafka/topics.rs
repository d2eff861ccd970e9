//! Topics: found, made, watched over, enlarged.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use rdkafka::{
    admin::{AdminClient, AdminOptions, NewPartitions, NewTopic, ResourceSpecifier, TopicReplication},
    error::RDKafkaErrorCode,
    metadata::Metadata,
    producer::{FutureProducer, Producer},
    types::RDKafkaRespErr,
};

use super::{
    ANSWER_WITHIN, MAX_RECORD_BYTES, blocking,
    client::{Names, Voice},
    index,
};
use crate::bus::{Error, Result, Topic};

/// A step of waiting for an answer: between two of them we look whether the brokers refuse us.
const STEP: Duration = Duration::from_millis(500);

/// The cluster's id, and our topics with their partitions.
pub(super) async fn look(
    names: &Names,
    producer: &FutureProducer<Voice>,
    voice: &Voice,
) -> Result<(String, HashMap<Topic, u32>)> {
    let (asked, producer, voice) = (names.clone(), producer.clone(), voice.clone());
    let answer = blocking(move || {
        let id = cluster_id(&asked, &producer, &voice)?;
        // All topics: a question about one that does not exist may create it, with the broker's number of partitions.
        let metadata = producer.client().fetch_metadata(None, ANSWER_WITHIN).map_err(|e| asked.setup(&e))?;
        Ok((id, existing(&asked, &metadata)))
    });
    answer.await.unwrap_or_else(|e| Err(Error::Setup(e)))
}

/// Blocks.
fn cluster_id(names: &Names, producer: &FutureProducer<Voice>, voice: &Voice) -> Result<String> {
    let deadline = Instant::now() + ANSWER_WITHIN;
    while Instant::now() < deadline {
        if let Some(id) = producer.client().fetch_cluster_id(STEP) {
            return Ok(id);
        }
        if let Some(reason) = voice.refusal() {
            return Err(Error::Misconfigured(format!("kafka at {} does not let us in: {reason}", names.brokers)));
        }
    }
    Err(Error::Setup(format!("no answer from kafka at {} within {ANSWER_WITHIN:?}", names.brokers)))
}

/// Our topics that are ready for use, with their partitions.
fn existing(names: &Names, metadata: &Metadata) -> HashMap<Topic, u32> {
    let partitions = |topic: Topic| Some((topic, count(metadata, &names.topic(topic))?));
    Topic::ALL.into_iter().filter_map(partitions).collect()
}

/// `None` when there is no such topic, or it is not ready for use.
pub(super) fn count(metadata: &Metadata, name: &str) -> Option<u32> {
    let found = metadata.topics().iter().find(|found| found.name() == name && found.error().is_none())?;
    u32::try_from(found.partitions().len()).ok().filter(|count| *count > 0)
}

/// Whether the brokers say that there is no such topic. A topic that is not ready yet is not gone.
pub(super) fn is_gone(metadata: &Metadata, name: &str) -> bool {
    let found = metadata.topics().iter().find(|found| found.name() == name);
    found.is_some_and(|found| found.error() == Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART))
}

fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(ANSWER_WITHIN)).operation_timeout(Some(ANSWER_WITHIN))
}

/// Of what taskd itself reads, the broker deletes nothing: nobody but us knows what was read. `retention` is for the reports, which
/// nobody need read.
pub(super) async fn create(
    names: &Names,
    admin: &AdminClient<Voice>,
    missing: &[Topic],
    partitions: u32,
    retention: Duration,
) -> Result<()> {
    let retention = retention.as_millis().to_string();
    let name = |topic: &Topic| names.topic(*topic);
    let named: Vec<(Topic, String)> = missing.iter().map(|topic| (*topic, name(topic))).collect();
    let new = named.iter().map(|(topic, name)| {
        // -1: as many replicas as the cluster gives by default. A number of ours would be wrong on somebody's cluster, and one
        // replica loses tasks with one disk.
        let new = NewTopic::new(name, index(topic.partitions(partitions)), TopicReplication::Fixed(-1));
        let retention = if topic.is_read() { "-1" } else { &retention };
        let new = new.set("max.message.bytes", MAX_RECORD_BYTES).set("cleanup.policy", "delete");
        new.set("retention.ms", retention).set("retention.bytes", "-1")
    });
    let new: Vec<_> = new.collect();
    for created in admin.create_topics(&new, &options()).await.map_err(|e| names.setup(&e))? {
        match created {
            // Another process was quicker.
            Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
            Err((topic, code)) => return Err(Error::Setup(format!("kafka does not create topic {topic}: {code}"))),
        }
    }
    Ok(())
}

/// A topic that was just created takes a moment until the brokers agree on who leads it.
pub(super) async fn wait_for_all(
    names: &Names,
    producer: &FutureProducer<Voice>,
    voice: &Voice,
) -> Result<HashMap<Topic, u32>> {
    let deadline = Instant::now() + ANSWER_WITHIN;
    loop {
        let (_, found) = look(names, producer, voice).await?;
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

/// Tells whoever made our topics with a retention that it may delete what nobody has read.
pub(super) async fn warn_of_retention(names: &Names, admin: &AdminClient<Voice>) {
    let read: Vec<String> = Topic::ALL.into_iter().filter(|topic| topic.is_read()).map(|t| names.topic(t)).collect();
    let asked: Vec<_> = read.iter().map(|name| ResourceSpecifier::Topic(name)).collect();
    let answers = match admin.describe_configs(&asked, &options()).await {
        Ok(answers) => answers,
        // Somebody may read and write there and not ask.
        Err(error) => return tracing::debug!("kafka does not say how long it keeps our topics: {error}"),
    };
    for (name, answer) in read.iter().zip(answers) {
        let Ok(config) = answer else { continue };
        let value = |key: &str| config.get(key).and_then(|entry| entry.value.as_deref()).unwrap_or_default();
        let by_age_or_size =
            ["retention.ms", "retention.bytes"].into_iter().find(|key| !matches!(value(key), "-1" | ""));
        let key = by_age_or_size.or_else(|| value("cleanup.policy").contains("compact").then_some("cleanup.policy"));
        if let Some(key) = key {
            tracing::warn!(
                "kafka may delete records of {name} before they are read ({key} = {}): set retention.ms=-1, retention.bytes=-1 and \
                 cleanup.policy=delete there; taskd deletes what it has read",
                value(key)
            );
        }
    }
}

/// `count` partitions for the topic, which has fewer.
pub(super) async fn raise(names: &Names, admin: &AdminClient<Voice>, topic: Topic, count: u32) -> Result<()> {
    let name = names.topic(topic);
    let new = NewPartitions::new(&name, count as usize);
    for raised in admin.create_partitions([&new], &options()).await.map_err(|e| names.setup(&e))? {
        raised.map_err(|(topic, code)| Error::Setup(format!("kafka gives {topic} no {count} partitions: {code}")))?;
    }
    Ok(())
}
