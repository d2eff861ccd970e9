//! A Redis that answers late.

use std::time::Duration;

use futures::{StreamExt, stream};
use taskd::wire::pb;

use crate::support::{
    daemon::Daemon,
    proxy::{Mode, Proxy, Upstream},
    redis::{Fsync, RedisServer, patient},
    session::{Worker, channel, opening, seconds},
    until,
};

const WORKERS: usize = 700;
/// One after the other, the allotments take four times as long as Redis takes a process to live.
const LATE: Duration = Duration::from_millis(30);

#[tokio::test]
async fn the_allotments_of_many_workers_come_back() {
    let (redis, proxy) = (RedisServer::start(Fsync::EverySecond), Proxy::start().await);
    proxy.lead_to(Upstream::Unix(redis.dir().join("redis.sock")));
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let mut daemon = Daemon::start("", &["--redis-url", &url]).await;
    let mut channels = Vec::new();
    for _ in 0..8 {
        channels.push(channel(daemon.grpc_port()).await);
    }
    let opens = (0..WORKERS).map(|number| {
        let open = pb::OpenSession {
            timeout: seconds(600),
            ..opening(&format!("w{number}"), 1)
        };
        Worker::open_on(channels[number % 8].clone(), open, None)
    });
    let workers: Vec<_> = stream::iter(opens)
        .buffer_unordered(50)
        .map(Result::unwrap)
        .collect()
        .await;
    let mut conn = patient(redis.url()).await;
    let mut keys = async || -> Vec<String> {
        redis::cmd("KEYS")
            .arg("taskd:{sessions:*")
            .query_async(&mut conn)
            .await
            .unwrap()
    };
    let all = keys().await;
    let allotments = |keys: &[String]| keys.iter().filter(|key| key.contains(":of:")).count();
    assert_eq!(allotments(&all), WORKERS);
    proxy.set(Mode::Slow(LATE));
    redis::cmd("DEL")
        .arg(all)
        .exec_async(&mut patient(redis.url()).await)
        .await
        .unwrap();
    until("they are there again", async || {
        allotments(&keys().await) == WORKERS
    })
    .await;
    assert_eq!(daemon.get("/readyz").await.0, 200);
    proxy.set(Mode::Pass);
    drop(workers);
    assert!(daemon.stop().await.success());
}
