//! Subscriptions: records of topics become tasks of queues.

use std::{collections::BTreeSet, process::Command, time::Instant};

use serde_json::{Value, json};
use taskd::wire::pb::{self, topics_client::TopicsClient};
use tonic::Code;

use crate::support::{
    daemon::Daemon,
    http_client,
    subscriptions::{
        publish, put, subscribe, subscription, three_groups_hear_of_each_record, until_it_has,
    },
    until,
};

/// Records with the values `from` to `to`.
fn numbers(from: u64, to: u64) -> Value {
    (from..to).map(|n| json!({"value": n})).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_groups_hear_of_each_record_through_a_kill() {
    let mut daemon = Daemon::start("", &["--partitions", "1"]).await;
    three_groups_hear_of_each_record(&mut daemon).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_retention_took_is_counted_as_skipped() {
    let daemon = Daemon::start("[topics.short]\nretention_records = 1000", &[]).await;
    for n in 0..5 {
        publish(&daemon, "short", numbers(n * 1000, n * 1000 + 1000)).await;
    }
    subscribe(&daemon, "all", json!({"topic": "short", "start": "0"})).await;
    until("all that is left is read", async || {
        let all = subscription(&daemon, "all").await;
        all["behind"] == 0 && all["read"].as_u64() > Some(0)
    })
    .await;
    let all = subscription(&daemon, "all").await;
    let tasks = all["tasks"].as_u64().unwrap();
    assert!((1000..1100).contains(&tasks), "{all}");
    assert_eq!(all["skipped"], 5000 - tasks);
    assert_eq!(all["read"], tasks);
    until_it_has(&daemon, "all", &[("waiting", tasks)]).await;
}

/// A4 and A5: the feeder is killed at any step, and each record has one task.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_record_has_one_task_whenever_the_feeder_is_killed() {
    const RECORDS: u64 = 3000;
    let config = "[topics.t]\npartitions = 3\n[subscriptions.a]\ntopic = \"t\"\nstart = \"0\"\n\
                  [subscriptions.b]\ntopic = \"t\"\nstart = \"0\"\n";
    let mut daemon = Daemon::start(config, &[]).await;
    for n in 0..6 {
        publish(&daemon, "t", numbers(n * 500, n * 500 + 500)).await;
        daemon.kill9_and_restart();
        daemon.ready().await;
    }
    for name in ["a", "b"] {
        let fields = [("behind", 0), ("read", RECORDS), ("tasks", RECORDS)];
        until_it_has(&daemon, name, &fields).await;
        until_it_has(&daemon, name, &[("waiting", RECORDS)]).await;
    }
    let mut values: BTreeSet<u64> = BTreeSet::new();
    let mut done = 0;
    until("all are done", async || {
        let tasks = daemon.lease("w", "a", 1000, "100ms").await;
        values.extend(tasks.iter().filter_map(|task| task["payload"].as_u64()));
        done += tasks.len();
        daemon.complete("w", &tasks).await;
        done as u64 >= RECORDS
    })
    .await;
    assert_eq!(values.len() as u64, RECORDS);
    until_it_has(&daemon, "a", &[("done", RECORDS), ("waiting", 0)]).await;

    // The feeder was killed after the insert, before the positions moved.
    assert!(daemon.stop().await.success());
    let database = rusqlite::Connection::open(daemon.data().join("taskd.db")).unwrap();
    let back = "UPDATE positions SET major = -1, minor = 0, appended = 0, records_read = 0";
    assert_eq!(database.execute(back, []).unwrap(), 6);
    drop(database);
    daemon.start_again();
    daemon.ready().await;
    let fields = [("behind", 0), ("read", RECORDS), ("tasks", RECORDS)];
    until_it_has(&daemon, "a", &fields).await;
    until_it_has(
        &daemon,
        "a",
        &[("waiting", 0), ("leased", 0), ("done", RECORDS)],
    )
    .await;
    until_it_has(&daemon, "b", &fields).await;
    until_it_has(&daemon, "b", &[("waiting", RECORDS)]).await;
    let nothing = daemon.lease("w", "a", 10, "500ms").await;
    assert!(nothing.is_empty(), "{nothing:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_holds_up_its_own_subscription_and_no_other() {
    let config = "[queues.full]\nmax_unfinished = 10\n[topics.t]\n";
    let daemon = Daemon::start(config, &[]).await;
    for name in ["full", "free"] {
        subscribe(&daemon, name, json!({"topic": "t", "start": "0"})).await;
    }
    publish(&daemon, "t", numbers(0, 10)).await;
    until_it_has(&daemon, "full", &[("waiting", 10), ("behind", 0)]).await;
    let published = Instant::now();
    publish(&daemon, "t", numbers(10, 30)).await;
    until_it_has(&daemon, "free", &[("waiting", 30), ("behind", 0)]).await;
    let mut full = Value::Null;
    until("the oldest record is a second old", async || {
        full = subscription(&daemon, "full").await;
        full["oldest_seconds"].as_u64() > Some(0)
    })
    .await;
    let age = published.elapsed().as_secs();
    assert!(full["oldest_seconds"].as_u64() <= Some(age), "{full}");
    assert_eq!((&full["behind"], &full["read"]), (&json!(20), &json!(10)));
    let free = subscription(&daemon, "free").await;
    assert!(free["oldest_seconds"].is_null(), "{free}");
    let some = daemon.lease_all("w", "full", 10).await;
    daemon.complete("w", &some).await;
    until_it_has(
        &daemon,
        "full",
        &[("behind", 0), ("read", 30), ("waiting", 20)],
    )
    .await;
}

/// Records of 1 MiB, of which three times as many are published as Redis may hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_all_subscriptions_have_read_leaves_a_redis_with_little_memory() {
    const RECORDS: u64 = 64;
    let daemon = Daemon::start(
        "redis_max_memory = \"24MiB\"\n[topics.t]\nretention_bytes = \"512MiB\"\n",
        &[],
    )
    .await;
    // It reads all records, and makes no tasks of them, which would fill Redis, too.
    let matching = json!({"nobody": "has it"});
    subscribe(&daemon, "s", json!({"topic": "t", "match": matching})).await;
    let value = "x".repeat(1_000_000);
    for n in 0..RECORDS {
        until("the topic takes a record", async || {
            let record = json!({"value": value, "key": n.to_string()});
            let (_, answer) = daemon.post("/v1/topics/t/records", &record).await;
            answer["results"][0]["status"] == "STORED"
        })
        .await;
    }
    let fields = [("read", RECORDS), ("filtered", RECORDS), ("skipped", 0)];
    until_it_has(&daemon, "s", &fields).await;
}

/// A12: the log was made anew, and ends before the position.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_ends_before_a_position_is_read_from_its_beginning() {
    let mut daemon = Daemon::start("[topics.t]\n", &[]).await;
    subscribe(&daemon, "s", json!({"topic": "t"})).await;
    publish(&daemon, "t", numbers(0, 3)).await;
    until_it_has(&daemon, "s", &[("read", 3), ("waiting", 3)]).await;
    assert!(daemon.stop().await.success());
    let database = rusqlite::Connection::open(daemon.data().join("taskd.db")).unwrap();
    let ahead = "UPDATE positions SET major = major + 1000000000";
    assert_eq!(database.execute(ahead, []).unwrap(), 1);
    drop(database);
    daemon.start_again();
    daemon.ready().await;
    until_it_has(&daemon, "s", &[("read", 6), ("tasks", 6), ("waiting", 6)]).await;
    let (_, one) = daemon.get("/v1/subscriptions/s").await;
    assert_eq!(one["positions"][0]["replay"], 1, "{one}");
    // It goes on from there.
    publish(&daemon, "t", numbers(3, 4)).await;
    until_it_has(&daemon, "s", &[("read", 7), ("skipped", 0)]).await;
}

