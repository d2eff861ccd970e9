//! How scripts reach Redis, what they get packed, and the time that a test gives them.

use std::time::Duration;

use redis::Value;
use taskd::{
    bus::{Bus, Reading, Topic, redis_streams::RedisStreams},
    model::{Offset, QueueName, ShardId, TaskId, WorkerName},
    queue::{Claim, Code, Completion, Enqueue, EnqueueTask, Queue, Source},
    redis_pool::{Batch, Redis, scripts},
    runtime::Clock,
};

use crate::support::redis::{Fsync, RedisServer};

async fn server() -> (RedisServer, Redis) {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.expect("connect");
    (server, redis)
}

async fn ask<T: redis::FromRedisValue>(redis: &Redis, words: &[&str]) -> T {
    redis::cmd(words[0])
        .arg(&words[1..])
        .query_async(&mut redis.conn())
        .await
        .expect("an answer")
}

/// How often Redis got a script's text.
async fn texts(redis: &Redis) -> u64 {
    let info: String = ask(redis, &["INFO", "commandstats"]).await;
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_eval:calls="))
        .unwrap_or("0,");
    line.split(',')
        .next()
        .expect("a number")
        .parse()
        .expect("a number")
}

fn publish(key: &str) -> taskd::redis_pool::Call {
    let mut call = scripts::BUS_PUBLISH.call(&[key]);
    call.arg(1 << 20).arg(0).arg("refuse").arg("record");
    call
}

#[tokio::test]
async fn a_server_is_taught_each_script_once() {
    let (_server, redis) = server().await;
    for _ in 0..2 {
        publish("a")
            .run(&mut redis.conn())
            .await
            .expect("published");
    }
    assert_eq!(texts(&redis).await, 1);
    let () = ask(&redis, &["SCRIPT", "FLUSH"]).await;
    publish("a")
        .run(&mut redis.conn())
        .await
        .expect("published");
    assert_eq!(
        (
            texts(&redis).await,
            ask::<u64>(&redis, &["XLEN", "a"]).await
        ),
        (2, 3)
    );
}

/// The commands behind a script see what it did, and no script runs twice.
#[tokio::test]
async fn a_batch_teaches_what_is_unknown_and_repeats_no_script() {
    let (_server, redis) = server().await;
    let length = || redis::Cmd::new().arg("XLEN").arg("a").to_owned();
    let run = async |first: &'static str| {
        let mut batch = Batch::default();
        let mut epoch = scripts::EPOCH.call(&[first]);
        epoch.arg(0).arg(1);
        batch.command(length());
        batch.script(epoch);
        batch.script(publish("a"));
        batch.repeatable(scripts::WAITED.call(&["waited"]));
        batch.command(length());
        let answers = batch.run_all(&mut redis.conn()).await.expect("answers");
        assert!(matches!(answers[2], Value::Array(_)), "{answers:?}");
        [0, 1, 4]
            .map(|place| redis::from_redis_value::<u64>(answers[place].clone()).expect("a number"))
    };
    assert_eq!(run("epochs").await, [0, 1, 1]);
    assert_eq!(run("epochs").await, [1, 2, 2], "all are known");
    // Only the one in the middle is unknown.
    let () = ask(&redis, &["SCRIPT", "FLUSH"]).await;
    let mut epoch = scripts::EPOCH.call(&["epochs"]);
    epoch.arg(0).arg(1);
    epoch.run(&mut redis.conn()).await.expect("an epoch");
    assert_eq!(run("epochs").await, [2, 4, 3]);
    assert_eq!(ask::<u64>(&redis, &["XLEN", "a"]).await, 3);
}

#[tokio::test]
async fn a_command_that_fails_fails_its_batch() {
    let (_server, redis) = server().await;
    let mut batch = Batch::default();
    batch.script(publish("a"));
    batch.command(redis::Cmd::new().arg("GET").arg("a").to_owned());
    let error = batch
        .run_all(&mut redis.conn())
        .await
        .expect_err("a stream is no string");
    assert_eq!(error.code(), Some("WRONGTYPE"));
}

