//! The servers that a client may call, and the one that it currently uses.

use std::{
    future::Future,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tonic::{
    Code, Response, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, ClientTlsConfig, Endpoint},
};

use crate::{error::Error, token::Token};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Keepalive pings. A connection whose ping is not answered is dropped; this detects a peer that
/// vanished without closing it.
const PING_EVERY: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest answer: taskd sends a task with the largest payload that it can be configured to
/// accept in an answer of its own.
pub(crate) const LARGEST_ANSWER: usize = 16 << 20;

/// A connection that adds the token to each call.
pub(crate) type Taskd = InterceptedService<Channel, Token>;

/// The servers of one installation. If a call finds its server unavailable, the next call goes to
/// the next server.
pub(crate) struct Servers {
    all: Vec<Server>,
    current: AtomicUsize,
}

struct Server {
    /// Without credentials, for messages.
    address: String,
    endpoint: Endpoint,
    token: Token,
    connection: Mutex<Connection>,
}

struct Connection {
    number: usize,
    taskd: Taskd,
}

/// The server and the connection that a call used.
#[derive(Clone, Copy)]
pub(crate) struct Turn {
    server: usize,
    connection: usize,
}

impl Servers {
    /// Connects lazily: with the first call, and again after a connection breaks.
    pub(crate) fn new(
        addresses: &[String],
        token: &Token,
        tls: &ClientTlsConfig,
    ) -> Result<Self, Error> {
        if addresses.is_empty() {
            return Err(Error::Options(
                "no address of taskd is given; write http://host:7601".to_owned(),
            ));
        }
        let all = addresses
            .iter()
            .map(|address| Server::new(address, token, tls))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            all,
            current: AtomicUsize::new(0),
        })
    }

    /// The addresses, for messages.
    pub(crate) fn addresses(&self) -> Vec<&str> {
        self.all
            .iter()
            .map(|server| server.address.as_str())
            .collect()
    }

    /// Makes one call to the current server, with a timeout of `limit`.
    pub(crate) async fn call<T, F>(
        &self,
        limit: Duration,
        call: impl FnOnce(Taskd) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let (turn, address, taskd) = self.pick();
        self.within(limit, turn, call(taskd))
            .await
            .map(Response::into_inner)
            .map_err(|status| {
                let error = Error::of(&status, address);
                // A queue that is full is full on every server.
                if error.may_pass() && status.code() != Code::ResourceExhausted {
                    self.move_on(turn);
                }
                error
            })
    }

    /// Awaits a call, at most for `limit`. After a timeout, the connection is considered dead and
    /// gets replaced.
    pub(crate) async fn within<T>(
        &self,
        limit: Duration,
        turn: Turn,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
            self.abandon(turn);
            Err(Status::deadline_exceeded("no answer in time"))
        })
    }

    /// Returns the current server: the turn, the address and the connection.
    pub(crate) fn pick(&self) -> (Turn, &str, Taskd) {
        let current = self.current.load(Ordering::Relaxed);
        let server = &self.all[current % self.all.len()];
        let connection = server.connection();
        (
            Turn {
                server: current,
                connection: connection.number,
            },
            &server.address,
            connection.taskd.clone(),
        )
    }

    /// Makes the next call go to the next server. Does nothing if another caller has already moved
    /// on from the same server.
    pub(crate) fn move_on(&self, from: Turn) {
        let next = from.server.wrapping_add(1);
        self.current
            .compare_exchange(from.server, next, Ordering::Relaxed, Ordering::Relaxed)
            .ok();
    }

    /// Makes the next call to this server use a new connection, because this one was silent. Pings
    /// would also detect a dead connection, but only after leases have expired.
    pub(crate) fn abandon(&self, turn: Turn) {
        let server = &self.all[turn.server % self.all.len()];
        let mut connection = server.connection();
        // Other callers that found the same connection silent must not replace it a second time.
        if connection.number == turn.connection {
            let taskd = connect(&server.endpoint, &server.token);
            *connection = Connection {
                number: turn.connection.wrapping_add(1),
                taskd,
            };
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.all.len()
    }

    /// The server that the next call goes to.
    pub(crate) fn current(&self) -> &str {
        &self.all[self.current.load(Ordering::Relaxed) % self.all.len()].address
    }
}

impl Server {
    fn new(address: &str, token: &Token, tls: &ClientTlsConfig) -> Result<Self, Error> {
        let address = if address.contains("://") {
            address.to_owned()
        } else {
            format!("http://{address}")
        };
        let shown = without_credentials(&address);
        let wrong = |_| Error::Options(format!("{shown:?} is not a URL; write http://host:7601"));
        let mut endpoint = Endpoint::from_shared(address.clone())
            .map_err(wrong)?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_TIMEOUT)
            .tcp_nodelay(true);
        if address.starts_with("https://") {
            let unusable =
                |error| Error::Options(format!("cannot use these certificates: {error}"));
            endpoint = endpoint.tls_config(tls.clone()).map_err(unusable)?;
        }
        let connection = Mutex::new(Connection {
            number: 0,
            taskd: connect(&endpoint, token),
        });
        Ok(Self {
            address: shown,
            endpoint,
            token: token.clone(),
            connection,
        })
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // Nothing panics while the connection is half replaced.
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connects lazily, with the first call.
fn connect(endpoint: &Endpoint, token: &Token) -> Taskd {
    InterceptedService::new(endpoint.connect_lazy(), token.clone())
}

fn without_credentials(address: &str) -> String {
    match (address.split_once("://"), address.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://***@{host}"),
        _ => address.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use tokio::{net::TcpListener, time::sleep};

    use super::*;
    use crate::pb::{GetTasksRequest, tasks_client::TasksClient};

    #[tokio::test]
    async fn behind_a_call_without_an_answer_the_next_one_connects_anew() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let servers = Servers::new(&[address], &Token::default(), &ClientTlsConfig::new()).unwrap();
        // The server accepts connections, but never answers.
        let connections = async {
            let _first = listener.accept().await.unwrap();
            listener.accept().await.unwrap();
        };
        let calls = async {
            loop {
                let get = |taskd| async move {
                    TasksClient::new(taskd)
                        .get_tasks(GetTasksRequest::default())
                        .await
                };
                servers
                    .call(Duration::from_millis(100), get)
                    .await
                    .unwrap_err();
            }
        };
        tokio::select! {
            () = connections => {}
            () = calls => {}
            // A ping would detect the silence later than this.
            () = sleep(Duration::from_secs(15)) => panic!("all calls use one connection"),
        }
    }
}
