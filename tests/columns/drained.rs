//! Waiting until a queue is drained: `GET /v1/queues/{queue}?wait=drained`, `Operator.GetQueue` and
//! `taskd wait`, through the running binary.

use std::process::Command;

use serde_json::{Value, json};
use taskd::wire::pb::{self, operator_client::OperatorClient};
use tonic::Code;

use crate::{
    column,
    support::{daemon::Daemon, until},
};

const CONFIG: &str = "\
    [queues.default]\n\
    lease = \"10m\"\n\
    backoff = [\"1h\"]\n\
    [queues.full]\n\
    high_water_tasks = 1\n";

/// Whether the queue is drained now.
async fn is_drained(daemon: &Daemon, queue: &str) -> bool {
    drained_within(daemon, queue, "0s").await
}

async fn drained_within(daemon: &Daemon, queue: &str, timeout: &str) -> bool {
    let path = format!("/v1/queues/{queue}?wait=drained&timeout={timeout}");
    let (status, answer) = daemon.get(&path).await;
    assert_eq!((status, &answer["queue"]), (200, &json!(queue)), "{answer}");
    answer["drained"].as_bool().unwrap()
}

async fn taskd_wait(daemon: &Daemon, args: &[&str]) -> (i32, String, String) {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command
        .env_clear()
        .envs(own)
        .env("TASKD_URL", daemon.http())
        .arg("wait")
        .args(args);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

/// Reports a leased task as done, with a task that it discovered.
async fn discover(daemon: &Daemon, task: &Value, queue: &str, key: &str) {
    let done = json!({"id": task["id"], "lease_token": task["lease_token"],
        "discovered": [{"queue": queue, "key": key}]});
    let body = json!({"worker": "w", "completions": [done]});
    let (status, answer) = daemon.post("/v1/tasks:complete", &body).await;
    assert_eq!(
        (status, &answer["results"][0]["status"]),
        (200, &json!("OK")),
        "{answer}"
    );
}

async fn one(daemon: &Daemon, task: Value) -> String {
    daemon.insert(&[task]).await.remove(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_is_drained_when_nothing_of_it_is_unfinished() {
    let mut daemon = column::start(CONFIG, &[]).await;
    let never = "queue never never had a task: check its name, or insert a task first";
    for path in ["/v1/queues/never", "/v1/queues/never?wait=drained"] {
        let (status, answer) = daemon.get(path).await;
        assert_eq!((status, &answer["detail"]), (404, &json!(never)), "{path}");
    }
    assert_eq!(
        taskd_wait(&daemon, &["never"]).await,
        (2, String::new(), format!("taskd: {never}\n"))
    );
    assert_eq!(daemon.get("/v1/queues").await.1, json!({"queues": []}));
    let mut client = OperatorClient::connect(daemon.grpc()).await.unwrap();
    let request = |queue: &str| pb::GetQueueRequest {
        queue: queue.to_owned(),
        wait_drained: Some(prost_types::Duration::default()),
    };
    let refused = client.get_queue(request("never")).await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::NotFound, never));

    // Before its time, leased, in backoff.
    let far = one(&daemon, json!({"queue": "q", "key": "far", "delay": "2h"})).await;
    assert!(!is_drained(&daemon, "q").await);
    let (code, stdout, stderr) = taskd_wait(&daemon, &["q", "--timeout", "0s"]).await;
    let told = "queue q is not drained: it has 1 unfinished tasks\n";
    assert_eq!((code, &stdout[..], &stderr[..]), (1, told, ""));
    let answer = client.get_queue(request("q")).await.unwrap().into_inner();
    assert_eq!((answer.drained, answer.paused), (Some(false), false));
    let near = one(&daemon, json!({"queue": "q", "key": "near"})).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    assert!(!is_drained(&daemon, "q").await);
    let rejection = json!({"id": near, "lease_token": leased[0]["lease_token"], "reason": "no"});
    let body = json!({"worker": "w", "rejections": [rejection]});
    assert_eq!(daemon.post("/v1/tasks:reject", &body).await.0, 200);
    until("it is in backoff", async || {
        daemon.queue("q").await["delayed"] == 1
    })
    .await;
    let (status, _) = daemon
        .post("/v1/tasks:cancel", &json!({"ids": [far]}))
        .await;
    assert_eq!(status, 200);
    assert!(!is_drained(&daemon, "q").await);

    // Calls that wait hear of the end.
    let waiting = taskd_wait(&daemon, &["q", "--json"]);
    let ended = async {
        let body = json!({"ids": [near]});
        assert_eq!(daemon.post("/v1/tasks:cancel", &body).await.0, 200);
        assert!(drained_within(&daemon, "q", "10m").await);
    };
    let ((code, stdout, _), ()) = tokio::join!(waiting, ended);
    let told: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        (code, &told["drained"], &told["cancelled"]),
        (0, &json!(true), &json!(2)),
        "{told}"
    );
    assert_eq!(
        taskd_wait(&daemon, &["q"]).await.1,
        "queue q is drained: 0 completed, 0 dead, 2 cancelled\n"
    );

    // Parked in SQL, because the queue is full.
    let tasks: Vec<Value> = (0..5)
        .map(|n| json!({"queue": "full", "key": n.to_string()}))
        .collect();
    daemon.insert(&tasks).await;
    for _ in 0..5 {
        assert!(!is_drained(&daemon, "full").await);
        let task = daemon.lease_all("w", "full", 1).await;
        assert_eq!(daemon.complete("w", &task).await, ["OK"]);
    }
    assert!(drained_within(&daemon, "full", "10m").await);
    let (status, answer) = daemon.get("/v1/queues/full").await;
    assert_eq!((status, &answer["completed"]), (200, &json!(5)));
    assert!(answer.get("drained").is_none(), "nobody asked: {answer}");
    assert!(daemon.stop().await.success());
}

/// A completion is accepted before SQL has it, and with it what it discovered.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_is_not_drained_between_a_task_and_what_it_discovered() {
    let mut daemon = column::start(CONFIG, &[]).await;
    one(&daemon, json!({"queue": "a", "key": "0"})).await;
    one(&daemon, json!({"queue": "b", "key": "0"})).await;
    let first = daemon.lease_all("w", "b", 1).await;
    assert_eq!(daemon.complete("w", &first).await, ["OK"]);
    assert!(drained_within(&daemon, "b", "10m").await);
    for n in 1..=20 {
        // In another queue: only the report knows of the task at first.
        let task = daemon.lease_all("w", "a", 1).await.remove(0);
        discover(&daemon, &task, "b", &n.to_string()).await;
        assert!(!is_drained(&daemon, "b").await, "{n}");
        let task = daemon.lease_all("w", "b", 1).await.remove(0);
        discover(&daemon, &task, "a", &n.to_string()).await;
        assert!(!is_drained(&daemon, "a").await, "{n}");
        assert!(drained_within(&daemon, "b", "10m").await, "{n}");
        // In its own queue.
        let task = daemon.lease_all("w", "a", 1).await.remove(0);
        discover(&daemon, &task, "a", &format!("{n}-again")).await;
        assert!(!is_drained(&daemon, "a").await, "{n}");
    }
    let last = daemon.lease_all("w", "a", 1).await;
    assert_eq!(daemon.complete("w", &last).await, ["OK"]);
    assert!(drained_within(&daemon, "a", "10m").await);
    assert!(daemon.stop().await.success());
}
