//! Mistakes of callers, and the answers to them: by the running binary, over HTTP and on the
//! command line.

use std::{
    io::Write,
    process::{Command, Stdio},
};

use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::support::{
    daemon::{Daemon, statuses},
    until,
};

#[tokio::test]
async fn a_wrong_task_is_rejected_with_the_reason_and_the_others_are_taken() {
    let mut daemon = Daemon::start("max_payload_bytes = \"1KiB\"", &[]).await;
    let good = json!({"queue": "q", "key": "good"});
    let wrong = [
        (
            json!({"queue": "q", "key": "k", "colour": 1}),
            "unknown field `colour`",
        ),
        (json!({"queue": "q"}), "key and payload are both empty"),
        (
            json!({"queue": "q", "key": ""}),
            "key and payload are both empty",
        ),
        (
            json!({"queue": "q", "key": "k".repeat(5000)}),
            "key has 5000 bytes; at most",
        ),
        (
            json!({"queue": "q", "key": "k", "payload": "x".repeat(2000)}),
            "payload has 2000 bytes; at most 1024",
        ),
        (
            json!({"queue": "q", "key": "k", "replicas": 0}),
            "replicas is 0",
        ),
        (
            json!({"queue": "q", "key": "k", "replicas": 101}),
            "replicas is 101",
        ),
        (json!({"queue": "a b", "key": "k"}), "queue \"a b\""),
        (json!({"queue": "{q}", "key": "k"}), "queue \"{q}\""),
        (json!({"queue": "", "key": "k"}), "queue"),
        (json!([]), "expected"),
    ];
    let mut items: Vec<Value> = wrong.iter().map(|(item, _)| item.clone()).collect();
    items.push(good.clone());
    let (status, answer) = daemon.post("/v1/tasks", &json!(items)).await;
    assert_eq!(status, 200, "{answer}");
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.last().unwrap()["status"], "CREATED", "{answer}");
    for ((item, expected), result) in wrong.iter().zip(results) {
        let error = result["error"].as_str().unwrap_or_default();
        assert!(
            result["status"] == "REJECTED" && error.contains(expected),
            "{expected}: {result} for {item:.100}"
        );
    }

    let lines = format!(
        "{{\"queue\":\n{}\n\nnot json\n{good}\n",
        json!({"queue": "q", "key": "line"})
    );
    let (status, answer) = daemon
        .post_text("/v1/tasks", "application/x-ndjson", lines)
        .await;
    assert_eq!(status, 200, "{answer}");
    let statuses: Vec<_> = answer
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line["status"].as_str().unwrap())
        .collect();
    assert_eq!(
        statuses,
        ["REJECTED", "CREATED", "REJECTED", "DUPLICATE"],
        "{answer}"
    );
    assert_eq!(daemon.drain("w", "q").await.len(), 2);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_worker_is_told_what_is_wrong_with_its_lease() {
    let config = "[queues.q]\nlease = \"5s\"\nbackoff = [\"1ms\"]\n[queues.slow]\nlease = \"1m\"";
    let mut daemon = Daemon::start(config, &[]).await;
    for (request, detail) in [
        (json!({"queues": ["q"]}), "worker is missing: say who asks"),
        (
            json!({"queues": ["q"], "worker": ""}),
            "worker is missing: say who asks",
        ),
        (
            json!({"queues": [], "worker": "w"}),
            "queues is empty: name at least one",
        ),
        (json!({"queues": ["a b"], "worker": "w"}), "queue \"a b\""),
        (
            json!({"queues": ["q"], "worker": "w", "max_tasks": 1001}),
            "max_tasks is 1001; at most 1000",
        ),
    ] {
        let (status, answer) = daemon.post("/v1/tasks:get", &request).await;
        assert!(
            status == 400 && answer["detail"].as_str().unwrap().starts_with(detail),
            "{request}: {answer}"
        );
    }
    assert!(
        daemon
            .lease("w", "nobody-has-heard-of", 1, "1ms")
            .await
            .is_empty()
    );

    daemon
        .insert(&[
            json!({"queue": "slow", "key": "a"}),
            json!({"queue": "slow", "key": "b"}),
        ])
        .await;
    // One call has one token for all that it gets.
    let mut held = daemon.lease_all("w", "slow", 1).await;
    held.extend(daemon.lease_all("w", "slow", 1).await);
    // A token of another task, of nobody, and held by somebody else.
    let mut swapped = held.clone();
    let (first, second) = (
        held[0]["lease_token"].clone(),
        held[1]["lease_token"].clone(),
    );
    swapped[0]["lease_token"] = second;
    swapped[1]["lease_token"] = json!("no token");
    assert_eq!(
        daemon.complete("w", &swapped).await,
        ["LEASE_LOST", "INVALID"]
    );
    assert_eq!(
        daemon.complete("somebody else", &held).await,
        ["LEASE_LOST", "LEASE_LOST"]
    );
    let stranger = json!({"id": uuid::Uuid::now_v7(), "lease_token": first});
    assert_eq!(daemon.complete("w", &[stranger]).await, ["UNKNOWN_TASK"]);
    assert_eq!(daemon.complete("w", &held).await, ["OK", "OK"]);
    assert_eq!(
        daemon.complete("w", &held).await,
        ["OK", "OK"],
        "a repetition is answered as before"
    );

    daemon.insert(&[json!({"queue": "q", "key": "late"})]).await;
    let late = daemon.lease_all("w", "q", 1).await;
    let again = daemon.lease_all("w", "q", 1).await;
    assert_eq!(again[0]["attempt"], 2, "the lease ran out");
    assert_eq!(daemon.complete("w", &late).await, ["LEASE_LOST"]);
    let one = json!({"id": again[0]["id"], "lease_token": again[0]["lease_token"], "by": "1m"});
    let extension = json!({"worker": "w", "extensions": [one]});
    let (_, answer) = daemon.post("/v1/tasks:extend", &extension).await;
    assert_eq!(statuses(&answer), ["OK"], "{answer}");
    assert_eq!(daemon.complete("w", &again).await, ["OK"]);
    assert_eq!(
        daemon.complete("other", &again).await,
        ["ALREADY_COMPLETED"]
    );
    until("all is done", async || daemon.unfinished("q").await == 0).await;

    for line in [
        "taskd_discovery_in_tasks_total{source=\"api\"} 3",
        "taskd_discovery_created_tasks_total 3",
        "taskd_fanout_enqueued_tasks_total 3",
        "taskd_tasks_claimed_tasks_total{queue=\"slow\"} 2",
        "taskd_watchdog_handled_tasks_total{what=\"expired\"} 1",
        "taskd_results_forwarded_reports_total 3",
        "taskd_queue_depth_tasks{queue=\"q\",state=\"waiting\"} ",
        "taskd_queue_oldest_waiting_seconds{queue=\"q\"} ",
        "taskd_discovery_batch_duration_seconds_count ",
        "taskd_fanout_batch_size_records_count ",
        "taskd_fanout_oldest_seconds ",
        "taskd_bus_backlog_records{topic=\"pipeline\"} 0",
        "taskd_bus_backlog_records{topic=\"task-results\"} 0",
        "taskd_discovery_depth_tasks 0",
        "taskd_queue_depth_tasks{queue=\"q\",state=\"pending\"} 0",
        "taskd_results_depth_entries 0",
        "taskd_results_batch_duration_seconds_count ",
        "taskd_watchdog_step_duration_seconds_count{loop=\"leases\"} ",
    ] {
        until(line, async || {
            daemon
                .get("/metrics")
                .await
                .1
                .as_str()
                .unwrap()
                .contains(line)
        })
        .await;
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn queues_count_each_task_once() {
    let mut daemon = Daemon::start("[queues.q]\nreplicas = 2", &[]).await;
    daemon
        .insert(&["a", "b", "c"].map(|key| json!({"queue": "q", "key": key})))
        .await;
    daemon
        .insert(&[json!({"queue": "q", "key": "later", "delay": "5m"})])
        .await;
    let counts = async || {
        let queue = daemon.queue("q").await;
        [
            "pending",
            "waiting",
            "assigned",
            "delayed",
            "leases",
            "completed",
        ]
        .map(|name| queue[name].as_u64().unwrap())
    };
    until("all are in Redis", async || {
        counts().await == [0, 3, 0, 1, 0, 0]
    })
    .await;
    let first = daemon.lease_all("w1", "q", 2).await;
    assert_eq!(
        counts().await,
        [0, 3, 0, 1, 2, 0],
        "the first two have one replica left"
    );
    let second = daemon.lease_all("w2", "q", 2).await;
    assert_eq!(counts().await, [0, 1, 2, 1, 4, 0]);
    let one =
        json!({"id": second[0]["id"], "lease_token": second[0]["lease_token"], "delay": "5m"});
    let back = json!({"worker": "w2", "rejections": [one]});
    assert_eq!(
        statuses(&daemon.post("/v1/tasks:reject", &back).await.1),
        ["OK"]
    );
    assert_eq!(counts().await, [0, 1, 1, 2, 3, 0]);
    daemon.complete("w1", &first).await;
    daemon.complete("w2", &second[1..]).await;
    until("one is completed", async || {
        counts().await == [0, 1, 0, 2, 0, 1]
    })
    .await;
    let (_, task) = daemon
        .get(&format!("/v1/tasks/{}", second[1]["id"].as_str().unwrap()))
        .await;
    assert_eq!(
        (&task["status"], &task["attempts"]),
        (&"COMPLETED".into(), &0.into()),
        "{task}"
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_client_that_stops_reading_holds_up_nobody_and_its_tasks_come_back() {
    let mut daemon = Daemon::start("[queues.q]\nlease = \"2s\"\nbackoff = [\"1ms\"]", &[]).await;
    // More than the buffers of a connection hold.
    let payload = "x".repeat(900 << 10);
    let task = |n: usize| json!({"queue": "q", "key": format!("key-{n}"), "payload": payload});
    daemon.insert(&(0..12).map(task).collect::<Vec<_>>()).await;
    until("all wait", async || {
        daemon.queue("q").await["waiting"] == 12
    })
    .await;

    let body = json!({"worker": "deaf", "queues": ["q"], "max_tasks": 12, "max_bytes": 16 << 20})
        .to_string();
    let mut deaf = TcpStream::connect(daemon.http().trim_start_matches("http://"))
        .await
        .unwrap();
    let head = format!(
        "POST /v1/tasks:get HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}",
        body.len()
    );
    deaf.write_all(format!("{head}\r\n\r\n{body}").as_bytes())
        .await
        .unwrap();
    until("it has leases", async || {
        daemon.queue("q").await["assigned"] == 12
    })
    .await;

    assert_eq!(daemon.drain("w", "q").await.len(), 12);
    drop(deaf);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn insert_takes_files_and_pipes_and_reports_wrong_lines() {
    let mut daemon = Daemon::start("", &[]).await;
    let insert = |args: &[&str], stdin: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        command
            .arg("insert")
            .args(["--server", &daemon.http()])
            .args(args);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(stdin.as_bytes())
            .unwrap();
        let output = child.wait_with_output().unwrap();
        let summary = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        (
            output.status.code().unwrap(),
            summary,
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    let urls: String = (0..2500).map(|n| format!("http://site/{n}\n")).collect();
    std::fs::write(file.path(), &urls).unwrap();
    let path = file.path().to_str().unwrap();

    let (code, summary, said) = insert(&["--queue", "q", "--json", path], "");
    assert_eq!(
        (code, &summary["lines"], &summary["created"]),
        (0, &2500.into(), &2500.into()),
        "{summary} {said}"
    );
    let (code, summary, said) = insert(&["--queue", "q", "--json", "-"], &urls);
    assert_eq!(
        (code, &summary["created"], &summary["duplicate"]),
        (0, &0.into(), &2500.into()),
        "{summary} {said}"
    );
    let lines = "{\"queue\":\"r\",\"key\":\"a\"}\n{\"key\":}\n{\"queue\":\"r\",\"key\":\"b\",\"replicas\":0}\n";
    let (code, summary, said) = insert(&["--json"], lines);
    assert_eq!(
        (code, &summary["created"], &summary["rejected"]),
        (1, &1.into(), &2.into()),
        "{summary} {said}"
    );
    assert!(said.contains("line 2") && said.contains("line 3"), "{said}");
    let (code, _, said) = insert(&["--queue", "q", "/no/such/file"], "");
    assert_eq!(code, 2);
    assert!(
        said.starts_with("taskd: ") && said.contains("/no/such/file"),
        "{said}"
    );
    assert!(daemon.stop().await.success());
}
