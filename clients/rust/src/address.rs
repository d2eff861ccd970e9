//! The servers that a client may call, and which one it calls now.

use std::{
    future::Future,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use tonic::{
    Code, Response, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, ClientTlsConfig, Endpoint},
};

use crate::{error::Error, token::Token};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection without an answer to a ping is given up: this finds a peer that vanished without a word.
const PING_EVERY: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest answer: one task of the largest payload that taskd can be set to take comes alone.
pub(crate) const LARGEST_ANSWER: usize = 16 << 20;

/// A connection that sends the token with each call.
pub(crate) type Taskd = InterceptedService<Channel, Token>;

/// Servers of one installation. A call that finds its server away makes the next call go to the next one.
pub(crate) struct Servers {
    all: Vec<Server>,
    current: AtomicUsize,
}

struct Server {
    /// For messages.
    address: String,
    taskd: Taskd,
}

impl Servers {
    /// Connects with the first call, and again when a connection broke.
    pub(crate) fn new(addresses: &[String], token: &Token, tls: &ClientTlsConfig) -> Result<Self, Error> {
        if addresses.is_empty() {
            return Err(Error::Options("no address of taskd is given; write http://host:7601".to_owned()));
        }
        let all = addresses.iter().map(|address| Server::new(address, token, tls)).collect::<Result<_, _>>()?;
        Ok(Self { all, current: AtomicUsize::new(0) })
    }

    /// One call to the current server, which has to answer within `limit`.
    pub(crate) async fn call<T, F>(&self, limit: Duration, call: impl FnOnce(Taskd) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let (current, address, taskd) = self.pick();
        let answer = match tokio::time::timeout(limit, call(taskd)).await {
            Ok(answer) => answer,
            Err(_) => Err(Status::deadline_exceeded("no answer in time")),
        };
        answer.map(Response::into_inner).map_err(|status| {
            let error = Error::of(&status, address);
            // A full queue is full everywhere.
            if error.may_pass() && status.code() != Code::ResourceExhausted {
                self.move_on(current);
            }
            error
        })
    }

    /// The current server: its turn, its address, and the connection to it.
    pub(crate) fn pick(&self) -> (usize, &str, Taskd) {
        let current = self.current.load(Ordering::Relaxed);
        let server = &self.all[current % self.all.len()];
        (current, &server.address, server.taskd.clone())
    }

    /// Makes the next call go to the next server. Others that found the same server away move on only once.
    pub(crate) fn move_on(&self, from: usize) {
        let next = from.wrapping_add(1);
        self.current.compare_exchange(from, next, Ordering::Relaxed, Ordering::Relaxed).ok();
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
        let address = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
        let shown = without_credentials(&address);
        let wrong = |_| Error::Options(format!("{shown:?} is not a URL; write http://host:7601"));
        let mut endpoint = Endpoint::from_shared(address.clone())
            .map_err(wrong)?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_TIMEOUT)
            .tcp_nodelay(true);
        if address.starts_with("https://") {
            let unusable = |error| Error::Options(format!("cannot use these certificates: {error}"));
            endpoint = endpoint.tls_config(tls.clone()).map_err(unusable)?;
        }
        let taskd = InterceptedService::new(endpoint.connect_lazy(), token.clone());
        Ok(Self { address: shown, taskd })
    }
}

fn without_credentials(address: &str) -> String {
    match (address.split_once("://"), address.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://***@{host}"),
        _ => address.to_owned(),
    }
}
