//! Workflows through the running binary: executions go on whatever is killed.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use serde_json::{Value, json};

use crate::{
    column,
    support::{daemon::Daemon, until},
};

pub(crate) const ORDER: &str = r#"
document: { dsl: '1.0.3', namespace: shop, name: order, version: '1.0.0' }
do:
  - prepare:
      set: { amount: '${ .total * 2 }' }
  - charge:
      try:
        - pay:
            call: pay
            with: { amount: '${ .amount }' }
      catch:
        errors: { with: { status: 503 } }
        retry: { delay: { milliseconds: 200 }, limit: { attempt: { count: 3 } } }
  - cool:
      wait: { milliseconds: 300 }
  - ship:
      call: parcel
      with: { paid: '${ .paid }' }
      metadata: { taskd: { queue: ship, max_attempts: 2 } }
"#;

pub(crate) const START: &str = "/v1/workflows/shop/order/latest:start";

pub(crate) async fn deploy(daemon: &Daemon, text: &str) -> (u16, Value) {
    let client = reqwest::Client::new();
    let request = client
        .put(format!("{}/v1/workflows", daemon.http()))
        .header("content-type", "application/yaml")
        .body(text.to_owned());
    let answer = request.send().await.unwrap();
    let status = answer.status().as_u16();
    (status, answer.json().await.unwrap())
}

/// A worker of executions of [`ORDER`]. The first task of queue `pay` of each fails for good, with an
/// error of the language.
#[derive(Default)]
pub(crate) struct Worker {
    /// The payload of each task by its id: a task may be delivered again.
    pub(crate) tasks: BTreeMap<String, Value>,
    /// The task that fails, by its execution.
    fails: BTreeMap<String, String>,
}

impl Worker {
    /// Does the tasks that are there. Answers get lost while something is away.
    pub(crate) async fn work(&mut self, daemon: &Daemon) {
        let body =
            json!({"worker": "w", "queues": ["pay", "ship"], "max_tasks": 10, "wait": "20ms"});
        let Some((200, mut answer)) = daemon.try_post("/v1/tasks:get", &body).await else {
            return;
        };
        for task in answer["tasks"].as_array_mut().unwrap() {
            let id = task["id"].as_str().unwrap().to_owned();
            let payload = task["payload"].take();
            let before = self.tasks.insert(id.clone(), payload.clone());
            assert!(
                before.is_none_or(|before| before == payload),
                "{id} changed"
            );
            let mut report = json!({"id": id, "lease_token": task["lease_token"]});
            let is_pay = payload["path"] == "/do/1/charge/try/0/pay";
            let execution = task["headers"]["taskd-execution"].as_str().unwrap();
            let fails = self.fails.entry(execution.to_owned());
            if is_pay && *fails.or_insert_with(|| id.clone()) == id {
                let problem = json!({"type": "https://example.org/busy", "status": 503});
                report["retry"] = json!(false);
                report["reason"] = json!(problem.to_string());
                let body = json!({"worker": "w", "rejections": [report]});
                daemon.try_post("/v1/tasks:reject", &body).await;
                continue;
            }
            report["result"] = match is_pay {
                true => json!({"paid": payload["input"]["amount"]}),
                false => json!({"shipped": payload["input"]["paid"]}),
            };
            let body = json!({"worker": "w", "completions": [report]});
            daemon.try_post("/v1/tasks:complete", &body).await;
        }
    }
}

pub(crate) async fn show(daemon: &Daemon, id: &str) -> Value {
    match daemon.try_get(&format!("/v1/executions/{id}")).await {
        Some((200, execution)) => execution,
        _ => Value::Null,
    }
}

/// The history without its times and its execution.
pub(crate) async fn history(daemon: &Daemon, id: &str) -> Vec<Value> {
    let url = format!("{}/v1/executions/{id}/history", daemon.http());
    let answer = reqwest::get(url).await.unwrap();
    assert_eq!(answer.headers()["content-type"], "application/x-ndjson");
    let text = answer.text().await.unwrap();
    let event = |line: &str| {
        let mut event: Value = serde_json::from_str(line).unwrap();
        let fields = event.as_object_mut().unwrap();
        assert!(fields.remove("at").is_some());
        fields.remove("due");
        fields.remove("execution");
        event
    };
    text.lines().map(event).collect()
}

