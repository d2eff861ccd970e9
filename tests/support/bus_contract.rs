//! Tests the promises of `taskd::bus` on each backend.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use taskd::{
    bus::{Bus, Keep, Message, Reader, Reading, Record, Topic},
    model::Offset,
};

/// The number of partitions of a bus in these tests.
pub const PARTITIONS: u32 = 3;

/// A server under test, with names that are unique to one test.
#[async_trait]
pub trait Backend: Send + Sync {
    /// Opens the bus, as one process would. Each call uses the same names.
    async fn open(&self) -> Arc<dyn Bus>;

    /// Cleans up after a successful test.
    async fn remove(&self);
}

/// Generates the tests of the suite. `$backend` is an async function that creates the backend of a
/// test.
macro_rules! bus_contract {
    ($backend:path) => {
        bus_contract! { $backend:
            offsets_grow_in_the_order_of_publishing
            an_ordered_reader_goes_on_behind_what_was_committed
            commit_never_moves_back
            partitions_are_independent
            seek_goes_back_and_forward
            seek_counts_from_the_first_read_on
            ordered_partitions_move_when_a_reader_comes_or_dies
            a_reader_that_stays_takes_nothing_and_keeps_its_place
            shared_readers_share
            what_a_dead_reader_had_not_committed_comes_again
            committed_shared_records_do_not_come_again
            an_ordered_next_may_be_cancelled
            a_shared_next_may_be_cancelled
            empty_topics_have_no_ends
            ends_and_committed_tell_where_the_topic_stands
            large_and_empty_values_pass
            what_cannot_be_published_is_refused
            an_idle_reader_waits_for_what_comes
            trimming_leaves_what_was_not_committed
            partitions_that_are_added_are_noticed_and_used
        }
    };
    ($backend:path: $($test:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let backend = $backend().await;
                $crate::support::bus_contract::$test(&backend).await;
                $crate::support::bus_contract::Backend::remove(&backend).await;
            }
        )*
    };
}
pub(crate) use bus_contract;

/// Generous, because a broker needs seconds to create its first group, and machines are shared.
const DEADLINE: Duration = super::PATIENCE;

/// Panics if `future` takes too long.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future)
        .await
        .unwrap_or_else(|_| panic!("{what}: nothing within {DEADLINE:?}"))
}

pub async fn publish(bus: &dyn Bus, topic: Topic, records: &[(u32, &str)]) -> Vec<Offset> {
    let record = |(partition, value): &(u32, &str)| Record {
        partition: *partition,
        value: Bytes::from(value.to_string()),
    };
    let records: Vec<Record> = records.iter().map(record).collect();
    within("publish", bus.publish(topic, &records))
        .await
        .expect("publish")
}

/// Publishes `<name>0`, `<name>1`, … to one partition.
pub async fn publish_many(
    bus: &dyn Bus,
    topic: Topic,
    partition: u32,
    name: &str,
    count: usize,
) -> Vec<Offset> {
    let values: Vec<String> = (0..count).map(|i| format!("{name}{i}")).collect();
    let records: Vec<(u32, &str)> = values
        .iter()
        .map(|value| (partition, value.as_str()))
        .collect();
    publish(bus, topic, &records).await
}

/// Reads at least `count` records.
pub async fn read(reader: &mut dyn Reader, count: usize) -> Vec<Message> {
    let mut messages = Vec::new();
    while messages.len() < count {
        let more = within(
            &format!("record {} of {count}", messages.len()),
            reader.next(100),
        )
        .await
        .expect("next");
        assert!(!more.is_empty(), "next() answered nothing");
        messages.extend(more);
    }
    messages
}

pub fn values(messages: &[Message]) -> Vec<&str> {
    messages
        .iter()
        .map(|message| std::str::from_utf8(&message.value).expect("text"))
        .collect()
}

fn of_partition(messages: &[Message], partition: u32) -> Vec<Message> {
    messages
        .iter()
        .filter(|message| message.partition == partition)
        .cloned()
        .collect()
}

pub async fn subscribe(bus: &dyn Bus, topic: Topic, reading: Reading) -> Box<dyn Reader> {
    within("subscribe", bus.subscribe(topic, reading))
        .await
        .expect("subscribe")
}

pub async fn commit(reader: &mut dyn Reader, messages: &[Message]) {
    within("commit", reader.commit(messages))
        .await
        .expect("commit");
}

