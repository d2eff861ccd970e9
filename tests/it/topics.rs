//! Topics of a running taskd: made, published to, read, deleted, over HTTP and by the command.

use std::process::Command;

use serde_json::{Value, json};
use taskd::wire::pb::{self, topics_client::TopicsClient};
use tonic::{Code, transport::Channel};

use crate::support::{daemon::Daemon, http_client, until};

async fn put(daemon: &Daemon, topic: &str, settings: Value) -> (u16, Value) {
    let url = format!("{}/v1/topics/{topic}", daemon.http());
    let sent = http_client().put(url).json(&settings).send().await.unwrap();
    (sent.status().as_u16(), sent.json().await.unwrap())
}

async fn publish(daemon: &Daemon, topic: &str, records: Value) -> Vec<Value> {
    let path = format!("/v1/topics/{topic}/records");
    let (status, answer) = daemon.post(&path, &records).await;
    assert_eq!(status, 200, "{answer}");
    answer["results"].as_array().unwrap().clone()
}

/// Reads a page. The answer has the values, and where the next page begins.
async fn read(daemon: &Daemon, topic: &str, query: &str) -> (Vec<Value>, String) {
    let (status, page) = daemon
        .get(&format!("/v1/topics/{topic}/records?{query}"))
        .await;
    assert_eq!(status, 200, "{page}");
    let records = page["records"].as_array().unwrap();
    let values = records.iter().map(|record| record["value"].clone());
    (values.collect(), page["next"].as_str().unwrap().to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_are_read_from_any_place_and_survive_a_kill() {
    let mut daemon = Daemon::start("", &[]).await;
    let (status, topic) = put(&daemon, "orders", json!({})).await;
    assert_eq!(status, 200, "{topic}");
    assert_eq!(
        (
            &topic["partitions"],
            &topic["retention_age"],
            &topic["retention_bytes"]
        ),
        (&json!(1), &json!("1day"), &json!(536_870_912))
    );
    let whole = json!({
        "value": {"id": 7}, "key": "customer-3", "id": "once",
        "attributes": {"lang": "en", "tags": ["b", "a"]},
    });
    let stored = publish(
        &daemon,
        "orders",
        json!([whole, {"value": "text"}, {"value_base64": "/w=="}]),
    )
    .await;
    assert!(
        stored.iter().all(|one| one["status"] == "STORED"),
        "{stored:?}"
    );
    let one = publish(&daemon, "orders", json!({"value": 4})).await;
    let last = one[0]["offset"].as_str().unwrap();

    let (status, topic) = put(&daemon, "texts", json!({})).await;
    assert_eq!(status, 200, "{topic}");
    // Texts stay texts, also those that look like JSON.
    let texts = json!(["7", "text", "{\"a\": 1}", 7, null]);
    let records: Value = texts
        .as_array()
        .unwrap()
        .iter()
        .map(|value| json!({"value": value, "attributes": {"a": "b"}}))
        .collect();
    publish(&daemon, "texts", records).await;
    let (_, page) = daemon.get("/v1/topics/texts/records").await;
    for (record, value) in page["records"]
        .as_array()
        .unwrap()
        .iter()
        .zip(texts.as_array().unwrap())
    {
        assert_eq!(&record["value"], value);
        assert_eq!(record["attributes"], json!({"a": ["b"]}));
    }

    daemon.kill9_and_restart();
    daemon.ready().await;
    let (_, page) = daemon.get("/v1/topics/orders/records").await;
    let first = &page["records"][0];
    assert_eq!(first["value"], json!({"id": 7}));
    assert_eq!(first["key"], "customer-3");
    assert_eq!(first["id"], "once");
    assert_eq!(
        first["attributes"],
        json!({"lang": ["en"], "tags": ["b", "a"]})
    );
    assert_eq!(first["offset"], stored[0]["offset"]);
    assert_eq!(page["records"][1]["value"], "text");
    assert_eq!(page["records"][2]["value_base64"], "/w==");
    assert_eq!(page["records"][3]["value"], 4);

    let (values, next) = read(&daemon, "orders", "from=0&limit=2").await;
    assert_eq!(values, [json!({"id": 7}), json!("text")]);
    let (values, next) = read(&daemon, "orders", &format!("from={next}")).await;
    assert_eq!((values.len(), &values[1]), (2, &json!(4)));
    let offset = stored[1]["offset"].as_str().unwrap();
    assert_eq!(
        read(&daemon, "orders", &format!("from={offset}"))
            .await
            .0
            .len(),
        2
    );
    assert_eq!(read(&daemon, "orders", "from=-1h").await.0.len(), 4);
    assert_eq!(
        read(&daemon, "orders", "from=2001-01-01T00:00:00Z")
            .await
            .0
            .len(),
        4
    );
    assert!(
        read(&daemon, "orders", "from=2101-01-01T00:00:00Z")
            .await
            .0
            .is_empty()
    );
    let (values, at_end) = read(&daemon, "orders", "from=$").await;
    assert!(
        values.is_empty() && at_end == next && next == format!("0:{last}"),
        "{at_end}"
    );

    // A reader that waits gets the next record.
    let path = format!("from={at_end}&wait=50s");
    let (waited, _) = tokio::join!(read(&daemon, "orders", &path), async {
        until("the reader waits", async || {
            let (_, metrics) = daemon.get("/metrics").await;
            metrics
                .as_str()
                .unwrap()
                .contains("taskd_waiting_calls 1\n")
        })
        .await;
        publish(&daemon, "orders", json!({"value": "new"})).await
    });
    assert_eq!(waited.0, ["new"]);
    let (_, shown) = daemon.get("/v1/topics/orders").await;
    assert_eq!(shown["offsets"][0]["first"], stored[0]["offset"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_a_key_keep_their_order_among_partitions() {
    let daemon = Daemon::start("[topics.many]\npartitions = 5", &[]).await;
    for round in 0..20 {
        let records: Vec<_> = (0..10)
            .map(|key| json!({"key": format!("k{key}"), "value": round}))
            .collect();
        publish(&daemon, "many", json!(records)).await;
    }
    publish(&daemon, "many", json!({"value": -1})).await;
    let mut by_key: std::collections::BTreeMap<String, Vec<i64>> = Default::default();
    let mut partitions: std::collections::BTreeSet<u64> = Default::default();
    let mut from = "0".to_owned();
    loop {
        let (_, page) = daemon
            .get(&format!("/v1/topics/many/records?from={from}&limit=7"))
            .await;
        let records = page["records"].as_array().unwrap();
        if records.is_empty() {
            break;
        }
        assert!(records.len() <= 7);
        for record in records {
            let key = record["key"].as_str().unwrap_or_default().to_owned();
            by_key
                .entry(key)
                .or_default()
                .push(record["value"].as_i64().unwrap());
            partitions.insert(record["partition"].as_u64().unwrap());
        }
        from = page["next"].as_str().unwrap().to_owned();
    }
    assert_eq!(by_key.remove("").unwrap(), [-1]);
    assert_eq!(by_key.len(), 10);
    for (key, values) in by_key {
        assert_eq!(values, (0..20).collect::<Vec<_>>(), "{key}");
    }
    assert!(partitions.len() > 1, "{partitions:?}");
    let (values, _) = read(&daemon, "many", "partition=4&from=$").await;
    assert!(values.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_oldest_records_leave_and_a_reader_goes_on_with_what_is_left() {
    let daemon = Daemon::start("[topics.short]\nretention_records = 10", &[]).await;
    for n in 0..50 {
        publish(&daemon, "short", json!({"value": n})).await;
    }
    let (values, next) = read(&daemon, "short", "from=0").await;
    assert_eq!(values, (40..50).map(Value::from).collect::<Vec<_>>());
    // The settings of a running taskd may change; what they leave out stays.
    let (status, topic) = put(
        &daemon,
        "short",
        json!({"retention_age": "2h", "partitions": 2}),
    )
    .await;
    assert_eq!(status, 200, "{topic}");
    assert_eq!(
        (&topic["retention_records"], &topic["partitions"]),
        (&json!(10), &json!(2))
    );
    let stored = publish(&daemon, "short", json!([{"value": "a"}, {"value": "b"}])).await;
    assert!(
        stored.iter().all(|one| one["status"] == "STORED"),
        "{stored:?}"
    );
    until("both are read", async || {
        read(&daemon, "short", &format!("from={next}")).await.0 == ["a", "b"]
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mistake_is_answered_with_what_to_do_and_changes_nothing() {
    let daemon = Daemon::start("[topics.orders]\npartitions = 2", &[]).await;
    let detail = |answer: &Value| answer["detail"].as_str().unwrap_or_default().to_owned();
    for (topic, settings, said) in [
        (
            "a b",
            json!({}),
            "topic \"a b\" contains ' '; use A-Z a-z 0-9 . _ -",
        ),
        (
            "events",
            json!({}),
            "topic \"events\" is one of taskd's own; choose another name",
        ),
        (
            "t",
            json!({"partitions": 257}),
            "partitions must be 1 to 256",
        ),
        (
            "t",
            json!({"retention_age": "0s"}),
            "retention_age must be 1s to 3650days",
        ),
        ("t", json!({"retention": 1}), "unknown field"),
        (
            "orders",
            json!({"partitions": 1}),
            "topic orders has 2 partitions, and there is no way back",
        ),
    ] {
        let (status, answer) = put(&daemon, topic, settings.clone()).await;
        assert!(
            status == 400 && detail(&answer).contains(said),
            "{topic} {settings}: {status} {answer}"
        );
    }
    for (path, status, said) in [
        (
            "/v1/topics/order",
            404,
            "there is no topic \"order\"; did you mean \"orders\"?",
        ),
        (
            "/v1/topics/order/records",
            404,
            "there is no topic \"order\"; did you mean \"orders\"?",
        ),
        (
            "/v1/topics/orders/records?from=soon",
            400,
            "from \"soon\" is no place; write 0",
        ),
        (
            "/v1/topics/orders/records?from=5-0",
            400,
            "topic orders has 2 partitions: name one",
        ),
        (
            "/v1/topics/orders/records?partition=2",
            400,
            "there is no partition 2: topic orders has 2",
        ),
        ("/v1/topics/orders/records?limit=1001", 400, "1001"),
        (
            "/v1/topics/orders/records?until=1",
            400,
            "unknown parameter",
        ),
    ] {
        let (found, answer) = daemon.get(path).await;
        assert!(
            found == status && detail(&answer).contains(said),
            "{path}: {found} {answer}"
        );
    }
    let large = "x".repeat(20_000);
    let (status, answer) = daemon
        .post(
            "/v1/topics/orders/records",
            &json!([
                {"value": 1, "attributes": {"a": large}},
                {"value": 1, "nonsense": 2},
                {"value": "good"},
                {"value": 1, "key": "k", "key_base64": "aw=="},
                // Each value would get a copy of the name.
                {"value": 1, "attributes": {"n".repeat(100_000): vec![""; 10_000]}},
                {"value": 1, "attributes": {"n": vec![""; 65]}},
                {"value": 1, "attributes": {"taskd-id": "x"}},
            ]),
        )
        .await;
    assert_eq!(status, 200, "{answer}");
    let errors: Vec<_> = answer["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            (
                one["status"].as_str().unwrap(),
                one["error"].as_str().unwrap_or_default(),
            )
        })
        .collect();
    assert_eq!(
        errors[0],
        ("REJECTED", "attributes have 20001 bytes; at most 16384")
    );
    assert!(errors[1].1.contains("nonsense"), "{errors:?}");
    assert_eq!(errors[2].0, "STORED");
    assert_eq!(
        errors[3],
        ("REJECTED", "key and key_base64 are both given; use one")
    );
    assert_eq!(errors[4].1, "attributes have 10000 values; at most 64");
    assert_eq!(errors[5].1, "attributes have 65 values; at most 64");
    assert!(errors[6].1.contains("must not begin with taskd-"));
    let (status, answer) = daemon
        .post("/v1/topics/orders/records", &json!(vec![1; 1001]))
        .await;
    assert!(
        status == 400 && detail(&answer).contains("more than 1000 entries"),
        "{status} {answer}"
    );
    let (status, _) = daemon
        .post(
            "/v1/topics/orders/records",
            &json!({"value": 1, "id": "x".repeat(257)}),
        )
        .await;
    assert_eq!(status, 422);
    let lines = "{\"value\": 1}\n\nno record\n{\"value\": 2}\n";
    let (status, answers) = daemon
        .post_text("/v1/topics/orders/records", "application/x-ndjson", lines)
        .await;
    assert_eq!(status, 200);
    assert_eq!(
        [
            &answers[0]["status"],
            &answers[1]["status"],
            &answers[2]["status"]
        ],
        ["STORED", "REJECTED", "STORED"]
    );
    assert!(
        answers[1]["error"]
            .as_str()
            .unwrap()
            .starts_with("line 3: "),
        "{answers}"
    );
    assert_eq!(read(&daemon, "orders", "").await.0.len(), 3);
}

/// Reads events until there are `count`. Answers their ids and values.
async fn follow(
    daemon: &Daemon,
    query: &str,
    last: Option<&str>,
    count: usize,
) -> Vec<(String, Value)> {
    let url = format!("{}/v1/topics/orders/events?{query}", daemon.http());
    let mut request = http_client().get(url);
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    let mut answer = request.send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let mut text = String::new();
    let mut events = Vec::new();
    while events.len() < count {
        let chunk = answer.chunk().await.unwrap().expect("the stream goes on");
        text += std::str::from_utf8(&chunk).unwrap();
        while let Some((event, rest)) = text.split_once("\n\n") {
            let mut lines = event.lines();
            if let Some(id) = lines.next().and_then(|line| line.strip_prefix("id: ")) {
                assert_eq!(lines.next(), Some("event: record"));
                let data = lines.next().unwrap().strip_prefix("data: ").unwrap();
                let record: Value = serde_json::from_str(data).unwrap();
                events.push((id.to_owned(), record["value"].clone()));
            }
            text = rest.to_owned();
        }
    }
    events
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_gets_what_comes_and_goes_on_after_its_last_event() {
    let daemon = Daemon::start("[topics.orders]\npartitions = 3", &[]).await;
    for n in 0..6 {
        publish(&daemon, "orders", json!({"value": n, "key": n.to_string()})).await;
    }
    let (events, _) = tokio::join!(follow(&daemon, "from=0", None, 7), async {
        publish(&daemon, "orders", json!({"value": 6})).await
    });
    let values = |events: &[(String, Value)]| {
        let mut values: Vec<i64> = events
            .iter()
            .map(|(_, value)| value.as_i64().unwrap())
            .collect();
        values.sort_unstable();
        values
    };
    assert_eq!(values(&events), (0..7).collect::<Vec<_>>());
    let rest = follow(&daemon, "", Some(&events[2].0), 4).await;
    assert_eq!(
        values(&[&events[..3], &rest].concat()),
        (0..7).collect::<Vec<_>>()
    );
    // Whoever begins at the end goes on from there, too, although no record has come.
    let url = format!("{}/v1/topics/orders/events?from=$", daemon.http());
    let mut answer = http_client().get(url).send().await.unwrap();
    let mut text = String::new();
    while !text.contains(": beat\nid: ") || !text.ends_with("\n\n") {
        let chunk = answer.chunk().await.unwrap().expect("the stream goes on");
        text += std::str::from_utf8(&chunk).unwrap();
    }
    drop(answer);
    let (_, place) = text.split_once(": beat\nid: ").unwrap();
    let (place, _) = place.split_once("\n\n").unwrap();
    publish(&daemon, "orders", json!({"value": 7})).await;
    let rest = follow(&daemon, "from=$", Some(place), 1).await;
    assert_eq!(values(&rest), [7]);
    let url = format!("{}/v1/topics/none/events", daemon.http());
    let refused = http_client().get(url).send().await.unwrap();
    assert_eq!(refused.status(), 404);
}

fn topic(daemon: &Daemon, args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_taskd"))
        .arg("topic")
        .args(args)
        .args(["--server", &daemon.http()])
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_makes_publishes_reads_and_deletes() {
    let daemon = Daemon::start("", &[]).await;
    let done = |args: &[&str]| {
        let (code, stdout, stderr) = topic(&daemon, args);
        assert_eq!((code, stderr.as_str()), (0, ""), "{args:?}");
        stdout
    };
    done(&[
        "put",
        "orders",
        "--partitions",
        "2",
        "--retention-age",
        "3days",
    ]);
    assert!(done(&["list"]).contains("3days"));
    done(&[
        "publish",
        "orders",
        "{\"id\": 7}",
        "--key",
        "k",
        "--attribute",
        "lang=en",
    ]);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        file.path(),
        "{\"value\": \"x\"}\nnothing\n{\"value\": \"y\"}\n",
    )
    .unwrap();
    let (code, stdout, stderr) = topic(
        &daemon,
        &["publish", "orders", "--file", file.path().to_str().unwrap()],
    );
    assert_eq!((code, stdout.lines().count()), (1, 2), "{stderr}");
    assert!(stderr.starts_with("taskd: line 2: "), "{stderr}");
    let read = done(&["read", "orders", "--from", "-1h"]);
    let records: Vec<Value> = read
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(records.len(), 3, "{read}");
    assert!(
        records
            .iter()
            .any(|one| one["value"]["id"] == 7 && one["attributes"]["lang"][0] == "en")
    );
    assert!(done(&["show", "orders"]).contains("\"offsets\""));
    done(&["delete", "orders"]);
    let (code, _, stderr) = topic(&daemon, &["read", "orders"]);
    assert_eq!(
        (code, stderr.as_str()),
        (1, "taskd: there is no topic \"orders\"\n")
    );
    // A topic of the same name has none of its records.
    done(&["put", "orders"]);
    assert_eq!(done(&["read", "orders"]), "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_keeps_partitions_and_ends_a_deletion_that_was_cut_off() {
    let mut daemon = Daemon::start("[topics.orders]\n[topics.mail]", &[]).await;
    publish(&daemon, "orders", json!({"value": 1})).await;
    let (status, _) = put(&daemon, "orders", json!({"partitions": 3})).await;
    assert_eq!(status, 200);
    let url = format!("{}/v1/topics/mail", daemon.http());
    let mut tries = 0;
    loop {
        publish(&daemon, "mail", json!({"value": 1})).await;
        let deletion = tokio::spawn(http_client().delete(&url).send());
        until("the deletion begins", async || {
            daemon.get("/v1/topics/mail").await.0 == 404
        })
        .await;
        // The start makes the topic again, because the configuration names it.
        daemon.kill9_and_restart();
        daemon.ready().await;
        // The deletion may have ended before the kill.
        if deletion.await.unwrap().is_err() {
            break;
        }
        tries += 1;
        assert!(tries < 20, "no deletion was cut off");
    }
    let (_, orders) = daemon.get("/v1/topics/orders").await;
    assert_eq!(orders["partitions"], 3, "{orders}");
    assert_eq!(read(&daemon, "orders", "").await.0, [1]);
    assert!(read(&daemon, "mail", "").await.0.is_empty());
    publish(&daemon, "mail", json!({"value": 2})).await;
    assert_eq!(read(&daemon, "mail", "").await.0, [2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_are_made_published_to_read_and_followed_over_grpc() {
    let mut daemon = Daemon::start("", &[]).await;
    let mut topics = TopicsClient::connect(daemon.grpc()).await.unwrap();
    let put = pb::PutTopicRequest {
        topic: "orders".into(),
        partitions: Some(2),
        retention_records: Some(500),
        ..Default::default()
    };
    let topic = topics.put_topic(put).await.unwrap().into_inner();
    assert_eq!((topic.partitions, topic.retention_records), (2, 500));
    let listed = topics.list_topics(pb::ListTopicsRequest {}).await.unwrap();
    let names: Vec<_> = listed
        .into_inner()
        .topics
        .into_iter()
        .map(|topic| topic.name)
        .collect();
    assert_eq!(names, ["orders"]);

    let attribute = |name: &str, value: &str| pb::Attribute {
        name: name.into(),
        value: value.into(),
    };
    let record = pb::NewRecord {
        value: vec![0xff, 0].into(),
        key: "customer".into(),
        attributes: vec![attribute("lang", "en"), attribute("lang", "de")],
        id: "1".into(),
    };
    let large = pb::NewRecord {
        key: vec![b'k'; 4097].into(),
        ..Default::default()
    };
    let publish = pb::PublishRequest {
        topic: "orders".into(),
        records: vec![record.clone(), large],
    };
    let published = topics.publish(publish).await.unwrap().into_inner().results;
    let [stored, rejected] = &published[..] else {
        panic!("{published:?}")
    };
    assert_eq!(
        (stored.status(), rejected.status()),
        (pb::PublishStatus::Stored, pb::PublishStatus::Rejected)
    );
    assert_eq!(rejected.error, "key has 4097 bytes; at most 4096");

    let read = pb::ReadTopicRequest {
        topic: "orders".into(),
        partition: Some(stored.partition),
        ..Default::default()
    };
    let page = topics.read_topic(read.clone()).await.unwrap().into_inner();
    let [found] = &page.records[..] else {
        panic!("{page:?}")
    };
    assert_eq!(
        (&found.value, &found.key, &found.attributes, &found.id),
        (&record.value, &record.key, &record.attributes, &record.id)
    );
    assert_eq!(found.offset, stored.offset);
    let behind = pb::ReadTopicRequest {
        from: page.next.clone(),
        ..read.clone()
    };
    let page = topics.read_topic(behind).await.unwrap().into_inner();
    assert_eq!(page.records, []);
    let get = pb::GetTopicRequest {
        topic: "orders".into(),
    };
    let topic = topics.get_topic(get.clone()).await.unwrap().into_inner();
    let of_partition = &topic.offsets[stored.partition as usize];
    assert_eq!(of_partition.last, stored.offset);

    // What comes while somebody follows, too.
    let follow = pb::FollowTopicRequest {
        topic: "orders".into(),
        ..Default::default()
    };
    let mut followed = topics.follow_topic(follow).await.unwrap().into_inner();
    let first = followed.message().await.unwrap().unwrap();
    assert_eq!(first.records.len(), 1);
    assert_eq!(
        publish_one(&mut topics, "more").await,
        pb::PublishStatus::Stored
    );
    let more = followed.message().await.unwrap().unwrap();
    assert_eq!(more.records[0].value, "more");
    let behind = pb::FollowTopicRequest {
        topic: "orders".into(),
        from: first.next,
        partition: None,
    };
    let mut again = topics.follow_topic(behind).await.unwrap().into_inner();
    let more = again.message().await.unwrap().unwrap();
    assert_eq!(more.records[0].value, "more");

    // Mistakes get one line.
    let wrong = pb::ReadTopicRequest {
        from: "x".into(),
        ..read
    };
    let status = topics.read_topic(wrong).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    let near = pb::GetTopicRequest {
        topic: "order".into(),
    };
    let status = topics.get_topic(near).await.unwrap_err();
    assert!(
        status.code() == Code::NotFound && status.message().contains("did you mean \"orders\"?"),
        "{status}"
    );
    let many = pb::PublishRequest {
        topic: "orders".into(),
        records: vec![pb::NewRecord::default(); 1001],
    };
    let status = topics.publish(many).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");

    // A follower hears of the end.
    let ended = tokio::spawn(async move { again.message().await });
    let delete = pb::DeleteTopicRequest {
        topic: "orders".into(),
    };
    topics.delete_topic(delete).await.unwrap();
    let status = topics.get_topic(get).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound, "{status}");
    assert!(daemon.stop().await.success());
    let status = ended.await.unwrap().unwrap_err();
    assert!(
        [Code::NotFound, Code::Unavailable].contains(&status.code()),
        "{status}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_of_large_records_starves_no_other() {
    let daemon = Daemon::start("[topics.orders]\npartitions = 2", &[]).await;
    // Which keys go to which partition.
    let mut keys: [Option<String>; 2] = [None, None];
    for n in 0.. {
        let key = format!("k{n}");
        let stored = publish(&daemon, "orders", json!([{"key": key, "value": "small"}])).await;
        keys[stored[0]["partition"].as_u64().unwrap() as usize].get_or_insert(key);
        if keys.iter().all(Option::is_some) {
            break;
        }
    }
    let large = "a".repeat(500_000);
    for _ in 0..20 {
        let record = json!([{"key": keys[0], "value": large}]);
        publish(&daemon, "orders", record).await;
    }
    let mut topics = TopicsClient::connect(daemon.grpc()).await.unwrap();
    let follow = pb::FollowTopicRequest {
        topic: "orders".into(),
        ..Default::default()
    };
    let mut followed = topics.follow_topic(follow).await.unwrap().into_inner();
    // Each of the first pages has as many bytes as a page may have, all of one partition.
    let mut partitions = std::collections::BTreeSet::new();
    for _ in 0..2 {
        let page = followed.message().await.unwrap().unwrap();
        partitions.extend(page.records.iter().map(|record| record.partition));
    }
    assert_eq!(Vec::from_iter(partitions), [0, 1]);
    // None is left out.
    let mut count = 0;
    let mut from = "0".to_owned();
    loop {
        let (values, next) = read(&daemon, "orders", &format!("from={from}&limit=7")).await;
        if values.is_empty() {
            break;
        }
        count += values.iter().filter(|value| **value == large).count();
        from = next;
    }
    assert_eq!(count, 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_changes_at_once_do_not_undo_each_other() {
    let daemon = Daemon::start("", &[]).await;
    for round in 1..=20 {
        let records = json!({"retention_records": round});
        let (one, other) = tokio::join!(
            put(
                &daemon,
                "orders",
                json!({"retention_age": format!("{round}h")})
            ),
            put(&daemon, "orders", records),
        );
        assert_eq!((one.0, other.0), (200, 200), "{one:?} {other:?}");
        let (_, topic) = daemon.get("/v1/topics/orders").await;
        let kept = (&topic["retention_age"], &topic["retention_records"]);
        let age = humantime::parse_duration(kept.0.as_str().unwrap()).unwrap();
        assert_eq!((age.as_secs() / 3600, kept.1), (round, &json!(round)));
    }
}

async fn publish_one(topics: &mut TopicsClient<Channel>, value: &'static str) -> pb::PublishStatus {
    let record = pb::NewRecord {
        value: value.into(),
        ..Default::default()
    };
    let publish = pb::PublishRequest {
        topic: "orders".into(),
        records: vec![record],
    };
    let answer = topics.publish(publish).await.unwrap().into_inner();
    answer.results[0].status()
}
