//! Paused queues in a running taskd.

use std::process::Command;

use serde_json::{Value, json};

use crate::{
    column,
    support::{daemon::Daemon, until},
};

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

async fn set(daemon: &Daemon, what: &str) -> Value {
    let (status, answer) = daemon
        .post(&format!("/v1/queues/q:{what}"), &json!({}))
        .await;
    assert_eq!(status, 200, "{answer}");
    answer
}

#[tokio::test]
async fn a_paused_queue_gives_nothing_and_its_leases_go_on() {
    let mut daemon = column::start("", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "held"})]).await;
    let held = daemon.lease_all("w", "q", 1).await;
    assert_eq!(
        set(&daemon, "pause").await,
        json!({"queue": "q", "paused": true, "changed": true})
    );
    assert_eq!(
        set(&daemon, "pause").await,
        json!({"queue": "q", "paused": true, "changed": false})
    );
    let ids = daemon
        .insert(&[
            json!({"queue": "q", "key": "waits"}),
            json!({"queue": "other", "key": "k"}),
        ])
        .await;
    until("the task is in its queue", async || {
        daemon.get(&format!("/v1/tasks/{}", ids[0])).await.1["status"] == "QUEUED"
    })
    .await;
    assert!(daemon.lease("w", "q", 10, "0s").await.is_empty());
    // Other queues of the same call go on.
    let body = json!({"worker": "w", "queues": ["q", "other"], "max_tasks": 10, "wait": "10s"});
    let (_, got) = daemon.post("/v1/tasks:get", &body).await;
    assert_eq!(
        (
            got["tasks"].as_array().unwrap().len(),
            &got["tasks"][0]["queue"]
        ),
        (1, &json!("other"))
    );
    assert_eq!(daemon.complete("w", &held).await, ["OK"]);

    let queue = daemon.queue("q").await;
    assert_eq!(
        (&queue["paused"], &queue["waiting"]),
        (&json!(true), &json!(1))
    );
    assert_eq!(daemon.queue("other").await["paused"], false);
    let (_, said) = daemon
        .get(&format!("/v1/tasks:explain?id={}&worker=w", ids[0]))
        .await;
    assert_eq!(
        (&said["place"], &said["worker"]["reason"]),
        (&json!("WAITING"), &json!("QUEUE_PAUSED")),
        "{said}"
    );
    assert!(
        said["notes"][0]
            .as_str()
            .unwrap()
            .contains("queue q is paused"),
        "{said}"
    );
    assert!(
        said["next"]
            .as_str()
            .unwrap()
            .starts_with("an operator resumes queue q; then a worker"),
        "{said}"
    );

    // SQL keeps the pause.
    daemon.kill9_and_restart();
    daemon.ready().await;
    assert!(daemon.lease("w", "q", 10, "0s").await.is_empty());
    // A worker that waits is woken.
    let waits = daemon.lease("w", "q", 1, "50s");
    let resume = async {
        assert_eq!(
            set(&daemon, "resume").await,
            json!({"queue": "q", "paused": false, "changed": true})
        );
    };
    let (leased, ()) = tokio::join!(waits, resume);
    assert_eq!(leased[0]["key"], "waits");
    assert_eq!(set(&daemon, "resume").await["changed"], false);
    let (_, acts) = daemon.get("/v1/acts").await;
    let acts: Vec<_> = acts["acts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|act| (&act["what"], &act["on"]))
        .collect();
    let q = json!("q");
    assert_eq!(
        acts,
        [(&json!("resume queue"), &q), (&json!("pause queue"), &q)]
    );
}

#[tokio::test]
async fn the_commands_pause_and_resume_and_name_mistakes() {
    let daemon = column::start("", &[]).await;
    for (args, want) in [
        (
            ["pause", "later"],
            "queue later is paused (it has no task)\n",
        ),
        (
            ["pause", "later"],
            "queue later was paused before (it has no task)\n",
        ),
        (["resume", "later"], "queue later is resumed\n"),
        (["resume", "later"], "queue later was not paused\n"),
    ] {
        let (code, stdout, stderr) = taskd(&daemon, &args);
        assert_eq!((code, &stdout[..]), (0, want), "{stderr}");
    }
    // A queue that has no task yet.
    let (code, ..) = taskd(&daemon, &["pause", "later"]);
    assert_eq!(
        (code, &daemon.queue("later").await["paused"]),
        (0, &json!(true))
    );
    daemon
        .insert(&[json!({"queue": "later", "key": "k"})])
        .await;
    until("it is queued", async || {
        daemon.queue("later").await["waiting"] == 1
    })
    .await;
    assert!(daemon.lease("w", "later", 1, "1s").await.is_empty());
    assert_eq!(
        taskd(&daemon, &["pause", "later"]).1,
        "queue later was paused before\n"
    );
    let (code, _, stderr) = taskd(&daemon, &["pause", "a b"]);
    assert!(
        code == 2 && stderr.lines().count() == 1 && stderr.contains("contains ' '"),
        "{code}: {stderr}"
    );
    for (path, status) in [
        ("q", 404),
        ("q:stop", 404),
        ("a%20b:pause", 400),
        (":pause", 400),
    ] {
        assert_eq!(
            daemon
                .post(&format!("/v1/queues/{path}"), &json!({}))
                .await
                .0,
            status,
            "{path}"
        );
    }
}
