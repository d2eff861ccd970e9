//! `taskd work` and the crate `taskd-client`, with a running taskd.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use taskd_client::{
    Awaited, Client, Done, Error, Failure, InsertedAs, NewTask, Task, Worker,
    pb::{self, ItemStatus, TaskStatus},
};

use uuid::Uuid;

use crate::{
    support::{
        PATIENCE,
        daemon::Daemon,
        site::{Plan, Site, serve},
        until,
    },
    top::Terminal,
};

/// A `taskd work` for one queue, with a folder of its own.
struct Work {
    dir: tempfile::TempDir,
    args: Vec<String>,
}

impl Work {
    fn new(daemon: &Daemon, args: &[&str]) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("taskd-it-")
            .tempdir_in("/tmp")
            .unwrap();
        let mut all = vec![
            "work".to_owned(),
            "--server".to_owned(),
            daemon.http(),
            "--queue".to_owned(),
            "q".to_owned(),
        ];
        all.extend(args.iter().map(ToString::to_string));
        Self { dir, args: all }
    }

    /// A script in the folder.
    fn script(&self, text: &str) -> PathBuf {
        let path = self.dir.path().join("script");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        path
    }

    fn command(&self, command: &[&str]) -> Command {
        let mut program = Command::new(env!("CARGO_BIN_EXE_taskd"));
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TASKD_"))
        {
            program.env_remove(name);
        }
        program
            .env("TASKD_WORKER", format!("w-{}", Uuid::new_v4()))
            .args(&self.args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if !command.is_empty() {
            program.arg("--").args(command);
        }
        program.current_dir(self.dir.path());
        program
    }

    /// Runs until nothing comes; the lines, which have the statuses of the tasks.
    async fn run(&self, command: &[&str]) -> Vec<Value> {
        let (code, lines, stderr) = finish(self.command(command).spawn().unwrap()).await;
        assert_eq!((code, stderr.as_str()), (0, ""), "{lines:?}");
        lines
    }

    /// The line on stderr of a mistake, behind which nothing works.
    async fn refused(&self, command: &[&str]) -> String {
        let (code, lines, stderr) = finish(self.command(command).spawn().unwrap()).await;
        assert_eq!((code, stderr.lines().count()), (2, 1), "{stderr}");
        assert_eq!(lines, Vec::<Value>::new());
        stderr
    }
}

/// Exit code, JSON lines, stderr.
async fn finish(child: Child) -> (i32, Vec<Value>, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = tokio::task::spawn_blocking(move || child.wait_with_output().unwrap())
        .await
        .unwrap();
    let lines = String::from_utf8(stdout).unwrap();
    let lines = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    (
        status.code().unwrap_or(-1),
        lines,
        String::from_utf8(stderr).unwrap(),
    )
}

/// Reads the lines up to this event, which it answers. Those behind it are left to [`finish`].
async fn read_until(mut child: Child, event: &'static str) -> (Child, Value) {
    let worker = Pid::from_raw(i32::try_from(child.id()).unwrap());
    let read = tokio::task::spawn_blocking(move || {
        // A larger buffer would take more than a line.
        let lines = BufReader::with_capacity(1, child.stdout.as_mut().unwrap()).lines();
        let mut lines = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        let line = lines
            .find(|line| line["event"] == event)
            .expect("the event comes");
        drop(lines);
        (child, line)
    });
    tokio::time::timeout(PATIENCE, read)
        .await
        .map(Result::unwrap)
        .unwrap_or_else(|_| {
            // The reading ends with it.
            kill(worker, Signal::SIGKILL).unwrap();
            panic!("no event {event:?}");
        })
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
}

/// The outcomes of the tasks: key, status, reason.
fn outcomes(lines: &[Value]) -> Vec<(&str, &str, &str)> {
    let tasks = lines.iter().filter(|line| line["event"] == "task");
    let mut all: Vec<_> = tasks
        .map(|line| ["key", "status", "reason"].map(|field| line[field].as_str().unwrap()))
        .map(|[key, status, reason]| (key, status, reason))
        .collect();
    all.sort_unstable();
    all
}

/// The first result of a task, and its payload's kind.
async fn result(daemon: &Daemon, id: &str) -> Value {
    let mut result = Value::Null;
    until("the result is in SQL", async || {
        let (_, answer) = daemon.get(&format!("/v1/tasks/{id}/results")).await;
        result = answer["results"][0].clone();
        !result.is_null()
    })
    .await;
    result
}

const ONCE: &[&str] = &["--exit-when-idle", "5s"];
const QUICK: &str = "[queues.default]\nbackoff = [\"10ms\"]\nmax_attempts = 2\n";

