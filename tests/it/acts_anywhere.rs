//! What an operator may do does not depend on where the task stands.

use serde_json::{Value, json};

use crate::{
    columns::changes::becomes,
    support::{
        daemon::{Daemon, statuses},
        until,
    },
};

const CONFIG: &str = "\
    partitions = 1\n\
    [queues.default]\n\
    lease = \"10m\"\n\
    backoff = [\"1h\"]\n\
    [queues.full]\n\
    high_water_tasks = 2\n";

/// The places, by what explain calls them, and the queue of a task that is to stand there.
const PLACES: [(&str, &str, &str); 7] = [
    ("queued", "waits", "WAITING"),
    ("leased", "held", "LEASED"),
    ("in backoff", "failed", "DELAYED"),
    ("delayed, near", "near", "DELAYED"),
    ("delayed, far", "far", "SCHEDULED"),
    ("parked", "full", "PARKED"),
    ("behind in a sequence", "behind", "BEHIND"),
];

async fn place(daemon: &Daemon, id: &str) -> Value {
    daemon.get(&format!("/v1/tasks:explain?id={id}")).await.1["place"].clone()
}

/// A new task that stands at the place of this queue.
async fn task_at(daemon: &Daemon, queue: &str, key: &str, want: &str) -> String {
    let task = match queue {
        "near" => json!({"queue": queue, "key": key, "delay": "5m"}),
        "far" => json!({"queue": queue, "key": key, "delay": "30d"}),
        "behind" => json!({"queue": queue, "key": key, "sequence": "s"}),
        _ => json!({"queue": queue, "key": key}),
    };
    let id = daemon.insert(&[task]).await.remove(0);
    if matches!(queue, "held" | "failed") {
        let leased = daemon.lease_all("w", queue, 1).await.remove(0);
        assert_eq!(leased["id"], id);
        if queue == "failed" {
            let item = json!({"id": id, "lease_token": leased["lease_token"], "reason": "no luck"});
            let (_, answer) = daemon
                .post(
                    "/v1/tasks:reject",
                    &json!({"worker": "w", "rejections": [item]}),
                )
                .await;
            assert_eq!(statuses(&answer), ["OK"]);
        }
    }
    until("it stands there", async || place(daemon, &id).await == want).await;
    id
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_changed_and_cancelled_wherever_they_stand() {
    let daemon = Daemon::start(CONFIG, &[]).await;
    // These fill the queue, so that later ones are parked.
    let full: Vec<Value> = (0..10)
        .map(|n| json!({"queue": "full", "key": format!("first {n}")}))
        .collect();
    daemon.insert(&full).await;
    let first = json!({"queue": "behind", "key": "first", "sequence": "s"});
    daemon.insert(&[first]).await;
    until("the queue is full", async || {
        daemon.queue("full").await["pending"].as_u64() > Some(0)
    })
    .await;
    for (name, queue, want) in PLACES {
        for (act, more) in [
            ("priority", json!({"priority": "high"})),
            ("cancel", Value::Null),
            // The last: any worker may get the second replica.
            ("replicas", json!({"replicas": 2})),
        ] {
            let id = task_at(&daemon, queue, act, want).await;
            let mut body = json!({"ids": [id]});
            let path = match more {
                Value::Null => "/v1/tasks:cancel",
                _ => "/v1/tasks:change",
            };
            if let Value::Object(more) = more {
                body.as_object_mut().unwrap().extend(more);
            }
            let (status, answer) = daemon.post(path, &body).await;
            assert_eq!(
                (status, statuses(&answer)),
                (200, vec!["OK".to_owned()]),
                "{name}, {act}: {answer}"
            );
            match act {
                "cancel" => becomes(&daemon, &id, "CANCELLED").await,
                _ => {
                    let expected = if act == "priority" {
                        json!("high")
                    } else {
                        json!(2)
                    };
                    until("the change is seen", async || {
                        daemon.get(&format!("/v1/tasks/{id}")).await.1[act] == expected
                    })
                    .await;
                }
            }
        }
    }
}
