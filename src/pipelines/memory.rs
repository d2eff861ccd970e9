//! The memory guard: closes the gates before a Redis server is full, and opens them when there is
//! free memory again. The same check finds out whether Redis answers, and whether its settings
//! still keep taskd's promises.
//!
//! A full Redis refuses enqueues and claims. Completions, the forwarder and commits still run and
//! free memory. The guard stops new tasks early, so that taskd does not fill Redis by itself.

use std::{collections::HashSet, sync::Arc};

use parking_lot::Mutex;

use crate::{
    model::in_short,
    pipelines::admission::{Gates, Shortage},
    queue::Shards,
    redis_pool::{Durability, Memory, Observed, Redis},
    runtime::{ANSWER_WITHIN, LOOK_EVERY, Loop, Server, Servers, Supervisor, UnsafeSetting},
    telemetry::metrics,
};

/// The gates close when a server has used this share of its limit …
const CLOSE_AT_PERCENT: u64 = 80;
/// … and open when no server has used more than this.
const OPEN_AT_PERCENT: u64 = 75;
/// From this share on, topics of users lose what all their subscriptions have read …
const TRIM_LOGS_PERCENT: u64 = 70;
/// … and from this one on they take no records, so that they leave room for tasks.
const LOGS_PERCENT: u64 = 75;
/// Between two checks the topics take this share of what is left up to there, because other
/// processes have publishers, too.
const LOGS_SHARE: u64 = 4;

/// The servers that the guard checks, and the gates that it moves.
#[derive(Clone)]
struct Guard {
    redis: Redis,
    /// `redis_max_memory`; with 0 the server's own limit counts.
    most: u64,
    gates: Gates,
    queue: Shards,
    servers: Servers,
    /// The servers whose memory the last check has shown.
    shown: Arc<Mutex<HashSet<String>>>,
}

/// Starts the guard of this process.
pub fn watch(
    redis: Redis,
    most: u64,
    gates: Gates,
    queue: Shards,
    servers: Servers,
    supervisor: &Supervisor,
) {
    let guard = Guard {
        redis,
        most,
        gates,
        queue,
        servers,
        shown: Arc::default(),
    };
    supervisor.spawn_loop("memory", guard, Guard::run);
}

impl Guard {
    async fn run(self, cx: Loop) {
        let mut unlimited = HashSet::new();
        let mut with_file = HashSet::new();
        loop {
            match cx.stop.run_until_cancelled(self.look()).await {
                None => return,
                Some(Ok(observed)) => {
                    self.servers.note_answer(Server::Redis);
                    self.judge_settings(&observed, &mut with_file);
                    self.judge_memory(
                        observed
                            .into_iter()
                            .map(|observed| observed.memory)
                            .collect(),
                        &mut unlimited,
                    );
                    cx.beat();
                }
                // Without a beat the supervisor considers the loop stalled after a while.
                Some(Err(why)) => self.servers.note_silence(Server::Redis, why),
            }
            if !cx.pause(LOOK_EVERY).await {
                return;
            }
        }
    }

    /// Asks the servers for their state. An error says in one line why there is no answer.
    async fn look(&self) -> Result<Vec<Observed>, String> {
        let mut is_second = false;
        loop {
            let observed = match tokio::time::timeout(ANSWER_WITHIN, self.redis.observe()).await {
                Ok(Ok(observed)) => observed,
                // The server may be well although the connection was closed: the next call makes
                // another one.
                Ok(Err(_)) if !is_second => {
                    is_second = true;
                    continue;
                }
                Ok(Err(error)) => return Err(in_short(&error)),
                Err(_) => return Err(format!("no answer for {} s", ANSWER_WITHIN.as_secs())),
            };
            return match observed.iter().find(|observed| observed.is_loading) {
                Some(loading) => Err(format!(
                    "{} reads its data after a start",
                    loading.memory.server
                )),
                None => Ok(observed),
            };
        }
    }

