//! The bus on Redis Streams: the contract, and what only Redis can do to it.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use taskd::{
    bus::{
        Bus, Error, Log, LogRecord, Message, Reader, Reading, Record, Topic,
        redis_streams::RedisStreams,
    },
    redis_pool::Redis,
};

use crate::support::{
    bus_contract::{
        Backend, PARTITIONS, bus_contract, commit, publish, publish_many, read, subscribe, values,
        within,
    },
    logs_contract::logs_contract,
    redis::{Fsync, RedisServer},
};

struct Server(RedisServer);

impl Server {
    async fn redis(&self) -> Redis {
        Redis::connect(&self.0.url(), "test").await.expect("redis")
    }

    /// Runs a command of ours.
    async fn run<T: redis::FromRedisValue>(&self, command: &str) -> T {
        let mut words = command.split(' ');
        let mut cmd = redis::cmd(words.next().expect("a command"));
        cmd.arg(words.collect::<Vec<_>>());
        cmd.query_async(&mut self.redis().await.conn())
            .await
            .expect(command)
    }
}

#[async_trait]
impl Backend for Server {
    async fn open(&self) -> Arc<dyn Bus> {
        let bus = RedisStreams::open(self.redis().await, "my.", PARTITIONS)
            .await
            .expect("open");
        Arc::new(bus.take_over_after(Duration::from_millis(500)))
    }

    async fn remove(&self) {}
}

async fn server() -> Server {
    Server(RedisServer::start(Fsync::EverySecond))
}

bus_contract!(server);
logs_contract!(server);

#[tokio::test]
async fn a_reader_that_stays_renews_its_deadline() {
    let server = server().await;
    let bus = server.open().await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let deadline = async || -> f64 {
        let readers: Vec<(String, f64)> = server
            .run("ZRANGE test:{bus}:readers:my.pipeline 0 -1 WITHSCORES")
            .await;
        readers[0].1
    };
    let first = deadline().await;
    within("stay", reader.stay()).await.expect("stay");
    assert!(deadline().await > first);
}

/// Held up for longer than a reader lives: its partitions went to another, and came back when that
/// one closed.
#[tokio::test]
async fn a_reader_learns_that_it_lost_a_partition_and_got_it_again() {
    let server = server().await;
    let (bus, other) = (server.open().await, server.open().await);
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let offsets = publish_many(&*bus, Topic::Pipeline, 0, "r", 3).await;
    let first = read(&mut *reader, 3).await;
    let tenure = reader.tenure(0);

    let _: u32 = server.run("DEL test:{bus}:readers:my.pipeline").await;
    let mut taker = subscribe(&*other, Topic::Pipeline, Reading::Ordered).await;
    assert_eq!(values(&read(&mut *taker, 3).await), ["r0", "r1", "r2"]);
    commit(&mut *taker, &first[..2]).await;
    drop(taker);
    other.close().await;

    assert_eq!(reader.tenure(0), tenure, "it does not know yet");
    // It begins behind what the other has committed, not behind what it had read itself.
    let again = read(&mut *reader, 1).await;
    assert_eq!((values(&again), again[0].offset), (vec!["r2"], offsets[2]));
    assert!(reader.tenure(0) > tenure);
}

/// Records wait in its buffer for their turn, and another has dealt with them meanwhile.
#[tokio::test]
async fn what_a_reader_lost_is_not_handed_out_from_its_buffer() {
    let server = server().await;
    let (bus, other) = (server.open().await, server.open().await);
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    publish(
        &*bus,
        Topic::Pipeline,
        &[(0, "old"), (1, "old"), (2, "old")],
    )
    .await;
    assert_eq!(
        within("a record", reader.next(1))
            .await
            .expect("next")
            .len(),
        1,
        "the others are in the buffer"
    );

    // Until it is taken for dead.
    let mut taker = subscribe(&*other, Topic::Pipeline, Reading::Ordered).await;
    let all = read(&mut *taker, 3).await;
    commit(&mut *taker, &all).await;
    drop(taker);
    other.close().await;

    publish(&*bus, Topic::Pipeline, &[(2, "new")]).await;
    assert_eq!(
        values(&within("the next", reader.next(1)).await.expect("next")),
        ["new"]
    );
}

/// As after a kill of a process that is alone: nobody need wait until it is taken for dead.
#[tokio::test]
async fn who_comes_under_the_same_name_has_at_once_what_the_dead_one_had() {
    let server = server().await;
    let open = async || {
        let bus = RedisStreams::open(server.redis().await, "my.", PARTITIONS)
            .await
            .expect("open");
        bus.process("alone")
            .take_over_after(Duration::from_secs(3600))
    };
    let bus = open().await;
    publish_many(&bus, Topic::Pipeline, 0, "p", 1).await;
    publish_many(&bus, Topic::TaskResults, 1, "t", 1).await;
    for (topic, reading) in [
        (Topic::Pipeline, Reading::Ordered),
        (Topic::TaskResults, Reading::Shared),
    ] {
        let first = read(&mut *subscribe(&bus, topic, reading).await, 1).await;
        let bus = open().await;
        let mut next = subscribe(&bus, topic, reading).await;
        let messages = next.next(10).await.expect("next");
        assert_eq!((messages[0].offset, messages.len()), (first[0].offset, 1));
    }
}

