//! Pool connections and transactions with time limits, so that a server that falls silent cannot block the pool.
//!
//! Each statement has a limit; a connection that exceeds it is closed. So does the return to the pool. sqlx pings a
//! connection there and waits without a limit, and a connection that waits for ever is missing from the pool for ever.

use std::{
    future::Future,
    io,
    ops::{Deref, DerefMut},
    time::Duration,
};

use sqlx::{Pool, pool::PoolConnection};

use super::{Backend, Dialect, Session};

/// How long the return to the pool may take. Then the connection is closed, and the pool may open another.
const RETURN_WITHIN: Duration = Duration::from_secs(5);

/// The answer of the server, if it comes within `limit`.
pub(super) async fn answered<T>(
    limit: Option<Duration>,
    answer: impl Future<Output = sqlx::Result<T>>,
) -> sqlx::Result<T> {
    let Some(limit) = limit else { return answer.await };
    let silent = || io::Error::new(io::ErrorKind::TimedOut, format!("no answer from the database within {limit:?}"));
    tokio::time::timeout(limit, answer).await.unwrap_or_else(|_| Err(silent().into()))
}

/// A connection of the pool, which returns to it when dropped.
pub(super) struct Pooled<DB: Backend> {
    /// `None` only while it is dropped.
    connection: Option<PoolConnection<DB>>,
    in_transaction: bool,
}

impl<DB: Backend> Pooled<DB> {
    pub(super) async fn of(pool: &Pool<DB>) -> sqlx::Result<Self> {
        let mut connection = pool.acquire().await?;
        // Otherwise sqlx would return a dropped connection by itself, without a limit.
        connection.close_on_drop();
        Ok(Self { connection: Some(connection), in_transaction: false })
    }
}

impl<DB: Backend> Deref for Pooled<DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &DB::Connection {
        self.connection.as_ref().expect("is there until the drop")
    }
}

impl<DB: Backend> DerefMut for Pooled<DB> {
    fn deref_mut(&mut self) -> &mut DB::Connection {
        self.connection.as_mut().expect("is there until the drop")
    }
}

impl<DB: Backend> Drop for Pooled<DB> {
    fn drop(&mut self) {
        let (Some(connection), Ok(runtime)) = (self.connection.take(), tokio::runtime::Handle::try_current()) else {
            return;
        };
        drop(runtime.spawn(give_back(connection, self.in_transaction)));
    }
}

async fn give_back<DB: Backend>(mut connection: PoolConnection<DB>, in_transaction: bool) {
    let back = async {
        if in_transaction {
            // A connection whose ROLLBACK fails is in an unknown state: it is closed.
            connection.command("ROLLBACK").await?;
        }
        connection.return_to_pool().await;
        Ok(())
    };
    let limit = DB::Connection::ANSWER_WITHIN.map(|_| RETURN_WITHIN);
    if let Err(error) = answered(limit, back).await {
        tracing::debug!("a connection is closed instead of kept: {error}");
    }
}

/// A transaction, rolled back when dropped before its commit.
pub(super) struct Tx<DB: Backend>(Pooled<DB>);

impl<DB: Backend> Tx<DB> {
    pub(super) async fn begin(pool: &Pool<DB>) -> sqlx::Result<Self> {
        let mut tx = Self(Pooled::of(pool).await?);
        // Set first: a caller that gives up while BEGIN is in flight does not know whether it took effect.
        tx.0.in_transaction = true;
        tx.command(DB::Connection::BEGIN).await?;
        Ok(tx)
    }

    pub(super) async fn commit(mut self) -> sqlx::Result<()> {
        self.command("COMMIT").await?;
        self.0.in_transaction = false;
        Ok(())
    }
}

impl<DB: Backend> Deref for Tx<DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &DB::Connection {
        &self.0
    }
}

impl<DB: Backend> DerefMut for Tx<DB> {
    fn deref_mut(&mut self) -> &mut DB::Connection {
        &mut self.0
    }
}
