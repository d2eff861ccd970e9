//! The deadline of a task, through the running binary.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use taskd::model::to_rfc_3339;

use super::{books::until_books, changes::report};
use crate::{
    column,
    support::{
        daemon::{Daemon, statuses},
        until,
    },
};

const CONFIG: &str = "partitions = 2\n[queues.default]\nbackoff = [\"1h\"]\nlease = \"10m\"\n[queues.full]\nhigh_water_tasks = 1\n";

/// Exit code, stdout and stderr of a command on the gRPC port. Its stdin has one line.
fn taskd(daemon: &Daemon, args: &[&str]) -> (i32, String) {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command
        .env_clear()
        .envs(own)
        .env("TASKD_URL", daemon.http())
        .args(args);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that takes none may have ended.
    drop(child.stdin.take().unwrap().write_all(b"soon\n"));
    let output = child.wait_with_output().unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap(),
    )
}

/// A task that SQL shows dead because its deadline passed.
async fn is_dead(daemon: &Daemon, id: &str) -> Value {
    let mut task = Value::Null;
    until("SQL shows the task dead", async || {
        task = daemon.get(&format!("/v1/tasks/{id}")).await.1;
        task["status"] == "DEAD" && task["reason"].is_string()
    })
    .await;
    let reason = task["reason"].as_str().unwrap();
    assert!(
        reason.starts_with("the deadline of 2") && reason.ends_with("Z passed"),
        "{task}"
    );
    task
}

/// A task of the queue; `None`: there was none by then.
async fn lease_by(daemon: &Daemon, queue: &str, by: Instant) -> Option<Value> {
    while Instant::now() < by {
        if let Some(task) = daemon.lease("w", queue, 1, "1s").await.pop() {
            return Some(task);
        }
    }
    None
}

