//! Readers on Kafka that come and go: changes in the group are no errors, nothing is passed over,
//! and commits never run ahead.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rdkafka::{
    mocking::MockCluster,
    producer::DefaultProducerContext,
    types::{RDKafkaApiKey, RDKafkaRespErr},
};
use taskd::bus::{
    self, Bus, Message, Reading, Record, Topic, TopicName,
    kafka::{Config, Kafka},
};
use tokio_util::sync::CancellationToken;

use crate::{
    bus_kafka::{Broker, broker},
    support::{
        PATIENCE,
        bus_contract::{
            Backend, PARTITIONS, commit, publish, publish_many, read, subscribe, values, within,
        },
        until,
    },
};

/// The acts of a test's readers, by (partition, offset).
#[derive(Default)]
struct Seen {
    handed_out: BTreeMap<(u32, u64), usize>,
    /// A commit was called, or is about to be.
    done: BTreeSet<(u32, u64)>,
    /// The committed records of each partition, by the last look at the broker.
    committed: BTreeMap<u32, u64>,
    /// How often a partition went from one life of a reader to another.
    moves: usize,
    last_owner: BTreeMap<u32, uuid::Uuid>,
}

/// The records of a batch, at most.
const AT_ONCE: usize = 7;

type Log = Arc<Mutex<Seen>>;

fn place(message: &Message) -> (u32, u64) {
    (message.partition, message.offset.major)
}

