//! The errors of connections to Redis.

use std::{path::PathBuf, sync::Arc};

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::runtime::LoopError;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "redis_url = {url:?} is not usable: {source}; use redis://, rediss://, redis+cluster://, rediss+cluster:// or \
         unix://"
    )]
    Url { url: String, source: RedisError },
    #[error("{setting} = {path:?} cannot be read: {source}")]
    File {
        setting: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "redis has no database {number}: {source}; check the number at the end of the redis url"
    )]
    NoDatabase { number: i64, source: RedisError },
    #[error("redis {version} is too old; taskd needs 7.0 or newer")]
    TooOld { version: String },
    #[error(
        "redis evicts keys (maxmemory-policy {policy}), so it would lose tasks; set maxmemory-policy noeviction"
    )]
    Evicts { policy: String },
    #[error(
        "redis {version} has no WAITAOF; set redis_wait_aof = false, or use Redis 7.2, Valkey or newer"
    )]
    NoWaitAof { version: String },
    #[error(
        "redis has no append-only file for WAITAOF to wait for; set appendonly yes, or redis_wait_aof = false"
    )]
    NoAof,
    #[error("redis is a node of a cluster; write redis+cluster:// (or rediss+cluster://)")]
    IsCluster,
    #[error("redis is not a cluster; write redis:// (or rediss://)")]
    NotCluster,
    #[error(
        "redis refuses taskd: {0}; check the user, its password and its rights in the redis url"
    )]
    Refused(#[source] RedisError),
    #[error(
        "no trust between redis and taskd: {0}; check redis_ca_file and the host in the redis url"
    )]
    Untrusted(#[source] RedisError),
    #[error("redis is a replica, which takes no writes; name the master in redis_url")]
    Replica,
    #[error("the cluster is not ready: cluster_state:{0}")]
    NotReady(String),
    #[error(transparent)]
    Redis(RedisError),
}

impl Error {
    /// Whether the same call may succeed later, with the same settings.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Replica | Self::NotReady(_) | Self::Redis(_))
    }
}

impl LoopError for Error {}

impl LoopError for RedisError {}

impl From<RedisError> for Error {
    fn from(error: RedisError) -> Self {
        match error.kind() {
            ErrorKind::AuthenticationFailed | ErrorKind::Server(ServerErrorKind::NoPerm) => {
                Self::Refused(error)
            }
            _ if matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "NOPERM")) => {
                Self::Refused(error)
            }
            _ if is_tls(&error) => Self::Untrusted(error),
            _ => Self::Redis(error),
        }
    }
}

/// Whether the cause is an untrusted certificate, or a server without TLS.
fn is_tls(error: &RedisError) -> bool {
    // redis-rs wraps the cause in an Arc, which is an error of its own.
    let shared = std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>());
    let Some(cause) = shared else { return false };
    let in_io = cause
        .downcast_ref::<std::io::Error>()
        .and_then(std::io::Error::get_ref);
    cause.is::<rustls::Error>() || in_io.is_some_and(|inner| inner.is::<rustls::Error>())
}
