//! A redis-server as taskd starts it, for measurements without taskd.

use redis::aio::MultiplexedConnection;
use taskd::embedded::{self, DataDir};
use tempfile::TempDir;

/// A running server. Dropping it stops it and removes its folder.
pub(crate) struct RedisServer {
    server: embedded::RedisServer,
    /// A separate connection for queries besides the measured calls.
    conn: MultiplexedConnection,
    _folder: TempDir,
}

impl RedisServer {
    /// Starts it with fsync always, like the embedded one.
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let folder = crate::folder::folder()?;
        let server = embedded::RedisServer::start(&DataDir::lock(folder.path())?).await?;
        let conn = redis::Client::open(server.url())?
            .get_multiplexed_async_connection()
            .await?;
        Ok(Self {
            server,
            conn,
            _folder: folder,
        })
    }

    pub(crate) fn url(&self) -> &str {
        self.server.url()
    }

    pub(crate) fn client(&self) -> anyhow::Result<redis::Client> {
        Ok(redis::Client::open(self.url())?)
    }

    pub(crate) async fn set(&self, name: &str, value: &str) -> anyhow::Result<()> {
        Ok(redis::cmd("CONFIG")
            .arg("SET")
            .arg(name)
            .arg(value)
            .exec_async(&mut self.conn.clone())
            .await?)
    }

    /// A number from INFO; `field` includes the colon, as in `used_memory:`.
    pub(crate) async fn info(&self, section: &str, field: &str) -> anyhow::Result<f64> {
        let info: String = redis::cmd("INFO")
            .arg(section)
            .query_async(&mut self.conn.clone())
            .await?;
        let value = info.lines().find_map(|line| line.strip_prefix(field));
        Ok(value
            .and_then(|value| value.trim().parse().ok())
            .unwrap_or(0.0))
    }

    /// How often scripts have run so far, and how many µs they took inside the server.
    pub(crate) async fn scripts(&self) -> anyhow::Result<Scripts> {
        let info: String = redis::cmd("INFO")
            .arg("commandstats")
            .query_async(&mut self.conn.clone())
            .await?;
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix("cmdstat_evalsha:"))
            .unwrap_or_default();
        let field = |name: &str| {
            let value = line
                .split(',')
                .find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
            value.and_then(|value| value.parse().ok()).unwrap_or(0.0)
        };
        Ok(Scripts {
            calls: field("calls"),
            micros: field("usec"),
        })
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Scripts {
    pub(crate) calls: f64,
    pub(crate) micros: f64,
}