/// Redis has lost the newest records, as after a failover. Those before them are not read again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_lost_its_newest_records_gives_no_other_a_second_task() {
    let daemon = Daemon::start("[topics.t]\n", &[]).await;
    subscribe(&daemon, "s", json!({"topic": "t", "start": "0"})).await;
    publish(&daemon, "t", numbers(0, 5)).await;
    until_it_has(&daemon, "s", &[("read", 5), ("waiting", 5)]).await;
    let mut redis = daemon.redis().await;
    let keys: Vec<String> = redis::cmd("KEYS")
        .arg("*{topic:t:0}:log")
        .query_async(&mut redis)
        .await
        .unwrap();
    let [key] = &keys[..] else {
        panic!("{keys:?}");
    };
    let all: Vec<(String, Vec<String>)> = redis::cmd("XRANGE")
        .arg(key)
        .arg("-")
        .arg("+")
        .query_async(&mut redis)
        .await
        .unwrap();
    let mut lose = redis::pipe();
    lose.atomic().cmd("DEL").arg(key);
    for (id, fields) in &all[..3] {
        lose.cmd("XADD").arg(key).arg(id).arg(fields);
    }
    let _: redis::Value = lose.query_async(&mut redis).await.unwrap();
    let mut one = Value::Null;
    until("the position is the new end", async || {
        (_, one) = daemon.get("/v1/subscriptions/s").await;
        one["positions"][0]["offset"] == all[2].0
    })
    .await;
    assert_eq!(one["positions"][0]["replay"], 0, "{one}");
    publish(&daemon, "t", numbers(5, 6)).await;
    let fields = [("read", 6), ("tasks", 6), ("waiting", 6), ("skipped", 0)];
    until_it_has(&daemon, "s", &fields).await;
}

