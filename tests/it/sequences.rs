//! Sequences through the running binary: the tasks of one go in the order of their inserts, whatever
//! fails.

use std::{collections::BTreeMap, process::Command};

use serde_json::{Value, json};

use crate::{
    columns::dead_letters::{change, reject_all, status_of},
    support::{
        daemon::{Daemon, statuses},
        subscriptions::{publish, put, subscribe, until_it_has},
        until,
    },
};

/// Workers that complete, reject or forget what they get.
struct Workers {
    calls: u64,
    rejected: u64,
    forgotten: u64,
}

impl Workers {
    /// Two workers get tasks and report them, if taskd answers.
    async fn round(&mut self, daemon: &Daemon) {
        for worker in ["w1", "w2"] {
            let get = json!({"worker": worker, "queues": ["q"], "max_tasks": 5, "wait": "100ms"});
            let Some((200, answer)) = daemon.try_post("/v1/tasks:get", &get).await else {
                continue;
            };
            for task in answer["tasks"].as_array().unwrap() {
                self.report(daemon, worker, task).await;
            }
        }
    }

    async fn report(&mut self, daemon: &Daemon, worker: &str, task: &Value) {
        self.calls += 1;
        let mut item = json!({"id": task["id"], "lease_token": task["lease_token"]});
        let (path, items) = match self.calls % 7 {
            3 => {
                self.rejected += 1;
                item["reason"] = "not now".into();
                ("/v1/tasks:reject", "rejections")
            }
            // Its worker is killed.
            5 => {
                self.forgotten += 1;
                return;
            }
            _ => ("/v1/tasks:complete", "completions"),
        };
        let body = json!({"worker": worker, items: [item]});
        daemon.try_post(path, &body).await;
    }
}