#[tokio::test]
async fn what_publish_answered_survives_sigkill() {
    let mut server = Server(RedisServer::start(Fsync::Always));
    let bus = server.open().await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let (answered, count) = tokio::sync::watch::channel(0);
    let publishing = tokio::spawn({
        let bus = bus.clone();
        async move {
            for i in 0.. {
                let record = Record {
                    partition: 0,
                    value: i.to_string().into(),
                };
                if bus.publish(Topic::Pipeline, &[record]).await.is_err() {
                    return;
                }
                answered.send_replace(i + 1);
            }
        }
    });
    within(
        "some records",
        count.clone().wait_for(|count| *count >= 100),
    )
    .await
    .expect("the publisher runs");
    let before = read(&mut *reader, 50).await;
    commit(&mut *reader, &before).await;
    server.0.kill9();
    within("publish fails", publishing).await.expect("no panic");
    let answered = *count.borrow();
    server.0.restart();

    // The same reader goes on as soon as it can, and so does one that begins anew.
    let went_on = read_through_errors(&mut *reader, answered - before.len()).await;
    let anew = server.open().await;
    assert_eq!(anew.generation(), bus.generation());
    let mut reader = subscribe(&*anew, Topic::Pipeline, Reading::Ordered).await;
    let anew = read(&mut *reader, answered - before.len()).await;
    let expected: Vec<String> = (before.len()..answered).map(|i| i.to_string()).collect();
    for messages in [&went_on, &anew] {
        assert_eq!(values(messages)[..expected.len()], expected);
    }
}

#[tokio::test]
async fn a_redis_that_hangs_is_an_error_and_nothing_is_lost() {
    let server = server().await;
    let bus = server.open().await;
    let mut ordered = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let mut shared = subscribe(&*bus, Topic::TaskResults, Reading::Shared).await;
    publish(&*bus, Topic::TaskResults, &[(0, "before")]).await;
    let held = read(&mut *shared, 1).await;
    server.0.stop();
    let started = Instant::now();
    let record = Record {
        partition: 0,
        value: "lost?".into(),
    };
    let records = [record];
    let (ordered_next, shared_next, published) = tokio::join!(
        ordered.next(10),
        shared.next(10),
        bus.publish(Topic::Pipeline, &records)
    );
    assert!(
        matches!(&ordered_next, Err(Error::Read { topic, .. }) if topic == "pipeline"),
        "{ordered_next:?}"
    );
    assert!(
        matches!(&shared_next, Err(Error::Read { topic, .. }) if topic == "task-results"),
        "{shared_next:?}"
    );
    assert!(
        matches!(&published, Err(Error::Publish { topic, .. }) if topic == "pipeline"),
        "{published:?}"
    );
    assert!(
        started.elapsed() < Duration::from_secs(15),
        "{:?}",
        started.elapsed()
    );
    server.0.cont();

    publish(&*bus, Topic::Pipeline, &[(1, "after")]).await;
    publish(&*bus, Topic::TaskResults, &[(0, "after")]).await;
    let after = async {
        // The publish that failed may stand before it.
        while !ordered
            .next(10)
            .await
            .unwrap_or_default()
            .iter()
            .any(|message| message.value == "after")
        {}
    };
    within("the ordered reader", after).await;
    // Records that were answered before the hang belong to this reader, and do not come again.
    let after = read(&mut *shared, 1).await;
    assert_eq!(values(&after), ["after"]);
    commit(&mut *shared, &held).await;
    commit(&mut *shared, &after).await;
}