/// A place after all records is the end: what comes next is read, and nothing that was there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscription_that_begins_or_goes_after_all_records_reads_only_the_next() {
    let daemon = Daemon::start("[topics.t]\npartitions = 2\n", &[]).await;
    // One partition has records, and the other has none.
    let keyed = |n: u64| json!({"value": n, "key": "k"});
    publish(&daemon, "t", json!([keyed(0), keyed(1)])).await;
    let future = "2100-01-01T00:00:00Z";
    subscribe(&daemon, "new", json!({"topic": "t", "start": future})).await;
    subscribe(&daemon, "old", json!({"topic": "t", "start": "0"})).await;
    until_it_has(&daemon, "old", &[("read", 2)]).await;
    let path = "/v1/subscriptions/old:seek";
    let (status, answer) = daemon.post(path, &json!({"to": future})).await;
    assert_eq!(status, 200, "{answer}");
    let positions = answer["positions"].as_array().unwrap();
    let with_records = positions.iter().find(|one| one["offset"].is_string());
    let partition = &with_records.unwrap()["partition"];
    let to = format!("{partition}:9999999999999-0");
    let (status, answer) = daemon.post(path, &json!({"to": to})).await;
    let said =
        format!("offset 9999999999999-0 is after the end of partition {partition} of topic t");
    let detail = answer["detail"].as_str().unwrap_or_default();
    assert!(status == 400 && detail.starts_with(&said), "{answer}");
    publish(&daemon, "t", json!([keyed(2)])).await;
    until_it_has(&daemon, "new", &[("read", 1), ("behind", 0)]).await;
    until_it_has(&daemon, "old", &[("read", 3), ("behind", 0)]).await;
    // So does the partition that had none.
    publish(&daemon, "t", numbers(3, 5)).await;
    until_it_has(&daemon, "new", &[("read", 3), ("waiting", 3)]).await;
    until_it_has(&daemon, "old", &[("read", 5), ("waiting", 5)]).await;
}

