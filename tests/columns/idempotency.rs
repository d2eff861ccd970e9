//! Idempotency keys of inserts, through the running binary.

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use super::books::until_books;
use crate::{
    column,
    support::{daemon::Daemon, until},
};

fn task(idempotency_key: &str, key: &str, payload: &str) -> Value {
    json!({"queue": "q", "key": key, "payload": payload, "idempotency_key": idempotency_key})
}

/// An insert may be repeated for longer than its task lives.
#[tokio::test(flavor = "multi_thread")]
async fn an_insert_that_is_sent_again_behind_its_deadline_is_answered_as_the_first_time() {
    let mut daemon = column::start("", &[]).await;
    let deadline = taskd::model::now_unix_ms() + 3000;
    let task = |idempotency_key: &str, key: &str| {
        let mut task = task(idempotency_key, key, "p");
        task["deadline"] = json!(taskd::model::to_rfc_3339(deadline));
        task
    };
    let first = insert(&daemon, &[task("i", "k")]).await;
    assert_eq!(first[0]["status"], "CREATED");
    until("the task is dead", async || {
        let (_, found) = daemon
            .get(&format!("/v1/tasks/{}", first[0]["id"].as_str().unwrap()))
            .await;
        found["status"] == "DEAD"
    })
    .await;
    assert_eq!(insert(&daemon, &[task("i", "k")]).await, first);
    // Without a key taskd cannot know. The first insert with one may come late, too: its task dies
    // at once.
    let (status, refused) = daemon.post("/v1/tasks", &json!([task("", "late")])).await;
    assert_eq!(
        (status, &refused["results"][0]["status"]),
        (200, &json!("REJECTED")),
        "{refused}"
    );
    let late = insert(&daemon, &[task("j", "late")]).await;
    assert_eq!(late[0]["status"], "CREATED");
    until_books(&daemon, "q", |books| books["out"]["dead"] == 2).await;
    assert!(daemon.stop().await.success());
}

/// Inserts; the answers.
async fn insert(daemon: &Daemon, tasks: &[Value]) -> Vec<Value> {
    let (status, mut answer) = daemon.post("/v1/tasks", &json!(tasks)).await;
    assert_eq!(status, 200, "{answer}");
    serde_json::from_value(answer["results"].take()).unwrap()
}

