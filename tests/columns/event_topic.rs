//! Topic `events` of a running taskd.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
};

use serde_json::{Value, json};
use taskd::model::{
    EventRecord,
    TaskStatus::{self, Cancelled, Completed, Dead, Delayed, Pending},
};

use crate::{
    column,
    support::{
        daemon::Daemon,
        event_topic::{events, in_order, statuses},
        until,
    },
};

const ON: &str = "[queues.q]\nevents = true\nbackoff = [\"10ms\"]";

/// Waits until the topic has these statuses of these keys, and no others.
async fn until_topic_has(daemon: &Daemon, expected: &BTreeMap<String, Vec<TaskStatus>>) {
    let mut found = BTreeMap::new();
    until("the topic has all events", async || {
        found = statuses(daemon).await;
        found == *expected
    })
    .await;
}

fn of<const N: usize>(statuses: [(&str, &[TaskStatus]); N]) -> BTreeMap<String, Vec<TaskStatus>> {
    statuses
        .into_iter()
        .map(|(key, statuses)| (key.to_owned(), statuses.to_vec()))
        .collect()
}

async fn complete_all(daemon: &Daemon, count: usize) {
    let leased = daemon.lease_all("w", "q", count).await;
    assert!(
        daemon
            .complete("w", &leased)
            .await
            .iter()
            .all(|status| status == "OK")
    );
}

#[tokio::test]
async fn each_change_that_sql_has_is_on_the_topic_in_order() {
    let daemon = column::start(ON, &[]).await;
    let task = |key: &str| json!({"queue": "q", "key": key});
    let ids = daemon
        .insert(&[task("finds"), json!({"queue": "silent", "key": "silent"})])
        .await;
    let leased = daemon.lease_all("w", "q", 1).await;
    let found = json!([task("found"), task("finds")]);
    let completion = json!({"id": ids[0], "lease_token": leased[0]["lease_token"], "result": 1, "discovered": found});
    let (_, answer) = daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": [completion]}),
        )
        .await;
    assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
    let leased = daemon.lease_all("w", "q", 1).await;
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);

    let dies = daemon.insert(&[task("dies")]).await.remove(0);
    let leased = daemon.lease_all("w", "q", 1).await;
    let no = json!({"id": dies, "lease_token": leased[0]["lease_token"], "retry": false, "reason": "no luck"});
    daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": "w", "rejections": [no]}),
        )
        .await;
    let later = daemon
        .insert(&[json!({"queue": "q", "key": "later", "delay": "1h"})])
        .await
        .remove(0);
    let (_, cancelled) = daemon
        .post("/v1/tasks:cancel", &json!({"ids": [later]}))
        .await;
    assert_eq!(cancelled["results"][0]["status"], "OK", "{cancelled}");
    let mut expected = of([
        ("finds", &[Pending, Completed]),
        ("found", &[Pending, Completed]),
        ("dies", &[Pending, Dead]),
        ("later", &[Delayed, Cancelled]),
    ]);
    until_topic_has(&daemon, &expected).await;
    let event = |events: &[(u64, EventRecord)], key: &str, status| {
        let found = events
            .iter()
            .find(|(_, event)| event.key == key && event.status == status);
        found.map(|(_, event)| event.clone()).unwrap()
    };
    let all = events(&daemon).await;
    let completed = event(&all, "finds", Completed);
    assert_eq!(
        (
            completed.id.to_string(),
            &completed.worker[..],
            completed.attempt
        ),
        (ids[0].clone(), "w", 1)
    );
    let dead = event(&all, "dies", Dead);
    assert!(
        dead.reason.contains("no luck") && dead.epoch == 0 && dead.at_unix_ms > 0,
        "{dead:?}"
    );

    // Sent again, in the next epoch.
    let (status, answer) = daemon
        .post("/v1/tasks:retry", &json!({"ids": [dies]}))
        .await;
    assert_eq!(status, 200, "{answer}");
    complete_all(&daemon, 1).await;
    expected.insert("dies".into(), vec![Pending, Dead, Pending, Completed]);
    until_topic_has(&daemon, &expected).await;
    assert_eq!(event(&events(&daemon).await, "dies", Completed).epoch, 1);
}