/// Asserts that each task was completed once, and those of each sequence in this order.
async fn are_done_in_order(daemon: &Daemon, sequences: &BTreeMap<String, Vec<String>>) {
    for (sequence, ids) in sequences {
        let mut before = String::new();
        for (n, id) in ids.iter().enumerate() {
            let (_, answer) = daemon.get(&format!("/v1/tasks/{id}/results")).await;
            let results = answer["results"].as_array().unwrap();
            let credited: Vec<&Value> = results
                .iter()
                .filter(|result| result["surplus"] != true)
                .collect();
            assert_eq!(credited.len(), 1, "{sequence} {n}: {answer}");
            let mut at = credited[0]["completed_at"].as_str().unwrap().to_owned();
            if !at.contains('.') {
                at = at.replace('Z', ".000Z");
            }
            assert!(before <= at, "{sequence} {n}: {before} and then {at}");
            before = at;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_sequence_goes_in_order_through_failures_kills_and_a_lost_redis() {
    const SEQUENCES: usize = 6;
    const TASKS: usize = 9;
    let config = "partitions = 2\nreconcile_every = \"500ms\"\nrepublish_after = \"1s\"\n[queues.q]\n\
                  lease = \"700ms\"\nbackoff = [\"50ms\"]\nmax_attempts = 1000\n";
    let mut daemon = Daemon::start(config, &[]).await;
    let mut sequences: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut workers = Workers {
        calls: 0,
        rejected: 0,
        forgotten: 0,
    };
    for n in 0..TASKS {
        let tasks: Vec<Value> = (0..SEQUENCES)
            .map(|sequence| {
                // Another priority changes nothing within a sequence.
                let priority = ["high", "low", "medium"][(n + sequence) % 3];
                json!({
                    "queue": "q", "key": format!("{sequence}/{n}"),
                    "sequence": format!("s{sequence}"), "priority": priority,
                })
            })
            .collect();
        let ids = daemon.insert(&tasks).await;
        for (sequence, id) in ids.into_iter().enumerate() {
            sequences
                .entry(format!("s{sequence}"))
                .or_default()
                .push(id);
        }
        if n == 2 {
            workers.round(&daemon).await;
        }
    }
    let left = (SEQUENCES * TASKS) as u64;
    until("some are done", async || {
        workers.round(&daemon).await;
        daemon.unfinished("q").await < left * 3 / 4
    })
    .await;
    daemon.kill9_and_restart();
    daemon.ready().await;
    until("half are done", async || {
        workers.round(&daemon).await;
        daemon.unfinished("q").await < left / 2
    })
    .await;
    let _: () = redis::cmd("FLUSHALL")
        .query_async(&mut daemon.redis().await)
        .await
        .expect("FLUSHALL");
    until("all are done", async || {
        workers.round(&daemon).await;
        daemon.unfinished("q").await == 0
    })
    .await;
    assert!(workers.rejected > 0 && workers.forgotten > 0);
    are_done_in_order(&daemon, &sequences).await;
    let queue = daemon.queue("q").await;
    assert_eq!(
        (&queue["completed"], &queue["dead"]),
        (&json!(left), &json!(0))
    );
    // Nothing is left of the sequences: the next one goes at once.
    daemon
        .insert(&[json!({"queue": "q", "key": "last", "sequence": "s0"})])
        .await;
    assert_eq!(daemon.lease_all("w", "q", 1).await[0]["key"], "last");
}

async fn explained(daemon: &Daemon, id: &str) -> Value {
    let (status, answer) = daemon.get(&format!("/v1/tasks:explain?id={id}")).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_death_lets_the_next_one_go_or_holds_it() {
    // A dead task may be purged soon.
    let config = "grace = \"1s\"\nrepublish_after = \"100ms\"\n[queues.q]\nmax_attempts = 1\n";
    let daemon = Daemon::start(config, &[]).await;
    let task = |key: &str, on_dead: &str| json!({"queue": "q", "key": key, "sequence": &key[..1], "on_dead": on_dead});
    let tasks = [
        task("h1", "hold"),
        task("h2", "hold"),
        task("h3", "hold"),
        task("n1", "next"),
        task("n2", "next"),
    ];
    let ids = daemon.insert(&tasks).await;
    let (_, shown) = daemon.get(&format!("/v1/tasks/{}", ids[1])).await;
    assert_eq!(shown["sequence"], "h");
    let second = explained(&daemon, &ids[2]).await;
    assert_eq!(second["place"], "BEHIND");
    assert_eq!(
        second["says"],
        format!("it waits behind task {} in sequence h, 2 before it", ids[0])
    );
    reject_all(&daemon, "w", "q", 2, "no").await;
    let next = daemon.lease_all("w", "q", 1).await;
    assert_eq!(next[0]["key"], "n2");
    assert_eq!(daemon.complete("w", &next).await, ["OK"]);
    until("the first is dead, and holds", async || {
        explained(&daemon, &ids[1]).await["says"]
            == format!(
                "it waits behind task {}, which is dead and holds the others in sequence h, 1 before it",
                ids[0]
            )
    })
    .await;
    until("the books add up", async || {
        let (_, books) = daemon.get("/v1/books?queue=q").await;
        let of = &books["queues"][0];
        of["state"] == "BALANCED" && of["held"]["sql"]["behind"] == 2
    })
    .await;
    until("the gauge shows them", async || {
        let metrics = reqwest::get(format!("{}/metrics", daemon.http())).await;
        let metrics = metrics.unwrap().text().await.unwrap();
        metrics.contains("taskd_sequences_waiting_tasks{queue=\"q\"} 2")
    })
    .await;
    let nothing = daemon.lease("w", "q", 5, "300ms").await;
    assert!(nothing.is_empty(), "{nothing:?}");
    // Sent again, it is the first again; purged, it lets the next one go.
    change(&daemon, "retry", json!({"ids": [ids[0]]})).await;
    let again = daemon.lease_all("w", "q", 1).await;
    assert_eq!(again[0]["key"], "h1");
    let rejection =
        json!({"id": again[0]["id"], "lease_token": again[0]["lease_token"], "reason": "no"});
    let reject = json!({"worker": "w", "rejections": [rejection]});
    let (_, answer) = daemon.post("/v1/tasks:reject", &reject).await;
    assert_eq!(statuses(&answer), ["OK"]);
    until("it is dead again", async || {
        status_of(&daemon, &ids[0]).await == "DEAD"
    })
    .await;
    assert!(daemon.lease("w", "q", 5, "300ms").await.is_empty());
    until("it is purged", async || {
        let purged = change(&daemon, "purge", json!({"ids": [ids[0]]})).await;
        purged["changed"] == 1
    })
    .await;
    let second = daemon.lease_all("w", "q", 1).await;
    assert_eq!(second[0]["key"], "h2");
    // An operator cancels the one that a worker holds.
    let client = reqwest::Client::new();
    let cancel = client.delete(format!("{}/v1/tasks/{}", daemon.http(), ids[1]));
    assert!(cancel.send().await.unwrap().status().is_success());
    assert_eq!(daemon.lease_all("w", "q", 1).await[0]["key"], "h3");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_was_sent_again_and_waits_is_not_taken_for_lost() {
    let config = "grace = \"3s\"\npartitions = 1\n[queues.q]\nmax_attempts = 1\n";
    let daemon = Daemon::start(config, &[]).await;
    let tasks = ["a1", "a2"].map(|key| json!({"queue": "q", "key": key, "sequence": "a"}));
    let ids = daemon.insert(&tasks).await;
    reject_all(&daemon, "w", "q", 1, "no").await;
    let second = daemon.lease_all("w", "q", 1).await;
    until("the first is dead", async || {
        status_of(&daemon, &ids[0]).await == "DEAD"
    })
    .await;
    change(&daemon, "retry", json!({"ids": [ids[0]]})).await;
    let mut redis = daemon.redis().await;
    until("the record of its first life is forgotten", async || {
        let mut records = redis::cmd("HLEN");
        records.arg("taskd:{q:0}:records");
        let records: usize = records.query_async(&mut redis).await.unwrap();
        records == 1
    })
    .await;
    assert!(!daemon.log().contains("are lost"), "{}", daemon.log());
    assert_eq!(daemon.complete("w", &second).await, ["OK"]);
    assert_eq!(daemon.lease_all("w", "q", 1).await[0]["key"], "a1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_with_a_key_go_one_after_the_other() {
    let daemon = Daemon::start(
        "[topics.t]\npartitions = 2\n[queues.in-order]\nmax_attempts = 1\n",
        &[],
    )
    .await;
    let settings = json!({"topic": "t", "start": "0", "on_dead": "hold"});
    let (status, answer) = put(&daemon, "subscriptions/in-order", settings.clone()).await;
    assert_eq!(status, 400, "{answer}");
    let error = answer["detail"].to_string();
    assert!(
        error.contains("on_dead is hold, and sequence is none"),
        "{answer}"
    );
    let mut settings = settings;
    settings["sequence"] = "key".into();
    subscribe(&daemon, "in-order", settings).await;
    let record = |key: &str, n: u64| json!({"key": key, "value": format!("{key}{n}")});
    let long = "k".repeat(4000);
    let records: Vec<Value> = (0..4)
        .flat_map(|n| {
            [
                record("a", n),
                record("b", n),
                record(&long, n),
                json!({"value": n}),
            ]
        })
        .collect();
    publish(&daemon, "t", records.into()).await;
    until_it_has(&daemon, "in-order", &[("behind", 0), ("tasks", 16)]).await;
    let mut seen: BTreeMap<char, Vec<String>> = BTreeMap::new();
    // The four without a key, and the first of each key.
    let mut leased = daemon.lease_all("w", "in-order", 7).await;
    for n in 0..4 {
        for task in &leased {
            let value = match &task["payload"] {
                Value::String(text) => text.clone(),
                other => format!("{other}"),
            };
            let first = value.chars().next().unwrap();
            seen.entry(first).or_default().push(value);
        }
        let more = daemon.lease("w", "in-order", 10, "200ms").await;
        assert!(more.is_empty(), "{more:?}");
        let done = daemon.complete("w", &leased).await;
        assert!(done.iter().all(|status| status == "OK"), "{done:?}");
        if n < 3 {
            leased = daemon.lease_all("w", "in-order", 3).await;
        }
    }
    for (key, name) in [('a', "a"), ('b', "b"), ('k', &long)] {
        let expected: Vec<String> = (0..4).map(|n| format!("{name}{n}")).collect();
        assert_eq!(seen[&key], expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_sequence_is_rejected_in_one_line_and_the_command_gives_one() {
    let daemon = Daemon::start("", &[]).await;
    let long = "x".repeat(256);
    for (task, says) in [
        (
            json!({"queue": "q", "key": "k", "sequence": long}),
            "sequence has 256 bytes; at most 255",
        ),
        (
            json!({"queue": "q", "key": "k", "sequence": "a\nb"}),
            "sequence contains a control character",
        ),
        (
            json!({"queue": "q", "key": "k", "on_dead": "hold"}),
            "on_dead is hold, and the task has no sequence: give one, or leave out on_dead",
        ),
    ] {
        let (status, answer) = daemon.post("/v1/tasks", &json!([task])).await;
        assert_eq!(status, 200, "{answer}");
        let result = &answer["results"][0];
        assert_eq!(
            (&result["status"], &result["error"]),
            (&json!("REJECTED"), &json!(says))
        );
    }
    let taskd = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_taskd"))
            .args(args)
            .args(["--server", &daemon.grpc()])
            .output()
            .unwrap();
        (
            output.status.success(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    for key in ["one", "two"] {
        let (is_done, stderr) = taskd(&[
            "insert",
            "q",
            "--key",
            key,
            "--sequence",
            "s",
            "--on-dead",
            "hold",
        ]);
        assert!(is_done, "{stderr}");
    }
    let (is_done, stderr) = taskd(&["insert", "q", "--key", "three", "--sequence", &long]);
    assert!(
        !is_done && stderr.contains("sequence has 256 bytes"),
        "{stderr}"
    );
    let first = daemon.lease_all("w", "q", 1).await;
    assert_eq!(first[0]["key"], "one");
    assert!(daemon.lease("w", "q", 5, "200ms").await.is_empty());
    assert_eq!(daemon.complete("w", &first).await, ["OK"]);
    assert_eq!(daemon.lease_all("w", "q", 1).await[0]["key"], "two");
}
