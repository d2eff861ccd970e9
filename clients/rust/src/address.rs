//! The servers that a client may call, and which one it calls now.

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
/// A connection without an answer to a ping is given up: this finds a peer that vanished without a
/// word.
const PING_EVERY: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest answer: one task of the largest payload that taskd can be set to take comes alone.
pub(crate) const LARGEST_ANSWER: usize = 16 << 20;

/// A connection that sends the token with each call.
pub(crate) type Taskd = InterceptedService<Channel, Token>;

/// Servers of one installation. A call that finds its server away makes the next call go to the
/// next one.
pub(crate) struct Servers {
    all: Vec<Server>,
    current: AtomicUsize,
}

struct Server {
    /// For messages.
    address: String,
    endpoint: Endpoint,
    token: Token,
    connection: Mutex<Connection>,
}

struct Connection {
    number: usize,
    taskd: Taskd,
}

/// The server and the connection that a call uses.
#[derive(Clone, Copy)]
pub(crate) struct Turn {
    server: usize,
    connection: usize,
}

impl Servers {
    /// Connects with the first call, and again when a connection broke.
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

    /// One call to the current server, which has to answer within `limit`.
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
                // A full queue is full everywhere.
                if error.may_pass() && status.code() != Code::ResourceExhausted {
                    self.move_on(turn);
                }
                error
            })
    }

    /// The answer to a call, which has to come within `limit`. If none comes, the connection may be
    /// dead.
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

    /// The current server: its turn, its address, and the connection to it.
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

    /// Makes the next call go to the next server. Others that found the same server away move on
    /// only once.
    pub(crate) fn move_on(&self, from: Turn) {
        let next = from.server.wrapping_add(1);
        self.current
            .compare_exchange(from.server, next, Ordering::Relaxed, Ordering::Relaxed)
            .ok();
    }

    /// Makes the next call to this server use another connection: nothing came over this one. Pings
    /// would find a dead connection, but only after leases have run out.
    pub(crate) fn abandon(&self, turn: Turn) {
        let server = &self.all[turn.server % self.all.len()];
        let mut connection = server.connection();
        // Others that found the same connection silent replace it only once.
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
        // Nobody panics with the connection half replaced.
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connects with the first call.
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
        // The server takes connections, and says nothing.
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
            // A ping would find the silence later.
            () = sleep(Duration::from_secs(15)) => panic!("all calls use one connection"),
        }
    }
}
