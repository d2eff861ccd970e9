//! The trace of a page and its child, through a real OpenTelemetry Collector.

use std::time::Duration;

use rdkafka::{
    ClientConfig, Message as _, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    message::Headers as _,
};
use serde_json::json;
use taskd::bus::Topic;

use crate::{
    bus_kafka::broker,
    support::{
        bus_contract::Backend,
        collector::Collector,
        daemon::Daemon,
        mariadb::MysqlDatabase,
        redis::{Fsync, RedisServer},
        spans::{Receiver, TRACE, check_the_trace_of_a_page},
        store_contract::Database,
    },
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_trace_of_a_page_passes_a_collector_with_everything_embedded() {
    let (receiver, address) = Receiver::start().await;
    let collector = Collector::start(address).await;
    let mut daemon = Daemon::start("", &["--otlp-endpoint", &collector.endpoint()]).await;
    check_the_trace_of_a_page(&daemon, &receiver).await;
    assert!(daemon.stop().await.success());
}

/// Two processes share the work, so the spans of one trace come from both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_trace_of_a_page_passes_a_collector_on_mariadb_and_kafka() {
    let (receiver, address) = Receiver::start().await;
    let collector = Collector::start(address).await;
    let (redis, database, broker) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
        broker().await,
    );
    let (redis_url, database_url, endpoint) = (redis.url(), database.url(), collector.endpoint());
    let (config, bus) = (
        broker.config(),
        format!("kafka://{}", broker.config().brokers),
    );
    let backends = [
        "--redis-url",
        &redis_url,
        "--database-url",
        &database_url,
        "--bus-url",
        &bus,
    ];
    let shared = [
        &backends[..],
        &[
            "--topic-prefix",
            &config.topic_prefix,
            "--otlp-endpoint",
            &endpoint,
        ],
    ]
    .concat();
    let others = [&["--pipelines", "fanout,watchdog"], &shared[..]].concat();
    let mut daemons = [
        Daemon::start(
            "",
            &[&["--pipelines", "discovery,tasks"], &shared[..]].concat(),
        )
        .await,
        Daemon::start("", &others).await,
    ];
    // A watchdog that sees the shard of the first task half open would publish the page once more.
    daemons[0]
        .insert(&[json!({"queue": "pages", "key": "opens the shard"})])
        .await;
    let opens = daemons[0].lease_all("w", "pages", 1).await;
    assert_eq!(daemons[0].complete("w", &opens).await, ["OK"]);
    check_the_trace_of_a_page(&daemons[0], &receiver).await;

    // The records of the bus have the context as a header, for other tools.
    let topic = format!("{}{}", config.topic_prefix, Topic::Pipeline);
    let contexts = tokio::task::spawn_blocking(move || headers(&config.brokers, &topic))
        .await
        .unwrap();
    let published: Vec<String> = receiver
        .spans()
        .into_iter()
        .filter(|span| span.name == "publish")
        .map(|span| format!("00-{TRACE}-{}-01", span.id))
        .collect();
    assert_eq!((contexts.len(), published.len()), (2, 2));
    assert!(
        contexts.iter().all(|context| published.contains(context)),
        "{contexts:?} {published:?}"
    );
    for daemon in &mut daemons {
        assert!(daemon.stop().await.success());
    }
    broker.remove().await;
    database.remove().await;
}

/// The header `traceparent` of each record of a topic that has headers: those of sampled tasks.
fn headers(brokers: &str, topic: &str) -> Vec<String> {
    let client: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", "headers")
        .create()
        .unwrap();
    let within = Duration::from_secs(10);
    let count = client.fetch_metadata(Some(topic), within).unwrap().topics()[0]
        .partitions()
        .len();
    let (mut list, mut left) = (TopicPartitionList::new(), 0);
    for partition in 0..i32::try_from(count).unwrap() {
        let (low, high) = client.fetch_watermarks(topic, partition, within).unwrap();
        list.add_partition_offset(topic, partition, Offset::Offset(low))
            .unwrap();
        left += high - low;
    }
    client.assign(&list).unwrap();
    let mut contexts = Vec::new();
    for _ in 0..left {
        let record = client.poll(within).expect("a record").unwrap();
        let Some(headers) = record.headers() else {
            continue;
        };
        let header = headers
            .iter()
            .find(|header| header.key == "traceparent")
            .expect("it has the context");
        contexts.push(String::from_utf8(header.value.unwrap().to_vec()).unwrap());
    }
    contexts
}
