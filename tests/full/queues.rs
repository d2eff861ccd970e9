//! How many queues there may be, and what becomes of one that nobody uses any more: through the
//! running binary.

use redis::AsyncCommands;
use serde_json::{Value, json};

use crate::support::{
    daemon::{Daemon, keys, once, statuses},
    redis::{Fsync, RedisServer},
    until,
};

fn task(queue: &str, key: &str) -> Value {
    json!({"queue": queue, "key": key})
}

async fn metrics(daemon: &Daemon) -> String {
    daemon
        .get("/metrics")
        .await
        .1
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

#[tokio::test]
async fn names_beyond_max_queues_are_rejected_while_the_others_go_on() {
    let config = "max_queues = 3\n[queues.named]\nlease = \"20s\"";
    let mut daemon = Daemon::start(config, &[]).await;
    daemon
        .insert(&[task("a", "key-0"), task("b", "key-0"), task("c", "key-0")])
        .await;
    let tasks = json!([
        task("a", "key-1"),
        task("d", "key-0"),
        task("named", "key-0"),
        task("e", "key-0"),
        task("c", "key-1")
    ]);
    let answer = daemon.post("/v1/tasks", &tasks).await.1;
    assert_eq!(
        statuses(&answer),
        ["CREATED", "REJECTED", "CREATED", "REJECTED", "CREATED"],
        "{answer}"
    );
    let error = answer["results"][1]["error"].as_str().unwrap();
    assert_eq!(
        error,
        "queue d is new, and there are 3 queues already (max_queues); use one of those"
    );
    for (queue, count) in [("a", 2), ("b", 1), ("c", 2), ("named", 1)] {
        assert_eq!(
            once(daemon.drain("w", queue).await),
            keys(0, count),
            "{queue}"
        );
    }
    // A start remembers the names by the shards that they opened.
    daemon.kill9_and_restart();
    daemon.ready().await;
    let answer = daemon
        .post(
            "/v1/tasks",
            &json!([task("b", "key-1"), task("d", "key-0")]),
        )
        .await
        .1;
    assert_eq!(statuses(&answer), ["CREATED", "REJECTED"], "{answer}");
    assert!(
        metrics(&daemon)
            .await
            .contains("taskd_discovery_dropped_tasks_total{reason=\"max_queues\"} 1")
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_queue_that_was_empty_for_long_gives_back_what_it_costs_and_comes_again() {
    let server = RedisServer::start(Fsync::Always);
    let database = tempfile::tempdir().unwrap();
    let database = format!("sqlite://{}/t.db", database.path().display());
    let config = "grace = \"1s\"\nforget_queues_after = \"1s\"\nmax_queues = 2";
    let start = async |pipelines| {
        let args = [
            "--redis-url",
            &server.url(),
            "--database-url",
            &database,
            "--pipelines",
            pipelines,
        ];
        Daemon::start(config, &args).await
    };
    // One process fans out, another one closes the queue.
    let (mut daemon, mut watchdog) = (
        start("discovery,fanout,tasks").await,
        start("watchdog").await,
    );
    let mut redis = crate::support::redis::patient(server.url()).await;
    daemon.insert(&[task("busy", "waits")]).await;
    daemon.insert(&[task("q", "key-0")]).await;
    assert!(metrics(&watchdog).await.contains("# TYPE"));
    until("its depth is shown", async || {
        metrics(&watchdog).await.contains("queue=\"q\"")
    })
    .await;
    let mut last = 0;
    for life in 1..=3 {
        let tasks = daemon.lease_all("w", "q", 1).await;
        let token: Vec<_> = tasks[0]["lease_token"]
            .as_str()
            .unwrap()
            .split(':')
            .collect();
        let generation: u64 = token[2].parse().unwrap();
        assert!(
            generation > last,
            "life {life} of the shard has a number of its own: {token:?}"
        );
        last = generation;
        assert_eq!(daemon.complete("w", &tasks).await, ["OK"]);
        until("the queue has no keys", async || {
            let of_shard: Vec<String> = redis.keys("taskd:{q:0}:*").await.unwrap();
            let filter: bool = redis.exists("taskd:{q}:seen").await.unwrap();
            of_shard.is_empty() && !filter
        })
        .await;
        until("it is not listed", async || {
            daemon.queue("q").await.is_null() && watchdog.queue("q").await.is_null()
        })
        .await;
        assert_eq!(daemon.queue("busy").await["waiting"], 1);
        // Keys of before are remembered; a new one opens the queue again.
        let answer = daemon
            .post(
                "/v1/tasks",
                &json!([task("q", &format!("key-{}", life - 1))]),
            )
            .await
            .1;
        assert_eq!(statuses(&answer), ["DUPLICATE"], "{answer}");
        if life < 3 {
            daemon.insert(&[task("q", &format!("key-{life}"))]).await;
        }
    }
    until("its series are gone", async || {
        !metrics(&watchdog).await.contains("queue=\"q\"")
    })
    .await;
    until("its counters are gone", async || {
        !metrics(&daemon).await.contains("queue=\"q\"")
    })
    .await;
    assert!(metrics(&watchdog).await.contains("queue=\"busy\""));
    assert!(
        !watchdog.log().contains("redis has lost"),
        "{}",
        watchdog.log()
    );
    // Its name makes room.
    until("another name is let in", async || {
        statuses(
            &daemon
                .post("/v1/tasks", &json!([task("another", "key")]))
                .await
                .1,
        ) != ["REJECTED"]
    })
    .await;
    assert!(daemon.stop().await.success());
    assert!(watchdog.stop().await.success());
}

#[tokio::test]
async fn what_waits_in_sql_has_an_age() {
    // Ten may live at a time, so the rest stays parked while nine are held.
    let mut daemon = Daemon::start("[queues.q]\nhigh_water_tasks = 1\nlease = \"10m\"", &[]).await;
    daemon.insert(&[task("q", "key-0")]).await;
    assert_eq!(daemon.lease_all("w", "q", 1).await.len(), 1);
    until("nothing waits", async || {
        daemon.queue("q").await["oldest_waiting_ms"].is_null()
    })
    .await;
    let tasks: Vec<_> = (1..15).map(|n| task("q", &format!("key-{n}"))).collect();
    daemon.insert(&tasks).await;
    until("only parked ones wait, and have an age", async || {
        daemon.lease("w", "q", 1, "0s").await;
        let queue = daemon.queue("q").await;
        queue["waiting"] == 0
            && queue["pending"].as_u64() > Some(3)
            && queue["oldest_waiting_ms"].is_u64()
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_queue_that_holds_one_task_lets_parked_ones_out() {
    let mut daemon = Daemon::start("[queues.q]\nhigh_water_tasks = 1", &[]).await;
    daemon
        .insert(
            &(0..5)
                .map(|n| task("q", &format!("key-{n}")))
                .collect::<Vec<_>>(),
        )
        .await;
    assert_eq!(daemon.drain("w", "q").await.len(), 5);
    assert!(daemon.stop().await.success());
}
