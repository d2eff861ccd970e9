//! Pooled connections and transactions with time limits, so that a server that stops responding
//! cannot block the pool.
//!
//! Each statement has a time limit, and a connection that exceeds it is closed. Returning a
//! connection to the pool has a limit, too: sqlx pings the connection at that point and waits
//! without a limit, and a connection that waits forever would be missing from the pool forever.

use std::{
    ops::{Deref, DerefMut},
    time::Duration,
};

use sqlx::{MySql, MySqlConnection, Pool, pool::PoolConnection};

use super::{error, session};
use crate::store::Result;

/// How long returning a connection to the pool may take. After that, the connection is closed, and
/// the pool may open another.
const RETURN_WITHIN: Duration = Duration::from_secs(5);

/// A connection of the pool, to which it returns when dropped.
pub(super) struct Pooled {
    /// `None` only while it is being dropped.
    connection: Option<PoolConnection<MySql>>,
    in_transaction: bool,
    /// The server does not accept writes, so the connection is not kept. The next one may find a
    /// server that does.
    is_stale: bool,
}

impl Pooled {
    pub(super) async fn of(pool: &Pool<MySql>) -> sqlx::Result<Self> {
        let mut connection = pool.acquire().await?;
        // Otherwise sqlx would return a dropped connection to the pool by itself, without a time
        // limit.
        connection.close_on_drop();
        Ok(Self {
            connection: Some(connection),
            in_transaction: false,
            is_stale: false,
        })
    }

    /// An idle connection, if there is one.
    pub(super) fn free(pool: &Pool<MySql>) -> Option<Self> {
        let mut connection = pool.try_acquire()?;
        connection.close_on_drop();
        Some(Self {
            connection: Some(connection),
            in_transaction: false,
            is_stale: false,
        })
    }

    /// Closes the connection instead of keeping it.
    pub(super) fn close(mut self) {
        self.is_stale = true;
    }

    /// Passes through a response of the server. If it is an error that says that the server is not
    /// the primary, the connection will be closed.
    pub(super) fn checked<T>(&mut self, answer: Result<T>) -> Result<T> {
        self.is_stale |= answer.as_ref().is_err_and(error::is_not_primary);
        answer
    }
}

impl Deref for Pooled {
    type Target = MySqlConnection;

    fn deref(&self) -> &MySqlConnection {
        self.connection.as_ref().expect("is there until the drop")
    }
}

impl DerefMut for Pooled {
    fn deref_mut(&mut self) -> &mut MySqlConnection {
        self.connection.as_mut().expect("is there until the drop")
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let (Some(connection), Ok(runtime)) = (
            self.connection.take(),
            tokio::runtime::Handle::try_current(),
        ) else {
            return;
        };
        if self.is_stale {
            // sqlx closes the connection.
            return;
        }
        drop(runtime.spawn(return_to_pool(connection, self.in_transaction)));
    }
}

async fn return_to_pool(mut connection: PoolConnection<MySql>, in_transaction: bool) {
    let returned = async {
        if in_transaction {
            // A connection whose ROLLBACK fails is in an unknown state, so it is closed.
            session::command(&mut connection, "ROLLBACK")
                .await
                .map_err(|error| error.to_string())?;
        }
        connection.return_to_pool().await;
        Ok::<_, String>(())
    };
    let returned = tokio::time::timeout(RETURN_WITHIN, returned)
        .await
        .unwrap_or_else(|late| Err(late.to_string()));
    if let Err(error) = returned {
        tracing::debug!("a connection is closed instead of kept: {error}");
    }
}

/// A transaction. It is rolled back if it is dropped before the commit.
pub(super) struct Tx(Pooled);

impl Tx {
    /// Begins a transaction. One of an era locks the era first, when it holds nothing for which
    /// another transaction could wait.
    pub(super) async fn begin(connection: Pooled, is_in_era: bool) -> Result<Self> {
        // Both statements in one exchange.
        const IN_ERA: &str = "START TRANSACTION; \
             SELECT CAST(value AS SIGNED) INTO @taskd_era FROM meta WHERE name = 'era' LOCK IN SHARE MODE";
        let begin = match is_in_era {
            true => IN_ERA,
            false => "START TRANSACTION",
        };
        let mut tx = Self(connection);
        // Set before BEGIN, because a caller that gives up during BEGIN does not know whether it
        // took effect.
        tx.0.in_transaction = true;
        let begun = session::command(&mut tx, begin).await;
        tx.0.checked(begun)?;
        Ok(tx)
    }

    /// Commits if the statements succeeded. Returns their result.
    pub(super) async fn end<T>(mut self, done: Result<T>) -> Result<T> {
        let done = self.0.checked(done)?;
        let committed = session::command(&mut self, "COMMIT").await;
        self.0.checked(committed)?;
        self.0.in_transaction = false;
        Ok(done)
    }
}

impl Deref for Tx {
    type Target = MySqlConnection;

    fn deref(&self) -> &MySqlConnection {
        &self.0
    }
}

impl DerefMut for Tx {
    fn deref_mut(&mut self) -> &mut MySqlConnection {
        &mut self.0
    }
}
