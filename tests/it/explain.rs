//! Places of a task that a test makes inside taskd's own servers.

use serde_json::{Value, json};
use taskd::store::{Outbox, Store, Unpublished, sqlite::SqliteStore};

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
    // As of a task that is sent again.
    let mut now = store_contract::row("q", "now");
    now.due_unix_ms = 0;
    let store = SqliteStore::open(&daemon.data().join("taskd.db"), None)
        .await
        .unwrap();
    for row in [&row, &now] {
        store_contract::insert_new(&store, std::slice::from_ref(row)).await;
    }
    store.close().await;
    let due_now = explain(&daemon, &now.task.id.to_string(), "w").await;
    assert_eq!(
        (&due_now["place"], due_now.get("next_at")),
        (&json!("OUTBOX"), None),
        "no time is not 1970"
    );
    assert!(due_now["worker"].get("until").is_none(), "{due_now}");
    let id = row.task.id.to_string();
    let stored = explain(&daemon, &id, "w").await;
    assert_eq!(
        (&stored["place"], reason(&stored)),
        (&json!("OUTBOX"), "NOT_IN_QUEUE")
    );
    assert!(
        stored["next_at"].is_string(),
        "the watchdog's time: {stored}"
    );
    assert!(daemon.stop().await.success());

    let daemon =
        Daemon::start_in_the_folder_of(daemon, &["--pipelines", "fanout,tasks,watchdog"]).await;
    let leased = daemon.lease_all("w", "q", 2).await;
    assert_eq!(daemon.complete("w", &leased).await, ["OK", "OK"]);
    // No process settles reports.
    let reported = explain(&daemon, &id, "w").await;
    assert_eq!(
        (&reported["place"], reason(&reported)),
        (&json!("REPORTED"), "COMPLETED_IT")
    );
    assert_eq!(reason(&explain(&daemon, &id, "v").await), "FINISHED");
}

