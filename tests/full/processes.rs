//! Several processes over the same backends.

use std::collections::BTreeMap;

use serde_json::json;

use crate::support::{
    daemon::Daemon,
    kafka,
    mariadb::MysqlDatabase,
    proxy::{Mode, Proxy, Upstream},
    redis::{Fsync, RedisServer, patient},
    store_contract::Database,
    until,
};

#[tokio::test]
async fn a_process_of_its_own_for_workers_finds_queues_that_are_younger_than_it() {
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let (redis_url, database_url) = (redis.url(), database.url());
    let backends = ["--redis-url", &redis_url, "--database-url", &database_url];
    let start = async |pipelines| {
        Daemon::start("", &[&["--pipelines", pipelines], &backends[..]].concat()).await
    };
    let mut workers = start("tasks").await;
    let mut others = start("discovery,fanout,watchdog").await;

    let id = {
        let task = [json!({"queue": "q", "key": "k"})];
        let (leased, ids) = tokio::join!(workers.lease("w", "q", 1, "1m"), others.insert(&task));
        assert_eq!(workers.complete("w", &leased).await, ["OK"]);
        ids[0].clone()
    };
    let path = format!("/v1/tasks/{id}/results");
    until("SQL has the result", async || {
        others.get(&path).await.1["results"][0]["worker"] == "w"
    })
    .await;
    assert!(workers.stop().await.success());
    assert!(others.stop().await.success());
    database.remove().await;
}

/// Each would take the tasks of the other for lost.
#[tokio::test]
async fn a_database_has_one_redis_at_a_time() {
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let (redis_url, database_url) = (redis.url(), database.url());
    let shared = ["--redis-url", &redis_url, "--database-url", &database_url];
    let mut first = Daemon::start("", &shared).await;
    // Without the Redis of the others, it runs its own.
    let mut alone = Daemon::begin("", &["--database-url", &database_url]);
    assert_eq!(alone.ended().await.code(), Some(1));
    let log = alone.log();
    assert!(
        log.contains("taskd: another taskd runs on this database with another Redis"),
        "{log}"
    );
    // Another one of the same Redis does not wait, also when it was emptied.
    let mut second = Daemon::start("", &shared).await;
    first.insert(&[json!({"queue": "q", "key": "a"})]).await;
    let mut connection = patient(redis_url.as_str()).await;
    redis::cmd("FLUSHALL")
        .query_async::<()>(&mut connection)
        .await
        .unwrap();
    // It starts over, and takes no calls meanwhile.
    second.works_again("q").await;
    until("SQL has the result", async || {
        first.unfinished("q").await == 0
    })
    .await;
    assert!(second.stop().await.success());
    assert!(
        !second.log().contains("used with another Redis"),
        "{}",
        second.log()
    );

    first.insert(&[json!({"queue": "q", "key": "b"})]).await;
    until("it is queued", async || {
        first.queue("q").await["waiting"] == 1
    })
    .await;
    first.kill9();
    alone.start_again();
    alone.ready().await;
    assert_eq!(alone.work("w", "q", 1).await, ["b"]);
    // The first one comes again, and is the second one now.
    first.start_again();
    assert_eq!(first.ended().await.code(), Some(1));
    assert!(alone.stop().await.success());
    database.remove().await;
}

async fn leads(daemon: &Daemon) -> bool {
    let metrics = daemon
        .try_get("/metrics")
        .await
        .map(|(_, text)| text.as_str().unwrap_or_default().to_owned());
    metrics.is_some_and(|text| {
        text.lines()
            .any(|line| line == "taskd_watchdog_leading_processes 1")
    })
}

