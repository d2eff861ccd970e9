//! The real taskd as a child process, on embedded defaults in a folder of its own.

use std::{
    fs::File,
    net::TcpListener,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

/// Killed with its folder when dropped.
pub(crate) struct Daemon {
    child: Child,
    folder: TempDir,
    http: String,
    grpc: String,
    client: reqwest::Client,
}

impl Daemon {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let folder = crate::folder()?;
        let [http, grpc] = [free_address()?, free_address()?];
        let log = File::create(folder.path().join("taskd.log"))?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        // What this shell has set must not change what is measured.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TASKD_")) {
            command.env_remove(name);
        }
        command.args(["--pipelines", "all", "--http-listen", &http, "--grpc-listen", &grpc, "--data-dir"]);
        command.arg(folder.path().join("data")).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().context("cannot start taskd")?;
        let client = reqwest::Client::builder().timeout(Duration::from_secs(10)).build()?;
        let mut daemon = Self { child, folder, http: format!("http://{http}"), grpc: format!("http://{grpc}"), client };
        let ready = format!("{}/readyz", daemon.http);
        let deadline = Instant::now() + Duration::from_secs(30);
        while !daemon.client.get(&ready).send().await.is_ok_and(|answer| answer.status().is_success()) {
            let ended = daemon.child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                bail!("taskd does not get ready ({ended:?}):\n{}", daemon.log());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(daemon)
    }

    /// Connections of their own, so that one of them is not the bound.
    pub(crate) async fn channels(&self, count: usize) -> anyhow::Result<Vec<Channel>> {
        let endpoint = Endpoint::from_shared(self.grpc.clone())?;
        futures::future::try_join_all((0..count).map(|_| endpoint.connect())).await.context("cannot reach taskd's gRPC")
    }

    /// A queue as /v1/queues has it.
    pub(crate) async fn queue(&self, name: &str) -> anyhow::Result<Counts> {
        let answer = self.client.get(format!("{}/v1/queues", self.http)).send().await?.error_for_status()?;
        let answer: Value = answer.json().await?;
        let queue = answer["queues"].as_array().and_then(|all| all.iter().find(|queue| queue["queue"] == name));
        let field = |field: &str| queue.and_then(|queue| queue[field].as_u64()).unwrap_or(0);
        Ok(Counts {
            waiting: field("queued"),
            completed: field("completed"),
            others: ["pending", "assigned", "delayed", "dead", "cancelled"].map(field).iter().sum(),
        })
    }

    pub(crate) async fn wait_for(&self, queue: &str, wanted: Counts) -> anyhow::Result<Instant> {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let counts = self.queue(queue).await?;
            if counts == wanted {
                return Ok(Instant::now());
            }
            ensure!(Instant::now() < deadline, "queue {queue} has {counts:?} instead of {wanted:?}:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// An orderly end; anything else voids the run.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        kill(Pid::from_raw(i32::try_from(self.child.id())?), Signal::SIGTERM)?;
        let deadline = Instant::now() + Duration::from_secs(40);
        loop {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "taskd ended with {status}:\n{}", self.log());
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "taskd does not stop:\n{}", self.log());
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
            // SIGTERM: only an orderly end takes its redis-server along.
            if let Ok(pid) = i32::try_from(self.child.id()) {
                kill(Pid::from_raw(pid), Signal::SIGTERM).ok();
            }
            self.child.wait().ok();
        }
    }
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
