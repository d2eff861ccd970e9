//! The one way to Redis. No logic of ours: connections, and the checks at the start.

mod address;
mod cluster;
mod connection;
mod durability;
mod memory;

use std::{path::PathBuf, sync::Arc, time::Duration};

use redis::{
    ErrorKind, RedisError, ServerErrorKind,
    aio::{MultiplexedConnection, PubSub},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use self::address::Address;
pub use self::{
    connection::Connection,
    durability::{Durability, Shortfall},
    memory::Memory,
};
use crate::{
    config::{RedisAccess, without_password},
    runtime::LoopError,
};

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(5);
/// A call that gets no answer for so long fails, so that no caller waits for ever; it may have been carried out.
const RESPONSE: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "redis url {url:?} is not usable: {reason}; use redis://, rediss://, redis+cluster://, rediss+cluster:// or unix://"
    )]
    Url { url: String, reason: String },
    #[error("cannot read {}: {reason}", path.display())]
    File { path: PathBuf, reason: String },
    #[error("redis {version} is too old; taskd needs 7.0 or newer")]
    TooOld { version: String },
    #[error("redis evicts keys (maxmemory-policy {policy}), so it would lose tasks; set maxmemory-policy noeviction")]
    Evicts { policy: String },
    #[error("redis {version} has no WAITAOF; set redis_wait_aof = false, or use Redis 7.2, Valkey or newer")]
    NoWaitAof { version: String },
    #[error("redis has no append-only file for WAITAOF to wait for; set appendonly yes, or redis_wait_aof = false")]
    NoAof,
    #[error("redis is a node of a cluster; write redis+cluster:// (or rediss+cluster://)")]
    IsCluster,
    #[error("redis is not a cluster; write redis:// (or rediss://)")]
    NotCluster,
    #[error("redis refuses taskd: {0}; check the user, its password and its rights in the redis url")]
    Refused(RedisError),
    #[error("no trust between redis and taskd: {0}; check redis_ca_file and the host in the redis url")]
    Untrusted(RedisError),
    /// Not yet.
    #[error("the cluster is not ready: cluster_state:{0}")]
    NotReady(String),
    #[error(transparent)]
    Redis(RedisError),
}

impl Error {
    /// Whether it may work later without anybody changing anything here.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::NotReady(_) | Self::Redis(_))
    }
}

impl LoopError for Error {}

impl LoopError for RedisError {}

impl From<RedisError> for Error {
    fn from(error: RedisError) -> Self {
        match error.kind() {
            ErrorKind::AuthenticationFailed | ErrorKind::Server(ServerErrorKind::NoPerm) => Self::Refused(error),
            _ if matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "NOPERM")) => Self::Refused(error),
            _ if is_tls(&error) => Self::Untrusted(error),
            _ => Self::Redis(error),
        }
    }
}

/// A certificate that is not trusted, or no TLS at all where it should be.
fn is_tls(error: &RedisError) -> bool {
    // What is below stands in an Arc, which is an error of its own.
    let shared = std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>());
    let Some(cause) = shared else { return false };
    let in_io = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
    cause.is::<rustls::Error>() || in_io.is_some_and(|inner| inner.is::<rustls::Error>())
}

fn timed_out() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

/// A server or a cluster, and the prefix of our keys on it. Clones share one pipelined connection.
#[derive(Clone)]
pub struct Redis {
    address: Address,
    shared: Connection,
    /// Where calls wait for replicas: on the shared one they would hold up all others.
    waiting: Connection,
    /// For who waits there: more would get no answer in time while a replica is missing, and what they gave up would still stand in line.
    turns: Arc<Semaphore>,
    durability: Option<Durability>,
    prefix: Arc<str>,
}

impl Redis {
    /// Connects; fails when the server does not answer now.
    pub async fn connect(url: &str, prefix: &str) -> Result<Self, Error> {
        Self::connect_as(url, prefix, &RedisAccess::default()).await
    }

    pub async fn connect_as(url: &str, prefix: &str, access: &RedisAccess) -> Result<Self, Error> {
        let address = Address::new(url, access)?;
        let shared = connect(&address).await?;
        let durability = Durability::new(access);
        let waiting = if durability.is_some() { connect(&address).await? } else { shared.clone() };
        let turns = durability.as_ref().map_or(1, |durability| durability.at_once(RESPONSE * 4 / 5));
        Ok(Self { address, shared, waiting, turns: Arc::new(Semaphore::new(turns)), durability, prefix: prefix.into() })
    }

    /// Refuses servers on which taskd's promises would not hold: of a cluster, every master.
    pub async fn check(&self) -> Result<(), Error> {
        for server in self.masters().await? {
            let mut conn = self.address.connect(&server, Some(RESPONSE)).await?;
            let info: String = redis::cmd("INFO").query_async(&mut conn).await?;
            check(&info, self.address.is_cluster)?;
            if self.address.is_cluster {
                check_state(&mut conn).await?;
            }
            if let Some(durability) = &self.durability {
                durability.check(&server.addr().to_string(), &info, &mut conn).await?;
            }
        }
        Ok(())
    }

