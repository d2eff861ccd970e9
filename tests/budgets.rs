//! Budgets that need no clock: allocations of the daemon for a task, and writing calls to its Redis
//! for a task. Each writing call may cost an fsync (appendfsync always). One caller and one worker:
//! nothing is shared, the worst case.
//!
//! `--nocapture` prints the figures; `make bench` shows them so.

// The test awaits what it spawns, or ends with it.
#![allow(clippy::disallowed_methods)]

use std::{
    alloc::System,
    collections::{BTreeMap, HashSet},
    path::Path,
    process::Command,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::StreamExt;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use taskd::{cli, redis_pool::scripts};
use tokio::task::JoinHandle;

use self::port::Port;

#[path = "support/port.rs"]
mod port;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The most for one task, from its insert to its place in SQL as completed.
struct Budget {
    /// Tasks of a call.
    batch: &'static str,
    tasks: &'static str,
    allocations: f64,
    writing_calls: f64,
}

/// Half as much again as was measured: a loop that runs by time adds more on a slow machine. There
/// the steps of tasks that go one by one share no call, either.
const BUDGETS: [Budget; 3] = [
    Budget {
        batch: "1",
        tasks: "200",
        allocations: 1000.0,
        writing_calls: 10.0,
    },
    Budget {
        batch: "10",
        tasks: "1000",
        allocations: 190.0,
        writing_calls: 1.0,
    },
    Budget {
        batch: "100",
        tasks: "5000",
        allocations: 95.0,
        writing_calls: 0.14,
    },
];

#[tokio::test(flavor = "multi_thread")]
async fn a_task_costs_no_more_than_its_budget() {
    let folder = tempfile::Builder::new()
        .prefix("taskd-budgets-")
        .tempdir_in("/tmp")
        .unwrap();
    let ports = [0, 1].map(|_| Port::reserve(12_000..20_000));
    let [http, grpc] = ports
        .each_ref()
        .map(|port| format!("127.0.0.1:{}", port.number));
    let data = folder.path().join("data");
    let args = [
        "taskd",
        "--pipelines",
        "all",
        "--http-listen",
        &http,
        "--grpc-listen",
        &grpc,
        "--data-dir",
    ];
    let args = args
        .iter()
        .map(Into::into)
        .chain([data.clone().into_os_string()]);
    let Ok(cli::Command::Run { loaded, .. }) = cli::parse(args) else {
        panic!("these arguments run a taskd")
    };
    let daemon = tokio::spawn(taskd::app::run(loaded.settings));
    until_ready(&http).await;

    let mut wrong = Vec::new();
    for Budget {
        batch,
        tasks,
        allocations,
        writing_calls,
    } in BUDGETS
    {
        let region = Region::new(ALLOCATOR);
        let done = bench(&http, batch, tasks).await;
        let allocated = region.change();
        let calls = Calls::watch(&data.join("redis.sock")).await;
        let done_watched = bench(&http, batch, tasks).await;
        let calls = calls.stop();
        // Each task needs them: without one, the calls were not seen.
        assert!(
            ["enqueue.lua", "complete.lua"]
                .iter()
                .all(|script| calls.contains_key(*script)),
            "{calls:?}"
        );
        let each = allocated.allocations as f64 / done;
        let bytes = allocated.bytes_allocated as f64 / done;
        let writes = calls.values().sum::<usize>() as f64 / done_watched;
        println!(
            "{batch} a call, for a task: {each:.0} allocations ({bytes:.0} bytes), {writes:.2} writing calls"
        );
        for (name, count) in &calls {
            println!("    {:.3} {name}", *count as f64 / done_watched);
        }
        if each > allocations || writes > writing_calls {
            wrong.push(format!("{batch} a call: at most {allocations} allocations and {writing_calls} writing calls"));
        }
    }
    // The test's own taskd listens to it.
    kill(Pid::this(), Signal::SIGTERM).unwrap();
    daemon.await.unwrap().unwrap();
    assert!(wrong.is_empty(), "{wrong:?}");
}

async fn until_ready(http: &str) {
    let url = format!("http://{http}/readyz");
    let ready = async {
        while !reqwest::get(&url)
            .await
            .is_ok_and(|answer| answer.status().is_success())
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), ready)
        .await
        .expect("taskd gets ready");
}

/// Lets `taskd bench`, a process of its own, insert and process tasks. How many, its warm-up
/// included.
async fn bench(http: &str, batch: &str, tasks: &str) -> f64 {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command.args([
        "bench",
        "insert",
        "process",
        "--runs",
        "1",
        "--json",
        "--concurrency",
        "1",
        "--workers",
        "1",
    ]);
    command.args(["--server", http, "--batch", batch, "--tasks", tasks]);
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .unwrap()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    report["totals"]["tasks"].as_f64().unwrap()
}

/// Calls to a Redis that write, by the name of their script or commands. The commands of a pipeline
/// are one call.
struct Calls {
    counts: Arc<Mutex<BTreeMap<String, usize>>>,
    watching: JoinHandle<()>,
}

impl Calls {
    async fn watch(socket: &Path) -> Self {
        let client = redis::Client::open(format!("unix://{}", socket.display())).unwrap();
        let mut conn = client.get_multiplexed_async_connection().await.unwrap();
        let mut list = redis::cmd("COMMAND");
        list.arg("LIST").arg("FILTERBY").arg("ACLCAT").arg("write");
        let writing: HashSet<String> = list.query_async(&mut conn).await.unwrap();
        let mut lines = client
            .get_async_monitor()
            .await
            .unwrap()
            .into_on_message::<String>();
        let counts = Arc::<Mutex<BTreeMap<String, usize>>>::default();
        let noted = Arc::clone(&counts);
        let watching = tokio::spawn(async move {
            // The script that has not written yet; whether a command stands before this one.
            let (mut script, mut is_in_pipeline) = (None, false);
            while let Some(line) = lines.next().await {
                // 1339518083.107412 [0 127.0.0.1:60866] "keys" "*"; of a script's own calls: [0
                // lua]
                let mut words = line.split('"').skip(1).step_by(2);
                let (name, first) = (
                    words.next().unwrap_or_default().to_lowercase(),
                    words.next().unwrap_or_default(),
                );
                let writes = writing.contains(&name);
                let call = match (line.contains(" lua] "), &*name) {
                    (false, "evalsha") => {
                        script = Some(script_name(first));
                        None
                    }
                    // A script counts at its first write.
                    (true, _) => script.take_if(|_| writes),
                    (false, name) => (writes && !is_in_pipeline).then(|| name.to_owned()),
                };
                is_in_pipeline = !line.contains(" lua] ") && name != "evalsha";
                if let Some(call) = call {
                    *noted.lock().unwrap().entry(call).or_default() += 1;
                }
            }
        });
        Self { counts, watching }
    }

    fn stop(self) -> BTreeMap<String, usize> {
        assert!(
            !self.watching.is_finished(),
            "Redis showed its calls until the end"
        );
        self.watching.abort();
        std::mem::take(&mut self.counts.lock().unwrap())
    }
}

fn script_name(sha: &str) -> String {
    let known = scripts::ALL.iter().find(|script| script.sha() == sha);
    format!("{}.lua", known.map_or(sha, |script| script.name))
}
