//! One connection for everybody, to one server or to a cluster: both take the same commands.

use std::{
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use redis::{
    Cmd, ConnectionInfo, FromRedisValue, Pipeline, RedisFuture, RedisResult, Value,
    aio::{ConnectionLike, ConnectionManager, MultiplexedConnection},
    cluster::ClusterClient,
    cluster_async::ClusterConnection,
};

use super::{CONNECT, address::Address, timed_out};

/// Reconnects by itself, and follows the slots of a cluster. Clones share it. Never for commands that block.
#[derive(Clone)]
pub enum Connection {
    One(ConnectionManager),
    Cluster(Cluster),
}

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        match self {
            Self::One(manager) => manager.req_packed_command(cmd),
            Self::Cluster(cluster) => Box::pin(async move {
                let (number, mut conn) = cluster.get().await?;
                let answer = conn.req_packed_command(cmd).await;
                cluster.judge(number, &answer);
                answer
            }),
        }
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        match self {
            Self::One(manager) => manager.req_packed_commands(pipeline, offset, count),
            Self::Cluster(cluster) => Box::pin(async move {
                let (number, mut conn) = cluster.get().await?;
                let answers = conn.req_packed_commands(pipeline, offset, count).await;
                cluster.judge(number, &answers);
                answers
            }),
        }
    }

    fn get_db(&self) -> i64 {
        match self {
            Self::One(manager) => manager.get_db(),
            Self::Cluster(_) => 0,
        }
    }
}

/// A cluster's connections, one to each node.
#[derive(Clone)]
pub struct Cluster(Arc<Inner>);

struct Inner {
    address: Address,
    client: ClusterClient,
    /// With its number; `None` where it must be made anew.
    current: RwLock<Option<(u64, ClusterConnection)>>,
    /// Held by who connects: the number for the next.
    connecting: tokio::sync::Mutex<u64>,
}

impl Cluster {
    pub(super) async fn connect(address: &Address) -> RedisResult<Self> {
        let client = address.cluster()?;
        let inner = Inner {
            address: address.clone(),
            client,
            current: RwLock::default(),
            connecting: tokio::sync::Mutex::default(),
        };
        let cluster = Self(Arc::new(inner));
        cluster.get().await?;
        Ok(cluster)
    }

    /// A node that hangs keeps its connections, and the client would go on asking it although another has its slots now. So a call without
    /// an answer ends them all; the next one asks the nodes that answer for the slots.
    fn judge<T>(&self, number: u64, answer: &RedisResult<T>) {
        if answer.as_ref().is_err_and(redis::RedisError::is_timeout) {
            let mut current = self.0.current.write().unwrap_or_else(PoisonError::into_inner);
            if current.as_ref().is_some_and(|(known, _)| *known == number) {
                *current = None;
            }
        }
    }

    async fn get(&self) -> RedisResult<(u64, ClusterConnection)> {
        if let Some(current) = self.current() {
            return Ok(current);
        }
        // Where nobody answers, each of those before us tries for long: it is not for us to wait until it is our turn.
        let turn = tokio::time::timeout(CONNECT, self.0.connecting.lock()).await;
        let mut number = turn.map_err(|_| timed_out())?;
        // Whoever had the lock before may have connected.
        if let Some(current) = self.current() {
            return Ok(current);
        }
        let connected = tokio::time::timeout(CONNECT * 2, self.0.client.get_async_connection()).await;
        let conn = connected.unwrap_or_else(|_| Err(timed_out()))?;
        *number += 1;
        *self.0.current.write().unwrap_or_else(PoisonError::into_inner) = Some((*number, conn.clone()));
        Ok((*number, conn))
    }

    fn current(&self) -> Option<(u64, ClusterConnection)> {
        self.0.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The masters and the slots of each.
    pub(super) async fn masters(&self) -> RedisResult<Vec<Slots>> {
        let ranges: Vec<Value> = redis::cmd("CLUSTER").arg("SLOTS").query_async(&mut self.connection()).await?;
        ranges.into_iter().map(Slots::from_redis_value).collect::<Result<_, _>>().map_err(Into::into)
    }

    /// A connection to the master that has the key now.
    pub(super) async fn dedicated(&self, key: &str, response: Option<Duration>) -> RedisResult<MultiplexedConnection> {
        let slot: u16 = redis::cmd("CLUSTER").arg("KEYSLOT").arg(key).query_async(&mut self.connection()).await?;
        let masters = self.masters().await?;
        let owner = masters.iter().find(|slots| (slots.first..=slots.last).contains(&slot));
        let owner = owner.ok_or_else(|| {
            redis::RedisError::from((
                redis::ErrorKind::ClusterConnectionNotFound,
                "no node has the slot",
                slot.to_string(),
            ))
        })?;
        self.0.address.connect(&self.info(owner), response).await
    }

    pub(super) fn info(&self, slots: &Slots) -> ConnectionInfo {
        self.0.address.node(&slots.host, slots.port)
    }

    fn connection(&self) -> Connection {
        Connection::Cluster(self.clone())
    }
}

/// A range of slots and its master.
pub(super) struct Slots {
    first: u16,
    last: u16,
    /// Empty: the server does not say.
    host: String,
    port: u16,
}

impl Slots {
    /// An entry of CLUSTER SLOTS: first, last, the master, its replicas.
    fn from_redis_value(value: Value) -> Result<Self, redis::ParsingError> {
        let Value::Array(parts) = value else { return Err("not a range of slots".into()) };
        let mut parts = parts.into_iter();
        let mut part = || parts.next().unwrap_or(Value::Nil);
        let (first, last) = (FromRedisValue::from_redis_value(part())?, FromRedisValue::from_redis_value(part())?);
        let Value::Array(master) = part() else { return Err("a range of slots without a master".into()) };
        let mut master = master.into_iter();
        let mut field = || master.next().unwrap_or(Value::Nil);
        let host: Option<String> = FromRedisValue::from_redis_value(field())?;
        let port = FromRedisValue::from_redis_value(field())?;
        Ok(Self { first, last, host: host.unwrap_or_default(), port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RedisAccess;

    #[tokio::test]
    async fn nobody_waits_in_line_for_a_cluster_that_does_not_answer() {
        let address = Address::new("redis+cluster://127.0.0.1:1", &RedisAccess::default()).unwrap();
        let client = address.cluster().unwrap();
        let inner = Inner { address, client, current: RwLock::default(), connecting: tokio::sync::Mutex::default() };
        let cluster = Cluster(Arc::new(inner));
        let _somebody_tries = cluster.0.connecting.lock().await;
        let answer = tokio::time::timeout(CONNECT * 3, cluster.get()).await.expect("an answer");
        assert!(answer.is_err_and(|error| error.is_timeout()));
    }
}
