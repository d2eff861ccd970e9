//! Requests to the HTTP port of a taskd, over a new connection each time.

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow, bail};
use axum::body::{Body, Bytes, to_bytes};
use backon::BackoffBuilder as _;
use futures::FutureExt as _;
use hyper::{HeaderMap, Method, Request, StatusCode, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde::Deserialize;
use tokio::{net::TcpStream, task::JoinSet, time::timeout};
use tokio_rustls::TlsConnector;
use url::Url;

use super::{
    address::{Server, Unreachable, WAITS},
    trust::Trust,
};
use crate::{config::without_password, ingress::http::Ports, model::printable};

const MOST_BYTES: usize = 64 << 20;
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

impl Server {
    pub(super) fn port(&self) -> anyhow::Result<HttpPort> {
        let first = self.url.split(',').next().unwrap_or_default();
        let port = HttpPort::new(first, self.trust.clone())?;
        Ok(HttpPort {
            deadline: self.waiting.deadline(),
            ..port
        })
    }
}

/// The content type of a body, and the body.
pub(super) type TypedBody = (&'static str, Bytes);

/// An HTTP port.
#[derive(Clone)]
pub(super) struct HttpPort {
    /// For messages, without a password.
    pub(super) url: String,
    host: String,
    /// The host without its port.
    name: String,
    trust: Trust,
    is_tls: bool,
    /// When to stop retrying while the port cannot be reached. `None`: there are no retries.
    deadline: Option<Instant>,
}

impl HttpPort {
    pub(super) fn new(url: &str, trust: Trust) -> anyhow::Result<Self> {
        let shown = without_password(url);
        let wrong =
            || format!("--server (TASKD_URL) {shown:?} is not a URL; write http://host:7600");
        trust.suits(url)?;
        let parsed = Url::parse(url).with_context(wrong)?;
        let host = parsed.host_str().with_context(wrong)?;
        let is_tls = parsed.scheme() == "https";
        let port = parsed.port_or_known_default().with_context(wrong)?;
        let name = host.trim_matches(['[', ']']).to_owned();
        Ok(Self {
            url: shown,
            host: format!("{host}:{port}"),
            name,
            trust,
            is_tls,
            deadline: None,
        })
    }

    /// Returns the message for an answer that taskd would not give.
    pub(super) fn describe_other(&self) -> String {
        format!(
            "{} does not answer as taskd does; is that taskd's HTTP port?",
            self.url
        )
    }

    pub(super) async fn get(&self, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        self.send(Method::GET, path, None).await
    }

    /// Returns the status and the body of the answer. If taskd cannot be reached, is not ready yet or
    /// cuts the connection on which it was asked, retries for as long as `--wait-for-server` allows.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<TypedBody>,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let mut waits = WAITS.build();
        loop {
            let call = self.answer(method.clone(), path, body.clone());
            let answer = match tokio::time::timeout(ANSWER_TIMEOUT, call).await {
                Ok(answer) => answer.map(|(status, _, body)| (status, body)),
                Err(_) => bail!("{}{path} does not answer", self.url),
            };
            let may_pass = match &answer {
                Ok((status, _)) => *status == StatusCode::SERVICE_UNAVAILABLE,
                // Of anything but a question nobody knows whether it was carried out.
                Err(error) => {
                    error.is::<Unreachable>() || method == Method::GET && was_cut_off(error)
                }
            };
            if !may_pass
                || self
                    .deadline
                    .is_none_or(|deadline| Instant::now() >= deadline)
            {
                return answer;
            }
            tokio::time::sleep(waits.next().unwrap_or_default()).await;
        }
    }

    /// Returns the ports that taskd names in its answer to `GET /`, or `None` if the server does
    /// not speak HTTP/1. It may then be the gRPC port.
    pub(super) async fn ports(&self) -> anyhow::Result<Option<Ports>> {
        let (_, headers, body) =
            match timeout(ANSWER_TIMEOUT, self.answer(Method::GET, "/", None)).await {
                Ok(Err(error)) if error.is::<NotHttp>() => return Ok(None),
                Ok(answer) => answer?,
                // A server that is only slow may answer later, and then name its ports.
                Err(_) => return Err(Unreachable::at(&self.url, "no answer").into()),
            };
        if let Some(ports) = Ports::of(&headers) {
            return Ok(Some(ports));
        }
        #[derive(Deserialize)]
        struct Problem {
            detail: String,
        }
        match serde_json::from_slice::<Problem>(&body) {
            // For example, the host name is not one of `allowed_hosts`.
            Ok(problem) => bail!("{}: {}", self.url, printable(&problem.detail)),
            Err(_) => bail!(
                "{} does not answer as taskd does; --server (TASKD_URL) names taskd (port 7600)",
                self.url
            ),
        }
    }

    async fn answer(
        &self,
        method: Method,
        path: &str,
        body: Option<TypedBody>,
    ) -> anyhow::Result<(StatusCode, HeaderMap, Bytes)> {
        self.connect().await?.answer(method, path, body).await
    }

    pub(super) async fn connect(&self) -> anyhow::Result<Connection<'_>> {
        let not_http = || NotHttp(self.url.clone());
        let socket = TcpStream::connect(&self.host).await;
        let socket =
            socket.map_err(|error| anyhow::Error::new(Unreachable::at(&self.url, error)))?;
        let mut driver = JoinSet::new();
        let sender = if self.is_tls {
            let name = ServerName::try_from(self.name.clone())
                .with_context(|| format!("{} has no name of a server", self.url))?;
            let connector = TlsConnector::from(self.trust.over_http()?);
            let encrypted = connector.connect(name, socket).await;
            let encrypted =
                encrypted.map_err(|error| match self.trust.failure(&self.url, &error) {
                    Some(why) => anyhow!(why),
                    None => anyhow::Error::from(error)
                        .context(format!("no TLS connection with {}", self.url)),
                })?;
            let (sender, connection) = http1::handshake(TokioIo::new(encrypted))
                .await
                .with_context(not_http)?;
            driver.spawn(connection);
            sender
        } else {
            let (sender, connection) = http1::handshake(TokioIo::new(socket))
                .await
                .with_context(not_http)?;
            driver.spawn(connection);
            sender
        };
        Ok(Connection {
            port: self,
            sender,
            driver,
            is_used: false,
        })
    }
}

