//! Places of a task that a test makes inside taskd's own servers.

use serde_json::json;
use taskd::store::{Store, sqlite::SqliteStore};

use crate::{
    columns::explain::{CONFIG, explain, insert, reason, until_at},
    support::{daemon::Daemon, store_contract, until},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_task_is_in_the_outbox_until_it_is_published_and_reported_until_sql_has_its_end() {
    let config = CONFIG.replace("partitions = 1", "partitions = 4");
    let mut daemon = Daemon::start(&config, &["--pipelines", "tasks"]).await;
    // As by an inserter that died right behind its commit.
    let row = store_contract::row("q", "a");
    let store = SqliteStore::open(&daemon.data().join("taskd.db"), None).await.unwrap();
    store_contract::insert_new(&store, std::slice::from_ref(&row)).await;
    store.close().await;
    let id = row.task.id.to_string();
    let stored = explain(&daemon, &id, "w").await;
    assert_eq!((&stored["place"], reason(&stored)), (&json!("OUTBOX"), "NOT_IN_QUEUE"));
    assert!(stored["next_at"].is_string(), "the watchdog's time: {stored}");
    assert!(daemon.stop().await.success());

    let daemon = Daemon::start_in_the_folder_of(daemon, &["--pipelines", "fanout,tasks,watchdog"]).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    // No process settles reports.
    let reported = explain(&daemon, &id, "w").await;
    assert_eq!((&reported["place"], reason(&reported)), (&json!("REPORTED"), "COMPLETED_IT"));
    assert_eq!(reason(&explain(&daemon, &id, "v").await), "FINISHED");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_redis_lost_is_lost_until_the_watchdog_finds_it() {
    let daemon = Daemon::start(CONFIG, &["--pipelines", "discovery,fanout,tasks"]).await;
    let id = insert(&daemon, json!({"queue": "q", "key": "a"})).await;
    until_at(&daemon, &id, "WAITING", "w").await;
    let mut redis = daemon.redis().await;
    // The mark in SQL comes at the next tick.
    until("SQL knows that it is published", async || {
        let _: () = redis::cmd("DEL").arg("taskd:{q:0}:records").query_async(&mut redis).await.unwrap();
        explain(&daemon, &id, "w").await["place"] == "LOST"
    })
    .await;
    let _: () = redis::cmd("DEL").arg("taskd:{q:0}:generation").query_async(&mut redis).await.unwrap();
    // With its whole shard; the commit of the fanout comes at a tick, too.
    assert_eq!(reason(&until_at(&daemon, &id, "LOST", "w").await), "NOT_IN_QUEUE");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_with_a_full_outbox_gives_nobody_anything() {
    // No process forwards reports.
    let daemon = Daemon::start(CONFIG, &["--pipelines", "discovery,fanout"]).await;
    let id = insert(&daemon, json!({"queue": "q", "key": "a"})).await;
    until_at(&daemon, &id, "WAITING", "w").await;
    let mut fill = redis::cmd("HSET");
    fill.arg("taskd:{q:0}:counters").arg("outbox_bytes").arg(64 << 20);
    fill.exec_async(&mut daemon.redis().await).await.unwrap();
    let paused = explain(&daemon, &id, "w").await;
    assert_eq!((&paused["place"], reason(&paused)), (&json!("WAITING"), "CLAIMS_PAUSED"));
    let note = "shard q:0 gives no worker anything now: its outbox is full, because the bus takes no reports";
    assert_eq!(paused["notes"], json!([note]));
}
