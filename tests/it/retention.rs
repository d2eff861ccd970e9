//! Queues whose completed tasks are removed earlier than those of other queues.

use serde_json::json;

use crate::support::{
    daemon::{Daemon, statuses},
    until,
};

const SETTINGS: &str = "grace = \"1s\"\nrepublish_after = \"100ms\"\n\
    [queues.default]\nmax_attempts = 1\n[queues.short]\nretention = \"3s\"";

#[tokio::test]
async fn a_queue_keeps_its_completed_tasks_for_less() {
    let daemon = Daemon::start(SETTINGS, &[]).await;
    let tasks = [("short", "done"), ("short", "dead"), ("usual", "done")]
        .map(|(queue, key)| json!({"queue": queue, "key": key}));
    let ids = daemon.insert(&tasks).await;
    for task in daemon.lease_all("w", "short", 2).await {
        let (id, lease) = (&task["id"], &task["lease_token"]);
        let (path, body) = if task["key"] == "done" {
            let done = json!({"id": id, "lease_token": lease});
            (
                "/v1/tasks:complete",
                json!({"worker": "w", "completions": [done]}),
            )
        } else {
            let failed = json!({"id": id, "lease_token": lease, "reason": "no luck"});
            (
                "/v1/tasks:reject",
                json!({"worker": "w", "rejections": [failed]}),
            )
        };
        assert_eq!(statuses(&daemon.post(path, &body).await.1), ["OK"]);
    }
    assert_eq!(daemon.drain("w", "usual").await, ["done"]);
    let status = async |id: &String| daemon.get(&format!("/v1/tasks/{id}")).await.0;
    until("all have ended", async || {
        let queue = daemon.queue("short").await;
        let usual = daemon.queue("usual").await;
        [&queue["completed"], &queue["dead"], &usual["completed"]] == [1, 1, 1]
    })
    .await;
    // This one ends after them. When it is removed, the others are older than that, too.
    let last = daemon
        .insert(&[json!({"queue": "short", "key": "last"})])
        .await;
    assert_eq!(daemon.drain("w", "short").await, ["last"]);
    until("the completed tasks of the queue are removed", async || {
        status(&ids[0]).await == 404 && status(&last[0]).await == 404
    })
    .await;
    assert_eq!(status(&ids[1]).await, 200, "a dead task waits for somebody");
    assert_eq!(status(&ids[2]).await, 200);
    let again = json!([{"queue": "short", "key": "done"}]);
    let answer = daemon.post("/v1/tasks", &again).await.1;
    assert_eq!(statuses(&answer), ["DUPLICATE"]);
}
