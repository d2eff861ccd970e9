//! Executions of workflows on SQLite, whose statements tests can watch.

use serde_json::{Value, json};

use crate::{
    columns::workflows::{deploy, show, taskd},
    support::{daemon::Daemon, until},
};

/// Completes the task of a queue, and returns its id.
async fn complete_one(daemon: &Daemon, queue: &str, result: Value) -> String {
    let task = daemon.lease_all("w", queue, 1).await.remove(0);
    let report = json!({"id": task["id"], "lease_token": task["lease_token"], "result": result});
    let body = json!({"worker": "w", "completions": [report]});
    let (_, answer) = daemon.post("/v1/tasks:complete", &body).await;
    assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
    task["id"].as_str().unwrap().to_owned()
}

/// Runs statements in the daemon's database.
fn sql(daemon: &Daemon, text: &str) {
    let database = rusqlite::Connection::open(daemon.data().join("taskd.db")).unwrap();
    let patience = std::time::Duration::from_secs(30);
    database.busy_timeout(patience).unwrap();
    database.execute_batch(text).unwrap();
}

const ONE: &str = r#"
document: { dsl: '1.0.3', namespace: a, name: one, version: '1.0.0' }
timeout: { after: P1D }
do:
  - work: { call: one }
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_execution_whose_step_was_lost_is_found_and_mended() {
    let daemon = Daemon::start("", &[]).await;
    assert_eq!(deploy(&daemon, ONE).await.0, 201);
    for id in ["lost", "waits"] {
        let start = json!({"id": id});
        let (status, _) = daemon
            .post("/v1/workflows/a/one/latest:start", &start)
            .await;
        assert_eq!(status, 202);
        until("it waits", async || {
            show(&daemon, id).await["status"] == "waiting"
        })
        .await;
        if id == "lost" {
            sql(
                &daemon,
                "CREATE TRIGGER loses BEFORE INSERT ON execution_inbox BEGIN SELECT RAISE(IGNORE); END",
            );
            let task = complete_one(&daemon, "one", json!(7)).await;
            until("its step is stored", async || {
                daemon.get(&format!("/v1/tasks/{task}")).await.1["status"] == "COMPLETED"
            })
            .await;
            sql(&daemon, "DROP TRIGGER loses");
        }
    }
    let fsck = |args: &[&str]| {
        let folder = daemon.data();
        let (code, found, _) = taskd(&daemon, &folder, &[&["fsck", "--json"], args].concat());
        let finds = found
            .lines()
            .map(|line| serde_json::from_str(line).unwrap());
        let finds: Vec<Value> = finds
            .filter(|find: &Value| find["kind"].is_string())
            .collect();
        (code, finds)
    };
    let lost = show(&daemon, "lost").await;
    let (code, finds) = fsck(&[]);
    assert_eq!((code, finds.len()), (1, 1), "{finds:?}");
    assert_eq!(finds[0]["kind"], "stranded_execution", "{finds:?}");
    let says = finds[0]["says"].as_str().unwrap();
    assert!(says.contains(lost["id"].as_str().unwrap()), "{says}");
    assert_eq!(fsck(&["--repair"]).0, 0);
    until("it completes", async || {
        show(&daemon, "lost").await["output"] == 7
    })
    .await;
    assert_eq!(fsck(&[]), (0, vec![]));
    assert_eq!(show(&daemon, "waits").await["status"], "waiting");
}

const COUNT: &str = r#"
document: { dsl: '1.0.3', namespace: a, name: count, version: '1.0.0' }
do:
  - count:
      set: { first: '${ .text[:2] }', length: '${ .text | length }' }
"#;

/// A round has room for some of them only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn executions_that_wait_for_their_first_round_keep_their_inputs() {
    const LENGTH: usize = 3_500_000;
    let mut daemon = Daemon::start("", &["--pipelines", "discovery"]).await;
    assert_eq!(deploy(&daemon, COUNT).await.0, 201);
    for n in 0..8 {
        let text = format!("{n}!{}", "x".repeat(LENGTH - 2));
        let start = json!({"id": format!("e{n}"), "input": {"text": text}});
        let (status, answer) = daemon
            .post("/v1/workflows/a/count/latest:start", &start)
            .await;
        assert_eq!(status, 202, "{answer}");
    }
    let deep = format!("{}{}", "[".repeat(121), "]".repeat(121));
    let deep: Value = serde_json::from_str(&deep).unwrap();
    let start = json!({"input": deep});
    let (status, answer) = daemon
        .post("/v1/workflows/a/count/latest:start", &start)
        .await;
    assert_eq!(
        (status, &answer["detail"]),
        (400, &json!("input has more than 120 levels"))
    );
    assert!(daemon.stop().await.success());
    let daemon = Daemon::start_in_the_folder_of(daemon, &["--pipelines", "all"]).await;
    for n in 0..8 {
        let id = format!("e{n}");
        let mut ended = Value::Null;
        until("it ends", async || {
            ended = show(&daemon, &id).await;
            ended["ended_at"].is_string()
        })
        .await;
        let output = json!({"first": format!("{n}!"), "length": LENGTH});
        assert_eq!(ended["output"], output, "{ended}");
    }
}

/// It takes thousands of tasks without a wait, and faults.
const BUSY: &str = r#"
document: { dsl: '1.0.3', namespace: a, name: busy, version: '1.0.0' }
do:
  - add: { set: { n: '${ (.n // 0) + 1 }' } }
  - again: { set: { n: '${ .n }' }, then: add }
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_execution_has_its_turn_while_others_compute() {
    let daemon = Daemon::start("", &[]).await;
    for text in [BUSY, COUNT] {
        assert_eq!(deploy(&daemon, text).await.0, 201);
    }
    for n in 0..30 {
        let start = json!({"id": format!("busy-{n}")});
        let (status, _) = daemon
            .post("/v1/workflows/a/busy/latest:start", &start)
            .await;
        assert_eq!(status, 202);
    }
    let start = json!({"input": {"text": "abc"}, "wait": "60s"});
    let (_, ended) = daemon
        .post("/v1/workflows/a/count/latest:start", &start)
        .await;
    assert_eq!(
        ended["output"],
        json!({"first": "ab", "length": 3}),
        "{ended}"
    );
    for n in 0..30 {
        let busy = show(&daemon, &format!("busy-{n}")).await;
        assert_eq!(busy["status"], "running", "{busy}");
    }
}

/// Each step of `many` has a payload that its queue refuses.
const REFUSED: &str = r#"
document: { dsl: '1.0.3', namespace: a, name: refused, version: '1.0.0' }
do:
  - many:
      for: { each: n, in: '[range(100)]' }
      do:
        - one:
            try: [{ call: { call: strict } }]
            catch: { as: e, do: [{ note: { set: '${ $e.detail }' } }] }
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_whose_tasks_are_invalid_are_errors_of_the_language() {
    let config = "[queues.strict]\npayload_schema = '{\"required\": [\"never\"]}'\n";
    let daemon = Daemon::start(config, &[]).await;
    assert_eq!(deploy(&daemon, REFUSED).await.0, 201);
    let (_, ended) = daemon
        .post(
            "/v1/workflows/a/refused/latest:start",
            &json!({"wait": "60s"}),
        )
        .await;
    assert_eq!(ended["status"], "completed", "{ended}");
    assert!(
        ended["output"].as_str().unwrap().contains("never"),
        "{ended}"
    );
}
