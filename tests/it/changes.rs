//! Changes of live work in a running taskd: tasks are cancelled, whatever happens to them, and whatever is killed.

use std::process::Command;

use redis::AsyncCommands as _;
use serde_json::{Value, json};

use crate::support::{
    daemon::{Daemon, statuses},
    until,
};

/// Exit code, stdout, stderr of a command on the gRPC port.
fn taskd(daemon: &Daemon, args: &[&str]) -> (i32, String, String) {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let output = command.env_clear().envs(own).env("TASKD_GRPC_URL", daemon.grpc()).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

async fn status_of(daemon: &Daemon, id: &str) -> String {
    let (_, task) = daemon.get(&format!("/v1/tasks/{id}")).await;
    task["status"].as_str().unwrap_or_default().to_owned()
}

async fn becomes(daemon: &Daemon, id: &str, status: &str) {
    until(&format!("the task is {status}"), async || status_of(daemon, id).await == status).await;
}

/// The answers to a call that changes tasks.
async fn change(daemon: &Daemon, what: &str, body: Value) -> Vec<String> {
    let (status, answer) = daemon.post(&format!("/v1/tasks:{what}"), &body).await;
    assert_eq!(status, 200, "{answer}");
    statuses(&answer)
}

async fn cancel(daemon: &Daemon, ids: &[&str]) -> Vec<String> {
    change(daemon, "cancel", json!({ "ids": ids })).await
}

async fn insert_one(daemon: &Daemon, task: Value) -> String {
    daemon.insert(&[task]).await.remove(0)
}

/// A worker's report about a task that it has leased.
async fn report(daemon: &Daemon, what: &str, worker: &str, leased: &Value) -> String {
    let (list, mut item) = match what {
        "complete" => ("completions", json!({"result": "r"})),
        "reject" => ("rejections", json!({"reason": "no"})),
        _ => ("extensions", json!({"by": "1m"})),
    };
    item["id"] = leased["id"].clone();
    item["lease_token"] = leased["lease_token"].clone();
    change(daemon, what, json!({"worker": worker, list: [item]})).await.remove(0)
}

#[tokio::test]
async fn tasks_are_cancelled_wherever_they_are() {
    let daemon = Daemon::start("", &[]).await;
    let waiting = insert_one(&daemon, json!({"queue": "q", "key": "waiting"})).await;
    let later = insert_one(&daemon, json!({"queue": "new", "key": "later", "delay": "30days"})).await;
    let soon = insert_one(&daemon, json!({"queue": "q", "key": "soon", "delay": "1h"})).await;
    let held = insert_one(&daemon, json!({"queue": "held", "key": "held"})).await;
    let leased = daemon.lease_all("w", "held", 1).await.remove(0);
    let done = insert_one(&daemon, json!({"queue": "done", "key": "done"})).await;
    let completed = daemon.lease_all("w", "done", 1).await;
    assert_eq!(daemon.complete("w", &completed).await, ["OK"]);
    becomes(&daemon, &waiting, "QUEUED").await;

    let unknown = "0190a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44";
    let ids = [&waiting, &later, "x", &soon, &held, &done, unknown, &waiting];
    let expected = ["OK", "OK", "INVALID", "OK", "OK", "ALREADY_COMPLETED", "UNKNOWN_TASK", "OK"];
    assert_eq!(cancel(&daemon, &ids).await, expected);
    for id in [&waiting, &later, &soon, &held] {
        assert_eq!(status_of(&daemon, id).await, "CANCELLED");
    }
    // The same again changes nothing; nobody gets them; who holds one is told.
    assert_eq!(cancel(&daemon, &[&waiting, &held]).await, ["OK", "OK"]);
    for what in ["extend", "reject", "complete"] {
        assert_eq!(report(&daemon, what, "w", &leased).await, "CANCELLED", "{what}");
    }
    assert!(daemon.lease("w", "q", 10, "0s").await.is_empty());
    for queue in ["q", "new", "held"] {
        until("no task of the queue is unfinished", async || daemon.unfinished(queue).await == 0).await;
        assert!(daemon.queue(queue).await["cancelled"].as_u64().unwrap() >= 1);
    }
    let (_, said) = daemon.get(&format!("/v1/tasks:explain?id={held}&worker=w")).await;
    assert_eq!((&said["place"], &said["worker"]["reason"]), (&json!("FINISHED"), &json!("FINISHED")));

    // Its key is a duplicate, which says why.
    let (_, again) = daemon.post("/v1/tasks", &json!({"queue": "q", "key": "waiting"})).await;
    let again = &again["results"][0];
    assert_eq!((&again["status"], &again["id"]), (&json!("DUPLICATE"), &json!(waiting)));
    assert!(again["error"].as_str().unwrap().contains("CANCELLED"), "{again}");
    let (_, acts) = daemon.get("/v1/acts").await;
    let of = |id: &str| acts["acts"].as_array().unwrap().iter().filter(|act| act["on"] == id).count();
    assert_eq!([&waiting, &later, &soon, &held].map(|id| of(id)), [1; 4], "{acts}");
}

#[tokio::test]
async fn one_task_is_deleted_by_its_path() {
    let daemon = Daemon::start("", &[]).await;
    let id = insert_one(&daemon, json!({"queue": "q", "key": "k"})).await;
    let delete = async |id: &str| {
        let request = reqwest::Client::new().delete(format!("{}/v1/tasks/{id}", daemon.http()));
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.json::<Value>().await.unwrap())
    };
    assert_eq!(delete(&id).await, (200, json!({"id": id, "status": "OK"})));
    assert_eq!(delete(&id).await.0, 200);
    let other = insert_one(&daemon, json!({"queue": "q", "key": "other"})).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    let (status, problem) = delete(&other).await;
    assert_eq!((status, problem["status"].as_u64()), (409, Some(409)), "{problem}");
    assert_eq!(delete("0190a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44").await.0, 404);
    assert_eq!(delete("x").await.0, 400);
}

