//! The shared connection, to one server or to a cluster. Both take the same commands and reconnect
//! in the same way.

use std::{sync::Arc, time::Duration};

use parking_lot::{Mutex, RwLock};
use redis::{
    Cmd, Pipeline, RedisError, RedisFuture, RedisResult, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cluster::ClusterClient,
    cluster_async::ClusterConnection,
};

use tokio::time::{Instant, timeout};

use super::address::{Address, CONNECT, RESPONSE, timed_out};

/// A connection to a cluster that has answered no call for this long is stuck. With redis-rs 1.8 it
/// may wait for its own lock for ever when a master dies: `refresh_slots` queues behind calls and
/// reconnections that it does not poll.
pub(super) const SILENCE: Duration = Duration::from_secs(1);

/// A pipelined connection that many callers share. Clones are the same connection. Not for commands
/// that block.
///
/// A call that gets no answer in time, or finds the connection closed, discards it, and the next
/// call connects again. Calls in flight on the old connection keep their own deadlines; calls to a
/// cluster also end when the connection answers nothing any more.
#[derive(Clone)]
pub struct Connection(Arc<Inner>);

struct Inner {
    address: Address,
    /// `None` for a single server.
    cluster: Option<ClusterClient>,
    /// How long a connection to a cluster may leave all calls unanswered.
    silence: Duration,
    /// The connection and its number; `None` if the next call must connect.
    current: RwLock<Option<(u64, Link)>>,
    /// The number of the last connection. The caller that connects holds this lock.
    connecting: tokio::sync::Mutex<u64>,
}

#[derive(Clone)]
enum Link {
    One(MultiplexedConnection),
    /// A connection to each node, which follows the slots as they move.
    Cluster(ClusterConnection, Answered),
}

/// When a connection last answered a call.
#[derive(Clone)]
struct Answered {
    last: Arc<Mutex<Instant>>,
    silence: Duration,
}

impl Answered {
    fn now(silence: Duration) -> Self {
        Self {
            last: Arc::new(Mutex::new(Instant::now())),
            silence,
        }
    }

    /// Waits for the answer of a call, unless the connection answers no call at all for `silence`.
    async fn watch<T>(&self, call: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
        let mut call = std::pin::pin!(call);
        loop {
            match timeout(self.silence, &mut call).await {
                Ok(answer) => {
                    if !answer.as_ref().is_err_and(RedisError::is_timeout) {
                        *self.last.lock() = Instant::now();
                    }
                    return answer;
                }
                Err(_) if self.last.lock().elapsed() >= self.silence => return Err(timed_out()),
                Err(_) => {}
            }
        }
    }
}

impl Connection {
    pub(super) async fn connect(address: &Address, silence: Duration) -> RedisResult<Self> {
        let connection = Self::new(address, silence)?;
        connection.get().await?;
        Ok(connection)
    }

    fn new(address: &Address, silence: Duration) -> RedisResult<Self> {
        let cluster = if address.is_cluster {
            Some(address.cluster()?)
        } else {
            None
        };
        let current = RwLock::default();
        let connecting = tokio::sync::Mutex::default();
        Ok(Self(Arc::new(Inner {
            address: address.clone(),
            cluster,
            silence,
            current,
            connecting,
        })))
    }

    async fn get(&self) -> RedisResult<(u64, Link)> {
        if let Some(current) = self.current() {
            return Ok(current);
        }
        // While no server answers, every caller ahead spends a long time trying, so do not wait for
        // all of them.
        let turn = tokio::time::timeout(CONNECT, self.0.connecting.lock()).await;
        let mut number = turn.map_err(|_| timed_out())?;
        // The previous holder of the lock may have connected.
        if let Some(current) = self.current() {
            return Ok(current);
        }
        let connected = tokio::time::timeout(CONNECT * 2, self.new_link()).await;
        let link = connected.unwrap_or_else(|_| Err(timed_out()))?;
        *number += 1;
        *self.0.current.write() = Some((*number, link.clone()));
        Ok((*number, link))
    }

