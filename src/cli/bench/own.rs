//! The benchmark's own taskd: a child process with the embedded defaults, in a temporary folder.

use std::{
    fs::{self, DirBuilder, File},
    os::unix::{fs::DirBuilderExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::Deserialize;
use uuid::Uuid;

use super::args::{Bench, Part};
use crate::cli::{print::say, trust::Token};

/// The timeout of a start, which has to find redis-server and create a database.
const START: Duration = Duration::from_secs(60);
/// The timeout of a stop; taskd itself stops within 25 seconds.
const STOP: Duration = Duration::from_secs(40);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The queues that the benchmark's own taskd has for the phase limits, with their limits.
const LIMITED_QUEUES: &str = "\
[queues.bench-many]\nlimit_by = \"given\"\nlimit_at_a_time = 1000\n\
[queues.bench-few]\nlimit_by = \"given\"\nlimit_at_a_time = 1000\n\
[queues.bench-unblocked]\nlimit_by = \"given\"\nlimit_at_a_time = 1\n\
[queues.bench-blocked]\nlimit_by = \"given\"\nlimit_at_a_time = 1\n\
[queues.bench-bytes]\nlimit_by = \"given\"\nlimit_at_a_time = 1\n\
[queues.bench-paced]\nlimit_by = \"given\"\nlimit_pace = \"1/1s\"\n";

/// A running taskd. Dropping it stops it and removes its folder.
pub(super) struct Own {
    child: Child,
    folder: Folder,
    pub(super) addresses: Addresses,
    pub(super) started: Instant,
    /// `None` if it requires no token.
    pub(super) token: Option<Token>,
}

/// The addresses it listens on, according to its log.
#[derive(Default, Deserialize)]
pub(super) struct Addresses {
    pub(super) http: String,
    pub(super) grpc: String,
}

/// A folder under TMPDIR, removed when dropped.
pub(super) struct Folder(PathBuf);

impl Own {
    pub(super) async fn start(args: &Bench, part: Part) -> anyhow::Result<Self> {
        let folder = Folder::make()?;
        let config = folder.0.join("taskd.toml");
        fs::write(&config, settings(args, part)).context("cannot write the settings of a taskd")?;
        let token = if args.with_token {
            Some(make_token(&folder)?)
        } else {
            None
        };
        let log = File::create(folder.log()).context("cannot write the log of a taskd")?;
        let mut command = taskd()?;
        command.args(["--pipelines", "all", "--log-format", "json"]);
        command
            .args([
                "--http-listen",
                "127.0.0.1:0",
                "--grpc-listen",
                "127.0.0.1:0",
                "--config",
            ])
            .arg(config);
        command
            .arg("--data-dir")
            .arg(folder.data())
            .stdout(log.try_clone()?)
            .stderr(log);
        for (key, value) in &args.settings {
            command.env(format!("TASKD_{}", key.to_uppercase()), value);
        }
        // This process holds the other end of the pipe, so taskd stops even if this process is
        // killed with SIGKILL.
        command.arg("--stop-with-stdin").stdin(Stdio::piped());
        // Ctrl-C in the terminal should reach only the benchmark, which then stops this taskd
        // gracefully.
        command.process_group(0);
        let started = Instant::now();
        let child = command.spawn().context("cannot start a taskd")?;
        let mut own = Self {
            child,
            folder,
            addresses: Addresses::default(),
            started,
            token,
        };
        own.addresses = own.up().await?;
        Ok(own)
    }

    /// Waits for the log line with the addresses it listens on.
    async fn up(&mut self) -> anyhow::Result<Addresses> {
        let deadline = Instant::now() + START;
        loop {
            let log = self.log();
            let is_up = |line: &&str| line.contains("\"taskd is up: ");
            if let Some(line) = log.lines().find(is_up) {
                return serde_json::from_str(line).with_context(|| format!("taskd logs {line}"));
            }
            let ended = self.child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                let last = log.lines().last().unwrap_or_default();
                bail!("a taskd of its own does not start: {last}; --server names one that runs");
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder.0
    }

    pub(super) fn redis(&self) -> String {
        format!("unix://{}", self.folder.data().join("redis.sock").display())
    }

    /// Stops it gracefully. If it fails to stop cleanly, the run is void.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        self.signal(Signal::SIGTERM)?;
        let deadline = Instant::now() + STOP;
        loop {
            if let Some(status) = self.child.try_wait()? {
                let log = self.log();
                ensure!(
                    status.success(),
                    "taskd ended with {status}: {}",
                    log.lines().last().unwrap_or_default()
                );
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "taskd does not stop within {STOP:?}"
            );
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill(
            Pid::from_raw(i32::try_from(self.child.id())?),
            signal,
        )?)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.log()).unwrap_or_default()
    }
}

impl Drop for Own {
    /// Only a graceful stop also stops its redis-server.
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) || self.signal(Signal::SIGTERM).is_err() {
            return;
        }
        let deadline = Instant::now() + STOP;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                drop(self.child.kill());
                drop(self.child.wait());
                return;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl Folder {
    fn make() -> anyhow::Result<Self> {
        // The name must be short: the path of a socket is limited to 107 bytes.
        let name = Uuid::new_v4().simple().to_string();
        let path = std::env::temp_dir().join(format!("taskd-bench-{}", &name[..8]));
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.with_context(|| {
            format!("cannot make {}; TMPDIR names another place", path.display())
        })?;
        Ok(Self(path))
    }

    fn data(&self) -> PathBuf {
        self.0.join("data")
    }

    fn log(&self) -> PathBuf {
        self.0.join("taskd.log")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            say(format_args!(
                "taskd: cannot remove {}: {error}",
                self.0.display()
            ));
        }
    }
}

/// This program with the defaults, but without the settings in the environment, which must not
/// affect the measurement.
fn taskd() -> anyhow::Result<Command> {
    let mut command =
        Command::new(std::env::current_exe().context("cannot find the program of taskd")?);
    // taskd also reads the variables of OpenTelemetry as settings.
    let is_setting = |name: &str| {
        ["TASKD_", "OTEL_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    };
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_setting(&name.to_string_lossy())) {
        command.env_remove(name);
    }
    Ok(command)
}

fn make_token(folder: &Folder) -> anyhow::Result<Token> {
    let mut command = taskd()?;
    command
        .args(["token", "create", "bench", "--roles", "admin", "--data-dir"])
        .arg(folder.data());
    let made = command.output().context("cannot make a token")?;
    ensure!(
        made.status.success(),
        "cannot make a token: {}",
        String::from_utf8_lossy(&made.stderr).trim()
    );
    String::from_utf8(made.stdout)?
        .trim()
        .parse()
        .map_err(anyhow::Error::msg)
}

fn settings(args: &Bench, part: Part) -> String {
    let (tasks, queues) = args.room(part);
    let (tasks, queues) = (2 * tasks.max(50_000), 4 * queues.max(250));
    let bytes = (tasks * (args.work.payload.0 + 1024)).max(256 << 20);
    let replicas = args.work.replicas.max(100);
    let auth = if args.with_token { "tokens" } else { "none" };
    let limited = match part {
        Part::Limits => LIMITED_QUEUES,
        Part::Calls | Part::Flat | Part::Start | Part::Topics => "",
    };
    format!(
        "auth = \"{auth}\"\nmax_queues = {queues}\nmax_replicas = {replicas}\n\
         [queues.default]\nhigh_water_tasks = {tasks}\nhigh_water_bytes = {bytes}\n{limited}"
    )
}