#[tokio::test]
async fn a_terminal_shows_what_the_commands_print() {
    let daemon = Daemon::start("", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "k"})]).await;
    let name = format!("w-{}", Uuid::new_v4());
    let work = ["work", "q", "--server", &daemon.http(), "--name", &name];
    let mut work = Terminal::start(&[&work[..], &["--", "echo", "this is {key}"]].concat());
    until("it shows the line", async || {
        work.written().contains("k: this is k")
    })
    .await;
    work.signal(Signal::SIGTERM);
    assert!(work.end().await.success(), "{}", work.written());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_gets_the_task_and_its_output_is_the_result() {
    let daemon = Daemon::start("", &[]).await;
    let odd = "a b; touch pwned $(id) '\" {id}";
    let ids = daemon
        .insert(&[
            json!({"queue": "q", "key": odd, "payload": "hello", "headers": {"x-lang": "en"}}),
            json!({"queue": "q", "key": "second", "payload": {"n": 1}}),
        ])
        .await;
    let work = Work::new(&daemon, ONCE);
    let script = work.script(
        "printf '%s|%s|' \"$1\" \"$2\" \"$TASKD_QUEUE\" \"$TASKD_ATTEMPT\" \"$TASKD_HEADER_X_LANG\" \"$#\"; cat",
    );
    let lines = work
        .run(&[script.to_str().unwrap(), "key={key}", "{id}"])
        .await;
    assert_eq!(
        outcomes(&lines),
        [(odd, "completed", ""), ("second", "completed", "")]
    );
    assert_eq!(
        result(&daemon, &ids[0]).await["result"],
        format!("key={odd}|{}|q|1|en|2|hello", ids[0])
    );
    assert_eq!(
        result(&daemon, &ids[1]).await["result"],
        format!("key=second|{}|q|1||2|{{\"n\":1}}", ids[1])
    );
    let summary =
        json!({"event": "summary", "completed": 2, "rejected": 0, "given_back": 0, "lost": 0});
    assert_eq!(lines.last(), Some(&summary));
    assert_eq!(
        fs::read_dir(work.dir.path()).unwrap().count(),
        1,
        "no shell has read the key"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_payload_comes_as_a_file_and_json_as_the_result() {
    let daemon = Daemon::start("", &[]).await;
    let ids = daemon
        .insert(&[json!({"queue": "q", "key": "k", "payload": {"n": [1, 2]}})])
        .await;
    let work = Work::new(&daemon, &[ONCE, &["--json-result"]].concat());
    let lines = work.run(&["cat", "{file}"]).await;
    assert_eq!(outcomes(&lines), [("k", "completed", "")]);
    assert_eq!(
        result(&daemon, &ids[0]).await["result"],
        json!({"n": [1, 2]})
    );
    let ids = daemon
        .insert(&[json!({"queue": "q", "key": "mode", "payload": "secret"})])
        .await;
    let lines = Work::new(&daemon, ONCE)
        .run(&["stat", "-c", "%a", "{file}"])
        .await;
    assert_eq!(outcomes(&lines), [("mode", "completed", "")]);
    assert_eq!(
        result(&daemon, &ids[0]).await["result"],
        "600",
        "only this user may read it"
    );
    let ids = daemon
        .insert(&[json!({"queue": "q", "key": "own files"})])
        .await;
    Work::new(&daemon, ONCE).run(&["sh", "-c", "umask"]).await;
    let here = Command::new("sh")
        .args(["-c", "umask"])
        .output()
        .unwrap()
        .stdout;
    assert_eq!(
        result(&daemon, &ids[0]).await["result"],
        String::from_utf8(here).unwrap().trim()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_is_not_idle_while_a_command_runs() {
    let daemon = Daemon::start("", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "long"})]).await;
    let work = Work::new(&daemon, &[ONCE, &["--prefetch", "1"]].concat());
    let script = work.script("touch began; while [ ! -e end ]; do sleep 0.05; done");
    let mut child = work.command(&[script.to_str().unwrap()]).spawn().unwrap();
    until("the command runs", async || {
        work.dir.path().join("began").exists()
    })
    .await;
    let waiting = daemon
        .insert(&[json!({"queue": "q", "key": "cancelled"})])
        .await;
    until("the other waits here", async || {
        daemon.queue("q").await["assigned"] == 2
    })
    .await;
    assert_eq!(
        daemon
            .post("/v1/tasks:cancel", &json!({"ids": waiting}))
            .await
            .0,
        200
    );
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("lost") {
        line.clear();
        assert_ne!(
            stdout.read_line(&mut line).unwrap(),
            0,
            "the worker is there"
        );
    }
    let lost = std::time::Instant::now();
    until("a worker that is idle would end", async || {
        lost.elapsed() > Duration::from_secs(6)
    })
    .await;
    daemon.insert(&[json!({"queue": "q", "key": "next"})]).await;
    until("it waits here", async || {
        daemon.queue("q").await["assigned"] == 2
    })
    .await;
    fs::write(work.dir.path().join("end"), "").unwrap();
    until("all are done", async || {
        daemon.queue("q").await["completed"] == 2
    })
    .await;
    assert!(child.wait().unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn exit_codes_say_what_becomes_of_a_task() {
    let daemon = Daemon::start(QUICK, &[]).await;
    let keys = ["0", "3", "65", "kill"];
    let tasks = keys.map(|key| json!({"queue": "q", "key": key}));
    daemon.insert(&tasks).await;
    let work = Work::new(&daemon, &[ONCE, &["--concurrency", "4"]].concat());
    let script = work.script("echo \"no $1\" >&2; [ \"$1\" = kill ] && kill -9 $$; exit \"$1\"");
    let lines = work.run(&[script.to_str().unwrap(), "{key}"]).await;
    let killed = ("kill", "rejected", "signal: 9 (SIGKILL): no kill");
    let want = [
        ("0", "completed", ""),
        ("3", "rejected", "exit code 3: no 3"),
        ("3", "rejected", "exit code 3: no 3"),
        ("65", "rejected", "exit code 65: no 65"),
        killed,
        killed,
    ];
    assert_eq!(outcomes(&lines), want);
    until("three are dead", async || {
        daemon.queue("q").await["dead"] == 3
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_a_signal_met_at_its_start_is_started_again() {
    let daemon = Daemon::start(QUICK, &[]).await;
    daemon
        .insert(&["always", "once", "said"].map(|key| json!({"queue": "q", "key": key})))
        .await;
    let work = Work::new(&daemon, ONCE);
    let script = work.script(
        "echo >> $1; case $1 in said) echo; kill -INT $$;; always) kill -TERM $$;; esac; \
         [ $(wc -l < $1) = 1 ] && kill -TERM $$; exit 0",
    );
    let lines = work.run(&[script.to_str().unwrap(), "{key}"]).await;
    let (ended, said) = ("signal: 15 (SIGTERM)", "signal: 2 (SIGINT)");
    let want = [
        ("always", "rejected", ended),
        ("always", "rejected", ended),
        ("once", "completed", ""),
        ("said", "rejected", said),
        ("said", "rejected", said),
    ];
    assert_eq!(outcomes(&lines), want);
    let starts =
        ["always", "once", "said"].map(|key| fs::read(work.dir.path().join(key)).unwrap().len());
    assert_eq!(
        starts,
        [4, 2, 2],
        "once more for each attempt, unless the command had begun to write"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_discovers_tasks_in_two_ways() {
    let daemon = Daemon::start("", &[]).await;
    let ids = daemon.insert(&[json!({"queue": "q", "key": "root"})]).await;
    let work = Work::new(
        &daemon,
        &[
            ONCE,
            &[
                "--discover-fd",
                "--discover-prefix",
                "NEW ",
                "--discover-queue",
                "q",
            ],
        ]
        .concat(),
    );
    let script = work.script(
        "[ \"$1\" = root ] || exit 0\n\
         echo before; echo 'NEW a'; echo after; echo b >&3; echo '{\"queue\":\"other\",\"key\":\"c\"}' >&3; echo a >&3",
    );
    let lines = work.run(&[script.to_str().unwrap(), "{key}"]).await;
    let done = ["a", "b", "root"].map(|key| (key, "completed", ""));
    assert_eq!(outcomes(&lines), done);
    assert_eq!(result(&daemon, &ids[0]).await["result"], "before\nafter");
    assert_eq!(daemon.lease_all("w", "other", 1).await[0]["key"], "c");
}

/// As many links as a sitemap may have, and lines that are wrong.
const SITEMAP: usize = 50_000;

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_discovers_more_than_a_completion_has_is_done_and_wrong_lines_cost_only_themselves()
 {
    let daemon = Daemon::start("[queues.default]\nmax_attempts = 1\n", &[]).await;
    let ids = daemon.insert(&[json!({"queue": "q", "key": "root"})]).await;
    let work = Work::new(
        &daemon,
        &[ONCE, &["--discover-fd", "--discover-queue", "found"]].concat(),
    );
    let script = work.script(&format!(
        "{{ echo '{{\"kee\": 1}}'; echo '{{]'; seq -f 'http://example.org/%.0f' {SITEMAP}\n\
         head -c 5000 /dev/zero | tr '\\0' x; echo; echo '{{\"queue\": \"a b\", \"key\": \"c\"}}'; }} >&3; echo done"
    ));
    let lines = work.run(&[script.to_str().unwrap(), "{key}"]).await;
    assert_eq!(outcomes(&lines), [("root", "completed", "")]);
    let notes: Vec<&str> = lines
        .iter()
        .filter_map(|line| line["reason"].as_str())
        .collect();
    assert!(
        notes
            .iter()
            .any(|note| note.starts_with("2 discovered tasks are not stored; the first: line 1: "))
    );
    // These were inserted, as they came behind the first 10,000.
    assert!(notes.iter().any(|note| {
        note.starts_with("2 discovered tasks are not stored; the first: key has 5000")
    }));
    assert_eq!(result(&daemon, &ids[0]).await["result"], "done");
    until("all links are tasks", async || {
        daemon.unfinished("found").await == SITEMAP as u64
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_discovers_more_than_a_completion_has_is_done() {
    let daemon = Daemon::start("[queues.default]\nmax_attempts = 1\n", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "root"})]).await;
    let client = Client::new(daemon.grpc()).unwrap();
    let notes = Arc::<Mutex<Vec<String>>>::default();
    let worker = Worker::new("w", ["q"]).on_event({
        let notes = notes.clone();
        move |event| {
            if let taskd_client::Event::NotStored { task, reason } = event {
                notes
                    .lock()
                    .unwrap()
                    .push(format!("{}: {reason}", task.key()));
            }
        }
    });
    let stop = worker.stop();
    let handler = async |_: Task<()>| {
        let mut found: Vec<NewTask> = (0..20_000)
            .map(|n| NewTask::new("found", n.to_string()))
            .collect();
        found.insert(15_000, NewTask::new("found", vec![b'k'; 5000]));
        found.push(NewTask::new("found", "0"));
        Ok::<_, Failure>(Done::text("done").discover(found))
    };
    let done = async {
        until("it is completed", async || {
            daemon.queue("q").await["completed"] == 1
        })
        .await;
        stop.drain();
    };
    let (summary, ()) = tokio::join!(worker.run(&client, handler), done);
    assert_eq!(summary.unwrap().completed, 1);
    let note = "root: 1 discovered task is not stored: key has 5000 bytes; at most 4096";
    assert_eq!(*notes.lock().unwrap(), [note]);
    until("all links are tasks", async || {
        daemon.unfinished("found").await == 20_000
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_may_not_insert_says_so_and_tries_once() {
    let daemon = Daemon::start("auth = \"tokens\"\n", &[]).await;
    let token = |name: &str, roles: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        let args = ["token", "create", name, "--roles", roles, "--data-dir"];
        let output = command.args(args).arg(daemon.data()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let (all, own) = (token("all", "admin"), token("own", "work"));
    let client = |token: String| {
        Client::builder([daemon.grpc()])
            .token(token.parse().unwrap())
            .build()
            .unwrap()
    };
    let (all, own) = (client(all), client(own));
    until("the token is known", async || {
        all.insert([NewTask::new("q", "root")]).await.is_ok()
    })
    .await;
    let worker = Worker::new("w", ["q"]);
    let stop = worker.stop();
    let handler = async |_: Task<()>| {
        Ok::<_, Failure>(
            Done::new().discover((0..20_000).map(|n| NewTask::new("found", n.to_string()))),
        )
    };
    let reasons = Arc::<Mutex<Vec<String>>>::default();
    let worker = worker.on_event({
        let reasons = reasons.clone();
        move |event| {
            if let taskd_client::Event::Ended { reason, .. } = event {
                reasons.lock().unwrap().push(reason.to_owned());
                stop.drain();
            }
        }
    });
    let summary = worker.run(&own, handler).await.unwrap();
    assert_eq!(summary.rejected, 1);
    let reasons = reasons.lock().unwrap();
    assert!(reasons[0].contains("this call needs insert"), "{reasons:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_puts_its_task_off_at_no_cost() {
    let daemon = Daemon::start("[queues.default]\nmax_attempts = 1\n", &[]).await;
    let ids = daemon
        .insert(&["says", "default"].map(|key| json!({"queue": "q", "key": key})))
        .await;
    let work = Work::new(&daemon, &[ONCE, &["--put-off", "2s"]].concat());
    let script = work
        .script("echo >> $1; [ $(wc -l < $1) = 3 ] && exit 0; [ $1 = says ] && echo 1s; exit 75");
    let lines = work.run(&[script.to_str().unwrap(), "{key}"]).await;
    let [put_off, done] = [("given_back", "exit code 75"), ("completed", "")];
    let of =
        |key: &'static str, (status, reason): (&'static str, &'static str)| (key, status, reason);
    let want = ["default", "says"].map(|key| [of(key, done), of(key, put_off), of(key, put_off)]);
    assert_eq!(outcomes(&lines), want.concat());
    for id in ids {
        let (_, task) = daemon.get(&format!("/v1/tasks/{id}")).await;
        assert_eq!(task["attempts"], 0, "{task}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_puts_its_task_off_holds_the_others_of_its_limit_key() {
    let config = "[queues.q]\nlimit_by = \"given\"\nlimit_at_a_time = 1\nmax_attempts = 1\n";
    let daemon = Daemon::start(config, &[]).await;
    let tasks = ["a", "b", "c"].map(|key| json!({"queue": "q", "key": key, "limit_key": "host"}));
    let ids = daemon.insert(&tasks).await;
    let work = Work::new(&daemon, &[ONCE, &["--concurrency", "3"]].concat());
    let script = work.script(
        "if mkdir off 2>/dev/null; then date +%s%3N > off/at; echo 2s; exit 75; fi; date +%s%3N > $1.at",
    );
    let lines = work.run(&[script.to_str().unwrap(), "{key}"]).await;
    let ends: Vec<_> = outcomes(&lines).iter().map(|(_, end, _)| *end).collect();
    assert_eq!(ends.len(), 4, "{lines:?}");
    assert_eq!(ends.iter().filter(|end| **end == "given_back").count(), 1);
    let read = |name: &str| {
        let text = fs::read_to_string(work.dir.path().join(name)).unwrap();
        text.trim().parse::<u64>().unwrap()
    };
    let starts = ["a.at", "b.at", "c.at"].map(read);
    let put_off = read("off/at");
    assert!(
        starts.iter().all(|start| *start >= put_off + 2000),
        "{put_off} {starts:?}"
    );
    for id in ids {
        let (_, task) = daemon.get(&format!("/v1/tasks/{id}")).await;
        assert_eq!(task["attempts"], 0, "{task}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_worker_starts_nothing_until_then() {
    let daemon = Daemon::start("[queues.default]\nmax_attempts = 1\n", &[]).await;
    let tasks = ["a", "b", "c"].map(|key| json!({"queue": "q", "key": key}));
    let ids = daemon.insert(&tasks).await;
    let args = ["--throttle", "--put-off", "2s", "--prefetch", "1"];
    let work = Work::new(&daemon, &[ONCE, &args].concat());
    let script = work.script(
        "if mkdir off 2>/dev/null; then date +%s%3N > off/at; exit 75; fi; date +%s%3N > $1.at",
    );
    let lines = work.run(&[script.to_str().unwrap(), "{key}"]).await;
    let outcomes = outcomes(&lines);
    let completed = outcomes.iter().filter(|(_, end, _)| *end == "completed");
    assert_eq!(completed.count(), 3, "{lines:?}");
    let read = |name: &str| {
        let text = fs::read_to_string(work.dir.path().join(name)).unwrap();
        text.trim().parse::<u64>().unwrap()
    };
    let starts = ["a.at", "b.at", "c.at"].map(read);
    let put_off = read("off/at");
    assert!(
        starts.iter().all(|start| *start >= put_off + 2000),
        "{put_off} {starts:?}"
    );
    for id in ids {
        let (_, task) = daemon.get(&format!("/v1/tasks/{id}")).await;
        assert_eq!(task["attempts"], 0, "{task}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_crate_reports_a_pace_with_a_task_that_it_has_not_started() {
    let daemon = Daemon::start("[queues.q]\nlimit_by = \"given\"\n", &[]).await;
    daemon
        .insert(&[json!({"queue": "q", "key": "k", "limit_key": "host"})])
        .await;
    // Longer than taskd keeps the task from this worker without it.
    let pace = Duration::from_secs(3);
    let times = Arc::<Mutex<Vec<std::time::Instant>>>::default();
    let handled = times.clone();
    let worker = Worker::new("w", ["q"]);
    let stop = worker.stop();
    let handler = move |_: Task<()>| {
        let mut times = handled.lock().unwrap();
        times.push(std::time::Instant::now());
        let outcome = if times.len() == 1 {
            Err(Failure::new("not yet").not_started().pace(pace))
        } else {
            stop.drain();
            Ok(Done::new())
        };
        async move { outcome }
    };
    let client = Client::new(daemon.grpc()).unwrap();
    let summary = worker.run(&client, handler).await.unwrap();
    assert_eq!(summary.completed, 1);
    let times = times.lock().unwrap();
    assert!(times[1] - times[0] >= pace, "{times:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_wait_for_their_server_if_asked_to() {
    let mut daemon = Daemon::start("", &[]).await;
    daemon.kill9();
    let (grpc, http) = (daemon.grpc(), daemon.http());
    let command = |args: &[&str], stdin: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), stdin.as_bytes()).unwrap();
        child
    };
    let wait = ["--wait-for-server", "5m"];
    let refused = command(&["insert", "--queue", "q", "--server", &grpc], "a\n")
        .wait_with_output()
        .unwrap();
    assert_eq!(
        refused.status.code(),
        Some(2),
        "the default is unchanged: {refused:?}"
    );
    let short = [
        "insert",
        "--queue",
        "q",
        "--server",
        &grpc,
        "--wait-for-server",
        "1s",
    ];
    let refused = command(&short, "a\n").wait_with_output().unwrap();
    assert_eq!(
        refused.status.code(),
        Some(2),
        "a wait has an end: {refused:?}"
    );
    let calls = [
        command(
            &[&["insert", "--queue", "q", "--server", &grpc][..], &wait].concat(),
            "a\n",
        ),
        command(
            &[&["tasks", "--queue", "q", "--server", &grpc][..], &wait].concat(),
            "",
        ),
        command(&[&["stats", "--server", &http][..], &wait].concat(), ""),
        command(
            &[
                &[
                    "work",
                    "--queue",
                    "q",
                    "--server",
                    &grpc,
                    "--exit-when-idle",
                    "1s",
                ][..],
                &wait,
                &["--", "true"],
            ]
            .concat(),
            "",
        ),
    ];
    daemon.start_again();
    daemon.ready().await;
    for child in calls {
        let output = tokio::task::spawn_blocking(move || child.wait_with_output().unwrap())
            .await
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}

/// As a taskd does that is killed between the request and its answer.
#[tokio::test]
async fn a_command_that_waits_asks_again_after_its_connection_was_cut() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stats = |wait: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        command
            .args(["stats", "--once", "--server", &url])
            .args(wait)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let cut = async || {
        let asked = tokio::time::timeout(PATIENCE, listener.accept()).await;
        let (mut connection, _) = asked.expect("it asks").unwrap();
        tokio::io::AsyncReadExt::read(&mut connection, &mut [0; 1024])
            .await
            .unwrap();
    };

    let refused = stats(&[]);
    cut().await;
    let refused = refused.wait_with_output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");

    let mut waits = stats(&["--wait-for-server", "5m"]);
    cut().await;
    // It comes again.
    cut().await;
    waits.kill().unwrap();
    waits.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_is_kept_within_bounds() {
    let daemon = Daemon::start("[queues.default]\nmax_attempts = 1\n", &[]).await;
    let tasks = ["hang", "flood", "noise", "left"].map(|key| json!({"queue": "q", "key": key}));
    daemon.insert(&tasks).await;
    let args = [
        "--concurrency",
        "4",
        "--timeout",
        "10s",
        "--max-output",
        "10000",
    ];
    let work = Work::new(&daemon, &[ONCE, &args].concat());
    let script = work.script(
        "case $1 in\n\
         hang) sleep 600 & echo $! > hang.pid; wait;;\n\
         flood) exec yes;;\n\
         noise) head -c 1000000 /dev/zero | tr '\\0' x >&2; echo the end >&2; exit 1;;\n\
         left) sleep 600 & echo $! > left.pid;;\n\
         esac",
    );
    let lines = work.run(&[script.to_str().unwrap(), "{key}"]).await;
    let outcomes = outcomes(&lines);
    let reason = |key: &str| outcomes.iter().find(|outcome| outcome.0 == key).unwrap().2;
    assert_eq!(reason("hang"), "it took longer than 10s");
    assert_eq!(reason("flood"), "it wrote more than 10000 bytes (stdout)");
    assert!(
        reason("noise").ends_with("xthe end") && reason("noise").len() < 1100,
        "{}",
        reason("noise")
    );
    assert_eq!(
        reason("left"),
        "a process that it left behind keeps its output open"
    );
    for name in ["hang.pid", "left.pid"] {
        let pid = fs::read_to_string(work.dir.path().join(name))
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        until("the process is gone", async || is_gone(pid)).await;
    }
}

/// A zombie, which the reaper of the machine has not collected, is gone, too.
fn is_gone(pid: i32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return true;
    };
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| rest.trim_start().starts_with('Z'))
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_are_one_line() {
    let daemon = Daemon::start("auth = \"tokens\"\n", &[]).await;
    let work = Work::new(&daemon, &[]);
    let said = work.refused(&["no-such-command", "{key}"]).await;
    assert!(
        said.contains("there is no command \"no-such-command\""),
        "{said}"
    );
    fs::write(work.dir.path().join("plain"), "").unwrap();
    let said = work.refused(&["./plain"]).await;
    assert!(
        said.contains("./plain is not executable: chmod +x ./plain"),
        "{said}"
    );
    let said = work.refused(&["true"]).await;
    assert!(said.contains("--token or TASKD_TOKEN"), "{said}");
    let open = Daemon::start("", &[]).await;
    let mut named = Work::new(&open, &[]);
    named
        .args
        .extend(["--queue".to_owned(), "no queue".to_owned()]);
    let said = named.refused(&["true"]).await;
    assert!(said.contains("no queue"), "{said}");
    let mut nowhere = Work::new(&open, &[]);
    nowhere
        .args
        .extend(["--server".to_owned(), "127.0.0.1:1".to_owned()]);
    nowhere.args.drain(1..3);
    let said = nowhere.refused(&["true"]).await;
    assert!(
        said.contains("cannot reach taskd at http://127.0.0.1:1"),
        "{said}"
    );
    nowhere.args[4] = "u:s3cret@127.0.0.1:1".to_owned();
    let said = nowhere.refused(&["true"]).await;
    assert!(
        said.contains("cannot reach taskd at http://u:***@127.0.0.1:1"),
        "{said}"
    );
    let said = work.refused(&[]).await;
    assert!(said.contains("CMD"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_starts_for_no_task_ends_the_worker_and_costs_no_attempt() {
    let daemon = Daemon::start("[queues.default]\nmax_attempts = 1\n", &[]).await;
    daemon
        .insert(&["1", "2"].map(|key| json!({"queue": "q", "key": key})))
        .await;
    for (text, want) in [
        ("true", "first line such as #!/bin/sh"),
        ("#!/nowhere/sh", "first line (#!) names"),
    ] {
        let work = Work::new(&daemon, &[ONCE, &["--concurrency", "2"]].concat());
        fs::write(work.script(""), format!("{text}\n")).unwrap();
        let (code, lines, stderr) =
            finish(work.command(&["./script", "{key}"]).spawn().unwrap()).await;
        assert_eq!((code, stderr.lines().count()), (2, 1), "{stderr}");
        assert!(
            stderr.contains("cannot start ./script") && stderr.contains(want),
            "{stderr}"
        );
        assert!(
            lines.iter().any(|line| line["status"] == "given_back"),
            "{lines:?}"
        );
    }
    let tasks = daemon.lease_all("w", "q", 2).await;
    assert!(tasks.iter().all(|task| task["attempt"] == 1), "{tasks:?}");
    // A command of the task is the task's own mistake.
    let work = Work::new(&daemon, ONCE);
    daemon
        .insert(&[json!({"queue": "q", "key": "./nothing"})])
        .await;
    let lines = work.run(&["{key}"]).await;
    assert_eq!(outcomes(&lines)[0].1, "rejected", "{lines:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_that_closes_drains() {
    let daemon = Daemon::start("", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "1"})]).await;
    let work = Work::new(&daemon, &[]);
    let script = work.script("touch began; while [ ! -e end ]; do sleep 0.05; done");
    let child = work.command(&[script.to_str().unwrap()]).spawn().unwrap();
    until("the command runs", async || {
        work.dir.path().join("began").exists()
    })
    .await;
    signal(&child, Signal::SIGHUP);
    let (child, _) = read_until(child, "draining").await;
    // The kernel sends another one.
    signal(&child, Signal::SIGHUP);
    fs::write(work.dir.path().join("end"), "").unwrap();
    let (code, lines, stderr) = finish(child).await;
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert_eq!(outcomes(&lines), [("1", "completed", "")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_is_not_idle_while_taskd_does_not_answer() {
    let daemon = Daemon::start("", &[]).await;
    let task = json!({"queue": "q", "key": "1", "delay": "3s"});
    daemon.insert(&[task]).await;
    let work = Work::new(&daemon, &["--exit-when-idle", "1s"]);
    let (child, _) = read_until(work.command(&["true"]).spawn().unwrap(), "up").await;
    daemon.signal(Signal::SIGSTOP);
    let (child, _) = read_until(child, "away").await;
    daemon.signal(Signal::SIGCONT);
    let (code, lines, stderr) = finish(child).await;
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert_eq!(outcomes(&lines), [("1", "completed", "")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_drains_and_a_second_one_gives_back() {
    let daemon = Daemon::start("", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "1"})]).await;
    // It ends when there is a file `end`.
    let text = "touch began; while [ ! -e end ]; do sleep 0.05; done";
    let work = Work::new(&daemon, &[]);
    let script = work.script(text);
    let child = work.command(&[script.to_str().unwrap()]).spawn().unwrap();
    until("the command runs", async || {
        work.dir.path().join("began").exists()
    })
    .await;
    signal(&child, Signal::SIGINT);
    let (child, draining) = read_until(child, "draining").await;
    // It takes nothing new, and finishes this one.
    daemon.insert(&[json!({"queue": "q", "key": "2"})]).await;
    fs::write(work.dir.path().join("end"), "").unwrap();
    let (code, lines, stderr) = finish(child).await;
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert_eq!(outcomes(&lines), [("1", "completed", "")]);
    assert_eq!(
        draining["message"],
        "takes no more tasks, and finishes 1; a second Ctrl-C ends them at once"
    );

    let work = Work::new(&daemon, &[]);
    let script = work.script(&format!("echo $$ > pid; {text}"));
    let child = work.command(&[script.to_str().unwrap()]).spawn().unwrap();
    until("the command runs", async || {
        work.dir.path().join("began").exists()
    })
    .await;
    signal(&child, Signal::SIGTERM);
    signal(&child, Signal::SIGINT);
    let (code, lines, _) = finish(child).await;
    assert_eq!(
        (code, outcomes(&lines)),
        (0, vec![("2", "given_back", "the worker stopped")])
    );
    let pid = fs::read_to_string(work.dir.path().join("pid"))
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    until("the command is gone", async || is_gone(pid)).await;
    assert_eq!(
        daemon.lease_all("w", "q", 1).await[0]["key"],
        "2",
        "another worker gets it at once"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stalls_holds_up_neither_the_work_nor_the_stop() {
    let daemon = Daemon::start("", &[]).await;
    // More than a pipe holds.
    let keys = (0..200).map(|n| json!({"queue": "q", "key": format!("{n:01000}")}));
    daemon.insert(&keys.collect::<Vec<_>>()).await;
    let work = Work::new(&daemon, &["--concurrency", "8"]);
    let mut child = work.command(&["true"]).spawn().unwrap();
    until("all are completed", async || {
        daemon.queue("q").await["completed"] == 200
    })
    .await;
    signal(&child, Signal::SIGTERM);
    until("it ends", async || child.try_wait().unwrap().is_some()).await;
    let (code, stdout, stderr) = {
        let Output {
            status,
            stdout,
            stderr,
        } = child.wait_with_output().unwrap();
        (
            status.code(),
            String::from_utf8(stdout).unwrap(),
            String::from_utf8(stderr).unwrap(),
        )
    };
    assert_eq!(code, Some(0), "{stderr}");
    assert!(
        stderr.lines().count() == 1 && stderr.contains("lines of this worker in time"),
        "{stderr}"
    );
    // The last one may be cut.
    let (whole, _) = stdout.rsplit_once('\n').unwrap();
    let events: Vec<Value> = whole
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(events[0]["event"], "up");
    assert!(
        events.len() > 10 && events[1..].iter().all(|line| line["event"] == "task"),
        "{events:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn it_goes_on_when_taskd_was_killed_and_keeps_its_lease() {
    let mut daemon = Daemon::start("", &[]).await;
    let first = daemon
        .insert(&[json!({"queue": "q", "key": "long"})])
        .await
        .remove(0);
    let work = Work::new(&daemon, &["--lease", "2s"]);
    let script = work.script("echo x >> began; while [ ! -e end ]; do sleep 0.05; done");
    let child = work.command(&[script.to_str().unwrap()]).spawn().unwrap();
    until("the command runs", async || {
        work.dir.path().join("began").exists()
    })
    .await;
    // Longer than its lease: it is extended.
    let expires = async || {
        let (_, task) = daemon.get(&format!("/v1/tasks/{first}")).await;
        task["history"][0]["lease_expires_at"]
            .as_str()
            .map(ToOwned::to_owned)
    };
    let (mut seen, mut moves) = (expires().await, 0);
    until("the lease was extended three times", async || {
        let now = expires().await;
        moves += u32::from(now.is_some() && now != seen);
        seen = now;
        moves >= 3
    })
    .await;
    daemon.kill9_and_restart();
    daemon.ready().await;
    fs::write(work.dir.path().join("end"), "").unwrap();
    until("it is completed", async || {
        daemon.queue("q").await["completed"] == 1
    })
    .await;
    daemon.insert(&[json!({"queue": "q", "key": "next"})]).await;
    until("the next one, too", async || {
        daemon.queue("q").await["completed"] == 2
    })
    .await;
    signal(&child, Signal::SIGTERM);
    assert_eq!(finish(child).await.0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_without_taskd_ends_soon_and_says_what_was_not_reported() {
    let mut daemon = Daemon::start("", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "k"})]).await;
    let work = Work::new(&daemon, &[]);
    let script = work.script("touch began; while [ ! -e end ]; do sleep 0.05; done; touch ended");
    let busy = work.command(&[script.to_str().unwrap()]).spawn().unwrap();
    until("the command runs", async || {
        work.dir.path().join("began").exists()
    })
    .await;
    let mut other = Work::new(&daemon, &[]);
    other.args[4] = "other".to_owned();
    let mut idle = other.command(&["true"]).spawn().unwrap();
    daemon
        .insert(&[json!({"queue": "other", "key": "k"})])
        .await;
    let mut lines = BufReader::new(idle.stdout.take().unwrap()).lines();
    let is_done = move || lines.any(|line| line.unwrap().contains("\"status\":\"completed\""));
    assert!(
        tokio::task::spawn_blocking(is_done).await.unwrap(),
        "it has done its work"
    );
    daemon.kill9();
    fs::write(work.dir.path().join("end"), "").unwrap();
    until("the command has ended", async || {
        work.dir.path().join("ended").exists()
    })
    .await;
    signal(&busy, Signal::SIGTERM);
    signal(&idle, Signal::SIGTERM);
    // A drain may take more than ten minutes while commands run.
    let both = async { tokio::join!(finish(busy), finish(idle)) };
    let (busy, idle) = tokio::time::timeout(Duration::from_secs(120), both)
        .await
        .expect("they end");
    assert_eq!(busy.0, 2, "{busy:?}");
    assert!(
        busy.2.lines().count() == 1 && busy.2.contains("1 task is finished"),
        "{busy:?}"
    );
    assert_eq!(idle.0, 0, "{idle:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_crate_inserts_and_works_with_a_server_that_is_away_beside_it() {
    let daemon = Daemon::start("", &[]).await;
    let client = Client::builder(["127.0.0.1:1".to_owned(), daemon.grpc()])
        .build()
        .unwrap();
    let tasks =
        || (0..1200).map(|number| NewTask::new("q", number.to_string()).json(&number).unwrap());
    let inserted = client.insert(tasks()).await.unwrap();
    assert_eq!(inserted.len(), 1200);
    assert!(
        inserted
            .iter()
            .all(|one| one.status == InsertedAs::Created && !one.id.is_empty())
    );
    let again = client.insert(tasks()).await.unwrap();
    assert!(again.iter().all(|one| one.status == InsertedAs::Duplicate));
    let worker = Worker::new("w", ["q"])
        .concurrency(50)
        .prefetch(50)
        .wait(Duration::from_secs(1));
    let stop = worker.stop();
    let handler = async |task: Task<taskd_client::Json<u32>>| {
        let number = *task.payload;
        let found = (number < 100)
            .then(|| NewTask::new("q", format!("found-{number}")).json(&1000))
            .transpose()?;
        Ok::<_, Failure>(Done::json(&number)?.discover(found))
    };
    let done = async {
        until("all are completed", async || {
            daemon.queue("q").await["completed"] == 1300
        })
        .await;
        stop.drain();
    };
    let (summary, ()) = tokio::join!(worker.run(&client, handler), done);
    assert_eq!(summary.unwrap().completed, 1300);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_crate_inserts_and_waits_for_results_and_deadlines() {
    let daemon = Daemon::start("", &[]).await;
    let client = Client::new(daemon.grpc()).unwrap();
    let worker = Worker::new("w", ["q"]);
    let stop = worker.stop();
    let handler = async |task: Task<()>| Ok::<_, Failure>(Done::text(task.key().into_owned()));
    let tasks = [
        NewTask::new("q", "done"),
        NewTask::new("q", vec![b'k'; 5000]),
        // Nobody works on this one.
        NewTask::new("other", "dead").finish_within(Duration::from_millis(500)),
    ];
    let inserts = async {
        let ended = client
            .insert_and_wait(tasks.clone(), PATIENCE)
            .await
            .unwrap();
        let again = client
            .insert_and_wait(tasks[..1].to_vec(), PATIENCE)
            .await
            .unwrap()
            .remove(0);
        stop.drain();
        (ended, again)
    };
    let (summary, (ended, again)) = tokio::join!(worker.run(&client, handler), inserts);
    assert_eq!(summary.unwrap().completed, 1);
    assert!(!ended.iter().any(Awaited::is_open), "{ended:?}");
    let inserted = [
        ended[0].inserted.status,
        ended[1].inserted.status,
        again.inserted.status,
    ];
    assert_eq!(
        inserted,
        [
            InsertedAs::Created,
            InsertedAs::Rejected,
            InsertedAs::Duplicate
        ]
    );
    assert_eq!(
        [ended[0].status, ended[2].status],
        [TaskStatus::Completed, TaskStatus::Dead]
    );
    for one in [&ended[0], &again] {
        assert_eq!(one.results[0].result, "done");
    }
    let open = client
        .insert_and_wait([NewTask::new("other", "open")], Duration::from_millis(100))
        .await
        .unwrap();
    assert!(open[0].is_open(), "{open:?}");

    // The plain calls.
    let id = &open[0].inserted.id;
    let read = client.get(id).await.unwrap();
    assert_eq!(
        (read.queue.as_str(), &read.key[..]),
        ("other", &b"open"[..])
    );
    let request = pb::ListTasksRequest {
        filter: Some(pb::TaskFilter {
            queue: "other".into(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let listed = client.list(request).await.unwrap();
    assert_eq!(listed.tasks.len(), 2, "{listed:?}");
    let explained = client
        .explain(pb::ExplainTaskRequest {
            id: id.clone(),
            worker: "w".into(),
            ..Default::default()
        })
        .await
        .unwrap();
    assert!(explained.worker.is_some_and(|worker| worker.may_get));
    let waits = client.wait(id, PATIENCE);
    let cancels = client.cancel([id.clone()]);
    let (ended, cancelled) = tokio::join!(waits, cancels);
    assert_eq!(cancelled.unwrap()[0].status(), ItemStatus::Ok);
    assert_eq!(ended.unwrap().status(), TaskStatus::Cancelled);
    let unknown = client.get("01a226ec-78b4-7000-9977-149d8f513d81").await;
    assert!(matches!(unknown, Err(Error::Refused { .. })), "{unknown:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_crate_inserts_tasks_apart_that_are_too_large_together() {
    let limits =
        "max_payload_bytes = \"1MiB\"\nmax_result_bytes = \"1MiB\"\nmax_request_bytes = \"1MiB\"\n";
    let daemon = Daemon::start(limits, &[]).await;
    let client = Client::new(daemon.grpc()).unwrap();
    let task = |n: usize| {
        NewTask::new("q", n.to_string()).bytes(vec![0; if n == 2 { 2 << 20 } else { 400 << 10 }])
    };
    let inserted = client.insert((0..6).map(task)).await.unwrap();
    let rejected: Vec<bool> = inserted
        .iter()
        .map(|one| one.status == InsertedAs::Rejected)
        .collect();
    assert_eq!(
        rejected,
        [false, false, true, false, false, false],
        "{inserted:?}"
    );
    assert_eq!(daemon.unfinished("q").await, 5);
}

/// A site on loopback: two pages, a redirect, a file, and links to nothing.
async fn site() -> String {
    use axum::{
        Router,
        http::{StatusCode, header},
        response::{Html, IntoResponse as _, Redirect},
        routing::get,
    };
    let page = |text: &'static str| get(async move || Html(text));
    fn raw(text: &str) -> header::HeaderValue {
        header::HeaderValue::from_bytes(text.as_bytes()).unwrap()
    }
    let router = Router::new()
        .route("/", page("<a href=\"two.html\">2</a> <a href=\"/gone\">gone</a> <a href=\"mailto:a@b\">m</a>"))
        .route("/two.html", page("<a href=\"/\">1</a> <a href=\"/moved#x\">m</a> <a href=\"big.bin\">b</a>"))
        .route("/moved", get(async || Redirect::permanent("/two.html")))
        .route("/round", get(async || Redirect::temporary("/round")))
        .route("/big.bin", get(async || vec![0_u8; 100_000]))
        .route("/start", get(async || (StatusCode::FOUND, [(header::LOCATION, raw("/café?q=ü"))])))
        .route("/caf%C3%A9", get(async || ([(header::CONTENT_TYPE, raw("text/ä"))], "found")))
        .route(
            "/limited",
            get({
                let asked = Arc::<std::sync::atomic::AtomicU32>::default();
                async move || match asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
                    0..6 => (StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, "1")]).into_response(),
                    _ => "at last".into_response(),
                }
            }),
        )
        .route("/busy", get(async || (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")]).into_response()));
    serve(router).await
}

#[tokio::test(flavor = "multi_thread")]
async fn urls_are_checked() {
    let (daemon, site) = (
        Daemon::start("[queues.default]\nmax_attempts = 1\n", &[]).await,
        site().await,
    );
    let keys = [
        "/two.html",
        "/moved",
        "/gone",
        "/big.bin",
        "/round",
        "/busy",
    ]
    .map(|path| format!("{site}{path}"));
    let strange = [
        "ftp://127.0.0.1/x".to_owned(),
        "http://127.0.0.1:1/".to_owned(),
    ];
    let tasks: Vec<_> = keys
        .iter()
        .chain(&strange)
        .map(|key| json!({"queue": "q", "key": key}))
        .collect();
    let ids = daemon.insert(&tasks).await;
    let args = [
        "--http-check",
        "--concurrency",
        "8",
        "--max-body",
        "1000",
        "--user-agent",
        "tests (nobody@example.org)",
    ];
    let work = Work::new(&daemon, &[ONCE, &args].concat());
    // A site that is busy is asked again for hours, and the worker stays for it.
    let cancelled = async {
        until("the others are finished", async || {
            let queue = daemon.queue("q").await;
            queue["completed"] == 4 && queue["dead"] == 3 && queue["delayed"] == 1
        })
        .await;
        let (status, _) = daemon
            .post("/v1/tasks:cancel", &json!({"ids": [ids[5]]}))
            .await;
        assert_eq!(status, 200);
    };
    let (lines, ()) = tokio::join!(work.run(&[]), cancelled);
    let outcomes = outcomes(&lines);
    let reason = |key: &str| outcomes.iter().find(|outcome| outcome.0 == key).unwrap().2;
    assert!(
        reason(&keys[4]).contains("more than 5 redirects"),
        "{outcomes:?}"
    );
    assert!(
        reason(&keys[5]).contains("503 Service Unavailable with Retry-After"),
        "{outcomes:?}"
    );
    assert_eq!(
        reason(&strange[0]),
        "the key is no URL with http:// or https://"
    );
    assert!(
        reason(&strange[1]).contains("cannot connect"),
        "{outcomes:?}"
    );
    let mut results = Vec::new();
    for id in &ids[..4] {
        results.push(result(&daemon, id).await["result"].clone());
    }
    let statuses: Vec<_> = results
        .iter()
        .map(|result| result["status"].as_u64().unwrap())
        .collect();
    assert_eq!(statuses, [200, 200, 404, 200]);
    assert_eq!(
        results[1]["redirects"],
        json!([{"status": 308, "to": format!("{site}/two.html")}])
    );
    assert_eq!(
        (&results[1]["final_url"], &results[1]["method"]),
        (&json!(format!("{site}/two.html")), &json!("GET"))
    );
    assert_eq!(results[3]["bytes"], 1000);
    assert_eq!(
        (&results[3]["truncated"], &results[3]["content_length"]),
        (&json!(true), &json!(100_000))
    );
    assert_eq!(results[0]["content_type"], "text/html; charset=utf-8");
    assert!(
        results[0]["seconds"].as_f64().unwrap() > 0.0 && results[0]["tls_expires_at"].is_null()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_follows_a_location_that_is_not_ascii() {
    let (daemon, site) = (Daemon::start("", &[]).await, site().await);
    let ids = daemon
        .insert(&[json!({"queue": "q", "key": format!("{site}/start")})])
        .await;
    Work::new(&daemon, &[ONCE, &["--http-check"]].concat())
        .run(&[])
        .await;
    let found = result(&daemon, &ids[0]).await["result"].take();
    assert_eq!(
        (&found["status"], &found["content_type"]),
        (&json!(200), &json!("text/ä")),
        "{found}"
    );
    assert_eq!(found["final_url"], format!("{site}/caf%C3%A9?q=%C3%BC"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_asks_to_wait_costs_no_attempt() {
    let (daemon, site) = (
        Daemon::start("[queues.default]\nmax_attempts = 1\n", &[]).await,
        site().await,
    );
    let ids = daemon
        .insert(&[json!({"queue": "q", "key": format!("{site}/limited")})])
        .await;
    let lines = Work::new(&daemon, &[ONCE, &["--http-check"]].concat())
        .run(&[])
        .await;
    let statuses: Vec<&str> = outcomes(&lines)
        .iter()
        .map(|(_, status, _)| *status)
        .collect();
    assert_eq!(
        statuses,
        [
            "completed",
            "given_back",
            "given_back",
            "given_back",
            "given_back",
            "given_back",
            "given_back"
        ]
    );
    assert_eq!(result(&daemon, &ids[0]).await["result"]["status"], 200);
    let (_, task) = daemon.get(&format!("/v1/tasks/{}", ids[0])).await;
    assert_eq!(task["attempts"], 0, "{task}");
}

#[tokio::test(flavor = "multi_thread")]
async fn checks_of_a_limited_queue_hold_their_host_and_leave_the_spacing_to_taskd() {
    use axum::http::StatusCode;
    let config = "[queues.q]\nlimit_by = \"host\"\nlimit_at_a_time = 1\nmax_attempts = 1\n";
    let daemon = Daemon::start(config, &[]).await;
    let site = Site::start(Plan {
        hosts: 3,
        pages: 4,
        latency: Duration::ZERO,
        crawl_delay: None,
    })
    .await;
    let hold = Duration::from_secs(2);
    site.order(1, 2, StatusCode::TOO_MANY_REQUESTS, hold);
    site.order(2, 1, StatusCode::SERVICE_UNAVAILABLE, hold);
    let tasks: Vec<_> = site
        .pages()
        .iter()
        .map(|url| json!({"queue": "q", "key": url}))
        .collect();
    let ids = daemon.insert(&tasks).await;
    // With this delay of its own, a worker would not come to the second page of a host.
    let args = [
        "--http-check",
        "--concurrency",
        "8",
        "--host-delay",
        "1h",
        "--per-host",
        "1",
    ];
    let work = Work::new(&daemon, &[ONCE, &args].concat());
    let lines = work.run(&[]).await;
    let count = |status| {
        let outcomes = outcomes(&lines);
        outcomes.iter().filter(|(_, of, _)| *of == status).count()
    };
    assert_eq!((count("completed"), count("given_back")), (12, 3));
    for host in site.hosts() {
        let seen = site.seen(host);
        assert_eq!(seen.answered().len(), 4, "{seen:?}");
        assert_eq!((seen.most, seen.in_holds), (1, 0), "{seen:?}");
    }
    for id in ids {
        let (_, task) = daemon.get(&format!("/v1/tasks/{id}")).await;
        assert_eq!(task["attempts"], 0, "{task}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_that_waits_too_long_for_its_host_goes_back_at_no_cost() {
    let (daemon, site) = (
        Daemon::start("[queues.default]\nmax_attempts = 1\n", &[]).await,
        site().await,
    );
    daemon
        .insert(
            &["/two.html", "/gone"]
                .map(|path| json!({"queue": "q", "key": format!("{site}{path}")})),
        )
        .await;
    let check = ["--http-check", "--concurrency", "2", "--timeout", "5s"];
    let slow = Work::new(&daemon, &[&check[..], &["--host-delay", "1h"]].concat());
    let mut child = slow.command(&[]).spawn().unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    let outcome = move || {
        let mut tasks = stdout
            .lines()
            .map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        tasks.find(|line| line["event"] == "task" && line["status"] != "completed")
    };
    let outcome = tokio::task::spawn_blocking(outcome).await.unwrap().unwrap();
    assert_eq!(outcome["status"], "given_back", "{outcome}");
    assert!(
        outcome["reason"]
            .as_str()
            .unwrap()
            .ends_with("no turn at its host within 5s"),
        "{outcome}"
    );
    signal(&child, Signal::SIGTERM);
    assert_eq!(finish(child).await.0, 0);
    Work::new(&daemon, &[ONCE, &check].concat()).run(&[]).await;
    let queue = daemon.queue("q").await;
    assert_eq!(
        (&queue["completed"], &queue["dead"]),
        (&json!(2), &json!(0)),
        "{queue}"
    );
}

/// A server whose answers break off.
async fn broken_server() -> String {
    use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            // The whole request: a close with bytes unread would reset the connection.
            let mut request = tokio::io::BufReader::new(&mut socket).lines();
            while request
                .next_line()
                .await
                .is_ok_and(|line| line.is_some_and(|line| !line.is_empty()))
            {}
            let answer =
                "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 1000\r\n\r\nshort";
            socket.write_all(answer.as_bytes()).await.ok();
        }
    });
    format!("http://{address}/")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_knows_pages_without_links_brackets_and_answers_that_are_too_large_or_break_off()
 {
    use axum::{
        Router,
        extract::Request,
        http::StatusCode,
        response::{Html, IntoResponse as _},
    };
    let (daemon, broken) = (Daemon::start(QUICK, &[]).await, broken_server().await);
    let root = format!(
        "<a href=\"empty\">1</a> <a href=\"/huge\">2</a> <a href=\"/x[1-2].html\">3</a> <a href=\"{broken}\">4</a>"
    );
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let heard = asked.clone();
    let router = Router::new().fallback(async move |request: Request| {
        heard.lock().unwrap().push(request.uri().path().to_owned());
        match request.uri().path() {
            "/" => Html(root.clone()).into_response(),
            "/empty" => Html("nothing to see").into_response(),
            "/huge" => vec![0_u8; 4_100_000].into_response(),
            "/x[1-2].html" => "brackets".into_response(),
            _ => StatusCode::NOT_FOUND.into_response(),
        }
    });
    let site = serve(router).await;
    // Two attempts are one broken link.
    let (code, stdout) = check_links(&daemon, &site).await;
    let lines: Vec<_> = stdout.lines().collect();
    let is_cut =
        |line: &&str| line.starts_with(&format!("broken: {broken} (exit code 1: curl: (18)"));
    assert!(
        code == 1 && lines.len() == 1 && lines.iter().all(is_cut),
        "{code} {stdout}"
    );
    let asked = asked
        .lock()
        .unwrap()
        .iter()
        .cloned()
        .collect::<BTreeSet<_>>();
    assert_eq!(
        asked,
        ["/", "/empty", "/huge", "/x[1-2].html"]
            .map(str::to_owned)
            .into()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_finds_broken_links() {
    let (daemon, site) = (Daemon::start("", &[]).await, site().await);
    assert_eq!(
        check_links(&daemon, &site).await,
        (1, format!("broken: {site}/gone (exit code 65: 404)\n"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_prints_the_ends_of_links_and_reads_them_as_browsers_do() {
    use axum::{
        Router,
        extract::Request,
        http::StatusCode,
        response::{Html, IntoResponse as _},
    };
    // Longer than the worker of the example waits for tasks.
    let daemon = Daemon::start(
        "[queues.default]\nbackoff = [\"3s\"]\nmax_attempts = 2\n",
        &[],
    )
    .await;
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let heard = asked.clone();
    let router = Router::new().fallback(async move |request: Request| {
        let path = request.uri().to_string();
        let before = heard.lock().unwrap().iter().filter(|asked| **asked == path).count();
        heard.lock().unwrap().push(path.clone());
        match path.as_str() {
            "/" => Html("<a href=\"flaky\">1</a> <a HREF = '/one'>2</a> <a href=\"/a?x=1&amp;y=2#z\">3</a> <a href=\"#top\">4</a>")
                .into_response(),
            "/one" => Html("<a href=\"broken\">5</a> <a data-href=\"/no\">6</a> <a href=\"?page=2\">7</a>").into_response(),
            "/flaky" if before == 0 => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
            "/flaky" | "/a?x=1&y=2" | "/one?page=2" => "here".into_response(),
            "/broken" => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
            _ => StatusCode::NOT_FOUND.into_response(),
        }
    });
    let site = serve(router).await;
    let broken = format!("broken: {site}/broken (exit code 1: 500)\n");
    assert_eq!(check_links(&daemon, &site).await, (1, broken));
    let mut asked = asked.lock().unwrap().clone();
    asked.sort();
    assert_eq!(
        asked,
        [
            "/",
            "/a?x=1&y=2",
            "/broken",
            "/broken",
            "/flaky",
            "/flaky",
            "/one",
            "/one?page=2"
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_says_by_its_exit_code_that_all_links_are_good() {
    use axum::{Router, response::Html, routing::get};
    let daemon = Daemon::start(QUICK, &[]).await;
    let router = Router::new().route("/", get(async || Html("<a href=\"/\">itself</a>")));
    let site = serve(router).await;
    assert_eq!(check_links(&daemon, &site).await, (0, String::new()));
}

/// The exit code and the output of `examples/check-links`.
async fn check_links(daemon: &Daemon, site: &str) -> (i32, String) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/check-links");
    let mut command = Command::new(script);
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TASKD_"))
    {
        command.env_remove(name);
    }
    command.args([site, env!("CARGO_BIN_EXE_taskd")]);
    command.env("TASKD_URL", daemon.http());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap();
    let code = output.status.code().unwrap();
    assert!(code < 2, "{}", String::from_utf8_lossy(&output.stderr));
    (code, String::from_utf8(output.stdout).unwrap())
}
