//! Shared by the test targets: real servers, and the suites that run on more than one of them.
#![allow(dead_code, unreachable_pub, unused_macros, unused_imports, reason = "no target uses all of it")]

use std::time::{Duration, Instant};

use taskd::{coordination::Coordination, redis_pool::Redis, runtime::Clock};

pub(crate) mod bus_contract;
pub(crate) mod collector;
pub(crate) mod commit_proxy;
pub(crate) mod daemon;
pub(crate) mod event_topic;
pub(crate) mod kafka;
pub(crate) mod mariadb;
pub(crate) mod port;
pub(crate) mod process;
pub(crate) mod proxy;
pub(crate) mod redis;
pub(crate) mod redis_cluster;
pub(crate) mod redis_private;
pub(crate) mod session;
pub(crate) mod spans;
pub(crate) mod sqlite;
#[macro_use]
pub(crate) mod store_contract;

/// A process that agrees with others in this Redis.
pub(crate) fn coordination(redis: &Redis, process: &str) -> Coordination {
    Coordination::new(redis.clone(), process, Clock::of_this_machine())
}

/// The longest wait for what must come, on a machine that is slow and busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(150);

/// A client whose calls end.
pub(crate) fn http_client() -> reqwest::Client {
    reqwest::Client::builder().timeout(PATIENCE).build().unwrap()
}

/// Waits until `condition` holds, for [`PATIENCE`], or for twice that where a look takes so long.
pub(crate) async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !tokio::time::timeout(PATIENCE, condition()).await.unwrap_or(false) {
        assert!(began.elapsed() < PATIENCE, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
