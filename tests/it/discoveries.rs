//! A discovered task that is wrong costs only itself: the completion counts, and the others are
//! stored.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use taskd::wire::pb::{self, tasks_client::TasksClient};

use crate::{
    columns::dead_letters::letters,
    support::{daemon::Daemon, until},
};

/// Tasks in JSON that are wrong, each with a part of what the answer says, and whether a letter
/// keeps it: not if it cannot be read as a task.
fn wrong() -> Vec<(String, &'static str, bool)> {
    let task = |more: Value| {
        let mut task = json!({"queue": "found", "key": "wrong"});
        task.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        task.to_string()
    };
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    let many: serde_json::Map<String, Value> =
        (0..1001).map(|n| (format!("h{n}"), json!(""))).collect();
    vec![
        (
            task(json!({"key": "k".repeat(4097)})),
            "key has 4097 bytes; at most 4096",
            true,
        ),
        (
            task(json!({"key": ""})),
            "key and payload are both empty",
            true,
        ),
        (
            task(json!({"queue": "a b"})),
            "queue \"a b\" contains ' '",
            true,
        ),
        (task(json!({"queue": "q".repeat(65)})), "at most 64", true),
        (
            task(json!({"payload": "x".repeat(2 << 20)})),
            "payload has 2097152 bytes",
            true,
        ),
        (task(json!({"replicas": 0})), "replicas is 0", true),
        (task(json!({"max_attempts": 0})), "max_attempts is 0", true),
        (
            task(json!({"lease_duration": "1ms"})),
            "lease_duration is 1ms",
            true,
        ),
        (
            task(json!({"finish_within": "0s"})),
            "finish_within is 0s",
            true,
        ),
        (
            task(json!({"delay": "1s", "not_before": "2030-01-31T12:00:00Z"})),
            "use one",
            true,
        ),
        (task(json!({"traceparent": "x"})), "traceparent", true),
        (
            task(json!({"headers": {"": "x"}})),
            "a header has an empty name",
            true,
        ),
        (
            task(json!({"headers": {"h": "a\nb"}})),
            "contains a control character",
            true,
        ),
        (
            task(json!({"headers": many})),
            "more than 1000 headers",
            false,
        ),
        (task(json!({"priority": "urgent"})), "priority", false),
        (task(json!({"kee": 1})), "unknown field `kee`", false),
        (task(json!({"key": 7})), "key", false),
        ("7".to_owned(), "discovered[1]", false),
        (
            format!("{{\"queue\":\"found\",\"key\":\"deep\",\"payload\":{deep}}}"),
            "more than 120 deep",
            true,
        ),
        (
            "{\"queue\":\"found\",\"key\":\"half \\ud800\"}".to_owned(),
            "discovered[1]",
            false,
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_discovered_task_costs_only_itself() {
    let mut daemon = Daemon::start("", &[]).await;
    let wrong = wrong();
    let parents: Vec<Value> = (0..wrong.len())
        .map(|n| json!({"queue": "q", "key": n.to_string()}))
        .collect();
    daemon.insert(&parents).await;
    let leased = daemon.lease_all("w", "q", parents.len()).await;
    let good = |key: String| json!({"queue": "found", "key": key}).to_string();
    for (place, (bad, says, _)) in wrong.iter().enumerate() {
        let (id, token) = (&leased[place]["id"], &leased[place]["lease_token"]);
        let (first, last) = (
            good(format!("first-{place}")),
            good(format!("last-{place}")),
        );
        let done = format!(
            "{{\"worker\":\"w\",\"completions\":[{{\"id\":{id},\"lease_token\":{token},\"result\":\"done\",\
             \"discovered\":[{first},{bad},{last}]}}]}}"
        );
        // A repeat has the same answer.
        for _ in 0..2 {
            let (_, answer) = daemon
                .post_text("/v1/tasks:complete", "application/json", done.clone())
                .await;
            let one = &answer["results"][0];
            let error = one["error"].as_str().unwrap_or_default();
            assert_eq!(one["status"], "OK", "{says}: {answer}");
            assert!(
                error.starts_with("1 discovered task is not stored: ") && error.contains(says),
                "{says}: {error}"
            );
        }
    }
    until("all parents are completed", async || {
        daemon.queue("q").await["completed"] == wrong.len()
    })
    .await;
    until("the good ones are stored", async || {
        daemon.unfinished("found").await == 2 * wrong.len() as u64
    })
    .await;
    let kept: Vec<&str> = wrong
        .iter()
        .filter(|(_, _, is_kept)| *is_kept)
        .map(|(_, says, _)| *says)
        .collect();
    let letters = letters(&daemon, "kind=discovered&limit=100", kept.len()).await;
    let reasons: Vec<&str> = letters
        .iter()
        .map(|letter| letter["reason"].as_str().unwrap())
        .collect();
    for says in kept {
        assert!(
            reasons.iter().any(|reason| reason.contains(says)),
            "{says}: {reasons:?}"
        );
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn over_grpc_a_value_that_nobody_knows_costs_only_its_task() {
    let mut daemon = Daemon::start("", &[]).await;
    daemon
        .insert(&[json!({"queue": "q", "key": "parent"})])
        .await;
    let leased = daemon.lease_all("w", "q", 1).await.remove(0);
    let task = |key: &str| pb::NewTask {
        queue: "found".into(),
        key: key.to_owned().into(),
        ..Default::default()
    };
    let negative = Some(prost_types::Duration {
        seconds: -1,
        nanos: 0,
    });
    let discovered = vec![
        task("good"),
        pb::NewTask {
            priority: 9,
            ..task("priority")
        },
        pb::NewTask {
            payload_encoding: 9,
            ..task("encoding")
        },
        pb::NewTask {
            delay: negative,
            ..task("delay")
        },
        pb::NewTask {
            lease_duration: negative,
            ..task("lease")
        },
        pb::NewTask {
            idempotency_key: "i".repeat(300),
            ..task("idempotent")
        },
        pb::NewTask {
            payload: b"{"[..].into(),
            payload_encoding: pb::Encoding::Json.into(),
            ..task("json")
        },
    ];
    let text = |name: &str| leased[name].as_str().unwrap().to_owned();
    let completion = pb::Completion {
        id: text("id"),
        lease_token: text("lease_token"),
        discovered,
        ..Default::default()
    };
    let request = pb::CompleteTasksRequest {
        worker: "w".into(),
        completions: vec![completion],
        next: None,
    };
    let mut client = TasksClient::connect(daemon.grpc()).await.unwrap();
    let answer = client
        .complete_tasks(request)
        .await
        .unwrap()
        .into_inner()
        .results
        .remove(0);
    assert_eq!(answer.status(), pb::ItemStatus::Ok, "{answer:?}");
    let note = "5 discovered tasks are not stored; the first: discovered[1]: priority 9 is unknown";
    assert!(answer.error.starts_with(note), "{answer:?}");
    let keys: BTreeSet<String> = daemon
        .lease_all("w", "found", 2)
        .await
        .iter()
        .map(|task| task["key"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(keys, ["good", "idempotent"].map(str::to_owned).into());
    let letters = letters(&daemon, "kind=discovered", 5).await;
    assert!(
        letters
            .iter()
            .all(|letter| letter["parent_id"] == leased["id"]),
        "{letters:?}"
    );
    assert!(daemon.stop().await.success());
}
