//! Live work under an operator and under kills: workers complete, reject and lose tasks, an
//! operator cancels, changes and requeues some at random, and taskd is killed again and again. In
//! the end each task is completed by NUM distinct workers or cancelled, the books balance and fsck
//! finds nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::{
    column,
    support::{daemon::Daemon, until},
};

const CONFIG: &str = "\
    partitions = 2\n\
    [queues.default]\n\
    lease = \"1s\"\n\
    max_attempts = 100\n\
    backoff = [\"50ms\"]\n";
const TASKS: usize = 300;
const WORKERS: u64 = 7;
const KILLS: usize = 5;
/// The acts of the operator between two kills.
const ACTS: u64 = 25;
/// The largest NUM that a task has at any time.
const MOST_REPLICAS: usize = 4;
/// The calls of workers for each act, so that the work goes on.
const CALLS_PER_ACT: u32 = 3;

/// Numbers that look random, the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % bound
    }
}

/// The workers and the operator share it.
struct Shared {
    url: String,
    ids: Vec<String>,
    calls: Semaphore,
    is_over: AtomicBool,
    acts: AtomicU64,
    /// Workers that were answered OK, with the task.
    credited: Mutex<BTreeSet<(String, String)>>,
    /// The tasks that the operator has asked to cancel.
    cancelled: Mutex<BTreeSet<String>>,
    /// The tasks to which it has given a lower NUM at some time.
    lowered: Mutex<BTreeSet<String>>,
}

impl Shared {
    /// An answer of taskd, if it lives.
    async fn post(&self, client: &reqwest::Client, what: &str, body: &Value) -> Option<Value> {
        let answer = client
            .post(format!("{}/v1/tasks:{what}", self.url))
            .json(body)
            .send()
            .await
            .ok()?;
        let (status, answer) = (answer.status(), answer.json().await.ok()?);
        assert!(
            !status.is_client_error() || status == 429,
            "{what} {body}: {answer}"
        );
        status.is_success().then_some(answer)
    }
}

async fn work(shared: Arc<Shared>, n: u64) {
    let (client, worker, mut numbers) =
        (crate::support::http_client(), format!("w{n}"), Numbers(n));
    while !shared.is_over.load(Ordering::Relaxed) {
        let get = json!({"worker": worker, "queues": ["q"], "max_tasks": 1 + numbers.below(2), "wait": "200ms"});
        let leased = shared.post(&client, "get", &get).await;
        shared.calls.add_permits(1);
        for task in leased
            .iter()
            .flat_map(|answer| answer["tasks"].as_array().unwrap())
        {
            let mut item = json!({"id": task["id"], "lease_token": task["lease_token"]});
            match numbers.below(10) {
                // It dies with the task.
                0 => {}
                1 | 2 => {
                    item["delay"] = ["0s", "20ms"][numbers.below(2)].into();
                    let reject = json!({"worker": worker, "rejections": [item]});
                    shared.post(&client, "reject", &reject).await;
                }
                _ => {
                    item["result"] = json!(worker);
                    let complete = json!({"worker": worker, "completions": [item]});
                    let answer = shared.post(&client, "complete", &complete).await;
                    if answer.is_some_and(|answer| answer["results"][0]["status"] == "OK") {
                        let id = task["id"].as_str().unwrap().to_owned();
                        shared.credited.lock().insert((id, worker.clone()));
                    }
                }
            }
        }
    }
}

async fn operate(shared: Arc<Shared>) {
    let (client, mut numbers) = (crate::support::http_client(), Numbers(42));
    while !shared.is_over.load(Ordering::Relaxed) {
        shared
            .calls
            .acquire_many(CALLS_PER_ACT)
            .await
            .unwrap()
            .forget();
        let ids: Vec<&String> = (0..1 + numbers.below(8))
            .map(|_| &shared.ids[numbers.below(TASKS)])
            .collect();
        let worker = format!("w{}", numbers.below(WORKERS as usize));
        let priority = ["high", "medium", "low"][numbers.below(3)];
        let (what, body) = match numbers.below(16) {
            0 => {
                shared.cancelled.lock().insert(ids[0].clone());
                ("cancel", json!({"ids": [ids[0]]}))
            }
            1..=4 => {
                let replicas = 1 + numbers.below(MOST_REPLICAS);
                shared
                    .lowered
                    .lock()
                    .extend(ids.iter().map(|id| (*id).clone()));
                ("change", json!({"ids": ids, "replicas": replicas}))
            }
            5..=7 => ("change", json!({"ids": ids, "priority": priority})),
            8..=10 => ("requeue", json!({ "ids": ids })),
            11 | 12 => ("requeue", json!({"ids": ids, "away_from": worker})),
            13 => ("requeue", json!({"ids": ids, "to": worker})),
            14 => (
                "requeue",
                json!({"ids": ids, "to": worker, "reserved_for": "100ms"}),
            ),
            _ => (
                "change",
                json!({"filter": {"queue": "q"}, "yes": true, "priority": "high"}),
            ),
        };
        shared.post(&client, what, &body).await;
        shared.acts.fetch_add(1, Ordering::Relaxed);
    }
}

