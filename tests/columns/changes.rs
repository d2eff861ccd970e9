//! Changes of live work in a running taskd: tasks are cancelled, whatever happens to them, and
//! whatever is killed.

use std::process::Command;

use serde_json::{Value, json};

use crate::{
    column,
    support::{
        daemon::{Daemon, statuses},
        until,
    },
};

/// Exit code, stdout, stderr of a command on the gRPC port.
fn taskd(daemon: &Daemon, args: &[&str]) -> (i32, String, String) {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let output = command
        .env_clear()
        .envs(own)
        .env("TASKD_URL", daemon.http())
        .args(args)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

async fn status_of(daemon: &Daemon, id: &str) -> String {
    let (_, task) = daemon.get(&format!("/v1/tasks/{id}")).await;
    task["status"].as_str().unwrap_or_default().to_owned()
}

pub(crate) async fn becomes(daemon: &Daemon, id: &str, status: &str) {
    until(&format!("the task is {status}"), async || {
        status_of(daemon, id).await == status
    })
    .await;
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

pub(crate) async fn insert_one(daemon: &Daemon, task: Value) -> String {
    daemon.insert(&[task]).await.remove(0)
}

/// A worker's report about a task that it has leased.
pub(crate) async fn report(daemon: &Daemon, what: &str, worker: &str, leased: &Value) -> String {
    let (list, mut item) = match what {
        "complete" => ("completions", json!({"result": "r"})),
        "reject" => ("rejections", json!({"reason": "no"})),
        _ => ("extensions", json!({"by": "1m"})),
    };
    item["id"] = leased["id"].clone();
    item["lease_token"] = leased["lease_token"].clone();
    change(daemon, what, json!({"worker": worker, list: [item]}))
        .await
        .remove(0)
}

#[tokio::test]
async fn tasks_are_cancelled_wherever_they_are() {
    let daemon = column::start("", &[]).await;
    let waiting = insert_one(&daemon, json!({"queue": "q", "key": "waiting"})).await;
    let later = insert_one(
        &daemon,
        json!({"queue": "new", "key": "later", "delay": "30days"}),
    )
    .await;
    let soon = insert_one(&daemon, json!({"queue": "q", "key": "soon", "delay": "1h"})).await;
    let held = insert_one(&daemon, json!({"queue": "held", "key": "held"})).await;
    let leased = daemon.lease_all("w", "held", 1).await.remove(0);
    let done = insert_one(&daemon, json!({"queue": "done", "key": "done"})).await;
    let completed = daemon.lease_all("w", "done", 1).await;
    assert_eq!(daemon.complete("w", &completed).await, ["OK"]);
    becomes(&daemon, &waiting, "QUEUED").await;

    let unknown = "0190a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44";
    let ids = [
        &waiting, &later, "x", &soon, &held, &done, unknown, &waiting,
    ];
    let expected = [
        "OK",
        "OK",
        "INVALID",
        "OK",
        "OK",
        "ALREADY_COMPLETED",
        "UNKNOWN_TASK",
        "OK",
    ];
    assert_eq!(cancel(&daemon, &ids).await, expected);
    for id in [&waiting, &later, &soon, &held] {
        assert_eq!(status_of(&daemon, id).await, "CANCELLED");
    }
    // The same again changes nothing; nobody gets them; who holds one is told.
    assert_eq!(cancel(&daemon, &[&waiting, &held]).await, ["OK", "OK"]);
    for what in ["extend", "reject", "complete"] {
        assert_eq!(
            report(&daemon, what, "w", &leased).await,
            "CANCELLED",
            "{what}"
        );
    }
    assert!(daemon.lease("w", "q", 10, "0s").await.is_empty());
    for queue in ["q", "new", "held"] {
        until("no task of the queue is unfinished", async || {
            daemon.unfinished(queue).await == 0
        })
        .await;
        assert!(daemon.queue(queue).await["cancelled"].as_u64().unwrap() >= 1);
    }
    let (_, said) = daemon
        .get(&format!("/v1/tasks:explain?id={held}&worker=w"))
        .await;
    assert_eq!(
        (&said["place"], &said["worker"]["reason"]),
        (&json!("FINISHED"), &json!("FINISHED"))
    );

    // Its key is a duplicate, which says why.
    let (_, again) = daemon
        .post("/v1/tasks", &json!({"queue": "q", "key": "waiting"}))
        .await;
    let again = &again["results"][0];
    assert_eq!(
        (&again["status"], &again["id"]),
        (&json!("DUPLICATE"), &json!(waiting))
    );
    assert!(
        again["error"].as_str().unwrap().contains("CANCELLED"),
        "{again}"
    );
    let (_, acts) = daemon.get("/v1/acts").await;
    let of = |id: &str| {
        acts["acts"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|act| act["on"] == id)
            .count()
    };
    assert_eq!(
        [&waiting, &later, &soon, &held].map(|id| of(id)),
        [1; 4],
        "{acts}"
    );
}

#[tokio::test]
async fn one_task_is_deleted_by_its_path() {
    let daemon = column::start("", &[]).await;
    let id = insert_one(&daemon, json!({"queue": "q", "key": "k"})).await;
    let delete = async |id: &str| {
        let request =
            crate::support::http_client().delete(format!("{}/v1/tasks/{id}", daemon.http()));
        let answer = request.send().await.unwrap();
        (
            answer.status().as_u16(),
            answer.json::<Value>().await.unwrap(),
        )
    };
    assert_eq!(delete(&id).await, (200, json!({"id": id, "status": "OK"})));
    assert_eq!(delete(&id).await.0, 200);
    let other = insert_one(&daemon, json!({"queue": "q", "key": "other"})).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    let (status, problem) = delete(&other).await;
    assert_eq!(
        (status, problem["status"].as_u64()),
        (409, Some(409)),
        "{problem}"
    );
    assert_eq!(delete("0190a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44").await.0, 404);
    assert_eq!(delete("x").await.0, 400);
}

#[tokio::test]
async fn a_cancelled_task_of_several_keeps_its_credits_and_is_sent_again() {
    let daemon = column::start("", &[]).await;
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
    let daemon = column::start("", &[]).await;
    let first = insert_one(&daemon, json!({"queue": "q", "key": "a"})).await;
    let second = insert_one(&daemon, json!({"queue": "q", "key": "b c"})).await;
    let (code, stdout, stderr) = taskd(&daemon, &["cancel", &first]);
    assert_eq!(
        (code, &stdout[..]),
        (0, "1 of 1 tasks cancelled\n"),
        "{stderr}"
    );
    let (code, stdout, stderr) = taskd(
        &daemon,
        &["cancel", "--queue", "q", "--key", "b c", "--json"],
    );
    assert_eq!(code, 0, "{stderr}");
    let said: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(said, json!({"id": second, "status": "OK", "error": ""}));
    let (code, stdout, stderr) = taskd(&daemon, &["cancel", &first, "nothing"]);
    assert_eq!((code, &stdout[..]), (2, ""));
    assert!(
        stderr.contains("\"nothing\" is not the id of a task"),
        "{stderr}"
    );
    for (args, why) in [
        (&["cancel"][..], "required arguments were not provided"),
        (&["cancel", "--queue", "q"], "its queue and key: q KEY"),
        (
            &["cancel", "--queue", "a b", "--key", "none"],
            "contains ' '",
        ),
    ] {
        let (code, _, stderr) = taskd(&daemon, args);
        assert!(
            code == 2 && stderr.lines().count() == 1 && stderr.contains(why),
            "{code}: {stderr}"
        );
    }
}

#[tokio::test]
async fn an_unknown_key_keeps_no_other_task_from_its_change() {
    let daemon = column::start("", &[]).await;
    let known = insert_one(&daemon, json!({"queue": "q", "key": "known"})).await;
    let keys = ["--queue", "q", "--key", "no\u{1b}[31mne", "--key", "known"];
    let (code, stdout, stderr) = taskd(
        &daemon,
        &[&["change", "--priority", "high"], &keys[..]].concat(),
    );
    assert_eq!(
        (code, &stdout[..]),
        (1, "1 of 2 tasks changed\n"),
        "{stderr}"
    );
    assert!(
        stderr.contains("no task with the key") && stderr.lines().count() == 1,
        "{stderr}"
    );
    assert!(
        !stderr.contains('\u{1b}'),
        "a terminal would obey it: {stderr:?}"
    );
    let (code, stdout, stderr) = taskd(&daemon, &[&["cancel", "--json"], &keys[..]].concat());
    assert_eq!((code, &stderr[..]), (1, ""));
    let said: Vec<Value> = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        (&said[0]["key"], &said[0]["status"]),
        (&json!("no\u{1b}[31mne"), &json!("UNKNOWN_TASK"))
    );
    assert_eq!(said[1], json!({"id": known, "status": "OK", "error": ""}));
    becomes(&daemon, &known, "CANCELLED").await;
    let (code, _, stderr) = taskd(&daemon, &["cancel", "no\u{1b}[31mne"]);
    assert!(code == 2 && !stderr.contains('\u{1b}'), "{code} {stderr:?}");
}

#[tokio::test]
async fn cancels_and_completions_race_and_each_task_has_one_end() {
    let daemon = column::start("", &[]).await;
    let tasks: Vec<Value> = (0..200)
        .map(|n| json!({"queue": "q", "key": format!("{n}")}))
        .collect();
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
    let completed = |id: &str| {
        completions
            .iter()
            .any(|(of, answer)| *of == id && answer == "OK")
    };
    for (id, answer) in &cancels {
        let expected = if completed(id) {
            "ALREADY_COMPLETED"
        } else {
            "OK"
        };
        assert_eq!(answer, expected, "{id}");
    }
    until("every task has its end", async || {
        daemon.unfinished("q").await == 0
    })
    .await;
    let done = completions
        .iter()
        .filter(|(_, answer)| answer == "OK")
        .count() as u64;
    let queue = daemon.queue("q").await;
    assert_eq!(
        (queue["completed"].as_u64(), queue["cancelled"].as_u64()),
        (Some(done), Some(200 - done))
    );
}

async fn task(daemon: &Daemon, id: &str) -> Value {
    daemon.get(&format!("/v1/tasks/{id}")).await.1
}

#[tokio::test]
async fn a_waiting_task_gets_another_priority() {
    let daemon = column::start("", &[]).await;
    let first = insert_one(
        &daemon,
        json!({"queue": "q", "key": "first", "priority": "high"}),
    )
    .await;
    let second = insert_one(
        &daemon,
        json!({"queue": "q", "key": "second", "priority": "low"}),
    )
    .await;
    let later = insert_one(
        &daemon,
        json!({"queue": "q", "key": "later", "delay": "30days"}),
    )
    .await;
    becomes(&daemon, &second, "QUEUED").await;
    assert_eq!(
        change(
            &daemon,
            "change",
            json!({"ids": [second, later], "priority": "high"})
        )
        .await,
        ["OK", "OK"]
    );
    assert_eq!(
        change(
            &daemon,
            "change",
            json!({"ids": [first], "priority": "low"})
        )
        .await,
        ["OK"]
    );
    for (id, priority) in [(&first, "low"), (&second, "high"), (&later, "high")] {
        assert_eq!(task(&daemon, id).await["priority"], priority);
    }
    let leased = daemon.lease_all("w", "q", 2).await;
    let got: Vec<_> = leased
        .iter()
        .map(|task| (&task["key"], &task["priority"]))
        .collect();
    assert_eq!(
        got,
        [
            (&json!("second"), &json!("high")),
            (&json!("first"), &json!("low"))
        ]
    );
    assert_eq!(daemon.complete("w", &leased).await, ["OK", "OK"]);
}

#[tokio::test]
async fn a_higher_num_reopens_a_completed_task_and_a_lower_one_completes() {
    let daemon = column::start("", &[]).await;
    let id = insert_one(&daemon, json!({"queue": "q", "key": "k"})).await;
    let leased = daemon.lease_all("a", "q", 1).await;
    assert_eq!(daemon.complete("a", &leased).await, ["OK"]);
    becomes(&daemon, &id, "COMPLETED").await;
    assert_eq!(
        change(&daemon, "change", json!({"ids": [id], "replicas": 2})).await,
        ["OK"]
    );
    // Its worker keeps the credit and does not get it again.
    let leased = daemon.lease_all("b", "q", 1).await;
    assert_eq!(leased[0]["replicas"], 2);
    assert!(daemon.lease("a", "q", 1, "0s").await.is_empty());
    assert_eq!(daemon.complete("b", &leased).await, ["OK"]);
    until("it is completed by both", async || {
        task(&daemon, &id).await["completed"] == 2
    })
    .await;
    becomes(&daemon, &id, "COMPLETED").await;

    let id = insert_one(&daemon, json!({"queue": "low", "key": "k", "replicas": 3})).await;
    let [a, b] = [
        daemon.lease_all("a", "low", 1).await,
        daemon.lease_all("b", "low", 1).await,
    ];
    assert_eq!(daemon.complete("a", &a).await, ["OK"]);
    assert_eq!(
        change(&daemon, "change", json!({"ids": [id], "replicas": 1})).await,
        ["OK"]
    );
    becomes(&daemon, &id, "COMPLETED").await;
    assert_eq!(daemon.complete("b", &b).await, ["ALREADY_COMPLETED"]);
    until("SQL shows its end", async || {
        daemon.unfinished("low").await == 0
    })
    .await;
    assert_eq!(
        change(&daemon, "change", json!({"ids": [id], "priority": "low"})).await,
        ["ALREADY_COMPLETED"]
    );

    // Raised while a worker holds it.
    let id = insert_one(&daemon, json!({"queue": "raised", "key": "k"})).await;
    let a = daemon.lease_all("a", "raised", 1).await;
    assert_eq!(
        change(&daemon, "change", json!({"ids": [id], "replicas": 2})).await,
        ["OK"]
    );
    let b = daemon.lease_all("b", "raised", 1).await;
    assert_eq!(
        (
            daemon.complete("a", &a).await,
            daemon.complete("b", &b).await
        ),
        (vec!["OK".into()], vec!["OK".into()])
    );
    becomes(&daemon, &id, "COMPLETED").await;
}

#[tokio::test]
async fn a_completion_on_its_way_and_a_higher_num_agree() {
    let daemon = column::start("", &[]).await;
    let tasks: Vec<Value> = (0..100)
        .map(|n| json!({"queue": "q", "key": format!("{n}")}))
        .collect();
    let ids = daemon.insert(&tasks).await;
    let leased = daemon.lease_all("a", "q", 100).await;
    // SQL has not heard of most completions yet.
    let completed = daemon.complete("a", &leased).await;
    assert!(completed.iter().all(|status| status == "OK"));
    let answers = change(&daemon, "change", json!({"ids": ids, "replicas": 2})).await;
    assert!(answers.iter().all(|status| status == "OK"), "{answers:?}");
    let leased = daemon.lease_all("b", "q", 100).await;
    assert!(
        daemon
            .complete("b", &leased)
            .await
            .iter()
            .all(|status| status == "OK")
    );
    until("all are completed", async || {
        daemon.unfinished("q").await == 0
    })
    .await;
    for id in &ids {
        assert_eq!(task(&daemon, id).await["completed"], 2);
    }
}

#[tokio::test]
async fn a_task_is_requeued_for_all_away_from_a_worker_and_to_one() {
    let daemon = column::start("", &[]).await;
    let id = insert_one(&daemon, json!({"queue": "q", "key": "k"})).await;
    let held = daemon.lease_all("hangs", "q", 1).await;
    assert_eq!(
        change(
            &daemon,
            "requeue",
            json!({"ids": [id], "away_from": "hangs"})
        )
        .await,
        ["OK"]
    );
    assert_eq!(daemon.complete("hangs", &held).await, ["LEASE_LOST"]);
    assert!(daemon.lease("hangs", "q", 1, "0s").await.is_empty());
    let (_, said) = daemon
        .get(&format!("/v1/tasks:explain?id={id}&worker=hangs"))
        .await;
    assert_eq!(said["worker"]["reason"], "REFUSED_IT", "{said}");
    assert_eq!(daemon.lease_all("other", "q", 1).await[0]["attempt"], 1);

    assert_eq!(
        change(
            &daemon,
            "requeue",
            json!({"ids": [id], "to": "one", "reserved_for": "1h"})
        )
        .await,
        ["OK"]
    );
    assert!(daemon.lease("other", "q", 1, "0s").await.is_empty());
    let (_, said) = daemon
        .get(&format!("/v1/tasks:explain?id={id}&worker=other"))
        .await;
    assert_eq!(said["worker"]["reason"], "RESERVED_FOR_ANOTHER", "{said}");
    assert!(said["worker"]["until"].is_string(), "{said}");
    // A short reservation ends by itself, and wakes who waits.
    assert_eq!(
        change(
            &daemon,
            "requeue",
            json!({"ids": [id], "to": "one", "reserved_for": "10ms"})
        )
        .await,
        ["OK"]
    );
    let leased = daemon.lease_all("other", "q", 1).await;
    assert_eq!(
        change(&daemon, "requeue", json!({"ids": [id]})).await,
        ["OK"]
    );
    assert_eq!(daemon.complete("other", &leased).await, ["LEASE_LOST"]);
    let leased = daemon.lease_all("other", "q", 1).await;
    assert_eq!(daemon.complete("other", &leased).await, ["OK"]);
    becomes(&daemon, &id, "COMPLETED").await;

    let later = insert_one(
        &daemon,
        json!({"queue": "q", "key": "later", "delay": "30days"}),
    )
    .await;
    let soon = insert_one(&daemon, json!({"queue": "q", "key": "soon", "delay": "1h"})).await;
    becomes(&daemon, &soon, "DELAYED").await;
    let (_, answer) = daemon
        .post("/v1/tasks:requeue", &json!({"ids": [later, soon, id]}))
        .await;
    assert_eq!(
        statuses(&answer),
        ["INVALID", "INVALID", "ALREADY_COMPLETED"],
        "{answer}"
    );
}

#[tokio::test]
async fn a_wrong_change_is_named_and_changes_nothing() {
    let daemon = column::start("", &[]).await;
    let id = insert_one(&daemon, json!({"queue": "q", "key": "k"})).await;
    for (what, body, why) in [
        (
            "change",
            json!({"ids": [id]}),
            "name a priority or replicas",
        ),
        (
            "change",
            json!({"ids": [id], "priority": "urgent"}),
            "unknown priority",
        ),
        (
            "change",
            json!({"ids": [id], "replicas": 0}),
            "replicas is 0; must be 1 to",
        ),
        (
            "requeue",
            json!({"ids": [id], "to": "a", "away_from": "b"}),
            "to and away_from are both given",
        ),
        (
            "requeue",
            json!({"ids": [id], "reserved_for": "1m"}),
            "a reservation needs the name of its worker",
        ),
        (
            "requeue",
            json!({"ids": [id], "to": "a\n"}),
            "control character",
        ),
    ] {
        let (status, problem) = daemon.post(&format!("/v1/tasks:{what}"), &body).await;
        let said = problem["detail"].as_str().unwrap_or_default();
        assert!(
            status == 400 && said.contains(why),
            "{status}: {said:?} should say {why:?}"
        );
    }
    let (_, answer) = daemon
        .post("/v1/tasks:change", &json!({"ids": [id], "replicas": 5000}))
        .await;
    assert_eq!(answer["results"][0]["status"], "INVALID", "{answer}");
    assert!(
        answer["results"][0]["error"]
            .as_str()
            .unwrap()
            .contains("max_replicas"),
        "{answer}"
    );
    let (code, stdout, stderr) = taskd(
        &daemon,
        &["change", "--priority", "high", "--replicas", "2", &id],
    );
    assert_eq!(
        (code, &stdout[..]),
        (0, "1 of 1 tasks changed\n"),
        "{stderr}"
    );
    let shown = task(&daemon, &id).await;
    assert_eq!(
        (&shown["priority"], &shown["replicas"]),
        (&json!("high"), &json!(2))
    );
    let (code, _, stderr) = taskd(&daemon, &["change", &id]);
    assert!(code == 2 && stderr.lines().count() == 1, "{code}: {stderr}");
    let (code, _, stderr) = taskd(&daemon, &["requeue", "--for", "1m", &id]);
    assert!(code == 2 && stderr.contains("--to"), "{code}: {stderr}");
}

#[tokio::test]
async fn a_reservation_ends_with_its_worker() {
    let daemon = column::start("", &[]).await;
    let requeue = async |id: &str, more: Value| {
        let mut body = json!({ "ids": [id] });
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        assert_eq!(change(&daemon, "requeue", body).await, ["OK"]);
    };
    // Its worker has done its replica: the other one is for everybody.
    let id = insert_one(&daemon, json!({"queue": "done", "key": "k", "replicas": 2})).await;
    becomes(&daemon, &id, "QUEUED").await;
    requeue(&id, json!({"to": "one"})).await;
    assert!(daemon.lease("other", "done", 1, "0s").await.is_empty());
    let leased = daemon.lease_all("one", "done", 1).await;
    assert!(daemon.lease("other", "done", 1, "0s").await.is_empty());
    assert_eq!(daemon.complete("one", &leased).await, ["OK"]);
    let leased = daemon.lease_all("other", "done", 1).await;
    assert_eq!(daemon.complete("other", &leased).await, ["OK"]);
    becomes(&daemon, &id, "COMPLETED").await;

    // Its worker has refused it.
    let id = insert_one(
        &daemon,
        json!({"queue": "refused", "key": "k", "replicas": 2}),
    )
    .await;
    becomes(&daemon, &id, "QUEUED").await;
    requeue(&id, json!({"to": "one", "reserved_for": "1h"})).await;
    assert!(daemon.lease("other", "refused", 1, "0s").await.is_empty());
    let leased = daemon.lease_all("one", "refused", 1).await.remove(0);
    let no = json!({"id": id, "lease_token": leased["lease_token"], "reason": "no", "retry": false, "delay": "0s"});
    assert_eq!(
        change(
            &daemon,
            "reject",
            json!({"worker": "one", "rejections": [no]})
        )
        .await,
        ["OK"]
    );
    daemon.lease_all("other", "refused", 1).await;
    // A requeue for all is for this worker, too.
    assert!(daemon.lease("one", "refused", 1, "0s").await.is_empty());
    requeue(&id, json!({})).await;
    daemon.lease_all("one", "refused", 1).await;

    // A second reservation that has no end leaves nothing behind of the first one, and is not ended
    // by it.
    let id = insert_one(&daemon, json!({"queue": "twice", "key": "k"})).await;
    becomes(&daemon, &id, "QUEUED").await;
    requeue(&id, json!({"to": "one", "reserved_for": "300ms"})).await;
    requeue(&id, json!({"to": "two"})).await;
    let soon = insert_one(&daemon, json!({"queue": "later", "key": "k"})).await;
    becomes(&daemon, &soon, "QUEUED").await;
    requeue(&soon, json!({"to": "one", "reserved_for": "1s"})).await;
    daemon.lease_all("other", "later", 1).await;
    assert!(daemon.lease("other", "twice", 1, "0s").await.is_empty());
    daemon.lease_all("two", "twice", 1).await;
}

#[tokio::test]
async fn changes_of_one_task_at_once_leave_the_queue_with_what_sql_has() {
    let daemon = column::start("", &[]).await;
    let tasks: Vec<Value> = (0..20)
        .map(|n| json!({"queue": "q", "key": n.to_string()}))
        .collect();
    let ids = daemon.insert(&tasks).await;
    for id in &ids {
        becomes(&daemon, id, "QUEUED").await;
    }
    let changes = (0..12).map(|n| {
        let priority = ["high", "low", "medium"][n % 3];
        let body = json!({"ids": ids, "priority": priority, "replicas": 2 + n % 4});
        let daemon = &daemon;
        async move {
            assert!(
                change(daemon, "change", body)
                    .await
                    .iter()
                    .all(|status| status == "OK")
            )
        }
    });
    futures::future::join_all(changes).await;
    let of = |task: &Value| {
        (
            task["id"].clone(),
            task["replicas"].clone(),
            task["priority"].clone(),
        )
    };
    let mut worker = 0;
    until("a worker gets them as SQL has them", async || {
        worker += 1;
        let leased = daemon.lease_all(&format!("w{worker}"), "q", 20).await;
        let mut agree = true;
        for got in &leased {
            agree &= of(got) == of(&task(&daemon, got["id"].as_str().unwrap()).await);
        }
        let all: Vec<&Value> = leased.iter().map(|task| &task["id"]).collect();
        change(&daemon, "requeue", json!({ "ids": all })).await;
        agree
    })
    .await;
}

#[tokio::test]
async fn credits_on_their_way_and_a_num_that_falls_and_rises_lose_nothing() {
    // Nobody settles reports.
    let mut daemon = column::start("", &["--pipelines", "all"]).await;
    let id = insert_one(&daemon, json!({"queue": "q", "key": "k", "replicas": 3})).await;
    becomes(&daemon, &id, "QUEUED").await;
    let [a, b] = [
        daemon.lease_all("a", "q", 1).await,
        daemon.lease_all("b", "q", 1).await,
    ];
    assert!(daemon.stop().await.success());
    let mut daemon = Daemon::start_in_the_folder_of(daemon, &["--pipelines", "fanout,tasks"]).await;
    assert_eq!(
        (
            daemon.complete("a", &a).await,
            daemon.complete("b", &b).await
        ),
        (vec!["OK".to_owned()], vec!["OK".to_owned()])
    );
    for replicas in [1, 4, 2, 3] {
        assert_eq!(
            change(
                &daemon,
                "change",
                json!({"ids": [id], "replicas": replicas})
            )
            .await,
            ["OK"],
            "{replicas}"
        );
    }
    assert!(daemon.stop().await.success());
    let daemon = Daemon::start_in_the_folder_of(daemon, &["--pipelines", "all"]).await;
    // Neither gets it again, and a third one completes it.
    let c = daemon.lease_all("c", "q", 1).await;
    for worker in ["a", "b"] {
        assert!(daemon.lease(worker, "q", 1, "0s").await.is_empty());
    }
    assert_eq!(daemon.complete("c", &c).await, ["OK"]);
    becomes(&daemon, &id, "COMPLETED").await;
    let mut workers = Vec::new();
    until("all results are in SQL", async || {
        let (_, answer) = daemon.get(&format!("/v1/tasks/{id}/results")).await;
        let credited = answer["results"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|result| result["surplus"] == false);
        workers = credited
            .map(|result| result["worker"].as_str().unwrap().to_owned())
            .collect();
        workers.len() == 3
    })
    .await;
    workers.sort_unstable();
    assert_eq!(workers, ["a", "b", "c"]);
}
