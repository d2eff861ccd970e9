//! Idempotency keys whose window is over.

use async_trait::async_trait;

use crate::model::KeyHash;
use crate::store::sql::{
    SqlStore,
    backend::Backend,
    dialect::Dialect,
    rows::key_hash,
    session::Session,
    statement::{Statement, lists},
};
use crate::store::{IdempotencyKeys, Result};

#[async_trait]
impl<DB: Backend> IdempotencyKeys for SqlStore<DB> {
    async fn remove_expired_keys(&self, now_unix_ms: i64, limit: u32) -> Result<u64> {
        const NAME: &str = "remove_expired_keys";
        let expired = Statement::new("SELECT hash FROM idempotency_keys ")
            .sql(&DB::Connection::by_index("idempotency_keys_expire"))
            .sql(" WHERE expires_ms <= ? ORDER BY expires_ms LIMIT ?")
            .bind(now_unix_ms)
            .bind(limit);
        let expired = self.sql.read::<(Vec<u8>,)>(NAME, expired).await?;
        let mut hashes = expired
            .into_iter()
            .map(|(hash,)| key_hash(&hash))
            .collect::<Result<Vec<_>>>()?;
        if hashes.is_empty() {
            return Ok(0);
        }
        hashes.sort_unstable();
        self.sql
            .run(NAME, (hashes, now_unix_ms), |session, (hashes, now)| {
                Box::pin(remove(session, hashes, *now))
            })
            .await
    }
}

async fn remove<S: Session>(session: &mut S, hashes: &[KeyHash], now_unix_ms: i64) -> Result<u64> {
    let mut removed = 0;
    for hashes in lists(hashes) {
        // An insert may have taken one again since the read.
        let remove =
            Statement::new("DELETE FROM idempotency_keys WHERE expires_ms <= ? AND hash IN ")
                .bind(now_unix_ms)
                .list(hashes);
        removed += session.execute(remove).await?;
    }
    Ok(removed)
}
