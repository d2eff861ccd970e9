//! A database and a Kafka that are away under a running taskd: they are named, and calls that do
//! not need them go on. tests/it/outages.rs has Redis.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{
    silent_servers::way_to,
    support::{
        daemon::Daemon,
        kafka::KafkaServer,
        mariadb::{MariadbServer, MysqlDatabase},
        proxy::{Mode, Proxy},
        store_contract::Database,
        until,
    },
};

/// The value of a series in `/metrics`.
async fn metric(daemon: &Daemon, series: &str) -> Option<f64> {
    let text = daemon.get("/metrics").await.1;
    let line = text
        .as_str()?
        .lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line?.trim().parse().ok()
}

async fn is_named_as_away(daemon: &Daemon, server: &str, in_log: &str) {
    until("readyz names the server", async || {
        let (status, answer) = daemon.get("/readyz").await;
        let away = answer["away"]
            .as_array()
            .is_some_and(|away| away.iter().any(|one| one["server"] == server));
        // A loop that stalls meanwhile makes it 503.
        away && (status == 503 || answer["status"] == "degraded")
    })
    .await;
    assert!(daemon.log().contains(in_log), "{}", daemon.log());
    assert_eq!(
        metric(daemon, &format!("taskd_server_up{{server=\"{server}\"}}")).await,
        Some(0.0)
    );
}

async fn is_back(daemon: &Daemon, server: &str, in_log: &str) {
    until("readyz is content", async || {
        daemon.get("/readyz").await == (200, json!({"status": "ready"}))
    })
    .await;
    assert!(daemon.log().contains(in_log), "{}", daemon.log());
    assert_eq!(
        metric(daemon, &format!("taskd_server_up{{server=\"{server}\"}}")).await,
        Some(1.0)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_database_is_named_and_workers_go_on() {
    let server = MariadbServer::start(&[]);
    let daemon = Daemon::start("", &["--database-url", server.url()]).await;
    daemon
        .insert(&[
            json!({"queue": "q", "key": "1"}),
            json!({"queue": "q", "key": "2"}),
        ])
        .await;
    let first = daemon.lease_all("w", "q", 1).await;
    until("both are in Redis", async || {
        daemon.queue("q").await["waiting"] == 1
    })
    .await;

    server.kill9();
    is_named_as_away(&daemon, "database", "the database is away: ").await;
    // The queue alone answers these.
    assert_eq!(daemon.complete("w", &first).await, ["OK"]);
    let second = daemon.lease_all("w", "q", 1).await;
    assert_eq!(daemon.complete("w", &second).await, ["OK"]);
    // These need SQL. A call that begins during an outage does not wait for the time of a restart,
    // 20 s and more.
    for call in ["insert", "list"] {
        let began = Instant::now();
        let (status, answer) = match call {
            "insert" => {
                daemon
                    .post("/v1/tasks", &json!([{"queue": "q", "key": "3"}]))
                    .await
            }
            _ => daemon.get("/v1/tasks?queue=q").await,
        };
        assert_eq!(status, 503, "{call}: {answer}");
        assert!(
            began.elapsed() < Duration::from_secs(18),
            "{call}: {:?} {answer}",
            began.elapsed()
        );
    }

    server.start_again();
    is_back(&daemon, "database", "the database answers again, after ").await;
    assert_eq!(
        daemon
            .post("/v1/tasks", &json!([{"queue": "q", "key": "3"}]))
            .await
            .0,
        200
    );
    daemon.drain("w", "q").await;
    assert_eq!(daemon.queue("q").await["completed"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_database_is_named() {
    let database = MysqlDatabase::create().await;
    let (proxy, url) = way_to(&database).await;
    let daemon = Daemon::start("", &["--database-url", url.as_str()]).await;
    assert_eq!(daemon.get("/readyz").await.1, json!({"status": "ready"}));
    proxy.set(Mode::Stall);
    is_named_as_away(&daemon, "database", "the database is away: ").await;
    proxy.set(Mode::Pass);
    is_back(&daemon, "database", "the database answers again, after ").await;
    drop(daemon);
    database.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kafka_that_is_away_is_named_and_inserts_and_workers_go_on() {
    let proxy = Proxy::start().await;
    let kafka = KafkaServer::start_behind(&proxy).await;
    let bus = format!("kafka://{}", kafka.brokers());
    let daemon = Daemon::start("", &["--bus-url", &bus]).await;
    daemon
        .insert(&[json!({"queue": "q", "key": "first"})])
        .await;
    let leased = daemon.lease_all("w", "q", 1).await;
    assert_eq!(
        metric(&daemon, "taskd_server_up{server=\"bus\"}").await,
        Some(1.0)
    );
    proxy.set(Mode::Refuse);
    is_named_as_away(&daemon, "bus", "the bus is away: ").await;
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    daemon
        .insert(&[json!({"queue": "q", "key": "second"})])
        .await;
    assert_ne!(
        daemon.get("/v1/tasks?queue=q").await.1["tasks"],
        Value::Null
    );
    proxy.set(Mode::Pass);
    is_back(&daemon, "bus", "the bus answers again, after ").await;
    assert_eq!(daemon.drain("w", "q").await, ["second"]);
}