#[tokio::test]
async fn a_cancelled_task_of_several_keeps_its_credits_and_is_sent_again() {
    let daemon = Daemon::start("", &[]).await;
    let id = insert_one(&daemon, json!({"queue": "q", "key": "k", "replicas": 3})).await;
    let first = daemon.lease_all("a", "q", 1).await;
    let second = daemon.lease_all("b", "q", 1).await;
    assert_eq!(daemon.complete("a", &first).await, ["OK"]);
    assert_eq!(cancel(&daemon, &[&id]).await, ["OK"]);
    assert_eq!(daemon.complete("b", &second).await, ["CANCELLED"]);
    // The answer to a worker that was credited before stays.
    assert_eq!(daemon.complete("a", &first).await, ["OK"]);
    assert_eq!(status_of(&daemon, &id).await, "CANCELLED");
}

#[tokio::test]
async fn the_command_cancels_by_ids_and_by_keys() {
    let daemon = Daemon::start("", &[]).await;
    let first = insert_one(&daemon, json!({"queue": "q", "key": "a"})).await;
    let second = insert_one(&daemon, json!({"queue": "q", "key": "b c"})).await;
    let (code, stdout, stderr) = taskd(&daemon, &["cancel", &first]);
    assert_eq!((code, &stdout[..]), (0, "1 of 1 tasks cancelled\n"), "{stderr}");
    let (code, stdout, stderr) = taskd(&daemon, &["cancel", "--queue", "q", "--key", "b c", "--json"]);
    assert_eq!(code, 0, "{stderr}");
    let said: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(said, json!({"id": second, "status": "OK", "error": ""}));
    let (code, stdout, stderr) = taskd(&daemon, &["cancel", &first, "nothing"]);
    assert_eq!((code, &stdout[..]), (1, "1 of 2 tasks cancelled\n"));
    assert!(stderr.contains("\"nothing\" is not a task id"), "{stderr}");
    for (args, why) in [
        (&["cancel"][..], "required arguments were not provided"),
        (&["cancel", "--queue", "q"], "--key"),
        (&["cancel", "--queue", "q", "--key", "none"], "has, and had, no task with the key \"none\""),
    ] {
        let (code, _, stderr) = taskd(&daemon, args);
        assert!(code == 2 && stderr.lines().count() == 1 && stderr.contains(why), "{code}: {stderr}");
    }
}

/// Stores wishes as a process does that is killed before it asks the queue.
fn store_wishes(daemon: &Daemon, ids: &[String]) {
    let db = rusqlite::Connection::open(daemon.data().join("taskd.db")).unwrap();
    db.busy_timeout(std::time::Duration::from_secs(30)).unwrap();
    for id in ids {
        let id = uuid::Uuid::parse_str(id).unwrap();
        db.execute("INSERT INTO changes (task_id, kind, turn, at_ms) VALUES (?, 1, 7, 5)", [id.as_bytes()]).unwrap();
    }
}