pub async fn offsets_grow_in_the_order_of_publishing(backend: &dyn Backend) {
    let bus = backend.open().await;
    assert_eq!(bus.partitions(Topic::Pipeline), PARTITIONS);
    let first = publish(
        &*bus,
        Topic::Pipeline,
        &[(0, "a"), (1, "b"), (0, "c"), (2, "d"), (0, "e")],
    )
    .await;
    let second = publish(&*bus, Topic::Pipeline, &[(0, "f"), (2, "g")]).await;
    assert_eq!((first.len(), second.len()), (5, 2));

    let messages = read(
        &mut *subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await,
        7,
    )
    .await;
    let partition = |partition| {
        let messages = of_partition(&messages, partition);
        let offsets: Vec<Offset> = messages.iter().map(|message| message.offset).collect();
        (values(&messages).join(""), offsets)
    };
    assert_eq!(
        partition(0),
        (
            "acef".to_owned(),
            vec![first[0], first[2], first[4], second[0]]
        )
    );
    assert_eq!(partition(1), ("b".to_owned(), vec![first[1]]));
    assert_eq!(partition(2), ("dg".to_owned(), vec![first[3], second[1]]));
    assert!(partition(0).1.is_sorted_by(|a, b| a < b));
}

pub async fn an_ordered_reader_goes_on_behind_what_was_committed(backend: &dyn Backend) {
    let bus = backend.open().await;
    let generation = bus.generation().to_owned();
    publish_many(&*bus, Topic::Pipeline, 1, "r", 10).await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let messages = read(&mut *reader, 10).await;
    commit(&mut *reader, &messages[..4]).await;
    drop((reader, bus));

    let bus = backend.open().await;
    assert_eq!(bus.generation(), generation);
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let again = read(&mut *reader, 6).await;
    assert_eq!(values(&again), ["r4", "r5", "r6", "r7", "r8", "r9"]);
    assert_eq!(again[0].offset, messages[4].offset);
}

pub async fn commit_never_moves_back(backend: &dyn Backend) {
    let bus = backend.open().await;
    publish_many(&*bus, Topic::Pipeline, 0, "r", 5).await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let messages = read(&mut *reader, 5).await;
    // Commit out of order within one call, and then older records again.
    commit(&mut *reader, &[messages[3].clone(), messages[1].clone()]).await;
    commit(&mut *reader, &messages[..2]).await;
    commit(&mut *reader, &[]).await;
    let committed = within("committed", bus.committed(Topic::Pipeline))
        .await
        .expect("committed");
    assert_eq!(committed[0], Some(messages[3].offset));
    drop(reader);

    // A new reader must not move it back either.
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    assert_eq!(values(&read(&mut *reader, 1).await), ["r4"]);
    commit(&mut *reader, &messages[..1]).await;
    let committed = within("committed", bus.committed(Topic::Pipeline))
        .await
        .expect("committed");
    assert_eq!(committed[0], Some(messages[3].offset));
}

pub async fn partitions_are_independent(backend: &dyn Backend) {
    let bus = backend.open().await;
    publish_many(&*bus, Topic::Pipeline, 0, "a", 3).await;
    publish_many(&*bus, Topic::Pipeline, 2, "c", 3).await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let messages = read(&mut *reader, 6).await;
    commit(&mut *reader, &of_partition(&messages, 0)).await;
    let committed = within("committed", bus.committed(Topic::Pipeline))
        .await
        .expect("committed");
    assert_eq!(
        committed,
        [Some(of_partition(&messages, 0)[2].offset), None, None]
    );
    drop(reader);

    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    assert_eq!(values(&read(&mut *reader, 3).await), ["c0", "c1", "c2"]);
}

pub async fn seek_goes_back_and_forward(backend: &dyn Backend) {
    let bus = backend.open().await;
    let offsets = publish_many(&*bus, Topic::Pipeline, 0, "r", 6).await;
    publish(&*bus, Topic::Pipeline, &[(1, "other")]).await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    read(&mut *reader, 7).await;

    within("seek", reader.seek(0, Some(offsets[1])))
        .await
        .expect("seek back");
    assert_eq!(
        values(&read(&mut *reader, 4).await),
        ["r2", "r3", "r4", "r5"]
    );
    within("seek", reader.seek(0, None))
        .await
        .expect("seek to the beginning");
    assert_eq!(
        values(&within("next", reader.next(2)).await.expect("next")),
        ["r0", "r1"]
    );
    // Prefetched records must not be returned after a seek.
    within("seek", reader.seek(0, Some(offsets[4])))
        .await
        .expect("seek forward");
    assert_eq!(values(&read(&mut *reader, 1).await), ["r5"]);
    within("seek", reader.seek(0, Some(offsets[5])))
        .await
        .expect("seek to the end");
    publish(&*bus, Topic::Pipeline, &[(0, "new")]).await;
    assert_eq!(values(&read(&mut *reader, 1).await), ["new"]);
}

