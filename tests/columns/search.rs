//! Lists of tasks of a running taskd, over HTTP and gRPC and by `taskd tasks`.

use std::process::Command;

use serde_json::{Value, json};
use taskd::wire::pb::{self, discovery_client::DiscoveryClient};

use crate::{
    column,
    support::{daemon::Daemon, until},
};

async fn list(daemon: &Daemon, query: &str) -> Value {
    let (status, answer) = daemon.get(&format!("/v1/tasks?{query}")).await;
    assert_eq!(status, 200, "{query}: {answer}");
    answer
}

/// The keys of a list, in its order.
async fn keys(daemon: &Daemon, query: &str) -> Vec<String> {
    let answer = list(daemon, query).await;
    let tasks = answer["tasks"].as_array().unwrap().iter();
    tasks
        .map(|task| task["key"].as_str().unwrap().to_owned())
        .collect()
}

/// Waits until a list has these keys.
async fn until_listed(daemon: &Daemon, query: &str, expected: &[&str]) {
    until(&format!("{query} lists {expected:?}"), async || {
        keys(daemon, query).await == expected
    })
    .await;
}

/// Exit code, stdout, stderr of `taskd tasks`.
fn tasks(daemon: &Daemon, args: &[&str]) -> (i32, String, String) {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command
        .env_clear()
        .envs(own)
        .env("TASKD_URL", daemon.http())
        .arg("tasks")
        .args(args);
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_are_listed_with_the_status_that_they_have_now() {
    let mut daemon =
        column::start("[queues.default]\nlease = \"10m\"\nmax_attempts = 1", &[]).await;
    // One after the other: the newest comes first.
    for (key, more) in [
        ("done", json!({"headers": {"site": "a"}})),
        ("dead", json!({"headers": {"site": "b"}})),
        ("leased", json!({})),
        ("later", json!({"delay": "1h"})),
        ("waiting", json!({"headers": {"site": "a", "depth": "2"}})),
    ] {
        let mut task = json!({"queue": "q", "key": key, "payload": {"secret": key}});
        task.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        daemon.insert(&[task]).await;
        match key {
            "done" => assert_eq!(daemon.work("w1", "q", 1).await, ["done"]),
            "dead" => {
                let leased = daemon.lease_all("w2", "q", 1).await.remove(0);
                let rejection = json!({"id": leased["id"], "lease_token": leased["lease_token"], "reason": "no luck"});
                daemon
                    .post(
                        "/v1/tasks:reject",
                        &json!({"worker": "w2", "rejections": [rejection]}),
                    )
                    .await;
            }
            "leased" => drop(daemon.lease_all("w3", "q", 1).await),
            _ => {}
        }
    }
    daemon
        .insert(&[json!({"queue": "r", "key": "other"})])
        .await;

    for (query, expected) in [
        ("queue=q&status=COMPLETED", &["done"][..]),
        ("queue=q&status=dead", &["dead"]),
        ("queue=q&status=ASSIGNED", &["leased"]),
        ("queue=q&status=delayed", &["later"]),
        ("queue=q&status=queued", &["waiting"]),
        ("queue=q&status=queued,dead", &["waiting", "dead"]),
        ("queue=q&status=pending", &[]),
        ("queue=q&status=unfinished", &["waiting", "later", "leased"]),
        ("queue=q", &["waiting", "later", "leased", "dead", "done"]),
        ("", &["other", "waiting", "later", "leased", "dead", "done"]),
        ("queue=q&header.site=a", &["waiting", "done"]),
        ("queue=q&header.site=a&header.depth=2", &["waiting"]),
        ("queue=q&key_prefix=l", &["later", "leased"]),
        ("queue=q&key=dead", &["dead"]),
        ("key=dead", &["dead"]),
        ("key=dead&until=2020-01-01T00:00:00Z", &[]),
        ("key=nowhere", &[]),
        ("worker=w1", &["done"]),
        ("worker=w2", &[]),
        ("until=2020-01-01T00:00:00Z", &[]),
        ("since=2020-01-01T00:00:00Z&queue=r", &["other"]),
    ] {
        until_listed(&daemon, query, expected).await;
    }
    let answer = list(&daemon, "queue=q&status=dead").await;
    let dead = &answer["tasks"][0];
    assert_eq!(
        (&dead["status"], &dead["reason"], &dead["attempts"]),
        (&json!("DEAD"), &json!("no luck"), &json!(1))
    );
    assert!(dead.get("payload").is_none(), "{dead}");
    let (_, mut alone) = daemon
        .get(&format!("/v1/tasks/{}", dead["id"].as_str().unwrap()))
        .await;
    alone
        .as_object_mut()
        .unwrap()
        .retain(|field, _| dead.get(field).is_some());
    assert_eq!(
        *dead, alone,
        "a list shows of a task what is shown of it alone"
    );

    // Pages by the cursor; also of a status that only Redis knows.
    for (query, count) in [
        ("queue=q", 5),
        ("", 6),
        ("queue=q&status=queued,delayed,assigned", 3),
    ] {
        let (mut cursor, mut seen) = (String::new(), Vec::new());
        loop {
            let page = list(&daemon, &format!("{query}&limit=1&cursor={cursor}")).await;
            seen.extend(
                page["tasks"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|task| task["key"].to_string()),
            );
            match page["cursor"].as_str() {
                Some(next) => next.clone_into(&mut cursor),
                None => break,
            }
        }
        assert_eq!(seen.len(), count, "{query}: {seen:?}");
        assert_eq!(crate::support::daemon::once(seen).len(), count);
    }

    // gRPC has the same.
    let mut grpc = DiscoveryClient::connect(daemon.grpc()).await.unwrap();
    let filter = pb::TaskFilter {
        queue: "q".into(),
        statuses: vec![pb::TaskStatus::Queued.into(), pb::TaskStatus::Dead.into()],
        ..Default::default()
    };
    let request = pb::ListTasksRequest {
        filter: Some(filter),
        ..Default::default()
    };
    let page = grpc.list_tasks(request).await.unwrap().into_inner();
    assert_eq!(
        page.tasks
            .iter()
            .map(|task| &task.key[..])
            .collect::<Vec<_>>(),
        [b"waiting".as_slice(), b"dead"]
    );
    assert_eq!((page.looked_at >= 2, &page.cursor[..]), (true, ""));

    let (code, table, _) = tasks(&daemon, &["--queue", "q", "--status", "dead,completed"]);
    assert_eq!((code, table.lines().count()), (0, 3), "{table}");
    assert!(
        table.contains("no luck") && table.contains("1 of 1"),
        "{table}"
    );
    let (_, lines, _) = tasks(
        &daemon,
        &[
            "--queue", "q", "--header", "site=a", "--json", "--since", "1h",
        ],
    );
    let lines: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        (lines.len(), &lines[1]),
        (2, &list(&daemon, "queue=q&key=done").await["tasks"][0])
    );
    let (_, lines, stderr) = tasks(&daemon, &["--queue", "q", "--json", "--limit", "1"]);
    let more = "1 shown, and there may be more; --limit N shows N\n";
    assert_eq!((lines.lines().count(), stderr.as_str()), (1, more));
    let (_, lines, stderr) = tasks(
        &daemon,
        &[
            "--queue",
            "q",
            "--json",
            "--status",
            "dead,completed",
            "--limit",
            "2",
        ],
    );
    assert_eq!(
        (lines.lines().count(), stderr.as_str()),
        (2, ""),
        "these are all"
    );
    let (_, none, _) = tasks(&daemon, &["--json", "--until", "1h"]);
    assert_eq!(none, "");
    for (args, why) in [
        (&["--status", "dead"][..], "--status needs a queue"),
        (
            &["--queue", "q", "--status", "gone"],
            "unknown status \"gone\"; expected PENDING",
        ),
        (&["--queue", "q", "--header", "site"], "write NAME=VALUE"),
        (&["--queue", "a b"], "contains ' '"),
        (&["cancel", "--yes"], "QUEUE --key-prefix TEXT"),
        (&["retry", "--yes"], "QUEUE --status dead"),
    ] {
        let (code, said, stderr) = tasks(&daemon, args);
        assert_eq!(
            (code, said.as_str(), stderr.lines().count()),
            (2, "", 1),
            "{args:?}: {stderr}"
        );
        assert!(stderr.contains(why), "{stderr:?} should say {why:?}");
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_filter_without_an_index_is_one_line() {
    let mut daemon = column::start("", &[]).await;
    for (query, why) in [
        ("status=dead", "a filter by status needs a queue"),
        ("key=k&status=dead", "a filter by status needs a queue"),
        ("key=k&worker=w", "takes no worker"),
        ("key_prefix=k", "a filter by key_prefix needs a queue"),
        ("header.h=v", "a filter by header needs a queue"),
        ("queue=q&limit=1001", "limit is 1001; must be 1 to 1000"),
        (
            "queue=q&cursor=x",
            "the cursor is not one of an earlier answer",
        ),
        ("queue=q&key=k&worker=w", "key and worker are both given"),
        (
            "queu=q",
            "unknown parameter \"queu\"; expected one of queue, status, key",
        ),
    ] {
        let (status, problem) = daemon.get(&format!("/v1/tasks?{query}")).await;
        assert_eq!(status, 400, "{query}: {problem}");
        assert!(
            problem["detail"].as_str().unwrap().contains(why),
            "{problem} should say {why:?}"
        );
    }
    assert!(daemon.stop().await.success());
}
