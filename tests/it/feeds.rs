//! Feeds of topologies: each record of a source outside of taskd opens one tree, whatever is killed,
//! and is acknowledged.

use std::{collections::BTreeSet, fs, process::Command};

use reqwest::Method;
use serde_json::{Value, json};
use taskd::{
    feeds::{self, Error, Feed, FeedRecord},
    model::{Offset, Topology},
};

use crate::{
    columns::access::{call, token},
    support::{
        daemon::Daemon,
        redis_private::PrivateRedis,
        subscriptions::{publish, put as put_topic},
        until,
    },
};

/// A source of some kind, as others see it.
struct Source {
    kind: &'static str,
    redis: PrivateRedis,
}

impl Source {
    fn start(kind: &'static str) -> Self {
        let redis = PrivateRedis::start(&[]);
        Self { kind, redis }
    }

    /// A topology with this source as its feed.
    fn file(&self, of_topology: &str, of_feed: &str) -> String {
        let url = self.redis.url();
        let kind = self.kind;
        format!(
            "name = \"t\"\n{of_topology}\n[feed.f]\ntype = \"{kind}\"\nurl = \"{url}\"\nkey = \"source\"\n\
             into = \"a\"\n{of_feed}\n[stage.a]\n"
        )
    }

    fn open(&self, of_feed: &str) -> Box<dyn Feed> {
        let topology = Topology::read(&self.file("", of_feed)).unwrap();
        feeds::check(&topology.feeds[0]).unwrap();
        feeds::feed(&topology.feeds[0]).unwrap()
    }

    fn push(&self, values: impl IntoIterator<Item = usize>) {
        for value in values {
            let value = value.to_string();
            let answer = match self.kind {
                "redis_stream" => self.redis.run(&["XADD", "source", "*", "n", &value]),
                _ => self.redis.run(&["RPUSH", "source", &value]),
            };
            assert!(!answer.starts_with("ERR"), "{answer}");
        }
    }

    /// How many records are handed out and not acknowledged.
    fn pending(&self) -> usize {
        match self.kind {
            "redis_stream" => {
                let pending = self.redis.run(&["XPENDING", "source", "taskd"]);
                pending.lines().next().unwrap().parse().unwrap()
            }
            // One field counts.
            _ => {
                self.redis
                    .run(&["HLEN", "source:t.f"])
                    .parse::<usize>()
                    .unwrap()
                    - 1
            }
        }
    }

    /// Refuses acknowledgements, or takes them again.
    fn takes_acks(&self, takes: bool) {
        let command = match self.kind {
            "redis_stream" => "xack",
            _ => "hdel",
        };
        let rule = format!("{}{command}", if takes { '+' } else { '-' });
        assert_eq!(self.redis.run(&["ACL", "SETUSER", "default", &rule]), "OK");
    }
}

/// The number in a payload.
fn number(payload: &[u8]) -> usize {
    let payload: Value = serde_json::from_slice(payload).unwrap();
    let number = payload["n"].as_str().map(ToOwned::to_owned);
    number
        .unwrap_or_else(|| payload.to_string())
        .parse()
        .unwrap()
}

fn numbers(records: &[FeedRecord]) -> Vec<usize> {
    let numbers = records.iter();
    numbers
        .map(|record| number(&record.content.as_ref().unwrap().payload))
        .collect()
}

fn references(records: &[FeedRecord]) -> Vec<Offset> {
    records.iter().map(|record| record.reference).collect()
}

/// Reads until there are as many records.
async fn read(feed: &dyn Feed, count: usize) -> Vec<FeedRecord> {
    let mut records = Vec::new();
    until("there are as many records", async || {
        records.extend(feed.next().await.unwrap());
        records.len() >= count
    })
    .await;
    assert_eq!(records.len(), count);
    records
}

