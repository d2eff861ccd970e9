//! What the test targets share: real servers, and the suites that run on more than one of them.
#![allow(dead_code, unreachable_pub, unused_macros, unused_imports, reason = "no target uses all of it")]

use std::time::{Duration, Instant};

pub(crate) mod bus_contract;
pub(crate) mod commit_proxy;
pub(crate) mod daemon;
pub(crate) mod kafka;
pub(crate) mod mariadb;
pub(crate) mod proxy;
pub(crate) mod redis;
pub(crate) mod redis_cluster;
pub(crate) mod redis_private;
pub(crate) mod sqlite;
#[macro_use]
pub(crate) mod store_contract;

/// Waits until `condition` holds, for a minute.
pub(crate) async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !condition().await {
        assert!(began.elapsed() < Duration::from_secs(60), "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