fn tasks(count: usize) -> Vec<Value> {
    (0..count)
        .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
        .collect()
}

fn all_completed(count: usize) -> BTreeMap<String, Vec<TaskStatus>> {
    (0..count)
        .map(|n| (format!("key-{n}"), vec![Pending, Completed]))
        .collect()
}

#[tokio::test]
async fn ends_that_sql_has_reach_the_topic_after_a_kill() {
    // Nobody publishes events without the watchdog.
    let mut daemon = column::start(ON, &["--pipelines", "discovery,fanout,tasks"]).await;
    daemon.insert(&tasks(20)).await;
    complete_all(&daemon, 20).await;
    until("SQL has the ends", async || {
        daemon.unfinished("q").await == 0
    })
    .await;
    assert!(events(&daemon).await.is_empty());
    daemon.kill9();
    let daemon = Daemon::start_in_the_folder_of(daemon, &["--pipelines", "all"]).await;
    until_topic_has(&daemon, &all_completed(20)).await;
}

#[tokio::test]
async fn no_end_is_missing_however_often_taskd_is_killed() {
    const TASKS: usize = 120;
    let mut daemon = column::start(ON, &[]).await;
    daemon.insert(&tasks(TASKS)).await;
    let mut done = 0;
    while done < TASKS {
        let mut leased = Vec::new();
        until("there are more tasks", async || {
            leased = daemon.lease("w", "q", 40, "5s").await;
            !leased.is_empty()
        })
        .await;
        done += leased.len();
        assert!(
            daemon
                .complete("w", &leased)
                .await
                .iter()
                .all(|status| status == "OK")
        );
        // Between the answer and the topic.
        daemon.kill9_and_restart();
        daemon.ready().await;
    }
    until_topic_has(&daemon, &all_completed(TASKS)).await;
    let all = events(&daemon).await;
    assert_eq!(in_order(&all).len(), TASKS);
    assert!(all.len() >= 2 * TASKS);
}

