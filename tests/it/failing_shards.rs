//! Shards that fail: loops of the watchdog that have nothing else to do, and answers about all
//! queues, go on with the others.

use serde_json::json;

use crate::{
    columns::{bulk::insert_keys, changes::becomes, dead_letters::status_of, events::Events},
    support::{daemon::Daemon, until},
};

const CONFIG: &str = "\
    partitions = 1\n\
    reconcile_every = \"100ms\"\n\
    republish_after = \"200ms\"\n\
    horizon = \"1s\"\n\
    [queues.full]\n\
    high_water_tasks = 1\n";

/// Calls that use this key of the queue's shard fail from now on.
async fn damage(daemon: &Daemon, queue: &str, key: &str) {
    let key = format!("taskd:{{{queue}:0}}:{key}");
    redis::cmd("SET")
        .arg(key)
        .arg("no hash")
        .exec_async(&mut daemon.redis().await)
        .await
        .unwrap();
}

/// Nobody had to start the loop again.
fn has_not_failed(daemon: &Daemon, name: &str) {
    let failed = format!("{name} failed");
    assert!(!daemon.log().contains(&failed), "{failed}");
}

#[tokio::test]
async fn the_walk_passes_a_queue_of_many_pages() {
    let daemon = Daemon::start(CONFIG, &[]).await;
    // More than a page, and before the other in the walk.
    insert_keys(&daemon, "a", 0..10_001).await;
    let lost = insert_keys(&daemon, "b", 0..1).await.remove(0);
    damage(&daemon, "a", "records").await;
    let field = uuid::Uuid::parse_str(&lost).unwrap().as_bytes().to_vec();
    let mut redis = daemon.redis().await;
    let bodies = "taskd:{b:0}:bodies";
    let removed: u64 = redis::cmd("HDEL")
        .arg(bodies)
        .arg(&field)
        .query_async(&mut redis)
        .await
        .unwrap();
    assert_eq!(removed, 1);
    until("the task is there again", async || {
        let mut redis = daemon.redis().await;
        redis::cmd("HEXISTS")
            .arg(bodies)
            .arg(&field)
            .query_async(&mut redis)
            .await
            .unwrap()
    })
    .await;
    has_not_failed(&daemon, "watchdog/reconcile");
}

#[tokio::test]
async fn scheduled_tasks_go_out_while_no_parked_one_may() {
    let daemon = Daemon::start(CONFIG, &[]).await;
    let full: Vec<_> = (0..50)
        .map(|n| json!({"queue": "full", "key": n.to_string()}))
        .collect();
    daemon.insert(&full).await;
    until("some are parked", async || {
        let (_, books) = daemon.get("/v1/books?queue=full").await;
        books["queues"][0]["held"]["sql"]["parked"].as_u64() > Some(0)
    })
    .await;
    damage(&daemon, "full", "counters").await;
    daemon
        .insert(&[json!({"queue": "other", "key": "scheduled", "delay": "2s"})])
        .await;
    assert_eq!(daemon.work("w", "other", 1).await, ["scheduled"]);
    has_not_failed(&daemon, "watchdog/outbox");
}

#[tokio::test]
async fn a_deadline_comes_behind_pages_of_others() {
    let daemon = Daemon::start(CONFIG, &[]).await;
    let within = |queue: &str, n: usize, time: &str| json!({"queue": queue, "key": n.to_string(), "finish_within": time});
    // Two pages.
    let ids = daemon
        .insert(
            &(0..1000)
                .map(|n| within("bad", n, "20s"))
                .collect::<Vec<_>>(),
        )
        .await;
    let good = daemon.insert(&[within("good", 0, "21s")]).await.remove(0);
    until("they are in the queue", async || {
        status_of(&daemon, &ids[999]).await == "QUEUED"
    })
    .await;
    damage(&daemon, "bad", "records").await;
    becomes(&daemon, &good, "DEAD").await;
    has_not_failed(&daemon, "watchdog/deadlines");
}

#[tokio::test]
async fn answers_about_all_queues_say_which_shard_cannot_be_read() {
    let daemon = Daemon::start(CONFIG, &[]).await;
    let ids = daemon
        .insert(&["bad", "good"].map(|queue| json!({"queue": queue, "key": "k"})))
        .await;
    for id in &ids {
        becomes(&daemon, id, "QUEUED").await;
    }
    damage(&daemon, "bad", "counters").await;
    let (status, answer) = daemon.get("/v1/queues").await;
    assert_eq!(status, 200, "{answer}");
    for (place, queue, pending, unread) in [(0, "bad", 1, 1), (1, "good", 0, 0)] {
        let shown = &answer["queues"][place];
        let want = json!([queue, pending, 1 - pending, unread]);
        assert_eq!(
            json!([
                shown["queue"],
                shown["pending"],
                shown["waiting"],
                shown["unread_shards"]
            ]),
            want,
            "{answer}"
        );
    }
    let (status, problem) = daemon.get("/v1/books").await;
    let detail = problem["detail"].as_str().unwrap();
    assert!(
        status == 503 && detail.starts_with("cannot read shard bad:0 now: "),
        "{problem}"
    );
}

#[tokio::test]
async fn watchers_hear_of_tasks_beside_those_of_a_failing_shard() {
    let daemon = Daemon::start(
        "partitions = 1\n[queues.default]\nlease = \"10m\"\nbackoff = [\"2s\"]",
        &[],
    )
    .await;
    let ids = daemon
        .insert(&["bad", "good"].map(|queue| json!({"queue": queue, "key": "k"})))
        .await;
    for id in &ids {
        becomes(&daemon, id, "QUEUED").await;
    }
    let [_bad, mut good] = [
        Events::of_task(&daemon, &ids[0]).await,
        Events::of_task(&daemon, &ids[1]).await,
    ];
    damage(&daemon, "bad", "records").await;
    assert_eq!(
        Events::ask(&daemon, &format!("/v1/tasks/{}/events", ids[0]), "", None)
            .await
            .status(),
        503
    );
    let task = daemon.lease_all("w", "good", 1).await.remove(0);
    let rejection =
        json!({"id": task["id"], "lease_token": task["lease_token"], "reason": "no luck"});
    let (status, _) = daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": "w", "rejections": [rejection]}),
        )
        .await;
    assert_eq!(status, 200);
    // Nobody announces the end of the backoff: the watchers' loop reads it.
    for want in ["DELAYED", "QUEUED"] {
        while good.next().await.unwrap().1["status"] != want {}
    }
}
