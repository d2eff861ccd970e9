//! The backoff of a task, through the running binary.

use serde_json::{Value, json};

use crate::{
    column,
    support::{daemon::Daemon, until},
};

/// Rejects what the worker holds.
async fn reject(daemon: &Daemon, task: &Value) {
    let rejection =
        json!({"id": task["id"], "lease_token": task["lease_token"], "reason": "no luck"});
    let (_, answer) = daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": "w", "rejections": [rejection]}),
        )
        .await;
    assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_waits_and_gives_up_as_it_says() {
    // The waits of the queue are longer than this test.
    let config = "[queues.default]\nbackoff = [\"1h\"]\nmax_attempts = 4\nlease = \"10m\"\n";
    let mut daemon = column::start(config, &[]).await;
    let soon = json!({"kind": "linear", "initial": "1ms", "maximum": "5ms", "jitter": 0});
    let never = json!({"give_up_after": "30m"});
    let tasks = [
        json!({"queue": "q", "key": "soon", "backoff": soon}),
        json!({"queue": "never", "key": "never", "payload": "x".repeat(5000), "backoff": never}),
        json!({"queue": "expires", "key": "expires", "backoff": never, "lease_duration": "3s"}),
    ];
    let ids = daemon.insert(&tasks).await;
    for attempt in 1..=4 {
        let leased = daemon.lease_all("w", "q", 1).await;
        assert_eq!(leased[0]["attempt"], attempt);
        reject(&daemon, &leased[0]).await;
    }
    let (_, explained) = daemon
        .get(&format!("/v1/tasks:explain?id={}", ids[1]))
        .await;
    let note = "it is dead if its next attempt would begin later than 30m after its insert";
    assert!(
        explained["notes"]
            .as_array()
            .unwrap()
            .iter()
            .any(|said| said == note),
        "{explained}"
    );
    // Its next attempt would be in an hour, and its limit is half of that.
    reject(&daemon, &daemon.lease_all("w", "never", 1).await[0]).await;
    // A worker that says nothing.
    daemon.lease_all("w", "expires", 1).await;
    let mut found = Value::Null;
    for (id, attempts, reason) in [
        (&ids[0], 4, "no luck"),
        (
            &ids[1],
            1,
            "no luck (the next attempt would begin after give_up_after)",
        ),
        (
            &ids[2],
            1,
            "lease expired (the next attempt would begin after give_up_after)",
        ),
    ] {
        until("the task is dead", async || {
            found = daemon.get(&format!("/v1/tasks/{id}")).await.1;
            found["status"] == "DEAD" && !found["reason"].is_null()
        })
        .await;
        assert_eq!(
            (&found["attempts"], &found["reason"]),
            (&json!(attempts), &json!(reason)),
            "{found}"
        );
    }
    let (_, letters) = daemon.get("/v1/dead-letters?queue=never").await;
    let id = letters["letters"][0]["id"].as_str().unwrap();
    let (_, letter) = daemon.get(&format!("/v1/dead-letters/{id}")).await;
    assert_eq!(
        letter["reason"],
        "no luck (the next attempt would begin after give_up_after)"
    );
    // Sent again, it has no limit in time any more, also after a rebuild of its shard.
    let (_, again) = daemon
        .post("/v1/dead-letters:retry", &json!({"ids": [id]}))
        .await;
    assert_eq!(again["changed"], 1, "{again}");
    reject(&daemon, &daemon.lease_all("w", "never", 1).await[0]).await;
    until("it waits for its next attempt", async || {
        daemon.get(&format!("/v1/tasks/{}", ids[1])).await.1["status"] == "DELAYED"
    })
    .await;

    for (backoff, why) in [
        (
            json!({"initial": "1s"}),
            "backoff has no kind; expected constant, linear or exponential",
        ),
        (
            json!({"kind": "linear"}),
            "backoff.initial is missing: the wait after the first failure",
        ),
        (
            json!({"kind": "wild"}),
            "backoff.kind: unknown kind \"wild\"; expected constant, linear or exponential",
        ),
    ] {
        let (status, answer) = daemon
            .post(
                "/v1/tasks",
                &json!({"queue": "q", "key": "w", "backoff": backoff}),
            )
            .await;
        assert_eq!((status, &answer["results"][0]["error"]), (422, &json!(why)));
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backoff_stays_while_its_task_waits_in_sql_and_when_a_worker_discovers_it() {
    let config = "[queues.default]\nbackoff = [\"1h\"]\n";
    let mut daemon = column::start(config, &[]).await;
    let at_once = json!({"kind": "exponential", "initial": "0s"});
    // With others in its batch, and with a time, so that the watchdog publishes it from SQL.
    let mut tasks: Vec<_> = (0..5)
        .map(|n| json!({"queue": "others", "key": format!("{n}")}))
        .collect();
    tasks.push(json!({"queue": "q", "key": "later", "delay": "300ms", "backoff": at_once}));
    daemon.insert(&tasks).await;
    daemon.kill9_and_restart();
    daemon.ready().await;
    let twice = async |queue: &str| {
        reject(&daemon, &daemon.lease_all("w", queue, 1).await[0]).await;
        let again = daemon.lease_all("w", queue, 1).await.remove(0);
        assert_eq!(again["attempt"], 2);
        again
    };
    let parent = twice("q").await;
    let child = json!({"queue": "found", "key": "child", "backoff": at_once});
    let completion =
        json!({"id": parent["id"], "lease_token": parent["lease_token"], "discovered": [child]});
    let (_, answer) = daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": [completion]}),
        )
        .await;
    assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
    twice("found").await;
    assert!(daemon.stop().await.success());
}