/// Tasks in many places, by the names of their queues, whose ids are answered. `None`: the machine
/// was too slow, and deadlines passed meanwhile.
async fn everywhere(
    daemon: &Daemon,
    within: Duration,
) -> Option<Vec<(&'static str, String, Value)>> {
    // Up to half of the time, no deadline has passed.
    let by = Instant::now() + within / 2;
    let finish_within = humantime::format_duration(within).to_string();
    let task = |queue: &str, more: Value| {
        let mut task = json!({"queue": queue, "key": queue, "finish_within": finish_within});
        task.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        task
    };
    let queues = ["waits", "held", "failed", "twice", "done", "parent", "full"];
    let mut tasks: Vec<Value> = queues.iter().map(|queue| task(queue, json!({}))).collect();
    tasks[3]["replicas"] = json!(2);
    // The second one of a queue without room stays in SQL.
    tasks.push(json!({"queue": "full", "key": "parked", "finish_within": finish_within}));
    tasks[5].as_object_mut().unwrap().remove("finish_within");
    let ids = daemon.insert(&tasks).await;
    let mut leased = Vec::new();
    for queue in ["held", "failed", "twice", "done", "parent"] {
        leased.push(lease_by(daemon, queue, by).await?);
    }
    let rejected = report(daemon, "reject", "w", &leased[1]).await;
    let twice = report(daemon, "complete", "w", &leased[2]).await;
    let done = report(daemon, "complete", "w", &leased[3]).await;
    let completion = json!({
        "id": leased[4]["id"], "lease_token": leased[4]["lease_token"], "discovered": [task("child", json!({}))],
    });
    daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": [completion]}),
        )
        .await;
    let child = lease_by(daemon, "child", by).await?;
    let (_, explained) = daemon
        .get(&format!("/v1/tasks:explain?id={}", ids[1]))
        .await;
    if Instant::now() > by {
        return None;
    }
    assert_eq!([rejected, twice, done], ["OK", "OK", "OK"]);
    let deadline = explained["task"]["deadline"].as_str().unwrap();
    let note = format!("it is dead if it is not completed by {deadline}");
    assert!(
        explained["notes"]
            .as_array()
            .unwrap()
            .iter()
            .any(|said| said == &note),
        "{explained}"
    );
    let mut all: Vec<(&str, String, Value)> = [
        "waits", "held", "failed", "twice", "done", "parent", "full", "parked",
    ]
    .into_iter()
    .zip(ids)
    .map(|(name, id)| (name, id, Value::Null))
    .collect();
    all[1].2 = leased[0].clone();
    all.push(("child", child["id"].as_str().unwrap().to_owned(), child));
    Some(all)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_deadline_has_passed_is_not_given_out() {
    let daemon = column::start(CONFIG, &[]).await;
    let task =
        |n: usize| json!({"queue": "late", "key": format!("late {n}"), "finish_within": "300ms"});
    let mut ids = Vec::new();
    for n in 0..20 {
        ids.extend(daemon.insert(&[task(n)]).await);
        // The deadline counts from a moment before the answer.
        tokio::time::sleep(Duration::from_millis(330)).await;
        assert_eq!(
            daemon.lease("w", "late", 10, "0s").await,
            [Value::Null; 0],
            "{n}"
        );
    }
    // Those behind it are.
    let late: Vec<_> = (20..40).map(task).collect();
    ids.extend(daemon.insert(&late).await);
    let open = daemon
        .insert(&[json!({"queue": "late", "key": "open"})])
        .await;
    tokio::time::sleep(Duration::from_millis(330)).await;
    let leased = daemon.lease("w", "late", 1, "30s").await;
    assert_eq!(leased[0]["id"], open[0]);
    for id in &ids {
        let task = is_dead(&daemon, id).await;
        assert!(
            task["attempts"].as_u64().unwrap_or(0) == 0,
            "it was never given out: {task}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_is_dead_when_its_deadline_passes_wherever_it_is() {
    let mut found = None;
    for seconds in [4, 15, 45] {
        let daemon = column::start(CONFIG, &[]).await;
        if let Some(tasks) = everywhere(&daemon, Duration::from_secs(seconds)).await {
            found = Some((daemon, tasks));
            break;
        }
    }
    let (mut daemon, tasks) = found.expect("a machine that is fast enough");
    for (name, id, leased) in &tasks {
        if matches!(*name, "done" | "parent") {
            continue;
        }
        let task = is_dead(&daemon, id).await;
        assert_eq!(
            task["completed"],
            u64::from(*name == "twice"),
            "{name}: a completion before counts: {task}"
        );
        if !leased.is_null() {
            assert_eq!(
                report(&daemon, "extend", "w", leased).await,
                "LEASE_LOST",
                "{name}"
            );
            assert_eq!(
                report(&daemon, "complete", "w", leased).await,
                "LEASE_LOST",
                "{name}"
            );
        }
    }
    // Its deadline has passed, too.
    let (_, done) = daemon.get(&format!("/v1/tasks/{}", tasks[4].1)).await;
    assert_eq!(done["status"], "COMPLETED", "{done}");
    for queue in ["waits", "held", "failed", "twice", "full", "child"] {
        until_books(&daemon, queue, |books| {
            books["state"] == "BALANCED" && books["held"]["total"] == 0
        })
        .await;
        assert_eq!(
            daemon.lease("v", queue, 10, "0s").await,
            [Value::Null; 0],
            "{queue}"
        );
    }
    let (code, said) = taskd(&daemon, &["fsck"]);
    assert_eq!(code, 0, "{said}");
    // Each has one letter. Sent again, it has no deadline any more.
    let (_, letters) = daemon.get("/v1/dead-letters?queue=held").await;
    let [letter] = &letters["letters"].as_array().unwrap()[..] else {
        panic!("{letters}")
    };
    let (_, again) = daemon
        .post("/v1/dead-letters:retry", &json!({"ids": [letter["id"]]}))
        .await;
    assert_eq!(again["changed"], 1, "{again}");
    let leased = daemon.lease_all("w", "held", 1).await;
    let (_, task) = daemon.get(&format!("/v1/tasks/{}", tasks[1].1)).await;
    assert_eq!(
        (&task["status"], &task["deadline"]),
        (&json!("ASSIGNED"), &Value::Null),
        "{task}"
    );
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_is_given_in_every_way_and_a_wrong_one_is_named() {
    let mut daemon = column::start(CONFIG, &[]).await;
    let now = taskd::model::now_unix_ms();
    let in_an_hour = to_rfc_3339(now + 3_600_000);
    let ids = daemon
        .insert(&[json!({"queue": "q", "key": "a", "deadline": in_an_hour})])
        .await;
    let (_, task) = daemon.get(&format!("/v1/tasks/{}", ids[0])).await;
    assert_eq!(task["deadline"], in_an_hour);
    let (_, list) = daemon.get("/v1/tasks?queue=q").await;
    assert_eq!(list["tasks"][0]["deadline"], in_an_hour, "{list}");

    let both = json!({"deadline": in_an_hour, "finish_within": "1h"});
    let late = json!({"deadline": "2020-01-02T03:04:05Z"});
    let before = json!({"finish_within": "1h", "delay": "2h"});
    for (more, why) in [
        (both, "deadline and finish_within are both given; use one"),
        (
            late.clone(),
            "the deadline of 2020-01-02T03:04:05.000Z passed",
        ),
        (before, "is before the first attempt (delay or not_before)"),
        (
            json!({"finish_within": "0s"}),
            "finish_within is 0s; must be 1ms to 3650days",
        ),
    ] {
        let mut wrong = json!({"queue": "q", "key": "wrong"});
        wrong
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let (status, answer) = daemon.post("/v1/tasks", &wrong).await;
        let error = answer["results"][0]["error"].as_str().unwrap_or_default();
        assert!(
            status == 422 && error.contains(why),
            "{answer} should say {why:?}"
        );
    }
    // A completion with such a task counts, and the task is dead at once.
    let leased = daemon.lease_all("w", "q", 1).await.remove(0);
    let child = json!({"queue": "q", "key": "child", "deadline": late["deadline"]});
    let completion =
        json!({"id": leased["id"], "lease_token": leased["lease_token"], "discovered": [child]});
    let (_, answer) = daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": [completion]}),
        )
        .await;
    let one = &answer["results"][0];
    assert_eq!(
        (&one["status"], one.get("error")),
        (&json!("OK"), None),
        "{answer}"
    );

    let (code, said) = taskd(
        &daemon,
        &["insert", "--queue", "soon", "--finish-within", "1s"],
    );
    assert_eq!(code, 0, "{said}");
    let (code, said) = taskd(
        &daemon,
        &[
            "insert",
            "--queue",
            "late",
            "--deadline",
            "2020-01-02T03:04:05Z",
        ],
    );
    assert!(
        code == 2 && said.contains("the deadline of 2020-01-02T03:04:05.000Z passed"),
        "{code}: {said}"
    );
    let (code, said) = taskd(
        &daemon,
        &["insert", "--queue", "late", "--deadline", "tomorrow"],
    );
    assert!(
        code == 2 && said.contains("write 2030-01-31T12:00:00Z"),
        "{code}: {said}"
    );
    until_books(&daemon, "soon", |books| books["out"]["dead"] == 1).await;
    assert!(daemon.stop().await.success());
}

/// Many deadlines at once, and taskd is killed while it ends their tasks.
#[tokio::test(flavor = "multi_thread")]
async fn every_deadline_is_kept_when_taskd_is_killed_meanwhile() {
    for seconds in [5, 15, 45] {
        if every_deadline_is_kept(seconds).await {
            return;
        }
    }
    panic!("no kill came while deadlines passed");
}

/// Kills taskd behind a deadline in so many seconds; true if that met tasks that were not dead yet.
async fn every_deadline_is_kept(seconds: i64) -> bool {
    const TASKS: u64 = 3000;
    let mut created = 0;
    let mut daemon = column::start(CONFIG, &[]).await;
    let deadline = to_rfc_3339(taskd::model::now_unix_ms() + 1000 * seconds);
    for from in (0..TASKS).step_by(500) {
        let task = |n: u64| json!({"queue": format!("q{}", n % 3), "key": n.to_string(), "deadline": deadline});
        let (status, answer) = daemon
            .post("/v1/tasks", &(from..from + 500).map(task).collect())
            .await;
        // On a slow machine the last come too late.
        assert!(status == 200 || status == 422, "{answer}");
        created += statuses(&answer)
            .iter()
            .filter(|status| *status == "CREATED")
            .count() as u64;
    }
    daemon.lease("w", "q0", 100, "0s").await;
    let (mut dead, mut has_met_some) = (0, false);
    for kill in 1..=3 {
        let before = dead;
        until("some more are dead", async || {
            dead = 0;
            for n in 0..3 {
                dead += daemon.queue(&format!("q{n}")).await["dead"]
                    .as_u64()
                    .unwrap_or(0);
            }
            dead > before || dead == created
        })
        .await;
        eprintln!("{dead} of {created} are dead at kill {kill}");
        has_met_some |= dead < created;
        daemon.kill9_and_restart();
        daemon.ready().await;
    }
    let mut stored = 0;
    for n in 0..3 {
        let queue = format!("q{n}");
        let books = until_books(&daemon, &queue, |books| books["held"]["total"] == 0).await;
        assert_eq!(books["out"]["dead"], books["in"]["stored"], "{books}");
        stored += books["in"]["stored"].as_u64().unwrap();
        until_books(&daemon, &queue, |books| books["state"] == "BALANCED").await;
    }
    assert_eq!(stored, created);
    let (code, said) = taskd(&daemon, &["fsck"]);
    assert_eq!(code, 0, "{said}");
    assert!(daemon.stop().await.success());
    has_met_some
}
