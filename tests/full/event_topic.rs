//! Topic `events` of several processes on MariaDB and Kafka.

use serde_json::json;
use taskd::model::TaskStatus::{Completed, Pending};

use crate::support::{
    daemon::Daemon,
    event_topic::{events, in_order},
    kafka,
    mariadb::MysqlDatabase,
    redis::{Fsync, RedisServer},
    redis_cluster::own_prefix,
    store_contract::Database as _,
    until,
};

const TASKS: usize = 200;

#[tokio::test(flavor = "multi_thread")]
async fn of_two_processes_one_is_killed_and_no_end_is_missing() {
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let (bus, topics) = (
        format!("kafka://{}", kafka::shared().await),
        format!("{}.", own_prefix()),
    );
    let (redis_url, database_url) = (redis.url(), database.url());
    let backends = ["--redis-url", &redis_url, "--database-url", &database_url];
    let backends = [
        &backends[..],
        &[
            "--bus-url",
            &bus,
            "--topic-prefix",
            &topics,
            "--partitions",
            "2",
        ],
    ]
    .concat();
    let start = || Daemon::start("[queues.default]\nevents = true", &backends);
    let (mut first, mut second) = (start().await, start().await);
    let tasks: Vec<_> = (0..TASKS)
        .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
        .collect();
    first.insert(&tasks[..TASKS / 2]).await;
    second.insert(&tasks[TASKS / 2..]).await;
    let mut done = 0;
    until("all are done", async || {
        let worker = if done < TASKS / 2 { &first } else { &second };
        let leased = worker.lease("w", "q", 20, "5s").await;
        done += leased.len();
        assert!(
            worker
                .complete("w", &leased)
                .await
                .iter()
                .all(|status| status == "OK")
        );
        if done >= TASKS / 2 && first.end().is_none() {
            // It leads, and publishes the events.
            first.kill9();
        }
        done >= TASKS
    })
    .await;
    let mut all = Vec::new();
    until("each task has its end on the topic", async || {
        all = events(&second).await;
        let statuses = in_order(&all);
        statuses.len() == TASKS
            && statuses
                .values()
                .all(|statuses| *statuses == [Pending, Completed])
    })
    .await;
    assert!(second.stop().await.success());
    database.remove().await;
}
