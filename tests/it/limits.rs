//! Limits per key, through the running binary and seen from outside: never more of a limit key at a
//! time, never sooner, and everything done in the end.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, SqliteConnection};
use taskd::{
    model::now_unix_ms,
    wire::pb::{self, operator_client::OperatorClient},
};

use crate::support::{
    daemon::{Daemon, statuses},
    until,
};

fn unix_ms(time: &Value) -> i64 {
    taskd::wire::time::from_rfc_3339(time.as_str().expect("a time")).expect("RFC 3339")
}

/// Names a lease: a task may be leased again, and the tasks of one call have the same token.
fn lease_of(task: &Value) -> String {
    format!("{} {}", task["id"], task["lease_token"])
}

/// Counts from outside which leases of each limit key overlap.
#[derive(Default)]
struct Witness {
    /// Limit key, lease, end of the lease (ms).
    holds: Vec<(String, String, i64)>,
    most: BTreeMap<String, usize>,
}

impl Witness {
    fn begin(&mut self, task: &Value) {
        let key = task["limit_key"].as_str().expect("a limit key").to_owned();
        let ends = unix_ms(&task["lease_expires_at"]);
        self.holds.push((key.clone(), lease_of(task), ends));
        let now = now_unix_ms();
        let running = self
            .holds
            .iter()
            .filter(|(of, _, ends)| *of == key && *ends > now)
            .count();
        let most = self.most.entry(key).or_default();
        *most = running.max(*most);
    }

    fn end(&mut self, task: &Value) {
        let ended = lease_of(task);
        if let Some(at) = self.holds.iter().position(|(_, lease, _)| *lease == ended) {
            self.holds.swap_remove(at);
        }
    }
}

/// A worker that goes on whatever happens to taskd.
#[derive(Clone)]
struct Worker {
    name: String,
    url: String,
    client: reqwest::Client,
    witness: Arc<Mutex<Witness>>,
}

impl Worker {
    async fn post(&self, path: &str, body: &Value) -> Option<Value> {
        let request = self.client.post(format!("{}{path}", self.url)).json(body);
        let answer = request.send().await.ok()?;
        if !answer.status().is_success() {
            return None;
        }
        answer.json().await.ok()
    }

