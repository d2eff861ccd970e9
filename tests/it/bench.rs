//! `taskd bench`: all phases small, through the real binary. The tests check its counts, and no
//! time.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{daemon::Daemon, until};

/// Small enough for a debug build on a busy machine.
const SMALL: &[&str] = &[
    "bench",
    "--tasks",
    "200",
    "--batch",
    "20",
    "--workers",
    "6",
    "--rate",
    "50",
    "--duration",
    "400ms",
];
/// The tasks of such a run: warm-up, tasks with the new ones among the duplicates, latency,
/// rejected tasks.
const TASKS: [u64; 4] = [200, 220, 21, 21];

fn command(tmpdir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TASKD_"))
    {
        command.env_remove(name);
    }
    command
        .args(args)
        .env("TMPDIR", tmpdir)
        .stdin(Stdio::null());
    command
}

/// Exit code, stdout, stderr.
fn run(tmpdir: &Path, args: &[&str]) -> (i32, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command(tmpdir, args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// Runs it beside the test's own runtime.
async fn run_beside(tmpdir: &Path, args: Vec<String>) -> (i32, String, String) {
    let tmpdir = tmpdir.to_owned();
    let run = move || {
        run(
            &tmpdir,
            &args.iter().map(String::as_str).collect::<Vec<_>>(),
        )
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

fn folder() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix("taskd-it-")
        .tempdir_in("/tmp")
        .unwrap()
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

/// True if the figure has a value for each run.
fn known(figure: &Value, runs: usize) -> bool {
    let values = figure["runs"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_f64);
    let [min, median, max] =
        ["min", "median", "max"].map(|name| figure[name].as_f64().unwrap_or(-1.0));
    values.filter(|value| *value >= 0.0).count() == runs
        && min <= median
        && median <= max
        && min >= 0.0
}

fn measures(report: &Value) -> Vec<[&str; 2]> {
    let rates = report["rates"].as_array().unwrap().iter();
    rates
        .map(|rate| ["phase", "measure"].map(|field| rate[field].as_str().unwrap()))
        .collect()
}

#[test]
fn with_no_server_it_starts_its_own_and_leaves_nothing() {
    let tmp = folder();
    let (code, stdout, stderr) = run(tmp.path(), &[SMALL, &["--runs", "2", "--json"]].concat());
    assert_eq!((code, stderr.as_str()), (0, ""));
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let expected = [
        ["insert", "accepted"],
        ["insert", "claimable"],
        ["duplicates", "answered"],
        ["process", "completed"],
        ["process", "settled in SQL"],
        ["latency", "one a call"],
    ];
    assert_eq!(measures(&report), expected);
    for rate in report["rates"].as_array().unwrap() {
        assert!(
            known(&rate["per_second"], 2) && known(&rate["us_per_task"], 2),
            "{rate}"
        );
        let cpu = &rate["cpu_us_per_task"];
        assert!(
            cpu.is_null()
                || ["taskd", "redis", "bench"]
                    .iter()
                    .all(|part| known(&cpu[*part], 2)),
            "{rate}"
        );
    }
    for latency in report["latency_ms"].as_array().unwrap() {
        assert_eq!(latency["samples"]["runs"], json!([20.0, 20.0]), "{latency}");
        assert!(
            ["p50", "p90", "p99", "p999", "max"]
                .iter()
                .all(|name| known(&latency[*name], 2)),
            "{latency}"
        );
    }
    assert_eq!(report["latency_ms"].as_array().unwrap().len(), 4);
    let all = 2 * TASKS.iter().sum::<u64>();
    let totals =
        json!({"tasks": all, "completions": all, "lost": 0, "doubled": 0, "repeated_calls": 0});
    assert_eq!(report["totals"], totals);
    assert_eq!(
        [&report["wrong"], &report["notes"]],
        [&json!([]), &json!([])]
    );
    let conditions = &report["conditions"];
    let said = ["server", "version", "appendfsync", "synchronous"]
        .map(|field| conditions[field].as_str().unwrap());
    assert_eq!(said, ["own", env!("CARGO_PKG_VERSION"), "always", "FULL"]);
    assert!(is_empty(tmp.path()), "its folder is gone");
}

#[test]
fn what_this_shell_sets_for_others_does_not_reach_its_taskd() {
    let tmp = folder();
    let args = [
        "bench", "insert", "--tasks", "20", "--batch", "20", "--runs", "1",
    ];
    // A taskd refuses this protocol.
    let env = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
    ];
    let output = command(tmp.path(), &args)
        .envs(env)
        .env("TASKD_TOKEN", "of-another")
        .output()
        .unwrap();
    assert_eq!(
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap()
        ),
        (Some(0), String::new())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn it_measures_a_taskd_that_runs_and_three_workers_do_each_task() {
    let mut daemon = Daemon::start("", &[]).await;
    daemon
        .insert(&[json!({"queue": "mine", "key": "stays"})])
        .await;
    let tmp = folder();
    let server = format!("127.0.0.1:{}", daemon.http_port());
    let redis = format!("unix://{}", daemon.data().join("redis.sock").display());
    let there = [
        "--server",
        &server,
        "--replicas",
        "3",
        "--queues",
        "2",
        "--runs",
        "1",
        "--json",
    ];
    let args = |more: &[&str]| {
        [SMALL, &there, more]
            .concat()
            .iter()
            .map(ToString::to_string)
            .collect()
    };
    let (code, stdout, stderr) = run_beside(tmp.path(), args(&["--redis", &redis])).await;
    assert_eq!((code, stderr.as_str()), (0, ""));
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let [warm_up, tasks, latency, rejected] = TASKS;
    let totals = &report["totals"];
    assert_eq!(totals["tasks"], TASKS.iter().sum::<u64>());
    assert_eq!(
        totals["completions"],
        3 * (warm_up + tasks + latency) + rejected,
        "rejected tasks are done once"
    );
    assert_eq!(
        [&totals["lost"], &totals["doubled"]],
        [&json!(0), &json!(0)]
    );
    for rate in report["rates"].as_array().unwrap() {
        let cpu = &rate["cpu_us_per_task"];
        assert!(
            cpu.is_null() || ["taskd", "redis"].iter().all(|part| known(&cpu[*part], 1)),
            "{rate}"
        );
    }
    let latency = report["latency_ms"].as_array().unwrap();
    let samples: Vec<_> = latency
        .iter()
        .map(|one| (one["measure"].as_str().unwrap(), &one["samples"]["median"]))
        .collect();
    let expected = [
        ("insert to CREATED", &json!(20.0)),
        ("insert to handler", &json!(60.0)),
        ("due to sent (bench itself)", &json!(20.0)),
        ("rejection to handler", &json!(20.0)),
    ];
    assert_eq!(samples, expected);
    assert_eq!(report["conditions"]["appendfsync"], "always");

    // Its own queues, and nothing of others.
    let (_, queues) = daemon.get("/v1/queues").await;
    for queue in queues["queues"].as_array().unwrap() {
        let name = queue["queue"].as_str().unwrap();
        let left = ["pending", "waiting", "assigned", "delayed", "dead"]
            .map(|state| queue[state].as_u64().unwrap());
        match name {
            "mine" => assert_eq!(left, [0, 1, 0, 0, 0]),
            name => assert!(name.starts_with("bench-") && left == [0; 5], "{queue}"),
        }
    }

    let (code, stdout, stderr) = run_beside(tmp.path(), args(&["insert"])).await;
    assert_eq!((code, stderr.as_str()), (0, ""));
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        measures(&report),
        [["insert", "accepted"], ["insert", "claimable"]]
    );
    assert!(
        report["rates"][1]["cpu_us_per_task"]["redis"].is_null(),
        "nobody named the Redis: {report}"
    );
    assert_eq!(
        report["totals"]["completions"],
        3 * (200 + 200),
        "what is inserted is completed, too"
    );
    assert!(is_empty(tmp.path()));
    assert!(daemon.stop().await.success());
}

#[test]
fn workers_with_streams_complete_each_task_once_too() {
    for more in [&["process", "latency"][..], &["process", "--failing"]] {
        let tmp = folder();
        let args = [SMALL, more, &["--stream", "--runs", "1", "--json"]].concat();
        let (code, stdout, stderr) = run(tmp.path(), &args);
        assert_eq!((code, stderr.as_str()), (0, ""));
        let report: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(
            [&report["totals"]["lost"], &report["totals"]["doubled"]],
            [0, 0]
        );
        assert_eq!(report["totals"]["tasks"], report["totals"]["completions"]);
        assert!(is_empty(tmp.path()));
    }
}

/// Small, with two levels, and more queues than a call names.
const FLAT: &[&str] = &[
    "bench",
    "flat",
    "start",
    "--tasks",
    "200",
    "--batch",
    "2",
    "--workers",
    "6",
    "--waiting",
    "60,300",
    "--taken",
    "80",
    "--many-workers",
    "40",
    "--many-queues",
    "200",
    "--idle",
    "300ms",
];

#[test]
fn it_compares_few_and_many_and_starts_again_after_a_loss() {
    let tmp = folder();
    let (code, stdout, stderr) = run(tmp.path(), &[FLAT, &["--runs", "1", "--json"]].concat());
    assert_eq!((code, stderr.as_str()), (0, ""));
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let figures = report["figures"].as_array().unwrap();
    let expected = [
        ["flat", "idle: CPU of taskd", ""],
        ["flat", "idle: CPU of Redis", ""],
        ["flat", "idle: memory of taskd", ""],
        ["flat", "60 wait", ""],
        ["flat", "300 wait", "60 wait"],
        ["flat", "a waiting task in Redis, beside its payload", ""],
        ["flat", "the same, keys of its queue alone", ""],
        ["flat", "idle, with the most waiting: CPU of taskd", ""],
        ["flat", "idle, with the most waiting: CPU of Redis", ""],
        ["flat", "idle, with the most waiting: memory of taskd", ""],
        ["flat", "10 workers, 1 a call", ""],
        ["flat", "40 workers, 1 a call", "10 workers, 1 a call"],
        ["flat", "400 wait in 200 queues", "60 wait"],
        ["start", "from start to ready, empty folder", ""],
    ];
    let shown = figures.iter().map(|figure| {
        ["phase", "measure", "reference"].map(|field| figure[field].as_str().unwrap_or_default())
    });
    assert_eq!(shown.collect::<Vec<_>>(), expected);
    for figure in figures {
        let is_compared = figure["reference"].is_string();
        assert!(
            known(&figure["value"], 1) && known(&figure["ratio"], 1) == is_compared,
            "{figure}"
        );
    }
    assert_eq!(
        measures(&report),
        [["start", "claimable again after FLUSHALL"]]
    );
    assert_eq!(
        [
            &report["totals"]["lost"],
            &report["totals"]["doubled"],
            &report["wrong"]
        ],
        [&json!(0), &json!(0), &json!([])]
    );
    assert!(is_empty(tmp.path()), "its folder is gone");
}

#[test]
fn it_compares_limited_tasks_with_free_ones() {
    let tmp = folder();
    let sizes = ["--tasks", "200", "--blocked", "100", "--paced-keys", "20"];
    let more = ["--duration", "1s", "--batch", "20", "--workers", "6"];
    let args = [
        &["bench", "limits", "--runs", "1", "--json"][..],
        &sizes,
        &more,
    ]
    .concat();
    let (code, stdout, stderr) = run(tmp.path(), &args);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let figures = report["figures"].as_array().unwrap();
    let cpu = |what: &str| format!("CPU of Redis, insert and process, {what}");
    let (none, many, few) = (
        cpu("no limits"),
        cpu("200 limit keys"),
        cpu("10 limit keys"),
    );
    let expected = [
        [none.as_str(), ""],
        ["insert, no limits", ""],
        ["process, no limits", ""],
        [many.as_str(), ""],
        ["insert, 200 limit keys", "insert, no limits"],
        ["process, 200 limit keys", "process, no limits"],
        [few.as_str(), ""],
        ["process, 10 limit keys", "process, no limits"],
        ["process, none blocked", ""],
        ["process, 100 blocked", "process, none blocked"],
        ["20 limit keys at 1/s: starts", ""],
        ["20 limit keys at 1/s: late, p99", ""],
        ["a busy key in Redis, beside a lease without limits", ""],
        ["a task behind its key, beside one without limits", ""],
    ];
    let shown = figures.iter().map(|figure| {
        ["measure", "reference"].map(|name| figure[name].as_str().unwrap_or_default())
    });
    assert_eq!(shown.collect::<Vec<_>>(), expected);
    for figure in figures {
        assert!(figure["value"]["median"].is_number(), "{figure}");
    }
    // No key starts before its time.
    let share = figures[10]["value"]["median"].as_f64().unwrap();
    assert!(share > 0.0 && share < 1.1, "{share}");
    let totals = &report["totals"];
    assert_eq!(
        [&totals["lost"], &totals["doubled"], &report["wrong"]],
        [&json!(0), &json!(0), &json!([])]
    );
    assert!(is_empty(tmp.path()), "its folder is gone");
}

#[test]
fn it_compares_records_with_inserted_tasks() {
    let tmp = folder();
    let sizes = ["--tasks", "200", "--batch", "20", "--workers", "6"];
    let more = ["--duration", "1s", "--rate", "20", "--idle", "1s"];
    let args = [
        &["bench", "topics", "--runs", "1", "--json"][..],
        &sizes,
        &more,
    ]
    .concat();
    let (code, stdout, stderr) = run(tmp.path(), &args);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let figures = report["figures"].as_array().unwrap();
    let expected = [
        ["records published", "tasks inserted"],
        ["records published, and XADD", "XADD alone"],
        ["tasks of records claimable", "tasks inserted claimable"],
        [
            "tasks of published records claimable",
            "tasks inserted claimable",
        ],
        ["tasks of records processed", "inserted tasks processed"],
        ["tasks of ten subscriptions claimable", "one subscription"],
        ["tasks inserted, 100 sequences", "tasks inserted"],
        ["tasks processed, 100 sequences", "inserted tasks processed"],
        ["CPU of 500 idle subscriptions", ""],
    ];
    let shown = figures.iter().map(|figure| {
        ["measure", "reference"].map(|name| figure[name].as_str().unwrap_or_default())
    });
    assert_eq!(shown.collect::<Vec<_>>(), expected);
    for figure in figures {
        assert!(figure["value"]["median"].is_number(), "{figure}");
    }
    let latencies = report["latency_ms"].as_array().unwrap();
    let is_there = |measure: &str| latencies.iter().any(|one| one["measure"] == measure);
    assert!(is_there("insert to handler") && is_there("publish to handler"));
    let totals = &report["totals"];
    assert_eq!(
        [&totals["lost"], &totals["doubled"], &report["wrong"]],
        [&json!(0), &json!(0), &json!([])]
    );
    assert!(is_empty(tmp.path()), "its folder is gone");
}

#[test]
fn it_compares_steps_of_workflows_with_tasks() {
    let tmp = folder();
    let sizes = ["--tasks", "200", "--batch", "20", "--workers", "6"];
    let more = ["--executions", "20", "--steps", "3", "--rounds", "12"];
    let args = [
        &["bench", "workflow", "--runs", "1", "--json"][..],
        &sizes,
        &more,
        &["--parked", "50"],
    ]
    .concat();
    let (code, stdout, stderr) = run(tmp.path(), &args);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let figures = report["figures"].as_array().unwrap();
    let [inserted, completed] = ["inserted", "completed"]
        .map(|what| format!("tasks {what}, without the pipeline workflow"));
    let expected = [
        [inserted.as_str(), ""],
        ["tasks inserted, with it, none deployed", &inserted],
        [completed.as_str(), ""],
        ["tasks completed, with it, none deployed", &completed],
        ["plain tasks", ""],
        ["steps, 20 executions of 3 each", "plain tasks"],
        ["CPU of a plain task", ""],
        ["CPU of a step", "CPU of a plain task"],
        ["a round of a loop, after 3", ""],
        ["a round of a loop, after 9", "a round of a loop, after 3"],
        ["CPU of a round of a loop, after 3", ""],
        [
            "CPU of a round of a loop, after 9",
            "CPU of a round of a loop, after 3",
        ],
        ["memory of an execution that waits, 50 do", ""],
    ];
    let shown = figures.iter().map(|figure| {
        ["measure", "reference"].map(|name| figure[name].as_str().unwrap_or_default())
    });
    assert_eq!(shown.collect::<Vec<_>>(), expected);
    for figure in figures {
        assert!(figure["value"]["median"].is_number(), "{figure}");
    }
    let totals = &report["totals"];
    assert_eq!(
        [&totals["lost"], &totals["doubled"], &report["wrong"]],
        [&json!(0), &json!(0), &json!([])]
    );
    assert!(is_empty(tmp.path()), "its folder is gone");
}

#[test]
fn the_table_has_the_conditions_beside_the_figures() {
    let tmp = folder();
    let (code, stdout, stderr) = run(tmp.path(), &[SMALL, &["process", "--runs", "1"]].concat());
    assert_eq!((code, stderr.as_str()), (0, ""));
    for wanted in [
        "appendfsync always; SQLite, synchronous FULL",
        "200 tasks of 100 bytes",
        "settled in SQL",
        "CPU µs, taskd",
        "Counted: 400 tasks, 400 completions: each task exactly NUM = 1 times",
    ] {
        assert!(stdout.contains(wanted), "{wanted} is not in\n{stdout}");
    }
    assert!(
        !stdout.contains("claimable") && !stdout.contains("Latency"),
        "only what was asked for:\n{stdout}"
    );
}

#[test]
fn help_teaches() {
    let tmp = folder();
    let help = run(tmp.path(), &["bench", "--help"]);
    assert_eq!(help.0, 0);
    for wanted in [
        "taskd bench insert process --batch 1",
        "--replicas <NUM>",
        "Phases:",
        "Exit code: 0",
    ] {
        assert!(help.1.contains(wanted), "{wanted} is not in\n{}", help.1);
    }
    assert!(
        help.1.lines().all(|line| line.chars().count() <= 100),
        "{}",
        help.1
    );
}

#[test]
fn mistakes_are_one_line_and_exit_code_2() {
    let tmp = folder();
    let cases: [(&[&str], &str); 14] = [
        (
            &["--server", "127.0.0.1:1"],
            "taskd: cannot reach taskd at http://127.0.0.1:1: ",
        ),
        (&["--server", "::"], "is not a URL; write http://host:7600"),
        (
            &["--http", "127.0.0.1:1"],
            "--server URL (TASKD_URL) names taskd",
        ),
        (
            &["--token", "t"],
            "taskd: --token is for a taskd that runs: name it with --server",
        ),
        (
            &["--tls-ca", "/ca.pem"],
            "taskd: --tls-ca is for a taskd that runs: name it with --server",
        ),
        (&["insrt"], "'insrt' for '[PHASE]...'"),
        (
            &["--batch", "0"],
            "'0' for '--batch <N>': must be 1 to 1000",
        ),
        (&["--tasks", "many"], "not a whole number"),
        (
            &["--replicas", "5", "--workers", "3"],
            "--replicas 5 needs as many distinct workers, and --workers is 3",
        ),
        (
            &["--payload", "1MiB"],
            "--batch 100 × --payload 1MiB is more than 16MiB in one call",
        ),
        (
            &["--queues", "101", "--workers", "1"],
            "--queues 101 needs 2 workers",
        ),
        (&["flat", "--server", "127.0.0.1:1"], "leave out --server"),
        (
            &["flat", "--waiting", "20,10"],
            "as large as the one before",
        ),
        (&["--rate", "1", "--duration", "10ms"], "is no task at all"),
    ];
    for (args, want) in cases {
        let (code, stdout, stderr) = run(tmp.path(), &[&["bench"], args].concat());
        assert_eq!((code, stdout.as_str()), (2, ""), "{args:?}");
        assert!(stderr.contains(want), "{stderr:?} should say {want:?}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    let nowhere = tmp.path().join("nowhere");
    let (code, _, stderr) = run(&nowhere, &["bench"]);
    assert!(
        code == 2 && stderr.lines().count() == 1 && stderr.contains("TMPDIR names another place"),
        "{stderr}"
    );
}

/// A benchmark that is at work, with a taskd of its own.
async fn busy(tmpdir: &Path) -> Child {
    let mut bench = command(tmpdir, &["bench", "--tasks", "1000000"]);
    let bench = bench
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("its taskd runs", async || {
        processes(tmpdir).contains(&"redis-server".to_owned())
    })
    .await;
    bench
}

/// The names of the processes that have files under this folder open.
fn processes(folder: &Path) -> Vec<String> {
    let has_files_there = |pid: &u32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
            .flatten();
        files
            .into_iter()
            .any(|file| fs::read_link(file.path()).is_ok_and(|to| to.starts_with(folder)))
    };
    let pids = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let name = |pid| {
        fs::read_to_string(format!("/proc/{pid}/comm"))
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    pids.filter(has_files_there).map(name).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_benchmark_takes_its_taskd_and_its_redis_along() {
    let tmp = folder();
    let mut bench = busy(tmp.path()).await;
    bench.kill().unwrap();
    bench.wait().unwrap();
    until("they ended", async || processes(tmp.path()).is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_ends_its_taskd_and_removes_the_folder() {
    let tmp = folder();
    let mut bench = busy(tmp.path()).await;
    kill(Pid::from_raw(bench.id().cast_signed()), Signal::SIGINT).unwrap();
    let mut ended = None;
    until("it ends", async || {
        ended = bench.try_wait().unwrap();
        ended.is_some()
    })
    .await;
    assert_eq!(ended.unwrap().code(), Some(2));
    assert!(is_empty(tmp.path()));
}
