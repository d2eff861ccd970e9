//! Queues that share the tasks of calls by weight.

use serde_json::{Value, json};

use crate::support::{daemon::Daemon, until};

/// Backlogs of so many tasks with this payload, those of `b` more urgent.
async fn fill(daemon: &Daemon, a: usize, b: usize, payload: &str) {
    for (queue, count, priority) in [("a", a, "low"), ("b", b, "high")] {
        let keys: Vec<String> = (0..count).map(|key| key.to_string()).collect();
        for keys in keys.chunks(1000) {
            let task =
                |key| json!({"queue": queue, "key": key, "priority": priority, "payload": payload});
            daemon
                .insert(&keys.iter().map(task).collect::<Vec<_>>())
                .await;
        }
    }
    // Before they are there, a queue has none to share.
    until("all wait for workers", async || {
        let waiting = [daemon.queue("a").await, daemon.queue("b").await];
        waiting[0]["waiting"] == a && waiting[1]["waiting"] == b
    })
    .await;
}

/// The queues of some tasks in the order in which they came.
fn queues_of(answer: &Value) -> Vec<String> {
    let tasks = answer["tasks"].as_array().unwrap();
    tasks
        .iter()
        .map(|task| task["queue"].as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn queues_share_the_tasks_by_weight_while_each_has_some() {
    let daemon = Daemon::start("", &[]).await;
    fill(&daemon, 3300, 1200, "").await;
    let get = async |weights: Value, max_tasks: usize| {
        let body = json!({"worker": "w", "queues": ["b", "a"], "weights": weights,
            "max_tasks": max_tasks, "wait": "0s", "lease_duration": "10m"});
        daemon.post("/v1/tasks:get", &body).await
    };
    let mut order = Vec::new();
    let mut calls = 0;
    while order.len() < 4000 {
        // Also calls for one task, which alone could not be shared.
        let most = [1, 7, 8][calls % 3].min(4000 - order.len());
        calls += 1;
        let (status, answer) = get(json!({"a": 3}), most).await;
        assert_eq!(status, 200, "{answer}");
        let came = queues_of(&answer);
        assert_eq!(came.len(), most);
        order.extend(came);
    }
    for (n, some) in order.chunks(400).enumerate() {
        let of_a = some.iter().filter(|queue| *queue == "a").count();
        assert!((270..=330).contains(&of_a), "{of_a} of the {n}th 400");
    }
    // What one queue has less of than its share goes to the other.
    let mut rest = 0;
    loop {
        let came = queues_of(&get(json!({"a": 3, "b": 1000}), 100).await.1);
        if came.is_empty() {
            break;
        }
        assert!(came.len() == 100 || rest == 400, "{rest}");
        rest += came.len();
    }
    assert_eq!(rest, 500);

    for (weights, why) in [
        (
            json!({"c": 1}),
            "weights names \"c\", which is not one of queues",
        ),
        (json!({"a": 0}), "weights gives a 0; must be 1 to 1000"),
        (json!({"a": "x"}), "weights.a: invalid type: string"),
    ] {
        let (status, answer) = get(weights, 1).await;
        assert_eq!(status, 400);
        let error = answer["detail"].as_str().unwrap();
        assert!(error.contains(why), "{error}");
    }
}

#[tokio::test]
async fn queues_share_the_bytes_of_an_answer_by_weight() {
    let daemon = Daemon::start("", &[]).await;
    // An answer of 3.5 MiB has 35 of these tasks.
    fill(&daemon, 36, 36, &"x".repeat(100 << 10)).await;
    let ask = json!({"worker": "w", "queues": ["a", "b"], "weights": {"a": 1, "b": 1},
        "max_tasks": 100, "wait": "0s", "lease_duration": "10m"});
    let (status, answer) = daemon.post("/v1/tasks:get", &ask).await;
    assert_eq!(status, 200, "{answer}");
    let came = queues_of(&answer);
    let of_a = came.iter().filter(|queue| *queue == "a").count();
    assert!((33..=36).contains(&came.len()), "{} tasks", came.len());
    assert!(
        of_a.abs_diff(came.len() - of_a) <= 2,
        "{of_a} of a, {}",
        came.len()
    );
}

#[tokio::test]
async fn queues_share_the_tasks_of_a_session_by_weight() {
    let daemon = Daemon::start("", &[]).await;
    fill(&daemon, 200, 200, "").await;
    let open = json!({"worker": "w", "queues": ["a", "b"], "weights": {"b": 4},
        "lease_duration": "10m"});
    let (status, opened) = daemon.post("/v1/sessions:open", &open).await;
    assert_eq!(status, 200, "{opened}");
    let mut order = Vec::new();
    while order.len() < 200 {
        let want = json!({"worker": "w", "session": opened["session"], "want": 10, "wait": "10s"});
        let (status, answer) = daemon.post("/v1/sessions:want", &want).await;
        assert_eq!(status, 200, "{answer}");
        order.extend(queues_of(&answer));
    }
    let of_b = order.iter().filter(|queue| *queue == "b").count();
    assert!((150..=170).contains(&of_b), "{of_b} of {}", order.len());
}