/// What all kinds outside of taskd promise.
async fn feed_contract(kind: &'static str) {
    let source = Source::start(kind);
    source.push(0..5);
    let feed = source.open(match kind {
        "redis_stream" => "block = \"10ms\"",
        _ => "",
    });
    assert!(!feed.open().await.unwrap(), "the source does not know it");
    feed.begin().await.unwrap();
    feed.begin().await.unwrap();
    let first = read(&*feed, 5).await;
    assert_eq!(numbers(&first), [0, 1, 2, 3, 4]);
    assert!(first.iter().all(|record| !record.may_be_repeated));
    assert!(references(&first).is_sorted());

    // All that is not acknowledged comes again, and then the others.
    source.push(5..7);
    assert_eq!(feed.health().await.unwrap(), Some(2));
    feed.close().await;
    assert!(feed.open().await.unwrap());
    let again = read(&*feed, 7).await;
    assert_eq!(references(&again[..5]), references(&first));
    let repeated: Vec<bool> = again.iter().map(|record| record.may_be_repeated).collect();
    assert_eq!(repeated, [true, true, true, true, true, false, false]);
    assert_eq!(numbers(&again), [0, 1, 2, 3, 4, 5, 6]);
    feed.keep().await.unwrap();

    // An acknowledgement that is sent again changes nothing.
    let three = [&references(&again)[..2], &references(&again)[6..]].concat();
    assert_eq!(feed.ack(&three).await.unwrap(), 3);
    assert_eq!(feed.ack(&three).await.unwrap(), 0);
    assert_eq!(source.pending(), 4);
    let other = source.open("");
    assert!(other.open().await.unwrap());
    assert_eq!(numbers(&read(&*other, 4).await), [2, 3, 4, 5]);

    // A source that has lost its data does not know it any more.
    source.redis.run(&["FLUSHALL"]);
    source.push(7..8);
    let error = loop {
        match feed.next().await {
            Ok(records) => assert!(records.is_empty(), "{records:?}"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Forgotten), "{error}");
    assert!(!feed.open().await.unwrap());
    feed.begin().await.unwrap();
    assert_eq!(numbers(&read(&*feed, 1).await), [7]);

    // With `none` nothing comes again.
    let none = source.open("ack = \"none\"");
    assert!(none.open().await.unwrap());
    read(&*none, 1).await;
    source.push(8..9);
    assert_eq!(numbers(&read(&*none, 1).await), [8]);
    assert_eq!(source.pending(), 1);
}

#[tokio::test]
async fn the_stream_of_a_redis_is_a_feed() {
    feed_contract("redis_stream").await;
}

#[tokio::test]
async fn the_list_of_a_redis_is_a_feed() {
    feed_contract("redis_list").await;
}

fn apply(daemon: &Daemon, text: &str) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("t.toml"), text).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_taskd"))
        .args(["topology", "apply", "t.toml", "--server", &daemon.http()])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stderr}");
}

async fn shown(daemon: &Daemon) -> Value {
    let (_, mut shown) = daemon.get("/v1/topologies/t").await;
    shown["feeds"][0].take()
}

/// Waits until the feed shows these numbers.
async fn until_it_shows(daemon: &Daemon, fields: &[(&str, u64)]) {
    let mut last = Value::Null;
    until(&format!("the feed shows {fields:?}"), async || {
        last = match daemon.try_get("/v1/topologies/t").await {
            Some((200, mut shown)) => shown["feeds"][0].take(),
            _ => return false,
        };
        fields.iter().all(|(name, value)| last[*name] == *value)
    })
    .await;
}

async fn trees(daemon: &Daemon, state: &str) -> Vec<Value> {
    let path = format!("/v1/trees?state={state}&queue=t.a&limit=1000");
    let (_, mut answer) = daemon.get(&path).await;
    serde_json::from_value(answer["trees"].take()).unwrap()
}

/// Works until tasks with all these numbers are done. None comes twice.
async fn work(daemon: &Daemon, seen: &mut BTreeSet<usize>, count: usize) {
    until("all records are worked off", async || {
        let tasks = daemon.lease("w", "t.a", 100, "100ms").await;
        for task in &tasks {
            let payload = serde_json::to_vec(&task["payload"]).unwrap();
            let number = number(&payload);
            assert!(seen.insert(number), "{number} comes twice");
        }
        if !tasks.is_empty() {
            daemon.complete("w", &tasks).await;
        }
        seen.len() >= count
    })
    .await;
    assert_eq!(seen.len(), count);
}

