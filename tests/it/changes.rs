//! Cancels that were interrupted, made inside taskd's own servers.

use redis::AsyncCommands as _;
use serde_json::json;

use crate::{
    columns::changes::{becomes, insert_one, report},
    support::{daemon::Daemon, until},
    traces::metric,
};

/// Stores wishes as a process does that is killed before it asks the queue.
fn store_wishes(daemon: &Daemon, ids: &[String]) {
    let db = rusqlite::Connection::open(daemon.data().join("taskd.db")).unwrap();
    db.busy_timeout(std::time::Duration::from_secs(30)).unwrap();
    for id in ids {
        let id = uuid::Uuid::parse_str(id).unwrap();
        db.execute(
            "INSERT INTO changes (task_id, kind, turn, at_ms) VALUES (?, 1, 7, 5)",
            [id.as_bytes()],
        )
        .unwrap();
    }
}

#[tokio::test]
async fn the_watchdog_carries_out_what_a_killed_process_wanted() {
    let mut daemon = Daemon::start("", &[]).await;
    let waiting = insert_one(&daemon, json!({"queue": "q", "key": "waiting"})).await;
    let held = insert_one(&daemon, json!({"queue": "held", "key": "held"})).await;
    let leased = daemon.lease_all("w", "held", 1).await.remove(0);
    let done = insert_one(&daemon, json!({"queue": "done", "key": "done"})).await;
    let completed = daemon.lease_all("w", "done", 1).await;
    assert_eq!(daemon.complete("w", &completed).await, ["OK"]);
    // Killed behind the wish.
    daemon.kill9();
    store_wishes(&daemon, &[waiting.clone(), held.clone(), done.clone()]);
    daemon.start_again();
    daemon.ready().await;
    becomes(&daemon, &waiting, "CANCELLED").await;
    becomes(&daemon, &held, "CANCELLED").await;
    becomes(&daemon, &done, "COMPLETED").await;
    assert_eq!(report(&daemon, "complete", "w", &leased).await, "CANCELLED");
    no_wish_is_left(&daemon).await;
}

async fn no_wish_is_left(daemon: &Daemon) {
    until("no wish is left", async || {
        let db = rusqlite::Connection::open(daemon.data().join("taskd.db")).unwrap();
        db.query_row("SELECT COUNT(*) FROM changes", [], |row| {
            row.get::<_, i64>(0)
        })
        .is_ok_and(|count| count == 0)
    })
    .await;
}

/// The watchdog carries it out every second until no record of before can come.
#[tokio::test]
async fn a_change_of_a_task_that_its_queue_does_not_have_counts_once() {
    let daemon = Daemon::start("grace = \"6s\"\nrepublish_after = \"1s\"", &[]).await;
    let id = insert_one(
        &daemon,
        json!({"queue": "q", "key": "k", "delay": "30days"}),
    )
    .await;
    let (status, answer) = daemon
        .post(
            "/v1/tasks:change",
            &json!({"ids": [id], "priority": "high"}),
        )
        .await;
    assert_eq!(
        (status, &answer["results"][0]["status"]),
        (200, &json!("OK")),
        "{answer}"
    );
    no_wish_is_left(&daemon).await;
    let handled = "taskd_watchdog_handled_tasks_total{what=\"changed\"} ";
    until("the watchdog has counted it", async || {
        metric(&daemon, handled).await > 0.0
    })
    .await;
    let changed = metric(
        &daemon,
        "taskd_changes_tasks_total{what=\"update\",outcome=\"done\"} ",
    )
    .await;
    assert_eq!((changed, metric(&daemon, handled).await), (1.0, 1.0));
}

#[tokio::test]
async fn the_queue_is_seldom_asked_about_a_change_of_a_task_that_it_does_not_have() {
    let daemon = Daemon::start("partitions = 1", &[]).await;
    let present = insert_one(&daemon, json!({"queue": "q", "key": "present"})).await;
    becomes(&daemon, &present, "QUEUED").await;
    let absent = insert_one(
        &daemon,
        json!({"queue": "q", "key": "absent", "delay": "30days"}),
    )
    .await;
    let (status, answer) = daemon
        .post(
            "/v1/tasks:change",
            &json!({"ids": [absent], "priority": "high"}),
        )
        .await;
    assert_eq!(
        (status, &answer["results"][0]["status"]),
        (200, &json!("OK")),
        "{answer}"
    );
    let mut redis = daemon.redis().await;
    // Each question moves the fence.
    let mut asked = async || -> u64 { redis.hget("taskd:{q:0}:counters", "fence").await.unwrap() };
    let looks = async || {
        metric(
            &daemon,
            "taskd_watchdog_step_duration_seconds_count{loop=\"changes\"} ",
        )
        .await
    };
    let of_the_call = asked().await;
    until("the watchdog has asked", async || {
        asked().await > of_the_call
    })
    .await;
    let (asked_before, looks_before) = (asked().await, looks().await);
    until("it has looked six times more", async || {
        looks().await >= looks_before + 6.0
    })
    .await;
    let more = asked().await - asked_before;
    assert!(more < 3, "it has asked {more} times");
}

/// A record as `cancel.lua` leaves it.
fn cancelled_record() -> Vec<u8> {
    rmp_serde::to_vec(&json!(["X", 1, 0, [], [], [], 5])).unwrap()
}

#[tokio::test]
async fn sql_takes_over_from_a_record_that_nobody_told_it_of() {
    let daemon = Daemon::start("grace = \"1s\"", &[]).await;
    let id = insert_one(&daemon, json!({"queue": "q", "key": "k"})).await;
    becomes(&daemon, &id, "QUEUED").await;
    // Killed behind the script, and the wish was in a database that was set back.
    let mut redis = daemon.redis().await;
    let keys: Vec<String> = redis.keys("*{q:*}:bodies").await.unwrap();
    let records = keys[0].replace(":bodies", ":records");
    let field = uuid::Uuid::parse_str(&id).unwrap();
    let _: () = redis
        .hset(&records, &field.as_bytes()[..], cancelled_record())
        .await
        .unwrap();
    let finals = keys[0].replace(":bodies", ":finals");
    let _: () = redis.rpush(finals, &field.as_bytes()[..]).await.unwrap();
    becomes(&daemon, &id, "CANCELLED").await;
    until("the record is forgotten", async || {
        !redis.exists::<_, bool>(&records).await.unwrap()
    })
    .await;
    assert_eq!(daemon.queue("q").await["cancelled"], 1);
}

#[tokio::test]
async fn a_task_that_was_cancelled_in_its_queue_and_is_sent_again_before_its_time_comes_at_its_time()
 {
    // Its final record outlives the test, so the queue takes the task only in its next epoch.
    let daemon = Daemon::start("grace = \"1h\"", &[]).await;
    let id = insert_one(&daemon, json!({"queue": "q", "key": "k", "delay": "4s"})).await;
    becomes(&daemon, &id, "DELAYED").await;
    let change = async |what: &str| {
        let (status, answer) = daemon
            .post(&format!("/v1/tasks:{what}"), &json!({"ids": [id]}))
            .await;
        assert_eq!(
            (status, &answer["results"][0]["status"]),
            (200, &json!("OK")),
            "{answer}"
        );
    };
    change("cancel").await;
    becomes(&daemon, &id, "CANCELLED").await;
    change("retry").await;
    assert_eq!(daemon.work("w", "q", 1).await, ["k"]);
}
