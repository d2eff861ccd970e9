//! The HTTP port of a taskd: what its queues contain, and its version.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use axum::body::Bytes;
use serde::Deserialize;

use crate::cli::{
    http::{ANSWER_TIMEOUT, HttpPort},
    trust::Trust,
};

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

/// The HTTP port of the taskd that is measured.
#[derive(Clone)]
pub(super) struct Http(HttpPort);

impl Http {
    pub(super) fn new(url: &str, trust: Trust) -> anyhow::Result<Self> {
        HttpPort::new("--http", url, trust).map(Self)
    }

    /// The counts of the queues whose name is in `names`, together.
    pub(super) async fn counts(&self, names: &[String]) -> anyhow::Result<Counts> {
        let answer = self.get("/v1/queues").await?;
        let unreadable = || format!("{}/v1/queues does not answer as taskd does", self.0.url);
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
        let (status, body) = self.0.get(path).await?;
        let said = String::from_utf8_lossy(&body);
        ensure!(status.is_success(), "{}{path} answers {status}: {}", self.0.url, said.trim());
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
