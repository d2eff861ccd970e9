//! GET requests to the HTTP port of a taskd, over a new connection each time.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use axum::body::{Body, Bytes, to_bytes};
use hyper::{Request, StatusCode, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, task::JoinSet};
use url::Url;

const MOST_BYTES: usize = 64 << 20;
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// An HTTP port.
#[derive(Clone)]
pub(super) struct HttpPort {
    pub(super) url: String,
    host: String,
    /// The flag that names it.
    flag: &'static str,
}

impl HttpPort {
    pub(super) fn new(flag: &'static str, url: &str) -> anyhow::Result<Self> {
        let wrong = || format!("{flag} {url:?} is not a URL; write http://host:7600");
        let parsed = Url::parse(url).with_context(wrong)?;
        let host = parsed.host_str().with_context(wrong)?;
        ensure!(parsed.scheme() == "http", "{flag} {url:?}: taskd speaks http:// only");
        let port = parsed.port_or_known_default().with_context(wrong)?;
        Ok(Self { url: url.to_owned(), host: format!("{host}:{port}"), flag })
    }

    /// The status and the body of the answer.
    pub(super) async fn get(&self, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        match tokio::time::timeout(ANSWER_TIMEOUT, self.call(path)).await {
            Ok(answer) => answer,
            Err(_) => bail!("{}{path} does not answer", self.url),
        }
    }

    async fn call(&self, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        let unreachable = || format!("cannot reach taskd's HTTP at {}; {} names another place", self.url, self.flag);
        let socket = TcpStream::connect(&self.host).await.with_context(unreachable)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await.with_context(unreachable)?;
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let request = Request::get(path).header(header::HOST, &self.host).body(Body::empty())?;
        let answer = sender.send_request(request).await.with_context(unreachable)?;
        let status = answer.status();
        let body = to_bytes(Body::new(answer.into_body()), MOST_BYTES).await.with_context(unreachable)?;
        Ok((status, body))
    }
}