/// Exit code and output of a command.
fn taskd(daemon: &Daemon, args: &[&str]) -> (i32, String) {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let server = ["--server".to_owned(), daemon.http()];
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let output = command
        .env_clear()
        .envs(own)
        .args(args)
        .args(server)
        .output()
        .unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap(),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn live_work_survives_an_operator_and_kills() {
    let mut daemon = column::start(CONFIG, &[]).await;
    let tasks: Vec<Value> = (0..TASKS)
        .map(|n| json!({"queue": "q", "key": format!("key-{n}"), "replicas": 1 + n % 3}))
        .collect();
    let ids = daemon.insert(&tasks).await;
    let shared = Arc::new(Shared {
        url: daemon.http(),
        ids: ids.clone(),
        calls: Semaphore::new(0),
        is_over: AtomicBool::new(false),
        acts: AtomicU64::new(0),
        credited: Mutex::default(),
        cancelled: Mutex::default(),
        lowered: Mutex::default(),
    });
    let mut running: Vec<_> = (0..WORKERS)
        .map(|n| tokio::spawn(work(Arc::clone(&shared), n)))
        .collect();
    running.push(tokio::spawn(operate(Arc::clone(&shared))));
    for kill in 1..=KILLS {
        let acts = shared.acts.load(Ordering::Relaxed) + ACTS;
        until("the operator has done enough", async || {
            shared.acts.load(Ordering::Relaxed) >= acts
        })
        .await;
        daemon.kill9_and_restart();
        daemon.ready().await;
        eprintln!("killed {kill} times");
    }
    shared.is_over.store(true, Ordering::Relaxed);
    for task in running {
        task.await.unwrap();
    }
    // Tasks that were refused, taken away or reserved are for everybody now, and newcomers do the
    // rest.
    let mut newcomer = 0;
    until("no task is unfinished", async || {
        daemon
            .post("/v1/tasks:requeue", &json!({ "ids": ids }))
            .await;
        newcomer += 1;
        let worker = format!("newcomer-{newcomer}");
        let leased = daemon.lease(&worker, "q", 1000, "1s").await;
        let answers = daemon.complete(&worker, &leased).await;
        let of = leased
            .iter()
            .zip(answers)
            .filter(|(_, answer)| answer == "OK");
        shared
            .credited
            .lock()
            .extend(of.map(|(task, _)| (task["id"].as_str().unwrap().to_owned(), worker.clone())));
        daemon.unfinished("q").await == 0
    })
    .await;

    let mut ends: BTreeMap<String, usize> = BTreeMap::new();
    let credited = shared.credited.lock().clone();
    let [cancelled, lowered] = [&shared.cancelled, &shared.lowered].map(|ids| ids.lock().clone());
    for id in &ids {
        let (_, task) = daemon.get(&format!("/v1/tasks/{id}")).await;
        let (_, answer) = daemon.get(&format!("/v1/tasks/{id}/results")).await;
        let results = answer["results"].as_array().unwrap();
        let of = |surplus: bool| -> Vec<&str> {
            let results = results
                .iter()
                .filter(|result| result["surplus"].as_bool().unwrap_or(false) == surplus);
            results
                .map(|result| result["worker"].as_str().unwrap())
                .collect()
        };
        let (counted, surplus) = (of(false), of(true));
        let distinct: BTreeSet<&str> = counted.iter().chain(&surplus).copied().collect();
        assert_eq!(
            distinct.len(),
            counted.len() + surplus.len(),
            "{id}: a worker twice: {answer}"
        );
        // An answered completion is there.
        for (_, worker) in credited.iter().filter(|(of, _)| of == id) {
            assert!(
                distinct.contains(worker.as_str()),
                "{id}: {worker} was answered OK: {answer}"
            );
        }
        let replicas = usize::try_from(task["replicas"].as_u64().unwrap()).unwrap();
        match task["status"].as_str().unwrap() {
            "COMPLETED" if lowered.contains(id) => {
                assert!(
                    (replicas..=MOST_REPLICAS).contains(&counted.len()),
                    "{task} {answer}"
                );
            }
            "COMPLETED" => assert_eq!(counted.len(), replicas, "{task} {answer}"),
            "CANCELLED" => assert!(cancelled.contains(id), "nobody has cancelled {task}"),
            other => panic!("{other}: {task}"),
        }
        *ends
            .entry(task["status"].as_str().unwrap().to_owned())
            .or_default() += 1;
    }
    eprintln!("{ends:?}");
    let mut said = String::new();
    until("the books balance", async || {
        let (code, text) = taskd(&daemon, &["books", "q"]);
        said = text;
        code == 0 && said.contains("BALANCED")
    })
    .await;
    let (code, said) = taskd(&daemon, &["fsck"]);
    assert_eq!(code, 0, "{said}");
    assert!(daemon.stop().await.success());
}