    /// Reports the settings that break a promise. `with_file` collects the servers that have had an
    /// append-only file.
    fn judge_settings(&self, observed: &[Observed], with_file: &mut HashSet<String>) {
        for one in observed.iter().filter(|one| one.has_file) {
            with_file.insert(one.memory.server.clone());
        }
        let needs_file = self.redis.durability().is_some_and(Durability::needs_file);
        let is_cluster = self.redis.is_cluster();
        let found = observed.iter().flat_map(|one| {
            let had_file = needs_file || with_file.contains(&one.memory.server);
            unsafe_settings(one, had_file, is_cluster)
        });
        self.servers.set_unsafe_settings(found.collect());
    }

    fn judge_memory(&self, mut servers: Vec<Memory>, unlimited: &mut HashSet<String>) {
        // At `redis_max_memory` Redis itself still accepts everything, so that limit does not count
        // here.
        let is_full = servers
            .iter()
            .any(|server| server.limit > 0 && server.used >= server.limit);
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
    }

    fn judge(&self, servers: &[Memory], is_full: bool) {
        let fullest = fullest(servers);
        self.gates
            .set_logs_large(fullest.is_some_and(|(_, percent)| percent >= TRIM_LOGS_PERCENT));
        let logs = fullest.filter(|(_, percent)| *percent >= LOGS_PERCENT);
        self.gates.set_logs_shortage(logs.map(|(server, percent)| {
            let server = &server.server;
            format!("redis {server} has used {percent} % of its memory limit; below {LOGS_PERCENT} % topics take records again")
        }));
        self.gates.set_logs_room(logs_room(servers));
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
            // Redis refused the claims of waiting workers, so no wake is on its way to them.
            self.queue.wakes().wake_all();
        }
    }
}

/// Shows the memory of the servers in the metrics, and zero for servers that are gone since the
/// last check, such as a master after a failover.
fn show(servers: &[Memory], shown: &mut HashSet<String>) {
    let before = std::mem::replace(
        shown,
        servers.iter().map(|memory| memory.server.clone()).collect(),
    );
    for gone in before.difference(shown) {
        metrics::redis_memory(gone, 0, 0);
    }
    for Memory {
        server,
        used,
        limit,
    } in servers
    {
        metrics::redis_memory(server, *used, *limit);
    }
}

/// Returns the settings with which a server loses or refuses what taskd writes. `had_file`: it must
/// have an append-only file, or had one.
fn unsafe_settings(observed: &Observed, had_file: bool, is_cluster: bool) -> Vec<UnsafeSetting> {
    let server = &observed.memory.server;
    let mut found = Vec::new();
    let mut add = |setting, why| {
        found.push(UnsafeSetting {
            server: server.clone(),
            setting,
            why,
        })
    };
    if !matches!(observed.policy.as_str(), "" | "noeviction") {
        let policy = &observed.policy;
        let why = format!(
            "redis {server} evicts keys (maxmemory-policy {policy}), so it loses tasks; set maxmemory-policy noeviction"
        );
        add("maxmemory-policy", why);
    }
    if had_file && !observed.has_file {
        let why = format!(
            "redis {server} has no append-only file any more, so it loses its data when it ends; set appendonly yes"
        );
        add("appendonly", why);
    }
    if observed.has_failed_to_write {
        let why = format!(
            "redis {server} cannot write its append-only file, and refuses writes; see its log and the room on its disk"
        );
        add("aof_last_write_status", why);
    }
    // In a cluster, the nodes that answer are masters, or taskd is about to leave them.
    if observed.is_replica && !is_cluster {
        let why = format!(
            "redis {server} is a replica now, which takes no writes; make it a master again, or name the master in \
             redis_url"
        );
        add("replicaof", why);
    }
    found
}

/// The lower of two limits; 0 means no limit.
fn lower(a: u64, b: u64) -> u64 {
    if a == 0 || b == 0 { a.max(b) } else { a.min(b) }
}

