//! Tasks that finished long ago are removed, and their late reports change nothing: seen through
//! the running binary.

use prost::Message;
use redis::AsyncCommands;
use serde_json::json;
use taskd::wire::pb::{self, report::What};

use crate::support::{
    daemon::{Daemon, statuses},
    until,
};

const SHORT: &str = "grace = \"1s\"\nrepublish_after = \"100ms\"\nretention = \"3s\"\n[queues.default]\nmax_attempts = 1";

#[tokio::test]
async fn finished_tasks_are_removed_and_the_keys_of_dead_ones_are_free() {
    let mut daemon = Daemon::start(SHORT, &[]).await;
    let mut redis = daemon.redis().await;
    let ids = daemon
        .insert(&[
            json!({"queue": "q", "key": "done"}),
            json!({"queue": "q", "key": "dead"}),
        ])
        .await;
    daemon
        .insert(&[json!({"queue": "other", "key": "waits"})])
        .await;

    let tasks = daemon.lease_all("w", "q", 2).await;
    let (done, dead) = if tasks[0]["key"] == "done" {
        (&tasks[0], &tasks[1])
    } else {
        (&tasks[1], &tasks[0])
    };
    let child = json!([{"queue": "other", "key": "child"}]);
    let completion = json!({"id": done["id"], "lease_token": done["lease_token"], "result": "r", "discovered": child});
    let body = json!({"worker": "w", "completions": [completion]});
    assert_eq!(
        statuses(&daemon.post("/v1/tasks:complete", &body).await.1),
        ["OK"]
    );
    let rejection =
        json!({"id": dead["id"], "lease_token": dead["lease_token"], "reason": "no luck"});
    let body = json!({"worker": "w", "rejections": [rejection]});
    assert_eq!(
        statuses(&daemon.post("/v1/tasks:reject", &body).await.1),
        ["OK"]
    );
    until("both are settled", async || {
        let queue = daemon.queue("q").await;
        queue["completed"] == 1 && queue["dead"] == 1
    })
    .await;
    until("both are removed", async || {
        let gone = async |id: &String| daemon.get(&format!("/v1/tasks/{id}")).await.0 == 404;
        gone(&ids[0]).await && gone(&ids[1]).await
    })
    .await;
    assert_eq!(
        daemon.get(&format!("/v1/tasks/{}/results", ids[0])).await.0,
        404
    );
    until("Redis has forgotten them too", async || {
        let records: usize = redis.hlen("taskd:{q:0}:records").await.unwrap();
        records == 0
    })
    .await;

    // Their reports come once more; the next task that is settled shows that they have been dealt
    // with.
    let discovered = vec![pb::NewTask {
        queue: "other".into(),
        key: "new child".into(),
        ..Default::default()
    }];
    let done = pb::Completed {
        worker: "w".into(),
        discovered,
        attempt: 1,
        ..Default::default()
    };
    let died = pb::Died {
        reason: "no luck".into(),
        attempts: 1,
        history: vec![],
        epoch: 0,
    };
    for (id, what) in [
        (&ids[0], What::Completed(done)),
        (&ids[1], What::Died(died)),
    ] {
        let task_id = uuid::Uuid::parse_str(id)
            .unwrap()
            .as_bytes()
            .to_vec()
            .into();
        let report = pb::Report {
            task_id,
            what: Some(what),
            at_unix_ms: 1,
        };
        let batch = pb::ReportBatch {
            queue: "q".into(),
            reports: vec![report],
            ..Default::default()
        };
        let entry = [("v", batch.encode_to_vec())];
        let _: String = redis
            .xadd("taskd:{bus}:task-results:0", "*", &entry)
            .await
            .unwrap();
    }
    daemon.insert(&[json!({"queue": "q", "key": "next"})]).await;
    assert_eq!(daemon.drain("w", "q").await, ["next"]);
    let letters: usize = redis.xlen("taskd:{bus}:dead-letters:0").await.unwrap();
    assert_eq!(letters, 1, "the one that told of the death");
    assert_eq!(daemon.unfinished("other").await, 2);
    let queue = daemon.queue("q").await;
    assert_eq!(
        (&queue["completed"], &queue["dead"]),
        (&json!(2), &json!(1)),
        "what ever finished is counted"
    );

    // SQL knows their keys without the filter, also after a restart.
    let _: usize = redis.del("taskd:{q}:seen").await.unwrap();
    daemon.kill9_and_restart();
    daemon.ready().await;
    let again = json!([{"queue": "q", "key": "done"}, {"queue": "q", "key": "dead"}]);
    let (_, answer) = daemon.post("/v1/tasks", &again).await;
    // Nobody could send the dead one again, as its letter is gone.
    assert_eq!(statuses(&answer), ["DUPLICATE", "CREATED"]);
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results[0]["id"], ids[0]);
    assert_ne!(results[1]["id"], ids[1]);
    assert_eq!(daemon.drain("w", "q").await, ["dead"]);
    assert!(daemon.stop().await.success());
}