/// Tasks that come into the queue meanwhile are counted in one place or in the other.
async fn until_unfinished(daemon: &Daemon, count: u64) {
    until("all tasks are counted", async || {
        daemon.unfinished("q").await == count
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_insert_that_is_sent_again_is_answered_as_the_first_time() {
    let mut daemon = column::start("[queues.short]\nidempotency_window = \"1s\"\n", &[]).await;
    let first = insert(&daemon, &[task("i", "k", "p")]).await;
    assert_eq!(first[0]["status"], "CREATED");
    // Enough of them that the filter is asked, too.
    let again = insert(&daemon, &vec![task("i", "k", "p"); 6]).await;
    assert!(again.iter().all(|answer| *answer == first[0]), "{again:?}");
    for wrong in [task("i", "other", "p"), task("i", "k", "other")] {
        let answer = &insert(&daemon, &[wrong]).await[0];
        assert_eq!(answer["status"], "REJECTED");
        assert!(
            answer["error"]
                .as_str()
                .unwrap()
                .starts_with("the idempotency_key was used with another"),
            "{answer}"
        );
    }
    let plain = insert(&daemon, &[json!({"queue": "q", "key": "k"})]).await;
    assert_eq!(
        (&plain[0]["status"], &plain[0]["id"]),
        (&json!("DUPLICATE"), &first[0]["id"])
    );

    // The header, for one task.
    let client = crate::support::http_client();
    let send = async |key: &str, body: Value| {
        let request = client
            .post(format!("{}/v1/tasks", daemon.http()))
            .header("Idempotency-Key", key);
        let answer = request.json(&body).send().await.unwrap();
        (
            answer.status().as_u16(),
            answer.json::<Value>().await.unwrap(),
        )
    };
    let one = json!({"queue": "q", "key": "header"});
    let (status, created) = send("\"of the header\"", one.clone()).await;
    assert_eq!(
        (status, &created["results"][0]["status"]),
        (200, &json!("CREATED"))
    );
    assert_eq!(
        send("of the header", one.clone()).await,
        (200, created.clone())
    );
    assert_eq!(
        insert(&daemon, &[task("of the header", "header", "")]).await[0],
        created["results"][0]
    );
    let (status, refused) = send("of the header", json!({"queue": "q", "key": "another"})).await;
    assert_eq!(
        (status, &refused["results"][0]["status"]),
        (422, &json!("REJECTED"))
    );
    let (status, many) = send("many", json!([one])).await;
    assert_eq!(status, 400, "{many}");
    assert!(
        many["detail"]
            .as_str()
            .unwrap()
            .contains("is for a body of one task"),
        "{many}"
    );
    let (status, differs) = send("x", task("y", "k", "p")).await;
    assert_eq!(status, 400, "{differs}");
    let request = client
        .post(format!("{}/v1/tasks", daemon.http()))
        .header("Idempotency-Key", "lines");
    let lines = request
        .header("content-type", "application/x-ndjson")
        .body("{\"queue\":\"q\",\"key\":\"l\"}\n");
    assert_eq!(lines.send().await.unwrap().status(), 400);
    until_unfinished(&daemon, 2).await;

    // A worker's discoveries need none: a completion may be repeated without it.
    let leased = daemon.lease_all("w", "q", 2).await;
    let discovered = json!([task("d", "child", "p")]);
    let completion = json!({"id": leased[0]["id"], "lease_token": leased[0]["lease_token"], "discovered": discovered});
    let (_, answer) = daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": [completion]}),
        )
        .await;
    assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
    assert_eq!(daemon.complete("w", &leased[1..]).await, ["OK"]);
    assert_eq!(daemon.work("w", "q", 1).await, ["child"]);
    until_unfinished(&daemon, 0).await;
    assert_eq!(
        insert(&daemon, &[task("i", "k", "p")]).await,
        first,
        "also when the task is done"
    );

    // After the window the key is free.
    let of_short = |key: &str| json!({"queue": "short", "key": key, "idempotency_key": "i"});
    assert_eq!(
        insert(&daemon, &[of_short("a")]).await[0]["status"],
        "CREATED"
    );
    let mut answer = Value::Null;
    until("the window is over", async || {
        answer = insert(&daemon, &[of_short("b")]).await.remove(0);
        answer["status"] != "REJECTED"
    })
    .await;
    assert_eq!(answer["status"], "CREATED");
    until("the books balance", async || {
        let (_, books) = daemon.get("/v1/books").await;
        let queues = books["queues"].as_array().unwrap();
        queues.len() == 2 && queues.iter().all(|queue| queue["state"] == "BALANCED")
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_insert_whose_answer_a_kill_took_is_answered_again() {
    let mut daemon = column::start("", &[]).await;
    let mut round = 0;
    // Until a kill came between a commit and its answer.
    loop {
        let client = crate::support::http_client();
        let of_round = |n: usize| task(&format!("i {round} {n}"), &format!("k {round} {n}"), "p");
        let senders = (0..40).map(|n| {
            let request = client
                .post(format!("{}/v1/tasks", daemon.http()))
                .json(&[of_round(n)]);
            tokio::spawn(async move { request.send().await?.json::<Value>().await })
        });
        let mut senders: Vec<_> = senders.collect();
        // Each round lets some more of them through.
        let answered: Vec<_> = senders.drain(..(round % 10).min(senders.len())).collect();
        let mut answers = Vec::new();
        for sender in answered {
            answers.push(sender.await.unwrap());
        }
        daemon.kill9_and_restart();
        daemon.ready().await;
        for sender in senders {
            answers.push(sender.await.unwrap());
        }
        let mut was_hit = false;
        for (n, answer) in answers.into_iter().enumerate() {
            let (_, stored) = daemon
                .get(&format!("/v1/tasks?queue=q&key=k%20{round}%20{n}"))
                .await;
            let stored = stored["tasks"][0]["id"].clone();
            let again = insert(&daemon, &[of_round(n)]).await.remove(0);
            assert_eq!(again["status"], "CREATED", "{again}");
            match answer {
                Ok(answer) if answer["results"].is_array() => {
                    assert_eq!(answer["results"][0], again)
                }
                // The other answers are of a taskd that was starting again.
                _ if stored.is_null() => {}
                _ => {
                    assert_eq!(stored, again["id"]);
                    was_hit = true;
                }
            }
        }
        round += 1;
        until_unfinished(&daemon, 40 * round as u64).await;
        if was_hit {
            break;
        }
        assert!(round < 60, "no kill came between a commit and its answer");
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_inserted_again_line_by_line() {
    let mut daemon = column::start("[queues.default]\nbackoff = [\"1h\"]\n", &[]).await;
    let insert = |lines: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        command.args([
            "insert",
            "--server",
            &daemon.grpc(),
            "--queue",
            "q",
            "--json",
            "--idempotency",
            "import-7",
        ]);
        command.args([
            "--backoff",
            "{\"kind\": \"constant\", \"initial\": \"0s\"}",
            "-",
        ]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(lines.as_bytes())
            .unwrap();
        let output = child.wait_with_output().unwrap();
        (
            output.status.code(),
            serde_json::from_slice::<Value>(&output.stdout).unwrap_or_default(),
        )
    };
    for _ in 0..2 {
        let (code, summary) = insert("a\nb\nc\n");
        assert_eq!(
            (code, &summary["created"], &summary["duplicate"]),
            (Some(0), &json!(3), &json!(0)),
            "{summary}"
        );
    }
    let (code, summary) = insert("a\nother\nc\n");
    assert_eq!(
        (code, &summary["created"], &summary["rejected"]),
        (Some(1), &json!(2), &json!(1)),
        "{summary}"
    );
    until_unfinished(&daemon, 3).await;
    // The backoff of the command is that of each line.
    let task = daemon.lease_all("w", "q", 1).await.remove(0);
    let rejection = json!({"id": task["id"], "lease_token": task["lease_token"]});
    daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": "w", "rejections": [rejection]}),
        )
        .await;
    let tasks = daemon.lease_all("w", "q", 3).await;
    assert!(
        tasks
            .iter()
            .any(|again| again["id"] == task["id"] && again["attempt"] == 2),
        "{tasks:?}"
    );
    let (_, shown) = daemon
        .get(&format!("/v1/tasks/{}", task["id"].as_str().unwrap()))
        .await;
    let backoff = json!({"kind": "constant", "initial": "0s", "maximum": "1day", "jitter": 0.2});
    assert_eq!(shown["backoff"], backoff, "{shown}");
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idempotency_key_that_is_used_again_counts_as_rejected_everywhere() {
    let mut daemon = column::start("", &[]).await;
    let sent = [
        task("i", "k", "p"),
        task("i", "other", "p"),
        task("i", "k", "other"),
        task("j", "k", "p"),
    ];
    let mut answers = Vec::new();
    for one in sent {
        answers.push(insert(&daemon, &[one]).await[0]["status"].clone());
    }
    assert_eq!(answers, ["CREATED", "REJECTED", "REJECTED", "DUPLICATE"]);
    let books = until_books(&daemon, "q", |books| books["in"]["rejected"] == 2).await;
    assert_eq!(
        (&books["in"]["stored"], &books["in"]["duplicates"]),
        (&json!(1), &json!(1)),
        "{books}"
    );
    let (_, metrics) = daemon.get("/metrics").await;
    let metrics = metrics.as_str().unwrap();
    for line in [
        "taskd_discovery_in_tasks_total{source=\"api\"} 4",
        "taskd_discovery_created_tasks_total 1",
        "taskd_discovery_dropped_tasks_total{reason=\"rejected\"} 2",
        "taskd_discovery_dropped_tasks_total{reason=\"duplicate\"} 1",
    ] {
        assert!(metrics.lines().any(|one| one == line), "{line}: {metrics}");
    }
    assert!(daemon.stop().await.success());
}
