//! Topics that somebody deletes, and makes anew: their offsets begin again, and what taskd knows of
//! the old ones must not hold up anything.

use std::time::Duration;

use prost::Message as _;
use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication},
    client::DefaultClientContext,
};
use serde_json::{Value, json};
use taskd::{
    bus::{Bus, Log, LogRecord, Record, Retention, Topic, TopicName, kafka::Kafka},
    model::{TaskId, in_short},
    wire::pb,
};

use crate::{
    bus_kafka::{Broker, broker},
    support::{
        bus_contract::Backend as _,
        daemon::{Daemon, once},
        http_client,
        redis::{Fsync, RedisServer},
        subscriptions::{put, subscribe, until_it_has},
        until,
    },
};

struct Bed {
    broker: Broker,
    _redis: RedisServer,
    admin: AdminClient<DefaultClientContext>,
    _folder: tempfile::TempDir,
    args: Vec<String>,
}

impl Bed {
    async fn new() -> Self {
        let (broker, redis) = (broker().await, RedisServer::start(Fsync::Always));
        let config = broker.config();
        let admin = ClientConfig::new()
            .set("bootstrap.servers", &config.brokers)
            .create()
            .expect("a client");
        let folder = tempfile::tempdir().expect("a folder");
        let args = [
            ("--redis-url", redis.url()),
            ("--bus-url", format!("kafka://{}", config.brokers)),
            (
                "--database-url",
                format!("sqlite://{}/taskd.db", folder.path().display()),
            ),
            ("--topic-prefix", config.topic_prefix),
        ];
        let args = args
            .into_iter()
            .flat_map(|(name, value)| [name.to_owned(), value])
            .collect();
        Self {
            broker,
            _redis: redis,
            admin,
            _folder: folder,
            args,
        }
    }

    async fn start(&self, more: &[&str]) -> Daemon {
        let args: Vec<&str> = self
            .args
            .iter()
            .map(String::as_str)
            .chain(more.iter().copied())
            .collect();
        Daemon::start("grace = \"1s\"\nrepublish_after = \"500ms\"", &args).await
    }

    fn name(&self, topic: impl Into<TopicName>) -> String {
        format!("{}{}", self.broker.config().topic_prefix, topic.into())
    }

    async fn delete(&self, topic: impl Into<TopicName>) {
        let name = self.name(topic);
        let deleted = self
            .admin
            .delete_topics(&[&name], &AdminOptions::new())
            .await
            .expect("an answer");
        deleted[0].as_ref().expect("deleted");
    }

    /// As soon as the old one is gone. With one partition.
    async fn create(&self, topic: Topic) {
        let name = self.name(topic);
        let new = NewTopic::new(&name, 1, TopicReplication::Fixed(1));
        until("the topic is there again", async || {
            let created = self
                .admin
                .create_topics([&new], &AdminOptions::new())
                .await
                .expect("an answer");
            created[0].is_ok()
        })
        .await;
    }
}

fn tasks(name: &str, count: usize) -> Vec<Value> {
    (0..count)
        .map(|n| json!({"queue": "q", "key": format!("{name}-{n}")}))
        .collect()
}

impl Bed {
    /// Some tasks are done and some are not, far into the topic: what goes out anew does not come
    /// that far soon.
    async fn some_work(&self, daemon: &Daemon) {
        let bus = Kafka::open(self.broker.config()).await.expect("open");
        let of_nobody = || pb::PipelineRecord {
            id: TaskId::new().as_bytes().to_vec().into(),
            queue: "q".into(),
            replicas: 1,
            priority: 2,
            max_attempts: 1,
            lease_ms: 1000,
            again: true,
            ..Default::default()
        };
        for _ in 0..50 {
            let records = std::iter::repeat_with(|| of_nobody().encode_to_vec().into());
            let records: Vec<_> = records
                .take(1000)
                .map(|value| Record {
                    partition: 0,
                    value,
                })
                .collect();
            bus.publish(Topic::Pipeline, &records)
                .await
                .expect("published");
        }
        daemon.insert(&tasks("before", 200)).await;
        daemon.work("w", "q", 150).await;
    }
}

