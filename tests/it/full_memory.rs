//! A Redis at its `maxmemory`: what gives memory back still works, and taskd comes back by itself.

use std::time::{Duration, Instant};

use futures::{StreamExt, stream::FuturesUnordered};
use serde_json::{Value, json};
use taskd::wire::pb::{self, discovery_client::DiscoveryClient};

use crate::{
    shared_sessions::{Session, leases},
    support::{
        daemon::{Daemon, once, statuses},
        redis_private::PrivateRedis,
        until,
    },
};

/// Short, so that what is done leaves Redis soon.
const CONFIG: &str =
    "grace = \"1s\"\nrepublish_after = \"500ms\"\n[queues.default]\nlease = \"2m\"";

const TASKS: usize = 8000;

fn number(redis: &PrivateRedis, field: &str) -> u64 {
    let info = redis.run(&["info", "memory"]);
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{field}:")));
    line.and_then(|number| number.trim().parse().ok())
        .expect("a number of INFO memory")
}

fn used(redis: &PrivateRedis) -> u64 {
    number(redis, "used_memory") - number(redis, "mem_not_counted_for_evict")
}

/// From now on it is full.
fn fill(redis: &PrivateRedis) {
    let limit = used(redis) - 300_000;
    assert_eq!(
        redis.run(&["config", "set", "maxmemory", &limit.to_string()]),
        "OK"
    );
}

fn tasks(count: usize) -> String {
    let payload = "x".repeat(1000);
    let line = |n| json!({"queue": "q", "key": format!("key-{n}"), "payload": payload}).to_string();
    (0..count).map(line).collect::<Vec<_>>().join("\n")
}

async fn insert_all(daemon: &Daemon, count: usize) {
    let (status, answer) = daemon
        .post_text("/v1/tasks", "application/x-ndjson", tasks(count))
        .await;
    assert_eq!(status, 200, "{answer}");
    until("all are queued", async || {
        daemon.queue("q").await["waiting"] == count
    })
    .await;
}

/// Completes these, as often as it takes: the same completion again is `OK` again.
async fn complete_all(daemon: &Daemon, leased: &[Value]) {
    for some in leased.chunks(500) {
        let token = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"], "result": {"ok": true}});
        let body =
            json!({"worker": "w", "completions": some.iter().map(token).collect::<Vec<_>>()});
        until("completions are taken", async || {
            let Some((200, answer)) = daemon.try_post("/v1/tasks:complete", &body).await else {
                return false;
            };
            answer["results"]
                .as_array()
                .unwrap()
                .iter()
                .all(|one| one["status"] == "OK")
        })
        .await;
    }
}

/// Fills it, also while what was on its way is still given back.
async fn fill_up(daemon: &Daemon, redis: &PrivateRedis) {
    until("inserts are refused", async || {
        fill(redis);
        is_refused(daemon).await
    })
    .await;
}

async fn is_refused(daemon: &Daemon) -> bool {
    let task = json!([{"queue": "q", "key": "too-late"}]);
    let Some((status, answer)) = daemon.try_post("/v1/tasks", &task).await else {
        return false;
    };
    status == 429 && answer.to_string().contains("memory limit")
}

