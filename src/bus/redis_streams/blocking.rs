//! A reader's own connection for blocking commands, which would delay all other calls on the shared
//! connection.
//!
//! In a cluster it connects to the master that has the keys of the bus, and follows failovers.

use std::{future::Future, pin::Pin, time::Duration};

use redis::{ErrorKind, RedisError, RedisResult, Value, aio::MultiplexedConnection};

use super::streams::generation_key;
use crate::redis_pool::{Batch, Redis};

/// How long a read waits in Redis for records.
pub(super) const BLOCK: Duration = Duration::from_secs(1);
/// The time limit of an exchange, including connecting and blocking, so that a Redis that hangs
/// becomes an error.
const DEADLINE: Duration = Duration::from_secs(9);

/// An exchange that also returns its connection, if that leads to the right server.
type Exchange = Pin<
    Box<
        dyn Future<Output = RedisResult<(Option<MultiplexedConnection>, Vec<RedisResult<Value>>)>>
            + Send,
    >,
>;

/// One exchange at a time; connects when there is no connection. `T` is the purpose of an exchange.
pub(super) struct BlockingConnection<T> {
    redis: Redis,
    conn: Option<MultiplexedConnection>,
    /// The exchange in flight. It lives here, because Redis may have counted entries as delivered
    /// when the caller's future is dropped, and their answer must still arrive.
    under_way: Option<(T, Exchange)>,
}

impl<T: Copy> BlockingConnection<T> {
    pub(super) fn new(redis: Redis) -> Self {
        Self {
            redis,
            conn: None,
            under_way: None,
        }
    }

    /// Waits for the exchange in flight, or starts the one from `make` if there is none. Cancel
    /// safe.
    pub(super) async fn exchange(
        &mut self,
        make: impl FnOnce() -> (T, Batch),
    ) -> RedisResult<(T, Vec<RedisResult<Value>>)> {
        let (purpose, exchange) = self.under_way.get_or_insert_with(|| {
            let (purpose, batch) = make();
            (
                purpose,
                Box::pin(exchange(self.redis.clone(), self.conn.take(), batch)),
            )
        });
        let purpose = *purpose;
        let done = exchange.await;
        self.under_way = None;
        let (conn, answers) = done?;
        self.conn = conn;
        Ok((purpose, answers))
    }

    /// Drops the exchange in flight, because its answer means nothing any more.
    pub(super) fn reset(&mut self) {
        self.under_way = None;
        self.conn = None;
    }
}

async fn exchange(
    redis: Redis,
    conn: Option<MultiplexedConnection>,
    batch: Batch,
) -> RedisResult<(Option<MultiplexedConnection>, Vec<RedisResult<Value>>)> {
    let answered = async {
        let mut conn = match conn {
            Some(conn) => conn,
            None => redis.dedicated(&generation_key(&redis)).await?,
        };
        let answers = batch.run(&mut conn).await?;
        let is_elsewhere = answers
            .iter()
            .filter_map(|answer| answer.as_ref().err())
            .any(is_elsewhere);
        Ok(((!is_elsewhere).then_some(conn), answers))
    };
    tokio::time::timeout(DEADLINE, answered)
        .await
        .unwrap_or_else(|_| Err(no_answer()))
}

/// True if the server is not the master of the bus any more, or not yet.
fn is_elsewhere(error: &RedisError) -> bool {
    error.is_cluster_error()
        || matches!(
            error.code(),
            Some("READONLY" | "UNBLOCKED" | "MASTERDOWN" | "LOADING")
        )
}

fn no_answer() -> RedisError {
    (ErrorKind::Io, "no answer in time", format!("{DEADLINE:?}")).into()
}