/// Reads and commits `batches` times or until the stop. Whatever the group does, nothing may fail.
async fn one_life(bus: Arc<dyn Bus>, log: Log, batches: usize, stop: CancellationToken) {
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let (me, mut last) = (uuid::Uuid::new_v4(), BTreeMap::<u32, u64>::new());
    for _ in 0..batches {
        let Some(messages) = stop.run_until_cancelled(reader.next(AT_ONCE)).await else {
            return;
        };
        let messages = messages.expect("a change in the group is no error");
        {
            let mut log = log.lock().unwrap();
            for message in &messages {
                let (partition, offset) = place(message);
                let before = last.insert(partition, offset);
                // In order; where the partition was away meanwhile, from where its last owner had
                // committed.
                let goes_on = before.is_none_or(|before| before + 1 == offset)
                    || offset == 0
                    || log.done.contains(&(partition, offset - 1));
                assert!(
                    goes_on,
                    "{partition}/{offset} was handed out behind {before:?}"
                );
                // Nobody is killed: the next owner does not do again what was committed.
                let committed = log.committed.get(&partition).copied().unwrap_or(0);
                assert!(
                    committed <= offset,
                    "{partition}/{offset} was handed out behind {committed} commits"
                );
                *log.handed_out.entry((partition, offset)).or_default() += 1;
                log.moves += usize::from(
                    log.last_owner
                        .insert(partition, me)
                        .is_some_and(|before| before != me),
                );
            }
            log.done.extend(messages.iter().map(place));
        }
        within("commit", reader.commit(&messages))
            .await
            .expect("a change in the group is no error");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_readers_that_come_and_go_passes_nothing_over() {
    let broker = broker().await;
    let (bus, log, stop) = (
        broker.open().await,
        Log::default(),
        CancellationToken::new(),
    );
    let mut members = Vec::new();
    // One stays; the others live for a few batches each.
    for batches in [usize::MAX, 3, 5, 8] {
        let mut config = broker.config();
        // A member learns of a change by its heartbeat, and a slow machine throws none out: its
        // records would come again.
        for (property, value) in [
            ("heartbeat.interval.ms", "100"),
            ("session.timeout.ms", "60000"),
        ] {
            config.properties.insert(property.into(), value.into());
        }
        let bus: Arc<dyn Bus> = Arc::new(within("open", Kafka::open(config)).await.expect("open"));
        let (log, stop) = (Arc::clone(&log), stop.clone());
        members.push(tokio::spawn(async move {
            while !stop.is_cancelled() {
                one_life(Arc::clone(&bus), Arc::clone(&log), batches, stop.clone()).await;
            }
        }));
    }
    let each = Mutex::new(None);
    let published = async {
        let (mut rounds, began): (u64, _) = (0, Instant::now());
        // For as long as it takes until it was a storm.
        while log.lock().unwrap().moves < 20 {
            assert!(
                began.elapsed() < 4 * PATIENCE,
                "{} moves are no storm",
                log.lock().unwrap().moves
            );
            for partition in 0..PARTITIONS {
                publish_many(&*bus, Topic::Pipeline, partition, &format!("{rounds}/"), 10).await;
            }
            rounds += 1;
            // The readers are to go along with it, not to work off what has piled up.
            until("the readers go on", async || {
                log.lock().unwrap().handed_out.len() as u64 + 100 > rounds * 30
            })
            .await;
        }
        *each.lock().unwrap() = Some(rounds * 10);
    };
    let look = async || {
        let committed = within("committed", bus.committed(Topic::Pipeline))
            .await
            .expect("committed");
        let mut log = log.lock().unwrap();
        for (partition, committed) in (0..).zip(&committed) {
            let upto = committed.map_or(0, |committed| committed.major + 1);
            let ahead = (0..upto).find(|offset| !log.done.contains(&(partition, *offset)));
            assert_eq!(
                ahead, None,
                "of partition {partition} {upto} records are committed"
            );
            log.committed.insert(partition, upto);
        }
        let end = *each.lock().unwrap();
        committed
            .iter()
            .all(|committed| end.is_some() && committed.map(|at| at.major + 1) == end)
    };
    let watched = async {
        while each.lock().unwrap().is_none() {
            look().await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        until("all is read and committed", look).await;
    };
    tokio::join!(published, watched);
    stop.cancel();
    for member in members {
        within("the end of a reader", member)
            .await
            .expect("no reader failed");
    }
    bus.close().await;
    broker.remove().await;
    let log = log.lock().unwrap();
    let each = each.lock().unwrap().expect("the publisher has ended");
    assert_eq!(log.handed_out.len() as u64, each * u64::from(PARTITIONS));
    // A batch comes again if its commit met the change that took its partition away, and few do.
    let again: Vec<_> = log
        .handed_out
        .iter()
        .filter(|(_, times)| **times > 1)
        .collect();
    assert!(
        again.len() <= AT_ONCE * log.moves / 4,
        "{} moves, handed out more than once: {again:?}",
        log.moves
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_slept_too_long_moves_nothing_back_and_joins_again() {
    let broker = broker().await;
    let mut config = broker.config();
    for (property, value) in [
        ("session.timeout.ms", "6000"),
        ("heartbeat.interval.ms", "200"),
        ("max.poll.interval.ms", "6000"),
    ] {
        config.properties.insert(property.into(), value.into());
    }
    let sleepy: Arc<dyn Bus> = Arc::new(Kafka::open(config).await.expect("open"));
    publish_many(&*sleepy, Topic::Pipeline, 0, "r", 10).await;
    let mut sleeper = subscribe(&*sleepy, Topic::Pipeline, Reading::Ordered).await;
    let held = read(&mut *sleeper, 10).await;
    commit(&mut *sleeper, &held[..2]).await;

    // It does not poll any more, and the group goes on without it.
    let bus = broker.open().await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let again = read(&mut *reader, 8).await;
    assert_eq!(
        values(&again),
        ["r2", "r3", "r4", "r5", "r6", "r7", "r8", "r9"]
    );
    commit(&mut *reader, &again).await;
    let committed = async || {
        within("committed", bus.committed(Topic::Pipeline))
            .await
            .expect("committed")[0]
    };
    assert_eq!(committed().await, Some(held[9].offset));

    within("its late commit", sleeper.commit(&held[..5]))
        .await
        .expect("it is late, which is no error");
    assert_eq!(committed().await, Some(held[9].offset));
    // It takes part again: with the other one gone, what comes now comes to it, and only that.
    drop(reader);
    publish(&*bus, Topic::Pipeline, &[(0, "new")]).await;
    let new = read(&mut *sleeper, 1).await;
    assert_eq!(values(&new), ["new"]);
    commit(&mut *sleeper, &new).await;
    assert_eq!(committed().await, Some(new[0].offset));
    bus.close().await;
    broker.remove().await;
}

/// With our topics. Never ends: a reader leaves its group after the end of the test, and would wait
/// for ever for a cluster that is gone.
fn mock() -> (
    &'static MockCluster<'static, DefaultProducerContext>,
    Broker,
) {
    let cluster = Box::leak(Box::new(MockCluster::new(1).expect("a mock cluster")));
    let broker = Broker::new(&cluster.bootstrap_servers());
    let reports = bus::Log::REPORTS.map(|log| log.name);
    for topic in Topic::ALL.map(TopicName::from).into_iter().chain(reports) {
        let name = format!("{}{topic}", broker.config().topic_prefix);
        cluster.create_topic(&name, 1, 1).expect("a topic");
    }
    (cluster, broker)
}

/// A broker says this only for an instant, so here one is made to say it. Everything else is tried
/// on a real one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_meets_a_change_in_the_group_is_made_up_for() {
    let (cluster, broker) = mock();
    let bus = broker.open().await;
    publish(&*bus, Topic::Pipeline, &[(0, "a"), (0, "b"), (0, "c")]).await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let messages = read(&mut *reader, 3).await;
    let refuse = |times| {
        let errors = vec![RDKafkaRespErr::RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS; times];
        cluster.request_errors(RDKafkaApiKey::OffsetCommit, &errors);
    };
    let committed = async || {
        within("committed", bus.committed(Topic::Pipeline))
            .await
            .expect("committed")[0]
    };

    // Made up for while the reader waits for records …
    refuse(2);
    commit(&mut *reader, &messages[..1]).await;
    assert_eq!(committed().await, None);
    until("it is committed", async || {
        let idle = tokio::time::timeout(Duration::from_millis(50), reader.next(1)).await;
        assert!(idle.is_err(), "{idle:?}");
        committed().await == Some(messages[0].offset)
    })
    .await;
    // … with the next commit …
    refuse(1);
    commit(&mut *reader, &messages[..2]).await;
    assert_eq!(committed().await, Some(messages[0].offset));
    commit(&mut *reader, &messages[..2]).await;
    assert_eq!(committed().await, Some(messages[1].offset));
    // … or when the partition is given up.
    refuse(1);
    commit(&mut *reader, &messages[2..]).await;
    assert_eq!(committed().await, Some(messages[1].offset));
    drop(reader);
    until("it is committed", async || {
        committed().await == Some(messages[2].offset)
    })
    .await;
    bus.close().await;
}

#[tokio::test]
async fn a_topic_that_is_not_ready_yet_is_not_missing() {
    let (cluster, broker) = mock();
    let name = format!("{}{}", broker.config().topic_prefix, Topic::Pipeline);
    cluster
        .topic_error(
            &name,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_LEADER_NOT_AVAILABLE,
        )
        .expect("an answer");
    let wanted = ["pipeline", "task-results"];
    let missing = async |config| {
        within("missing", Kafka::missing(config, &wanted))
            .await
            .expect("an answer")
    };
    assert!(missing(broker.config()).await.is_empty());
    let other = Config {
        topic_prefix: "other-".to_owned(),
        ..broker.config()
    };
    assert_eq!(missing(other).await, wanted);
}

#[tokio::test]
async fn an_answer_that_is_no_change_in_the_group_is_an_error() {
    let (cluster, broker) = mock();
    let bus = broker.open().await;
    let record = Record {
        partition: 0,
        value: "a".into(),
    };
    within("publish", bus.publish(Topic::Pipeline, &[record]))
        .await
        .expect("publish");
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let messages = read(&mut *reader, 1).await;
    let refusal = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED];
    cluster.request_errors(RDKafkaApiKey::OffsetCommit, &refusal);
    let refused = within("commit", reader.commit(&messages))
        .await
        .expect_err("refused");
    assert!(
        refused.to_string().contains("Group authorization failed"),
        "{refused}"
    );
}