/// `events` is a common name. Without a queue whose events go there, taskd neither makes the topic
/// nor touches it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_events_that_nobody_switched_on_is_left_alone() {
    let broker = broker().await;
    let config = taskd::bus::kafka::Config {
        needs_events: false,
        ..broker.config()
    };
    let name = format!("{}events", config.topic_prefix);
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", &config.brokers)
        .create()
        .expect("a client");
    let exists = || {
        let metadata = admin
            .inner()
            .fetch_metadata(None, Duration::from_secs(30))
            .expect("an answer");
        metadata.topics().iter().any(|topic| topic.name() == name)
    };
    let bus = Kafka::open(config.clone()).await.expect("open");
    for _ in 0..3 {
        bus.check_partitions().await.expect("nothing is gone");
    }
    let nothing = Retention {
        age: Duration::ZERO,
        records: 0,
        bytes: 0,
    };
    let logs = bus.logs();
    assert_eq!(logs.trim(&Log::EVENTS, nothing).await.expect("trim"), 0);
    assert!(!exists());

    // Another process has events, so they are in SQL.
    assert_eq!(logs.make(&Log::EVENTS).await.expect("made"), 1);
    assert!(exists());
    let records = ["a", "b"].map(|value| LogRecord {
        value: value.into(),
        ..LogRecord::default()
    });
    logs.append(&Log::EVENTS, &records)
        .await
        .expect("published");
    let of_topic = [ResourceSpecifier::Topic(&name)];
    let answer = admin
        .describe_configs(&of_topic, &AdminOptions::new())
        .await
        .expect("an answer")
        .remove(0);
    let settings = answer.expect("settings");
    let value = |name: &str| settings.get(name).and_then(|entry| entry.value.clone());
    assert_eq!(
        (value("retention.ms"), value("segment.ms")),
        (Some("3600000".into()), Some("3600000".into()))
    );
    // The broker removes them, and nobody else does: they may be somebody else's.
    let on = Kafka::open(broker.config()).await.expect("open");
    for logs in [bus.logs(), on.logs()] {
        assert_eq!(logs.trim(&Log::EVENTS, nothing).await.expect("trim"), 0);
        assert_eq!(
            logs.ends(&Log::EVENTS).await.expect("ends")[0].map(|end| end.major),
            Some(1)
        );
    }
    bus.close().await;
    on.close().await;
    broker.remove().await;
}