#[tokio::test]
async fn a_redis_that_was_emptied_is_noticed() {
    let server = server().await;
    let bus = server.open().await;
    publish_many(&*bus, Topic::Pipeline, 0, "r", 3).await;
    let mut ordered = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    read(&mut *ordered, 3).await;
    let mut shared = subscribe(&*bus, Topic::TaskResults, Reading::Shared).await;
    publish(&*bus, Topic::TaskResults, &[(0, "before")]).await;
    read(&mut *shared, 1).await;
    server.run::<()>("FLUSHALL").await;

    let lost = within("ordered", ordered.next(10)).await;
    assert!(matches!(lost, Err(Error::Lost { .. })), "{lost:?}");
    let record = LogRecord {
        value: "r".into(),
        ..LogRecord::default()
    };
    let logs = bus.logs();
    let lost = within("append", logs.append(&Log::EXPIRATIONS, &[record])).await;
    assert!(matches!(lost, Err(Error::Lost { .. })), "{lost:?}");

    let anew = server.open().await;
    assert_ne!(anew.generation(), bus.generation());
    for lost in [
        bus.ends(Topic::Pipeline).await,
        bus.committed(Topic::Pipeline).await,
    ] {
        assert!(
            matches!(lost, Err(Error::Lost { .. })),
            "offsets of another life: {lost:?}"
        );
    }
    let lost = within("publish", bus.subscribe(Topic::Pipeline, Reading::Ordered)).await;
    assert!(
        matches!(lost.err(), Some(Error::Lost { .. })),
        "another generation is no better than none"
    );
    // The shared reader has no position that could be wrong, and goes on.
    publish(&*anew, Topic::TaskResults, &[(0, "after")]).await;
    let after = read(&mut *shared, 1).await;
    assert_eq!(values(&after), ["after"]);
    commit(&mut *shared, &after).await;
}

#[tokio::test]
async fn a_commit_that_fails_brings_everything_again() {
    let mut server = Server(RedisServer::start(Fsync::Always));
    let bus = server.open().await;
    publish_many(&*bus, Topic::TaskResults, 0, "r", 10).await;
    let mut reader = subscribe(&*bus, Topic::TaskResults, Reading::Shared).await;
    let messages = within("next", reader.next(4)).await.expect("next");
    server.0.kill9();
    within("commit", reader.commit(&messages))
        .await
        .expect_err("nobody is there");
    server.0.restart();
    let again = read_through_errors(&mut *reader, 10).await;
    assert_eq!(
        values(&again),
        ["r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7", "r8", "r9"]
    );
    commit(&mut *reader, &again).await;
    assert_eq!(
        server.run::<u64>("XLEN test:{bus}:my.task-results:0").await,
        0
    );
}

#[tokio::test]
async fn a_reader_that_follows_another_gets_what_that_one_held_at_once() {
    let server = server().await;
    // Nobody takes anything over.
    let bus = RedisStreams::open(server.redis().await, "my.", PARTITIONS)
        .await
        .expect("open");
    publish_many(&bus, Topic::TaskResults, 2, "r", 200).await;
    let mut reader = subscribe(&bus, Topic::TaskResults, Reading::Shared).await;
    let held = read(&mut *reader, 200).await;
    drop(reader);
    let mut reader = subscribe(&bus, Topic::TaskResults, Reading::Shared).await;
    let again = read(&mut *reader, 200).await;
    assert_eq!(values(&again), values(&held));
}

#[tokio::test]
async fn slow_work_does_not_come_to_its_own_reader_twice_and_the_gone_are_forgotten() {
    let server = server().await;
    let (bus, other) = (server.open().await, server.open().await);
    drop(read_one(&*bus, "gone").await);
    let (mut reader, slow) = read_one(&*other, "slow").await;
    // Reads on for many times the takeover's time, until the other consumer has been forgotten.
    let forgotten = async {
        loop {
            let more = tokio::time::timeout(Duration::from_millis(300), reader.next(10)).await;
            for message in more.map(|more| more.expect("next")).unwrap_or_default() {
                assert_eq!(message.value, "gone", "it is still being worked on");
                commit(&mut *reader, &[message]).await;
            }
            let consumers: Vec<redis::Value> = server
                .run("XINFO CONSUMERS test:{bus}:my.task-results:0 taskd")
                .await;
            if consumers.len() == 1 {
                return;
            }
        }
    };
    within("one consumer is left", forgotten).await;
    commit(&mut *reader, &slow).await;
    assert_eq!(
        server.run::<u64>("XLEN test:{bus}:my.task-results:0").await,
        0
    );
}

/// The next `count` records, at least, from a reader whose server was away. The answer to a reader
/// that is gone: Redis serves its call, which still waits, before that of the next reader of the
/// name.
#[tokio::test]
async fn what_went_to_an_earlier_reader_of_the_name_comes_to_the_present_one() {
    let server = server().await;
    let bus = server.open().await;
    let mut reader = subscribe(&*bus, Topic::TaskResults, Reading::Shared).await;
    publish(&*bus, Topic::TaskResults, &[(0, "a")]).await;
    let first = read(&mut *reader, 1).await;
    let key = "test:{bus}:my.task-results:1";
    let consumers: Vec<HashMap<String, redis::Value>> = server
        .run("XINFO CONSUMERS test:{bus}:my.task-results:0 taskd")
        .await;
    let name: String = redis::from_redis_value(consumers[0]["name"].clone()).expect("a name");
    publish(&*bus, Topic::TaskResults, &[(1, "b")]).await;
    let taken: redis::Value = server
        .run(&format!("XREADGROUP GROUP taskd {name} STREAMS {key} >"))
        .await;
    assert_ne!(taken, redis::Value::Nil);
    assert_eq!(values(&read(&mut *reader, 1).await), ["b"]);
    // An entry in hand does not come again.
    publish(&*bus, Topic::TaskResults, &[(0, "c")]).await;
    assert_eq!(values(&read(&mut *reader, 1).await), ["c"]);
    commit(&mut *reader, &first).await;
}