pub async fn seek_counts_from_the_first_read_on(backend: &dyn Backend) {
    let bus = backend.open().await;
    let offsets = publish_many(&*bus, Topic::Pipeline, 2, "r", 4).await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    within("seek", reader.seek(2, Some(offsets[1])))
        .await
        .expect("seek");
    assert_eq!(values(&read(&mut *reader, 2).await), ["r2", "r3"]);
}

/// The reader's name, the partition, the epoch, and the record's value.
type Seen = (&'static str, u32, u64, String);

pub async fn ordered_partitions_move_when_a_reader_comes_or_dies(backend: &dyn Backend) {
    let (sender, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let publisher = backend.open().await;
    let mut one = tokio::spawn(read_in_order("one", backend.open().await, sender.clone()));
    let mut round = 0;
    let mut owners = async |wanted: &[&str]| {
        loop {
            round += 1;
            let owners = owners_of_a_round(&*publisher, round, &mut seen).await;
            let names: BTreeSet<&str> = owners.values().map(|(name, _)| *name).collect();
            if names == wanted.iter().copied().collect() {
                return owners;
            }
        }
    };
    let alone = within("one reader has all", owners(&["one"])).await;
    let other = tokio::spawn(read_in_order("other", backend.open().await, sender));
    let shared = within("two readers share", owners(&["one", "other"])).await;
    other.abort();
    let again = within("the other's partitions come back", owners(&["one"])).await;
    for (partition, (name, tenure)) in shared {
        let (before, after) = (alone[&partition].1, again[&partition].1);
        assert!(tenure > 0 && before > 0);
        assert_eq!(
            after > before,
            name == "other",
            "partition {partition}: tenure {before}, then {name}'s, then {after}"
        );
    }
    assert!(!one.is_finished(), "{:?}", (&mut one).await);
    one.abort();
}

pub async fn a_reader_that_stays_takes_nothing_and_keeps_its_place(backend: &dyn Backend) {
    let bus = backend.open().await;
    let publish = async |value| {
        let records: Vec<_> = (0..PARTITIONS)
            .map(|partition| (partition, value))
            .collect();
        publish(&*bus, Topic::Pipeline, &records).await;
    };
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    publish("before").await;
    let before = read(&mut *reader, PARTITIONS as usize).await;
    commit(&mut *reader, &before).await;
    publish("meanwhile").await;
    for _ in 0..2 {
        within("stay", reader.stay()).await.expect("stay");
    }
    // Another reader joins, gets its share, and leaves again.
    let (sender, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let other = tokio::spawn(read_in_order("other", backend.open().await, sender));
    let took = async {
        loop {
            if let Ok((_, partition, ..)) = seen.try_recv() {
                return partition;
            }
            reader.stay().await.expect("stay");
        }
    };
    let mut taken = BTreeSet::from([within("the other has its share", took).await]);
    other.abort();
    assert!(within("it ends", other).await.unwrap_err().is_cancelled());
    while let Ok((_, partition, ..)) = seen.try_recv() {
        taken.insert(partition);
    }
    assert!(taken.len() < PARTITIONS as usize, "{taken:?}");
    publish("behind").await;
    let mut values = BTreeMap::<u32, Vec<String>>::new();
    let all = async {
        let is_last = |values: &Vec<String>| values.last().is_some_and(|value| value == "behind");
        while values.values().filter(|values| is_last(values)).count() < PARTITIONS as usize {
            for message in reader.next(10).await.expect("next") {
                let value = String::from_utf8(message.value.to_vec()).expect("text");
                values.entry(message.partition).or_default().push(value);
            }
        }
    };
    within("it goes on", all).await;
    for (partition, values) in values {
        assert!(
            taken.contains(&partition) || values == ["meanwhile", "behind"],
            "partition {partition}: {values:?}"
        );
    }
}

async fn read_in_order(
    name: &'static str,
    bus: Arc<dyn Bus>,
    seen: tokio::sync::mpsc::UnboundedSender<Seen>,
) {
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    loop {
        for message in reader.next(10).await.expect("next") {
            let tenure = reader.tenure(message.partition);
            let value = String::from_utf8(message.value.to_vec()).expect("text");
            seen.send((name, message.partition, tenure, value))
                .expect("the test waits");
            reader.commit(&[message]).await.expect("commit");
        }
    }
}

/// Publishes a record to each partition; returns who read each last, and in which epoch.
async fn owners_of_a_round(
    bus: &dyn Bus,
    round: u32,
    seen: &mut tokio::sync::mpsc::UnboundedReceiver<Seen>,
) -> BTreeMap<u32, (&'static str, u64)> {
    let value = round.to_string();
    let records: Vec<_> = (0..PARTITIONS)
        .map(|partition| (partition, value.as_str()))
        .collect();
    publish(bus, Topic::Pipeline, &records).await;
    let mut owners = BTreeMap::new();
    while owners.len() < PARTITIONS as usize {
        let (name, partition, tenure, read) = seen.recv().await.expect("readers run");
        if read == value {
            owners.insert(partition, (name, tenure));
        }
    }
    owners
}

pub async fn shared_readers_share(backend: &dyn Backend) {
    let (one, other) = (backend.open().await, backend.open().await);
    let published = Arc::new(std::sync::Mutex::new(BTreeSet::new()));
    let mut readers = Vec::new();
    let (done, seen) = tokio::sync::mpsc::unbounded_channel();
    for (name, bus) in [("one", one.clone()), ("other", other)] {
        let done = done.clone();
        let mut reader = subscribe(&*bus, Topic::TaskResults, Reading::Shared).await;
        readers.push(tokio::spawn(async move {
            loop {
                let messages = reader.next(3).await.expect("next");
                if reader.commit(&messages).await.is_ok() {
                    let values = values(&messages)
                        .into_iter()
                        .map(str::to_owned)
                        .collect::<Vec<_>>();
                    done.send((name, values)).expect("the test waits");
                } else {
                    // While the group rebalances, a commit may fail; then the records are delivered
                    // again to a new reader.
                    drop(reader);
                    reader = subscribe(&*bus, Topic::TaskResults, Reading::Shared).await;
                }
            }
        }));
    }
    let mut by_reader: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let share = both_readers_have_some(&*one, &published, &mut by_reader, seen);
    within("both readers get some, together all", share).await;
    readers.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Publishes in rounds until both readers have received something, then waits for the rest.
async fn both_readers_have_some(
    bus: &dyn Bus,
    published: &std::sync::Mutex<BTreeSet<String>>,
    by_reader: &mut BTreeMap<&'static str, BTreeSet<String>>,
    mut seen: tokio::sync::mpsc::UnboundedReceiver<(&'static str, Vec<String>)>,
) {
    for round in 0.. {
        for partition in 0..PARTITIONS {
            let name = format!("{round}/{partition}/");
            publish_many(bus, Topic::TaskResults, partition, &name, 10).await;
            published
                .lock()
                .expect("no panic")
                .extend((0..10).map(|i| format!("{name}{i}")));
        }
        let expected = published.lock().expect("no panic").clone();
        loop {
            let all: BTreeSet<String> = by_reader.values().flatten().cloned().collect();
            if all == expected {
                break;
            }
            let (reader, values) = seen.recv().await.expect("the readers run");
            by_reader.entry(reader).or_default().extend(values);
        }
        if by_reader.len() == 2 {
            return;
        }
    }
}

pub async fn what_a_dead_reader_had_not_committed_comes_again(backend: &dyn Backend) {
    let (bus, other) = (backend.open().await, backend.open().await);
    publish_many(&*bus, Topic::TaskResults, 0, "r", 20).await;
    let mut reader = subscribe(&*bus, Topic::TaskResults, Reading::Shared).await;
    let messages = read(&mut *reader, 20).await;
    commit(&mut *reader, &messages[..5]).await;
    // This reader lives on in another process, and has nothing to do until the first one dies.
    let mut survivor = subscribe(&*other, Topic::TaskResults, Reading::Shared).await;
    drop((reader, bus));

    let again = read(&mut *survivor, 15).await;
    assert_eq!(values(&again), values(&messages[5..]));
    commit(&mut *survivor, &again).await;
}

pub async fn committed_shared_records_do_not_come_again(backend: &dyn Backend) {
    let bus = backend.open().await;
    publish_many(&*bus, Topic::TaskResults, 0, "r", 10).await;
    let mut reader = subscribe(&*bus, Topic::TaskResults, Reading::Shared).await;
    let messages = read(&mut *reader, 10).await;
    commit(&mut *reader, &messages).await;
    // A repeated commit is harmless.
    commit(&mut *reader, &messages).await;
    drop((reader, bus));

    let bus = backend.open().await;
    publish(&*bus, Topic::TaskResults, &[(0, "new")]).await;
    let mut reader = subscribe(&*bus, Topic::TaskResults, Reading::Shared).await;
    assert_eq!(values(&read(&mut *reader, 1).await), ["new"]);
}

pub async fn an_ordered_next_may_be_cancelled(backend: &dyn Backend) {
    let messages = read_with_cancellations(backend, Topic::Pipeline, Reading::Ordered).await;
    for partition in 0..PARTITIONS {
        assert!(of_partition(&messages, partition).is_sorted_by_key(|message| message.offset));
    }
}

pub async fn a_shared_next_may_be_cancelled(backend: &dyn Backend) {
    read_with_cancellations(backend, Topic::TaskResults, Reading::Shared).await;
}

/// Cancels `next()` at every possible stage while records are published; each record must be
/// returned exactly once.
async fn read_with_cancellations(
    backend: &dyn Backend,
    topic: Topic,
    reading: Reading,
) -> Vec<Message> {
    const RECORDS: usize = 600;
    let bus = backend.open().await;
    let publisher = bus.clone();
    let publishing = tokio::spawn(async move {
        for i in 0..RECORDS / 10 {
            let partition = u32::try_from(i).expect("few") % PARTITIONS;
            publish_many(&*publisher, topic, partition, &format!("{i}/"), 10).await;
        }
    });
    let mut reader = subscribe(&*bus, topic, reading).await;
    let (mut messages, mut cancelled, started) = (Vec::new(), 0_usize, Instant::now());
    while messages.len() < RECORDS {
        assert!(
            started.elapsed() < DEADLINE,
            "{} of {RECORDS} after {cancelled} cancelled calls",
            messages.len()
        );
        tokio::select! {
            biased;
            more = reader.next(7) => {
                let more = more.expect("next");
                commit(&mut *reader, &more).await;
                messages.extend(more);
            }
            // Give up immediately, soon, or a little later.
            () = give_up(cancelled) => cancelled += 1,
        }
    }
    publishing.await.expect("the publisher");
    let distinct: BTreeSet<&Bytes> = messages.iter().map(|message| &message.value).collect();
    assert_eq!(
        (messages.len(), distinct.len()),
        (RECORDS, RECORDS),
        "after {cancelled} cancelled calls"
    );
    assert!(cancelled > 0, "nothing was cancelled");
    everything_is_committed(&*bus, topic).await;
    messages
}

async fn give_up(turn: usize) {
    match turn % 3 {
        0 => {}
        1 => tokio::task::yield_now().await,
        _ => tokio::time::sleep(Duration::from_micros(turn as u64 % 700)).await,
    }
}

async fn everything_is_committed(bus: &dyn Bus, topic: Topic) {
    let ends = within("ends", bus.ends(topic)).await.expect("ends");
    let committed = within("committed", bus.committed(topic))
        .await
        .expect("committed");
    assert_eq!(committed, ends);
    assert!(ends.iter().all(Option::is_some));
}

pub async fn empty_topics_have_no_ends(backend: &dyn Backend) {
    let bus = backend.open().await;
    for topic in Topic::ALL {
        let none = vec![None; PARTITIONS as usize];
        assert_eq!(
            within("ends", bus.ends(topic)).await.expect("ends"),
            none,
            "{topic}"
        );
        assert_eq!(
            within("committed", bus.committed(topic))
                .await
                .expect("committed"),
            none,
            "{topic}"
        );
    }
    // A reader must not create them either.
    let mut reader = subscribe(&*bus, Topic::TaskResults, Reading::Shared).await;
    let nothing = tokio::time::timeout(Duration::from_millis(300), reader.next(10)).await;
    assert!(nothing.is_err(), "{nothing:?}");
    assert_eq!(
        within("ends", bus.ends(Topic::TaskResults))
            .await
            .expect("ends"),
        [None; PARTITIONS as usize]
    );
    assert_eq!(publish(&*bus, Topic::Pipeline, &[]).await, []);
}

pub async fn ends_and_committed_tell_where_the_topic_stands(backend: &dyn Backend) {
    for (topic, reading) in [
        (Topic::Pipeline, Reading::Ordered),
        (Topic::TaskResults, Reading::Shared),
    ] {
        let bus = backend.open().await;
        let offsets = publish_many(&*bus, topic, 1, "r", 4).await;
        let stand = async || {
            let ends = within("ends", bus.ends(topic)).await.expect("ends");
            (
                ends[1],
                within("committed", bus.committed(topic))
                    .await
                    .expect("committed")[1],
            )
        };
        let backlog = async || {
            within("backlog", bus.backlog(topic))
                .await
                .expect("backlog")
        };
        assert_eq!(
            (stand().await, backlog().await),
            ((Some(offsets[3]), None), 4)
        );
        let mut reader = subscribe(&*bus, topic, reading).await;
        let messages = read(&mut *reader, 4).await;
        assert_eq!(
            stand().await,
            (Some(offsets[3]), None),
            "reading is not committing"
        );
        commit(&mut *reader, &messages[..2]).await;
        let (end, committed) = stand().await;
        assert_eq!(end, Some(offsets[3]));
        assert!(
            Some(offsets[1]) <= committed && committed < Some(offsets[2]),
            "{committed:?} of {offsets:?}"
        );
        assert_eq!(backlog().await, 2);
        commit(&mut *reader, &messages[2..]).await;
        assert_eq!(
            (stand().await, backlog().await),
            ((Some(offsets[3]), Some(offsets[3])), 0)
        );
    }
}

pub async fn large_and_empty_values_pass(backend: &dyn Backend) {
    let bus = backend.open().await;
    let large = |byte: u8, mib: usize| Bytes::from(vec![byte; (mib << 20) + 1]);
    // Noise is hard to compress, so the record is just as large in transit.
    let noise: Bytes = (0..3_u64 << 20)
        .map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
        .collect();
    let values = [
        large(b'a', 1),
        Bytes::new(),
        noise,
        Bytes::from("poison \0\u{fffd}"),
        large(b'b', 8),
    ];
    let records: Vec<Record> = values
        .iter()
        .map(|value| Record {
            partition: 0,
            value: value.clone(),
        })
        .collect();
    within("publish", bus.publish(Topic::Pipeline, &records))
        .await
        .expect("publish");
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let messages = read(&mut *reader, values.len()).await;
    let same: Vec<bool> = messages
        .iter()
        .zip(&values)
        .map(|(message, value)| message.value == value)
        .collect();
    assert_eq!(same, vec![true; values.len()]);
    commit(&mut *reader, &messages).await;
}

pub async fn what_cannot_be_published_is_refused(backend: &dyn Backend) {
    let bus = backend.open().await;
    let record = Record {
        partition: PARTITIONS,
        value: Bytes::from("nowhere"),
    };
    let good = Record {
        partition: 0,
        value: Bytes::from("here"),
    };
    let refused = within("publish", bus.publish(Topic::Pipeline, &[good, record])).await;
    assert!(
        matches!(&refused, Err(taskd::bus::Error::Publish { topic, .. }) if topic == "pipeline"),
        "{refused:?}"
    );
}

pub async fn an_idle_reader_waits_for_what_comes(backend: &dyn Backend) {
    for (topic, reading) in [
        (Topic::Pipeline, Reading::Ordered),
        (Topic::TaskResults, Reading::Shared),
    ] {
        let bus = backend.open().await;
        let mut reader = subscribe(&*bus, topic, reading).await;
        let waiting = tokio::time::timeout(Duration::from_millis(2500), reader.next(10)).await;
        assert!(waiting.is_err(), "{waiting:?}");
        let waiting = tokio::spawn(async move { reader.next(10).await.expect("next") });
        publish(&*bus, topic, &[(1, "at last")]).await;
        assert_eq!(
            values(&within("the reader", waiting).await.expect("no panic")),
            ["at last"]
        );
    }
}

const NOTHING: Keep = Keep {
    age: Duration::ZERO,
    records: 0,
};

async fn trim(bus: &dyn Bus, topic: Topic, keep: Keep) -> u64 {
    within("trim", bus.trim(topic, keep)).await.expect("trim")
}

pub async fn trimming_leaves_what_was_not_committed(backend: &dyn Backend) {
    for (topic, reading) in [
        (Topic::Pipeline, Reading::Ordered),
        (Topic::TaskResults, Reading::Shared),
    ] {
        let bus = backend.open().await;
        publish_many(&*bus, topic, 0, "r", 10).await;
        publish_many(&*bus, topic, 1, "other", 3).await;
        assert_eq!(
            trim(&*bus, topic, NOTHING).await,
            0,
            "nobody has committed anything in {topic}"
        );

        let mut reader = subscribe(&*bus, topic, reading).await;
        let messages = read(&mut *reader, 13).await;
        commit(&mut *reader, &of_partition(&messages, 0)[..6]).await;
        // A record that was published in the current millisecond does not count as older.
        let left = async || bus.backlog(topic).await.expect("backlog");
        within("the trimming of what was committed", async {
            while trim(&*bus, topic, NOTHING).await > 0 {}
        })
        .await;
        assert_eq!(left().await, 7);
        drop((reader, bus));

        let bus = backend.open().await;
        let mut reader = subscribe(&*bus, topic, reading).await;
        let again = read(&mut *reader, 7).await;
        assert_eq!(values(&of_partition(&again, 0)), ["r6", "r7", "r8", "r9"]);
        assert_eq!(
            values(&of_partition(&again, 1)),
            ["other0", "other1", "other2"]
        );
        let committed = within("committed", bus.committed(topic))
            .await
            .expect("committed");
        let of_zero = of_partition(&messages, 0);
        // Offsets may have gaps, so only the range can be checked.
        assert!(
            (Some(of_zero[5].offset)..Some(of_zero[6].offset)).contains(&committed[0]),
            "{committed:?}"
        );
        commit(&mut *reader, &again).await;
        everything_is_trimmed(&*bus, topic).await;
    }
}

/// Trims all records, and checks that the empty topic can still be used.
async fn everything_is_trimmed(bus: &dyn Bus, topic: Topic) {
    within("all is trimmed", async {
        while trim(bus, topic, NOTHING).await > 0 {}
    })
    .await;
    let backlog = within("backlog", bus.backlog(topic))
        .await
        .expect("backlog");
    assert_eq!(backlog, 0);
    publish(bus, topic, &[(0, "new")]).await;
    assert_eq!(
        within("backlog", bus.backlog(topic))
            .await
            .expect("backlog"),
        1
    );
}

pub async fn partitions_that_are_added_are_noticed_and_used(backend: &dyn Backend) {
    let bus = backend.open().await;
    within("check", bus.check_partitions())
        .await
        .expect("nothing has changed");
    publish(&*bus, Topic::Pipeline, &[(0, "before")]).await;
    for topic in [Topic::Pipeline, Topic::TaskResults] {
        within("raise", bus.raise_partitions(topic, PARTITIONS + 2))
            .await
            .expect("raise");
    }
    within("the old opening notices", async {
        loop {
            match bus.check_partitions().await {
                Err(error @ taskd::bus::Error::Resized { .. }) => {
                    assert!(error.is_lost());
                    return assert!(
                        error
                            .to_string()
                            .ends_with("has 5 partitions now, no longer 3"),
                        "{error}"
                    );
                }
                other => other.expect("a check"),
            }
        }
    })
    .await;
    // The open bus continues with the number of partitions that it knows.
    publish(&*bus, Topic::Pipeline, &[(PARTITIONS - 1, "meanwhile")]).await;

    let bus = backend.open().await;
    assert_eq!(
        [
            bus.partitions(Topic::Pipeline),
            bus.partitions(Topic::TaskResults)
        ],
        [PARTITIONS + 2; 2]
    );
    publish(&*bus, Topic::Pipeline, &[(PARTITIONS + 1, "after")]).await;
    let mut reader = subscribe(&*bus, Topic::Pipeline, Reading::Ordered).await;
    let messages = read(&mut *reader, 3).await;
    assert_eq!(values(&of_partition(&messages, PARTITIONS + 1)), ["after"]);
    commit(&mut *reader, &messages).await;
    assert_eq!(
        within("backlog", bus.backlog(Topic::Pipeline))
            .await
            .expect("backlog"),
        0
    );
}
