//! taskd on Kafka, seen from outside: the broker comes late, goes and comes back; somebody deletes
//! records; poison.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use prost::Message as _;
use rdkafka::{
    ClientConfig, Offset as Position, TopicPartitionList,
    admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication},
    client::DefaultClientContext,
    consumer::{BaseConsumer, Consumer},
};
use serde_json::{Value, json};
use taskd::{
    bus::{Bus, Log, Record, Topic, kafka::Kafka},
    wire::pb,
};

use crate::{
    bus_kafka::{Broker, broker},
    support::{
        bus_contract::{Backend, within},
        daemon::{Daemon, keys, once},
        kafka::KafkaServer,
        logs_contract::read,
        redis::{Fsync, RedisServer},
        until,
    },
};

fn tasks(from: usize, to: usize) -> Vec<Value> {
    (from..to)
        .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_comes_late_and_is_killed_is_waited_for() {
    let (kafka, redis) = (KafkaServer::absent(), RedisServer::start(Fsync::Always));
    let bus = format!("kafka://{}", kafka.brokers());
    let mut daemon = Daemon::begin(
        "stall_after = \"3s\"",
        &[
            "--redis-url",
            &redis.url(),
            "--bus-url",
            &bus,
            "--partitions",
            "2",
        ],
    );
    let ready = async |daemon: &Daemon| {
        daemon
            .try_get("/readyz")
            .await
            .map_or(0, |(status, _)| status)
    };
    until("it waits for the bus", async || {
        let Some((503, answer)) = daemon.try_get("/readyz").await else {
            return false;
        };
        answer.to_string().contains("the bus")
    })
    .await;
    assert_eq!(daemon.get("/healthz").await.0, 200);
    until("it has said so", async || {
        daemon.log().contains("waiting for the bus")
    })
    .await;
    kafka.restart().await;
    daemon.ready().await;
    assert!(
        daemon.log().contains("the bus is there: going on"),
        "{}",
        daemon.log()
    );

    daemon.insert(&tasks(0, 30)).await;
    let leased = daemon.lease_all("w", "q", 30).await;
    assert!(
        daemon
            .complete("w", &leased[..10])
            .await
            .iter()
            .all(|status| status == "OK")
    );
    kafka.kill9();
    // Meanwhile tasks are stored and completions taken: nothing of that needs the bus at once.
    assert!(
        daemon
            .complete("w", &leased[10..20])
            .await
            .iter()
            .all(|status| status == "OK")
    );
    daemon.insert(&tasks(30, 60)).await;
    until("it has said so", async || {
        daemon
            .log()
            .contains("kafka is away: no broker can be reached")
    })
    .await;
    until("it is not ready, and says which loops stand", async || {
        let Some((503, answer)) = daemon.try_get("/readyz").await else {
            return false;
        };
        answer.to_string().contains("watchdog/")
    })
    .await;
    assert_eq!(
        daemon.get("/healthz").await.0,
        200,
        "a restart of taskd would not help"
    );

    kafka.restart().await;
    until("it is ready again", async || ready(&daemon).await == 200).await;
    assert!(
        daemon
            .complete("w", &leased[20..])
            .await
            .iter()
            .all(|status| status == "OK")
    );
    assert_eq!(once(daemon.drain("w", "q").await), keys(30, 60));
    until("all is in SQL", async || {
        daemon.queue("q").await["completed"] == 60
    })
    .await;
    // Each loop says once what it met, not with each try.
    let log = daemon.log();
    let mut reasons = BTreeMap::<_, usize>::new();
    for line in log
        .lines()
        .filter(|line| line.contains("failed, starts again in"))
    {
        let line: Value = serde_json::from_str(line).expect("the log is JSON");
        let message = line["message"].as_str().expect("a message");
        let (loop_name, rest) = message
            .split_once(" failed, starts again in")
            .expect("it has that");
        *reasons
            .entry(format!(
                "{loop_name}{}",
                &rest[rest.find(':').expect("a reason")..]
            ))
            .or_default() += 1;
    }
    assert!(reasons.values().all(|times| *times == 1), "{reasons:#?}");
    assert_eq!(log.matches("kafka is away").count(), 1, "{log}");
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taskd_deletes_what_was_read_and_warns_of_a_broker_that_deletes_by_itself() {
    let (broker, redis) = (broker().await, RedisServer::start(Fsync::Always));
    let config = broker.config();
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", &config.brokers)
        .create()
        .expect("a client");
    let results = format!("{}{}", config.topic_prefix, Topic::TaskResults);
    let by_age =
        NewTopic::new(&results, 1, TopicReplication::Fixed(1)).set("retention.ms", "3600000");
    let by_age = by_age.set("max.message.bytes", "1048576");
    within(
        "create",
        admin.create_topics([&by_age], &AdminOptions::new()),
    )
    .await
    .expect("created");

    let (bus_url, dir) = (
        format!("kafka://{}", config.brokers),
        tempfile::tempdir().expect("a folder"),
    );
    let database = format!("sqlite://{}/taskd.db", dir.path().display());
    let args = [
        ["--redis-url", &redis.url()],
        ["--bus-url", &bus_url],
        ["--database-url", &database],
        ["--topic-prefix", &config.topic_prefix],
    ];
    let args = args.concat();
    let mut daemon = Daemon::start("", &args).await;
    assert!(daemon.log().contains(&format!(
        "kafka may delete records of {results} before they are read (retention.ms = 3600000)"
    )));
    assert!(daemon.log().contains(&format!(
        "kafka takes no record of more than 1048576 bytes for {results}"
    )));
    assert!(
        !daemon.log().contains("pipeline before"),
        "taskd made that one: {}",
        daemon.log()
    );
    let retention = async |topic: &str| {
        let name = format!("{}{topic}", config.topic_prefix);
        let asked = [ResourceSpecifier::Topic(&name)];
        let found = within(
            "describe",
            admin.describe_configs(&asked, &AdminOptions::new()),
        )
        .await
        .expect("configs");
        found[0]
            .as_ref()
            .expect("a topic")
            .get("retention.ms")
            .and_then(|entry| entry.value.clone())
            .expect("a value")
    };
    assert_eq!(retention("pipeline").await, "-1");
    assert_eq!(
        retention("dead-letters").await,
        (7 * 24 * 3600 * 1000).to_string()
    );

    for first in [0, 750] {
        daemon.insert(&tasks(first, first + 750)).await;
    }
    assert_eq!(once(daemon.drain("w", "q").await), keys(0, 1500));
    let bus = Kafka::open(broker.config()).await.expect("open");
    until("all is committed", async || {
        bus.backlog(Topic::Pipeline).await.expect("backlog") == 0
    })
    .await;
    assert!(daemon.stop().await.success());
    let mut daemon = Daemon::start("topic_retention_records = 1000", &args).await;
    let observer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", &config.brokers)
        .create()
        .expect("a client");
    let pipeline = format!("{}{}", config.topic_prefix, Topic::Pipeline);
    until("the first 500 are gone", async || {
        let ends = observer
            .fetch_watermarks(&pipeline, 0, Duration::from_secs(10))
            .expect("ends");
        ends == (500, 1500)
    })
    .await;
    assert!(daemon.stop().await.success());
    bus.close().await;
    broker.remove().await;
}

/// Brokers have 1 MiB for a topic that somebody made with their defaults; taskd packs reports more
/// densely.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_that_fit_only_alone_go_alone_beside_small_ones() {
    let (broker, redis) = (broker().await, RedisServer::start(Fsync::Always));
    let config = broker.config();
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", &config.brokers)
        .create()
        .expect("a client");
    let results = format!("{}{}", config.topic_prefix, Topic::TaskResults);
    let small =
        NewTopic::new(&results, 1, TopicReplication::Fixed(1)).set("max.message.bytes", "200000");
    within(
        "create",
        admin.create_topics([&small], &AdminOptions::new()),
    )
    .await
    .expect("created");
    let (bus_url, redis_url) = (format!("kafka://{}", config.brokers), redis.url());
    let args = [
        ["--redis-url", &redis_url],
        ["--bus-url", &bus_url],
        ["--topic-prefix", &config.topic_prefix],
    ]
    .concat();
    let mut daemon = Daemon::start("", &args).await;

    daemon.insert(&tasks(0, 500)).await;
    let leased = daemon.lease_all("w", "q", 500).await;
    // Compression makes nothing of it smaller than the record may be.
    let mut random = 1_u64;
    let mut result = |n: usize| -> String {
        let mut next = || {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            char::from(b'0' + (random >> 40) as u8 % 64)
        };
        (0..if n.is_multiple_of(100) { 180_000 } else { 100 })
            .map(|_| next())
            .collect()
    };
    let completion = |(n, task): (usize, &Value)| json!({"id": task["id"], "lease_token": task["lease_token"], "result": result(n)});
    let completions: Vec<_> = leased.iter().enumerate().map(completion).collect();
    let (status, answer) = daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": completions}),
        )
        .await;
    assert_eq!(status, 200, "{answer}");
    until("all results are in SQL", async || {
        daemon.queue("q").await["completed"] == 500
    })
    .await;
    assert!(daemon.stop().await.success());
    broker.remove().await;
}

