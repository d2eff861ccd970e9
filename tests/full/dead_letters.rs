//! Dead letters while taskd is killed.

use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::support::{
    daemon::{Daemon, keys, once},
    until,
};

const TASKS: usize = 3000;

/// `taskd dead retry` goes on behind a kill, and every task is done once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_retry_goes_on_when_taskd_is_killed_in_the_middle() {
    let mut daemon = Daemon::start("[queues.default]\nmax_attempts = 1", &[]).await;
    let tasks: Vec<Value> = (0..TASKS)
        .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
        .collect();
    daemon.insert(&tasks).await;
    let leased = daemon.lease_all("w", "q", TASKS).await;
    for leased in leased.chunks(1000) {
        let rejection = |task: &Value| {
            let (id, token) = (&task["id"], &task["lease_token"]);
            json!({"id": id, "lease_token": token, "reason": "no", "retry": false})
        };
        let rejections: Vec<_> = leased.iter().map(rejection).collect();
        daemon
            .post(
                "/v1/tasks:reject",
                &json!({"worker": "w", "rejections": rejections}),
            )
            .await;
    }
    until("all are dead", async || {
        daemon.queue("q").await["dead"] == TASKS
    })
    .await;

    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let args = ["dead", "retry", "--queue", "q", "--yes", "--json"];
    let command = command
        .args(args)
        .env("TASKD_URL", daemon.http())
        .stdout(Stdio::piped());
    let retry = command.stderr(Stdio::inherit()).spawn().unwrap();
    // Between two of its calls, or in one.
    until("some are sent again", async || {
        daemon.queue("q").await["dead"]
            .as_u64()
            .is_some_and(|n| n < TASKS as u64)
    })
    .await;
    daemon.kill9_and_restart();
    daemon.ready().await;
    let output = tokio::task::spawn_blocking(|| retry.wait_with_output())
        .await
        .unwrap()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    // A call whose answer was lost is sent again and finds the rest only, so the count is a part of
    // all.
    assert!(output.status.success(), "{said}");
    let said: Value = serde_json::from_str(&said).unwrap();
    assert!(
        said["changed"].as_u64().unwrap() <= TASKS as u64 && said["failed"] == 0,
        "{said}"
    );

    let (_, letters) = daemon.get("/v1/dead-letters").await;
    assert_eq!(letters["letters"], json!([]));
    assert_eq!(once(daemon.drain("w", "q").await), keys(0, TASKS));
    let queue = daemon.queue("q").await;
    assert_eq!(
        (&queue["dead"], &queue["completed"]),
        (&json!(0), &json!(TASKS))
    );
    assert!(daemon.stop().await.success());
}
