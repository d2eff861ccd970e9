//! The processes that live: each writes a value that expires unless it writes the next one.

use redis::AsyncCommands as _;

use super::{Coordination, Result};
use crate::model::Presence;

/// How long a process counts as living after its last word.
const LIVES_MS: i64 = 15_000;
/// The processes that are listed.
const MOST: isize = 1_000;
/// Values that are read at once.
const AT_ONCE: usize = 50;

impl Coordination {
    /// Tells the others of this process.
    pub async fn announce(&self, presence: &Presence) -> Result<()> {
        let value = serde_json::to_string(presence).unwrap_or_default();
        let now = self.clock.now_unix_ms();
        let living = self.living_key();
        let mut pipe = redis::pipe();
        pipe.atomic()
            .cmd("SET")
            .arg(self.presence_key(&presence.process))
            .arg(value)
            .arg("PX")
            .arg(LIVES_MS)
            .ignore()
            .zadd(&living, &presence.process, now + LIVES_MS)
            .ignore()
            .zrembyscore(&living, "-inf", format!("({now}"))
            .ignore()
            .pexpire(&living, 2 * LIVES_MS)
            .ignore();
        Ok(pipe.query_async(&mut self.redis.conn()).await?)
    }

    /// Takes a process off the list.
    pub async fn leave(&self, process: &str) -> Result<()> {
        let mut pipe = redis::pipe();
        pipe.atomic()
            .del(self.presence_key(process))
            .ignore()
            .zrem(self.living_key(), process)
            .ignore();
        Ok(pipe.query_async(&mut self.redis.conn()).await?)
    }

    /// The processes that live.
    pub async fn processes(&self) -> Result<Vec<Presence>> {
        let mut conn = self.redis.conn();
        let now = self.clock.now_unix_ms();
        let living: Vec<String> = conn
            .zrangebyscore_limit(self.living_key(), now, "+inf", 0, MOST)
            .await?;
        let mut processes = Vec::with_capacity(living.len());
        for some in living.chunks(AT_ONCE) {
            let keys: Vec<String> = some.iter().map(|name| self.presence_key(name)).collect();
            let values: Vec<Option<String>> =
                redis::cmd("MGET").arg(&keys).query_async(&mut conn).await?;
            // A later version may write what this one cannot read.
            let read = |value: String| serde_json::from_str(&value).ok();
            processes.extend(values.into_iter().flatten().filter_map(read));
        }
        Ok(processes)
    }

    fn living_key(&self) -> String {
        format!("{}:{{processes}}:living", self.redis.prefix())
    }

    fn presence_key(&self, process: &str) -> String {
        format!("{}:{{processes}}:of:{process}", self.redis.prefix())
    }
}