#[tokio::test]
async fn the_watchdog_carries_out_what_a_killed_process_wanted() {
    let mut daemon = Daemon::start("", &[]).await;
    let waiting = insert_one(&daemon, json!({"queue": "q", "key": "waiting"})).await;
    let held = insert_one(&daemon, json!({"queue": "held", "key": "held"})).await;
    let leased = daemon.lease_all("w", "held", 1).await.remove(0);
    let done = insert_one(&daemon, json!({"queue": "done", "key": "done"})).await;
    let completed = daemon.lease_all("w", "done", 1).await;
    assert_eq!(daemon.complete("w", &completed).await, ["OK"]);
    // Killed behind the wish.
    daemon.kill9();
    store_wishes(&daemon, &[waiting.clone(), held.clone(), done.clone()]);
    daemon.start_again();
    daemon.ready().await;
    becomes(&daemon, &waiting, "CANCELLED").await;
    becomes(&daemon, &held, "CANCELLED").await;
    becomes(&daemon, &done, "COMPLETED").await;
    assert_eq!(report(&daemon, "complete", "w", &leased).await, "CANCELLED");
    until("no wish is left", async || {
        let db = rusqlite::Connection::open(daemon.data().join("taskd.db")).unwrap();
        db.query_row("SELECT COUNT(*) FROM changes", [], |row| row.get::<_, i64>(0)).is_ok_and(|count| count == 0)
    })
    .await;
}

/// A record as `cancel.lua` leaves it.
fn cancelled_record() -> Vec<u8> {
    rmp_serde::to_vec(&json!(["X", 1, 0, [], [], [], 5])).unwrap()
}

#[tokio::test]
async fn sql_takes_over_from_a_record_that_nobody_told_it_of() {
    let daemon = Daemon::start("grace = \"1s\"", &[]).await;
    let id = insert_one(&daemon, json!({"queue": "q", "key": "k"})).await;
    becomes(&daemon, &id, "QUEUED").await;
    // Killed behind the script, and the wish was in a database that was set back.
    let mut redis = daemon.redis().await;
    let keys: Vec<String> = redis.keys("*{q:*}:records").await.unwrap();
    let field = uuid::Uuid::parse_str(&id).unwrap();
    let _: () = redis.hset(&keys[0], &field.as_bytes()[..], cancelled_record()).await.unwrap();
    let finals = keys[0].replace(":records", ":finals");
    let _: () = redis.rpush(finals, &field.as_bytes()[..]).await.unwrap();
    becomes(&daemon, &id, "CANCELLED").await;
    until("the record is forgotten", async || !redis.exists::<_, bool>(&keys[0]).await.unwrap()).await;
    assert_eq!(daemon.queue("q").await["cancelled"], 1);
}

#[tokio::test]
async fn cancels_and_completions_race_and_each_task_has_one_end() {
    let daemon = Daemon::start("", &[]).await;
    let tasks: Vec<Value> = (0..200).map(|n| json!({"queue": "q", "key": format!("{n}")})).collect();
    let ids = daemon.insert(&tasks).await;
    let leased = daemon.lease_all("w", "q", 200).await;
    let all: Vec<&str> = ids.iter().map(String::as_str).collect();
    let cancels = async {
        let mut answers = Vec::new();
        for ids in all.chunks(20) {
            answers.extend(ids.iter().copied().zip(cancel(&daemon, ids).await));
        }
        answers
    };
    let completions = async {
        let mut answers = Vec::new();
        for tasks in leased.chunks(20).rev() {
            let ids = tasks.iter().map(|task| task["id"].as_str().unwrap());
            answers.extend(ids.zip(daemon.complete("w", tasks).await));
        }
        answers
    };
    let (cancels, completions) = tokio::join!(cancels, completions);
    let completed = |id: &str| completions.iter().any(|(of, answer)| *of == id && answer == "OK");
    for (id, answer) in &cancels {
        let expected = if completed(id) { "ALREADY_COMPLETED" } else { "OK" };
        assert_eq!(answer, expected, "{id}");
    }
    until("every task has its end", async || daemon.unfinished("q").await == 0).await;
    let done = completions.iter().filter(|(_, answer)| answer == "OK").count() as u64;
    let queue = daemon.queue("q").await;
    assert_eq!((queue["completed"].as_u64(), queue["cancelled"].as_u64()), (Some(done), Some(200 - done)));
}
