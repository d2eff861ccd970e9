//! The real binary in a folder of its own under /tmp, killed and started again as a test likes.

use std::{
    fs::{self, File},
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

use super::until;

pub(crate) struct Daemon {
    dir: TempDir,
    args: Vec<String>,
    http: u16,
    grpc: u16,
    child: Child,
}

impl Daemon {
    /// Runs all pipelines with this configuration and waits until it is ready.
    pub(crate) async fn start(config: &str, args: &[&str]) -> Self {
        let dir = tempfile::Builder::new().prefix("taskd-it-").tempdir_in("/tmp").unwrap();
        let file = dir.path().join("taskd.toml");
        fs::write(&file, config).unwrap();
        let [http, grpc] = free_ports();
        let (data, http_at, grpc_at) =
            (dir.path().join("data"), format!("127.0.0.1:{http}"), format!("127.0.0.1:{grpc}"));
        let [file, data] = [&file, &data].map(|path| path.to_str().unwrap());
        let own = ["--pipelines", "all", "--config", file, "--data-dir", data];
        let listen = ["--http-listen", &http_at, "--grpc-listen", &grpc_at];
        let args: Vec<String> = own.iter().chain(&listen).chain(args).map(ToString::to_string).collect();
        let child = spawn(&dir, &args);
        let mut daemon = Self { dir, args, http, grpc, child };
        daemon.ready().await;
        daemon
    }

    pub(crate) fn http(&self) -> String {
        format!("http://127.0.0.1:{}", self.http)
    }

    pub(crate) fn grpc(&self) -> String {
        format!("http://127.0.0.1:{}", self.grpc)
    }

    /// Until `/readyz` answers 200.
    pub(crate) async fn ready(&mut self) {
        let (client, url) = (reqwest::Client::new(), format!("{}/readyz", self.http()));
        until("taskd is ready", async || {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("taskd ended by itself: {status}");
            }
            client.get(&url).send().await.is_ok_and(|answer| answer.status().is_success())
        })
        .await;
    }

    /// SIGKILL, and the same again in the same folder, without a wait.
    pub(crate) fn kill9_and_restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = spawn(&self.dir, &self.args);
    }

    /// SIGKILL for its redis-server; false when there is none at the moment.
    pub(crate) fn kill9_redis(&self) -> bool {
        let Ok(pid) = fs::read_to_string(self.dir.path().join("data/redis.pid")) else { return false };
        let Ok(pid) = pid.trim().parse::<i32>() else { return false };
        // An old file may name a process that is now somebody else's.
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.trim() == "redis-server" && kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok()
    }

    /// SIGTERM, and how it ended.
    pub(crate) async fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.ended().await
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let mut ended = None;
        until("taskd ends", async || {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        })
        .await;
        ended.unwrap()
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        self.kill9_redis();
        if std::thread::panicking() {
            self.dir.disable_cleanup(true);
            let log = fs::read_to_string(self.log()).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            eprintln!(
                "{} is kept; the end of taskd's log:\n{}",
                self.dir.path().display(),
                lines[lines.len().saturating_sub(60)..].join("\n")
            );
        }
    }
}

fn spawn(dir: &TempDir, args: &[String]) -> Child {
    let log = File::options().create(true).append(true).open(dir.path().join("log")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command.args(args).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    command.spawn().unwrap()
}

fn free_ports<const N: usize>() -> [u16; N] {
    let held: [TcpListener; N] = std::array::from_fn(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    held.map(|listener| listener.local_addr().unwrap().port())
}