    /// The server, or every master of the cluster.
    async fn masters(&self) -> redis::RedisResult<Vec<redis::ConnectionInfo>> {
        if !self.address.is_cluster {
            return Ok(vec![self.address.seed().clone()]);
        }
        let slots = cluster::masters(&mut self.conn()).await?;
        let mut servers: Vec<_> = slots.iter().map(|slots| slots.info(&self.address)).collect();
        servers.sort_by_key(|info| info.addr().to_string());
        servers.dedup_by_key(|info| info.addr().to_string());
        Ok(servers)
    }

    /// The shared connection: reconnects by itself; never for commands that block.
    pub fn conn(&self) -> Connection {
        self.shared.clone()
    }

    /// Another shared one, for a call that ends with what [`Self::durability`] asks for. The permit is held until it is answered.
    pub async fn waiting_conn(&self) -> Result<(Connection, OwnedSemaphorePermit), Shortfall> {
        let turn = tokio::time::timeout(RESPONSE / 2, Arc::clone(&self.turns).acquire_owned()).await;
        match turn {
            Ok(Ok(turn)) => Ok((self.waiting.clone(), turn)),
            Ok(Err(_)) | Err(_) => Err(Shortfall::too_many()),
        }
    }

    /// `None`: what the master has is enough.
    pub fn durability(&self) -> Option<&Durability> {
        self.durability.as_ref()
    }

    /// A connection of one's own, for commands that block; of a cluster, to the master that has `key` now. When it fails or the server says
    /// that the key is elsewhere, another one is asked for.
    pub async fn dedicated(&self, key: &str) -> redis::RedisResult<MultiplexedConnection> {
        if self.address.is_cluster {
            return cluster::dedicated(&self.address, &mut self.conn(), key).await;
        }
        self.address.connect(self.address.seed(), None).await
    }

    /// In a cluster every node tells all others what is published: any that answers will do.
    pub async fn pubsub(&self) -> redis::RedisResult<PubSub> {
        let known = if self.address.is_cluster { self.masters().await.unwrap_or_default() } else { Vec::new() };
        let mut last = None;
        for info in known.iter().chain(self.address.seeds()) {
            match self.address.pubsub(info).await {
                Ok(pubsub) => return Ok(pubsub),
                Err(error) => last = Some(error),
            }
        }
        Err(last.expect("a URL names at least one server"))
    }

    /// What stands before every key of ours.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}

async fn connect(address: &Address) -> Result<Connection, Error> {
    if !address.is_cluster {
        return Ok(Connection::connect(address).await?);
    }
    // The cluster's client does not say why it cannot connect.
    let mut last = None;
    for seed in address.seeds() {
        match check_node(address, seed).await {
            Ok(()) => return Ok(Connection::connect(address).await?),
            // Another node may know better.
            Err(error) if error.is_transient() => last = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(last.expect("a URL names at least one server"))
}

/// Whether it is a node of a cluster that works.
async fn check_node(address: &Address, node: &redis::ConnectionInfo) -> Result<(), Error> {
    let mut conn = address.connect(node, Some(CONNECT)).await?;
    let info: String = redis::cmd("INFO").arg("cluster").query_async(&mut conn).await?;
    if value(&info, "cluster_enabled:").as_deref() != Some("1") {
        return Err(Error::NotCluster);
    }
    check_state(&mut conn).await
}

async fn check_state(conn: &mut MultiplexedConnection) -> Result<(), Error> {
    let state: String = redis::cmd("CLUSTER").arg("INFO").query_async(conn).await?;
    match value(&state, "cluster_state:").unwrap_or_default() {
        state if state == "ok" => Ok(()),
        state => Err(Error::NotReady(state)),
    }
}

fn value(info: &str, name: &str) -> Option<String> {
    info.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned())
}

/// Of the answer to INFO.
fn check(info: &str, is_cluster: bool) -> Result<(), Error> {
    let version = version(info);
    let major: u32 = version.split('.').next().and_then(|part| part.parse().ok()).unwrap_or(0);
    if major < 7 {
        return Err(Error::TooOld { version });
    }
    if !is_cluster && value(info, "cluster_enabled:").as_deref() == Some("1") {
        return Err(Error::IsCluster);
    }
    match value(info, "maxmemory_policy:") {
        Some(policy) if policy != "noeviction" => Err(Error::Evicts { policy }),
        _ => Ok(()),
    }
}

/// Valkey also says which Redis it is like, and that is 7.2 for ever.
fn version(info: &str) -> String {
    value(info, "redis_version:").unwrap_or_else(|| "of an unknown version".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_and_evicting_servers_are_refused() {
        let info = |version, policy| {
            format!(
                "# Server\r\nredis_version:{version}\r\nredis_mode:standalone\r\n# Memory\r\nmaxmemory_policy:{policy}\r\n"
            )
        };
        assert!(check(&info("7.0.0", "noeviction"), false).is_ok());
        assert!(check("redis_version:10.1\r\n", false).is_ok());
        let old = check(&info("6.2.14", "noeviction"), false).unwrap_err().to_string();
        assert_eq!(old, "redis 6.2.14 is too old; taskd needs 7.0 or newer");
        assert!(check("", false).is_err());
        assert!(matches!(check(&info("7.2.4", "allkeys-lru"), false), Err(Error::Evicts { .. })));
        let node = "redis_version:7.0.1\r\ncluster_enabled:1\r\n";
        assert!(matches!(check(node, false), Err(Error::IsCluster)));
        assert!(check(node, true).is_ok());
    }
}
