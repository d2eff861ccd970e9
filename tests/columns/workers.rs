//! `taskd workers`, `taskd processes` and their calls through the running binary.

use std::process::Command;

use reqwest::Method;
use serde_json::{Value, json};
use taskd::wire::pb::{self, operator_client::OperatorClient};

use super::access::{call, token};
use crate::{
    column,
    support::{daemon::Daemon, until},
};

const CONFIG: &str = "[queues.default]\nlease = \"10m\"\nbackoff = [\"1h\"]\n";

/// The workers of an answer: name, queues, in hand, done, failed.
fn shown(answer: &Value) -> Vec<Value> {
    let mut workers: Vec<Value> = answer["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            json!([
                one["worker"],
                one["queues"],
                one["in_hand"],
                one["done"],
                one["failed"]
            ])
        })
        .collect();
    workers.sort_by_key(ToString::to_string);
    workers
}

async fn reject(daemon: &Daemon, worker: &str, task: &Value) {
    let item = json!({"id": task["id"], "lease_token": task["lease_token"], "reason": "no"});
    let body = json!({"worker": worker, "rejections": [item]});
    let (status, answer) = daemon.post("/v1/tasks:reject", &body).await;
    assert_eq!(
        (status, &answer["results"][0]["status"]),
        (200, &json!("OK"))
    );
}

pub(crate) fn lines(daemon: &Daemon, args: &[&str]) -> Vec<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let output = command
        .args(args)
        .env("TASKD_URL", daemon.http())
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stderr}");
    let stdout = String::from_utf8(output.stdout).unwrap();
    stdout.lines().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_listed_with_what_they_have_and_did() {
    let mut daemon = column::start(CONFIG, &[]).await;
    assert_eq!(
        daemon.get("/v1/workers").await,
        (200, json!({"workers": [], "more": 0, "unread_leases": 0}))
    );
    assert_eq!(
        lines(&daemon, &["workers"]),
        ["no worker has called in the last ten minutes"]
    );
    let tasks: Vec<Value> = (0..6)
        .map(|n| json!({"queue": "q", "key": n.to_string(), "replicas": 2}))
        .collect();
    daemon.insert(&tasks).await;
    daemon.insert(&[json!({"queue": "r", "key": "1"})]).await;
    let held = daemon.lease_all("w", "q", 6).await;
    assert_eq!(daemon.complete("w", &held[..2]).await, ["OK"; 2]);
    reject(&daemon, "w", &held[2]).await;
    assert_eq!(daemon.lease_all("v", "q", 2).await.len(), 2);
    let of_r = daemon.lease_all("w", "r", 1).await;
    assert_eq!(daemon.complete("w", &of_r).await, ["OK"]);
    // A name that no worker may have is not in the list.
    let wrong = json!({"worker": "a\nb", "queues": ["q"], "max_tasks": 1});
    assert_eq!(daemon.post("/v1/tasks:get", &wrong).await.0, 400);

    let (status, answer) = daemon.get("/v1/workers").await;
    assert_eq!(status, 200, "{answer}");
    let expected = [
        json!(["v", ["q"], 2, 0, 0]),
        json!(["w", ["q", "r"], 3, 3, 1]),
    ];
    assert_eq!(shown(&answer), expected, "{answer}");
    let w = answer["workers"]
        .as_array()
        .unwrap()
        .iter()
        .find(|one| one["worker"] == "w")
        .unwrap();
    assert!(w["address"].as_str().unwrap().starts_with("127.0.0.1:"));
    assert!(w["since"].as_str().unwrap() <= w["last_heard"].as_str().unwrap());

    // Of one queue.
    let (_, answer) = daemon.get("/v1/workers?queue=q").await;
    let expected = [json!(["v", ["q"], 2, 0, 0]), json!(["w", ["q"], 3, 2, 1])];
    assert_eq!(shown(&answer), expected, "{answer}");
    assert_eq!(
        shown(&daemon.get("/v1/workers?queue=none").await.1),
        [] as [Value; 0]
    );
    let mut client = OperatorClient::connect(daemon.grpc()).await.unwrap();
    let request = pb::ListWorkersRequest { queue: "r".into() };
    let listed = client.list_workers(request).await.unwrap().into_inner();
    assert_eq!((listed.workers.len(), listed.workers[0].done), (1, 1));
    let printed = lines(&daemon, &["workers", "q", "--json"]);
    let printed: Vec<Value> = printed
        .iter()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(shown(&json!({"workers": printed})), expected);

    let (status, answer) = daemon.get("/v1/processes").await;
    let process = &answer["processes"][0];
    assert_eq!(
        (
            status,
            &process["pid"],
            &process["version"],
            &process["workers"]
        ),
        (
            200,
            &json!(daemon.pid()),
            &json!(env!("CARGO_PKG_VERSION")),
            &json!(2)
        ),
        "{answer}"
    );
    assert_eq!(process["process"], w["process"]);
    assert_eq!(process["pipelines"].as_array().unwrap().len(), 5);
    let printed = lines(&daemon, &["processes"]);
    assert!(
        printed.len() == 2 && printed[1].contains(&daemon.pid().to_string()),
        "{printed:?}"
    );
    assert!(daemon.stop().await.success());
}

/// A token that reaches some queues sees their workers, and one for a worker sees itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_sees_the_workers_of_its_queues() {
    let daemon = column::start(&format!("auth = \"tokens\"\n{CONFIG}"), &[]).await;
    let admin = token(&daemon, "root", &["--roles", "admin"]).await;
    let mine = token(&daemon, "mine", &["--roles", "read", "--queues", "mine.*"]).await;
    let own = token(&daemon, "own", &["--roles", "read,work", "--worker", "w1"]).await;
    let ask = async |token: &str, path: &str| {
        call(&daemon, Method::GET, path, Some(token), Value::Null).await
    };
    for (worker, queue) in [("w1", "mine.a"), ("w1", "theirs"), ("w2", "theirs")] {
        let body = json!({"worker": worker, "queues": [queue], "max_tasks": 1});
        let answer = call(&daemon, Method::POST, "/v1/tasks:get", Some(&admin), body).await;
        assert_eq!(answer.0, 200);
    }
    let all = [
        json!(["w1", ["mine.a", "theirs"], 0, 0, 0]),
        json!(["w2", ["theirs"], 0, 0, 0]),
    ];
    assert_eq!(shown(&ask(&admin, "/v1/workers").await.1), all);
    assert_eq!(
        shown(&ask(&mine, "/v1/workers").await.1),
        [json!(["w1", ["mine.a"], 0, 0, 0])]
    );
    assert_eq!(shown(&ask(&own, "/v1/workers").await.1), all[..1]);
    assert_eq!(ask(&mine, "/v1/workers?queue=theirs").await.0, 403);
    assert_eq!(ask(&mine, "/v1/processes").await.0, 403);
    assert_eq!(ask(&admin, "/v1/processes").await.0, 200);
    let mut processes = Value::Null;
    until("the process has written its value", async || {
        processes = ask(&admin, "/v1/processes").await.1["processes"].take();
        processes.as_array().is_some_and(|all| all.len() == 1)
    })
    .await;
}
