//! Watchers on one process, workers on another.

use serde_json::json;

use crate::{
    columns::events::Events,
    support::{
        daemon::Daemon,
        mariadb::MysqlDatabase,
        redis::{Fsync, RedisServer},
        store_contract::Database as _,
    },
};

#[tokio::test]
async fn a_watcher_hears_of_what_another_process_does() {
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let (redis_url, database_url) = (redis.url(), database.url());
    let backends = ["--redis-url", &redis_url, "--database-url", &database_url];
    let start = async |pipelines| {
        Daemon::start("", &[&["--pipelines", pipelines], &backends[..]].concat()).await
    };
    let workers = start("tasks").await;
    let mut others = start("fanout,watchdog").await;
    let mut inserts = start("discovery").await;
    // `workers` serves the watches, too: it reads SQL and Redis, and hears of steps of the other
    // two.
    let id = inserts
        .insert(&[json!({"queue": "q", "key": "k"})])
        .await
        .remove(0);
    let mut of_queue = Events::open(&workers, "/v1/events?queue=q", "", None).await;
    let mut elsewhere = Events::of_task(&inserts, &id).await;
    let mut here = Events::of_task(&workers, &id).await;
    let leased = workers.lease_all("w", "q", 1).await;
    here.until("ASSIGNED").await;
    elsewhere.until("ASSIGNED").await;
    let task = json!({"queue": "q", "key": "k"});
    let wait = inserts.post("/v1/tasks?wait=50s", &task);
    let complete = async { assert_eq!(workers.complete("w", &leased).await, ["OK"]) };
    let ((_, answer), ()) = tokio::join!(wait, complete);
    assert_eq!(answer["results"][0]["task_status"], "COMPLETED", "{answer}");
    assert_eq!(here.rest().await, ["COMPLETED"]);
    assert_eq!(elsewhere.rest().await, ["COMPLETED"]);
    loop {
        let (_, data) = of_queue.next().await.unwrap();
        if data["status"] == "COMPLETED" {
            assert_eq!(data["id"], id);
            break;
        }
    }
    // The next task meets a queue that is watched already: all its steps are told.
    let next = inserts
        .insert(&[json!({"queue": "q", "key": "next"})])
        .await
        .remove(0);
    let leased = workers.lease_all("w", "q", 1).await;
    assert_eq!(workers.complete("w", &leased).await, ["OK"]);
    let mut seen = Vec::new();
    while seen.last().is_none_or(|status| status != "COMPLETED") {
        let (_, data) = of_queue.next().await.unwrap();
        if data["id"] == next {
            seen.push(data["status"].as_str().unwrap().to_owned());
        }
    }
    assert!(seen.contains(&"ASSIGNED".to_owned()), "{seen:?}");
    assert!(inserts.stop().await.success());
    assert!(others.stop().await.success());
    database.remove().await;
}