    /// Its tasks, of which the witness knows.
    async fn get(&self, most: usize, lease: &str) -> Vec<Value> {
        let body = json!({"worker": self.name, "queues": ["q"], "max_tasks": most, "wait": "200ms", "lease_duration": lease});
        let Some(answer) = self.post("/v1/tasks:get", &body).await else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            return Vec::new();
        };
        let tasks = answer["tasks"].as_array().cloned().unwrap_or_default();
        let mut witness = self.witness.lock().expect("no panic");
        tasks.iter().for_each(|task| witness.begin(task));
        tasks
    }

    /// Completes until somebody answers.
    async fn complete(&self, task: &Value) {
        self.witness.lock().expect("no panic").end(task);
        let completion = json!({"id": task["id"], "lease_token": task["lease_token"]});
        let body = json!({"worker": self.name, "completions": [completion]});
        loop {
            if let Some(answer) = self.post("/v1/tasks:complete", &body).await
                && statuses(&answer) != ["TRY_LATER"]
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn never_more_of_a_limit_key_at_a_time_whatever_is_killed() {
    let config = "[queues.q]\nlimit_by = \"header:host\"\nlimit_at_a_time = 2\nlease = \"10s\"\n";
    let mut daemon = Daemon::start(config, &[]).await;
    let witness = Arc::new(Mutex::new(Witness::default()));
    let worker = |n: usize| Worker {
        name: format!("w{n}"),
        url: daemon.http(),
        client: reqwest::Client::new(),
        witness: Arc::clone(&witness),
    };
    let tasks: Vec<_> = (0..90)
        .map(|n| json!({"queue": "q", "key": n.to_string(), "headers": {"host": format!("host{}", n % 3)}, "replicas": 1 + n / 80}))
        .collect();
    daemon.insert(&tasks).await;

    let stop = tokio_util::sync::CancellationToken::new();
    let workers: Vec<_> = (0..6)
        .map(|n| {
            let worker = worker(n);
            let stop = stop.clone();
            tokio::spawn(async move {
                while !stop.is_cancelled() {
                    for task in worker.get(1 + n % 3, "10s").await {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                        worker.complete(&task).await;
                    }
                }
            })
        })
        .collect();
    // A worker that dies with what it has: its leases count until they expire.
    let dies = worker(9);
    until("a worker has tasks and dies", async || {
        !dies.get(2, "1s").await.is_empty()
    })
    .await;
    for _ in 0..2 {
        let left = daemon.unfinished("q").await;
        until("some are done", async || {
            daemon.unfinished("q").await < left.saturating_sub(5).max(1)
        })
        .await;
        daemon.kill9_and_restart();
        daemon.ready().await;
    }
    until("all are done", async || daemon.unfinished("q").await == 0).await;
    stop.cancel();
    for worker in workers {
        worker.await.expect("no panic");
    }
    let most = witness.lock().expect("no panic").most.clone();
    assert_eq!(most.len(), 3);
    assert!(most.values().all(|most| *most <= 2), "{most:?}");
    let queue = daemon.queue("q").await;
    assert_eq!(queue["completed"], 90, "{queue}");
}

#[tokio::test(flavor = "multi_thread")]
async fn starts_of_a_limit_key_are_as_far_apart_as_its_pace_says() {
    let config = "[queues.q]\nlimit_by = \"host\"\nlimit_pace = \"20/1s\"\nlease = \"10s\"\n";
    let daemon = Daemon::start(config, &[]).await;
    let tasks: Vec<_> = (0..40)
        .map(|n| json!({"queue": "q", "key": format!("https://{}.example/{n}", ["a", "b"][n % 2])}))
        .collect();
    daemon.insert(&tasks).await;
    let mut starts: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    let mut done = 0;
    until("all are done", async || {
        let tasks = daemon.lease("w", "q", 10, "1s").await;
        for task in &tasks {
            let key = task["limit_key"].as_str().expect("a limit key").to_owned();
            let at = unix_ms(&task["lease_expires_at"]) - 10_000;
            starts.entry(key).or_default().push(at);
        }
        daemon.complete("w", &tasks).await;
        done += tasks.len();
        done == 40
    })
    .await;
    assert_eq!(
        starts.keys().collect::<Vec<_>>(),
        ["a.example", "b.example"]
    );
    for (key, mut starts) in starts {
        starts.sort_unstable();
        let shortest = starts.windows(2).map(|pair| pair[1] - pair[0]).min();
        assert!(shortest >= Some(50), "{key}: {starts:?}");
    }
}

/// The time by Redis's clock.
async fn explained_now(daemon: &Daemon, id: &str) -> Value {
    let (_, mut explained) = daemon.get(&format!("/v1/tasks:explain?id={id}")).await;
    explained["now"].take()
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_with_limit_keys_get_one_line_and_explain_tells_what_a_task_waits_for() {
    let config = "[queues.hosts]\nlimit_by = \"host\"\nlimit_at_a_time = 1\n\
                  [queues.tenants]\nlimit_by = \"given\"\nlimit_at_a_time = 1\n";
    let daemon = Daemon::start(config, &[]).await;
    let wrong = [
        (
            json!({"queue": "free", "key": "k", "limit_key": "a"}),
            "limit_key is given, and the queue has no limit_by",
        ),
        (
            json!({"queue": "hosts", "key": "no url"}),
            "key \"no url\" is no URL with a host",
        ),
        (
            json!({"queue": "tenants", "key": "k", "limit_key": "a\u{1}"}),
            "limit_key contains a control character",
        ),
    ];
    for (task, why) in &wrong {
        let (_, answer) = daemon.post("/v1/tasks", &json!([task])).await;
        let result = &answer["results"][0];
        assert_eq!(result["status"], "REJECTED", "{answer}");
        let error = result["error"].as_str().expect("one line");
        assert!(error.starts_with(why) && !error.contains('\n'), "{error}");
    }

    let tasks: Vec<_> = (0..3)
        .map(|n| json!({"queue": "tenants", "key": n.to_string(), "limit_key": "acme"}))
        .collect();
    let ids = daemon.insert(&tasks).await;
    let leased = daemon.lease_all("w", "tenants", 1).await;
    assert_eq!(leased[0]["limit_key"], "acme");
    assert!(daemon.lease("w", "tenants", 5, "50ms").await.is_empty());
    let (_, explained) = daemon
        .get(&format!("/v1/tasks:explain?id={}&worker=v", ids[2]))
        .await;
    assert_eq!(explained["place"], "WAITING", "{explained}");
    assert_eq!(
        explained["says"], "it waits for acme: 1 of 1 running, 1 before it",
        "{explained}"
    );
    assert_eq!(
        explained["worker"]["reason"], "LIMIT_REACHED",
        "{explained}"
    );

    // A task that a worker reports is checked the same way; the completion counts.
    let completion = json!({"id": leased[0]["id"], "lease_token": leased[0]["lease_token"], "discovered": [wrong[0].0]});
    let body = json!({"worker": "w", "completions": [completion]});
    let (_, answer) = daemon.post("/v1/tasks:complete", &body).await;
    assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
    let note = answer["results"][0]["error"].as_str().expect("a note");
    assert!(note.contains(wrong[0].1), "{note}");
    let leased = daemon.lease_all("w", "tenants", 1).await;
    assert_eq!(leased[0]["key"], "1");

    // A worker reports that the key must rest.
    let limit = |hold: &str| {
        let item = json!({"id": leased[0]["id"], "lease_token": leased[0]["lease_token"], "limit": {"hold": hold}});
        json!({"worker": "w", "completions": [item]})
    };
    let (_, answer) = daemon.post("/v1/tasks:complete", &limit("2h")).await;
    assert_eq!(answer["results"][0]["status"], "INVALID", "{answer}");
    let completed_ms = unix_ms(&explained_now(&daemon, &ids[2]).await);
    let (_, answer) = daemon.post("/v1/tasks:complete", &limit("1s")).await;
    assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
    let last = daemon.lease_all("w", "tenants", 1).await;
    let start = unix_ms(&last[0]["lease_expires_at"]) - 30_000;
    assert!(start - completed_ms >= 1000, "{last:?}");
    assert_eq!(daemon.complete("w", &last).await, ["OK"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_waits_in_sql_and_keeps_no_other_away_whatever_is_killed() {
    // A shard that has 200 live tasks leaves each limit key 64 that wait.
    let config = "[queues.q]\nlimit_by = \"given\"\nlimit_at_a_time = 4\nlease = \"10s\"\nhigh_water_tasks = 40\n";
    let mut daemon = Daemon::start(config, &[]).await;
    let tasks = |key: &str, numbers: std::ops::Range<u32>| -> Vec<Value> {
        numbers
            .map(|n| json!({"queue": "q", "key": format!("{key} {n}"), "limit_key": key}))
            .collect()
    };
    let mut last = String::new();
    for part in 0..4 {
        let ids = daemon
            .insert(&tasks("big", part * 300..(part + 1) * 300))
            .await;
        last = ids.last().expect("a task").clone();
        // Somewhere between the insert and the park.
        daemon.kill9_and_restart();
        daemon.ready().await;
    }
    daemon.insert(&tasks("small", 0..10)).await;
    until("the rest of the crowd waits in SQL", async || {
        let (_, books) = daemon.get("/v1/books?queue=q").await;
        let sql = &books["queues"][0]["held"]["sql"];
        assert_eq!(sql["parked"], 0, "the queue is not full: {books}");
        sql["crowded"].as_u64() > Some(800) && sql["fresh"] == 0
    })
    .await;
    let (_, explained) = daemon.get(&format!("/v1/tasks:explain?id={last}")).await;
    assert_eq!(explained["place"], "PARKED", "{explained}");
    let says = explained["says"].as_str().expect("words");
    assert!(
        says.starts_with("it waits for big in SQL, as one of "),
        "{says}"
    );

    let witness = Arc::new(Mutex::new(Witness::default()));
    let stop = tokio_util::sync::CancellationToken::new();
    let workers: Vec<_> = (0..4)
        .map(|n| {
            let worker = Worker {
                name: format!("w{n}"),
                url: daemon.http(),
                client: reqwest::Client::new(),
                witness: Arc::clone(&witness),
            };
            let stop = stop.clone();
            tokio::spawn(async move {
                while !stop.is_cancelled() {
                    for task in worker.get(2, "10s").await {
                        worker.complete(&task).await;
                    }
                }
            })
        })
        .collect();
    let of_small = async |daemon: &Daemon| {
        let path = "/v1/tasks?queue=q&status=COMPLETED&key_prefix=small&limit=100";
        let (_, page) = daemon.get(path).await;
        page["tasks"].as_array().map_or(0, Vec::len)
    };
    until("the few are done", async || of_small(&daemon).await == 10).await;
    let left = daemon.unfinished("q").await;
    assert!(left > 800, "{left} of the crowd are left");
    for left in [900, 600, 300] {
        until("some are done", async || {
            daemon.unfinished("q").await < left
        })
        .await;
        daemon.kill9_and_restart();
        daemon.ready().await;
    }
    until("all are done", async || daemon.unfinished("q").await == 0).await;
    stop.cancel();
    for worker in workers {
        worker.await.expect("no panic");
    }
    let most = witness.lock().expect("no panic").most.clone();
    assert_eq!(most.len(), 2);
    assert!(most.values().all(|most| *most <= 4), "{most:?}");
    let queue = daemon.queue("q").await;
    assert_eq!(queue["completed"], 1210, "{queue}");
}

/// Calls taskd over HTTP about limit keys of the queue `q`.
async fn call(daemon: &Daemon, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
    let url = format!("{}/v1/queues/{path}", daemon.http());
    let mut request = reqwest::Client::new().request(method, url);
    if let Some(body) = body {
        request = request.json(&body);
    }
    let answer = request.send().await.expect("an answer");
    let status = answer.status().as_u16();
    (status, answer.json().await.unwrap_or_default())
}

/// Runs a command of taskd; answers the exit code, stdout and stderr.
async fn command(daemon: &Daemon, args: &[&str]) -> (i32, String, String) {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_taskd"));
    command
        .arg("limits")
        .args(args)
        .args(["--server", &daemon.http()]);
    let output = command.output().await.expect("taskd runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (
        output.status.code().unwrap_or(-1),
        text(output.stdout),
        text(output.stderr),
    )
}

fn tasks_of(key: &str, count: usize) -> Vec<Value> {
    (0..count)
        .map(|n| json!({"queue": "q", "key": format!("{key}{n}"), "limit_key": key}))
        .collect()
}

/// Whether the shard of this limit key has these values, as its list or `GET` shows them.
async fn shows(daemon: &Daemon, key: &str, expected: &Value) -> bool {
    let (_, shown) = call(daemon, Method::GET, &format!("q/limits/{key}"), None).await;
    let expected = expected.as_object().expect("an object");
    expected.iter().all(|(name, value)| shown[name] == *value)
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_give_limit_keys_own_limits_over_http_grpc_and_by_command() {
    let config = "[queues.q]\nlimit_by = \"given\"\nlimit_at_a_time = 1\n";
    let daemon = Daemon::start(config, &[]).await;
    daemon.insert(&tasks_of("a/b", 4)).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    let put = async |path: &str, body: Value| call(&daemon, Method::PUT, path, Some(body)).await;

    // Over HTTP: the limit counts, also for tasks that wait.
    let (status, set) = put("q/limits/a%2Fb", json!({"at_a_time": 2})).await;
    assert_eq!(
        (status, &set["own"]["at_a_time"]),
        (200, &json!(2)),
        "{set}"
    );
    let second = daemon.lease_all("w", "q", 1).await;
    let (_, running) = call(&daemon, Method::GET, "q/limits?state=running", None).await;
    let running = &running["limits"];
    assert_eq!(running[0]["limit_key"], "a/b", "{running}");
    assert_eq!(
        (&running[0]["running"], &running[0]["waiting"]),
        (&json!(2), &json!(2))
    );
    let (_, waits) = call(&daemon, Method::GET, "q/limits?state=waiting", None).await;
    assert_eq!(waits["limits"], *running);

    // Over gRPC: nothing starts, and explain says that own limits are why.
    let mut grpc = OperatorClient::connect(daemon.grpc()).await.expect("gRPC");
    let stop = pb::SetLimitRequest {
        queue: "q".into(),
        limit_key: "a/b".into(),
        at_a_time: Some(0),
        ..Default::default()
    };
    let set = grpc.set_limit(stop).await.expect("set").into_inner();
    assert_eq!(set.own.expect("own limits").at_a_time, Some(0));
    until("nothing of it starts", async || {
        shows(&daemon, "a%2Fb", &json!({"at_a_time": 0})).await
    })
    .await;
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    assert!(daemon.lease("w", "q", 5, "50ms").await.is_empty());
    let path = "/v1/tasks:explain?queue=q&key=a/b3";
    let (_, explained) = daemon.get(path).await;
    assert_eq!(
        explained["says"], "it waits for a/b: 1 of 0 running (own limits), 1 before it",
        "{explained}"
    );
    let named = pb::GetLimitRequest {
        queue: "q".into(),
        limit_key: "a/b".into(),
    };
    let key = grpc.get_limit(named).await.expect("get").into_inner();
    assert_eq!((key.running, key.waiting, key.at_a_time), (1, 2, Some(0)));

    // By command.
    let (code, said, error) = command(
        &daemon,
        &[
            "set", "q", "a/b", "--pace", "100/1s", "--burst", "2", "--hold", "0s",
        ],
    )
    .await;
    assert_eq!((code, &*error), (0, ""), "{said}");
    assert!(
        said.starts_with("a/b of queue q has own limits: pace 100/1s, burst 2"),
        "{said}"
    );
    let (code, said, _) = command(&daemon, &["list", "q"]).await;
    assert!(code == 0 && said.contains("pace 100/1s, burst 2"), "{said}");
    let (code, said, _) = command(&daemon, &["show", "q", "a/b", "--json"]).await;
    let shown: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((code, &shown["own"]["burst"]), (0, &json!(2)), "{said}");
    // As many at a time as the queue says: the one that runs.
    until("the command counts", async || {
        shows(
            &daemon,
            "a%2Fb",
            &json!({"at_a_time": 1, "burst": 2, "pace_ms": 10}),
        )
        .await
    })
    .await;
    let (code, said, _) = command(&daemon, &["clear", "q", "a/b"]).await;
    assert_eq!(
        (code, &*said),
        (0, "a/b of queue q has the limits of the queue again\n")
    );
    let (_, cleared) = call(&daemon, Method::DELETE, "q/limits/a%2Fb", None).await;
    assert_eq!(cleared["changed"], false);

    // All keys, in pages.
    for key in ["k1", "k2", "k3"] {
        put(&format!("q/limits/{key}"), json!({"at_a_time": 5})).await;
    }
    let (status, _) = put("q/limits/*", json!({"at_a_time": 1000})).await;
    assert_eq!(status, 200);
    let mut listed = Vec::new();
    let mut cursor = String::new();
    loop {
        let path = format!("q/limits?limit=3&cursor={cursor}");
        let (_, page) = call(&daemon, Method::GET, &path, None).await;
        let limits = page["limits"].as_array().expect("a list");
        listed.extend(limits.iter().map(|key| key["limit_key"].clone()));
        match page["cursor"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => break,
        }
    }
    assert_eq!(listed, ["*", "k1", "k2", "k3"]);
    assert_eq!(daemon.complete("w", &second).await, ["OK"]);
    assert_eq!(daemon.drain("w", "q").await.len(), 2);

    // Acts.
    let (_, acts) = daemon.get("/v1/acts").await;
    let acts: Vec<_> = acts["acts"].as_array().expect("acts").iter().collect();
    let count = |what: &str, target: &str| {
        let same = |act: &&&Value| act["what"] == what && act["on"] == target;
        acts.iter().filter(same).count()
    };
    assert_eq!(count("set limits", "q a/b"), 3, "{acts:?}");
    assert_eq!(count("clear limits", "q a/b"), 1, "{acts:?}");

    // What is wrong changes nothing.
    for (path, body, why) in [
        (
            "free/limits/k",
            json!({"at_a_time": 1}),
            "queue free has no limit_by",
        ),
        ("q/limits/k", json!({}), "no limit is given"),
        (
            "q/limits/k",
            json!({"at_a_time": 1001}),
            "at_a_time is 1001; must be 0",
        ),
        ("q/limits/k", json!({"pace": "0/1s"}), "pace is \"0/1s\""),
        ("q/limits/k", json!({"burst": 2}), "burst needs a pace"),
        (
            "q/limits/k",
            json!({"pace": "1/1s", "burst": 0}),
            "burst is 0",
        ),
        ("q/limits/k", json!({"hold": "400days"}), "hold is"),
        (
            "q/limits/k%01",
            json!({"at_a_time": 1}),
            "the limit key contains a control character",
        ),
        ("a b/limits/k", json!({"at_a_time": 1}), "queue"),
    ] {
        let (status, problem) = put(path, body).await;
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert_eq!(status, 400, "{path} {problem}");
        assert!(
            detail.contains(why) && !detail.contains('\n'),
            "{why}: {detail}"
        );
    }
    let (status, problem) = call(&daemon, Method::GET, "q/limits?state=busy", None).await;
    assert_eq!(status, 400, "{problem}");
    let (status, _) = call(&daemon, Method::GET, "q/limits?state=held&cursor=x", None).await;
    assert_eq!(status, 400);
    let wrong = pb::SetLimitRequest {
        queue: "q".into(),
        limit_key: "k".repeat(256),
        at_a_time: Some(1),
        ..Default::default()
    };
    let status = grpc.set_limit(wrong).await.expect_err("too long");
    assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
    let (code, _, error) = command(&daemon, &["set", "q", "k"]).await;
    assert!(code == 2 && error.contains("no limit is given"), "{error}");
    let (_, own) = call(&daemon, Method::GET, "q/limits", None).await;
    assert_eq!(own["limits"].as_array().map(Vec::len), Some(4), "{own}");
}

#[tokio::test(flavor = "multi_thread")]
async fn own_limits_come_although_the_process_that_set_them_was_killed() {
    let config = "[queues.q]\nlimit_by = \"given\"\n";
    let mut daemon = Daemon::start(config, &[]).await;
    daemon.insert(&tasks_of("k", 3)).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    // SQL has it, and most likely no shard knows it yet.
    let stop = json!({"at_a_time": 0});
    let (status, _) = call(&daemon, Method::PUT, "q/limits/k", Some(stop)).await;
    assert_eq!(status, 200);
    daemon.kill9_and_restart();
    daemon.ready().await;
    until("the shard knows it", async || {
        shows(&daemon, "k", &json!({"at_a_time": 0, "running": 1})).await
    })
    .await;
    assert!(daemon.lease("w", "q", 5, "50ms").await.is_empty());
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    assert!(daemon.lease("w", "q", 5, "50ms").await.is_empty());
    let (status, _) = call(&daemon, Method::DELETE, "q/limits/k", None).await;
    assert_eq!(status, 200);
    assert_eq!(daemon.drain("w", "q").await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn own_limits_come_back_when_redis_has_lost_everything() {
    let config = "[queues.q]\nlimit_by = \"given\"\nlimit_pace = \"20/1s\"\n";
    let daemon = Daemon::start(config, &[]).await;
    let stop = json!({"at_a_time": 0});
    let (status, _) = call(&daemon, Method::PUT, "q/limits/stopped", Some(stop)).await;
    assert_eq!(status, 200);
    daemon.insert(&tasks_of("stopped", 2)).await;
    daemon.insert(&tasks_of("free", 2)).await;
    until("the shard knows it", async || {
        shows(&daemon, "stopped", &json!({"at_a_time": 0, "waiting": 2})).await
    })
    .await;
    let _: () = redis::cmd("FLUSHALL")
        .query_async(&mut daemon.redis().await)
        .await
        .expect("FLUSHALL");
    // It answers 503 once it has noticed.
    let get = json!({"worker": "w", "queues": ["q"], "max_tasks": 10, "wait": "200ms"});
    let mut done = BTreeMap::new();
    until("the others are done", async || {
        let Some((200, answer)) = daemon.try_post("/v1/tasks:get", &get).await else {
            return false;
        };
        for task in answer["tasks"].as_array().expect("a list") {
            let completion = json!({"id": task["id"], "lease_token": task["lease_token"]});
            let body = json!({"worker": "w", "completions": [completion]});
            if let Some((200, answer)) = daemon.try_post("/v1/tasks:complete", &body).await
                && statuses(&answer) == ["OK"]
            {
                done.insert(task["key"].to_string(), task["limit_key"].clone());
            }
        }
        done.len() >= 2
    })
    .await;
    assert!(done.values().all(|key| *key == "free"), "{done:?}");
    until("taskd is ready", async || {
        daemon
            .try_get("/readyz")
            .await
            .is_some_and(|(status, _)| status == 200)
    })
    .await;
    assert!(daemon.lease("w", "q", 5, "50ms").await.is_empty());
    until("the shard has them, and their limit", async || {
        shows(&daemon, "stopped", &json!({"at_a_time": 0, "waiting": 2})).await
    })
    .await;
    let (status, _) = call(&daemon, Method::DELETE, "q/limits/stopped", None).await;
    assert_eq!(status, 200);
    let mut done = daemon.drain("w", "q").await;
    done.sort_unstable();
    assert_eq!(done, ["stopped0", "stopped1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_comes_with_a_rejection_ends_without_the_watchdog() {
    let queue = "[queues.q]\nlimit_by = \"given\"\nlimit_at_a_time = 1\n";
    let config = format!("watchdog_interval = \"1m\"\n{queue}");
    let daemon = Daemon::start(&config, &[]).await;
    daemon.insert(&tasks_of("k", 2)).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    let limit = json!({"hold": "300ms"});
    let mut item = json!({"id": leased[0]["id"], "lease_token": leased[0]["lease_token"]});
    item["reason"] = json!("429");
    item["not_started"] = json!(true);
    item["limit"] = limit;
    let body = json!({"worker": "w", "rejections": [item]});
    let (_, answer) = daemon.post("/v1/tasks:reject", &body).await;
    assert_eq!(statuses(&answer), ["OK"], "{answer}");
    assert_eq!(daemon.lease("v", "q", 1, "20s").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_hold_of_a_worker_outlives_redis() {
    let config = "[queues.q]\nlimit_by = \"given\"\nlimit_at_a_time = 1\n";
    let daemon = Daemon::start(config, &[]).await;
    daemon.insert(&tasks_of("held", 2)).await;
    daemon.insert(&tasks_of("free", 2)).await;
    for task in daemon.lease_all("w", "q", 2).await {
        let mut item = json!({"id": task["id"], "lease_token": task["lease_token"]});
        if task["limit_key"] == "held" {
            item["limit"] = json!({"hold": "1h"});
        }
        let body = json!({"worker": "w", "completions": [item]});
        let (_, answer) = daemon.post("/v1/tasks:complete", &body).await;
        assert_eq!(statuses(&answer), ["OK"], "{answer}");
    }
    let (_, before) = call(&daemon, Method::GET, "q/limits/held", None).await;
    let held_until = before["held_until"].clone();
    assert!(held_until.is_string(), "{before}");
    let url = format!("sqlite://{}", daemon.data().join("taskd.db").display());
    let mut connection = SqliteConnection::connect(&url).await.expect("SQLite");
    until("SQL has the hold", async || {
        let held = "SELECT until_ms FROM limit_holds";
        let rows: Vec<i64> = sqlx::query_scalar(held)
            .fetch_all(&mut connection)
            .await
            .expect("rows");
        rows == [unix_ms(&held_until)]
    })
    .await;
    connection.close().await.expect("closed");
    let _: () = redis::cmd("FLUSHALL")
        .query_async(&mut daemon.redis().await)
        .await
        .expect("FLUSHALL");
    // It answers 503 once it has noticed, and what was done is perhaps done again.
    let get = json!({"worker": "v", "queues": ["q"], "max_tasks": 10, "wait": "200ms"});
    let mut started = Vec::new();
    until("the free key goes on", async || {
        let Some((200, answer)) = daemon.try_post("/v1/tasks:get", &get).await else {
            return false;
        };
        let tasks = answer["tasks"].as_array().expect("a list").iter();
        started.extend(tasks.map(|task| task["limit_key"].clone()));
        started.contains(&json!("free"))
    })
    .await;
    until("the shard has the hold, and a task behind it", async || {
        let request = reqwest::get(format!("{}/v1/queues/q/limits/held", daemon.http()));
        let Ok(answer) = request.await else {
            return false;
        };
        let shown: Value = answer.json().await.unwrap_or_default();
        shown["waiting"].as_u64() >= Some(1) && shown["held_until"] == held_until
    })
    .await;
    assert!(!started.contains(&json!("held")), "{started:?}");
    assert!(daemon.lease("v", "q", 5, "50ms").await.is_empty());
    // An operator ends it.
    let now = json!({"at_a_time": 1, "hold": "0s"});
    let (status, answer) = call(&daemon, Method::PUT, "q/limits/held", Some(now)).await;
    assert_eq!(status, 200, "{answer}");
    let leased = daemon.lease_all("v", "q", 1).await;
    assert_eq!(leased[0]["limit_key"], "held");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_of_sql_takes_own_limits_back_with_it() {
    let config = "[queues.q]\nlimit_by = \"given\"\n";
    let mut daemon = Daemon::start(config, &[]).await;
    for key in ["kept", "changed", "new"] {
        daemon.insert(&tasks_of(key, 1)).await;
    }
    let set = async |daemon: &Daemon, key: &str, at_a_time: u32| {
        let body = json!({"at_a_time": at_a_time});
        let (status, answer) =
            call(daemon, Method::PUT, &format!("q/limits/{key}"), Some(body)).await;
        assert_eq!(status, 200, "{answer}");
        until("the shard knows it", async || {
            shows(daemon, key, &json!({"at_a_time": at_a_time})).await
        })
        .await;
    };
    set(&daemon, "kept", 3).await;
    set(&daemon, "changed", 4).await;
    let database = daemon.data().join("taskd.db");
    let backup = daemon.data().join("backup.db");
    assert!(daemon.stop().await.success());
    std::fs::copy(&database, &backup).expect("a copy");
    daemon.start_again();
    daemon.ready().await;
    set(&daemon, "changed", 0).await;
    set(&daemon, "new", 0).await;
    assert!(daemon.stop().await.success());
    std::fs::rename(&backup, &database).expect("the backup");
    daemon.start_again();
    daemon.ready().await;
    for (key, expected) in [
        ("kept", json!(3)),
        ("changed", json!(4)),
        ("new", json!(1000)),
    ] {
        until("the shard has what SQL has", async || {
            let path = format!("q/limits/{key}");
            let (_, shown) = call(&daemon, Method::GET, &path, None).await;
            shown["at_a_time"] == expected
        })
        .await;
    }
    assert_eq!(daemon.drain("w", "q").await.len(), 3);
    // Changes count from here.
    daemon.insert(&tasks_of("later", 1)).await;
    set(&daemon, "later", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mark_without_tasks_in_sql_goes_when_the_watchdog_begins() {
    let config = "[queues.q]\nlimit_by = \"given\"\n";
    let mut daemon = Daemon::start(config, &[]).await;
    daemon.insert(&tasks_of("k", 1)).await;
    assert_eq!(daemon.drain("w", "q").await.len(), 1);
    assert!(daemon.stop().await.success());
    daemon.start_again();
    daemon.ready().await;
    let mut redis = daemon.redis().await;
    let keys: Vec<String> = redis::cmd("KEYS")
        .arg("*{q:*:generation")
        .query_async(&mut redis)
        .await
        .expect("KEYS");
    let marks = keys[0].replace(":generation", ":crowded");
    let _: () = redis::cmd("ZADD")
        .arg(&marks)
        .arg(0)
        .arg("kkkkkkkk")
        .query_async(&mut redis)
        .await
        .expect("ZADD");
    // The watchdog that left the mark is gone.
    daemon.kill9_and_restart();
    daemon.ready().await;
    until("the mark is gone", async || {
        let mut redis = daemon.redis().await;
        let left: i64 = redis::cmd("ZCARD")
            .arg(&marks)
            .query_async(&mut redis)
            .await
            .expect("ZCARD");
        left == 0
    })
    .await;
}

/// How many own limits there may be in all queues together.
const MOST_OWN_LIMITS: u32 = 100_000;

#[tokio::test(flavor = "multi_thread")]
async fn one_own_limit_too_many_is_refused() {
    let config = "[queues.q]\nlimit_by = \"given\"\n";
    let daemon = Daemon::start(config, &[]).await;
    let digits = "SELECT 0 d UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 \
         UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9";
    let fill = format!(
        "INSERT INTO limits (queue, limit_key, at_a_time, pace, burst, hold_ms, at_ms, who, version, cleared) \
         SELECT 'other', CAST(a.d * 10000 + b.d * 1000 + c.d * 100 + e.d * 10 + f.d AS BLOB), \
         1, '', 0, 0, 0, 'ops', 0, 0 \
         FROM ({digits}) a, ({digits}) b, ({digits}) c, ({digits}) e, ({digits}) f LIMIT {}",
        MOST_OWN_LIMITS - 1
    );
    let url = format!("sqlite://{}", daemon.data().join("taskd.db").display());
    let mut connection = SqliteConnection::connect(&url).await.expect("SQLite");
    sqlx::query(AssertSqlSafe(fill))
        .execute(&mut connection)
        .await
        .expect("rows");
    connection.close().await.expect("closed");
    let body = json!({"at_a_time": 2});
    let set = async |key: &str| {
        let path = format!("q/limits/{key}");
        call(&daemon, Method::PUT, &path, Some(body.clone())).await
    };
    assert_eq!(set("last").await.0, 200);
    let (status, problem) = set("one-more").await;
    assert_eq!(status, 429, "{problem}");
    assert!(
        problem["detail"].to_string().contains("100000"),
        "{problem}"
    );
    assert_eq!(set("last").await.0, 200, "it has its place");
    let (status, _) = call(&daemon, Method::DELETE, "q/limits/last", None).await;
    assert_eq!(status, 200);
    assert_eq!(set("one-more").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_tasks_of_a_key_do_not_wait_for_thousands_of_another() {
    let config = "[queues.q]\nlimit_by = \"given\"\nlimit_at_a_time = 2\nhigh_water_tasks = 1000\n";
    let daemon = Daemon::start(config, &[]).await;
    // How many claims of a task each it takes until the ten are done.
    let claims = async |queue: &str| {
        let mut count = 0;
        let mut done = 0;
        while done < 10 {
            let tasks = daemon.lease("w", queue, 1, "5s").await;
            count += 1;
            assert!(count < 1000, "{done} are done");
            done += tasks
                .iter()
                .filter(|task| task["limit_key"] == "few")
                .count();
            assert_eq!(daemon.complete("w", &tasks).await, vec!["OK"; tasks.len()]);
        }
        count
    };
    daemon.insert(&tasks_of("few", 10)).await;
    let alone = claims("q").await;
    for part in 0..20 {
        let many: Vec<_> = (0..1000)
            .map(|n| json!({"queue": "q", "key": format!("many{part}-{n}"), "limit_key": "many"}))
            .collect();
        daemon.insert(&many).await;
    }
    until("the rest of the many waits in SQL", async || {
        let (_, books) = daemon.get("/v1/books?queue=q").await;
        books["queues"][0]["held"]["sql"]["fresh"] == 0
    })
    .await;
    let few: Vec<_> = (0..10)
        .map(|n| json!({"queue": "q", "key": format!("few{}", n + 10), "limit_key": "few"}))
        .collect();
    daemon.insert(&few).await;
    let beside = claims("q").await;
    assert!(
        beside <= 2 * alone + 2,
        "{beside} claims beside the many, {alone} alone"
    );
}
