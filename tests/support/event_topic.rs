//! Reads topic `events` of a running taskd, as another program would.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use rdkafka::{
    ClientConfig, Message as _, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
};
use taskd::{
    model::{EventRecord, TaskId, TaskStatus},
    wire,
};

use super::daemon::Daemon;

/// All events on the topic, in order, with their numbers.
pub(crate) async fn events(daemon: &Daemon) -> Vec<(u64, EventRecord)> {
    let records = match daemon.arg("--bus-url") {
        Some(url) => {
            let brokers = url.strip_prefix("kafka://").unwrap().to_owned();
            let topic = format!("{}events", daemon.arg("--topic-prefix").unwrap_or_default());
            let read = tokio::task::spawn_blocking(move || on_kafka(&brokers, &topic))
                .await
                .unwrap();
            for (key, record) in &read {
                let (_, event) = wire::read_event_record(record).unwrap();
                assert_eq!(*key, event.id.to_string(), "the key");
            }
            read.into_iter().map(|(_, record)| record).collect()
        }
        None => on_redis(daemon).await,
    };
    records
        .iter()
        .map(|record| wire::read_event_record(record).unwrap())
        .collect()
}

/// The statuses of each key, without repeated events. The events of a task must be in order.
pub(crate) async fn statuses(daemon: &Daemon) -> BTreeMap<String, Vec<TaskStatus>> {
    in_order(&events(daemon).await)
}

/// Like [`statuses`], for events that were already read.
pub(crate) fn in_order(events: &[(u64, EventRecord)]) -> BTreeMap<String, Vec<TaskStatus>> {
    let (mut last, mut statuses): (BTreeMap<TaskId, u64>, BTreeMap<String, Vec<TaskStatus>>) =
        Default::default();
    for (number, event) in events {
        let last = last.entry(event.id).or_default();
        // A repeated event, which readers recognize by its number.
        if *number <= *last {
            continue;
        }
        *last = *number;
        let key = String::from_utf8(event.key.to_vec()).unwrap();
        statuses.entry(key).or_default().push(event.status);
    }
    statuses
}

async fn on_redis(daemon: &Daemon) -> Vec<Bytes> {
    let mut redis = match daemon.arg("--redis-url") {
        Some(url) => super::redis::patient(url).await,
        None => daemon.redis().await,
    };
    let key = format!(
        "{}:{{bus}}:events:0",
        daemon.arg("--redis-prefix").unwrap_or("taskd")
    );
    let entries: redis::streams::StreamRangeReply = redis::cmd("XRANGE")
        .arg(key)
        .arg("-")
        .arg("+")
        .query_async(&mut redis)
        .await
        .unwrap();
    entries
        .ids
        .iter()
        .map(|entry| Bytes::from(entry.get::<Vec<u8>>("v").unwrap()))
        .collect()
}

/// The records of the only partition, each with its key.
fn on_kafka(brokers: &str, topic: &str) -> Vec<(String, Bytes)> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", "reads")
        .create()
        .unwrap();
    let within = Duration::from_secs(10);
    let (low, high) = consumer.fetch_watermarks(topic, 0, within).unwrap();
    let mut partition = TopicPartitionList::new();
    partition
        .add_partition_offset(topic, 0, Offset::Offset(low))
        .unwrap();
    consumer.assign(&partition).unwrap();
    let (mut read, mut next) = (Vec::new(), low);
    while next < high {
        let message = consumer
            .poll(within)
            .expect("a record before the end of the topic")
            .unwrap();
        let key = String::from_utf8(message.key().expect("a key").to_vec()).unwrap();
        read.push((key, Bytes::copy_from_slice(message.payload().unwrap())));
        next = message.offset() + 1;
    }
    read
}
