//! The cost of idle shards, counted in calls, not in time.

use std::time::Duration;

use taskd::{
    model::{QueueName, ShardId},
    queue::{LookFor, Queue},
    redis_pool::Redis,
    runtime::Supervisor,
};

use crate::support::{
    redis::{Fsync, RedisServer},
    until,
};

const LOOK_FOR: LookFor = LookFor {
    max_age: Duration::ZERO,
    grace: Duration::from_secs(60),
    horizon: Duration::from_secs(600),
};

fn shard(number: u32) -> ShardId {
    ShardId {
        queue: QueueName::new(&format!("q{number}")).unwrap(),
        number: 0,
    }
}

/// How often Redis has run a script by its SHA.
async fn calls(redis: &Redis) -> u64 {
    let info: String = redis::cmd("INFO")
        .arg("commandstats")
        .query_async(&mut redis.conn())
        .await
        .unwrap();
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="))
        .unwrap_or("0,");
    line.split(',').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_shard_where_nothing_stands_is_asked_again_only_when_something_happens() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let queue = Queue::new(redis.clone());
    let supervisor = Supervisor::new();
    queue.start_listening(&supervisor);
    for number in 0..100 {
        queue
            .upkeep
            .open_shard(&shard(number), 1, "topic", None)
            .await
            .unwrap();
        queue.add_shard(&shard(number));
    }
    // The listener's first act touches all of them, because it may have missed wakes.
    until("the listener is there", async || {
        let heard: (String, u64) = redis::cmd("PUBSUB")
            .arg("NUMSUB")
            .arg("t:wake")
            .query_async(&mut redis.conn())
            .await
            .unwrap();
        heard.1 == 1
    })
    .await;
    until("all were looked at", async || {
        let before = calls(&redis).await;
        assert!(queue.upkeep.look(LOOK_FOR).await.is_empty());
        calls(&redis).await == before
    })
    .await;

    let before = calls(&redis).await;
    for _ in 0..20 {
        assert!(
            queue.upkeep.look(LOOK_FOR).await.is_empty() && queue.upkeep.awake_shards().is_empty()
        );
    }
    assert_eq!(calls(&redis).await, before, "nothing has happened");

    // Another process puts something into one of them, and says so.
    let () = redis::cmd("HSET")
        .arg("t:{q7:0}:records")
        .arg("id")
        .arg("1")
        .query_async(&mut redis.conn())
        .await
        .unwrap();
    let () = redis::cmd("PUBLISH")
        .arg("t:wake")
        .arg("q7")
        .query_async(&mut redis.conn())
        .await
        .unwrap();
    until("it is seen", async || {
        let looks = queue.upkeep.look(LOOK_FOR).await;
        looks
            .iter()
            .any(|(id, look)| *id == shard(7) && !look.as_ref().unwrap().is_idle)
    })
    .await;
    assert!(
        calls(&redis).await < before + 100,
        "the others were not asked"
    );

    // A task that waits for its time: also a look of a moment ago does not show it.
    let kept = LookFor {
        max_age: Duration::from_secs(3600),
        ..LOOK_FOR
    };
    queue.upkeep.look(kept).await;
    let due = redis::cmd("ZADD")
        .arg("t:{q7:0}:delayed")
        .arg(1)
        .arg("task")
        .to_owned();
    let () = due.query_async(&mut redis.conn()).await.unwrap();
    let () = redis::cmd("PUBLISH")
        .arg("t:wake")
        .arg("q7 - due")
        .query_async(&mut redis.conn())
        .await
        .unwrap();
    until("it is due", async || {
        queue
            .upkeep
            .look(kept)
            .await
            .iter()
            .any(|(id, look)| *id == shard(7) && look.as_ref().unwrap().promotes)
    })
    .await;
    supervisor.stop();
    supervisor.wait().await;
}
