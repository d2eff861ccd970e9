//! The bitmap filter: every key in Redis after each step, its bound, and its memory beside the
//! filter of hashes.

use std::collections::{BTreeMap, BTreeSet};

use redis::AsyncCommands;
use taskd::{
    dedup::Filter,
    model::{KeyHash, QueueName, TaskId},
    redis_pool::Redis,
};

use crate::support::redis::{Fsync, RedisServer};

const MANY: u64 = 1_000_000;

fn queue() -> QueueName {
    QueueName::new("q").unwrap()
}

/// Every key: the members of the set, and the bits of the bitmaps.
async fn state(redis: &Redis) -> (BTreeSet<u64>, BTreeMap<String, Vec<u64>>) {
    let mut conn = redis.conn();
    let (mut chunks, mut bitmaps) = (BTreeSet::new(), BTreeMap::new());
    let keys: Vec<String> = redis::cmd("KEYS")
        .arg("*")
        .query_async(&mut conn)
        .await
        .unwrap();
    for key in keys {
        if key == "t:{q}:bits" {
            chunks = conn.smembers(key).await.unwrap();
        } else {
            let bytes: Vec<u8> = conn.get(&key).await.unwrap();
            let is_set =
                |bit: &u64| bytes[usize::try_from(bit / 8).unwrap()] & (0x80 >> (bit % 8)) != 0;
            bitmaps.insert(key, (0..bytes.len() as u64 * 8).filter(is_set).collect());
        }
    }
    (chunks, bitmaps)
}

#[tokio::test]
async fn numbers_have_bits_in_chunks_and_a_closed_queue_has_none() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let filter = Filter::new(redis.clone());
    let numbers = [7, 65_535, 65_536, 0, (1 << 40) - 1];
    assert_eq!(
        filter.seen_numbers(&queue(), &numbers).await.unwrap(),
        [false; 5]
    );
    assert_eq!(
        filter.seen_numbers(&queue(), &[]).await.unwrap(),
        [false; 0]
    );
    filter.mark_numbers(&queue(), &numbers, MANY).await.unwrap();
    filter.mark_numbers(&queue(), &[7], MANY).await.unwrap();
    let last = (1 << 24) - 1;
    let bitmap = |chunk: u64, bits: &[u64]| (format!("t:{{q}}:bits:{chunk}"), bits.to_vec());
    let bitmaps = [
        bitmap(0, &[0, 7, 65_535]),
        bitmap(1, &[0]),
        bitmap(last, &[65_535]),
    ];
    assert_eq!(state(&redis).await, ([0, 1, last].into(), bitmaps.into()));
    let asked = [0, 1, 7, 65_535, 65_536, 65_537, 131_072, (1 << 40) - 1];
    let seen = [true, false, true, true, true, false, false, true];
    assert_eq!(filter.seen_numbers(&queue(), &asked).await.unwrap(), seen);
    let other = QueueName::new("other").unwrap();
    assert_eq!(
        filter.seen_numbers(&other, &asked).await.unwrap(),
        [false; 8]
    );

    filter.forget_queue(&queue()).await.unwrap();
    assert_eq!(state(&redis).await, Default::default());
}

#[tokio::test]
async fn the_chunks_of_numbers_that_lie_far_apart_are_bounded() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let filter = Filter::new(redis.clone());
    // Each has a chunk of its own.
    let numbers: Vec<u64> = (0..2500).map(|n| n << 16).collect();
    filter
        .mark_numbers(&queue(), &numbers, 80 * 10)
        .await
        .unwrap();
    let (chunks, bitmaps) = state(&redis).await;
    assert_eq!((chunks.len(), bitmaps.len()), (10, 10));
    let seen = filter.seen_numbers(&queue(), &numbers).await.unwrap();
    assert_eq!(seen.into_iter().filter(|seen| *seen).count(), 10);
    assert!(
        bitmaps
            .keys()
            .all(|key| chunks.contains(&key["t:{q}:bits:".len()..].parse().unwrap()))
    );
    // A smaller bound, and the least one.
    filter
        .mark_numbers(&queue(), &numbers[..1], 1)
        .await
        .unwrap();
    let (chunks, bitmaps) = state(&redis).await;
    assert_eq!((chunks.len(), bitmaps.len()), (1, 1));
}

#[tokio::test]
async fn dense_numbers_take_a_hundredth_of_the_memory() {
    const KEYS: u64 = 100_000;
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let filter = Filter::new(redis.clone());
    let numbers: Vec<u64> = (5_000_000..5_000_000 + KEYS).collect();
    filter.mark_numbers(&queue(), &numbers, MANY).await.unwrap();
    let hashed = QueueName::new("h").unwrap();
    let task = |number: &u64| {
        let key = number.to_string();
        (
            hashed.clone(),
            KeyHash::new(&hashed, key.as_bytes()),
            TaskId::new(),
        )
    };
    let tasks: Vec<_> = numbers.iter().map(task).collect();
    filter.mark(&tasks, 0, |_| MANY).await.unwrap();
    let mut conn = redis.conn();
    let mut memory = async |pattern: &str| {
        let keys: Vec<String> = redis::cmd("KEYS")
            .arg(pattern)
            .query_async(&mut conn)
            .await
            .unwrap();
        let mut bytes = 0;
        for key in keys {
            let usage: u64 = redis::cmd("MEMORY")
                .arg("USAGE")
                .arg(key)
                .arg("SAMPLES")
                .arg(0)
                .query_async(&mut conn)
                .await
                .unwrap();
            bytes += usage;
        }
        bytes
    };
    let (bits, hash) = (memory("t:{q}:bits*").await, memory("t:{h}:seen").await);
    println!(
        "{KEYS} keys: {bits} bytes as bits, {hash} as hashes: 1 to {}",
        hash / bits
    );
    assert!(hash > 100 * bits, "{hash} bytes and {bits}");
    assert_eq!(
        filter.seen_numbers(&queue(), &numbers).await.unwrap(),
        vec![true; numbers.len()]
    );
}

#[tokio::test]
async fn a_number_whose_bit_is_wrong_is_stored_all_the_same() {
    let config = "[queues.q]\ndedup = \"bitmap\"";
    let mut daemon = crate::support::daemon::Daemon::start(config, &[]).await;
    let url = format!("unix://{}", daemon.data().join("redis.sock").display());
    let redis = Redis::connect(&url, "taskd").await.unwrap();
    // As after a database that was set back.
    let numbers: Vec<u64> = (0..10).collect();
    Filter::new(redis)
        .mark_numbers(&queue(), &numbers, MANY)
        .await
        .unwrap();
    let tasks: Vec<_> = numbers
        .iter()
        .map(|number| serde_json::json!({"queue": "q", "key": number.to_string()}))
        .collect();
    assert_eq!(daemon.insert(&tasks).await.len(), 10);
    assert!(daemon.stop().await.success());
}