fn unix_ms(time: &Value) -> i64 {
    taskd::wire::time::from_rfc_3339(time.as_str().unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_tells_since_when_unless_it_was_extended_or_has_another_length() {
    let config = format!("{CONFIG}[queues.short]\nlease = \"3s\"\n");
    let daemon = Daemon::start(&config, &[]).await;
    let id = insert(&daemon, json!({"queue": "q", "key": "a", "replicas": 2})).await;
    until_at(&daemon, &id, "WAITING", "w").await;
    let held = daemon.lease_all("w", "q", 1).await.remove(0);
    let leased = explain(&daemon, &id, "v").await;
    let since = unix_ms(&leased["since"]);
    let length = unix_ms(&held["lease_expires_at"]) - since;
    assert!(
        unix_ms(&leased["task"]["created_at"]) <= since && since <= unix_ms(&leased["now"]),
        "{leased}"
    );
    let (_, file) = daemon.get(&format!("/v1/tasks/{id}")).await;
    assert_eq!(
        (&file["history"][0]["state"], &file["history"][0]["from"]),
        (&json!("LEASED"), &leased["since"])
    );

    // Of several workers the first one counts.
    daemon.lease_all("u", "q", 1).await;
    assert_eq!(explain(&daemon, &id, "v").await["since"], leased["since"]);
    // An extension hides when it began: the deadline is that of the task's own length, and would
    // tell another time.
    let by = format!("{length}ms");
    let item = json!({"id": id, "lease_token": held["lease_token"], "by": by});
    let (_, answer) = daemon
        .post(
            "/v1/tasks:extend",
            &json!({"worker": "w", "extensions": [item]}),
        )
        .await;
    assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
    let extended = explain(&daemon, &id, "v").await;
    assert_eq!(
        (&extended["place"], extended.get("since")),
        (&json!("LEASED"), None)
    );
    let (_, file) = daemon.get(&format!("/v1/tasks/{id}")).await;
    let of = |worker: &str| {
        file["history"]
            .as_array()
            .unwrap()
            .iter()
            .find(|one| one["worker"] == worker)
            .unwrap()
            .clone()
    };
    assert_eq!(
        (of("w").get("from"), of("u").get("from").is_some()),
        (None, true)
    );

    // Nor does a lease of a length that the worker asked for.
    let other = insert(&daemon, json!({"queue": "other", "key": "a"})).await;
    until_at(&daemon, &other, "WAITING", "w").await;
    let ask = json!({"worker": "w", "queues": ["other"], "max_tasks": 1, "lease_duration": "45s"});
    let (_, answer) = daemon.post("/v1/tasks:get", &ask).await;
    assert_eq!(answer["tasks"].as_array().unwrap().len(), 1, "{answer}");
    assert_eq!(explain(&daemon, &other, "v").await.get("since"), None);

    // A lease that expired began its length before its end.
    let short = insert(&daemon, json!({"queue": "short", "key": "a"})).await;
    daemon.lease_all("w", "short", 1).await;
    let mut expired = Value::Null;
    until("the history has it", async || {
        expired = daemon.get(&format!("/v1/tasks/{short}")).await.1["history"][0].clone();
        expired["state"] == "EXPIRED"
    })
    .await;
    assert!(
        unix_ms(&expired["until"]) - unix_ms(&expired["from"]) >= 3000,
        "{expired}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_on_its_way_tells_since_when_where_that_is_known() {
    let mut daemon = Daemon::start(CONFIG, &["--pipelines", "discovery"]).await;
    let id = insert(&daemon, json!({"queue": "q", "key": "a"})).await;
    let on_bus = until_at(&daemon, &id, "BUS", "w").await;
    // Redis's clock says when it came to the bus. The process's own, which follows it, says the
    // others.
    let [created, since, now] = [
        &on_bus["task"]["created_at"],
        &on_bus["since"],
        &on_bus["now"],
    ]
    .map(unix_ms);
    let apart = 1000;
    assert!(created <= since + apart && since <= now + apart, "{on_bus}");
    assert!(daemon.stop().await.success());

    // Parked since its insert, and parked on its way.
    let [mut first, later] = ["first", "later"].map(|key| store_contract::row("q", key));
    first.unpublished = Unpublished::Parked;
    let store = SqliteStore::open(&daemon.data().join("taskd.db"), None)
        .await
        .unwrap();
    store_contract::insert_new(&store, &[first.clone(), later.clone()]).await;
    store
        .unpublish(&[later.task.id], Unpublished::Parked)
        .await
        .unwrap();
    store.close().await;
    let daemon = Daemon::start_in_the_folder_of(daemon, &["--pipelines", "tasks"]).await;
    let first = until_at(&daemon, &first.task.id.to_string(), "PARKED", "w").await;
    assert_eq!(first["since"], first["task"]["created_at"]);
    let later = until_at(&daemon, &later.task.id.to_string(), "PARKED", "w").await;
    assert_eq!(later.get("since"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_redis_lost_is_lost_until_the_watchdog_finds_it() {
    let daemon = Daemon::start(CONFIG, &["--pipelines", "discovery,fanout,tasks"]).await;
    let id = insert(&daemon, json!({"queue": "q", "key": "a"})).await;
    until_at(&daemon, &id, "WAITING", "w").await;
    let mut redis = daemon.redis().await;
    // The mark in SQL comes at the next tick.
    until("SQL knows that it is published", async || {
        let _: () = redis::cmd("DEL")
            .arg("taskd:{q:0}:bodies")
            .query_async(&mut redis)
            .await
            .unwrap();
        explain(&daemon, &id, "w").await["place"] == "LOST"
    })
    .await;
    let _: () = redis::cmd("DEL")
        .arg("taskd:{q:0}:generation")
        .query_async(&mut redis)
        .await
        .unwrap();
    // With its whole shard; the commit of the fanout comes at a tick, too.
    assert_eq!(
        reason(&until_at(&daemon, &id, "LOST", "w").await),
        "NOT_IN_QUEUE"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_task_whose_record_is_lost_is_handed_out_again() {
    let short = "[queues.short]\nlease = \"300ms\"\nbackoff = [\"10ms\"]\n";
    let daemon = Daemon::start(&format!("{CONFIG}{short}"), &[]).await;
    let id = insert(&daemon, json!({"queue": "short", "key": "a"})).await;
    daemon.lease_all("w", "short", 1).await;
    let mut redis = daemon.redis().await;
    let lost: u64 = redis::cmd("DEL")
        .arg("taskd:{short:0}:records")
        .query_async(&mut redis)
        .await
        .unwrap();
    assert_eq!(lost, 1);
    assert_eq!(daemon.lease_all("v", "short", 1).await[0]["id"], id);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_with_a_full_outbox_gives_nobody_anything() {
    // No process forwards reports.
    let daemon = Daemon::start(CONFIG, &["--pipelines", "discovery,fanout"]).await;
    let id = insert(&daemon, json!({"queue": "q", "key": "a"})).await;
    until_at(&daemon, &id, "WAITING", "w").await;
    let mut fill = redis::cmd("HSET");
    fill.arg("taskd:{q:0}:counters")
        .arg("outbox_bytes")
        .arg(64 << 20);
    fill.exec_async(&mut daemon.redis().await).await.unwrap();
    let paused = explain(&daemon, &id, "w").await;
    assert_eq!(
        (&paused["place"], reason(&paused)),
        (&json!("WAITING"), "CLAIMS_PAUSED")
    );
    let note = "shard q:0 gives no worker anything now: its outbox is full, because the bus takes no reports";
    assert_eq!(paused["notes"], json!([note]));
}
