//! The one way to Redis. No logic of ours: connections, and the checks at the start.

use std::{sync::Arc, time::Duration};

use redis::aio::{ConnectionManager, ConnectionManagerConfig, MultiplexedConnection, PubSub};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("redis url {url:?} is not usable: {reason}; use redis:// or unix://")]
    Url { url: String, reason: String },
    #[error("redis {version} is too old; taskd needs 7.0 or newer")]
    TooOld { version: String },
    #[error("redis evicts keys (maxmemory-policy {policy}), so it would lose tasks; set maxmemory-policy noeviction")]
    Evicts { policy: String },
    #[error(transparent)]
    Redis(#[from] redis::RedisError),
}

/// A server and the prefix of our keys on it. Clones share one pipelined connection.
#[derive(Clone)]
pub struct Redis {
    client: redis::Client,
    manager: ConnectionManager,
    prefix: Arc<str>,
}

impl Redis {
    /// Connects; fails when the server does not answer now.
    pub async fn connect(url: &str, prefix: &str) -> Result<Self, Error> {
        let client =
            redis::Client::open(url).map_err(|e| Error::Url { url: without_password(url), reason: e.to_string() })?;
        // A call that gets no answer for so long fails, so that no caller waits for ever; it may have been carried out.
        let config = ConnectionManagerConfig::new()
            .set_connection_timeout(Some(Duration::from_secs(5)))
            .set_response_timeout(Some(Duration::from_secs(10)))
            .set_number_of_retries(1);
        let manager = ConnectionManager::new_with_config(client.clone(), config).await?;
        Ok(Self { client, manager, prefix: prefix.into() })
    }

    /// Refuses a server on which taskd's promises would not hold.
    pub async fn check(&self) -> Result<(), Error> {
        let mut conn = self.conn();
        let info: String = redis::cmd("INFO").arg("server").query_async(&mut conn).await?;
        let memory: String = redis::cmd("INFO").arg("memory").query_async(&mut conn).await?;
        check(&info, &memory)
    }

    /// The shared connection: reconnects by itself; never for commands that block.
    pub fn conn(&self) -> ConnectionManager {
        self.manager.clone()
    }

    /// A connection of one's own, for commands that block.
    pub async fn dedicated(&self) -> redis::RedisResult<MultiplexedConnection> {
        let config = redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(Duration::from_secs(5)))
            .set_response_timeout(None);
        self.client.get_multiplexed_async_connection_with_config(&config).await
    }

    pub async fn pubsub(&self) -> redis::RedisResult<PubSub> {
        self.client.get_async_pubsub().await
    }

    /// What stands before every key of ours.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}

/// Of the sections `server` and `memory` of INFO.
fn check(server: &str, memory: &str) -> Result<(), Error> {
    let value =
        |section: &str, name| section.lines().find_map(|line| line.strip_prefix(name)).map(|v| v.trim().to_owned());
    let version = value(server, "redis_version:").unwrap_or_else(|| "of an unknown version".into());
    let major: u32 = version.split('.').next().and_then(|part| part.parse().ok()).unwrap_or(0);
    if major < 7 {
        return Err(Error::TooOld { version });
    }
    match value(memory, "maxmemory_policy:") {
        Some(policy) if policy != "noeviction" => Err(Error::Evicts { policy }),
        _ => Ok(()),
    }
}

/// The URL as it may be shown.
pub fn without_password(text: &str) -> String {
    match url::Url::parse(text) {
        Ok(mut url) if url.password().is_some() => {
            if url.set_password(Some("***")).is_err() {
                return "***".into();
            }
            url.into()
        }
        Ok(_) => text.to_owned(),
        Err(_) => "***".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_and_evicting_servers_are_refused() {
        let server = |version| format!("# Server\r\nredis_version:{version}\r\nredis_mode:standalone\r\n");
        let memory = |policy| format!("# Memory\r\nmaxmemory_policy:{policy}\r\n");
        assert!(check(&server("7.0.0"), &memory("noeviction")).is_ok());
        assert!(check(&server("10.1"), "").is_ok());
        let old = check(&server("6.2.14"), &memory("noeviction")).unwrap_err().to_string();
        assert_eq!(old, "redis 6.2.14 is too old; taskd needs 7.0 or newer");
        assert!(check("", "").is_err());
        assert!(matches!(check(&server("7.2.4"), &memory("allkeys-lru")), Err(Error::Evicts { .. })));
    }
}
