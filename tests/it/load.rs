//! `taskd load`: what was asked for, and what happened.

use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::support::{daemon::Daemon, until};

/// Exit code, stdout, stderr.
async fn load(args: Vec<String>) -> (i32, String, String) {
    let run = move || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TASKD_"))
        {
            command.env_remove(name);
        }
        command.arg("load").args(args).output().unwrap()
    };
    let Output {
        status,
        stdout,
        stderr,
    } = tokio::task::spawn_blocking(run).await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

fn args(daemon: &Daemon, more: &[&str]) -> Vec<String> {
    let grpc = daemon.grpc();
    ["--server", &grpc, "--rate", "500", "--duration", "1s"]
        .iter()
        .chain(more)
        .map(ToString::to_string)
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn it_counts_what_it_asked_for() {
    let daemon = Daemon::start("", &[]).await;
    let shares = [
        "--workers",
        "120",
        "--duplicates",
        "20%",
        "--failing",
        "10%",
        "--dying",
        "5%",
        "--slow-time",
        "20ms",
    ];
    let (code, stdout, stderr) = load(args(&daemon, &[&shares[..], &["--json"]].concat())).await;
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        (&report["asked"], &report["wrong"]),
        (&report["happened"], &json!([]))
    );
    let asked = |name: &str| report["asked"][name].as_u64().unwrap();
    assert_eq!(asked("new") + asked("duplicates"), 500);
    assert_eq!(asked("completed") + asked("died"), asked("new"));
    assert!(
        ["duplicates", "died", "failed_once"]
            .iter()
            .all(|name| asked(name) > 0),
        "{report}"
    );
    let queue = daemon.queue(report["queue"].as_str().unwrap()).await;
    let counts = ["completed", "dead"].map(|name| queue[name].as_u64().unwrap());
    assert_eq!(counts, [asked("completed"), asked("died")]);
    let (code, table, _) = load(args(&daemon, &["--workers", "10"])).await;
    assert!(
        code == 0 && table.contains("asked for") && table.contains("insert to handler"),
        "{table}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taskd_that_is_killed_meanwhile_loses_and_doubles_nothing() {
    let mut daemon = Daemon::start("", &[]).await;
    let more = [
        "--duration",
        "4s",
        "--workers",
        "30",
        "--lease",
        "3s",
        "--failing",
        "0%",
        "--dying",
        "0%",
        "--json",
    ];
    let mut args = args(&daemon, &more);
    args.drain(4..6);
    let loaded = tokio::spawn(load(args));
    until("some are completed", async || {
        let Some((200, answer)) = daemon.try_get("/v1/queues").await else {
            return false;
        };
        answer["queues"][0]["completed"]
            .as_u64()
            .is_some_and(|completed| completed > 100)
    })
    .await;
    daemon.kill9_and_restart();
    daemon.ready().await;
    let (code, stdout, stderr) = loaded.await.unwrap();
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        report["books"]["completed"], report["asked"]["completed"],
        "{report}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn books_that_do_not_match_are_exit_code_1() {
    // Tasks that fail once are dead here, which is not as asked for.
    let daemon = Daemon::start("[queues.default]\nmax_attempts = 1\n", &[]).await;
    let (code, stdout, stderr) = load(args(
        &daemon,
        &[
            "--workers",
            "10",
            "--failing",
            "10%",
            "--give-up-after",
            "2s",
            "--json",
        ],
    ))
    .await;
    assert_eq!(code, 1, "{stdout}");
    assert!(stderr.contains("dead tasks in SQL: "), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_are_one_line() {
    let daemon = Daemon::start("auth = \"tokens\"\n", &[]).await;
    let cases: [(Vec<String>, &str); 4] = [
        (
            args(&daemon, &["--failing", "60%", "--dying", "60%"]),
            "more than 100%",
        ),
        (args(&daemon, &["--slow", "x"]), "is no share; write 10%"),
        (args(&daemon, &[]), "--token or TASKD_TOKEN"),
        (
            vec!["--server".to_owned(), "127.0.0.1:1".to_owned()],
            "cannot reach taskd",
        ),
    ];
    for (args, want) in cases {
        let (code, stdout, stderr) = load(args).await;
        assert_eq!(
            (code, stdout.as_str(), stderr.lines().count()),
            (2, "", 1),
            "{stderr}"
        );
        assert!(stderr.contains(want), "{stderr:?} should say {want:?}");
    }
}
