//! A real taskd as a child process, in a folder of its own.

use std::{
    fs::File,
    net::TcpListener,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use futures::{TryStreamExt, stream};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::AsyncBufReadExt;
use tokio_util::io::StreamReader;
use tonic::transport::{Channel, Endpoint};

/// How many bytes of a body are sent in one chunk.
const PIECE: usize = 64 << 10;

/// A running taskd. Dropping it stops it and removes its folder.
pub(crate) struct Daemon {
    child: Child,
    folder: TempDir,
    http: String,
    grpc: String,
    client: reqwest::Client,
}

impl Daemon {
    /// Starts it with the embedded defaults.
    pub(crate) async fn start() -> anyhow::Result<Self> {
        Self::start_as("all", &[], "").await
    }

    /// `config` is the content of its configuration file.
    pub(crate) async fn start_as(
        pipelines: &str,
        arguments: &[String],
        config: &str,
    ) -> anyhow::Result<Self> {
        let folder = crate::folder::folder()?;
        let [http, grpc] = [free_address()?, free_address()?];
        let log = File::create(folder.path().join("taskd.log"))?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        // Environment variables of the caller must not affect the figures.
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TASKD_"))
        {
            command.env_remove(name);
        }
        let file = folder.path().join("taskd.toml");
        std::fs::write(&file, config)?;
        command
            .args([
                "--pipelines",
                pipelines,
                "--http-listen",
                &http,
                "--grpc-listen",
                &grpc,
            ])
            .args(arguments);
        command
            .arg("--config")
            .arg(file)
            .arg("--data-dir")
            .arg(folder.path().join("data"));
        command
            .arg("--stop-with-stdin")
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log);
        let child = command.spawn().context("cannot start taskd")?;
        let client = reqwest::Client::builder()
            .timeout(Duration::from_secs(10))
            .build()?;
        let mut daemon = Self {
            child,
            folder,
            http: format!("http://{http}"),
            grpc: format!("http://{grpc}"),
            client,
        };
        let ready = format!("{}/readyz", daemon.http);
        let deadline = Instant::now() + Duration::from_secs(30);
        while !daemon
            .client
            .get(&ready)
            .send()
            .await
            .is_ok_and(|answer| answer.status().is_success())
        {
            let ended = daemon.child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                bail!("taskd does not get ready ({ended:?}):\n{}", daemon.log());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(daemon)
    }

    /// Opens separate connections, so that a single connection is not the bottleneck.
    pub(crate) async fn channels(&self, count: usize) -> anyhow::Result<Vec<Channel>> {
        let endpoint = Endpoint::from_shared(self.grpc.clone())?;
        futures::future::try_join_all((0..count).map(|_| endpoint.connect()))
            .await
            .context("cannot reach taskd's gRPC")
    }

    /// The counts of a queue according to /v1/queues.
    pub(crate) async fn queue(&self, name: &str) -> anyhow::Result<Counts> {
        let answer = self
            .client
            .get(format!("{}/v1/queues", self.http))
            .send()
            .await?
            .error_for_status()?;
        let answer: Value = answer.json().await?;
        let queue = answer["queues"]
            .as_array()
            .and_then(|all| all.iter().find(|queue| queue["queue"] == name));
        let field = |field: &str| queue.and_then(|queue| queue[field].as_u64()).unwrap_or(0);
        Ok(Counts {
            waiting: field("waiting"),
            completed: field("completed"),
            others: ["pending", "assigned", "delayed", "dead", "cancelled"]
                .map(field)
                .iter()
                .sum(),
        })
    }

    /// The arguments that make `taskd bench` measure this taskd.
    pub(crate) fn arguments(&self) -> [&str; 2] {
        ["--server", &self.http]
    }

    /// Sends lines, and passes each answer to `read` as it arrives.
    pub(crate) async fn insert_lines(
        &self,
        lines: Bytes,
        mut read: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let pieces = (0..lines.len())
            .step_by(PIECE)
            .map(move |at| lines.slice(at..lines.len().min(at + PIECE)));
        let body =
            reqwest::Body::wrap_stream(stream::iter(pieces.map(Ok::<_, std::convert::Infallible>)));
        let post = self
            .client
            .post(format!("{}/v1/tasks", self.http))
            .header("content-type", "application/x-ndjson");
        let answer = post
            .timeout(Duration::from_secs(300))
            .body(body)
            .send()
            .await?
            .error_for_status()?;
        let mut answers =
            StreamReader::new(answer.bytes_stream().map_err(std::io::Error::other)).lines();
        while let Some(line) = answers.next_line().await? {
            read(&line)?;
        }
        Ok(())
    }

    /// The value of a counter, summed over its labels; 0 before it first counts.
    pub(crate) async fn counter(&self, name: &str) -> anyhow::Result<u64> {
        let text = self.metrics().await?;
        let lines = text.lines().filter_map(|line| line.strip_prefix(name));
        let values = lines
            .filter(|rest| rest.starts_with([' ', '{']))
            .filter_map(|rest| rest.rsplit(' ').next());
        Ok(values.filter_map(|value| value.parse::<u64>().ok()).sum())
    }

    /// The text of a page or of an answer; with `frame`, of the frame of a page.
    pub(crate) async fn text(&self, path: &str, frame: Option<&str>) -> anyhow::Result<String> {
        let mut request = self.client.get(format!("{}/{path}", self.http));
        if let Some(frame) = frame {
            request = request.header("taskd-frame", frame);
        }
        let answer = request.send().await?.error_for_status()?;
        Ok(answer.text().await?)
    }

    /// How many commands taskd's redis-server has carried out.
    pub(crate) async fn redis_commands(&self) -> anyhow::Result<u64> {
        let socket = self.folder.path().join("data/redis.sock");
        let mut redis = redis::Client::open(format!("unix://{}", socket.display()))?
            .get_multiplexed_async_connection()
            .await
            .context("cannot reach taskd's redis-server")?;
        let info: String = redis::cmd("INFO")
            .arg("stats")
            .query_async(&mut redis)
            .await?;
        let value = info
            .lines()
            .find_map(|line| line.strip_prefix("total_commands_processed:"));
        let value = value.context("INFO has total_commands_processed")?;
        Ok(value.trim().parse()?)
    }

    async fn metrics(&self) -> anyhow::Result<String> {
        Ok(self
            .client
            .get(format!("{}/metrics", self.http))
            .send()
            .await?
            .error_for_status()?
            .text()
            .await?)
    }

    /// Tolerates errors, because taskd does not answer while it starts over.
    pub(crate) async fn wait_patiently_for(
        &self,
        queue: &str,
        wanted: Counts,
    ) -> anyhow::Result<Instant> {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let counts = self.queue(queue).await;
            if counts.as_ref().is_ok_and(|counts| *counts == wanted) {
                return Ok(Instant::now());
            }
            ensure!(
                Instant::now() < deadline,
                "queue {queue} has {counts:?} instead of {wanted:?}:\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn wait_for(&self, queue: &str, wanted: Counts) -> anyhow::Result<Instant> {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let counts = self.queue(queue).await?;
            if counts == wanted {
                return Ok(Instant::now());
            }
            ensure!(
                Instant::now() < deadline,
                "queue {queue} has {counts:?} instead of {wanted:?}:\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The CPU that taskd and its redis-server have used so far, and their memory.
    pub(crate) async fn used(&self) -> anyhow::Result<Used> {
        let socket = self.folder.path().join("data/redis.sock");
        let mut redis = redis::Client::open(format!("unix://{}", socket.display()))?
            .get_multiplexed_async_connection()
            .await
            .context("cannot reach taskd's redis-server")?;
        let info: String = redis::cmd("INFO").query_async(&mut redis).await?;
        let number = |field: &str| -> anyhow::Result<f64> {
            let value = info
                .lines()
                .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
            value
                .with_context(|| format!("INFO has no {field}"))?
                .trim()
                .parse()
                .map_err(Into::into)
        };
        let metrics = self.metrics().await?;
        let resident = metrics
            .lines()
            .find_map(|line| line.strip_prefix("process_resident_memory_bytes "));
        Ok(Used {
            taskd_cpu: cpu_seconds(self.child.id())?,
            redis_cpu: number("used_cpu_user")? + number("used_cpu_sys")?,
            taskd_bytes: resident.context("taskd shows its memory")?.parse()?,
            redis_bytes: number("used_memory")?,
        })
    }

    /// Stops it gracefully; any other exit voids the run.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        kill(
            Pid::from_raw(i32::try_from(self.child.id())?),
            Signal::SIGTERM,
        )?;
        let deadline = Instant::now() + Duration::from_secs(40);
        loop {
            if let Some(status) = self.child.try_wait()? {
                ensure!(
                    status.success(),
                    "taskd ended with {status}:\n{}",
                    self.log()
                );
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "taskd does not stop:\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("taskd.log")).unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // Use SIGTERM, because only a graceful stop also stops its redis-server.
            if let Ok(pid) = i32::try_from(self.child.id()) {
                kill(Pid::from_raw(pid), Signal::SIGTERM).ok();
            }
            self.child.wait().ok();
        }
    }
}

/// Usage of the two processes: CPU seconds since their start, and current memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Used {
    pub(crate) taskd_cpu: f64,
    pub(crate) redis_cpu: f64,
    pub(crate) taskd_bytes: f64,
    pub(crate) redis_bytes: f64,
}

/// Reads /proc, because `process_cpu_seconds_total` is in whole seconds.
fn cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    /// In this file Linux always counts in hundredths of a second, whatever its timer frequency.
    const TICKS_A_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name, in parentheses, may contain blanks. Of the fields after it, state is number 3,
    // utime number 14 and stime number 15.
    let (_, fields) = stat
        .rsplit_once(") ")
        .context("/proc/PID/stat has a name")?;
    let ticks = fields
        .split(' ')
        .skip(11)
        .take(2)
        .filter_map(|ticks| ticks.parse::<f64>().ok());
    Ok(ticks.sum::<f64>() / TICKS_A_SECOND)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) waiting: u64,
    pub(crate) completed: u64,
    pub(crate) others: u64,
}

fn free_address() -> anyhow::Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}