/// B1, B2: taskd is killed wherever it is, and each record opens one tree.
async fn each_record_opens_one_tree(kind: &'static str, ack: &str) {
    const RECORDS: usize = 600;
    let source = Source::start(kind);
    let mut daemon = Daemon::start("", &[]).await;
    apply(
        &daemon,
        &source.file("", &format!("ack = \"{ack}\"\ncount = 20")),
    );
    for round in 0..6 {
        source.push(round * 100..(round + 1) * 100);
        daemon.kill9_and_restart();
        daemon.ready().await;
    }
    let mut seen = BTreeSet::new();
    work(&daemon, &mut seen, RECORDS).await;
    until("all are acknowledged", async || source.pending() == 0).await;
    until("the trees have ended", async || {
        trees(&daemon, "DONE").await.len() == RECORDS
    })
    .await;
    assert_eq!(trees(&daemon, "OPEN").await, [] as [Value; 0]);
    until_it_shows(&daemon, &[("acks_pending", 0)]).await;
    let feed = shown(&daemon).await;
    assert_eq!(feed["held"], Value::Null, "{feed}");
    let (_, checked) = daemon.post("/v1/fsck", &json!({})).await;
    assert_eq!(checked["finds"], json!([]), "{checked}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_a_stream_open_one_tree_each_through_kills() {
    each_record_opens_one_tree("redis_stream", "stored").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_wait_for_their_trees_through_kills() {
    each_record_opens_one_tree("redis_stream", "done").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn items_of_a_list_open_one_tree_each_through_kills() {
    each_record_opens_one_tree("redis_list", "done").await;
}

/// T5, B2, B11, B12: the source refuses acknowledgements for a while. All are acknowledged later,
/// once.
async fn refused_acks_are_sent_later(kind: &'static str) {
    const RECORDS: u64 = 30;
    let source = Source::start(kind);
    source.push(0..RECORDS as usize);
    source.takes_acks(false);
    let mut daemon = Daemon::start("", &[]).await;
    apply(
        &daemon,
        &source.file("", "ack = \"done\"\nack_interval = \"50ms\""),
    );
    until_it_shows(&daemon, &[("trees", RECORDS), ("acks_pending", 0)]).await;
    assert_eq!(source.pending() as u64, RECORDS);
    let mut seen = BTreeSet::new();
    work(&daemon, &mut seen, RECORDS as usize).await;
    // Due acknowledgements are rows, and the feed says why they stay.
    until_it_shows(&daemon, &[("acks_pending", RECORDS), ("acknowledged", 0)]).await;
    until("it says why", async || {
        let held = shown(&daemon).await["held"].clone();
        held.as_str()
            .is_some_and(|held| held.contains("cannot acknowledge"))
    })
    .await;
    daemon.kill9_and_restart();
    daemon.ready().await;
    until_it_shows(&daemon, &[("acks_pending", RECORDS), ("acknowledged", 0)]).await;

    // Some are acknowledged already, and their rows were not removed.
    source.takes_acks(true);
    until_it_shows(&daemon, &[("acks_pending", 0), ("acknowledged", RECORDS)]).await;
    assert_eq!(source.pending(), 0);
    let none = daemon.lease("w", "t.a", 10, "300ms").await;
    assert!(none.is_empty(), "{none:?}");
    assert_eq!(trees(&daemon, "DONE").await.len() as u64, RECORDS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_gets_refused_acks_later_once() {
    refused_acks_are_sent_later("redis_stream").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_gets_refused_acks_later_once() {
    refused_acks_are_sent_later("redis_list").await;
}

/// B11: the source has forgotten records whose rows are still there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ack_whose_row_stayed_is_sent_again_and_changes_nothing() {
    let source = Source::start("redis_stream");
    source.push(0..3);
    source.takes_acks(false);
    let mut daemon = Daemon::start("", &[]).await;
    apply(&daemon, &source.file("", "ack = \"done\""));
    let mut seen = BTreeSet::new();
    work(&daemon, &mut seen, 3).await;
    until_it_shows(&daemon, &[("acks_pending", 3)]).await;
    assert!(daemon.stop().await.success());
    source.takes_acks(true);
    let entries = source.redis.run(&["XRANGE", "source", "-", "+"]);
    let ids: Vec<&str> = entries.lines().filter(|line| line.contains('-')).collect();
    let ack = [&["XACK", "source", "taskd"], &ids[..]].concat();
    assert_eq!(source.redis.run(&ack), "3");
    source.push(3..4);
    daemon.start_again();
    daemon.ready().await;
    work(&daemon, &mut seen, 4).await;
    until_it_shows(&daemon, &[("acks_pending", 0), ("acknowledged", 1)]).await;
    assert_eq!(source.pending(), 0);
}

/// T7: a slow stage loses nothing, because its feed waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_feed_waits_at_max_open() {
    const RECORDS: usize = 60;
    let source = Source::start("redis_stream");
    source.push(0..RECORDS);
    let daemon = Daemon::start("", &[]).await;
    apply(&daemon, &source.file("max_open = 10", "ack = \"done\""));
    until_it_shows(&daemon, &[("trees", 10)]).await;
    until("it says why", async || {
        let held = shown(&daemon).await["held"].clone();
        held.as_str().is_some_and(|held| held.contains("max_open"))
    })
    .await;
    let (_, metrics) = daemon.get("/metrics").await;
    let metrics = metrics.as_str().unwrap();
    assert!(
        metrics.contains("taskd_feed_held{feed=\"t.f\",reason=\"max_open\"} 1"),
        "{metrics}"
    );
    let mut seen = BTreeSet::new();
    until("all records are worked off", async || {
        let open = trees(&daemon, "OPEN").await.len();
        assert!(open <= 10, "{open} trees are open");
        for task in daemon.lease("w", "t.a", 3, "100ms").await {
            let payload = serde_json::to_vec(&task["payload"]).unwrap();
            assert!(seen.insert(number(&payload)), "{task} comes twice");
            daemon.complete("w", &[task]).await;
        }
        seen.len() == RECORDS
    })
    .await;
    until_it_shows(&daemon, &[("acknowledged", RECORDS as u64)]).await;
    assert_eq!(source.pending(), 0);
}

/// The `then` task has no place among the queues: the records stay in the source.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_feed_waits_for_room_for_the_queue_of_then() {
    let source = Source::start("redis_list");
    source.push(0..3);
    let daemon = Daemon::start("max_queues = 1", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "k"})]).await;
    apply(&daemon, &source.file("then = \"reports\"", ""));
    until("it says why", async || {
        let held = shown(&daemon).await["held"].clone();
        held.as_str()
            .is_some_and(|held| held.contains("max_queues"))
    })
    .await;
    let feed = shown(&daemon).await;
    assert_eq!((&feed["trees"], &feed["refused"]), (&json!(0), &json!(0)));
    assert_eq!(source.pending(), 3);
}

