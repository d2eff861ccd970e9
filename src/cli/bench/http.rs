//! The HTTP port of a taskd: the counts of its queues, and its version.

use std::time::{Duration, Instant};

use anyhow::ensure;
use axum::body::Bytes;

use crate::cli::{
    http::{ANSWER_TIMEOUT, HttpPort},
    queues::{Counts, QueuesSnapshot},
    trust::Trust,
};

const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The HTTP port of the taskd under test.
#[derive(Clone)]
pub(super) struct Http(HttpPort);

impl Http {
    pub(super) fn new(url: &str, trust: Trust) -> anyhow::Result<Self> {
        HttpPort::new(url, trust).map(Self)
    }

    pub(super) fn port(&self) -> &HttpPort {
        &self.0
    }

    /// The sum of the counts of the queues in `names`.
    pub(super) async fn counts(&self, names: &[String]) -> anyhow::Result<Counts> {
        let answer = self.get("/v1/queues").await?;
        let look = QueuesSnapshot::read(&self.0, &answer)?;
        let ours = look
            .queues
            .into_iter()
            .filter(|queue| names.contains(&queue.queue));
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

    /// The version of the taskd under test.
    pub(super) async fn version(&self) -> anyhow::Result<Option<String>> {
        let metrics = self.get("/metrics").await?;
        let metrics = String::from_utf8_lossy(&metrics);
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix("taskd_build_info{version=\""));
        Ok(line
            .and_then(|rest| rest.split('"').next())
            .map(str::to_owned))
    }

    async fn get(&self, path: &str) -> anyhow::Result<Bytes> {
        let (status, body) = self.0.get(path).await?;
        let said = String::from_utf8_lossy(&body);
        ensure!(
            status.is_success(),
            "{}{path} answers {status}: {}",
            self.0.url,
            said.trim()
        );
        Ok(body)
    }
}
