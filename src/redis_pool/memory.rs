//! What each Redis server reports while taskd runs: its memory, and the settings on which taskd's
//! promises depend.

use redis::{InfoDict, RedisError, Value};

use super::server::Redis;

/// The memory of one server in bytes, without what does not count for `maxmemory`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// `host:port`, or the path of its socket.
    pub server: String,
    pub used: u64,
    /// The server's `maxmemory`; 0 if it has none.
    pub limit: u64,
}

/// What one server reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    pub memory: Memory,
    /// `maxmemory-policy`.
    pub policy: String,
    /// It has an append-only file.
    pub has_file: bool,
    /// It could not write the append-only file, and refuses writes.
    pub has_failed_to_write: bool,
    pub is_replica: bool,
    /// It is loading its data after a start, and refuses commands.
    pub is_loading: bool,
}

impl Redis {
    /// Asks the server, or every master of the cluster.
    pub async fn observe(&self) -> Result<Vec<Observed>, RedisError> {
        let mut ask = redis::cmd("INFO");
        ask.arg("memory").arg("persistence").arg("replication");
        let answer: Value = ask.query_async(&mut self.conn()).await?;
        match answer {
            Value::Map(servers) => servers
                .into_iter()
                .map(|(server, info)| read(redis::from_redis_value(server.extract_error()?)?, info))
                .collect(),
            info => Ok(vec![read(self.address().seed().addr().to_string(), info)?]),
        }
    }
}

fn read(server: String, info: Value) -> Result<Observed, RedisError> {
    let info: InfoDict = redis::from_redis_value(info.extract_error()?)?;
    let missing = |name: &'static str| {
        (
            redis::ErrorKind::UnexpectedReturnType,
            "INFO memory does not say",
            name.to_owned(),
        )
    };
    let used: u64 = info
        .get("used_memory")
        .ok_or_else(|| missing("used_memory"))?;
    let limit = info.get("maxmemory").ok_or_else(|| missing("maxmemory"))?;
    // Buffers for replicas and for the append-only file do not count for maxmemory.
    let beside = info.get("mem_not_counted_for_evict").unwrap_or(0);
    let says = |name: &str, value: &str| info.get::<String>(name).as_deref() == Some(value);
    Ok(Observed {
        memory: Memory {
            server,
            used: used.saturating_sub(beside),
            limit,
        },
        policy: info.get("maxmemory_policy").unwrap_or_default(),
        has_file: says("aof_enabled", "1"),
        has_failed_to_write: says("aof_enabled", "1") && says("aof_last_write_status", "err"),
        is_replica: says("role", "slave"),
        is_loading: says("loading", "1"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_for_the_limit_is_read() {
        let info = |text: &str| Value::SimpleString(text.into());
        let memory = "# Memory\r\nused_memory:1000\r\nused_memory_human:1K\r\nmaxmemory:4000\r\n\
                    mem_not_counted_for_evict:100\r\nmaxmemory_policy:allkeys-lru\r\n# Persistence\r\nloading:0\r\n\
                    aof_enabled:1\r\naof_last_write_status:err\r\n# Replication\r\nrole:slave\r\n";
        let observed = Observed {
            memory: Memory {
                server: "s".into(),
                used: 900,
                limit: 4000,
            },
            policy: "allkeys-lru".into(),
            has_file: true,
            has_failed_to_write: true,
            is_replica: true,
            is_loading: false,
        };
        assert_eq!(read("s".into(), info(memory)).unwrap(), observed);
        assert!(read("s".into(), info("used_memory:1000\r\n")).is_err());
    }
}
