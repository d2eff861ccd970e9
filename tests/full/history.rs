//! Histories on MariaDB and Kafka, with two processes of which one is killed.

use serde_json::{Value, json};

use crate::{
    bus_kafka::broker,
    support::{
        bus_contract::Backend,
        daemon::Daemon,
        mariadb::MysqlDatabase,
        redis::{Fsync, RedisServer},
        store_contract::Database,
        until,
    },
};

const CONFIG: &str = "[queues.default]\nbackoff = [\"0s\"]\nmax_attempts = 5\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_attempt_is_in_the_history_also_when_a_process_is_killed() {
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let broker = broker().await;
    let config = broker.config();
    let (redis_url, bus, sql) = (
        redis.url(),
        format!("kafka://{}", config.brokers),
        database.url(),
    );
    let topics = &config.topic_prefix;
    let args = [
        "--redis-url",
        &redis_url,
        "--bus-url",
        &bus,
        "--database-url",
        &sql,
        "--topic-prefix",
        topics,
    ];
    let mut first = Daemon::start(CONFIG, &args).await;
    let mut second = Daemon::start(CONFIG, &args).await;
    let new: Vec<Value> = (0..50)
        .map(|n| json!({"queue": "q", "key": format!("{n}"), "payload": n}))
        .collect();
    let ids = first.insert(&new).await;
    // A worker claims from one process and reports to the other.
    let leased = first.lease_all("a", "q", 50).await;
    let item = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"], "reason": "no luck"});
    let rejections: Vec<_> = leased.iter().map(item).collect();
    second
        .post(
            "/v1/tasks:reject",
            &json!({"worker": "a", "rejections": rejections}),
        )
        .await;
    second.kill9_and_restart();
    let leased = first.lease_all("b", "q", 50).await;
    assert!(
        first
            .complete("b", &leased)
            .await
            .iter()
            .all(|status| status == "OK")
    );
    second.ready().await;
    for id in &ids {
        let mut task = Value::Null;
        until("both attempts are there", async || {
            task = second.get(&format!("/v1/tasks/{id}")).await.1;
            task["history"]
                .as_array()
                .is_some_and(|history| history.len() == 2)
                && task["results"] == 1
        })
        .await;
        let attempt = |n: usize| {
            let one = &task["history"][n];
            let text = |name: &str| one[name].as_str().unwrap_or_default().to_owned();
            (
                text("state"),
                text("worker"),
                !text("from").is_empty() && text("from") <= text("until"),
            )
        };
        assert_eq!(attempt(0), ("REJECTED".into(), "a".into(), true), "{task}");
        assert_eq!(attempt(1), ("COMPLETED".into(), "b".into(), true), "{task}");
    }
    assert!(first.stop().await.success() && second.stop().await.success());
    broker.remove().await;
    database.remove().await;
}
