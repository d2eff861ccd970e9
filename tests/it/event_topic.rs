//! Topic `events` and the public channel of announcements: what repeats, what is bounded, what
//! needs no watcher.

use std::collections::BTreeMap;

use futures::StreamExt as _;
use serde_json::json;
use taskd::{
    bus::{Bus as _, Log, LogRecord, redis_streams::RedisStreams},
    model::TaskStatus,
    redis_pool::Redis,
    wire,
};

use crate::support::{
    daemon::Daemon,
    event_topic::{events, in_order},
    redis::{Fsync, RedisServer},
    until,
};

/// Runs a statement in the daemon's database.
fn sql(daemon: &Daemon, text: &str) {
    let database = rusqlite::Connection::open(daemon.data().join("taskd.db")).unwrap();
    database
        .busy_timeout(std::time::Duration::from_secs(30))
        .unwrap();
    database.execute_batch(text).unwrap();
}

#[tokio::test]
async fn a_kill_behind_the_publish_repeats_events_with_their_numbers() {
    let mut daemon = Daemon::start("[queues.default]\nevents = true", &[]).await;
    sql(
        &daemon,
        "CREATE TRIGGER stays BEFORE DELETE ON kept_events BEGIN SELECT RAISE(ABORT, 'it stays'); END",
    );
    daemon
        .insert(&[
            json!({"queue": "q", "key": "a"}),
            json!({"queue": "q", "key": "b"}),
        ])
        .await;
    until("events are published, and not removed", async || {
        events(&daemon).await.len() >= 2
    })
    .await;
    daemon.kill9();
    sql(&daemon, "DROP TRIGGER stays");
    daemon.start_again();
    daemon.ready().await;
    let leased = daemon.lease_all("w", "q", 2).await;
    daemon.complete("w", &leased).await;
    let mut all = Vec::new();
    until("the ends are on the topic", async || {
        all = events(&daemon).await;
        all.iter()
            .filter(|(_, event)| event.status == TaskStatus::Completed)
            .count()
            >= 2
    })
    .await;
    let mut by_number = BTreeMap::new();
    for (number, event) in &all {
        assert_eq!(
            by_number.entry(*number).or_insert(event),
            &event,
            "a repeat is what it was"
        );
    }
    assert!(
        by_number.len() == 4 && all.len() > 4,
        "{} events, {} records",
        by_number.len(),
        all.len()
    );
    let expected = vec![TaskStatus::Pending, TaskStatus::Completed];
    assert_eq!(
        in_order(&all),
        [
            ("a".to_owned(), expected.clone()),
            ("b".to_owned(), expected)
        ]
        .into()
    );
}

#[tokio::test]
async fn a_topic_that_nobody_reads_is_bounded() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let bus = RedisStreams::open(redis.clone(), "", 1).await.unwrap();
    let large = LogRecord {
        value: vec![7; 1 << 20].into(),
        ..LogRecord::default()
    };
    let logs = bus.logs();
    for _ in 0..12 {
        logs.append(&Log::EVENTS, &vec![large.clone(); 8])
            .await
            .unwrap();
    }
    let length: u64 = redis::cmd("XLEN")
        .arg("t:{bus}:events:0")
        .query_async(&mut redis.conn())
        .await
        .unwrap();
    assert!((32..=65).contains(&length), "{length} MiB of 96 are there");
}

#[tokio::test]
async fn the_channel_tells_every_step_without_a_watcher() {
    let daemon = Daemon::start("[queues.q]\nevents = true", &[]).await;
    let url = format!("unix://{}", daemon.data().join("redis.sock").display());
    let mut channel = redis::Client::open(url)
        .unwrap()
        .get_async_pubsub()
        .await
        .unwrap();
    channel.subscribe("taskd:events:q").await.unwrap();
    channel.subscribe("taskd:events:silent").await.unwrap();
    daemon
        .insert(&[json!({"queue": "silent", "key": "k"})])
        .await;
    let id = daemon
        .insert(&[json!({"queue": "q", "key": "k"})])
        .await
        .remove(0);
    let leased = daemon.lease_all("w", "q", 1).await;
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    let (mut messages, mut seen) = (channel.on_message(), Vec::new());
    while !seen.contains(&TaskStatus::Completed) {
        let message = tokio::time::timeout(std::time::Duration::from_secs(60), messages.next())
            .await
            .unwrap()
            .unwrap();
        assert_eq!(message.get_channel_name(), "taskd:events:q");
        for (of, status, at_unix_ms) in
            wire::read_status_changes(message.get_payload_bytes()).unwrap()
        {
            assert!(of.to_string() == id && at_unix_ms > 0);
            seen.extend(status);
        }
    }
    for status in [
        TaskStatus::Pending,
        TaskStatus::Queued,
        TaskStatus::Assigned,
    ] {
        assert!(seen.contains(&status), "{seen:?}");
    }
}
