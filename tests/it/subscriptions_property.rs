//! Random histories of a topic with four subscriptions, against a plain reference: publishes, kills,
//! seeks, retention, a full queue, an order by key.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde_json::{Value, json};

use crate::support::{
    daemon::Daemon,
    subscriptions::{put, subscribe, subscription, until_it_has},
    until,
};

const STEPS: usize = 20;
/// What the queue of the slow subscription takes.
const ROOM: u64 = 20;
/// The most records of a call: less than the share of a partition while records are lost.
const MOST_OF_A_CALL: u64 = 30;
/// The subscriptions that miss no record.
const COMPLETE: [&str; 3] = ["all", "odd", "ordered"];
const QUEUES: [&str; 4] = ["all", "odd", "ordered", "slow"];

/// Numbers that follow from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

/// The value of a record, and the replay number with which it became a task.
type Heard = (u64, u64);

/// What a subscription must have made of the records: one task of each value in each replay, because
/// a value comes twice only with its id.
#[derive(Default)]
struct Expected {
    replay: u64,
    must: BTreeSet<Heard>,
    /// Those that are published around a seek may become tasks of the old replay, too.
    may: BTreeSet<Heard>,
    /// Records that had left the topic before a seek to its beginning.
    skipped: u64,
}

#[derive(Clone)]
struct Record {
    value: u64,
    /// Its id is its value.
    has_id: bool,
}

impl Record {
    fn is_odd(&self) -> bool {
        self.value % 2 == 1
    }

    /// Records with the same key come in the order of their values.
    fn key(&self) -> Option<String> {
        let has_key = !self.has_id && self.value.is_multiple_of(4);
        has_key.then(|| format!("key-{}", self.value / 4 % 3))
    }

    fn is_for(&self, subscription: &str) -> bool {
        match subscription {
            "odd" => self.is_odd(),
            "ordered" => self.key().is_some(),
            _ => true,
        }
    }

    fn json(&self) -> Value {
        let mut record = json!({"value": self.value});
        if self.is_odd() {
            record["attributes"] = json!({"odd": "yes"});
        }
        if let Some(key) = self.key() {
            record["key"] = json!(key);
        }
        if self.has_id {
            record["id"] = json!(self.value.to_string());
        }
        record
    }
}

/// A record that the topic has.
struct Kept {
    record: Record,
    partition: usize,
    offset: String,
}

struct History {
    daemon: Daemon,
    random: Random,
    published: u64,
    in_partition: [u64; 2],
    /// By subscription.
    expected: BTreeMap<&'static str, Expected>,
    /// What was processed, by queue, in that order.
    done: BTreeMap<&'static str, Vec<Heard>>,
}

impl History {
    async fn start(seed: u64) -> Self {
        let config =
            format!("[topics.t]\npartitions = 2\n[queues.slow]\nmax_unfinished = {ROOM}\n");
        let daemon = Daemon::start(&config, &[]).await;
        let with_key = json!({"$key": {"prefix": "key-"}});
        for (name, matching, sequence) in [
            ("all", json!({}), "none"),
            ("odd", json!({"odd": "yes"}), "none"),
            ("ordered", with_key, "key"),
            ("slow", json!({}), "none"),
        ] {
            let settings = json!({"topic": "t", "match": matching, "sequence": sequence});
            subscribe(&daemon, name, settings).await;
        }
        let mut expected = BTreeMap::new();
        let mut done = BTreeMap::new();
        for name in COMPLETE {
            expected.insert(name, Expected::default());
        }
        for name in QUEUES {
            done.insert(name, Vec::new());
        }
        Self {
            daemon,
            random: Random(seed),
            published: 0,
            in_partition: [0; 2],
            expected,
            done,
        }
    }

    /// New records. Those with an id may be repeats.
    fn some_records(&mut self) -> Vec<Record> {
        let count = 1 + self.random.below(MOST_OF_A_CALL);
        let mut records = Vec::new();
        for _ in 0..count {
            let has_id = self.random.below(4) == 0;
            let value = match has_id {
                true => 1_000_000 + self.random.below(20),
                false => self.published,
            };
            self.published += 1;
            records.push(Record { value, has_id });
        }
        records
    }

    async fn publish_some(&mut self) {
        let records = self.some_records();
        let partitions = publish(&self.daemon, &records).await;
        self.count(&partitions);
        for name in COMPLETE {
            self.expect(name, &records);
        }
    }

    fn count(&mut self, partitions: &[usize]) {
        for partition in partitions {
            self.in_partition[*partition] += 1;
        }
    }