async fn completed(daemon: &Daemon) -> u64 {
    daemon.queue("q").await["completed"].as_u64().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_ask_while_redis_is_full_for_a_moment_get_their_tasks() {
    let redis = PrivateRedis::start(&[]);
    let daemon = Daemon::start(CONFIG, &["--redis-url", &redis.url()]).await;
    insert_all(&daemon, 100).await;
    // At full memory a shard has at most this many leases out.
    assert_eq!(daemon.lease("holder", "q", 20, "0s").await.len(), 20);
    let mut all = FuturesUnordered::new();
    assert_eq!(redis.run(&["config", "set", "maxmemory", "1"]), "OK");
    for n in 0..10 {
        let (daemon, worker) = (&daemon, format!("w{n}"));
        all.push(async move { daemon.lease(&worker, "q", 1, "50s").await });
    }
    // The guard, which looks once a second, does not have to see it.
    tokio::select! {
        _ = all.next() => {}
        () = tokio::time::sleep(Duration::from_millis(300)) => {}
    }
    assert_eq!(redis.run(&["config", "set", "maxmemory", "0"]), "OK");
    let room_again = Instant::now();
    while let Some(leased) = all.next().await {
        assert_eq!(leased.len(), 1, "after {:?}", room_again.elapsed());
    }
    assert!(
        room_again.elapsed() < Duration::from_secs(30),
        "{:?}",
        room_again.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_redis_drains_and_is_filled_again() {
    let redis = PrivateRedis::start(&[]);
    let mut daemon = Daemon::start(CONFIG, &["--redis-url", &redis.url()]).await;
    insert_all(&daemon, TASKS).await;
    let mut leased = daemon.lease_all("w", "q", TASKS / 2).await;
    fill_up(&daemon, &redis).await;
    let mut grpc = DiscoveryClient::connect(daemon.grpc()).await.unwrap();
    let task = pb::NewTask {
        queue: "q".into(),
        key: "late".into(),
        ..Default::default()
    };
    let refused = grpc
        .insert_tasks(pb::InsertTasksRequest {
            tasks: vec![task],
            ..Default::default()
        })
        .await
        .unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    until("readyz says that Redis is full", async || {
        // Redis may have freed what calls took meanwhile.
        fill(&redis);
        let (status, answer) = daemon.get("/readyz").await;
        assert!(
            answer["memory"]
                .as_str()
                .unwrap()
                .contains("% of its memory limit"),
            "{answer}"
        );
        (status, &answer["status"]) == (503, &"out of memory".into())
    })
    .await;
    assert!(
        daemon.lease("w", "q", 10, "200ms").await.is_empty(),
        "nothing is handed out"
    );

    // A fifth is done; then the process is killed. The next one starts on the full Redis, and goes
    // on.
    let rest = leased.split_off(TASKS / 10);
    complete_all(&daemon, &leased).await;
    until("reports reach SQL", async || {
        completed(&daemon).await == TASKS as u64 / 10
    })
    .await;
    fill(&redis);
    daemon.kill9_and_restart();
    complete_all(&daemon, &rest).await;
    until("reports reach SQL", async || {
        completed(&daemon).await == TASKS as u64 / 2
    })
    .await;

    // Nobody raises maxmemory: what was done makes room for the rest.
    until("inserts are taken again", async || {
        let (status, _) = daemon
            .post("/v1/tasks", &json!([{"queue": "q", "key": "again"}]))
            .await;
        status == 200
    })
    .await;
    assert!(used(&redis) < number(&redis, "maxmemory"));
    assert!(once(daemon.drain("w", "q").await).len() > TASKS / 2);
    daemon.ready().await;
}

#[tokio::test]
async fn a_completion_that_waits_for_replicas_is_taken_by_a_full_redis() {
    let redis = PrivateRedis::start(&[]);
    let replica = PrivateRedis::start(&[&format!("replicaof 127.0.0.1 {}", redis.port())]);
    until("it follows", async || {
        replica
            .run(&["info", "replication"])
            .contains("master_link_status:up")
    })
    .await;
    let config = format!("redis_wait_replicas = 1\n{CONFIG}");
    let daemon = Daemon::start(&config, &["--redis-url", &redis.url()]).await;
    insert_all(&daemon, 1000).await;
    let leased = daemon.lease_all("w", "q", 500).await;
    fill_up(&daemon, &redis).await;
    complete_all(&daemon, &leased).await;
    until("reports reach SQL", async || {
        completed(&daemon).await == 500
    })
    .await;
}

/// How often the watchdog has done this.
async fn handled(daemon: &Daemon, what: &str) -> f64 {
    let (_, metrics) = daemon.get("/metrics").await;
    let name = format!("taskd_watchdog_handled_tasks_total{{what=\"{what}\"}} ");
    let line = metrics
        .as_str()
        .unwrap()
        .lines()
        .find_map(|line| line.strip_prefix(&name).map(str::to_owned));
    line.map_or(0.0, |count| count.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_gives_memory_back_works_while_redis_stays_full() {
    let redis = PrivateRedis::start(&[]);
    let config = format!("{CONFIG}\nbackoff = [\"100ms\"]");
    let mut daemon = Daemon::start(&config, &["--redis-url", &redis.url()]).await;
    insert_all(&daemon, 500).await;
    let leased = daemon.lease_all("w", "q", 350).await;
    let briefly = json!({"worker": "w", "queues": ["q"], "max_tasks": 50, "lease_duration": "1s"});
    let (_, answer) = daemon.post("/v1/tasks:get", &briefly).await;
    assert_eq!(answer["tasks"].as_array().unwrap().len(), 50);
    // Otherwise they cost nothing, and nobody reports them.
    until("all leases count", async || {
        redis.run(&["keys", "taskd:{q:*}:undelivered"]).is_empty()
    })
    .await;
    // Less than an empty one needs: nothing that is freed helps.
    assert_eq!(redis.run(&["config", "set", "maxmemory", "1mb"]), "OK");
    daemon.kill9_and_restart();
    until("it has started", async || is_refused(&daemon).await).await;

    complete_all(&daemon, &leased[..200]).await;
    let (rejected, extended) = (&leased[200..300], &leased[300..]);
    let all_ok = |answer: &Value| statuses(answer).iter().all(|status| status == "OK");
    let token = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"], "retry": false});
    let body = json!({"worker": "w", "rejections": rejected.iter().map(token).collect::<Vec<_>>()});
    let (status, answer) = daemon.post("/v1/tasks:reject", &body).await;
    assert!(status == 200 && all_ok(&answer), "{answer}");
    let token =
        |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"], "by": "1h"});
    let body = json!({"worker": "w", "extensions": extended.iter().map(token).collect::<Vec<_>>()});
    let (status, answer) = daemon.post("/v1/tasks:extend", &body).await;
    assert!(status == 200 && all_ok(&answer), "{answer}");

    until("reports reach SQL", async || {
        completed(&daemon).await == 200
    })
    .await;
    until("the dead are in SQL", async || {
        daemon.queue("q").await["dead"] == 100
    })
    .await;
    until("so are their letters", async || {
        redis.run(&["xlen", "taskd:{bus}:dead-letters:0"]) == "100"
    })
    .await;
    until("the other leases run out", async || {
        redis.run(&["xlen", "taskd:{bus}:expirations:0"]) == "50"
    })
    .await;
    until("their tasks wait again", async || {
        handled(&daemon, "promoted").await >= 50.0
    })
    .await;
    until("what is final is forgotten", async || {
        handled(&daemon, "settled").await >= 300.0
    })
    .await;
    until("reports are trimmed", async || {
        redis.run(&["xlen", "taskd:{bus}:task-results:0"]) == "0"
    })
    .await;
    let backlog = redis.run(&["xpending", "taskd:{bus}:task-results:0", "taskd"]);
    assert!(backlog.starts_with('0'), "{backlog}");
    complete_all(&daemon, extended).await;

    redis.run(&["config", "set", "maxmemory", "0"]);
    daemon.ready().await;
    daemon.drain("w", "q").await;
}

/// Only what its worker reports would make room.
#[tokio::test]
async fn a_session_without_a_stream_opens_at_a_full_redis() {
    let redis = PrivateRedis::start(&[]);
    let daemon = Daemon::start(CONFIG, &["--redis-url", &redis.url()]).await;
    insert_all(&daemon, 10).await;
    // Less than an empty one needs.
    assert_eq!(redis.run(&["config", "set", "maxmemory", "1mb"]), "OK");
    let (session, _) = Session::open(&daemon, "w", json!({"want": 1})).await;
    let tasks = session.call(&daemon, "want", json!({"wait": "30s"})).await["tasks"].clone();
    let tasks: Vec<Value> = serde_json::from_value(tasks).unwrap();
    assert_eq!(tasks.len(), 1);
    let holding: Vec<_> = tasks.iter().map(|task| &task["id"]).collect();
    let (session, opened) = Session::open(
        &daemon,
        "w",
        json!({"session": session.id(), "holding": holding}),
    )
    .await;
    assert_eq!(opened["resumed"], true);
    let answer = session
        .call(&daemon, "report", json!({"completions": leases(&tasks)}))
        .await;
    assert_eq!(answer["counted"], 1, "{answer}");
    redis.run(&["config", "set", "maxmemory", "0"]);
    session.call(&daemon, "close", json!({})).await;
    daemon.drain("w", "q").await;
}

/// So that it has used this much of its limit.
fn limit_to(redis: &PrivateRedis, percent: u64) {
    let limit = used(redis) * 100 / percent;
    assert_eq!(
        redis.run(&["config", "set", "maxmemory", &limit.to_string()]),
        "OK"
    );
}

#[tokio::test]
async fn the_door_closes_before_redis_is_full_and_work_goes_on() {
    let redis = PrivateRedis::start(&[]);
    let daemon = Daemon::start(CONFIG, &["--redis-url", &redis.url()]).await;
    insert_all(&daemon, 100).await;
    limit_to(&redis, 85);
    until("inserts are refused", async || is_refused(&daemon).await).await;
    let (status, answer) = daemon.get("/readyz").await;
    assert_eq!(
        (status, &answer["status"]),
        (200, &"ready".into()),
        "it can work: {answer}"
    );
    assert!(
        answer["memory"]
            .as_str()
            .unwrap()
            .contains("% of its memory limit"),
        "{answer}"
    );
    let (_, metrics) = daemon.get("/metrics").await;
    assert!(
        metrics
            .as_str()
            .unwrap()
            .contains("taskd_redis_memory_limit_bytes{server="),
        "{metrics}"
    );

    // Tasks are handed out and completed; what is discovered meanwhile waits in SQL.
    let leased = daemon.lease_all("w", "q", 10).await;
    let done = |task: &Value| {
        let child = json!({"queue": "found", "key": task["key"]});
        json!({"id": task["id"], "lease_token": task["lease_token"], "discovered": [child]})
    };
    let body = json!({"worker": "w", "completions": leased.iter().map(done).collect::<Vec<_>>()});
    let (status, answer) = daemon.post("/v1/tasks:complete", &body).await;
    assert_eq!(status, 200, "{answer}");
    until("they are stored", async || {
        daemon.queue("found").await["pending"] == 10
    })
    .await;
    assert!(daemon.lease("w", "found", 10, "500ms").await.is_empty());

    redis.run(&["config", "set", "maxmemory", "0"]);
    assert_eq!(daemon.drain("w", "found").await.len(), 10);
    daemon.drain("w", "q").await;
}

#[tokio::test]
async fn what_stands_on_the_bus_of_a_full_redis_goes_back_to_sql() {
    let redis = PrivateRedis::start(&[]);
    let database = tempfile::tempdir().unwrap();
    let database = format!("sqlite://{}/taskd.db", database.path().display());
    let args = ["--redis-url", &redis.url(), "--database-url", &database];
    let stream = ["xlen", "taskd:{bus}:pipeline:0"];
    {
        let discovery =
            Daemon::start(CONFIG, &[&args[..], &["--pipelines", "discovery"]].concat()).await;
        let (status, answer) = discovery
            .post_text("/v1/tasks", "application/x-ndjson", tasks(1000))
            .await;
        assert_eq!(status, 200, "{answer}");
        until("all are on the bus", async || redis.run(&stream) == "1000").await;
    }
    // Nobody works on anything, so nothing else could make room.
    assert_eq!(redis.run(&["config", "set", "maxmemory", "1mb"]), "OK");
    let mut daemon = Daemon::begin(CONFIG, &args);
    until("the bus is empty", async || redis.run(&stream) == "0").await;
    assert_eq!(daemon.queue("q").await["pending"], 1000);
    redis.run(&["config", "set", "maxmemory", "0"]);
    daemon.ready().await;
    assert_eq!(once(daemon.drain("w", "q").await).len(), 1000);
}
