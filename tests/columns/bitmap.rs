//! `dedup = "bitmap"` through the running binary: duplicates of numbers and of other keys carry the
//! id of their task.

use serde_json::{Value, json};

use crate::{
    column,
    support::{daemon::Daemon, until},
};

const CONFIG: &str = "[queues.n]\ndedup = \"bitmap\"\nmax_attempts = 1\n";

async fn insert(daemon: &Daemon, tasks: &[Value]) -> Vec<Value> {
    let (status, mut answer) = daemon.post("/v1/tasks", &json!(tasks)).await;
    assert_eq!(status, 200, "{answer}");
    serde_json::from_value(answer["results"].take()).unwrap()
}

/// True when taskd has marked numbers in the bitmap.
async fn has_bits(daemon: &Daemon) -> bool {
    let (_, text) = daemon.get("/metrics").await;
    text.as_str().unwrap().contains("script=\"filter_bits\"")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_names_its_task_and_what_became_of_it() {
    let mut daemon = column::start(CONFIG, &[]).await;
    let keys: Vec<String> = (1..=20)
        .map(|n| n.to_string())
        .chain(["x", "007", "1099511627776"].map(Into::into))
        .collect();
    let tasks: Vec<Value> = keys
        .iter()
        .map(|key| json!({"queue": "n", "key": key}))
        .collect();
    let ids = daemon.insert(&tasks).await;
    until("the numbers are marked", async || has_bits(&daemon).await).await;
    let again = insert(&daemon, &tasks).await;
    for (answer, id) in again.iter().zip(&ids) {
        assert_eq!(
            (&answer["status"], &answer["id"]),
            (&json!("DUPLICATE"), &json!(id))
        );
    }
    // The number 7 is known, the key "07" is not; and one more number beside the known ones.
    let near: Vec<Value> = ["07", "21", "22", "23", "24"]
        .iter()
        .map(|key| json!({"queue": "n", "key": key}))
        .collect();
    assert!(
        insert(&daemon, &near)
            .await
            .iter()
            .all(|answer| answer["status"] == "CREATED")
    );

    let leased = daemon.lease_all("w", "n", keys.len() + near.len()).await;
    let dead = leased.iter().find(|task| task["key"] == "7").unwrap();
    let rejection = json!({"id": dead["id"], "lease_token": dead["lease_token"], "retry": false, "reason": "r"});
    let (status, answer) = daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": "w", "rejections": [rejection]}),
        )
        .await;
    assert_eq!(status, 200, "{answer}");
    until("it is dead", async || daemon.queue("n").await["dead"] == 1).await;
    let again = insert(&daemon, &tasks).await;
    assert_eq!(
        (&again[6]["id"], &again[6]["error"]),
        (&json!(ids[6]), &json!("the task with this key is DEAD"))
    );
    assert!(again.iter().all(|answer| answer["status"] == "DUPLICATE"));
    assert!(daemon.stop().await.success());
}
