//! Own limits of limit keys reach shards although a process dies, or Redis loses its last writes:
//! two processes, of which one knows less or is gone.

use std::time::Duration;

use taskd::{
    model::{ChangedLimits, KeyLimits, OwnLimits, OwnValues, TaskId},
    queue::{LookFor, Queue, QueueLimits},
    redis_pool::Redis,
};

use crate::{
    support::redis::{Fsync, RedisServer},
    tasks_service::{put, shard},
};

/// The queue of a process whose settings have limits per key.
fn process(redis: &Redis) -> Queue {
    let queue = Queue::new(redis.clone());
    queue.set_limits(QueueLimits {
        default: Some(KeyLimits::default()),
        ..QueueLimits::default()
    });
    queue.set_limit_partitions(1);
    queue
}

/// What an operator set as this version.
fn set(version: u64, at_a_time: u32) -> ChangedLimits {
    ChangedLimits {
        version,
        limits: OwnLimits {
            queue: shard("q").queue,
            limit_key: "k".into(),
            values: OwnValues {
                at_a_time: Some(at_a_time),
                ..OwnValues::default()
            },
            at_unix_ms: 1,
            who: "ops".into(),
        },
        is_cleared: false,
    }
}

/// How many of the limit key may run, as the shard has it: -1 none, 0 any number.
async fn at_a_time(queue: &Queue) -> i64 {
    let key = queue.limit_key(&shard("q").queue, "k").await.unwrap();
    key.expect("the shard is open").at_a_time
}

#[tokio::test]
async fn a_shard_that_was_opened_by_a_process_which_knew_less_is_told_by_another() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let opener = process(&redis);
    let other = process(&redis);
    // Both read from SQL that there is this shard, before Redis has it.
    opener.add_shard(&shard("q"));
    other.add_shard(&shard("q"));
    let changes = [set(1, 0)];
    other.learn_limits(&changes, 1);
    let failure = other.push_limits(&changes, 0, 1).await;
    assert!(failure.is_some(), "there was nothing to tell it to");
    // The opener does not know the change, and dies before it does.
    let opened = opener
        .enqueuer
        .open_shards(&[(shard("q"), 1)], "topic")
        .await;
    opened.unwrap();
    assert_eq!(at_a_time(&other).await, 1000, "no limit but the bound");
    assert!(other.push_limits(&[], 1, 1).await.is_none());
    assert_eq!(at_a_time(&other).await, -1);
}

#[tokio::test]
async fn a_shard_whose_last_writes_redis_lost_is_told_again_once_it_was_looked_at() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let queue = process(&redis);
    put(&queue, "q", TaskId::new(), 2, 1).await;
    let () = redis::cmd("HSET")
        .arg("t:{q:0}:counters")
        .arg(&["limited", "1"])
        .query_async(&mut redis.conn())
        .await
        .unwrap();
    for (version, limit) in [(1, 2), (2, 0)] {
        let changes = [set(version, limit)];
        queue.learn_limits(&changes, version);
        let failure = queue.push_limits(&changes, version - 1, version).await;
        assert!(failure.is_none(), "{failure:?}");
    }
    assert_eq!(at_a_time(&queue).await, -1);
    // A process that has just begun tells the first version: so Redis had it before the second.
    let key = "t:{q:0}:limits";
    let () = redis::cmd("DEL")
        .arg(key)
        .query_async(&mut redis.conn())
        .await
        .unwrap();
    let begun = process(&redis);
    begun.add_shard(&shard("q"));
    begun.learn_limits(&[set(1, 2)], 1);
    begun.push_limits(&[set(1, 2)], 0, 1).await;
    assert_eq!(at_a_time(&queue).await, 2);
    assert!(queue.push_limits(&[], 2, 2).await.is_none());
    assert_eq!(at_a_time(&queue).await, 2, "nobody has noticed yet");
    let look_for = LookFor {
        max_age: Duration::ZERO,
        grace: Duration::from_secs(60),
        horizon: Duration::from_secs(60),
    };
    queue.upkeep.look(look_for).await;
    // What the look has found is waiting.
    queue.limits_asked().await;
    assert!(queue.push_limits(&[], 2, 2).await.is_none());
    assert_eq!(at_a_time(&queue).await, -1);
}
