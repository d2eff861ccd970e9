//! The nodes of a cluster and their slots.

use redis::{ConnectionInfo, FromRedisValue, RedisResult, Value, aio::MultiplexedConnection};

use super::{address::Address, connection::Connection};

/// Asks for the ranges of slots and their masters.
pub(super) async fn masters(conn: &mut Connection) -> RedisResult<Vec<Slots>> {
    let ranges: Vec<Value> = redis::cmd("CLUSTER").arg("SLOTS").query_async(conn).await?;
    ranges
        .into_iter()
        .map(Slots::from_redis_value)
        .collect::<Result<_, _>>()
        .map_err(Into::into)
}

/// Connects to the master that has the key now. Its answers may take any time.
pub(super) async fn dedicated(
    address: &Address,
    conn: &mut Connection,
    key: &str,
) -> RedisResult<MultiplexedConnection> {
    let slot: u16 = redis::cmd("CLUSTER")
        .arg("KEYSLOT")
        .arg(key)
        .query_async(conn)
        .await?;
    let masters = masters(conn).await?;
    let owner = masters
        .iter()
        .find(|slots| (slots.first..=slots.last).contains(&slot));
    let owner = owner.ok_or_else(|| {
        redis::RedisError::from((
            redis::ErrorKind::ClusterConnectionNotFound,
            "no node has the slot",
            slot.to_string(),
        ))
    })?;
    address.connect(&owner.info(address), None).await
}

/// A range of slots and its master.
pub(super) struct Slots {
    first: u16,
    last: u16,
    /// Empty if the server does not say.
    host: String,
    port: u16,
}

impl Slots {
    pub(super) fn info(&self, address: &Address) -> ConnectionInfo {
        address.node(&self.host, self.port)
    }

    /// Reads an entry of CLUSTER SLOTS: first, last, the master, its replicas.
    fn from_redis_value(value: Value) -> Result<Self, redis::ParsingError> {
        let Value::Array(parts) = value else {
            return Err("not a range of slots".into());
        };
        let mut parts = parts.into_iter();
        let mut part = || parts.next().unwrap_or(Value::Nil);
        let first = FromRedisValue::from_redis_value(part())?;
        let last = FromRedisValue::from_redis_value(part())?;
        let Value::Array(master) = part() else {
            return Err("a range of slots without a master".into());
        };
        let mut master = master.into_iter();
        let mut field = || master.next().unwrap_or(Value::Nil);
        let host: Option<String> = FromRedisValue::from_redis_value(field())?;
        let port = FromRedisValue::from_redis_value(field())?;
        Ok(Self {
            first,
            last,
            host: host.unwrap_or_default(),
            port,
        })
    }
}