/// A feeder looks at each partition only twice a minute, but hears of records at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_idle_partitions_become_tasks_before_anybody_looks_at_all() {
    const PARTITIONS: u64 = 60;
    let config = format!("[topics.t]\npartitions = {PARTITIONS}\n");
    let daemon = Daemon::start(&config, &[]).await;
    subscribe(&daemon, "s", json!({"topic": "t"})).await;
    // Calls take turns over the partitions.
    for n in 0..PARTITIONS {
        publish(&daemon, "t", numbers(n, n + 1)).await;
    }
    until_it_has(&daemon, "s", &[("read", PARTITIONS), ("behind", 0)]).await;
    for n in 0..PARTITIONS {
        publish(&daemon, "t", numbers(n, n + 1)).await;
    }
    let fields = [("read", 2 * PARTITIONS), ("waiting", 2 * PARTITIONS)];
    let all = until_it_has(&daemon, "s", &fields);
    let within = std::time::Duration::from_secs(10);
    let heard = tokio::time::timeout(within, all).await;
    assert!(heard.is_ok(), "some were found by looking only");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_its_queue_refuses_becomes_a_letter_and_the_next_goes_on() {
    let config = "[queues.picky]\npayload_schema = '{\"type\": \"integer\"}'\n[topics.t]\n";
    let daemon = Daemon::start(config, &[]).await;
    subscribe(&daemon, "picky", json!({"topic": "t"})).await;
    let records = json!([{"value": 1}, {"value": "no number"}, {"value": 2}]);
    publish(&daemon, "t", records).await;
    let fields = [("read", 3), ("refused", 1), ("tasks", 2), ("waiting", 2)];
    until_it_has(&daemon, "picky", &fields).await;
    let (_, letters) = daemon.get("/v1/dead-letters?queue=picky").await;
    let letters = letters["letters"].as_array().unwrap();
    assert_eq!(letters.len(), 1, "{letters:?}");
    assert_eq!(letters[0]["kind"], "refused");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_are_chosen_by_attributes_and_known_by_their_ids() {
    let daemon = Daemon::start("[topics.t]\n", &[]).await;
    let matching = json!({"region": {"prefix": "eu-"}, "test": {"exists": false}});
    subscribe(&daemon, "eu", json!({"topic": "t", "match": matching})).await;
    subscribe(&daemon, "all", json!({"topic": "t", "queue": "everything"})).await;
    let records = json!([
        {"value": 1, "attributes": {"region": "eu-1"}, "id": "one"},
        {"value": 2, "attributes": {"region": "us-1"}},
        {"value": 3, "attributes": {"region": ["us-1", "eu-2"]}, "key": "k"},
        {"value": 4, "attributes": {"region": "eu-1", "test": "yes"}},
        {"value": 1, "attributes": {"region": "eu-1"}, "id": "one"},
        {"value": 1, "attributes": {"region": "eu-1"}},
    ]);
    publish(&daemon, "t", records).await;
    let fields = [
        ("read", 6),
        ("filtered", 2),
        ("duplicates", 1),
        ("tasks", 3),
    ];
    until_it_has(&daemon, "eu", &fields).await;
    let fields = [
        ("read", 6),
        ("filtered", 0),
        ("duplicates", 1),
        ("tasks", 5),
    ];
    until_it_has(&daemon, "all", &fields).await;
    let tasks = daemon.lease_all("w", "eu", 3).await;
    let of_key = tasks.iter().find(|task| task["payload"] == 3).unwrap();
    assert_eq!(of_key["headers"]["region"], "[\"us-1\",\"eu-2\"]");
    assert_eq!(of_key["headers"]["taskd-key"], "k");
    assert_eq!(daemon.lease_all("w", "everything", 5).await.len(), 5);
    let (_, one) = daemon.get("/v1/subscriptions/eu").await;
    assert_eq!(one["positions"][0]["topic"], "t");
    assert_eq!(one["positions"][0]["read"], 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_hears_of_topics_that_are_made_later_and_a_seek_replays() {
    let daemon = Daemon::start("[topics.\"orders.eu\"]\n", &[]).await;
    publish(&daemon, "orders.eu", numbers(0, 3)).await;
    subscribe(&daemon, "s", json!({"topic": "orders.*", "start": "-1h"})).await;
    until_it_has(&daemon, "s", &[("read", 3), ("waiting", 3)]).await;
    for topic in ["orders.us", "other"] {
        let (status, answer) = put(&daemon, &format!("topics/{topic}"), json!({})).await;
        assert_eq!(status, 200, "{answer}");
        publish(&daemon, topic, numbers(0, 4)).await;
    }
    until_it_has(&daemon, "s", &[("read", 7), ("waiting", 7)]).await;
    // A topic that gets partitions is read from the beginning of each.
    put(&daemon, "topics/orders.us", json!({"partitions": 8})).await;
    let keyed: Value = (0..20)
        .map(|n| json!({"value": n, "key": n.to_string()}))
        .collect();
    publish(&daemon, "orders.us", keyed).await;
    until_it_has(&daemon, "s", &[("read", 27), ("waiting", 27)]).await;

    let (status, answer) = daemon
        .post("/v1/subscriptions/s:seek", &json!({"to": "0"}))
        .await;
    assert_eq!(status, 200, "{answer}");
    until_it_has(
        &daemon,
        "s",
        &[("read", 54), ("tasks", 54), ("waiting", 54)],
    )
    .await;
    let (_, acts) = daemon.get("/v1/acts").await;
    let what: Vec<&Value> = acts["acts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|act| &act["what"])
        .collect();
    assert!(what.contains(&&json!("seek to 0")), "{what:?}");

    // The tasks since the last seek are cancelled, and no others.
    let path = "/v1/subscriptions/s:seek";
    let request = json!({"to": "0", "cancel": true});
    let (status, answer) = daemon.post(path, &request).await;
    assert_eq!(status, 200, "{answer}");
    let bulk = format!("/v1/bulk/{}", answer["bulk"].as_str().unwrap());
    until("the bulk change is done", async || {
        let (_, bulk) = daemon.get(&bulk).await;
        bulk["state"] == "DONE"
    })
    .await;
    until_it_has(
        &daemon,
        "s",
        &[("read", 81), ("tasks", 81), ("waiting", 54)],
    )
    .await;
    // A second one cancels what was inserted until the answer.
    until("both bulk changes are done", async || {
        let (_, all) = daemon.get("/v1/bulk").await;
        let all = all["bulk"].as_array().unwrap().clone();
        assert_eq!(all.len(), 2, "{all:?}");
        let changed = all.iter().filter_map(|one| one["changed"].as_u64());
        changed.sum::<u64>() == 27 && all.iter().all(|one| one["state"] == "DONE")
    })
    .await;

    let url = format!("{}/v1/subscriptions/s", daemon.http());
    let deleted = http_client().delete(url).send().await.unwrap();
    assert_eq!(deleted.status(), 204);
    let (status, _) = daemon.get("/v1/subscriptions/s").await;
    assert_eq!(status, 404);
    assert_eq!(daemon.unfinished("s").await, 54);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mistake_is_answered_with_what_to_do_and_changes_nothing() {
    let file = "[topics.orders]\npartitions = 2\n[queues.loud]\nevents = true";
    let daemon = Daemon::start(file, &[]).await;
    subscribe(&daemon, "mailer", json!({"topic": "orders"})).await;
    for (name, settings, status, said) in [
        (
            "a b",
            json!({"topic": "orders"}),
            400,
            "subscription \"a b\" contains ' '",
        ),
        ("s", json!({}), 400, "topic is missing"),
        (
            "s",
            json!({"topic": "order"}),
            404,
            "there is no topic \"order\"; did you mean \"orders\"?",
        ),
        (
            "s",
            json!({"topic": "expirations"}),
            400,
            "topic \"expirations\" is one of taskd's own",
        ),
        (
            "s",
            json!({"topic": "events", "queue": "loud"}),
            400,
            "queue loud has events = true, so each task of subscription s would make another one",
        ),
        (
            "s",
            json!({"topic": "orders", "queue": "a b"}),
            400,
            "queue \"a b\" contains ' '",
        ),
        (
            "s",
            json!({"topic": "orders", "start": "soon"}),
            400,
            "start \"soon\" is no place; write 0",
        ),
        (
            "s",
            json!({"topic": "orders", "start": "5-0"}),
            400,
            "topic orders has 2 partitions: write",
        ),
        (
            "s",
            json!({"topic": "orders", "start": "2:5-0"}),
            400,
            "there is no partition 2",
        ),
        (
            "s",
            json!({"topic": "orders", "match": {"a": 1}}),
            400,
            "match: \"a\" has a value",
        ),
        (
            "s",
            json!({"topic": "orders", "sequence": "x"}),
            400,
            "sequence: unknown value \"x\"; expected none, key",
        ),
        (
            "s",
            json!({"topic": "orders", "on_dead": "hold"}),
            400,
            "on_dead is hold, and sequence is none",
        ),
        (
            "s",
            json!({"topic": "orders", "from": "0"}),
            400,
            "unknown field",
        ),
        (
            "mailer",
            json!({"topic": "o*"}),
            400,
            "subscription mailer reads topic orders",
        ),
    ] {
        let path = format!("subscriptions/{name}");
        let (found, answer) = put(&daemon, &path, settings.clone()).await;
        let detail = answer["detail"].as_str().unwrap_or_default();
        assert!(
            found == status && detail.contains(said),
            "{name} {settings}: {found} {answer}"
        );
    }
    let (status, answer) = daemon.get("/v1/subscriptions/mailr").await;
    let said = "there is no subscription \"mailr\"; did you mean \"mailer\"?";
    assert_eq!((status, &answer["detail"]), (404, &json!(said)));
    let (status, _) = daemon
        .post("/v1/subscriptions/mailer", &json!({"to": "0"}))
        .await;
    assert_eq!(status, 404);
    let path = "/v1/subscriptions/mailer:seek";
    let (status, answer) = daemon.post(path, &json!({"to": "soon"})).await;
    assert_eq!(status, 400, "{answer}");
    let (_, all) = daemon.get("/v1/subscriptions").await;
    assert_eq!(all["subscriptions"].as_array().unwrap().len(), 1, "{all}");
    assert_eq!(all["subscriptions"][0]["match"], json!({}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_makes_lists_moves_and_deletes() {
    let daemon = Daemon::start("[topics.orders]\n", &[]).await;
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_taskd"))
            .arg("subscription")
            .args(args)
            .args(["--server", &daemon.http()])
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let code = output.status.code().unwrap();
        (code, text(output.stdout), text(output.stderr))
    };
    let done = |args: &[&str]| {
        let (code, stdout, stderr) = run(args);
        assert_eq!((code, stderr.as_str()), (0, ""), "{args:?}");
        stdout
    };
    publish(&daemon, "orders", numbers(0, 2)).await;
    let matching = "{\"lang\": [\"en\"]}";
    done(&["put", "s", "--topic", "orders", "--match", matching]);
    assert!(done(&["show", "s"]).contains("\"lang\""));
    assert!(done(&["list"]).contains("orders"));
    done(&["put", "s", "--match", "{}"]);
    done(&["seek", "s", "--to", "-1h"]);
    until_it_has(&daemon, "s", &[("read", 2), ("waiting", 2)]).await;
    done(&["delete", "s"]);
    let (code, _, stderr) = run(&["show", "s"]);
    assert_eq!(code, 1);
    assert_eq!(stderr, "taskd: there is no subscription \"s\"\n");
    let (code, _, stderr) = run(&["put", "s", "--topic", "order"]);
    assert_eq!(code, 1, "{stderr}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_says_what_became_of_a_record_in_each_subscription() {
    let config = "[queues.picky]\npayload_schema = '{\"type\": \"integer\"}'\n\
                  [queues.full]\nmax_unfinished = 1\n[topics.t]\n";
    let mut daemon = Daemon::start(config, &[]).await;
    publish(&daemon, "t", json!({"value": "before"})).await;
    for name in ["all", "picky", "full"] {
        subscribe(&daemon, name, json!({"topic": "t"})).await;
    }
    let matching = json!({"lang": "en"});
    subscribe(&daemon, "english", json!({"topic": "t", "match": matching})).await;
    publish(&daemon, "t", json!({"value": "text"})).await;
    for name in ["all", "picky", "full", "english"] {
        until_it_has(&daemon, name, &[("read", 1)]).await;
    }
    // The count of a queue may be half a second old, but a start reads it.
    daemon.kill9_and_restart();
    daemon.ready().await;
    let attributes = json!({"lang": "en"});
    let record = json!({"value": 1, "id": "once", "attributes": attributes});
    publish(&daemon, "t", json!([record, record])).await;
    for name in ["all", "picky", "english"] {
        until_it_has(&daemon, name, &[("read", 3)]).await;
    }
    let (_, page) = daemon.get("/v1/topics/t/records").await;
    let offsets: Vec<&str> = page["records"]
        .as_array()
        .unwrap()
        .iter()
        .map(|record| record["offset"].as_str().unwrap())
        .collect();
    let fates = async |offset: &str| {
        let path = format!("/v1/topics/t/records:explain?partition=0&offset={offset}");
        let (status, answer) = daemon.get(&path).await;
        assert_eq!(status, 200, "{answer}");
        let of = |name: &str| {
            let all = answer["subscriptions"].as_array().unwrap();
            let found = all.iter().find(|one| one["subscription"] == name);
            found.unwrap().clone()
        };
        ["all", "english", "full", "picky"].map(of)
    };
    let names = |fates: &[Value; 4]| fates.clone().map(|one| one["fate"].clone());
    let before = fates(offsets[0]).await;
    assert_eq!(
        names(&before),
        ["NO_TASK", "FILTERED", "NO_TASK", "NO_TASK"]
    );
    let first = fates(offsets[1]).await;
    assert_eq!(names(&first), ["TASK", "FILTERED", "TASK", "REFUSED"]);
    let task = first[0]["task"].as_str().unwrap();
    let (_, file) = daemon.get(&format!("/v1/tasks/{task}")).await;
    assert_eq!(file["queue"], "all", "{file}");
    assert_eq!(first[0]["status"], file["status"]);
    let letter = first[3]["letter"].as_str().unwrap();
    let (status, letter) = daemon.get(&format!("/v1/dead-letters/{letter}")).await;
    assert_eq!((status, &letter["queue"]), (200, &json!("picky")));
    let second = fates(offsets[2]).await;
    assert_eq!(names(&second), ["TASK", "TASK", "BEHIND", "TASK"]);
    // The record of the same id has the same task.
    assert_eq!(fates(offsets[3]).await[0]["task"], second[0]["task"]);

    let output = Command::new(env!("CARGO_BIN_EXE_taskd"))
        .args(["explain", "--record", &format!("t/0/{}", offsets[1])])
        .args(["--server", &daemon.http()])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("Subscription english: FILTERED"), "{said}");
    assert!(
        said.contains(&format!("TASK {task} of queue all")),
        "{said}"
    );

    // Retention deletes it before the full queue takes it.
    put(&daemon, "topics/t", json!({"retention_records": 1})).await;
    publish(&daemon, "t", json!({"value": 2})).await;
    until("retention has deleted it", async || {
        names(&fates(offsets[2]).await)[2] == "SKIPPED"
    })
    .await;
    for (query, said) in [
        ("offset=1-1&partition=1", "there is no partition 1"),
        ("offset=x", "offset \"x\" is none"),
        (
            "offset=99999999999999-0",
            "has no record 99999999999999-0 yet",
        ),
    ] {
        let path = format!("/v1/topics/t/records:explain?{query}");
        let (status, answer) = daemon.get(&path).await;
        let detail = answer["detail"].as_str().unwrap_or_default();
        assert!(status == 400 && detail.contains(said), "{query}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_are_made_moved_and_deleted_over_grpc() {
    let daemon = Daemon::start("[topics.t]\n", &[]).await;
    let mut topics = TopicsClient::connect(daemon.grpc()).await.unwrap();
    publish(&daemon, "t", numbers(0, 3)).await;
    let put = pb::PutSubscriptionRequest {
        subscription: "s".into(),
        topic: Some("t".into()),
        start: Some("0".into()),
        match_json: Some("{\"test\": {\"exists\": false}}".into()),
        ..Default::default()
    };
    let made = topics.put_subscription(put.clone()).await.unwrap();
    let made = made.into_inner();
    assert_eq!((&*made.queue, &*made.sequence), ("s", "none"));
    let wrong = pb::PutSubscriptionRequest {
        match_json: Some("{".into()),
        ..put
    };
    let refused = topics.put_subscription(wrong).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    until_it_has(&daemon, "s", &[("read", 3), ("waiting", 3)]).await;
    let get = pb::GetSubscriptionRequest {
        subscription: "s".into(),
    };
    let one = topics.get_subscription(get.clone()).await.unwrap();
    let one = one.into_inner();
    assert_eq!((one.tasks, one.positions.len()), (3, 1));
    let explain = pb::ExplainRecordRequest {
        topic: "t".into(),
        partition: 0,
        offset: one.positions[0].offset.clone(),
    };
    let explained = topics.explain_record(explain).await.unwrap().into_inner();
    assert_eq!(explained.subscriptions[0].fate(), pb::RecordFate::Task);
    let seek = pb::SeekRequest {
        subscription: "s".into(),
        to: "0".into(),
        cancel: true,
    };
    let sought = topics.seek(seek).await.unwrap().into_inner();
    assert!(!sought.bulk.is_empty());
    until_it_has(&daemon, "s", &[("read", 6), ("waiting", 3)]).await;
    let list = topics.list_subscriptions(pb::ListSubscriptionsRequest {});
    let listed = list.await.unwrap().into_inner().subscriptions;
    assert_eq!(listed.len(), 1);
    let delete = pb::DeleteSubscriptionRequest {
        subscription: "s".into(),
    };
    topics.delete_subscription(delete).await.unwrap();
    let gone = topics.get_subscription(get).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
}

/// The only task of a queue that comes.
async fn only_task(daemon: &Daemon, queue: &str) -> Value {
    let mut tasks = daemon.lease_all("w", queue, 1).await;
    let task = tasks.remove(0);
    assert_eq!(task["queue"], queue, "{task}");
    task
}

async fn reject(daemon: &Daemon, task: &Value, reason: &str) {
    let rejection = json!({
        "id": task["id"], "lease_token": task["lease_token"], "reason": reason, "retry": false,
    });
    let body = json!({"worker": "w", "rejections": [rejection]});
    let (status, answer) = daemon.post("/v1/tasks:reject", &body).await;
    assert_eq!(status, 200, "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_and_dead_letters_become_tasks_and_these_make_no_others() {
    let file = "[queues.loud]\nevents = true\nmax_attempts = 1\n\
                [queues.quiet]\nmax_attempts = 1\n[queues.letters]\nmax_attempts = 1\n\
                [subscriptions.all-letters]\ntopic = \"dead-letters\"\nqueue = \"quiet\"";
    let daemon = Daemon::start(file, &[]).await;
    let of_loud = json!({"queue": "loud"});
    subscribe(
        &daemon,
        "letters",
        json!({"topic": "dead-letters", "match": of_loud}),
    )
    .await;
    let dead = json!({"topic": "events", "queue": "ends", "match": {"status": "DEAD"}});
    subscribe(&daemon, "ends", dead).await;
    // Its tasks have no events, as those of subscriptions of all topics of users.
    subscribe(&daemon, "users", json!({"topic": "*"})).await;
    let task = json!({"queue": "loud", "key": "k", "payload": {"n": 1}});
    let (status, answer) = daemon.post("/v1/tasks", &json!([task])).await;
    assert_eq!(status, 200, "{answer}");
    let loud = only_task(&daemon, "loud").await;
    reject(&daemon, &loud, "too bad").await;

    let end = only_task(&daemon, "ends").await;
    assert_eq!(end["payload"]["id"], loud["id"], "{end}");
    assert_eq!(end["payload"]["status"], "DEAD");
    assert_eq!(end["payload"]["key"], "k");
    assert_eq!(end["headers"]["taskd-topic"], "events");
    assert_eq!(end["headers"]["taskd-key"], loud["id"]);
    let letter = only_task(&daemon, "letters").await;
    assert_eq!(letter["payload"]["task_id"], loud["id"], "{letter}");
    assert_eq!(letter["payload"]["reason"], "too bad");
    assert_eq!(letter["payload"]["task"]["payload"], json!({"n": 1}));
    assert_eq!(letter["headers"]["queue"], "loud");
    assert_eq!(letter["headers"]["kind"], "task");
    let fields = [("behind", 0), ("tasks", 1), ("filtered", 0)];
    until_it_has(&daemon, "all-letters", &fields).await;

    // A letter about a task that came of a letter stays a letter.
    reject(&daemon, &letter, "no way").await;
    let fields = [("behind", 0), ("tasks", 1), ("filtered", 1)];
    until_it_has(&daemon, "letters", &fields).await;
    until_it_has(&daemon, "all-letters", &fields).await;
    // PENDING and DEAD.
    until_it_has(&daemon, "ends", &[("read", 2), ("tasks", 1)]).await;
    until_it_has(&daemon, "users", &[("read", 0)]).await;
}