async fn read_through_errors(reader: &mut dyn Reader, count: usize) -> Vec<Message> {
    let reading = async {
        let mut messages = Vec::new();
        while messages.len() < count {
            messages.extend(reader.next(1000).await.unwrap_or_default());
        }
        messages
    };
    within(&format!("{count} records"), reading).await
}

async fn read_one(bus: &dyn Bus, value: &str) -> (Box<dyn Reader>, Vec<Message>) {
    let mut reader = subscribe(bus, Topic::TaskResults, Reading::Shared).await;
    publish(bus, Topic::TaskResults, &[(0, value)]).await;
    let messages = read(&mut *reader, 1).await;
    assert_eq!(values(&messages), [value]);
    (reader, messages)
}

#[tokio::test]
async fn what_is_committed_leaves_and_what_is_not_stays() {
    let server = server().await;
    let bus = server.open().await;
    publish_many(&*bus, Topic::Pipeline, 0, "r", 250).await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let messages = read(&mut *reader, 250).await;
    commit(&mut *reader, &messages[..123]).await;
    assert_eq!(
        server.run::<u64>("XLEN test:{bus}:my.pipeline:0").await,
        127
    );
    commit(&mut *reader, &messages).await;
    assert_eq!(server.run::<u64>("XLEN test:{bus}:my.pipeline:0").await, 0);
    assert_eq!(
        within("ends", bus.ends(Topic::Pipeline))
            .await
            .expect("ends")[0],
        Some(messages[249].offset)
    );
}

#[tokio::test]
async fn topics_keep_their_partitions() {
    let server = server().await;
    server.open().await;
    let bus = RedisStreams::open(server.redis().await, "my.", PARTITIONS + 4)
        .await
        .expect("open");
    assert_eq!(bus.partitions(Topic::Pipeline), PARTITIONS);
    let bus = RedisStreams::open(server.redis().await, "your.", PARTITIONS + 4)
        .await
        .expect("open");
    assert_eq!(bus.partitions(Topic::Pipeline), PARTITIONS + 4);
}

#[tokio::test]
async fn an_entry_that_is_not_ours_reads_as_empty() {
    let server = server().await;
    let bus = server.open().await;
    server
        .run::<String>("XADD test:{bus}:my.pipeline:0 * who knows")
        .await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    assert_eq!(values(&read(&mut *reader, 1).await), [""]);
}

fn of_kib(partition: u32, kib: usize) -> Record {
    Record {
        partition,
        value: vec![b'x'; kib << 10].into(),
    }
}

/// 256 MiB are shared by the partitions: here each has one.
#[tokio::test]
async fn reports_that_nobody_reads_are_refused_above_the_bound() {
    let server = server().await;
    let bus = RedisStreams::open(server.redis().await, "my.", 256)
        .await
        .expect("open");
    let publish = async |records: &[Record]| {
        within("publish", bus.publish(Topic::TaskResults, records)).await
    };
    publish(&[of_kib(0, 500), of_kib(1, 500), of_kib(0, 500)])
        .await
        .expect("there is room");
    let full = publish(&[of_kib(0, 100)])
        .await
        .expect_err("there is none")
        .to_string();
    assert_eq!(
        full,
        "failed to publish to task-results: FULL: 1126400 bytes are not read yet; at most 1048576"
    );
    publish(&[of_kib(1, 100)])
        .await
        .expect("the others have room");
    let mut reader = subscribe(&bus, Topic::TaskResults, Reading::Shared).await;
    let messages = read(&mut *reader, 4).await;
    commit(&mut *reader, &messages).await;
    publish(&[of_kib(0, 100)])
        .await
        .expect("there is room again");
}

#[tokio::test]
async fn reports_for_people_are_bounded_by_bytes() {
    let server = server().await;
    let bus = server.open().await;
    for _ in 0..20 {
        let letter = LogRecord {
            value: vec![b'x'; 1 << 20].into(),
            ..LogRecord::default()
        };
        let logs = bus.logs();
        within("append", logs.append(&Log::DEAD_LETTERS, &vec![letter; 4]))
            .await
            .expect("appended");
    }
    assert_eq!(
        server.run::<u64>("XLEN test:{bus}:my.dead-letters:0").await,
        64
    );
}
