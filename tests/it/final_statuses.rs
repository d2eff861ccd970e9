//! A status never runs ahead of what belongs to it: who reads COMPLETED, DEAD or CANCELLED finds
//! the result, the reason and the letter.

use serde_json::{Value, json};

use crate::support::{
    daemon::{Daemon, statuses},
    until,
};

const CONFIG: &str = "grace = \"10m\"\n[queues.default]\nlease = \"10m\"\nmax_attempts = 1";

fn is_final(status: &Value) -> bool {
    ["COMPLETED", "DEAD", "CANCELLED"]
        .iter()
        .any(|known| status == known)
}

/// Reads a task in every way, and checks that a final status has what belongs to it. Answers the
/// status.
async fn read(daemon: &Daemon, name: &str, id: &str) -> Value {
    let (_, listed) = daemon.get("/v1/tasks?queue=q&limit=100").await;
    let listed = listed["tasks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|task| task["id"] == id)
        .cloned()
        .unwrap();
    let (_, explained) = daemon.get(&format!("/v1/tasks:explain?id={id}")).await;
    let (_, task) = daemon.get(&format!("/v1/tasks/{id}")).await;
    let (_, results) = daemon.get(&format!("/v1/tasks/{id}/results")).await;
    let (letter, _) = daemon.get(&format!("/v1/dead-letters/{id}")).await;
    for seen in [&listed, &explained["task"], &task] {
        let status = &seen["status"];
        if status == "COMPLETED" {
            assert_eq!(
                results["results"][0]["result"], "w",
                "{name}: {seen} {results}"
            );
        }
        if status == "DEAD" {
            assert!(seen["reason"].is_string(), "{name}: {seen}");
            assert_eq!(letter, 200, "{name}: {seen}");
        }
    }
    task["status"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_final_status_has_its_result_reason_and_letter() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let names = ["completed", "rejected", "overdue", "cancelled"];
    let task = |name: &&str| match *name {
        "overdue" => json!({"queue": "q", "key": name, "finish_within": "8s"}),
        _ => json!({"queue": "q", "key": name}),
    };
    let ids = daemon
        .insert(&names.iter().map(task).collect::<Vec<_>>())
        .await;
    let leased = daemon.lease_all("w", "q", names.len()).await;
    let of = |name: &str| leased.iter().find(|task| task["key"] == name).unwrap();
    assert!(daemon.stop().await.success());

    // No process settles reports: SQL does not have the ends, whatever Redis has.
    let daemon =
        Daemon::start_in_the_folder_of(daemon, &["--pipelines", "fanout,tasks,watchdog"]).await;
    assert_eq!(
        daemon
            .complete("w", std::slice::from_ref(of("completed")))
            .await,
        ["OK"]
    );
    let rejected = of("rejected");
    let rejection =
        json!({"id": rejected["id"], "lease_token": rejected["lease_token"], "reason": "no luck"});
    let (_, answer) = daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": "w", "rejections": [rejection]}),
        )
        .await;
    assert_eq!(statuses(&answer), ["OK"]);
    let overdue = of("overdue");
    until("the deadline has passed in the queue", async || {
        let extension =
            json!({"id": overdue["id"], "lease_token": overdue["lease_token"], "by": "10m"});
        let (_, answer) = daemon
            .post(
                "/v1/tasks:extend",
                &json!({"worker": "w", "extensions": [extension]}),
            )
            .await;
        read(&daemon, "overdue", &ids[2]).await;
        statuses(&answer) == ["LEASE_LOST"]
    })
    .await;
    for (name, id) in names.iter().zip(&ids).take(3) {
        let status = read(&daemon, name, id).await;
        // On a slow machine the deadline passed before, and SQL has that.
        let is_told = *name == "overdue" && status == "DEAD";
        assert!(
            is_told || status == "ASSIGNED",
            "{name}: its end is on the way to SQL: {status}"
        );
    }
    let (_, answer) = daemon
        .post("/v1/tasks:cancel", &json!({"ids": [ids[3]]}))
        .await;
    assert_eq!(statuses(&answer), ["OK"]);

    let mut daemon = daemon;
    assert!(daemon.stop().await.success());
    let daemon = Daemon::start_in_the_folder_of(daemon, &["--pipelines", "all"]).await;
    let expected = ["COMPLETED", "DEAD", "DEAD", "CANCELLED"];
    for ((name, id), expected) in names.iter().zip(&ids).zip(expected) {
        until("SQL has the end", async || {
            let status = read(&daemon, name, id).await;
            assert!(!is_final(&status) || status == expected, "{name}: {status}");
            status == expected
        })
        .await;
    }
}