/// Another key has other records with the same ids, and those of the first key keep their trees.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_feed_that_reads_another_key_and_back_is_exact() {
    let source = Source::start("redis_stream");
    for n in 1..4 {
        let id = format!("1-{n}");
        source
            .redis
            .run(&["XADD", "source", &id, "n", &n.to_string()]);
        source
            .redis
            .run(&["XADD", "other", &id, "n", &(10 + n).to_string()]);
    }
    source
        .redis
        .run(&["XGROUP", "CREATE", "other", "taskd", "0"]);
    let daemon = Daemon::start("", &[]).await;
    let file = source.file("", "ack = \"done\"\nblock = \"10ms\"");
    apply(&daemon, &file);
    until_it_shows(&daemon, &[("trees", 3)]).await;
    apply(
        &daemon,
        &file.replace("key = \"source\"", "key = \"other\""),
    );
    until("the other one is read", async || {
        let pending = source.redis.run(&["XPENDING", "other", "taskd"]);
        pending.starts_with('3')
    })
    .await;
    let mut seen = BTreeSet::new();
    work(&daemon, &mut seen, 6).await;
    assert_eq!(seen, BTreeSet::from([1, 2, 3, 11, 12, 13]));
    until_it_shows(&daemon, &[("acknowledged", 3)]).await;
    assert_eq!(source.pending(), 3, "their feed is not read");
    apply(&daemon, &file);
    until("all are acknowledged", async || source.pending() == 0).await;
    let none = daemon.lease("w", "t.a", 10, "300ms").await;
    assert!(none.is_empty(), "{none:?}");
    assert_eq!(trees(&daemon, "DONE").await.len(), 6);
}

