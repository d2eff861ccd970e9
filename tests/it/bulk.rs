//! Bulk changes whose process is killed, and bulk changes whose shards do not answer for a while.

use std::collections::BTreeSet;

use serde_json::json;
use sqlx::{Connection, SqliteConnection};

use crate::{
    columns::{
        bulk::{dead_tasks, ended, insert_keys, targets},
        dead_letters::ONE_ATTEMPT,
    },
    support::{
        daemon::{Daemon, keys, once},
        until,
    },
};

const TASKS: usize = 1500;

async fn start(daemon: &Daemon) -> String {
    let (status, answer) = daemon
        .post(
            "/v1/tasks:retry",
            &json!({"filter": {"queue": "q"}, "yes": true}),
        )
        .await;
    assert_eq!(status, 200, "{answer}");
    answer["bulk"]["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_bulk_change_that_is_killed_goes_on_and_changes_each_task_once() {
    let mut daemon = Daemon::start(ONE_ATTEMPT, &[]).await;
    let ids = dead_tasks(&daemon, "q", 0, TASKS).await;
    let bulk = start(&daemon).await;
    // Wherever it stands: the test does not depend on it.
    until("it has begun", async || {
        let (_, shown) = daemon.get(&format!("/v1/bulk/{bulk}")).await;
        shown["changed"].as_u64() > Some(0)
    })
    .await;
    daemon.kill9_and_restart();
    let shown = ended(&daemon, &bulk).await;
    assert_eq!(shown["state"], "DONE", "{shown}");
    // A page that was changed and not counted is not there any more.
    assert!(
        shown["changed"].as_u64().unwrap() >= TASKS as u64 - 250 && shown["failed"] == 0,
        "{shown}"
    );
    assert_eq!(
        once(targets(&daemon, "retry task").await),
        ids.into_iter().collect()
    );
    assert_eq!(once(daemon.drain("w", "q").await), keys(0, TASKS));
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_page_that_was_changed_and_not_counted_changes_nothing_twice() {
    let mut daemon = Daemon::start(ONE_ATTEMPT, &[]).await;
    dead_tasks(&daemon, "q", 0, 300).await;
    let bulk = start(&daemon).await;
    assert_eq!(ended(&daemon, &bulk).await["changed"], 300);
    assert!(daemon.stop().await.success());
    // As a kill between a change and its count leaves it: the bulk change stands before its first
    // page.
    let file = format!("sqlite://{}", daemon.data().join("taskd.db").display());
    let mut sqlite = SqliteConnection::connect(&file).await.unwrap();
    let back = "UPDATE bulk_changes SET state = 0, position = x'', looked_at = 0, matched = 0, changed = 0";
    sqlx::query(back).execute(&mut sqlite).await.unwrap();
    sqlite.close().await.unwrap();
    daemon.start_again();
    daemon.ready().await;
    let shown = ended(&daemon, &bulk).await;
    assert_eq!(
        (&shown["changed"], &shown["failed"]),
        (&json!(0), &json!(0)),
        "{shown}"
    );
    assert_eq!(targets(&daemon, "retry task").await.len(), 300);
    assert_eq!(once(daemon.drain("w", "q").await), keys(0, 300));
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_bulk_change_whose_pages_fail_for_now_holds_up_no_other() {
    let mut daemon = Daemon::start(ONE_ATTEMPT, &[]).await;
    let dead = dead_tasks(&daemon, "q", 0, 3).await;
    daemon
        .insert(&[json!({"queue": "other", "key": "k"})])
        .await;
    let file = format!("sqlite://{}", daemon.data().join("taskd.db").display());
    let mut sqlite = SqliteConnection::connect(&file).await.unwrap();
    sqlx::query("PRAGMA busy_timeout = 30000")
        .execute(&mut sqlite)
        .await
        .unwrap();
    // A task that is sent again loses its letter.
    sqlx::query("ALTER TABLE letters RENAME TO letters_away")
        .execute(&mut sqlite)
        .await
        .unwrap();
    let fails = start(&daemon).await;
    let (_, answer) = daemon
        .post(
            "/v1/tasks:cancel",
            &json!({"filter": {"queue": "other"}, "yes": true}),
        )
        .await;
    let bulk = ended(&daemon, answer["bulk"]["id"].as_str().unwrap()).await;
    assert_eq!(
        (&bulk["state"], &bulk["changed"]),
        (&json!("DONE"), &json!(1)),
        "{bulk}"
    );
    let (_, shown) = daemon.get(&format!("/v1/bulk/{fails}")).await;
    assert_eq!(
        (&shown["state"], &shown["changed"]),
        (&json!("RUNNING"), &json!(0)),
        "{shown}"
    );
    sqlx::query("ALTER TABLE letters_away RENAME TO letters")
        .execute(&mut sqlite)
        .await
        .unwrap();
    sqlite.close().await.unwrap();
    assert_eq!(ended(&daemon, &fails).await["changed"], dead.len());
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_requeue_reaches_tasks_that_come_into_its_page_while_a_shard_does_not_answer() {
    let mut daemon = Daemon::start("partitions = 1\n", &[]).await;
    let ids = insert_keys(&daemon, "q", 0..300).await;
    let mut redis = daemon.redis().await;
    let [records, away] = ["taskd:{q:0}:records", "taskd:{q:0}:away"];
    // The leases give the shard records.
    let held = daemon.lease_all("w", "q", 300).await;
    redis::cmd("RENAME")
        .arg(records)
        .arg(away)
        .exec_async(&mut redis)
        .await
        .unwrap();
    redis::cmd("SET")
        .arg(records)
        .arg("not a hash")
        .exec_async(&mut redis)
        .await
        .unwrap();
    let (status, answer) = daemon
        .post(
            "/v1/tasks:requeue",
            &json!({"filter": {"queue": "q"}, "yes": true, "away_from": "w"}),
        )
        .await;
    assert_eq!(status, 200, "{answer}");
    let bulk = answer["bulk"]["id"].as_str().unwrap().to_owned();
    until("a page has its turn again", async || {
        daemon.log().contains("carries out changes of tasks later")
    })
    .await;
    // As if reports of before had been settled: a page is 250 tasks, and now it has all that are
    // left.
    let mut newest = ids.clone();
    newest.sort_unstable_by(|a, b| b.cmp(a));
    let (done, left) = newest.split_at(100);
    let file = format!("sqlite://{}", daemon.data().join("taskd.db").display());
    let mut sqlite = SqliteConnection::connect(&file).await.unwrap();
    sqlx::query("PRAGMA busy_timeout = 30000")
        .execute(&mut sqlite)
        .await
        .unwrap();
    for id in done {
        let id = uuid::Uuid::parse_str(id).unwrap();
        let end = sqlx::query("UPDATE tasks SET status = 1, on_bus = 0 WHERE id = ?")
            .bind(id.as_bytes().to_vec());
        assert_eq!(end.execute(&mut sqlite).await.unwrap().rows_affected(), 1);
    }
    sqlite.close().await.unwrap();
    redis::cmd("DEL")
        .arg(records)
        .exec_async(&mut redis)
        .await
        .unwrap();
    redis::cmd("RENAME")
        .arg(away)
        .arg(records)
        .exec_async(&mut redis)
        .await
        .unwrap();
    let shown = ended(&daemon, &bulk).await;
    // A turn may have read some of the others before their end: it requeued them too, or found
    // them completed.
    let count = |field: &str| shown[field].as_u64().unwrap();
    assert_eq!(shown["state"], "DONE", "{shown}");
    assert!(count("changed") >= 200, "{shown}");
    assert_eq!(
        count("changed") + count("failed"),
        count("matched"),
        "{shown}"
    );
    let requeued: BTreeSet<String> = targets(&daemon, "requeue task").await.into_iter().collect();
    assert!(
        left.iter().all(|id| requeued.contains(id)),
        "{} of {}",
        requeued.len(),
        ids.len()
    );
    drop(held);
    assert!(daemon.stop().await.success());
}
