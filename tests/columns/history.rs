//! The history of a task through the running binary: every attempt, whatever its end, and what
//! operators did; by HTTP, gRPC and `taskd task`.

use std::{process::Command, time::SystemTime};

use serde_json::{Value, json};
use taskd::wire::pb::{self, discovery_client::DiscoveryClient};

use crate::{
    column,
    support::{daemon::Daemon, until},
};

const AT_ONCE: &str =
    "partitions = 1\n[queues.default]\nlease = \"10m\"\nbackoff = [\"0s\"]\nmax_attempts = 5\n";

async fn task(daemon: &Daemon, id: &str) -> Value {
    let (status, answer) = daemon.get(&format!("/v1/tasks/{id}")).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

/// The task, as soon as its history has so many attempts.
async fn task_with(daemon: &Daemon, id: &str, attempts: usize) -> Value {
    let mut answer = Value::Null;
    until("the attempts are there", async || {
        answer = task(daemon, id).await;
        answer["history"].as_array().unwrap().len() == attempts
    })
    .await;
    answer
}

/// Leases one task for so long.
async fn lease_for(daemon: &Daemon, worker: &str, queue: &str, lease: &str) -> Value {
    let get = json!({"worker": worker, "queues": [queue], "wait": "60s", "lease_duration": lease});
    let (status, answer) = daemon.post("/v1/tasks:get", &get).await;
    assert_eq!(
        (status, answer["tasks"].as_array().map(Vec::len)),
        (200, Some(1)),
        "{answer}"
    );
    answer["tasks"][0].clone()
}

async fn reject(daemon: &Daemon, worker: &str, tasks: &[Value], reason: &str, retry: bool) {
    let item = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"], "reason": reason, "retry": retry});
    let items: Vec<_> = tasks.iter().map(item).collect();
    let (status, answer) = daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": worker, "rejections": items}),
        )
        .await;
    assert_eq!(
        (status, &answer["results"][0]["status"]),
        (200, &json!("OK")),
        "{answer}"
    );
}

/// The text of a whole second has no fraction, so texts do not compare as times do.
fn at(time: &Value) -> SystemTime {
    humantime::parse_rfc3339(time.as_str().unwrap()).unwrap()
}

/// The states of the attempts, with their workers.
fn states(task: &Value) -> Vec<(&str, &str)> {
    let attempts = task["history"].as_array().unwrap().iter();
    attempts
        .map(|one| {
            (
                one["state"].as_str().unwrap(),
                one["worker"].as_str().unwrap(),
            )
        })
        .collect()
}

