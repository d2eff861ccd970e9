//! The connections of a store, and the operations that run on them.
//!
//! Each operation has a name, under which the metrics count its duration and its retries.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use sqlx::{ConnectOptions, Connection, Pool};

use super::{
    backend::Backend,
    dialect::Dialect,
    pooled::{Pooled, Tx},
    retry::repeating,
    session::{Columns, Session},
    statement::Statement,
};
use crate::{
    store::{Error, Result},
    telemetry::metrics,
};

/// The longest that one attempt to connect may take, when it looks for the reason that the pool has no connection.
const ONE_CONNECT: Duration = Duration::from_secs(2);

pub(super) struct Pools<DB: sqlx::Database> {
    pub(super) writers: Pool<DB>,
    pub(super) readers: Pool<DB>,
}

impl<DB: Backend> Pools<DB> {
    /// Runs `operation` in one transaction, again as a whole after an error that may pass. `operation` commits.
    pub(super) async fn run<T, Fut>(&self, name: &'static str, operation: impl Fn(Tx<DB>) -> Fut) -> Result<T>
    where
        Fut: Future<Output = Result<T>>,
    {
        let began = Instant::now();
        let attempt = || async { operation(Tx::begin(connection(&self.writers).await?).await?).await };
        let done = repeating(name, attempt).await;
        metrics::sql_operation(name, began.elapsed());
        done
    }

    /// Runs one statement that changes nothing, as part of the operation `name`.
    pub(super) async fn read<T: Columns>(&self, name: &'static str, statement: Statement<'_>) -> Result<Vec<T>> {
        let began = Instant::now();
        let attempt = || async { connection(&self.readers).await?.fetch(statement.clone()).await };
        let done = repeating(name, attempt).await;
        metrics::sql_operation(name, began.elapsed());
        done
    }

    pub(super) async fn close(&self) {
        self.readers.close().await;
        self.writers.close().await;
    }
}

async fn connection<DB: Backend>(pool: &Pool<DB>) -> Result<Pooled<DB>> {
    match Pooled::of(pool).await {
        Err(sqlx::Error::PoolTimedOut) => Err(why_none(pool).await),
        acquired => acquired.map_err(DB::Connection::error),
    }
}

/// Finds out why the pool had no connection to give. The pool does not tell, so this tries one of its own.
async fn why_none<DB: Backend>(pool: &Pool<DB>) -> Error {
    let options = pool.connect_options();
    match tokio::time::timeout(ONE_CONNECT, options.connect()).await {
        Ok(Ok(connection)) => {
            // The server accepts connections, which was the question: an error of the close does not matter.
            drop(connection.close().await);
            let (connections, waited) = (pool.options().get_max_connections(), pool.options().get_acquire_timeout());
            Error::Busy { connections, waited, hint: DB::Connection::BUSY_HINT }
        }
        Ok(Err(error)) => DB::Connection::error(error),
        Err(_) => Error::timed_out(),
    }
}
