//! Records of other programs' transactions. A transaction ends with a marker, and an aborted one
//! leaves its records: readers never get either, although both have offsets.

use std::time::Duration;

use rdkafka::{
    ClientConfig,
    producer::{BaseProducer, BaseRecord, Producer as _},
};
use taskd::{
    bus::{Bus, Reader, Reading, Topic},
    model::Offset,
};

use crate::{
    bus_kafka::{Broker, broker},
    support::{
        bus_contract::{Backend as _, commit, publish, read, subscribe, values, within},
        until,
    },
};

#[derive(Clone, Copy)]
enum End {
    Commit,
    Abort,
}

/// One record to each partition, in one transaction. The broker writes the markers a little after
/// its end.
async fn transaction(
    bus: &dyn Bus,
    broker: &Broker,
    topic: Topic,
    partitions: &'static [i32],
    end: End,
) {
    let next = async || {
        let ends = ends(bus, topic)
            .await
            .into_iter()
            .map(|end| end.map_or(0, |end| end.major + 1));
        ends.collect::<Vec<_>>()
    };
    let mut expected = next().await;
    for partition in partitions {
        expected[usize::try_from(*partition).expect("a partition")] += 2;
    }
    let config = broker.config();
    let name = format!("{}{topic}", config.topic_prefix);
    let transact = move || {
        let patience = Duration::from_secs(60);
        let mut client = ClientConfig::new();
        client
            .set("bootstrap.servers", &config.brokers)
            .set("transactional.id", &config.topic_prefix);
        let producer: BaseProducer = client.create().expect("a producer");
        producer.init_transactions(patience).expect("ready");
        producer.begin_transaction().expect("begun");
        for partition in partitions {
            let record = BaseRecord::<str, str>::to(&name)
                .partition(*partition)
                .payload("of a transaction");
            producer.send(record).expect("sent");
        }
        producer.flush(patience).expect("written");
        match end {
            End::Commit => producer.commit_transaction(patience).expect("committed"),
            End::Abort => producer.abort_transaction(patience).expect("aborted"),
        }
    };
    within("a transaction", tokio::task::spawn_blocking(transact))
        .await
        .expect("no panic");
    until("the markers are there", async || next().await == expected).await;
}

async fn ends(bus: &dyn Bus, topic: Topic) -> Vec<Option<Offset>> {
    within("ends", bus.ends(topic)).await.expect("ends")
}

async fn committed(bus: &dyn Bus, topic: Topic) -> Vec<Option<Offset>> {
    within("committed", bus.committed(topic))
        .await
        .expect("committed")
}

/// As the watchdog decides it.
async fn is_read(bus: &dyn Bus, topic: Topic) -> bool {
    committed(bus, topic).await == ends(bus, topic).await
}

/// Waits for records, of which there are none, until the condition holds.
async fn idle_until(what: &str, reader: &mut dyn Reader, mut condition: impl AsyncFnMut() -> bool) {
    until(what, async || {
        let idle = tokio::time::timeout(Duration::from_millis(50), reader.next(1)).await;
        assert!(idle.is_err(), "{idle:?}");
        condition().await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_ends_with_a_transaction_is_read_to_its_end() {
    let (broker, topic) = (broker().await, Topic::TaskResults);
    let bus = broker.open().await;
    publish(&*bus, topic, &[(0, "a"), (1, "b")]).await;
    let mut reader = subscribe(&*bus, topic, Reading::Shared).await;
    let messages = read(&mut *reader, 2).await;
    commit(&mut *reader, &messages).await;

    for end in [End::Abort, End::Commit] {
        transaction(&*bus, &broker, topic, &[0, 2], end).await;
        if let End::Commit = end {
            let messages = read(&mut *reader, 2).await;
            assert_eq!(values(&messages), ["of a transaction"; 2]);
            commit(&mut *reader, &messages).await;
        }
        idle_until("it is read to its end", &mut *reader, async || {
            is_read(&*bus, topic).await
        })
        .await;
    }
    // Partition 0 ends with an aborted record and its marker; nobody reads while it gets them.
    drop(reader);
    transaction(&*bus, &broker, topic, &[0], End::Abort).await;
    assert!(!is_read(&*bus, topic).await);
    let mut reader = subscribe(&*bus, topic, Reading::Shared).await;
    idle_until("it is read to its end", &mut *reader, async || {
        is_read(&*bus, topic).await
    })
    .await;
    assert_eq!(
        within("backlog", bus.backlog(topic))
            .await
            .expect("backlog"),
        0
    );
    bus.close().await;
    broker.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_reader_gets_is_committed_only_behind_processed_records() {
    let (broker, topic) = (broker().await, Topic::Pipeline);
    let bus = broker.open().await;
    publish(&*bus, topic, &[(0, "a"), (1, "b")]).await;
    let mut reader = subscribe(&*bus, topic, Reading::Ordered).await;
    let messages = read(&mut *reader, 2).await;
    let (in_hand, done): (Vec<_>, Vec<_>) = messages
        .into_iter()
        .partition(|message| message.partition == 0);
    commit(&mut *reader, &done).await;
    transaction(&*bus, &broker, topic, &[0, 1], End::Abort).await;
    idle_until(
        "the other partition is at its end",
        &mut *reader,
        async || {
            let committed = committed(&*bus, topic).await;
            assert_eq!(committed[0], None, "a record is in hand");
            committed[1] == ends(&*bus, topic).await[1]
        },
    )
    .await;
    // The same after a seek: what comes again is in hand again.
    within("seek", reader.seek(1, None)).await.expect("seek");
    within("seek", reader.seek(0, None)).await.expect("seek");
    let again = read(&mut *reader, 2).await;
    assert_eq!(values(&again).len(), 2);
    assert_eq!(committed(&*bus, topic).await[0], None);
    commit(&mut *reader, &in_hand).await;
    idle_until("all is committed", &mut *reader, async || {
        is_read(&*bus, topic).await
    })
    .await;
    bus.close().await;
    broker.remove().await;
}
