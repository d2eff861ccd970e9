//! Connections of the pool, and transactions on them, that cannot hold anything up when their server falls silent.
//!
//! Each statement has a limit, after which its connection is given up. So has a connection's way back into the pool: sqlx waits there for an
//! answer to a ping, without a limit, and a connection that waits for ever is one less in the pool for ever.

use std::{
    future::Future,
    io,
    ops::{Deref, DerefMut},
    time::Duration,
};

use sqlx::{Pool, pool::PoolConnection};

use super::{Backend, Dialect, Session};

/// How long a connection may take on its way back into the pool; then it is closed, and another may take its place.
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

/// A connection out of the pool. Goes back when it is dropped.
pub(super) struct Pooled<DB: Backend> {
    /// `None` only while it is dropped.
    connection: Option<PoolConnection<DB>>,
    in_transaction: bool,
}

impl<DB: Backend> Pooled<DB> {
    pub(super) async fn of(pool: &Pool<DB>) -> sqlx::Result<Self> {
        let mut connection = pool.acquire().await?;
        // Without this a drop is sqlx's own way back. Ours is in `drop`.
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
            // Where that fails, nobody knows what it would do next: it is closed.
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

/// A transaction. Dropped before its commit it is rolled back.
pub(super) struct Tx<DB: Backend>(Pooled<DB>);

impl<DB: Backend> Tx<DB> {
    pub(super) async fn begin(pool: &Pool<DB>) -> sqlx::Result<Self> {
        let mut tx = Self(Pooled::of(pool).await?);
        // Noted before: a caller that gives up in between does not know whether it has begun.
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