/// Killed between the two, taskd finds a deleted entry among those that it has.
#[tokio::test]
async fn an_entry_is_deleted_before_it_is_acknowledged() {
    let source = Source::start("redis_stream");
    source.push(0..2);
    let feed = source.open("delete = true\nblock = \"10ms\"");
    assert!(!feed.open().await.unwrap());
    feed.begin().await.unwrap();
    let records = read(&*feed, 2).await;
    source.takes_acks(false);
    feed.ack(&references(&records)).await.unwrap_err();
    assert_eq!(source.redis.run(&["XLEN", "source"]), "0");
    assert_eq!(source.pending(), 2);
    source.takes_acks(true);
    assert!(feed.open().await.unwrap());
    let again = feed.next().await.unwrap();
    assert_eq!(references(&again), references(&records));
    assert!(again.iter().all(|record| record.content.is_none()));
    assert_eq!(feed.ack(&references(&again)).await.unwrap(), 2);
}

/// Neither a task nor a letter can have so much, so only the source does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_item_that_is_too_large_for_a_letter_stays() {
    let source = Source::start("redis_list");
    let push = "redis.call('RPUSH', 'source', string.rep('7', 9000000))";
    source.redis.run(&["EVAL", push, "0"]);
    source.push(0..2);
    let daemon = Daemon::start("", &[]).await;
    apply(&daemon, &source.file("", ""));
    let mut seen = BTreeSet::new();
    work(&daemon, &mut seen, 2).await;
    until_it_shows(&daemon, &[("refused", 1), ("acknowledged", 2)]).await;
    assert_eq!(source.pending(), 1);
}

/// The source loses its data, and hands out ids that it had before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_a_source_that_lost_its_data_are_new() {
    let source = Source::start("redis_stream");
    let daemon = Daemon::start("", &[]).await;
    apply(&daemon, &source.file("", "block = \"10ms\""));
    source.redis.run(&["XADD", "source", "1-1", "n", "1"]);
    let mut seen = BTreeSet::new();
    work(&daemon, &mut seen, 1).await;
    source.redis.run(&["FLUSHALL"]);
    source.redis.run(&["XADD", "source", "1-1", "n", "2"]);
    work(&daemon, &mut seen, 2).await;
    until("all are acknowledged", async || source.pending() == 0).await;
}

/// The records of a topic open trees, and the file says what becomes of the subscription.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_a_topic_open_one_tree_each_through_kills() {
    const RECORDS: usize = 300;
    let mut daemon = Daemon::start("", &[]).await;
    put_topic(&daemon, "topics/urls", json!({"partitions": 2})).await;
    let file = "name = \"t\"\nmax_open = 50\n[feed.f]\ntype = \"topic\"\ntopic = \"urls\"\ninto = \"a\"\n[stage.a]\n";
    apply(&daemon, file);
    for round in 0..3 {
        let from = round * 100;
        let records = (from..from + 100).map(|n| json!({"value": n})).collect();
        publish(&daemon, "urls", records).await;
        daemon.kill9_and_restart();
        daemon.ready().await;
    }
    let mut seen = BTreeSet::new();
    work(&daemon, &mut seen, RECORDS).await;
    until("the trees have ended", async || {
        trees(&daemon, "DONE").await.len() == RECORDS
    })
    .await;
    until_it_shows(&daemon, &[("trees", RECORDS as u64), ("acks_pending", 0)]).await;
    let without = "name = \"t\"\n[stage.a]\n";
    apply(&daemon, without);
    let (status, _) = daemon.get("/v1/subscriptions/t.f").await;
    assert_eq!(
        status, 404,
        "the feed has left, and its subscription with it"
    );
}

