//! A reader's own connection: its commands block, which on the shared one would hold up everybody. In a cluster it leads to the master of
//! the bus, and to the next one when that has changed.

use std::{future::Future, pin::Pin, time::Duration};

use redis::{ErrorKind, RedisError, RedisResult, Value, aio::MultiplexedConnection};

use crate::redis_pool::{Batch, Redis};

/// How long a read waits in Redis for something to come.
pub(super) const BLOCK: Duration = Duration::from_secs(1);
/// How long an exchange may take, connecting and blocking included. A Redis that hangs becomes an error, not a wait for ever.
const DEADLINE: Duration = Duration::from_secs(9);

/// The connection is kept when it leads to the right server.
type Exchange =
    Pin<Box<dyn Future<Output = RedisResult<(Option<MultiplexedConnection>, Vec<RedisResult<Value>>)>> + Send>>;

/// One exchange at a time; connects when there is no connection. `T` says what an exchange was for.
pub(super) struct Line<T> {
    redis: Redis,
    conn: Option<MultiplexedConnection>,
    /// Lives here and not in the caller's future: when that is dropped, Redis may already have counted entries as delivered,
    /// and their answer must still reach us.
    under_way: Option<(T, Exchange)>,
}

impl<T: Copy> Line<T> {
    pub(super) fn new(redis: Redis) -> Self {
        Self { redis, conn: None, under_way: None }
    }

    /// The answer to what is under way, or else to what `make` asks. Cancel safe.
    pub(super) async fn exchange(
        &mut self,
        make: impl FnOnce() -> (T, Batch),
    ) -> RedisResult<(T, Vec<RedisResult<Value>>)> {
        let (purpose, exchange) = self.under_way.get_or_insert_with(|| {
            let (purpose, batch) = make();
            (purpose, Box::pin(exchange(self.redis.clone(), self.conn.take(), batch)))
        });
        let purpose = *purpose;
        let done = exchange.await;
        self.under_way = None;
        let (conn, answers) = done?;
        self.conn = conn;
        Ok((purpose, answers))
    }

    /// Forgets what is under way; its answer would come too late to mean anything.
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
            None => redis.dedicated(&super::generation_key(&redis)).await?,
        };
        let answers = batch.run(&mut conn).await?;
        let is_elsewhere = answers.iter().filter_map(|answer| answer.as_ref().err()).any(is_elsewhere);
        Ok(((!is_elsewhere).then_some(conn), answers))
    };
    tokio::time::timeout(DEADLINE, answered).await.unwrap_or_else(|_| Err(no_answer()))
}

/// The server is not the master of the bus any more, or on its way to become it.
fn is_elsewhere(error: &RedisError) -> bool {
    error.is_cluster_error() || matches!(error.code(), Some("READONLY" | "UNBLOCKED" | "MASTERDOWN" | "LOADING"))
}

fn no_answer() -> RedisError {
    (ErrorKind::Io, "no answer in time", format!("{DEADLINE:?}")).into()
}
