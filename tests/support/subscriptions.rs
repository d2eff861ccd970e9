//! Topics and subscriptions of a running taskd, and the example that works on every backend.

use serde_json::{Value, json};

use super::{daemon::Daemon, http_client, until};

/// Puts a topic or a subscription.
pub(crate) async fn put(daemon: &Daemon, path: &str, settings: Value) -> (u16, Value) {
    let url = format!("{}/v1/{path}", daemon.http());
    let sent = http_client().put(url).json(&settings).send().await.unwrap();
    (sent.status().as_u16(), sent.json().await.unwrap())
}

pub(crate) async fn subscribe(daemon: &Daemon, name: &str, settings: Value) {
    let (status, answer) = put(daemon, &format!("subscriptions/{name}"), settings).await;
    assert_eq!(status, 200, "{answer}");
}

/// Publishes records, which are all stored.
pub(crate) async fn publish(daemon: &Daemon, topic: &str, records: Value) {
    let path = format!("/v1/topics/{topic}/records");
    let (status, answer) = daemon.post(&path, &records).await;
    assert_eq!(status, 200, "{answer}");
    let answers = answer["results"].as_array().unwrap();
    assert!(
        answers.iter().all(|one| one["status"] == "STORED"),
        "{answer}"
    );
}

/// What `GET /v1/subscriptions` says of one.
pub(crate) async fn subscription(daemon: &Daemon, name: &str) -> Value {
    let (status, answer) = daemon.get("/v1/subscriptions").await;
    assert_eq!(status, 200, "{answer}");
    let all = answer["subscriptions"].as_array().unwrap();
    let found = all.iter().find(|one| one["name"] == name);
    found
        .unwrap_or_else(|| panic!("no subscription {name}: {answer}"))
        .clone()
}

/// Waits until these fields of a subscription have these values.
pub(crate) async fn until_it_has(daemon: &Daemon, name: &str, fields: &[(&str, u64)]) {
    let mut last = Value::Null;
    until(&format!("{name} has {fields:?}"), async || {
        last = subscription(daemon, name).await;
        fields.iter().all(|(field, value)| last[*field] == *value)
    })
    .await;
}

/// Three groups hear of each record, and two consumers share the work of a group. taskd is killed
/// in between. Needs one partition of the bus, so that tasks keep their order.
pub(crate) async fn three_groups_hear_of_each_record(daemon: &mut Daemon) {
    let (status, answer) = put(daemon, "topics/stream1", json!({})).await;
    assert_eq!(status, 200, "{answer}");
    // Nobody hears of what was published before.
    publish(daemon, "stream1", json!({"value": "before"})).await;
    for group in ["group1", "group2", "group3"] {
        subscribe(daemon, group, json!({"topic": "stream1"})).await;
    }
    let record = |value: Value| json!({"value": value, "attributes": {"lang": "en"}});
    let hello = json!({"Key": "Hello", "Value": "World"});
    let message = json!({"Key": "This is", "Value": "A message"});
    publish(daemon, "stream1", record(hello.clone())).await;
    publish(daemon, "stream1", record(message.clone())).await;
    for group in ["group1", "group2", "group3"] {
        let fields = [("behind", 0), ("waiting", 2), ("leased", 0), ("tasks", 2)];
        until_it_has(daemon, group, &fields).await;
    }

    // Two consumers of a group get different records.
    let first = daemon.lease_all("consumer1", "group1", 1).await;
    let second = daemon.lease_all("consumer2", "group1", 1).await;
    assert_ne!(first[0]["id"], second[0]["id"]);
    for task in [&first[0], &second[0]] {
        assert_eq!(task["headers"]["lang"], "en", "{task}");
        assert_eq!(task["headers"]["taskd-topic"], "stream1", "{task}");
    }
    let values = [first[0]["payload"].clone(), second[0]["payload"].clone()];
    assert_eq!(values, [hello.clone(), message.clone()]);
    until_it_has(daemon, "group1", &[("waiting", 0), ("leased", 2)]).await;
    until_it_has(daemon, "group2", &[("waiting", 2), ("leased", 0)]).await;
    until_it_has(daemon, "group3", &[("waiting", 2), ("leased", 0)]).await;

    assert_eq!(daemon.complete("consumer1", &first).await, ["OK"]);
    assert_eq!(daemon.complete("consumer2", &second).await, ["OK"]);
    until_it_has(daemon, "group1", &[("leased", 0), ("done", 2)]).await;
    for _ in 0..2 {
        for consumer in ["consumer1", "consumer2"] {
            let nothing = daemon.lease(consumer, "group1", 10, "500ms").await;
            assert!(nothing.is_empty(), "{nothing:?}");
        }
    }
    until_it_has(daemon, "group2", &[("waiting", 2)]).await;

    // Another group gets both, in the order published, and the third one after a kill.
    let both = daemon.lease_all("consumer1", "group2", 2).await;
    let values = [both[0]["payload"].clone(), both[1]["payload"].clone()];
    assert_eq!(values, [hello, message]);
    assert_eq!(daemon.complete("consumer1", &both).await, ["OK", "OK"]);
    daemon.kill9_and_restart();
    daemon.ready().await;
    until_it_has(
        daemon,
        "group3",
        &[("waiting", 2), ("behind", 0), ("tasks", 2)],
    )
    .await;
    until_it_has(daemon, "group1", &[("waiting", 0), ("done", 2)]).await;

    // A record whose consumer dies goes to another one.
    publish(daemon, "stream1", record(json!("reassigned"))).await;
    let body = json!({
        "worker": "consumer1", "queues": ["group1"], "max_tasks": 1, "wait": "1s",
        "lease_duration": "1s",
    });
    let mut lost = Vec::new();
    until("consumer1 gets it", async || {
        let (_, answer) = daemon.post("/v1/tasks:get", &body).await;
        lost = answer["tasks"].as_array().unwrap().clone();
        !lost.is_empty()
    })
    .await;
    let again = daemon.lease_all("consumer2", "group1", 1).await;
    assert_eq!(again[0]["id"], lost[0]["id"]);
    assert_eq!(again[0]["attempt"], 2, "{again:?}");
    assert_eq!(daemon.complete("consumer1", &lost).await, ["LEASE_LOST"]);
    assert_eq!(daemon.complete("consumer2", &again).await, ["OK"]);
    until_it_has(daemon, "group1", &[("done", 3)]).await;
    until_it_has(daemon, "group2", &[("waiting", 1), ("done", 2)]).await;
    until_it_has(daemon, "group3", &[("waiting", 3)]).await;
}