/// Runs an execution to its end, and kills taskd after each append that is seen. Returns its history
/// and the number of kills.
async fn run(daemon: &mut Daemon, given: &str, kills: bool) -> (Vec<Value>, usize) {
    let start = json!({"id": given, "input": {"total": 21}});
    let (status, execution) = daemon.post(START, &start).await;
    assert_eq!(status, 202, "{execution}");
    let mut worker = Worker::default();
    let (mut seen, mut killed) = (0, 0);
    if kills {
        daemon.kill9_and_restart();
        daemon.ready().await;
        let (status, again) = daemon.post(START, &start).await;
        assert_eq!((status, &again["id"]), (200, &execution["id"]), "{again}");
    }
    let mut ended = Value::Null;
    until("the execution ends", async || {
        ended = show(daemon, given).await;
        let events = ended["events"].as_u64().unwrap_or(seen);
        if kills && events > seen {
            seen = events;
            killed += 1;
            daemon.kill9_and_restart();
            daemon.ready().await;
        }
        worker.work(daemon).await;
        ended["ended_at"].is_string()
    })
    .await;
    assert_eq!(ended["status"], "completed", "{ended}");
    assert_eq!(ended["output"], json!({"shipped": 42}), "{ended}");
    assert_eq!(ended["input"], json!({"total": 21}), "{ended}");
    // Two tasks to pay, the first of which failed, and one to ship.
    assert_eq!(worker.tasks.len(), 3, "{:?}", worker.tasks);
    (history(daemon, given).await, killed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_execution_is_the_same_whatever_is_killed() {
    let mut daemon = column::start("", &[]).await;
    let (status, deployed) = deploy(&daemon, ORDER).await;
    assert_eq!(status, 201, "{deployed}");
    assert_eq!(deployed["queues"], json!(["pay", "ship"]));
    let (undisturbed, _) = run(&mut daemon, "calm", false).await;
    let kinds: Vec<&str> = undisturbed
        .iter()
        .filter_map(|one| one["kind"].as_str())
        .collect();
    for kind in [
        "started",
        "task_retried",
        "timer_fired",
        "step_ended",
        "completed",
    ] {
        assert!(kinds.contains(&kind), "{kinds:?}");
    }
    let (disturbed, killed) = run(&mut daemon, "killed", true).await;
    assert!(killed >= 5, "{killed}");
    assert_eq!(disturbed, undisturbed);
}

/// Runs a command of taskd. Returns its exit code and what it printed.
pub(crate) fn taskd(daemon: &Daemon, folder: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command.args(args).args(["--server", &daemon.http()]);
    let output = command.current_dir(folder).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

const SMALL: &str = r#"
document: { dsl: '1.0.3', namespace: a, name: small, version: '1.2.0' }
do:
  - work:
      call: small
      metadata: { taskd: { replicas: 3, agree: majority } }
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_deploy_start_show_and_cancel() {
    let daemon = column::start("", &[]).await;
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    let run = |args: &[&str]| taskd(&daemon, folder.path(), args);
    let value = |text: &str| -> Value { serde_json::from_str(text).unwrap() };
    write("small.yaml", SMALL);
    write("older.yaml", &SMALL.replace("1.2.0", "1.1.9"));
    write("other.yaml", &SMALL.replace("majority", "all"));
    write("own.yaml", &SMALL.replace("call: small", "call: wf.http"));
    let said = "workflow a/small/1.2.0 has no mistakes\n";
    let checked = run(&["workflow", "deploy", "--dry-run", "small.yaml"]);
    assert_eq!(checked, (0, said.to_owned(), String::new()));
    assert_eq!(run(&["workflow", "show", "a/small"]).0, 1);
    for became in ["is deployed", "was deployed already"] {
        let said = format!("workflow a/small/1.2.0 {became}\n");
        let deployed = run(&["workflow", "deploy", "small.yaml"]);
        assert_eq!(deployed, (0, said, String::new()));
    }
    assert_eq!(run(&["workflow", "deploy", "older.yaml"]).0, 0);
    let (code, _, error) = run(&["workflow", "deploy", "other.yaml"]);
    assert!(code == 2 && error.contains("another text"), "{error}");
    let (code, _, error) = run(&["workflow", "deploy", "own.yaml"]);
    assert!(code == 1 && error.starts_with("own.yaml:"), "{error}");
    assert!(error.contains("which taskd sends itself"), "{error}");

    let (code, started, error) = run(&["execution", "start", "a/small", "--id", "one"]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert_eq!(value(&started)["version"], "1.2.0");
    let (_, again, _) = run(&["execution", "start", "a/small", "--id", "one"]);
    assert_eq!(value(&again)["id"], value(&started)["id"]);
    // Two of three workers agree.
    for (worker, result) in [("u", 1), ("v", 2), ("w", 1)] {
        let task = daemon.lease_all(worker, "small", 1).await.remove(0);
        let report =
            json!({"id": task["id"], "lease_token": task["lease_token"], "result": result});
        let body = json!({"worker": worker, "completions": [report]});
        let (_, answer) = daemon.post("/v1/tasks:complete", &body).await;
        assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
    }
    until("it completes", async || {
        show(&daemon, "one").await["output"] == 1
    })
    .await;
    let (_, list, _) = run(&["execution", "list", "--workflow", "a/small", "--json"]);
    assert_eq!(value(&list)["status"], "completed", "{list}");
    let (_, events, _) = run(&["execution", "history", "one"]);
    assert_eq!(value(events.lines().last().unwrap())["kind"], "completed");

    run(&["execution", "start", "a/small", "--id", "two"]);
    until("it waits", async || {
        show(&daemon, "two").await["status"] == "waiting"
    })
    .await;
    let (_, shown, _) = run(&["execution", "show", "two"]);
    let wait = &value(&shown)["waits"][0];
    assert_eq!(
        (&wait["path"], &wait["on"]),
        (&json!("/do/0/work"), &json!("step"))
    );
    let task = wait["task"].as_str().unwrap().to_owned();
    let (code, _, error) = run(&["workflow", "delete", "a/small/1.2.0"]);
    assert!(
        code == 2 && error.contains("executions of a/small/1.2.0 run"),
        "{error}"
    );
    assert_eq!(run(&["execution", "cancel", "two"]).0, 0);
    until("it is cancelled", async || {
        show(&daemon, "two").await["status"] == "cancelled"
    })
    .await;
    until("its step is cancelled", async || {
        daemon.get(&format!("/v1/tasks/{task}")).await.1["status"] == "CANCELLED"
    })
    .await;
    let (code, _, error) = run(&["execution", "start", "a/small", "--id", &task]);
    assert!(code == 2 && error.contains("is a UUID"), "{error}");
    let (code, _, error) = run(&["execution", "cancel", "one"]);
    assert!(
        code == 2 && error.contains("has ended before: completed"),
        "{error}"
    );
    assert_eq!(run(&["workflow", "delete", "a/small/1.2.0"]).0, 0);
    let (_, again, _) = run(&["execution", "start", "a/small/1.2.0", "--id", "one"]);
    assert_eq!(
        value(&again)["status"],
        "completed",
        "a repeat, although it is deleted"
    );
    assert_eq!(run(&["execution", "cancel", "three"]).0, 1);
}

const ENDLESS: &str = r#"
document: { dsl: '1.0.3', namespace: a, name: endless, version: '1.0.0' }
do:
  - again:
      set: { n: 1 }
      then: again
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endless_execution_faults_and_its_neighbour_goes_on() {
    let daemon = column::start("", &[]).await;
    assert_eq!(deploy(&daemon, ENDLESS).await.0, 201);
    assert_eq!(deploy(&daemon, SMALL).await.0, 201);
    let endless = "/v1/workflows/a/endless/latest:start";
    for id in ["e1", "e2"] {
        assert_eq!(daemon.post(endless, &json!({"id": id})).await.0, 202);
    }
    let small = "/v1/workflows/a/small/latest:start";
    assert_eq!(daemon.post(small, &json!({"id": "s"})).await.0, 202);
    until("the neighbour waits", async || {
        show(&daemon, "s").await["status"] == "waiting"
    })
    .await;
    until("it faults", async || {
        show(&daemon, "e2").await["status"] == "faulted"
    })
    .await;
    let faulted = show(&daemon, "e2").await;
    let detail = faulted["error"]["detail"].as_str().unwrap();
    assert!(detail.contains("10000"), "{faulted}");
}
