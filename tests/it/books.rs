//! Books that do not add up, made inside taskd's own Redis.

use std::{
    fs::OpenOptions,
    process::{Command, Stdio},
};

use redis::AsyncCommands as _;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    time::timeout,
};

use crate::{
    columns::{
        access::{call, post, token},
        books::{CONFIG, taskd, until_books},
    },
    support::{PATIENCE, daemon::Daemon, until},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_redis_forgot_unbalances_the_books() {
    let daemon = Daemon::start(CONFIG, &[]).await;
    daemon
        .insert(&[
            json!({"queue": "q", "key": "a"}),
            json!({"queue": "q", "key": "b"}),
        ])
        .await;
    until_books(&daemon, "q", |books| {
        books["state"] == "BALANCED" && books["held"]["redis"]["live"] == 2
    })
    .await;
    let mut redis = daemon.redis().await;
    let counters: Vec<String> = redis.keys("*:counters").await.unwrap();
    for key in counters {
        if redis
            .hget::<_, _, Option<i64>>(&key, "live")
            .await
            .unwrap()
            .unwrap_or(0)
            > 0
        {
            redis.hincr::<_, _, _, ()>(&key, "live", -1).await.unwrap();
            break;
        }
    }
    let books = until_books(&daemon, "q", |books| books["state"] == "UNBALANCED").await;
    assert_eq!(books["held"]["between"], 1);
    let (code, table) = taskd(&daemon, &["q"]);
    assert_eq!(code, 1, "{table}");

    // Books that cannot be written are an error. A reader that has enough of them is none.
    let into = |stdout: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        let command = command
            .args(["books", "q", "--server", &daemon.http()])
            .stdout(stdout)
            .stderr(Stdio::piped());
        let output = command.spawn().unwrap().wait_with_output().unwrap();
        (
            output.status.code().unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let (code, said) = into(
        OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap()
            .into(),
    );
    assert!(
        code == 2 && said.starts_with("taskd: cannot write to stdout: No space left"),
        "{code} {said}"
    );
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(into(writer.into()), (1, String::new()));
}

#[tokio::test]
async fn books_that_are_watched_outlive_a_taskd_that_starts_again() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_taskd"));
    let command = command
        .args(["books", "--watch", "--json", "--server", &daemon.http()])
        .kill_on_drop(true);
    let mut books = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut looks = BufReader::new(books.stdout.take().unwrap()).lines();
    let mut said = BufReader::new(books.stderr.take().unwrap()).lines();
    let first = timeout(PATIENCE, looks.next_line())
        .await
        .expect("a look")
        .unwrap();
    assert!(first.is_some(), "a first look");
    daemon.kill9();
    let trouble = timeout(PATIENCE, said.next_line())
        .await
        .expect("it tells of trouble")
        .unwrap();
    assert!(trouble.is_some_and(|line| line.starts_with("taskd: ")));
    daemon.start_again();
    daemon.ready().await;
    daemon.insert(&[json!({"queue": "q", "key": "a"})]).await;
    let sees = async {
        while !looks
            .next_line()
            .await
            .unwrap()
            .expect("it goes on")
            .contains("\"queue\":\"q\"")
        {}
    };
    timeout(PATIENCE, sees).await.expect("it sees the queue");
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_shard_takes_the_books_of_no_other_queue() {
    let config = format!("auth = \"tokens\"\n{CONFIG}");
    let daemon = Daemon::start(&config, &[]).await;
    let all = token(&daemon, "all", &["--roles", "admin"]).await;
    let scoped = token(&daemon, "scoped", &["--roles", "read", "--queues", "good"]).await;
    let tasks = json!([{"queue": "good", "key": "1"}, {"queue": "bad", "key": "1"}, {"queue": "bad", "key": "2"}]);
    assert_eq!(post(&daemon, "/v1/tasks", &all, tasks).await.0, 200);
    let books = async |path: &str, token: &str| {
        call(&daemon, Method::GET, path, Some(token), Value::Null).await
    };
    until("both are in Redis", async || {
        let (_, answer) = books("/v1/books", &all).await;
        let queues = answer["queues"].as_array().cloned().unwrap_or_default();
        queues.len() == 2
            && queues
                .iter()
                .all(|queue| queue["state"] == "BALANCED" && queue["held"]["sql"]["fresh"] == 0)
    })
    .await;
    // A token of one queue is told nothing that counts others.
    let (_, own) = books("/v1/books", &scoped).await;
    assert_eq!(
        (own.get("bus"), &own["rejected_elsewhere"]),
        (None, &json!(0)),
        "{own}"
    );
    assert!(books("/v1/books", &all).await.1["bus"]["pipeline"].is_u64());

    let mut redis = daemon.redis().await;
    for key in redis
        .keys::<_, Vec<String>>("taskd:{bad:*}:counters")
        .await
        .unwrap()
    {
        redis.set::<_, _, ()>(key, "damaged").await.unwrap();
    }
    until("the damage is seen", async || {
        books("/v1/books?queue=bad", &all).await.0 == 503
    })
    .await;
    let (_, problem) = books("/v1/books", &all).await;
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .contains("cannot read shard bad:"),
        "{problem}"
    );
    for (path, token) in [
        ("/v1/books?queue=good", &all),
        ("/v1/books?queue=good", &scoped),
        ("/v1/books", &scoped),
    ] {
        let (status, answer) = books(path, token).await;
        assert_eq!(
            (status, &answer["queues"][0]["queue"]),
            (200, &json!("good")),
            "{path}: {answer}"
        );
        assert_eq!(
            answer["queues"].as_array().unwrap().len(),
            1,
            "{path}: {answer}"
        );
    }
    let (code, said) = taskd(&daemon, &["good", "--token", &all]);
    assert_eq!(code, 0, "{said}");
}
