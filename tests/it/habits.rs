//! What people type out of habit, or by mistake: each is done, or told in one line with what to do.

use std::{
    fs,
    io::Write as _,
    process::{Command, Stdio},
};

use serde_json::json;

use crate::support::{daemon::Daemon, until};

/// A command for the taskd at `url`. Its worker has a name of its own.
fn command(url: &str, args: &[&str]) -> Command {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command
        .env_clear()
        .envs(own)
        .env("TASKD_URL", url)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Exit code, stdout and stderr.
fn run(url: &str, args: &[&str], stdin: &str) -> (i32, String, String) {
    let mut child = command(url, args).spawn().unwrap();
    // A command that reads nothing may have ended.
    drop(child.stdin.take().unwrap().write_all(stdin.as_bytes()));
    let output = child.wait_with_output().unwrap();
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (output.status.code().unwrap_or(-1), stdout, stderr)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_people_type_is_done_or_told_in_one_line() {
    let daemon = Daemon::start("", &[]).await;
    daemon
        .insert(&[
            json!({"queue": "demo", "key": "root"}),
            json!({"queue": "demo", "key": "other"}),
        ])
        .await;
    let id = daemon
        .insert(&[json!({"queue": "demo", "key": "third"})])
        .await
        .remove(0);
    until("they can be claimed", async || {
        daemon.queue("demo").await["waiting"] == 3
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let typo = folder.path().join("typo.toml");
    fs::write(&typo, "\nhttp_lisen = 1\n").unwrap();
    let typo = typo.to_str().unwrap();
    let lines = "{\"queue\":\"lines\",\"key\":\"a\"}\n{\"queue\":\"lines\",\"key\":\"b\",}\n";
    let grpc = daemon.grpc();

    // Arguments, exit code, and a part of stdout.
    let done: &[(&[&str], &str)] = &[
        (&["queues"], "\"queue\":\"demo\""),
        (&["stats", "demo"], "\"queue\":\"demo\""),
        (&["stats", "--queue", "demo"], "\"queue\":\"demo\""),
        (&["help"], "taskd --pipelines all"),
        (&["help", "insert"], "--priority"),
        (&["help", "dead", "retry"], "--reason"),
        (&["version"], "taskd 0."),
        (&["tasks", "demo"], "root"),
        (&["tasks", "--queue", "demo"], "root"),
        (&["tasks", "nothing"], "none\n"),
        (&["dead", "list", "demo"], "none\n"),
        (&["bulk", "list"], "none\n"),
        (&["task", "demo", "root"], "root"),
        (&["task", "--queue", "demo", "--key", "root"], "root"),
        (&["task", &id], "third"),
        (&["explain", "--queue", "demo", "root"], "key root"),
        (&["books", "--queue", "demo"], "demo"),
        (&["dump", "--queue", "demo"], "shard demo:"),
        (&["requeue", "demo", "root"], "1 of 1 tasks requeued"),
        (
            &["change", "demo", "root", "other", "--priority", "high"],
            "2 of 2 tasks changed",
        ),
        (&["cancel", "demo", "root"], "1 of 1 tasks cancelled"),
        (
            &["cancel", "--queue", "demo", "--key", "other"],
            "1 of 1 tasks cancelled",
        ),
        (&["pause", "--queue", "demo"], "queue demo is paused"),
        (&["resume", "demo"], "queue demo is resumed"),
        (&["fsck", "demo"], ""),
        (&["tasks", "demo", "--server", &grpc], "root"),
    ];
    for (args, want) in done {
        let (code, stdout, stderr) = run(&daemon.http(), args, "");
        assert!(
            code == 0 && stdout.contains(want),
            "{args:?}: {code} {stdout:?} {stderr:?} should say {want:?}"
        );
    }
    let (code, stdout, _) = run(&daemon.http(), &["tasks", "nothing", "--json"], "");
    assert_eq!((code, stdout.as_str()), (0, ""), "a program wants no word");

    // Arguments, stdin, exit code, and what the one line says.
    let told: &[(&[&str], &str, i32, &str)] = &[
        (&["list"], "", 2, "taskd tasks QUEUE lists tasks"),
        (&["serve"], "", 2, "taskd --pipelines all runs everything"),
        (&["start"], "", 2, "taskd --pipelines all runs everything"),
        (&["run"], "", 2, "taskd --pipelines all runs everything"),
        (&["server"], "", 2, "taskd --pipelines all runs everything"),
        (&["worker"], "", 2, "taskd work QUEUE -- COMMAND"),
        (&["jobs"], "", 2, "taskd bulk"),
        (&["sttas"], "", 2, "did you mean stats?"),
        (&["insrt"], "", 2, "there is no command insrt; taskd --help"),
        (&["canel"], "", 2, "there is no command canel; taskd --help"),
        (
            &["nosuchcmd"],
            "",
            2,
            "there is no command nosuchcmd; taskd --help",
        ),
        (
            &["stats", "--grpc", "x"],
            "",
            2,
            "--server URL (TASKD_URL) names taskd",
        ),
        (
            &["tasks", "--http", "x"],
            "",
            2,
            "--server URL (TASKD_URL) names taskd",
        ),
        (
            &["stats", "--server", &grpc],
            "",
            2,
            "names that one (7600)",
        ),
        (
            &["tasks", "--server", "127.0.0.1:1"],
            "",
            2,
            "is it running there?",
        ),
        (
            &["stats", "--server", "127.0.0.1:1"],
            "",
            2,
            "is it running there?",
        ),
        (&["stats", "nothing"], "", 1, "queue nothing is not open"),
        (&["task", "demo"], "", 2, "taskd task demo KEY"),
        (
            &["cancel", "demo"],
            "",
            2,
            "name a task by its queue and key: demo KEY",
        ),
        (&["task", "demo", "nokey"], "", 1, "nokey"),
        (&["explain", "demo", "nokey"], "", 1, "nokey"),
        (&["watch", "demo", "nokey"], "", 1, "nokey"),
        (&["dead", "show", "demo", "nokey"], "", 1, "nokey"),
        (&["tasks", "retry", "demo", "nokey"], "", 1, "nokey"),
        (
            &["tasks", "retry", "demo"],
            "",
            2,
            "say --dry-run to count them, or --yes",
        ),
        (
            &["tasks", "--status", "dead"],
            "",
            2,
            "--status needs a queue",
        ),
        (&["insert", "demo", "z"], "", 2, "taskd insert demo --key z"),
        (&["insert", "z"], "", 2, "taskd insert z FILE"),
        (
            &["work", "demo", "echo"],
            "",
            2,
            "taskd work QUEUE -- COMMAND",
        ),
        (
            &["work", "demo", "--", "nosuchcmd"],
            "",
            2,
            "there is no command \"nosuchcmd\"",
        ),
        (
            &["check-config", "--config", typo],
            "",
            2,
            "typo.toml:2: unknown key \"http_lisen\"; did you mean http_listen?",
        ),
    ];
    for (args, stdin, want_code, want) in told {
        let (code, stdout, stderr) = run(&daemon.http(), args, stdin);
        assert!(
            code == *want_code && stderr.contains(want) && stderr.lines().count() == 1,
            "{args:?}: {code} {stderr:?} should say {want:?}"
        );
        assert_eq!(stdout, "", "{args:?}");
    }

    // Some lines, with what became of the others.
    let (code, stdout, stderr) = run(&daemon.http(), &["insert", "-", "--json"], lines);
    assert!(
        code == 1
            && stdout.contains("\"rejected\":1")
            && stderr.contains("line 2: not JSON at column"),
        "{code} {stdout:?} {stderr:?}"
    );
    let (code, stdout, _) = run(&daemon.http(), &["cancel", "demo", "nokey"], "");
    assert_eq!((code, stdout.as_str()), (1, "0 of 1 tasks cancelled\n"));
    // No setting is taken for a variable of the clients.
    for (name, want) in [
        ("TASKD_HTTP_PORT", "did you mean TASKD_HTTP_LISTEN?"),
        ("TASKD_GRPC_URL", "did you mean TASKD_GRPC_LISTEN?"),
        ("TASKD_URI", "taskd --help lists the settings"),
    ] {
        let output = command("", &["--pipelines", "all"])
            .env(name, "7700")
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(2) && stderr.contains(want),
            "{stderr}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_insert_says_what_all_its_tasks_have_and_what_a_duplicate_is() {
    let daemon = Daemon::start("[queues.limited]\nlimit_by = \"given\"\n", &[]).await;
    let more = [
        "--priority",
        "high",
        "--delay",
        "1h",
        "--max-attempts",
        "7",
        "--header",
        "run=7",
    ];
    let args = [&["insert", "q", "--key", "one"][..], &more].concat();
    assert_eq!(run(&daemon.http(), &args, "").0, 0);
    let line =
        "{\"key\": \"line\", \"priority\": \"low\", \"headers\": {\"run\": \"1\", \"a\": \"b\"}}\n";
    let args = [&["insert", "q", "-"][..], &more].concat();
    assert_eq!(run(&daemon.http(), &args, line).0, 0);
    for (key, priority, headers) in [
        ("one", "high", json!({"run": "7"})),
        ("line", "low", json!({"run": "1", "a": "b"})),
    ] {
        let (code, shown, _) = run(&daemon.http(), &["task", "q", key, "--json"], "");
        let task: serde_json::Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(code, 0, "{shown}");
        assert_eq!(
            (&task["status"], &task["priority"], &task["headers"]),
            (&json!("DELAYED"), &json!(priority), &headers),
            "{shown}"
        );
    }
    let args = ["insert", "q", "--key", "two", "--max-attempts", "1001"];
    let (code, _, stderr) = run(&daemon.http(), &args, "");
    assert!(code == 2 && stderr.contains("max_attempts"), "{stderr}");
    let lines = "{\"key\": \"theirs\", \"limit_key\": \"b\"}\n{\"key\": \"own\"}\n";
    let args = ["insert", "limited", "-", "--limit-key", "a"];
    assert_eq!(run(&daemon.http(), &args, lines).0, 0);
    let leased = daemon.lease_all("w", "limited", 2).await;
    let mut keys: Vec<_> = leased
        .iter()
        .map(|task| (task["key"].as_str(), task["limit_key"].as_str()))
        .collect();
    keys.sort();
    assert_eq!(
        keys,
        [(Some("own"), Some("a")), (Some("theirs"), Some("b"))]
    );
    for (queue, limit_key, code, why) in [
        ("q", "a", 1, "the queue has no limit_by"),
        ("limited", "a\tb", 2, "control character"),
    ] {
        let args = ["insert", queue, "--key", "three", "--limit-key", limit_key];
        let answer = run(&daemon.http(), &args, "");
        assert!(answer.0 == code && answer.2.contains(why), "{answer:?}");
    }
    // The second insert of a key says how the first one ended.
    let (_, stdout, _) = run(&daemon.http(), &["insert", "q", "--key", "one"], "");
    assert!(
        stdout.contains("duplicate") && !stdout.contains("CANCELLED"),
        "{stdout}"
    );
    assert_eq!(run(&daemon.http(), &["cancel", "q", "one"], "").0, 0);
    until("SQL knows the end", async || {
        let (_, answer) = daemon
            .post("/v1/tasks", &json!({"queue": "q", "key": "one"}))
            .await;
        answer["results"][0]["task_status"] == "CANCELLED" || answer["task_status"] == "CANCELLED"
    })
    .await;
    let (_, stdout, _) = run(&daemon.http(), &["insert", "q", "--key", "one"], "");
    assert!(stdout.contains("CANCELLED 1"), "{stdout}");
}

/// With the default name, one program would do all the replicas of a task by starting again, and
/// two at a time would be one worker.
#[tokio::test(flavor = "multi_thread")]
async fn two_workers_of_one_machine_and_queue_have_two_names() {
    let daemon = Daemon::start("", &[]).await;
    daemon
        .insert(&[json!({"queue": "q", "key": "k", "replicas": 2})])
        .await;
    let url = daemon.http();
    let name = format!("host-{}", std::process::id());
    let work = |more: &[&str]| {
        let args = [&["work", "q"][..], more, &["--", "sh", "-c", "echo done"]].concat();
        let mut command = command(&url, &args);
        command.env("TASKD_WORKER", &name);
        command
    };
    let completed = async || {
        let (_, answer) = daemon.get("/v1/tasks?queue=q").await;
        answer["tasks"][0]["completed"].as_u64()
    };
    let mut first = work(&[]).spawn().unwrap();
    until("the first one completed it", async || {
        completed().await == Some(1)
    })
    .await;
    let second = work(&[]).output().unwrap();
    let said = String::from_utf8(second.stderr).unwrap();
    assert_eq!(
        (second.status.code(), said.lines().count()),
        (Some(2), 1),
        "{said}"
    );
    assert!(
        said.contains(&format!("a worker {name} of queue q")) && said.contains("--name"),
        "{said}"
    );
    // After a kill the name is free at once, and it is the same worker as before.
    first.kill().unwrap();
    first.wait().unwrap();
    // It cannot do the second replica, and is idle when the other worker has done that.
    let mut again = work(&["--exit-when-idle", "1s"]).spawn().unwrap();
    let other = work(&["--exit-when-idle", "1s", "--name", &format!("{name}-2")])
        .output()
        .unwrap();
    assert_eq!(other.status.code(), Some(0));
    assert_eq!(again.wait().unwrap().code(), Some(0));
    assert_eq!(completed().await, Some(2));
}