/// Leases run out and partitions are read, whichever of the two processes lives; and one at a time
/// does it.
#[tokio::test]
async fn what_one_process_at_a_time_does_moves_when_it_dies_or_stops() {
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let (redis_url, database_url) = (redis.url(), database.url());
    let config =
        "partitions = 2\n[queues.q]\nlease = \"2s\"\nmax_attempts = 100\nbackoff = [\"10ms\"]";
    let backends = ["--redis-url", &redis_url, "--database-url", &database_url];
    let mut daemons = [
        Daemon::start(config, &backends).await,
        Daemon::start(config, &backends).await,
    ];
    for round in 0..4 {
        let mut leader = None;
        until("one leads", async || {
            leader = match (leads(&daemons[0]).await, leads(&daemons[1]).await) {
                (true, false) => Some(0),
                (false, true) => Some(1),
                // Two that say they lead were asked while the lead moved.
                (false, false) | (true, true) => None,
            };
            leader.is_some()
        })
        .await;
        let leader = leader.unwrap();
        let [first, second] = &mut daemons;
        let (leader, other) = if leader == 0 {
            (first, second)
        } else {
            (second, first)
        };
        let tasks: Vec<_> = (0..10)
            .map(|n| json!({"queue": "q", "key": format!("{round}/{n}")}))
            .collect();
        other.insert(&tasks).await;
        other.lease_all("sleeps", "q", 10).await;
        match round % 2 {
            0 => leader.kill9(),
            _ => assert!(leader.stop().await.success()),
        }
        assert_eq!(other.drain("works", "q").await.len(), 10);
        until("the other leads", async || leads(other).await).await;
        leader.start_again();
        leader.ready().await;
    }
    for daemon in &mut daemons {
        assert!(daemon.stop().await.success());
    }
    database.remove().await;
}

