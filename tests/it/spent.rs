//! Spent elements leave the lanes of a shard sooner than others come.

use std::sync::Arc;

use redis::AsyncCommands;
use taskd::{
    bus::redis_streams::RedisStreams,
    config::Settings,
    model::{NewTask, TaskId},
    redis_pool::Redis,
    runtime::Supervisor,
};

use crate::{
    support::{
        process::Process,
        redis::{Fsync, RedisServer},
        sqlite::SqliteFile,
        store_contract::Database,
        until,
    },
    tasks_service::shard,
};

/// With a page in each quarter of a second, they would take longer than the test waits.
const SPENT: usize = 400_000;
const AT_ONCE: usize = 1000;

#[tokio::test]
async fn what_lies_behind_a_task_that_waits_for_its_last_worker_is_swept_without_a_pause() {
    let (server, database) = (RedisServer::start(Fsync::EverySecond), SqliteFile::create().await);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
    let store = database.open().await;
    let (process, supervisor) = (Process::new(&redis, &store, bus), Supervisor::new());
    let settings = Arc::new(Settings::default());
    process.fanout(&settings, &supervisor);
    let discovery = process.discovery(&settings, &supervisor);
    let task = NewTask { queue: "q".into(), key: "k".into(), replicas: Some(2), ..Default::default() };
    discovery.insert(vec![task]).await.unwrap();
    let is_open = async || process.queue.stats(&shard("q")).await.is_ok_and(|stats| stats.open == 1);
    until("it is in the queue", is_open).await;

    let (lane, mut connection) = ("t:{q:0}:m:T", redis.conn());
    let element: Vec<u8> = connection.lindex(lane, 0).await.unwrap();
    // Of tasks that are gone.
    for _ in 0..SPENT / AT_ONCE {
        let spent = |_| [&element[..element.len() - 16], TaskId::new().as_bytes()].concat();
        let () = connection.lpush(lane, (0..AT_ONCE).map(spent).collect::<Vec<_>>()).await.unwrap();
    }
    process.watchdog(&settings, &supervisor);
    let length = async || redis.conn().llen::<_, usize>(lane).await.unwrap();
    until("the task is alone", async || length().await == 1).await;
    supervisor.stop();
    supervisor.wait().await;
}
