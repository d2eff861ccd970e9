//! One Redis server or a cluster, with the connections to it.

use std::{sync::Arc, time::Duration};

use redis::{
    ErrorKind, InfoDict, ServerErrorKind, Value,
    aio::{MultiplexedConnection, PubSub},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    address::{Address, RESPONSE},
    check::{check, check_node, check_state},
    cluster,
    connection::{Connection, SILENCE},
    durability::{Durability, Shortfall},
    error::Error,
    script::Batch,
};
use crate::config::RedisAccess;

/// A server or a cluster, and the prefix of taskd's keys on it. Clones share one pipelined
/// connection.
#[derive(Clone)]
pub struct Redis {
    address: Address,
    shared: Connection,
    /// For calls that wait for replicas: on the shared connection they would hold up all others.
    waiting: Connection,
    /// Limits concurrent WAITs. Redis serves them one after the other: with more of them, the last
    /// ones would time out while a replica is down, and an abandoned WAIT still takes its turn.
    turns: Arc<Semaphore>,
    durability: Option<Durability>,
    prefix: Arc<str>,
}

impl Redis {
    /// Refuses settings with which no server can be used.
    pub fn check_settings(url: &str, access: &RedisAccess) -> Result<(), Error> {
        Address::new(url, access).map(drop)
    }

    /// Connects. Fails if the server does not answer now.
    pub async fn connect(url: &str, prefix: &str) -> Result<Self, Error> {
        Self::connect_as(url, prefix, &RedisAccess::default()).await
    }

    pub async fn connect_as(url: &str, prefix: &str, access: &RedisAccess) -> Result<Self, Error> {
        let address = Address::new(url, access)?;
        let shared = connect(&address, SILENCE).await?;
        let durability = Durability::new(access);
        // A call that waits for replicas delays all later ones on its connection.
        let waiting = if durability.is_some() {
            connect(&address, RESPONSE).await?
        } else {
            shared.clone()
        };
        let turns = durability
            .as_ref()
            .map_or(1, |durability| durability.at_once(RESPONSE * 4 / 5));
        Ok(Self {
            address,
            shared,
            waiting,
            turns: Arc::new(Semaphore::new(turns)),
            durability,
            prefix: prefix.into(),
        })
    }

    /// Refuses a server, or a master of the cluster, on which taskd's promises would not hold.
    pub async fn check(&self) -> Result<(), Error> {
        for server in self.masters().await? {
            let mut conn = self.address.connect(&server, Some(RESPONSE)).await?;
            let info: InfoDict = redis::cmd("INFO").query_async(&mut conn).await?;
            check(&info, self.address.is_cluster)?;
            if self.address.is_cluster {
                check_state(&mut conn).await?;
            }
            if let Some(durability) = &self.durability {
                durability
                    .check(&server.addr().to_string(), &info, &mut conn)
                    .await?;
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
        let mut servers: Vec<_> = slots
            .iter()
            .map(|slots| slots.info(&self.address))
            .collect();
        servers.sort_by_key(|info| info.addr().to_string());
        servers.dedup_by_key(|info| info.addr().to_string());
        Ok(servers)
    }

    /// The shared connection, which reconnects by itself. Never for commands that block.
    pub fn conn(&self) -> Connection {
        self.shared.clone()
    }

    /// Another shared connection, for a call that ends with [`Durability::ask`]. Hold the permit
    /// until it is answered.
    pub async fn waiting_conn(&self) -> Result<(Connection, OwnedSemaphorePermit), Shortfall> {
        let turn =
            tokio::time::timeout(RESPONSE / 2, Arc::clone(&self.turns).acquire_owned()).await;
        match turn {
            Ok(Ok(turn)) => Ok((self.waiting.clone(), turn)),
            Ok(Err(_)) | Err(_) => Err(Shortfall::TooManyWait),
        }
    }

    /// The copies that a write waits for; `None` if the master's is enough.
    pub fn durability(&self) -> Option<&Durability> {
        self.durability.as_ref()
    }

    /// Opens a connection for one caller whose commands block; in a cluster, to the master that has
    /// `key` now. If the connection fails, or the server says that the key has moved, the caller
    /// opens another one.
    pub async fn dedicated(&self, key: &str) -> redis::RedisResult<MultiplexedConnection> {
        if self.address.is_cluster {
            return cluster::dedicated(&self.address, &mut self.conn(), key).await;
        }
        self.address.connect(self.address.seed(), None).await
    }

    /// Opens a connection for subscriptions. In a cluster each node forwards what is published, so
    /// any that answers will do.
    pub async fn pubsub(&self) -> redis::RedisResult<PubSub> {
        let known = if self.address.is_cluster {
            self.masters().await.unwrap_or_default()
        } else {
            Vec::new()
        };
        let mut last = None;
        for info in known.iter().chain(self.address.seeds()) {
            match self.address.pubsub(info).await {
                Ok(pubsub) => return Ok(pubsub),
                Err(error) => last = Some(error),
            }
        }
        Err(last.expect("a URL names at least one server"))
    }

    /// Runs commands that do not depend on each other, whatever slots their keys are in, and
    /// returns an answer for each. In a cluster each is sent on its own, so that a node that does
    /// not answer delays no command to another.
    pub async fn run_apart(&self, batch: Batch) -> Vec<redis::RedisResult<Value>> {
        if self.is_cluster() {
            return batch.run_apart(&self.shared).await;
        }
        let count = batch.len();
        batch
            .run(&mut self.conn())
            .await
            .unwrap_or_else(|error| vec![Err(error); count])
    }

    /// True if keys are spread over several nodes, so that only commands about one slot can share a
    /// round trip.
    pub fn is_cluster(&self) -> bool {
        self.address.is_cluster
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// The prefix of every key of taskd.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}

async fn connect(address: &Address, silence: Duration) -> Result<Connection, Error> {
    if !address.is_cluster {
        let number = address.seed().redis_settings().db();
        return Connection::connect(address, silence)
            .await
            .map_err(|error| match error.kind() {
                // Only the SELECT of a new connection is answered like this. The text is compared
                // because a busy Redis refuses the SELECT, too.
                ErrorKind::Server(ServerErrorKind::ResponseError)
                    if error.to_string().contains("out of range") =>
                {
                    Error::NoDatabase {
                        number,
                        source: error,
                    }
                }
                _ => error.into(),
            });
    }
    // The client of the cluster does not say why it cannot connect.
    let mut last = None;
    for seed in address.seeds() {
        match check_node(address, seed).await {
            Ok(()) => return Ok(Connection::connect(address, silence).await?),
            // Another node may be usable.
            Err(error) if error.is_transient() => last = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(last.expect("a URL names at least one server"))
}