/// Somebody's own retention, or a hand that slipped.
async fn delete_up_to(broker: &Broker, topic: Topic, partition: i32, place: i64) {
    let config = broker.config();
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", &config.brokers)
        .create()
        .expect("a client");
    let mut list = TopicPartitionList::new();
    let name = format!("{}{topic}", config.topic_prefix);
    list.add_partition_offset(&name, partition, Position::Offset(place))
        .expect("a place");
    let deleted = within("delete", admin.delete_records(&list, &AdminOptions::new()))
        .await
        .expect("deleted");
    deleted
        .elements()
        .iter()
        .try_for_each(|element| element.error())
        .expect("deleted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_whose_records_were_deleted_unread_come_back() {
    let (broker, redis) = (broker().await, RedisServer::start(Fsync::Always));
    let dir = tempfile::tempdir().expect("a folder");
    let config = broker.config();
    let config = format!(
        "redis_url = {:?}\ndatabase_url = \"sqlite://{}/taskd.db\"\nbus_url = \"kafka://{}\"\ntopic_prefix = {:?}\n\
         reconcile_every = \"100ms\"\nrepublish_after = \"1day\"\n",
        redis.url(),
        dir.path().display(),
        config.brokers,
        config.topic_prefix,
    );
    let bus = {
        let mut config = broker.config();
        config.partitions = 1;
        Kafka::open(config).await.expect("open")
    };
    for (round, deleted) in [(0, 20), (1, 10)] {
        let (from, to) = (round * 20, round * 20 + 20);
        let mut inserter = Daemon::start(&config, &["--pipelines", "discovery"]).await;
        inserter.insert(&tasks(from, to)).await;
        let backlog = async || bus.backlog(Topic::Pipeline).await.expect("backlog");
        until("all are published", async || backlog().await >= 20).await;
        assert!(inserter.stop().await.success());
        let end = bus.ends(Topic::Pipeline).await.expect("ends")[0]
            .expect("records")
            .major
            + 1;
        let place = end - 20 + deleted;
        delete_up_to(
            &broker,
            Topic::Pipeline,
            0,
            place.try_into().expect("small"),
        )
        .await;

        let mut daemon = Daemon::start(&config, &[]).await;
        assert_eq!(once(daemon.drain("w", "q").await), keys(from, to));
        assert!(
            daemon.log().contains("are in SQL and not in Redis"),
            "{}",
            daemon.log()
        );
        assert!(daemon.stop().await.success());
    }
    bus.close().await;
    broker.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn poison_goes_to_dead_letters_with_its_origin_and_the_line_goes_on() {
    let (broker, redis) = (broker().await, RedisServer::start(Fsync::Always));
    let bus = broker.open().await;
    let bus_url = format!("kafka://{}", broker.config().brokers);
    let prefix = broker.config().topic_prefix;
    let args = [
        "--redis-url",
        &redis.url(),
        "--bus-url",
        &bus_url,
        "--topic-prefix",
        &prefix,
    ];
    let mut daemon = Daemon::start("", &args).await;
    let mut poison = BTreeSet::new();
    for topic in [Topic::Pipeline, Topic::TaskResults] {
        for partition in [0, 2] {
            let value = format!("\u{fffd}no record of {topic}/{partition}");
            let record = Record {
                partition,
                value: value.clone().into(),
            };
            let offset = within("publish", bus.publish(topic, &[record]))
                .await
                .expect("publish")[0];
            poison.insert((
                topic.as_str().to_owned(),
                partition,
                offset.to_string(),
                value.into_bytes(),
            ));
        }
    }
    daemon.insert(&tasks(0, 10)).await;
    assert_eq!(once(daemon.drain("w", "q").await), keys(0, 10));
    let logs = bus.logs();
    let letters = read(&*logs, &Log::DEAD_LETTERS, 0, poison.len()).await;
    let letters = letters.iter().map(|message| {
        let letter = pb::DeadLetter::decode(message.record.value.clone()).expect("a letter");
        assert!(!letter.reason.is_empty(), "{letter:?}");
        (
            letter.topic,
            letter.partition,
            letter.offset,
            letter.value.to_vec(),
        )
    });
    assert_eq!(letters.collect::<BTreeSet<_>>(), poison);
    assert!(daemon.stop().await.success());
    bus.close().await;
    broker.remove().await;
}

/// Three brokers, with one partition of `pipeline` on each, and the other topics on all of them;
/// and their URL.
async fn pipeline_on_three_brokers() -> (KafkaServer, String) {
    let kafka = KafkaServer::start_three().await;
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", kafka.brokers())
        .create()
        .expect("a client");
    let places: [&[i32]; 3] = [&[1], &[2], &[3]];
    let pipeline = NewTopic::new("pipeline", 3, TopicReplication::Variable(&places));
    within(
        "create",
        admin.create_topics([&pipeline], &AdminOptions::new()),
    )
    .await
    .expect("created");
    let bus = format!("kafka://{}", kafka.brokers());
    (kafka, bus)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_takes_nothing_holds_up_no_other() {
    let (kafka, bus) = pipeline_on_three_brokers().await;
    let daemon = Daemon::start(
        "watchdog_batch_max = 1\nhorizon = \"1s\"",
        &["--bus-url", &bus, "--partitions", "3"],
    )
    .await;
    kafka.kill9_of_three(3);
    let tasks: Vec<_> = (0..30)
        .map(|n| json!({"queue": "q", "key": n.to_string(), "delay": "5s"}))
        .collect();
    daemon.insert(&tasks).await;
    // Of thirty, so many are in two of three partitions.
    daemon.work("w", "q", 12).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_of_discovered_tasks_do_not_wait_for_a_partition_that_takes_nothing() {
    let (kafka, bus) = pipeline_on_three_brokers().await;
    let daemon = Daemon::start("", &["--bus-url", &bus, "--partitions", "3"]).await;
    daemon.insert(&tasks(0, 8)).await;
    let parents = daemon.lease_all("w", "q", 8).await;
    kafka.kill9_of_three(3);
    let (mut reported, mut completed) = (0, 0);
    until("one after another is settled", async || {
        completed = daemon.queue("q").await["completed"].as_u64().unwrap_or(completed);
        // Alone, so that each waits for the one before it.
        if completed == reported && reported < 8 {
            let parent = &parents[usize::try_from(reported).expect("small")];
            // The tasks of a new queue go by the bus. Of twelve, some are in each of three
            // partitions.
            let found: Vec<_> =
                (0..12).map(|n| json!({"queue": format!("new-{reported}"), "key": n.to_string()})).collect();
            let done = json!({"id": parent["id"], "lease_token": parent["lease_token"], "discovered": found});
            let (status, answer) =
                daemon.post("/v1/tasks:complete", &json!({"worker": "w", "completions": [done]})).await;
            assert_eq!(status, 200, "{answer}");
            reported += 1;
        }
        completed == 8
    })
    .await;
}
