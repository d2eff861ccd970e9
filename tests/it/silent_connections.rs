//! Connections to Redis that fall silent: nothing closes them, and nothing goes through. taskd
//! drops them and makes new ones.

use serde_json::json;
use taskd::redis_pool::Redis;
use tonic::Code;
use uuid::Uuid;

use crate::support::{
    daemon::Daemon,
    proxy::{Proxy, Upstream},
    redis::patient,
    redis_private::PrivateRedis,
    session::{Worker, opening},
    until,
};

/// Behind a proxy that can silence its connections.
async fn behind_a_proxy(redis: &PrivateRedis) -> Proxy {
    let proxy = Proxy::start().await;
    proxy.lead_to(Upstream::Tcp(format!("127.0.0.1:{}", redis.port())));
    proxy
}

/// Silences all connections of a taskd with these settings, and waits until it works again.
async fn recovers(redis: &PrivateRedis, settings: &str) {
    let proxy = behind_a_proxy(redis).await;
    let config = format!(
        "redis_url = \"redis://127.0.0.1:{}\"\n{settings}",
        proxy.port()
    );
    let daemon = Daemon::start(&config, &[]).await;
    daemon
        .insert(&[json!({"queue": "q", "key": "before"})])
        .await;
    assert!(proxy.silence() > 0);
    daemon.works_again("q").await;
}

#[tokio::test]
async fn connections_that_fall_silent_are_made_anew() {
    recovers(&PrivateRedis::start(&[]), "").await;
}

#[tokio::test]
async fn the_connection_on_which_calls_wait_for_replicas_is_made_anew() {
    let redis = PrivateRedis::start(&[]);
    let _replica = PrivateRedis::start(&[&format!("replicaof 127.0.0.1 {}", redis.port())]);
    recovers(&redis, "redis_wait_replicas = 1").await;
}

/// As while one master of a cluster hangs: the leases of other masters end, and their workers hear
/// of it.
#[tokio::test]
async fn a_takeover_that_waits_for_redis_holds_up_no_other_notice() {
    let redis = PrivateRedis::start(&[]);
    let proxy = behind_a_proxy(&redis).await;
    let config = format!(
        "redis_url = \"redis://127.0.0.1:{}\"\n[queues.q]\nlease = \"10m\"",
        proxy.port()
    );
    let daemon = Daemon::start(&config, &[]).await;
    daemon
        .insert(&["a", "b"].map(|key| json!({"queue": "q", "key": key})))
        .await;
    let mut old = Worker::open(daemon.grpc_port(), opening("v", 1))
        .await
        .unwrap();
    let mut other = Worker::open(daemon.grpc_port(), opening("w", 1))
        .await
        .unwrap();
    let _held = old.tasks(1).await;
    let task = Uuid::parse_str(&other.tasks(1).await[0].id).unwrap();
    let mut published = patient(redis.url()).await;
    // All calls of taskd go over its first connection.
    proxy.silence_up_to(1);
    let takeover = format!("~{} v", Uuid::now_v7()).into_bytes();
    let cancelled = [&b"!"[..], task.as_bytes()].concat();
    for notice in [takeover, b"%w".to_vec(), cancelled] {
        redis::cmd("PUBLISH")
            .arg("taskd:wake")
            .arg(notice)
            .exec_async(&mut published)
            .await
            .unwrap();
    }
    assert_eq!(old.end().await.unwrap_err().code(), Code::Aborted);
    while other.ended.is_empty() {
        other.read().await.unwrap().expect("the stream goes on");
    }
    let failed = "could not end 1 leases of a session";
    assert!(!daemon.log().contains(failed), "the takeover still waits");
    until("Redis has not answered", async || {
        daemon.log().contains(failed)
    })
    .await;
}

#[tokio::test]
async fn a_master_that_became_a_replica_is_left_for_the_one_that_took_over() {
    let [first, second] = [(); 2].map(|()| PrivateRedis::start(&[]));
    let proxy = behind_a_proxy(&first).await;
    let redis = Redis::connect(&format!("redis://127.0.0.1:{}", proxy.port()), "p")
        .await
        .unwrap();
    let set = async || {
        redis::cmd("SET")
            .arg("k")
            .arg("v")
            .query_async::<()>(&mut redis.conn())
            .await
    };
    set().await.unwrap();
    // As when a name leads to the new master, and the connection still to the old one.
    first.run(&["replicaof", "127.0.0.1", &second.port().to_string()]);
    proxy.lead_to(Upstream::Tcp(format!("127.0.0.1:{}", second.port())));
    assert_eq!(set().await.unwrap_err().code(), Some("READONLY"));
    set().await.unwrap();
}

/// A connection on which nothing happens is probed by the kernel, which so finds a peer that is
/// gone.
#[tokio::test]
async fn idle_connections_are_probed() {
    let redis = PrivateRedis::start(&[]);
    let pool = Redis::connect(&redis.url(), "p").await.unwrap();
    let (dedicated, pubsub) = (
        pool.dedicated("k").await.unwrap(),
        pool.pubsub().await.unwrap(),
    );
    until("three connections have a keepalive timer", async || {
        keepalive_timers(redis.port()) == 3
    })
    .await;
    drop((dedicated, pubsub));
}

/// Of connections to this port on loopback: those whose timer is the one of keepalive.
fn keepalive_timers(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let peer = format!("0100007F:{port:04X}");
    let is_probed = |line: &&str| {
        let columns: Vec<_> = line.split_whitespace().collect();
        columns[2] == peer && columns[5].starts_with("02:")
    };
    table.lines().skip(1).filter(is_probed).count()
}