/// A connection with an HTTP port, for one request after the other.
pub(super) struct Connection<'p> {
    port: &'p HttpPort,
    sender: http1::SendRequest<Body>,
    driver: JoinSet<hyper::Result<()>>,
    is_used: bool,
}

impl Connection<'_> {
    pub(super) async fn answer(
        &mut self,
        method: Method,
        path: &str,
        body: Option<TypedBody>,
    ) -> anyhow::Result<(StatusCode, HeaderMap, Bytes)> {
        let Self {
            port,
            sender,
            driver,
            is_used,
        } = self;
        let not_http = || NotHttp(port.url.clone());
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, &port.host);
        if let Some(bearer) = port.trust.token().header() {
            request = request.header(header::AUTHORIZATION, bearer);
        }
        let request = match body {
            Some((kind, body)) => request
                .header(header::CONTENT_TYPE, kind)
                .body(Body::from(body))?,
            None => request.body(Body::empty())?,
        };
        if std::mem::replace(is_used, true) {
            let broke_off = || format!("the connection with {} broke off", port.url);
            sender.ready().await.with_context(broke_off)?;
        }
        // A server that speaks first, as one of HTTP/2 does, may end the connection in the moment in
        // which the request is handed to it. Then hyper answers nothing at all.
        let mut answer = pin!(sender.send_request(request));
        let answer = tokio::select! {
            biased;
            answer = answer.as_mut() => answer,
            _ = driver.join_next() => answer.now_or_never().ok_or_else(not_http)?,
        };
        let answer = answer.with_context(not_http)?;
        let (head, body) = answer.into_parts();
        let body = to_bytes(Body::new(body), MOST_BYTES)
            .await
            .with_context(|| format!("the connection with {} broke off", port.url))?;
        Ok((head.status, head.headers, body))
    }
}

/// Whether the server closed the connection before it answered, as one that is killed or starts may.
fn was_cut_off(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref());
    causes.any(hyper::Error::is_incomplete_message)
}

/// The server does not speak HTTP/1.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0} does not answer as taskd's HTTP port does: --server (TASKD_URL) names that one (7600), also for commands that \
     speak gRPC; https:// if it has TLS"
)]
struct NotHttp(String);

#[cfg(test)]
mod tests {
    use tokio::{io::AsyncWriteExt as _, net::TcpListener};

    use super::*;

    /// The first frame of a server of HTTP/2: its settings, which are empty.
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_server_that_speaks_first_and_hangs_up_is_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let mut server = JoinSet::new();
        server.spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                socket.write_all(&SETTINGS).await.ok();
            }
        });
        let http = HttpPort::new(&url, Trust::default()).unwrap();
        for _ in 0..2000 {
            assert!(http.ports().await.unwrap().is_none());
        }
    }
}