/// `taskd events` with the settings of this daemon.
fn printed(daemon: &Daemon, args: &[&str]) -> (i32, Vec<Value>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command.arg("events").args(args);
    command.arg("--data-dir").arg(daemon.data());
    for name in [
        "--redis-url",
        "--redis-prefix",
        "--bus-url",
        "--topic-prefix",
    ] {
        if let Some(value) = daemon.arg(name) {
            command.args([name, value]);
        }
    }
    let output = command.output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let lines = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let stderr = String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), lines, stderr)
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_printed_as_lines_of_json_from_an_offset_on() {
    let daemon = column::start(ON, &[]).await;
    let task = |key: &str| json!({"queue": "q", "key": key});
    let ids = daemon.insert(&[task("a"), task("b")]).await;
    complete_all(&daemon, 2).await;
    let whole: &[TaskStatus] = &[Pending, Completed];
    until_topic_has(&daemon, &of([("a", whole), ("b", whole)])).await;

    let (code, lines, stderr) = printed(&daemon, &[]);
    assert_eq!((code, &stderr[..]), (0, ""));
    let topic = events(&daemon).await;
    let expected: Vec<Value> = topic
        .iter()
        .map(|(number, event)| {
            let key = String::from_utf8_lossy(&event.key);
            json!([number, event.id, "q", key, event.status.as_str()])
        })
        .collect();
    let shown: Vec<Value> = lines
        .iter()
        .map(|line| {
            json!([
                line["number"],
                line["id"],
                line["queue"],
                line["key"],
                line["status"]
            ])
        })
        .collect();
    assert_eq!(shown, expected);
    assert!(
        ids.iter()
            .all(|id| lines.iter().any(|line| line["id"] == id.as_str()))
    );

    // After each line come those behind it.
    for (place, line) in lines.iter().enumerate() {
        let from = line["offset"].as_str().unwrap();
        let (code, rest, stderr) = printed(&daemon, &["--from", from]);
        assert_eq!((code, &rest[..], &stderr[..]), (0, &lines[place + 1..], ""));
    }
    assert_eq!(printed(&daemon, &["--from", "now"]).1, [] as [Value; 0]);
    let (code, rest, stderr) = printed(&daemon, &["--from", "7:1"]);
    assert_eq!((code, rest.len()), (2, 0));
    assert!(stderr.contains("there is no partition 7"), "{stderr}");
    // Beyond the end, as after a restore.
    let beyond = "99999999999999-0";
    let (code, rest, stderr) = printed(&daemon, &["--from", beyond]);
    assert_eq!((code, rest.len()), (2, 0));
    assert!(
        stderr.starts_with(&format!(
            "taskd: offset {beyond} is gone: partition 0 has the events "
        )) && stderr.ends_with("; --from beginning prints these\n")
            && stderr.lines().count() == 1,
        "{stderr}"
    );

    // What comes later, and no longer than somebody reads.
    let data = daemon.data();
    let mut follow = Command::new(env!("CARGO_BIN_EXE_taskd"));
    follow.args(["events", "--from", "now", "--follow", "--data-dir"]);
    follow.arg(data).stdout(Stdio::piped());
    for name in [
        "--redis-url",
        "--redis-prefix",
        "--bus-url",
        "--topic-prefix",
    ] {
        if let Some(value) = daemon.arg(name) {
            follow.args([name, value]);
        }
    }
    let mut follow = follow.spawn().unwrap();
    let mut reader = BufReader::new(follow.stdout.take().unwrap());
    let first = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        serde_json::from_str::<Value>(&line).unwrap()
    });
    let mut later = 0;
    until("the follower prints an event", async || {
        later += 1;
        daemon.insert(&[task(&format!("later-{later}"))]).await;
        first.is_finished()
    })
    .await;
    let first = first.await.unwrap();
    assert!(
        first["key"].as_str().unwrap().starts_with("later-"),
        "{first}"
    );
    follow.kill().unwrap();
    follow.wait().unwrap();
}

/// taskd trims its topics on Redis Streams.
#[tokio::test(flavor = "multi_thread")]
async fn an_offset_that_is_gone_is_named() {
    let daemon = column::start(ON, &[]).await;
    if daemon.arg("--bus-url").is_some() {
        return;
    }
    let task = |key: &str| json!({"queue": "q", "key": key});
    daemon.insert(&[task("a"), task("b"), task("c")]).await;
    let whole: &[TaskStatus] = &[Pending];
    until_topic_has(&daemon, &of([("a", whole), ("b", whole), ("c", whole)])).await;
    let (_, lines, _) = printed(&daemon, &[]);
    let mut redis = match daemon.arg("--redis-url") {
        Some(url) => crate::support::redis::patient(url).await,
        None => daemon.redis().await,
    };
    let prefix = daemon.arg("--redis-prefix").unwrap_or("taskd");
    let trimmed: u64 = redis::cmd("XTRIM")
        .arg(format!("{prefix}:{{bus}}:events:0"))
        .arg("MAXLEN")
        .arg(1)
        .query_async(&mut redis)
        .await
        .unwrap();
    assert_eq!(trimmed, 2);
    let (code, rest, stderr) = printed(&daemon, &["--from", lines[0]["offset"].as_str().unwrap()]);
    assert_eq!((code, rest.len()), (2, 0));
    assert!(
        stderr.contains(" is gone: partition 0 has the events "),
        "{stderr}"
    );
    assert_eq!(printed(&daemon, &[]).1, lines[2..]);
}
