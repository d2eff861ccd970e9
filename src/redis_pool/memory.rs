//! The memory that each Redis server has used.

use redis::{RedisError, Value};

use super::{Redis, value};

/// The memory of one server in bytes, as far as it counts for `maxmemory`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// `host:port`, or the path of its socket.
    pub server: String,
    pub used: u64,
    /// Its `maxmemory`; 0: none.
    pub limit: u64,
}

impl Redis {
    /// The memory of the server, or of every master of the cluster.
    pub async fn memory(&self) -> Result<Vec<Memory>, RedisError> {
        let answer: Value = redis::cmd("INFO").arg("memory").query_async(&mut self.conn()).await?;
        match answer {
            Value::Map(servers) => {
                servers.into_iter().map(|(server, info)| read(text(server)?, &text(info)?)).collect()
            }
            info => Ok(vec![read(self.address.seed().addr().to_string(), &text(info)?)?]),
        }
    }
}

fn text(value: Value) -> Result<String, RedisError> {
    Ok(redis::from_redis_value(value.extract_error()?)?)
}

fn read(server: String, info: &str) -> Result<Memory, RedisError> {
    let number = |name: &str| value(info, name).and_then(|number| number.parse::<u64>().ok());
    let missing =
        |name: &'static str| (redis::ErrorKind::UnexpectedReturnType, "INFO memory does not say", name.to_owned());
    let used = number("used_memory:").ok_or_else(|| missing("used_memory"))?;
    let limit = number("maxmemory:").ok_or_else(|| missing("maxmemory"))?;
    // Buffers for replicas and the append-only file do not count for maxmemory.
    let beside = number("mem_not_counted_for_evict:").unwrap_or(0);
    Ok(Memory { server, used: used.saturating_sub(beside), limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_for_the_limit_is_read() {
        let info = "# Memory\r\nused_memory:1000\r\nused_memory_human:1K\r\nmaxmemory:4000\r\n\
                    mem_not_counted_for_evict:100\r\n";
        assert_eq!(read("s".into(), info).unwrap(), Memory { server: "s".into(), used: 900, limit: 4000 });
        assert!(read("s".into(), "used_memory:1000\r\n").is_err());
    }
}
