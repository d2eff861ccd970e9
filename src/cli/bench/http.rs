//! The HTTP port of a taskd: what its queues contain, and its version.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use axum::body::{Body, Bytes, to_bytes};
use hyper::{Request, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::{net::TcpStream, task::JoinSet};
use url::Url;

use crate::cli::client::Token;

const MOST_BYTES: usize = 64 << 20;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The contents of queues together, as `/v1/queues` counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Counts {
    pub(super) pending: u64,
    pub(super) queued: u64,
    pub(super) assigned: u64,
    pub(super) delayed: u64,
    pub(super) completed: u64,
    pub(super) dead: u64,
    pub(super) cancelled: u64,
}

#[derive(Deserialize)]
struct Queues {
    queues: Vec<Queue>,
}

#[derive(Deserialize)]
struct Queue {
    queue: String,
    #[serde(flatten)]
    counts: Counts,
}

/// An address, called over a new connection each time.
#[derive(Clone)]
pub(super) struct Http {
    url: String,
    host: String,
    token: Token,
}

impl Http {
    pub(super) fn new(url: &str, token: Token) -> anyhow::Result<Self> {
        let wrong = || format!("--http {url:?} is not a URL; write http://host:7600");
        let parsed = Url::parse(url).with_context(wrong)?;
        let host = parsed.host_str().with_context(wrong)?;
        ensure!(parsed.scheme() == "http", "--http {url:?}: taskd speaks http:// only");
        let port = parsed.port_or_known_default().with_context(wrong)?;
        Ok(Self { url: url.to_owned(), host: format!("{host}:{port}"), token })
    }

    /// The counts of the queues whose name is in `names`, together.
    pub(super) async fn counts(&self, names: &[String]) -> anyhow::Result<Counts> {
        let answer = self.get("/v1/queues").await?;
        let unreadable = || format!("{}/v1/queues does not answer as taskd does", self.url);
        let all: Queues = serde_json::from_slice(&answer).with_context(unreadable)?;
        let ours = all.queues.into_iter().filter(|queue| names.contains(&queue.queue));
        Ok(ours.fold(Counts::default(), |sum, queue| sum + queue.counts))
    }

    /// Waits until `/readyz` answers 200.
    pub(super) async fn wait_until_ready(&self) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            match self.get("/readyz").await {
                Ok(_) => return Ok(()),
                Err(error) if began.elapsed() > ANSWER_TIMEOUT => return Err(error),
                Err(_) => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    /// The version of the taskd that answers.
    pub(super) async fn version(&self) -> anyhow::Result<Option<String>> {
        let metrics = self.get("/metrics").await?;
        let metrics = String::from_utf8_lossy(&metrics);
        let line = metrics.lines().find_map(|line| line.strip_prefix("taskd_build_info{version=\""));
        Ok(line.and_then(|rest| rest.split('"').next()).map(str::to_owned))
    }

    async fn get(&self, path: &str) -> anyhow::Result<Bytes> {
        match tokio::time::timeout(ANSWER_TIMEOUT, self.call(path)).await {
            Ok(answer) => answer,
            Err(_) => bail!("{}{path} does not answer", self.url),
        }
    }

    async fn call(&self, path: &str) -> anyhow::Result<Bytes> {
        let unreachable = || format!("cannot reach taskd's HTTP at {}; --http names another place", self.url);
        let socket = TcpStream::connect(&self.host).await.with_context(unreachable)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await.with_context(unreachable)?;
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let mut request = Request::get(path).header(header::HOST, &self.host);
        if let Some(bearer) = self.token.header() {
            request = request.header(header::AUTHORIZATION, bearer);
        }
        let request = request.body(Body::empty())?;
        let answer = sender.send_request(request).await.with_context(unreachable)?;
        let status = answer.status();
        let body = to_bytes(Body::new(answer.into_body()), MOST_BYTES).await.with_context(unreachable)?;
        ensure!(status.is_success(), "{}{path} answers {status}: {}", self.url, String::from_utf8_lossy(&body).trim());
        Ok(body)
    }
}

impl Counts {
    /// All tasks, whatever became of them.
    pub(super) fn all(&self) -> u64 {
        let Self { pending, queued, assigned, delayed, completed, dead, cancelled } = self;
        pending + queued + assigned + delayed + completed + dead + cancelled
    }
}

impl std::ops::Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            pending: self.pending + other.pending,
            queued: self.queued + other.queued,
            assigned: self.assigned + other.assigned,
            delayed: self.delayed + other.delayed,
            completed: self.completed + other.completed,
            dead: self.dead + other.dead,
            cancelled: self.cancelled + other.cancelled,
        }
    }
}
