//! The memory guard: closes the gates before a Redis server is full, and opens them when there is room again.
//!
//! A full Redis refuses enqueues and claims. Completions, the forwarder and commits still run and give memory back. The
//! guard stops new tasks early, so that taskd does not fill Redis by itself.

use std::{collections::HashSet, sync::Arc, time::Duration};

use parking_lot::Mutex;
use redis::RedisResult;

use crate::{
    pipelines::admission::{Gates, Shortage},
    queue::Shards,
    redis_pool::{Memory, Redis},
    runtime::{Loop, Supervisor},
    telemetry::metrics,
};

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The gates close when a server has used this share of its limit …
const CLOSE_AT_PERCENT: u64 = 80;
/// … and open when no server has used more than this.
const OPEN_AT_PERCENT: u64 = 75;

/// The servers that the guard asks, and the gates that it moves.
#[derive(Clone)]
struct Guard {
    redis: Redis,
    /// `redis_max_memory`; 0: the server's own limit counts.
    most: u64,
    gates: Gates,
    queue: Shards,
    /// The servers of the last look.
    shown: Arc<Mutex<HashSet<String>>>,
}

/// Starts the guard of this process.
pub fn watch(redis: Redis, most: u64, gates: Gates, queue: Shards, supervisor: &Supervisor) {
    let guard = Guard { redis, most, gates, queue, shown: Arc::default() };
    supervisor.spawn_loop("memory", guard, Guard::run);
}

impl Guard {
    async fn run(self, cx: Loop) -> RedisResult<()> {
        let mut unlimited = HashSet::new();
        loop {
            let mut servers = self.redis.memory().await?;
            // At `redis_max_memory` Redis itself still takes everything.
            let is_full = servers.iter().any(|server| server.limit > 0 && server.used >= server.limit);
            for server in &mut servers {
                server.limit = lower(server.limit, self.most);
                if server.limit == 0 && unlimited.insert(server.server.clone()) {
                    tracing::warn!(
                        "redis {} has no memory limit, so nothing bounds what taskd puts in: set its maxmemory, or \
                         redis_max_memory",
                        server.server
                    );
                }
            }
            show(&servers, &mut self.shown.lock());
            self.judge(&servers, is_full);
            cx.beat();
            if !cx.pause(LOOK_EVERY).await {
                return Ok(());
            }
        }
    }

    fn judge(&self, servers: &[Memory], is_full: bool) {
        let before = self.gates.shortage();
        let now = shortage(servers, before.is_some(), is_full);
        match (&before, &now) {
            (None, Some(now)) => tracing::warn!("no new tasks are taken in: {}", now.why),
            (Some(_), None) => tracing::info!("redis has room again: new tasks are taken in"),
            _ => {}
        }
        let was_full = before.is_some_and(|before| before.is_full);
        let is_full = now.as_ref().is_some_and(|now| now.is_full);
        self.gates.set_shortage(now);
        if was_full && !is_full {
            // Redis refused their claims, so no wake is on its way to them.
            self.queue.wakes().wake_all();
        }
    }
}

/// Shows the memory of the servers. Those of the look before that are gone, as a master after a failover, have none.
fn show(servers: &[Memory], shown: &mut HashSet<String>) {
    let before = std::mem::replace(shown, servers.iter().map(|memory| memory.server.clone()).collect());
    for gone in before.difference(shown) {
        metrics::redis_memory(gone, 0, 0);
    }
    for Memory { server, used, limit } in servers {
        metrics::redis_memory(server, *used, *limit);
    }
}

/// The lower of two limits; 0 means no limit.
fn lower(a: u64, b: u64) -> u64 {
    if a == 0 || b == 0 { a.max(b) } else { a.min(b) }
}

/// The shortage of the server that has used most of its limit.
fn shortage(servers: &[Memory], is_closed: bool, is_full: bool) -> Option<Shortage> {
    let percent = |memory: &Memory| (u128::from(memory.used) * 100 / u128::from(memory.limit)) as u64;
    let limited = servers.iter().filter(|memory| memory.limit > 0);
    let (most, percent) = limited.map(|memory| (memory, percent(memory))).max_by_key(|(_, percent)| *percent)?;
    // A server that stays exactly at the lower mark opens the gates.
    let is_short = percent >= CLOSE_AT_PERCENT || (is_closed && percent > OPEN_AT_PERCENT);
    is_short.then(|| Shortage {
        why: format!(
            "redis {} has used {percent} % of its memory limit of {} MiB; at {OPEN_AT_PERCENT} % new tasks are taken \
             in again",
            most.server,
            most.limit >> 20
        ),
        is_full,
    })
}

#[cfg(test)]
mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    fn at(percent: &[u64], is_closed: bool) -> Option<bool> {
        let memory =
            |(n, percent): (usize, &u64)| Memory { server: n.to_string(), used: percent << 20, limit: 100 << 20 };
        let servers: Vec<_> = percent.iter().enumerate().map(memory).collect();
        shortage(&servers, is_closed, servers[0].used >= servers[0].limit).map(|shortage| shortage.is_full)
    }

    #[test]
    fn the_fullest_server_closes_the_door_and_opens_it_later_than_it_closed() {
        assert_eq!(at(&[79, 3], false), None);
        assert_eq!(at(&[3, 80], false), Some(false));
        assert_eq!(at(&[3, 76], true), Some(false), "it stays closed");
        assert_eq!(at(&[3, 75], true), None);
        assert_eq!(at(&[100, 3], true), Some(true));
    }

    #[test]
    fn a_server_that_is_gone_has_no_memory() {
        let memory = |server: &str| Memory { server: server.into(), used: 90, limit: 100 };
        let (recorder, mut shown) = (PrometheusBuilder::new().build_recorder(), HashSet::new());
        ::metrics::with_local_recorder(&recorder, || {
            show(&[memory("a"), memory("b")], &mut shown);
            show(&[memory("b"), memory("c")], &mut shown);
        });
        let text = recorder.handle().render();
        for (server, used, limit) in [("a", 0, 0), ("b", 90, 100), ("c", 90, 100)] {
            for (what, bytes) in [("used", used), ("limit", limit)] {
                let line = format!("taskd_redis_memory_{what}_bytes{{server=\"{server}\"}} {bytes}");
                assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
            }
        }
    }

    #[test]
    fn a_server_without_a_limit_is_never_full() {
        let memory = Memory { server: "s".into(), used: u64::MAX, limit: 0 };
        assert!(shortage(&[memory], true, false).is_none());
        assert_eq!([lower(0, 0), lower(0, 5), lower(5, 0), lower(5, 4)], [0, 5, 5, 4]);
    }

    #[test]
    fn the_reason_names_the_server_and_the_numbers() {
        let memory = Memory { server: "127.0.0.1:6379".into(), used: 81 << 20, limit: 100 << 20 };
        let why = shortage(&[memory], false, false).unwrap().why;
        assert!(why.starts_with("redis 127.0.0.1:6379 has used 81 % of its memory limit of 100 MiB"), "{why}");
    }
}
