//! The embedded default: a real redis-server that taskd runs itself.
//!
//! ```text
//! <data dir>/            0700, one taskd at a time
//!     lock               held by that taskd, with its pid
//!     redis/             the append-only file; 0700
//!     redis.sock         or in a private folder under the temp dir, if this path is too long
//!     redis.pid          written by redis-server
//!     redis.log
//! ```
//!
//! This Redis writes to disk before it answers (`appendfsync always`), so a kill at any moment
//! loses no acknowledged write. A killed taskd leaves its redis-server running. The next taskd ends
//! it before it starts its own.

mod ask;
mod data_dir;
mod launch;
mod machine;
mod orphan;
mod server;

use std::{io, path::PathBuf, process::ExitStatus, time::Duration};

pub use data_dir::DataDir;
pub use launch::url_of_running;
pub use server::RedisServer;

/// Why the embedded Redis cannot run. Each message says what the user can do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "data folder {} is in use by another taskd{}; stop it, or choose another folder with --data-dir",
        folder.display(), holder.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
    )]
    InUse {
        folder: PathBuf,
        holder: Option<u32>,
    },
    #[error(
        "cannot use data folder {}: {cause}; make it a folder that this user may write to, or choose another one with \
         --data-dir",
        folder.display()
    )]
    Folder {
        folder: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error(
        "no taskd runs in data folder {}; start it, or name that of the running one with --data-dir",
        folder.display()
    )]
    NotRunning { folder: PathBuf },
    #[error("cannot use data folder {}: {why}, or choose another folder with --data-dir", folder.display())]
    Unsafe { folder: PathBuf, why: String },
    #[error(
        "{binary} is not installed; install Redis 7 or newer (Debian, Ubuntu: apt-get install redis-server), \
         or name a Redis that runs elsewhere with --redis-url"
    )]
    Missing { binary: String },
    #[error(
        "{binary} is version {version}; taskd needs Redis 7.0 or newer: install one, or name one with --redis-url"
    )]
    TooOld { binary: String, version: String },
    #[error(
        "cannot run {binary}: {cause}; repair it, or name a Redis that runs elsewhere with --redis-url"
    )]
    Run {
        binary: String,
        #[source]
        cause: io::Error,
    },
    #[error(
        "cannot use {} for the socket of redis-server: {reason}; remove it, or choose a shorter path with --data-dir",
        folder.display()
    )]
    SocketFolder { folder: PathBuf, reason: String },
    #[error("redis-server ended ({status}); the end of {}:\n{last}", log.display())]
    Ended {
        status: ExitStatus,
        log: PathBuf,
        last: String,
    },
    #[error("redis-server did not answer within {limit:?}; the end of {}:\n{last}", log.display())]
    Slow {
        limit: Duration,
        log: PathBuf,
        last: String,
    },
    #[error(
        "{} is answered by a redis-server of another folder ({dir}); stop it, or choose another folder with --data-dir",
        socket.display()
    )]
    Foreign { socket: PathBuf, dir: String },
    #[error(
        "an old redis-server (pid {pid}) of this data folder does not end; end it, or choose another folder with \
         --data-dir"
    )]
    Stuck { pid: u32 },
}
