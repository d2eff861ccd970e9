//! Shared by the test targets: real servers, and test suites that run on several of them.
#![allow(
    dead_code,
    unreachable_pub,
    unused_macros,
    unused_imports,
    reason = "no target uses all of it"
)]

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use taskd::{coordination::Coordination, redis_pool::Redis, runtime::Clock};

pub(crate) mod bus_contract;
pub(crate) mod collector;
pub(crate) mod commit_proxy;
pub(crate) mod daemon;
pub(crate) mod event_topic;
pub(crate) mod kafka;
pub(crate) mod logs_contract;
pub(crate) mod mariadb;
pub(crate) mod port;
pub(crate) mod process;
pub(crate) mod proxy;
pub(crate) mod redis;
pub(crate) mod redis_cluster;
pub(crate) mod redis_private;
pub(crate) mod session;
pub(crate) mod site;
pub(crate) mod spans;
pub(crate) mod sqlite;
#[macro_use]
pub(crate) mod store_contract;
pub(crate) mod subscriptions;

/// The coordination of a process that shares this Redis with others.
pub(crate) fn coordination(redis: &Redis, process: &str) -> Coordination {
    Coordination::new(redis.clone(), process, Clock::of_this_machine())
}

/// The library of Debian's package libfaketime, if it is installed.
pub(crate) fn faketime() -> Option<PathBuf> {
    let folders = fs::read_dir("/usr/lib").ok()?.flatten();
    folders
        .map(|folder| folder.path().join("faketime/libfaketime.so.1"))
        .find(|library| library.exists())
}

/// How long to wait for something that must happen, even on a slow and busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(150);

/// The process whose id is in this file, provided that its command line mentions the folder or that
/// it runs in it. Otherwise the file is stale, and the id may belong to another process.
pub(crate) fn process_of(file: &Path, folder: &Path) -> Option<Pid> {
    let pid = fs::read_to_string(file).ok()?.trim().parse::<i32>().ok()?;
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let names_it = String::from_utf8_lossy(&command).contains(&*folder.to_string_lossy());
    let whole = folder.canonicalize().ok()?;
    let works_there =
        || fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(whole));
    (names_it || works_there()).then_some(Pid::from_raw(pid))
}

/// Kills the process that [`process_of`] returns with SIGKILL.
pub(crate) fn kill9_process_of(file: &Path, folder: &Path) {
    if let Some(pid) = process_of(file, folder) {
        kill(pid, Signal::SIGKILL).ok();
    }
}

/// A client with a timeout. It does not keep idle connections: on a busy machine, taskd may close
/// one due to inactivity just when the next call is sent on it.
pub(crate) fn http_client() -> reqwest::Client {
    reqwest::Client::builder()
        .timeout(PATIENCE)
        .pool_max_idle_per_host(0)
        .build()
        .unwrap()
}

/// Waits until `condition` holds. Panics after [`PATIENCE`], or up to twice that if a check of the
/// condition takes this long.
pub(crate) async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !tokio::time::timeout(PATIENCE, condition())
        .await
        .unwrap_or(false)
    {
        assert!(began.elapsed() < PATIENCE, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
