//! The idempotency keys of inserts, in SQL.

use async_trait::async_trait;

use super::Result;

/// The store of idempotency keys. `Store::insert` takes them; here they go.
#[async_trait]
pub trait IdempotencyKeys: Send + Sync {
    /// Removes at most `limit` keys whose window is over, the earliest first. Answers how many.
    async fn remove_expired_keys(&self, now_unix_ms: i64, limit: u32) -> Result<u64>;
}