/// Scripts unpack what this process packs, and the other way round.
#[tokio::test]
async fn rust_and_lua_pack_the_same_bytes() {
    let (_server, redis) = server().await;
    let lua = async |numbers: bool, values: &[String]| -> Vec<u8> {
        let pack = if numbers {
            "local t = {} for i, v in ipairs(ARGV) do t[i] = tonumber(v) end return cmsgpack.pack(t)"
        } else {
            "return cmsgpack.pack(ARGV)"
        };
        redis::cmd("EVAL")
            .arg(pack)
            .arg(0)
            .arg(values)
            .query_async(&mut redis.conn())
            .await
            .expect("packed")
    };
    let long = |length: usize| "é".repeat(length / 2);
    let texts: Vec<String> = [
        "",
        "w",
        &long(30),
        &long(32),
        &long(254),
        &long(256),
        &long(70_000),
    ]
    .map(Into::into)
    .into();
    for count in [1, 7, 15, 16, 40] {
        let some: Vec<String> = texts.iter().cycle().take(count).cloned().collect();
        assert!(
            rmp_serde::to_vec(&some).unwrap() == lua(false, &some).await,
            "{count} texts"
        );
    }
    let numbers: Vec<u64> = vec![
        0,
        1,
        127,
        128,
        255,
        256,
        65_535,
        65_536,
        u64::from(u32::MAX),
        1 << 32,
        1_700_000_000_000,
    ];
    let as_text: Vec<String> = numbers.iter().map(u64::to_string).collect();
    assert_eq!(
        rmp_serde::to_vec(&numbers).unwrap(),
        lua(true, &as_text).await
    );
}

#[tokio::test]
async fn the_partitions_of_a_dead_reader_move_when_the_clock_does() {
    let (_server, redis) = server().await;
    let clock = Clock::of_this_machine();
    let open = async || {
        RedisStreams::with_clock(redis.clone(), "", 2, clock.clone())
            .await
            .unwrap()
    };
    let (dead, alive) = (open().await, open().await);
    let _not_read = dead
        .subscribe(Topic::Pipeline, Reading::Ordered)
        .await
        .unwrap();
    let reader = alive
        .subscribe(Topic::Pipeline, Reading::Ordered)
        .await
        .unwrap();
    assert_eq!([0, 1].map(|partition| reader.tenure(partition)), [0; 2]);
    drop(reader);
    clock.advance(Duration::from_secs(4));
    let reader = alive
        .subscribe(Topic::Pipeline, Reading::Ordered)
        .await
        .unwrap();
    assert!([0, 1].iter().all(|partition| reader.tenure(*partition) > 0));
}

#[tokio::test]
async fn a_lease_of_a_task_runs_out_when_the_clock_moves() {
    let (_server, redis) = server().await;
    let clock = Clock::of_this_machine();
    let queue = Queue::with_clock(redis, "p".into(), clock.clone());
    let shard = ShardId {
        queue: QueueName::new("q").unwrap(),
        number: 0,
    };
    queue
        .upkeep
        .open_shard(&shard, 1, "topic", None)
        .await
        .unwrap();
    queue.add_shard(&shard);
    let offset = Offset { major: 1, minor: 0 };
    let lease = Duration::from_secs(3600);
    let head = [&[2][..], &5_u32.to_be_bytes(), &3_600_000_u32.to_be_bytes()].concat();
    let task = EnqueueTask {
        offset,
        id: TaskId::new(),
        replicas: 1,
        not_before_unix_ms: 0,
        body: head.into(),
        credited: Vec::new(),
        epoch: 0,
    };
    let batch = Enqueue {
        source: Source::Partition {
            topic_generation: "topic",
            epoch: 1,
            predecessor: None,
            upto: offset,
            again: false,
        },
        tasks: &[task],
        high_water_tasks: 10,
        high_water_bytes: 10_000,
        live_tasks_max: 10,
    };
    queue.enqueuer.enqueue(&shard, &batch).await.unwrap();
    let worker = WorkerName::new("w").unwrap();
    let (max_tasks, max_bytes, is_first) = (1, 1000, true);
    let claim = Claim {
        worker: worker.clone(),
        max_tasks,
        max_bytes,
        is_first,
        lease: None,
        priority: None,
    };
    let task = queue
        .worker
        .claim(&queue.shards_of(&shard.queue)[0], claim)
        .await
        .unwrap()
        .deliver()
        .remove(0);
    assert!(queue.worker.report_deliveries().await);

    clock.advance(lease - Duration::from_secs(60));
    assert_eq!(
        queue
            .upkeep
            .expire(&shard, 9, &[lease])
            .await
            .unwrap()
            .expired,
        0
    );
    clock.advance(Duration::from_secs(120));
    assert_eq!(
        queue
            .upkeep
            .expire(&shard, 9, &[lease])
            .await
            .unwrap()
            .expired,
        1
    );
    let late = Completion {
        id: task.id,
        token: task.token,
        worker,
        report: "late".into(),
        limit: Default::default(),
    };
    assert_eq!(queue.worker.complete(late).await.unwrap(), Code::LeaseLost);

    clock.advance(lease * 2);
    assert_eq!(
        queue
            .upkeep
            .promote(&shard, 9, lease)
            .await
            .unwrap()
            .promoted,
        1
    );
}