/// Exit code and stdout of `taskd task`.
fn shown(daemon: &Daemon, args: &[&str]) -> (i32, String) {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let output = command
        .env_clear()
        .envs(own)
        .arg("task")
        .args(args)
        .args(["--server", &daemon.http()])
        .output();
    let output = output.unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stdout).unwrap(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_shows_what_went_in_and_how_each_attempt_ended() {
    let mut daemon = column::start(AT_ONCE, &[]).await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let new = json!({"queue": "q", "key": "k", "payload": {"url": "x"}, "headers": {"h": "v"}, "traceparent": trace,
        "replicas": 2});
    let id = daemon.insert(&[new]).await.remove(0);
    let inserted = task(&daemon, &id).await;
    assert_eq!(
        (&inserted["payload"], &inserted["payload_encoding"]),
        (&json!({"url": "x"}), &json!("json"))
    );
    assert_eq!(
        (&inserted["headers"], &inserted["traceparent"]),
        (&json!({"h": "v"}), &json!(trace))
    );
    assert_eq!(
        [
            &inserted["history"],
            &inserted["acts"],
            &inserted["results"]
        ],
        [&json!([]), &json!([]), &json!(0)]
    );

    let leased = lease_for(&daemon, "a", "q", "1m").await;
    let live = task_with(&daemon, &id, 1).await;
    let lease =
        json!([{"worker": "a", "state": "LEASED", "lease_expires_at": leased["lease_expires_at"]}]);
    assert_eq!(live["history"], lease);
    let reason = format!("no luck{}", "!".repeat(2000));
    reject(&daemon, "a", &[leased], &reason, true).await;
    let rejected = task_with(&daemon, &id, 1).await["history"][0].clone();
    assert_eq!(
        (&rejected["state"], &rejected["attempt"]),
        (&json!("REJECTED"), &json!(1))
    );
    assert_eq!(rejected["reason"], reason[..1024]);
    let (created, from, until_) = (
        at(&inserted["created_at"]),
        at(&rejected["from"]),
        at(&rejected["until"]),
    );
    assert!(created <= from && from <= until_, "{rejected}");

    lease_for(&daemon, "a", "q", "3s").await;
    until("the lease expires", async || {
        states(&task(&daemon, &id).await).contains(&("EXPIRED", "a"))
    })
    .await;
    let of_a = lease_for(&daemon, "a", "q", "1m").await;
    assert_eq!(daemon.complete("a", &[of_a]).await, ["OK"]);
    // A token need not say when the lease was given.
    let mut of_b = lease_for(&daemon, "b", "q", "1m").await;
    let token = of_b["lease_token"].as_str().unwrap();
    let (rest, _) = token.rsplit_once(':').unwrap();
    let token = format!("{rest}:0");
    of_b["lease_token"] = token.into();
    assert_eq!(daemon.complete("b", &[of_b]).await, ["OK"]);
    until("both results are there", async || {
        task(&daemon, &id).await["results"] == 2
    })
    .await;
    let done = task(&daemon, &id).await;
    assert_eq!(
        states(&done),
        [
            ("REJECTED", "a"),
            ("EXPIRED", "a"),
            ("COMPLETED", "a"),
            ("COMPLETED", "b")
        ]
    );
    let [expired, of_a, of_b] = [1, 2, 3].map(|n| &done["history"][n]);
    assert_eq!(
        (&expired["reason"], expired.get("from")),
        (&json!("lease expired"), None)
    );
    assert!(at(&of_a["from"]) <= at(&of_a["until"]), "{of_a}");
    assert_eq!(
        (of_b.get("from"), of_b.get("surplus"), &done["status"]),
        (None, None, &json!("COMPLETED"))
    );

    let mut client = DiscoveryClient::connect(daemon.grpc()).await.unwrap();
    let same = client
        .get_task(pb::GetTaskRequest { id: id.clone() })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (&same.payload[..], same.results, same.history.len()),
        (&b"{\"url\":\"x\"}"[..], 2, 4)
    );
    assert_eq!(same.history[0].state(), pb::AttemptState::Rejected);
    assert_eq!(same.headers["h"], "v");

    let (code, text) = shown(&daemon, &["q", "k"]);
    assert_eq!(code, 0, "{text}");
    for part in [
        &id[..],
        "REJECTED",
        "EXPIRED",
        "lease expired",
        "{\"url\":\"x\"}",
        "RESULT",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let (code, json) = shown(&daemon, &[&id, "--json"]);
    assert_eq!(
        (code, serde_json::from_str::<Value>(&json).unwrap()),
        (0, done)
    );
    assert_eq!(shown(&daemon, &["q", "nothing"]).0, 1);
    assert_eq!(shown(&daemon, &["no id"]).0, 2);
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_was_sent_again_has_the_act_and_the_failures_of_both_lives() {
    let mut daemon = column::start(
        "partitions = 1\n[queues.default]\nlease = \"10m\"\nmax_attempts = 1",
        &[],
    )
    .await;
    let ids = daemon
        .insert(&[
            json!({"queue": "q", "key": "k"}),
            json!({"queue": "q", "key": "l"}),
        ])
        .await;
    let dead = async |id: &str| {
        let letter = format!("/v1/dead-letters/{id}");
        until("it has its letter", async || {
            daemon.get(&letter).await.0 == 200
        })
        .await;
    };
    let tasks = daemon.lease_all("w", "q", 2).await;
    reject(&daemon, "w", &tasks, "first", true).await;
    for id in &ids {
        dead(id).await;
    }
    let (status, answer) = daemon
        .post("/v1/dead-letters:retry", &json!({"ids": ids}))
        .await;
    assert_eq!((status, &answer["changed"]), (200, &json!(2)), "{answer}");
    let tasks = daemon.lease_all("v", "q", 2).await;
    reject(&daemon, "v", &tasks, "second", true).await;
    for id in &ids {
        dead(id).await;
        let both = task_with(&daemon, id, 2).await;
        assert_eq!(states(&both), [("REJECTED", "w"), ("REJECTED", "v")]);
        let acts = both["acts"].as_array().unwrap();
        assert_eq!(
            (acts.len(), &acts[0]["who"]),
            (1, &json!("anybody")),
            "{both}"
        );
        assert_eq!(acts[0]["what"], "retry dead letter");
        // The letter itself has the failures of the last life.
        let (_, letter) = daemon.get(&format!("/v1/dead-letters/{id}")).await;
        let reasons: Vec<_> = letter["history"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| &one["error"])
            .collect();
        assert_eq!(reasons, ["first", "second"], "{letter}");
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn no_attempt_is_lost_when_taskd_is_killed() {
    let mut daemon = column::start(AT_ONCE, &[]).await;
    let new: Vec<_> = (0..60)
        .map(|n| json!({"queue": "q", "key": format!("{n}")}))
        .collect();
    let ids = daemon.insert(&new).await;
    let tasks = daemon.lease_all("w", "q", 60).await;
    for part in tasks.chunks(20) {
        reject(&daemon, "w", part, "no luck", true).await;
        daemon.kill9_and_restart();
        daemon.ready().await;
    }
    for id in &ids {
        let one = task_with(&daemon, id, 1).await;
        assert_eq!(states(&one), [("REJECTED", "w")]);
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_history_can_be_switched_off_and_ends_by_itself() {
    let mut daemon = column::start(&format!("history = false\n{AT_ONCE}"), &[]).await;
    let id = daemon
        .insert(&[json!({"queue": "q", "key": "k"})])
        .await
        .remove(0);
    let leased = lease_for(&daemon, "w", "q", "1m").await;
    reject(&daemon, "w", &[leased], "no luck", true).await;
    let leased = lease_for(&daemon, "w", "q", "1m").await;
    assert!(leased["lease_token"].as_str().unwrap().ends_with(":0"));
    assert_eq!(daemon.complete("w", &[leased]).await, ["OK"]);
    // The reports of a shard come in their order.
    until("it is completed", async || {
        task(&daemon, &id).await["status"] == "COMPLETED"
    })
    .await;
    let done = task_with(&daemon, &id, 1).await;
    assert_eq!(
        (states(&done), done["history"][0].get("from")),
        (vec![("COMPLETED", "w")], None)
    );
    assert!(daemon.stop().await.success());

    let mut daemon = column::start(&format!("history_retention = \"1s\"\n{AT_ONCE}"), &[]).await;
    let id = daemon
        .insert(&[json!({"queue": "q", "key": "k"})])
        .await
        .remove(0);
    let leased = lease_for(&daemon, "w", "q", "1m").await;
    reject(&daemon, "w", &[leased], "no luck", true).await;
    let leased = lease_for(&daemon, "w", "q", "1m").await;
    assert_eq!(daemon.complete("w", &[leased]).await, ["OK"]);
    until("only the result is left", async || {
        states(&task(&daemon, &id).await) == [("COMPLETED", "w")]
    })
    .await;
    assert!(daemon.stop().await.success());
}