    /// Each of the records that is for the subscription becomes a task in this replay.
    fn expect(&mut self, name: &str, records: &[Record]) {
        let expected = self.expected.get_mut(name).unwrap();
        for record in records {
            if record.is_for(name) {
                expected.must.insert((record.value, expected.replay));
            }
        }
    }

    /// Waits until everything is read that was published, by all but the slow one.
    async fn until_read(&self) {
        for name in COMPLETE {
            until_it_has(&self.daemon, name, &[("behind", 0)]).await;
        }
    }

    /// The records that the topic has, in the order of each partition.
    async fn kept(&self) -> Vec<Kept> {
        let mut kept = Vec::new();
        let mut from = "0".to_owned();
        loop {
            let path = format!("/v1/topics/t/records?limit=1000&from={from}");
            let (_, page) = self.daemon.get(&path).await;
            let records = page["records"].as_array().unwrap();
            if records.is_empty() {
                return kept;
            }
            for one in records {
                let record = Record {
                    value: one["value"].as_u64().unwrap(),
                    has_id: one["id"].is_string(),
                };
                kept.push(Kept {
                    record,
                    partition: one["partition"].as_u64().unwrap() as usize,
                    offset: one["offset"].as_str().unwrap().to_owned(),
                });
            }
            page["next"].as_str().unwrap().clone_into(&mut from);
        }
    }

    /// Sends a subscription back: to the beginning of what is there, or to a record of a partition
    /// and the beginning of the other one. Records come before, meanwhile and after.
    async fn seek(&mut self) {
        self.until_read().await;
        let name = COMPLETE[self.random.below(3) as usize];
        let mut again = self.kept().await;
        let mut to = "0".to_owned();
        let mut gone = self.in_partition;
        for kept in &again {
            gone[kept.partition] -= 1;
        }
        if !again.is_empty() && self.random.below(2) == 0 {
            let place = self.random.below(again.len() as u64) as usize;
            let partition = again[place].partition;
            to = format!("{partition}:{}", again[place].offset);
            gone[partition] = 0;
            let mut at = 0;
            again.retain(|kept| {
                let is_after = kept.partition != partition || at > place;
                at += 1;
                is_after
            });
        }
        // The feeder may have read these, or not.
        let mut around = self.some_records();
        let mut partitions = publish(&self.daemon, &around).await;
        let meanwhile = self.some_records();
        let wait = Duration::from_millis(self.random.below(1500));
        let path = format!("/v1/subscriptions/{name}:seek");
        let place = json!({"to": to});
        let seek = self.daemon.post(&path, &place);
        let publishing = async {
            tokio::time::sleep(wait).await;
            publish(&self.daemon, &meanwhile).await
        };
        let ((status, answer), others) = tokio::join!(seek, publishing);
        assert_eq!(status, 200, "{answer}");
        partitions.extend(others);
        self.count(&partitions);
        around.extend(meanwhile);
        for other in COMPLETE {
            if other != name {
                self.expect(other, &around);
            }
        }
        let expected = self.expected.get_mut(name).unwrap();
        for record in &around {
            if record.is_for(name) {
                expected.may.insert((record.value, expected.replay));
            }
        }
        expected.replay += 1;
        expected.skipped += gone[0] + gone[1];
        for kept in again {
            around.push(kept.record);
        }
        self.expect(name, &around);
    }

    /// Lets the topic lose many records. The slow subscription may not have read them.
    async fn lose_records(&mut self) {
        self.until_read().await;
        let few = 2 * MOST_OF_A_CALL + 4;
        let (status, answer) =
            put(&self.daemon, "topics/t", json!({"retention_records": few})).await;
        assert_eq!(status, 200, "{answer}");
        for _ in 0..3 {
            self.publish_some().await;
            self.until_read().await;
        }
        let many = json!({"retention_records": 1_000_000});
        let (status, answer) = put(&self.daemon, "topics/t", many).await;
        assert_eq!(status, 200, "{answer}");
    }

    /// Kills taskd at any moment after a publish.
    async fn kill(&mut self) {
        self.publish_some().await;
        let after = Duration::from_millis(self.random.below(100));
        tokio::time::sleep(after).await;
        self.daemon.kill9_and_restart();
        self.daemon.ready().await;
    }

    /// Processes some tasks of each queue. Returns whether there were any.
    async fn work(&mut self) -> bool {
        let mut had_some = false;
        for queue in QUEUES {
            let tasks = self.daemon.lease("w", queue, 200, "50ms").await;
            had_some |= !tasks.is_empty();
            let done = self.done.get_mut(queue).unwrap();
            for task in &tasks {
                let replay = task["headers"]["taskd-replay"].as_str().unwrap();
                done.push((task["payload"].as_u64().unwrap(), replay.parse().unwrap()));
            }
            for status in self.daemon.complete("w", &tasks).await {
                assert_eq!(status, "OK");
            }
        }
        had_some
    }