/// Every task ends, also those of queues that are new.
async fn all_ends(bed: &Bed, daemon: &Daemon) {
    daemon.insert(&tasks("after", 20)).await;
    daemon.works_again("another").await;
    once(daemon.drain("w", "q").await);
    assert_eq!(daemon.queue("q").await["completed"], 220);
    let bus = Kafka::open(bed.broker.config()).await.expect("open");
    until("all is committed", async || {
        bus.backlog(Topic::Pipeline).await.expect("backlog") == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipeline_made_anew_while_taskd_stands_still() {
    let bed = Bed::new().await;
    let mut daemon = bed.start(&[]).await;
    bed.some_work(&daemon).await;
    assert!(daemon.stop().await.success());
    bed.delete(Topic::Pipeline).await;
    let daemon = bed.start(&[]).await;
    all_ends(&bed, &daemon).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipeline_made_anew_under_a_running_taskd() {
    let bed = Bed::new().await;
    let daemon = bed.start(&[]).await;
    bed.some_work(&daemon).await;
    bed.delete(Topic::Pipeline).await;
    bed.create(Topic::Pipeline).await;
    all_ends(&bed, &daemon).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topics_that_are_deleted_under_a_running_taskd_are_made_again() {
    let bed = Bed::new().await;
    let daemon = bed.start(&[]).await;
    bed.some_work(&daemon).await;
    for topic in Topic::ALL {
        bed.delete(topic).await;
    }
    for log in [Log::EXPIRATIONS, Log::DEAD_LETTERS] {
        bed.delete(log.name).await;
    }
    all_ends(&bed, &daemon).await;
}

/// Also one of a producer that is a few seconds old. Its round cannot end before the record fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_for_a_deleted_topic_fails_before_its_time_is_over() {
    let bed = Bed::new().await;
    let bus = Kafka::open(bed.broker.config()).await.expect("open");
    bed.delete(Topic::Pipeline).await;
    let records = [Record {
        partition: 0,
        value: "a".into(),
    }];
    // A record that is on its way while the producer drops the partition fails with BrokerDestroy.
    until(
        "the topic is gone for the producer, too",
        async || match bus.publish(Topic::Pipeline, &records).await {
            Ok(_) => false,
            Err(error) => {
                let refused = in_short(&error);
                assert!(!refused.contains("MessageTimedOut"), "{refused}");
                refused.contains("Unknown")
            }
        },
    )
    .await;
    bus.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_whose_reports_are_deleted_with_their_topic_are_done_again() {
    let bed = Bed::new().await;
    let mut daemon = bed.start(&[]).await;
    daemon.insert(&tasks("before", 20)).await;
    until("all are queued", async || {
        daemon.queue("q").await["waiting"] == 20
    })
    .await;
    assert!(daemon.stop().await.success());
    // Nobody reads what workers report.
    let mut daemon = bed.start(&["--pipelines", "fanout,watchdog,tasks"]).await;
    assert_eq!(daemon.work("w", "q", 20).await.len(), 20);
    assert!(daemon.stop().await.success());
    bed.delete(Topic::TaskResults).await;
    bed.create(Topic::TaskResults).await;
    let daemon = bed.start(&[]).await;
    assert_eq!(daemon.queue("q").await["completed"], 0);
    assert_eq!(once(daemon.drain("w", "q").await).len(), 20);
}

/// The offset that the group has committed in the old topic is larger than any of the new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_of_a_topic_made_anew_under_a_running_taskd_are_committed() {
    let bed = Bed::new().await;
    let daemon = bed.start(&[]).await;
    daemon.insert(&tasks("before", 30)).await;
    // One by one, so that they are many records.
    until("all are done", async || {
        let task = daemon.lease("w", "q", 1, "100ms").await;
        assert!(
            daemon
                .complete("w", &task)
                .await
                .iter()
                .all(|status| status == "OK")
        );
        daemon.unfinished("q").await == 0
    })
    .await;
    let bus = Kafka::open(bed.broker.config()).await.expect("open");
    until("all reports are committed", async || {
        bus.backlog(Topic::TaskResults).await.expect("backlog") == 0
    })
    .await;
    let before = bus.committed(Topic::TaskResults).await.expect("committed")[0];
    bus.close().await;
    bed.delete(Topic::TaskResults).await;
    bed.create(Topic::TaskResults).await;

    daemon.insert(&tasks("after", 1)).await;
    assert_eq!(once(daemon.drain("w", "q").await).len(), 1);
    let bus = Kafka::open(bed.broker.config()).await.expect("open");
    let ends = bus.ends(Topic::TaskResults).await.expect("ends");
    assert!(
        ends[0].is_some() && ends[0] < before,
        "{ends:?} and {before:?}"
    );
    until("the new ones are, too", async || {
        bus.committed(Topic::TaskResults).await.expect("committed")[0] == ends[0]
    })
    .await;
    bus.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipeline_made_anew_with_fewer_partitions_under_a_running_taskd() {
    let bed = Bed::new().await;
    let daemon = bed.start(&["--partitions", "4"]).await;
    daemon.insert(&tasks("before", 40)).await;
    assert_eq!(once(daemon.drain("w", "q").await).len(), 40);
    bed.delete(Topic::Pipeline).await;
    bed.create(Topic::Pipeline).await;

    daemon.insert(&tasks("after", 40)).await;
    daemon.works_again("q").await;
    assert_eq!(daemon.queue("q").await["completed"], 81);
    let bus = Kafka::open(bed.broker.config()).await.expect("open");
    assert_eq!(bus.partitions(Topic::Pipeline), 1);
    bus.close().await;
    let log = daemon.log();
    assert!(
        log.contains("starting over: topic pipeline has 1 partitions now, no longer 4"),
        "{log}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_that_nobody_read_in_partitions_that_are_no_more() {
    let bed = Bed::new().await;
    // Nobody reads `pipeline`.
    let mut daemon = bed
        .start(&[
            "--partitions",
            "4",
            "--pipelines",
            "discovery,watchdog,tasks",
        ])
        .await;
    daemon.insert(&tasks("before", 40)).await;
    let bus = Kafka::open(bed.broker.config()).await.expect("open");
    assert_eq!(bus.partitions(Topic::Pipeline), 4);
    until("all are published", async || {
        bus.backlog(Topic::Pipeline).await.expect("backlog") == 40
    })
    .await;
    bus.close().await;
    assert!(daemon.stop().await.success());
    bed.delete(Topic::Pipeline).await;
    bed.create(Topic::Pipeline).await;
    let daemon = bed.start(&[]).await;
    assert_eq!(once(daemon.drain("w", "q").await).len(), 40);
}

/// taskd reads a topic that somebody else has made, and leaves it as it is. Of its own topics it
/// changes the bounds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_of_somebody_else_is_attached_and_one_of_taskd_changes_its_bounds() {
    const PARTITIONS: u32 = 64;
    let bed = Bed::new().await;
    let config = bed.broker.config();
    let name = |topic: &str| format!("{}{topic}", config.topic_prefix);
    let foreign = name("foreign");
    let count = i32::try_from(PARTITIONS).unwrap();
    let new =
        NewTopic::new(&foreign, count, TopicReplication::Fixed(1)).set("retention.ms", "777000");
    let options = AdminOptions::new();
    let created = bed.admin.create_topics([&new], &options).await;
    created.expect("an answer")[0].as_ref().expect("created");
    let settings = async |topic: &str, setting: &str| {
        let of_topic = [ResourceSpecifier::Topic(topic)];
        let answers = bed.admin.describe_configs(&of_topic, &options).await;
        let settings = answers.expect("an answer").remove(0).expect("settings");
        settings.get(setting).and_then(|entry| entry.value.clone())
    };

    let daemon = bed.start(&[]).await;
    for (topic, request, said) in [
        ("foreign", json!({}), "which taskd did not make"),
        ("none", json!({"attached": true}), "no topic none on Kafka"),
        (
            "foreign",
            json!({"attached": true, "partitions": 4}),
            "leave them out",
        ),
    ] {
        let (status, answer) = put(&daemon, &format!("topics/{topic}"), request).await;
        let detail = answer["detail"].as_str().unwrap_or_default();
        assert!(status == 400 && detail.contains(said), "{answer}");
    }
    let (status, topic) = put(&daemon, "topics/foreign", json!({"attached": true})).await;
    assert_eq!(status, 200, "{topic}");
    assert_eq!(
        (&topic["partitions"], &topic["attached"]),
        (&json!(PARTITIONS), &json!(true))
    );
    let logs = Kafka::open(config.clone()).await.expect("open").logs();
    let log = Log {
        name: "foreign".into(),
        partitions: PARTITIONS,
        keep: Retention {
            age: Duration::from_secs(3600),
            records: 1000,
            bytes: 1 << 30,
        },
        is_report: false,
        is_attached: true,
    };
    let records = [0, 1, 1].map(|partition| LogRecord {
        partition,
        value: "1".into(),
        ..LogRecord::default()
    });
    logs.append(&log, &records).await.expect("published");
    subscribe(&daemon, "s", json!({"topic": "foreign", "start": "0"})).await;
    until_it_has(&daemon, "s", &[("read", 3), ("waiting", 3), ("skipped", 0)]).await;
    // Nobody tells taskd what others publish.
    let each = (0..PARTITIONS).map(|partition| LogRecord {
        partition,
        value: "2".into(),
        ..LogRecord::default()
    });
    let each: Vec<LogRecord> = each.collect();
    logs.append(&log, &each).await.expect("published");
    let read = 3 + u64::from(PARTITIONS);
    until_it_has(&daemon, "s", &[("read", read), ("waiting", read)]).await;
    let url = format!("{}/v1/topics/foreign", daemon.http());
    let deleted = http_client().delete(url).send().await.unwrap();
    assert_eq!(deleted.status(), 204);
    assert_eq!(logs.ends(&log).await.expect("it is there").len(), 64);
    assert_eq!(
        settings(&foreign, "retention.ms").await.as_deref(),
        Some("777000")
    );

    let own = name("own");
    for (age, milliseconds) in [("2h", "7200000"), ("1h", "3600000")] {
        let (status, topic) = put(&daemon, "topics/own", json!({"retention_age": age})).await;
        assert_eq!(status, 200, "{topic}");
        let found = settings(&own, "retention.ms").await;
        assert_eq!(found.as_deref(), Some(milliseconds));
        let largest = settings(&own, "max.message.bytes").await;
        assert_eq!(largest.as_deref(), Some("16777216"), "it stays");
    }
}