    fn current(&self) -> Option<(u64, Link)> {
        self.0.current.read().clone()
    }

    async fn new_link(&self) -> RedisResult<Link> {
        match &self.0.cluster {
            Some(cluster) => {
                let conn = cluster.get_async_connection().await?;
                Ok(Link::Cluster(conn, Answered::now(self.0.silence)))
            }
            None => self
                .0
                .address
                .connect(self.0.address.seed(), Some(RESPONSE))
                .await
                .map(Link::One),
        }
    }

    /// Discards the connection if an answer shows that it is unusable. redis-rs itself would keep a
    /// connection that is silent.
    fn judge(&self, number: u64, link: &Link, answers: Result<&[Value], &RedisError>) {
        let is_over = match link {
            Link::One(_) => {
                answers.map_or_else(ends_one, |answers| answers.iter().any(is_read_only))
            }
            // The cluster client reconnects to single nodes by itself. But it keeps a connection to
            // a node that hangs, even when another node has taken its slots. So we discard all of
            // them, and the next call asks the nodes that answer.
            Link::Cluster(..) => answers.is_err_and(RedisError::is_timeout),
        };
        if is_over {
            let mut current = self.0.current.write();
            if current.as_ref().is_some_and(|(known, _)| *known == number) {
                *current = None;
            }
        }
    }
}

fn ends_one(error: &RedisError) -> bool {
    error.is_timeout() || error.is_unrecoverable_error()
}

/// The server is a replica now. Its host name may already lead to the new master.
fn is_read_only(answer: &Value) -> bool {
    matches!(answer, Value::ServerError(error) if error.code() == "READONLY")
}

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            let (number, mut link) = self.get().await?;
            let answer = match &mut link {
                Link::One(conn) => conn.req_packed_command(cmd).await,
                Link::Cluster(conn, answered) => answered.watch(conn.req_packed_command(cmd)).await,
            };
            self.judge(number, &link, answer.as_ref().map(std::slice::from_ref));
            answer
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            let (number, mut link) = self.get().await?;
            let answers = match &mut link {
                Link::One(conn) => conn.req_packed_commands(pipeline, offset, count).await,
                Link::Cluster(conn, answered) => {
                    answered
                        .watch(conn.req_packed_commands(pipeline, offset, count))
                        .await
                }
            };
            self.judge(number, &link, answers.as_deref());
            answers
        })
    }

    fn get_db(&self) -> i64 {
        self.0.address.seed().redis_settings().db()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RedisAccess;

    #[tokio::test]
    async fn a_call_ends_when_its_connection_answers_none() {
        let silence = Duration::from_millis(1);
        let answered = Answered::now(silence);
        let mut unanswered =
            std::pin::pin!(answered.watch(std::future::pending::<RedisResult<()>>()));
        // While other calls are answered, the connection is not at fault.
        *answered.last.lock() = Instant::now() + RESPONSE;
        timeout(silence * 10, &mut unanswered).await.unwrap_err();
        *answered.last.lock() = Instant::now();
        assert!(unanswered.await.unwrap_err().is_timeout());

        // A call that times out is not an answer.
        let before = *answered.last.lock();
        answered
            .watch(std::future::ready(Err::<(), _>(timed_out())))
            .await
            .unwrap_err();
        assert_eq!(*answered.last.lock(), before);
        answered.watch(std::future::ready(Ok(()))).await.unwrap();
        assert_ne!(*answered.last.lock(), before);
    }

    #[tokio::test]
    async fn nobody_waits_in_line_for_a_server_that_does_not_answer() {
        for url in ["redis+cluster://127.0.0.1:1", "redis://127.0.0.1:1"] {
            let address = Address::new(url, &RedisAccess::default()).unwrap();
            let connection = Connection::new(&address, SILENCE).unwrap();
            let _somebody_tries = connection.0.connecting.lock().await;
            let answer = tokio::time::timeout(CONNECT * 3, connection.get())
                .await
                .expect("an answer");
            assert!(answer.is_err_and(|error| error.is_timeout()));
        }
    }
}