    async fn step(&mut self) {
        match self.random.below(10) {
            0..4 => self.publish_some().await,
            4 | 5 => drop(self.work().await),
            6 | 7 => self.kill().await,
            8 => self.seek().await,
            _ => self.lose_records().await,
        }
    }

    /// Processes everything.
    async fn finish(&mut self) {
        until("all records are tasks, and all tasks done", async || {
            let mut is_over = !self.work().await;
            for name in QUEUES {
                let one = subscription(&self.daemon, name).await;
                let is_empty = ["behind", "waiting", "leased"].map(|field| one[field] == 0);
                is_over &= is_empty == [true; 3];
                is_over &= one["done"].as_u64() >= one["tasks"].as_u64();
            }
            is_over
        })
        .await;
    }

    async fn compare(&self) {
        for name in COMPLETE {
            let one = subscription(&self.daemon, name).await;
            let expected = &self.expected[name];
            let done = self.done_once(name);
            let missing: Vec<&Heard> = expected.must.difference(&done).collect();
            assert!(missing.is_empty(), "{name} lacks {missing:?}: {one}");
            let more: BTreeSet<Heard> = done.difference(&expected.must).copied().collect();
            assert!(more.is_subset(&expected.may), "{name} has {more:?}: {one}");
            // Those that the old replay took after the seek are in no position.
            let tasks = one["tasks"].as_u64().unwrap();
            let least = done.len() - more.len();
            assert!((least..=done.len()).contains(&(tasks as usize)), "{one}");
            assert_eq!(one["skipped"], expected.skipped, "{one}");
            self.adds_up(&one);
        }
        let slow = subscription(&self.daemon, "slow").await;
        let number = |field: &str| slow[field].as_u64().unwrap();
        assert_eq!(number("read") + number("skipped"), self.published, "{slow}");
        let done = self.done_once("slow");
        // A kill between an insert and the move of the position, and then a loss of the records: they
        // are skipped, and have tasks.
        let least = number("tasks");
        let most = least + number("skipped");
        assert!((least..=most).contains(&(done.len() as u64)), "{slow}");
        self.adds_up(&slow);

        let mut last: BTreeMap<(u64, String), u64> = BTreeMap::new();
        for (value, replay) in &self.done["ordered"] {
            let record = Record {
                value: *value,
                has_id: false,
            };
            let key = record.key().unwrap();
            let before = last.insert((*replay, key), *value);
            assert!(before < Some(*value), "{value} came after {before:?}");
        }
    }

    /// What was processed of a queue, each once.
    fn done_once(&self, queue: &str) -> BTreeSet<Heard> {
        let mut once = BTreeSet::new();
        for heard in &self.done[queue] {
            assert!(once.insert(*heard), "{queue} had {heard:?} twice");
        }
        once
    }

    fn adds_up(&self, one: &Value) {
        let number = |field: &str| one[field].as_u64().unwrap();
        let became = number("tasks") + number("duplicates") + number("filtered");
        assert_eq!(number("read"), became + number("refused"), "{one}");
        assert_eq!(one["refused"], 0, "{one}");
    }
}

/// Publishes records, which are all stored. Returns the partition of each.
async fn publish(daemon: &Daemon, records: &[Record]) -> Vec<usize> {
    let body: Value = records.iter().map(Record::json).collect();
    let (status, answer) = daemon.post("/v1/topics/t/records", &body).await;
    assert_eq!(status, 200, "{answer}");
    let mut partitions = Vec::new();
    for result in answer["results"].as_array().unwrap() {
        assert_eq!(result["status"], "STORED", "{answer}");
        partitions.push(result["partition"].as_u64().unwrap() as usize);
    }
    partitions
}

async fn play(seed: u64) {
    let mut history = History::start(seed).await;
    for _ in 0..STEPS {
        history.step().await;
    }
    history.finish().await;
    history.compare().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_histories_agree_with_a_plain_reference() {
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let mut random = now.as_nanos() as u64 | 1;
    if let Ok(seed) = std::env::var("TASKD_SEED") {
        random = seed.parse().expect("TASKD_SEED is a number");
    }
    println!("the seed is {random}: TASKD_SEED={random} repeats it");
    tokio::join!(play(0x9e37_79b9_7f4a_7c15), play(random));
}
