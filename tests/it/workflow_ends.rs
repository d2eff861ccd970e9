//! Executions whose ends somebody waits for: a start, a question, a command, a run without a server.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    path::Path,
    process::{Child, ChildStderr, Command, Output, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    columns::workflows::{deploy, taskd},
    support::{daemon::Daemon, until},
};

const DOUBLE: &str = r#"
document: { dsl: '1.0.3', namespace: a, name: double, version: '1.0.0' }
do:
  - double:
      set: { amount: '${ .total * 2 }' }
"#;

const FAILS: &str = r#"
document: { dsl: '1.0.3', namespace: a, name: fails, version: '1.0.0' }
do:
  - refuse:
      raise: { error: { type: 'https://example.org/errors/empty', status: 422, title: empty cart } }
"#;

const ASKS: &str = r#"
document: { dsl: '1.0.3', namespace: a, name: asks, version: '1.0.0' }
do:
  - ask:
      call: ask
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_and_a_question_wait_for_the_end() {
    let daemon = Daemon::start("", &[]).await;
    for text in [DOUBLE, FAILS, ASKS] {
        assert_eq!(deploy(&daemon, text).await.0, 201);
    }
    let start = |name: &str| format!("/v1/workflows/a/{name}/latest:start");
    let body = json!({"input": {"total": 21}, "wait": "30s"});
    let (status, ended) = daemon.post(&start("double"), &body).await;
    assert_eq!((status, &ended["status"]), (200, &json!("completed")));
    assert_eq!(ended["output"], json!({"amount": 42}), "{ended}");
    let (status, ended) = daemon.post(&start("fails"), &json!({"wait": "30s"})).await;
    assert_eq!((status, &ended["status"]), (200, &json!("faulted")));
    assert_eq!(ended["error"]["title"], "empty cart", "{ended}");
    let (status, answer) = daemon
        .post(&start("double"), &json!({"wait": "soon"}))
        .await;
    assert_eq!(status, 400, "{answer}");

    let body = json!({"id": "one", "wait": "50ms"});
    let (status, open) = daemon.post(&start("asks"), &body).await;
    assert_eq!((status, &open["ended_at"]), (202, &Value::Null), "{open}");
    let (status, open) = daemon.get("/v1/executions/one?wait=50ms").await;
    assert_eq!((status, &open["ended_at"]), (200, &Value::Null), "{open}");
    let (status, answer) = daemon.get("/v1/executions/two?wait=50ms").await;
    assert_eq!(status, 404, "{answer}");
    // All who wait hear of the end, and so does a start that comes again.
    let work = async {
        until("many wait", async || {
            let (_, metrics) = daemon.get("/metrics").await;
            let mut lines = metrics.as_str().unwrap().lines();
            lines.any(|line| line == "taskd_waiting_calls 21")
        })
        .await;
        let tasks = daemon.lease_all("w", "ask", 1).await;
        daemon.complete("w", &tasks).await;
    };
    let questions = (0..20).map(|_| daemon.get("/v1/executions/one?wait=50s"));
    let body = json!({"id": "one", "wait": "50s"});
    let path = start("asks");
    let (answers, again, ()) = tokio::join!(
        futures::future::join_all(questions),
        daemon.post(&path, &body),
        work
    );
    for (status, ended) in answers.into_iter().chain([again]) {
        assert_eq!((status, &ended["status"]), (200, &json!("completed")));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_waits_and_says_how_an_execution_ended() {
    let daemon = Daemon::start("", &[]).await;
    for text in [DOUBLE, FAILS, ASKS] {
        assert_eq!(deploy(&daemon, text).await.0, 201);
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("in.json"), r#"{"total": 4}"#).unwrap();
    let start = |args: &[&str]| {
        let args = [&["execution", "start"], args].concat();
        taskd(&daemon, folder.path(), &args)
    };
    let (code, stdout, stderr) =
        start(&["a/double", "--input", r#"{"total": 4}"#, "--wait", "30s"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let ended: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(ended["output"], json!({"amount": 8}), "{ended}");
    let (code, _, stderr) = start(&["a/fails", "--wait", "30s"]);
    assert_eq!((code, stderr.lines().count()), (3, 1), "{stderr}");
    let said = "faulted: https://example.org/errors/empty (422) at /do/0/refuse: empty cart\n";
    assert!(stderr.ends_with(said), "{stderr}");
    let (code, stdout, stderr) = start(&["a/asks", "--wait", "100ms"]);
    assert_eq!((code, stderr.lines().count()), (1, 1), "{stderr}");
    assert!(stderr.contains("has not ended"), "{stderr}");
    let open: Value = serde_json::from_str(&stdout).unwrap();
    assert!(open["ended_at"].is_null(), "{open}");
    assert_eq!(start(&["a/nothing", "--wait", "1s"]).0, 1);
}

/// `taskd workflow run` in a folder, which is also its TMPDIR.
fn run_command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let tmpdir = folder.join("tmp");
    fs::create_dir_all(&tmpdir).unwrap();
    command
        .args(["workflow", "run"])
        .args(args)
        .current_dir(folder)
        .env("TMPDIR", tmpdir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Exit code, stdout, stderr.
fn printed(output: Output) -> (i32, String, String) {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

fn short_folder() -> tempfile::TempDir {
    // The path of a socket is limited to 107 bytes.
    let mut builder = tempfile::Builder::new();
    builder.prefix("taskd-it-").tempdir_in("/tmp").unwrap()
}

#[test]
fn a_file_runs_without_a_server() {
    let folder = short_folder();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    let run = |args: &[&str]| printed(run_command(folder.path(), args).output().unwrap());
    write("double.yaml", DOUBLE);
    write("in.json", r#"{"total": 21}"#);
    let (code, stdout, stderr) = run(&["double.yaml", "--input", "in.json"]);
    assert_eq!(
        (code, stdout.as_str()),
        (0, "{\"amount\":42}\n"),
        "{stderr}"
    );
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    let said = "taskd: workflow a/double/1.0.0 runs at http://127.0.0.1:";
    assert!(stderr.starts_with(said), "{stderr}");

    write("fails.yaml", FAILS);
    let (code, stdout, stderr) = run(&["fails.yaml"]);
    assert_eq!((code, stdout.as_str()), (3, ""), "{stderr}");
    let said = "faulted: https://example.org/errors/empty (422) at /do/0/refuse: empty cart\n";
    assert!(stderr.ends_with(said), "{stderr}");

    write(
        "wrong.yaml",
        &DOUBLE.replace("set:", "sett:").replace("1.0.3", "0.8"),
    );
    let (code, stdout, stderr) = run(&["wrong.yaml"]);
    assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
    let mut lines = stderr.lines();
    assert!(
        lines.next().unwrap().starts_with("wrong.yaml:2:"),
        "{stderr}"
    );
    assert!(
        lines.next().unwrap().starts_with("wrong.yaml:5:"),
        "{stderr}"
    );
    // What depends on the settings.
    let many = "call: ask\n      metadata: { taskd: { replicas: 5 } }\n";
    write("many.yaml", &ASKS.replace("call: ask\n", many));
    let (code, _, stderr) = run(&["many.yaml", "--set", "max_replicas=4"]);
    assert_eq!((code, stderr.lines().count()), (2, 1), "{stderr}");
    assert!(stderr.starts_with("many.yaml:4:5: replicas"), "{stderr}");
    for (args, why) in [
        (
            &["double.yaml", "--input", "double.yaml"][..],
            "is not JSON",
        ),
        (&["no.yaml"], "cannot read no.yaml"),
    ] {
        let (code, _, stderr) = run(args);
        assert_eq!((code, stderr.lines().count()), (2, 1), "{stderr}");
        assert!(stderr.contains(why), "{stderr}");
    }
    let left: Vec<_> = fs::read_dir(folder.path().join("tmp")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Starts a run, and returns it with the address that it names.
fn begin_run(folder: &Path) -> (Child, BufReader<ChildStderr>, String) {
    fs::write(folder.join("asks.yaml"), ASKS).unwrap();
    let mut run = run_command(folder, &["asks.yaml"]).spawn().unwrap();
    let mut stderr = BufReader::new(run.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    let address = line.split_once(" runs at ").expect(&line).1;
    let (url, rest) = address.split_once(' ').unwrap();
    assert!(rest.ends_with("for workers of ask\n"), "{line}");
    (run, stderr, url.to_owned())
}

#[test]
fn workers_come_to_a_run() {
    let folder = short_folder();
    let (run, _stderr, url) = begin_run(folder.path());
    let mut worker = Command::new(env!("CARGO_BIN_EXE_taskd"));
    worker.args(["work", "ask", "--server", &url, "--json-result"]);
    worker.args(["--", "printf", "%s", r#"{"answer": 42}"#]);
    let mut worker = worker
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (code, stdout, _) = printed(run.wait_with_output().unwrap());
    worker.kill().unwrap();
    worker.wait().unwrap();
    assert_eq!((code, stdout.as_str()), (0, "{\"answer\":42}\n"));
}

#[test]
fn a_run_that_is_interrupted_cancels_and_leaves_nothing() {
    let folder = short_folder();
    let (run, mut stderr, _) = begin_run(folder.path());
    kill(Pid::from_raw(run.id().cast_signed()), Signal::SIGINT).unwrap();
    let (code, stdout, _) = printed(run.wait_with_output().unwrap());
    let mut said = String::new();
    stderr.read_to_string(&mut said).unwrap();
    assert_eq!((code, stdout.as_str()), (3, ""), "{said}");
    assert!(said.ends_with(" was cancelled\n"), "{said}");
    let left: Vec<_> = fs::read_dir(folder.path().join("tmp")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}