/// A scope says nothing about what such a feed may reach.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scoped_token_applies_no_feed_of_a_redis() {
    let source = Source::start("redis_stream");
    let daemon = Daemon::start("auth = \"tokens\"", &[]).await;
    let all = token(&daemon, "all", &["--roles", "admin"]).await;
    let roles = ["--roles", "admin", "--queues", "t.*"];
    let scoped = token(&daemon, "scoped", &roles).await;
    let file = json!({"text": source.file("", "")});
    for (token, expected) in [(&scoped, 403), (&all, 200)] {
        let path = "/v1/topologies/t";
        let (status, answer) = call(
            &daemon,
            Method::PUT,
            path,
            Some(token.as_str()),
            file.clone(),
        )
        .await;
        assert_eq!(status, expected, "{answer}");
    }
}

/// Entries that other consumers have had for long are claimed, acknowledged, deleted or moved.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_say_what_becomes_of_entries_that_others_have() {
    let source = Source::start("redis_stream");
    let run = |command: &[&str]| source.redis.run(command);
    // One rule fails, and the others are applied.
    run(&["SET", "dead", "no list"]);
    run(&["XGROUP", "CREATE", "source", "taskd", "0", "MKSTREAM"]);
    source.push(0..7);
    let read = |count: &str, consumer: &str| {
        let group = ["XREADGROUP", "GROUP", "taskd", consumer, "COUNT", count];
        run(&[&group[..], &["STREAMS", "source", ">"]].concat())
    };
    let ids: Vec<String> = run(&["XRANGE", "source", "-", "+"])
        .lines()
        .filter(|line| line.contains('-'))
        .map(ToOwned::to_owned)
        .collect();
    read("7", "gone");
    // Each was delivered as often as its rule says, and no rule is for the last one.
    for (id, deliveries) in ids.iter().zip(["2", "3", "4", "5", "6", "7", "1"]) {
        let claim = ["XCLAIM", "source", "taskd", "gone", "0", id.as_str()];
        run(&[&claim[..], &["IDLE", "60000", "RETRYCOUNT", deliveries]].concat());
    }
    let rules = [
        ("7", "\"move\", to = \"queue:elsewhere\""),
        ("6", "\"move\", to = \"sorted_set:set\""),
        ("5", "\"move\", to = \"list:dead\""),
        ("4", "\"move\", to = \"stream:later\""),
        ("3", "\"delete\""),
        ("2", "\"claim\""),
    ];
    let rules: Vec<String> = rules
        .iter()
        .map(|(deliveries, act)| {
            format!("{{ idle = \"500ms\", deliveries = {deliveries}, do = {act} }}")
        })
        .collect();
    let rules = format!("pending = [{}]", rules.join(", "));
    let daemon = Daemon::start("", &[]).await;
    apply(&daemon, &source.file("", &rules));

    let mut seen = BTreeSet::new();
    work(&daemon, &mut seen, 1).await;
    assert_eq!(seen, BTreeSet::from([0]), "the claimed one");
    let moved = daemon.lease_all("w", "elsewhere", 1).await;
    assert_eq!(moved[0]["payload"]["n"], "5");
    until("two are left", async || source.pending() == 2).await;
    until("it says why", async || {
        let held = shown(&daemon).await["held"].to_string();
        held.contains("WRONGTYPE") && held.contains(ids[3].as_str())
    })
    .await;
    run(&["DEL", "dead"]);
    until("only the one without a rule is left", async || {
        source.pending() == 1
    })
    .await;
    let last = run(&["XPENDING", "source", "taskd", "-", "+", "10"]);
    assert!(last.contains(ids[6].as_str()), "{last}");
    let set = run(&["ZRANGE", "set", "0", "-1"]);
    assert_eq!(
        set,
        format!("{{\"id\":\"{}\",\"fields\":{{\"n\":\"4\"}}}}", ids[4])
    );
    let list = run(&["LRANGE", "dead", "0", "-1"]);
    assert_eq!(
        list,
        format!("{{\"id\":\"{}\",\"fields\":{{\"n\":\"3\"}}}}", ids[3])
    );
    let stream = run(&["XRANGE", "later", "-", "+"]);
    let fields: Vec<&str> = stream.lines().skip(1).collect();
    assert_eq!(fields, ["id", ids[2].as_str(), "n", "2"]);
    // It was deleted; the others are still there.
    let left = run(&["XLEN", "source"]);
    assert_eq!(left, "6");
}