/// Returns the shortage of the server that has used the largest part of its limit, if it is short
/// of memory.
fn shortage(servers: &[Memory], is_closed: bool, is_full: bool) -> Option<Shortage> {
    let (most, percent) = fullest(servers)?;
    // At exactly [`OPEN_AT_PERCENT`] the gates open.
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

/// The bytes that topics of users may take until the next check; `None`: no server has a limit.
fn logs_room(servers: &[Memory]) -> Option<u64> {
    let limited = servers.iter().filter(|memory| memory.limit > 0);
    let rooms = limited.map(|memory| {
        let most = u128::from(memory.limit) * u128::from(LOGS_PERCENT) / 100;
        let most = u64::try_from(most).unwrap_or(u64::MAX);
        most.saturating_sub(memory.used) / LOGS_SHARE
    });
    rooms.min()
}

/// The server that has used the largest part of its limit, in percent.
fn fullest(servers: &[Memory]) -> Option<(&Memory, u64)> {
    let percent =
        |memory: &Memory| (u128::from(memory.used) * 100 / u128::from(memory.limit)) as u64;
    let limited = servers.iter().filter(|memory| memory.limit > 0);
    limited
        .map(|memory| (memory, percent(memory)))
        .max_by_key(|(_, percent)| *percent)
}

#[cfg(test)]
mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    fn at(percent: &[u64], is_closed: bool) -> Option<bool> {
        let memory = |(n, percent): (usize, &u64)| Memory {
            server: n.to_string(),
            used: percent << 20,
            limit: 100 << 20,
        };
        let servers: Vec<_> = percent.iter().enumerate().map(memory).collect();
        shortage(&servers, is_closed, servers[0].used >= servers[0].limit)
            .map(|shortage| shortage.is_full)
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
    fn settings_that_break_promises_are_found() {
        let well = Observed {
            memory: Memory {
                server: "s".into(),
                used: 1,
                limit: 0,
            },
            policy: "noeviction".into(),
            has_file: true,
            has_failed_to_write: false,
            is_replica: false,
            is_loading: false,
        };
        let found = |observed: &Observed, had_file, is_cluster| -> Vec<&'static str> {
            unsafe_settings(observed, had_file, is_cluster)
                .into_iter()
                .map(|found| found.setting)
                .collect()
        };
        assert!(found(&well, true, false).is_empty());
        let evicts = Observed {
            policy: "allkeys-random".into(),
            ..well.clone()
        };
        assert_eq!(found(&evicts, true, false), ["maxmemory-policy"]);
        let without = Observed {
            has_file: false,
            ..well.clone()
        };
        assert_eq!(found(&without, true, false), ["appendonly"]);
        assert!(
            found(&without, false, false).is_empty(),
            "it never had a file"
        );
        assert_eq!(
            found(
                &Observed {
                    has_failed_to_write: true,
                    ..well.clone()
                },
                true,
                false
            )
            .len(),
            1
        );
        let replica = Observed {
            is_replica: true,
            ..well
        };
        assert_eq!(found(&replica, true, false), ["replicaof"]);
        assert!(found(&replica, true, true).is_empty());
    }

    #[test]
    fn a_server_that_is_gone_has_no_memory() {
        let memory = |server: &str| Memory {
            server: server.into(),
            used: 90,
            limit: 100,
        };
        let recorder = PrometheusBuilder::new().build_recorder();
        let mut shown = HashSet::new();
        ::metrics::with_local_recorder(&recorder, || {
            show(&[memory("a"), memory("b")], &mut shown);
            show(&[memory("b"), memory("c")], &mut shown);
        });
        let text = recorder.handle().render();
        for (server, used, limit) in [("a", 0, 0), ("b", 90, 100), ("c", 90, 100)] {
            for (what, bytes) in [("used", used), ("limit", limit)] {
                let line =
                    format!("taskd_redis_memory_{what}_bytes{{server=\"{server}\"}} {bytes}");
                assert!(
                    text.lines().any(|found| found == line),
                    "{line} is not in\n{text}"
                );
            }
        }
    }

    #[test]
    fn a_server_without_a_limit_is_never_full() {
        let memory = Memory {
            server: "s".into(),
            used: u64::MAX,
            limit: 0,
        };
        assert!(shortage(&[memory], true, false).is_none());
        assert_eq!(
            [lower(0, 0), lower(0, 5), lower(5, 0), lower(5, 4)],
            [0, 5, 5, 4]
        );
    }

    #[test]
    fn the_reason_names_the_server_and_the_numbers() {
        let memory = Memory {
            server: "127.0.0.1:6379".into(),
            used: 81 << 20,
            limit: 100 << 20,
        };
        let why = shortage(&[memory], false, false).unwrap().why;
        assert!(
            why.starts_with("redis 127.0.0.1:6379 has used 81 % of its memory limit of 100 MiB"),
            "{why}"
        );
    }
}
