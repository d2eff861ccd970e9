//! The bus on Kafka: the contract, and what only Kafka can do to it.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions},
    client::DefaultClientContext,
};
use taskd::bus::{
    Bus, Error, Log, Message, Reading, Record, Topic, TopicName,
    kafka::{Config, Kafka},
};

use crate::support::{
    bus_contract::{
        Backend, PARTITIONS, bus_contract, commit, publish_many, read, subscribe, values, within,
    },
    kafka::{KafkaServer, shared},
    logs_contract::{self, logs_contract},
};

pub(crate) struct Broker {
    brokers: String,
    prefix: String,
}

impl Broker {
    pub(crate) fn new(brokers: &str) -> Self {
        Self {
            brokers: brokers.to_owned(),
            prefix: format!("{}.", uuid::Uuid::now_v7().simple()),
        }
    }

    pub(crate) fn config(&self) -> Config {
        Config {
            brokers: self.brokers.clone(),
            properties: BTreeMap::new(),
            topic_prefix: self.prefix.clone(),
            partitions: PARTITIONS,
            retention: Duration::from_secs(3600),
            needs_events: true,
        }
    }
}

#[async_trait]
impl Backend for Broker {
    async fn open(&self) -> Arc<dyn Bus> {
        Arc::new(
            within("open", Kafka::open(self.config()))
                .await
                .expect("open"),
        )
    }

    /// The broker serves the next runs too.
    async fn remove(&self) {
        let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .create()
            .expect("a client");
        let topics: Vec<String> = Topic::ALL
            .map(TopicName::from)
            .into_iter()
            .chain(Log::REPORTS.map(|log| log.name))
            .chain([logs_contract::NAME.into()])
            .map(|topic| format!("{}{topic}", self.prefix))
            .collect();
        let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
        within("delete", admin.delete_topics(&topics, &AdminOptions::new()))
            .await
            .expect("delete");
    }
}

pub(crate) async fn broker() -> Broker {
    Broker::new(shared().await)
}

bus_contract!(broker);
logs_contract!(broker);

#[tokio::test]
async fn topics_keep_their_partitions() {
    let broker = broker().await;
    broker.open().await;
    let bus = Kafka::open(Config {
        partitions: PARTITIONS + 4,
        ..broker.config()
    })
    .await
    .expect("open");
    assert_eq!(bus.partitions(Topic::Pipeline), PARTITIONS);
    broker.remove().await;
}

#[tokio::test]
async fn a_record_larger_than_the_topic_takes_is_told_from_other_errors() {
    let broker = broker().await;
    let bus = broker.open().await;
    let record = Record {
        partition: 0,
        value: vec![0; 17 << 20].into(),
    };
    let refused = bus.publish(Topic::Pipeline, &[record]).await;
    assert!(
        matches!(refused, Err(Error::TooLarge { .. })),
        "{refused:?}"
    );
    bus.close().await;
    broker.remove().await;
}

#[tokio::test]
async fn no_broker_is_an_error_that_says_where() {
    let started = Instant::now();
    let Err(Error::Setup(reason)) = Kafka::open(Broker::new("127.0.0.1:1").config()).await else {
        panic!("there is nobody")
    };
    assert!(reason.to_string().contains("127.0.0.1:1"), "{reason}");
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "{:?}",
        started.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_publish_answered_survives_sigkill() {
    let server = KafkaServer::start().await;
    let broker = Broker::new(server.brokers());
    let bus = broker.open().await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let (answered, mut count) = tokio::sync::watch::channel(0);
    let (stop, stopped) = tokio::sync::watch::channel(false);
    // Goes on through the kill and the restart: what failed is published again, so a record may
    // stand twice.
    let publishing = tokio::spawn({
        let bus = bus.clone();
        async move {
            for i in 0.. {
                let record = Record {
                    partition: 0,
                    value: i.to_string().into(),
                };
                while let Err(error) = bus
                    .publish(Topic::Pipeline, std::slice::from_ref(&record))
                    .await
                {
                    assert!(matches!(error, Error::Publish { .. }), "{error}");
                }
                answered.send_replace(i + 1);
                if *stopped.borrow() {
                    return i;
                }
            }
            unreachable!("usize has room")
        }
    });
    within("some records", count.wait_for(|count| *count >= 100))
        .await
        .expect("the publisher runs");
    let before = read(&mut *reader, 50).await;
    commit(&mut *reader, &before).await;
    server.kill9();
    let at_kill = *count.borrow();
    within("the restart", server.restart()).await;
    within(
        "more records",
        count.wait_for(|count| *count > at_kill + 100),
    )
    .await
    .expect("the publisher runs");
    stop.send_replace(true);
    let last = within("the publisher", publishing).await.expect("no panic");
    drop(reader);

    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let after = within("all that was published", async {
        let mut after: Vec<Message> = Vec::new();
        while after
            .last()
            .is_none_or(|message| message.value != last.to_string())
        {
            after.extend(reader.next(1000).await.unwrap_or_default());
        }
        after
    });
    let after = after.await;
    let mut found: Vec<usize> = values(&after)
        .iter()
        .map(|value| value.parse().expect("a number"))
        .collect();
    assert!(found.is_sorted(), "{found:?}");
    found.dedup();
    assert_eq!(found, (before.len()..=last).collect::<Vec<_>>());
    bus.close().await;
}

#[test]
fn a_broker_that_is_gone_is_an_error_and_does_not_hold_up_the_end() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let server = KafkaServer::start().await;
        let bus = Broker::new(server.brokers()).open().await;
        publish_many(&*bus, Topic::Pipeline, 0, "r", 3).await;
        let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
        let messages = read(&mut *reader, 3).await;
        server.kill9();

        let records = [Record {
            partition: 0,
            value: "r".into(),
        }];
        let calls = async {
            tokio::join!(
                bus.publish(Topic::Pipeline, &records),
                bus.ends(Topic::Pipeline)
            )
        };
        let reading = async { (reader.commit(&messages).await, reader.next(10).await) };
        let ((published, ends), (committed, next)) =
            within("errors", async { tokio::join!(calls, reading) }).await;
        assert!(
            matches!(published, Err(Error::Publish { .. })),
            "{published:?}"
        );
        assert!(matches!(ends, Err(Error::Read { .. })), "{ends:?}");
        assert!(
            matches!(committed, Err(Error::Commit { .. })),
            "{committed:?}"
        );
        // The commit is tried again before anything else is read.
        assert!(
            matches!(next, Err(Error::Commit { .. } | Error::Read { .. })),
            "{next:?}"
        );
        within("close", bus.close()).await;
    });
    // Waits for what blocks: among others for the reader, who leaves its group.
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(runtime);
        ended.send(()).ok();
    });
    end.recv_timeout(Duration::from_secs(30))
        .expect("the runtime ends");
}
