//! GET requests to the HTTP port of a taskd, over a new connection each time.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use axum::body::{Body, Bytes, to_bytes};
use backon::BackoffBuilder as _;
use clap::Args;
use hyper::{Request, StatusCode, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::{net::TcpStream, task::JoinSet};
use tokio_rustls::TlsConnector;
use url::Url;

use super::{
    client::{self, Unreachable, Waiting},
    trust::Trust,
};
use crate::config::without_password;

const MOST_BYTES: usize = 64 << 20;
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// The address of taskd's HTTP port, and the way to call it.
#[derive(Args, Default)]
pub(super) struct HttpServer {
    /// HTTP address of taskd; host:port is enough
    #[arg(
        long,
        env = "TASKD_HTTP_URL",
        hide_env_values = true,
        value_name = "URL",
        value_parser = client::with_scheme,
        default_value = "http://127.0.0.1:7600"
    )]
    server: String,

    #[command(flatten)]
    trust: Trust,

    #[command(flatten)]
    waiting: Waiting,
}

impl HttpServer {
    pub(super) fn port(&self) -> anyhow::Result<HttpPort> {
        let port = HttpPort::new(
            "--server (TASKD_HTTP_URL)",
            &self.server,
            self.trust.clone(),
        )?;
        Ok(HttpPort {
            deadline: self.waiting.deadline(),
            ..port
        })
    }
}

/// An HTTP port.
#[derive(Clone)]
pub(super) struct HttpPort {
    /// For messages, without a password.
    pub(super) url: String,
    host: String,
    /// The host without its port.
    name: String,
    /// The flag that names it.
    flag: &'static str,
    trust: Trust,
    is_tls: bool,
    /// Until then a port that cannot be reached is tried again.
    deadline: Option<Instant>,
}

impl HttpPort {
    pub(super) fn new(flag: &'static str, url: &str, trust: Trust) -> anyhow::Result<Self> {
        let shown = without_password(url);
        let wrong = || format!("{flag} {shown:?} is not a URL; write http://host:7600");
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
            flag,
            trust,
            is_tls,
            deadline: None,
        })
    }

    /// The mistake behind an answer that taskd does not give.
    pub(super) fn describe_other(&self) -> String {
        format!(
            "{} does not answer as taskd does; is that taskd's HTTP port?",
            self.url
        )
    }

    /// The status and the body of the answer. While `--wait-for-server` lasts, a taskd that cannot
    /// be reached, or is not ready yet, is asked again.
    pub(super) async fn get(&self, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        let mut waits = client::WAITS.build();
        loop {
            let answer = match tokio::time::timeout(ANSWER_TIMEOUT, self.call(path)).await {
                Ok(answer) => answer,
                Err(_) => bail!("{}{path} does not answer", self.url),
            };
            let may_pass = match &answer {
                Ok((status, _)) => *status == StatusCode::SERVICE_UNAVAILABLE,
                Err(error) => error.is::<Unreachable>(),
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

    async fn call(&self, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        let unreachable = || {
            format!(
                "cannot reach taskd's HTTP at {}; {} names another place",
                self.url, self.flag
            )
        };
        let another = || {
            let url = &self.url;
            let flag = self.flag;
            format!(
                "{url} does not answer as taskd's HTTP port does; {flag} names that one (7600), with https:// for TLS"
            )
        };
        let socket = TcpStream::connect(&self.host).await;
        let socket = socket.map_err(|error| {
            anyhow::Error::new(Unreachable(format!("{}: {error}", unreachable())))
        })?;
        let mut driver = JoinSet::new();
        let mut sender = if self.is_tls {
            let name = ServerName::try_from(self.name.clone()).with_context(unreachable)?;
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
                .with_context(another)?;
            driver.spawn(connection);
            sender
        } else {
            let (sender, connection) = http1::handshake(TokioIo::new(socket))
                .await
                .with_context(another)?;
            driver.spawn(connection);
            sender
        };
        let mut request = Request::get(path).header(header::HOST, &self.host);
        if let Some(bearer) = self.trust.token().header() {
            request = request.header(header::AUTHORIZATION, bearer);
        }
        let request = request.body(Body::empty())?;
        let answer = sender.send_request(request).await.with_context(another)?;
        let status = answer.status();
        let body = to_bytes(Body::new(answer.into_body()), MOST_BYTES)
            .await
            .with_context(unreachable)?;
        Ok((status, body))
    }
}