/// It still has Redis, and so the lease.
#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_reach_the_database_leaves_the_watchdogs_work_to_another() {
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let mut by_proxy = url::Url::parse(&database.url()).unwrap();
    let proxy = Proxy::start().await;
    proxy.lead_to(Upstream::Tcp(format!(
        "{}:{}",
        by_proxy.host_str().unwrap(),
        by_proxy.port().unwrap_or(3306)
    )));
    by_proxy.set_host(Some("127.0.0.1")).unwrap();
    by_proxy.set_port(Some(proxy.port())).unwrap();
    let start = async |database_url: &str| {
        Daemon::start(
            "stall_after = \"3s\"",
            &["--redis-url", &redis.url(), "--database-url", database_url],
        )
        .await
    };
    let mut cut_off = start(by_proxy.as_str()).await;
    until("it leads", async || leads(&cut_off).await).await;
    let mut other = start(&database.url()).await;
    proxy.set(Mode::Refuse);
    until("the other leads", async || leads(&other).await).await;
    proxy.set(Mode::Pass);
    for daemon in [&mut cut_off, &mut other] {
        assert!(daemon.stop().await.success());
    }
    database.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_are_killed_one_after_the_other_and_nothing_is_lost_on_redis_streams() {
    kill_processes(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_are_killed_one_after_the_other_and_nothing_is_lost_on_kafka() {
    kill_processes(Some(format!("kafka://{}", kafka::shared().await))).await;
}

const TASKS: usize = 3000;
const REPLICAS: usize = 2;

/// Three processes, each killed and started again twice, while tasks are put in and worked off
/// through all of them.
async fn kill_processes(bus: Option<String>) {
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let prefix = format!("processes-{}-", uuid::Uuid::new_v4());
    let (redis_url, database_url) = (redis.url(), database.url());
    let mut backends = vec![
        "--redis-url",
        &redis_url,
        "--database-url",
        &database_url,
        "--topic-prefix",
        &prefix,
    ];
    if let Some(bus) = &bus {
        backends.extend(["--bus-url", bus]);
    }
    let config =
        "partitions = 3\n[queues.q]\nlease = \"1s\"\nmax_attempts = 100\nbackoff = [\"10ms\"]";
    let mut daemons = Vec::new();
    for _ in 0..3 {
        daemons.push(Daemon::start(config, &backends).await);
    }
    let urls: Vec<_> = daemons.iter().map(Daemon::http).collect();
    let stop = tokio_util::sync::CancellationToken::new();
    let _stop_when_dropped = stop.clone().drop_guard();
    let workers: Vec<_> = (0..6)
        .map(|n| tokio::spawn(work(format!("w{n}"), urls[n % 3].clone(), stop.clone())))
        .collect();

    // Through one process after the other, each call until it is answered.
    let inserts = async {
        let client = crate::support::http_client();
        for first in (0..TASKS).step_by(50) {
            let tasks: Vec<_> = (first..first + 50)
                .map(|n| json!({"queue": "q", "key": n.to_string(), "replicas": REPLICAS}))
                .collect();
            let url = format!("{}/v1/tasks", urls[first / 50 % 3]);
            until("the insert is answered", async || {
                client
                    .post(&url)
                    .json(&tasks)
                    .send()
                    .await
                    .is_ok_and(|answer| answer.status().is_success())
            })
            .await;
        }
    };
    let kills = async {
        for round in 0..6 {
            let completed =
                async |daemon: &Daemon| daemon.queue("q").await["completed"].as_u64().unwrap_or(0);
            let other = (round + 1) % 3;
            until("work goes on", async || {
                completed(&daemons[other]).await >= round as u64 * TASKS as u64 / 8
            })
            .await;
            daemons[round % 3].kill9_and_restart();
            daemons[round % 3].ready().await;
        }
    };
    tokio::join!(inserts, kills);
    until("all is done", async || {
        daemons[0].queue("q").await["completed"] == TASKS
    })
    .await;
    stop.cancel();
    let mut answered = 0;
    for worker in workers {
        answered += worker.await.unwrap();
    }
    // Some answers were lost on the way; none was given twice.
    assert!(
        answered <= TASKS * REPLICAS,
        "{answered} completions were answered OK"
    );
    let queue = daemons[0].queue("q").await;
    assert_eq!(queue["dead"], 0, "{queue}");
    let done = format!(
        "SELECT COUNT(*) FROM (SELECT task_id FROM results GROUP BY task_id HAVING COUNT(*) = {REPLICAS}) AS done"
    );
    assert_eq!(database.number(&done).await, TASKS as i64);
    assert_eq!(
        database.number("SELECT COUNT(*) FROM results").await,
        (TASKS * REPLICAS) as i64
    );
    until("the outbox is empty", async || {
        database.number("SELECT COUNT(*) FROM outbox").await == 0
    })
    .await;
    let waiting = "SELECT COUNT(*) FROM batches WHERE generation = ''";
    until("no batch waits", async || {
        database.number(waiting).await == 0
    })
    .await;
    for daemon in &mut daemons {
        assert!(daemon.stop().await.success());
    }
    database.remove().await;
}

/// Leases and completes until the stop, whatever is answered; how many completions were answered OK
/// for the first time.
pub(crate) async fn work(
    worker: String,
    url: String,
    stop: tokio_util::sync::CancellationToken,
) -> usize {
    let client = crate::support::http_client();
    let mut ok = BTreeMap::new();
    let call = async |path: &str, body: serde_json::Value| -> Option<serde_json::Value> {
        let answer = client
            .post(format!("{url}{path}"))
            .json(&body)
            .send()
            .await
            .ok()?;
        answer.error_for_status().ok()?.json().await.ok()
    };
    while !stop.is_cancelled() {
        let get = json!({"worker": worker, "queues": ["q"], "max_tasks": 20, "wait": "200ms"});
        let Some(answer) = call("/v1/tasks:get", get).await else {
            tokio::task::yield_now().await;
            continue;
        };
        let completions: Vec<_> = answer["tasks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|task| json!({"id": task["id"], "lease_token": task["lease_token"], "result": 1}))
            .collect();
        let Some(answer) = call(
            "/v1/tasks:complete",
            json!({"worker": worker, "completions": completions}),
        )
        .await
        else {
            continue;
        };
        for result in answer["results"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|result| result["status"] == "OK")
        {
            *ok.entry(result["id"].to_string()).or_insert(0) += 1;
        }
    }
    assert!(
        ok.values().all(|times| *times == 1),
        "a worker was credited twice"
    );
    ok.len()
}
