//! The memory that each Redis server has used.

use redis::{InfoDict, RedisError, Value};

use super::server::Redis;

/// The memory of one server in bytes, as far as it counts for `maxmemory`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// `host:port`, or the path of its socket.
    pub server: String,
    pub used: u64,
    /// The server's `maxmemory`; 0: none.
    pub limit: u64,
}

impl Redis {
    /// The memory of the server, or of every master of the cluster.
    pub async fn memory(&self) -> Result<Vec<Memory>, RedisError> {
        let answer: Value = redis::cmd("INFO").arg("memory").query_async(&mut self.conn()).await?;
        match answer {
            Value::Map(servers) => servers
                .into_iter()
                .map(|(server, info)| read(redis::from_redis_value(server.extract_error()?)?, info))
                .collect(),
            info => Ok(vec![read(self.address().seed().addr().to_string(), info)?]),
        }
    }
}

fn read(server: String, info: Value) -> Result<Memory, RedisError> {
    let info: InfoDict = redis::from_redis_value(info.extract_error()?)?;
    let missing =
        |name: &'static str| (redis::ErrorKind::UnexpectedReturnType, "INFO memory does not say", name.to_owned());
    let used: u64 = info.get("used_memory").ok_or_else(|| missing("used_memory"))?;
    let limit = info.get("maxmemory").ok_or_else(|| missing("maxmemory"))?;
    // Buffers for replicas and the append-only file do not count for maxmemory.
    let beside = info.get("mem_not_counted_for_evict").unwrap_or(0);
    Ok(Memory { server, used: used.saturating_sub(beside), limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_for_the_limit_is_read() {
        let info = |text: &str| Value::SimpleString(text.into());
        let memory = "# Memory\r\nused_memory:1000\r\nused_memory_human:1K\r\nmaxmemory:4000\r\n\
                    mem_not_counted_for_evict:100\r\n";
        assert_eq!(read("s".into(), info(memory)).unwrap(), Memory { server: "s".into(), used: 900, limit: 4000 });
        assert!(read("s".into(), info("used_memory:1000\r\n")).is_err());
    }
}
