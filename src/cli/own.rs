//! A taskd of a command's own: a child process with the embedded defaults, in a temporary folder.

use std::{
    fs::{self, DirBuilder, File},
    os::unix::{fs::DirBuilderExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use futures::FutureExt as _;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::Deserialize;
use tokio::signal::unix::{SignalKind, signal};
use uuid::Uuid;

use super::{
    http::HttpPort,
    print::say,
    trust::{Token, Trust},
};

/// The timeout of a start, which has to find redis-server and create a database.
const START: Duration = Duration::from_secs(60);
/// The timeout of a stop; taskd itself stops within 25 seconds.
const STOP: Duration = Duration::from_secs(40);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How often to look whether it has ended by itself.
const LOOK_OFTEN_ENOUGH: Duration = Duration::from_millis(500);
/// For how long signals count as the first one.
const SAME_SIGNAL: Duration = Duration::from_millis(500);

/// What is special about a taskd to start.
pub(super) struct Start<'a> {
    pub(super) pipelines: &'a str,
    /// Its configuration file.
    pub(super) config: String,
    /// Settings by their keys in the configuration file, which come before those of the file.
    pub(super) settings: &'a [(String, String)],
    /// It requires a token, and has one.
    pub(super) with_token: bool,
}

impl Default for Start<'_> {
    /// All pipelines on the embedded defaults, without a token.
    fn default() -> Self {
        Self {
            pipelines: "all",
            config: String::new(),
            settings: &[],
            with_token: false,
        }
    }
}

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
    pub(super) async fn start(wanted: Start<'_>) -> anyhow::Result<Self> {
        let folder = Folder::make()?;
        let config = folder.0.join("taskd.toml");
        fs::write(&config, wanted.config).context("cannot write the settings of a taskd")?;
        let token = if wanted.with_token {
            Some(make_token(&folder)?)
        } else {
            None
        };
        let log = File::create(folder.log()).context("cannot write the log of a taskd")?;
        let mut command = taskd()?;
        command.args(["--pipelines", wanted.pipelines, "--log-format", "json"]);
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
        for (key, value) in wanted.settings {
            command.env(format!("TASKD_{}", key.to_uppercase()), value);
        }
        // This process holds the other end of the pipe, so taskd stops even if this process is
        // killed with SIGKILL.
        command.arg("--stop-with-stdin").stdin(Stdio::piped());
        // Ctrl-C in the terminal should reach only this process, which then stops this taskd
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
                bail!("a taskd of its own does not start: {last}");
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Waits until it ends by itself. Returns the last line of its log.
    pub(super) async fn ended(&mut self) -> anyhow::Result<String> {
        while self.child.try_wait()?.is_none() {
            tokio::time::sleep(LOOK_OFTEN_ENOUGH).await;
        }
        Ok(self.log().lines().last().unwrap_or_default().to_owned())
    }

    /// Its HTTP port, if it requires no token.
    pub(super) fn server(&self) -> anyhow::Result<HttpPort> {
        HttpPort::new(&self.url(), Trust::default())
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.addresses.http)
    }

    /// Waits for `work`. `None`: a signal came first. Fails if this taskd ends by itself.
    pub(super) async fn unless_stopped<T>(
        &mut self,
        signals: &mut Signals,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<Option<T>> {
        tokio::select! {
            done = work => done.map(Some),
            () = signals.next() => Ok(None),
            last = self.ended() => last.and_then(|last| bail!("taskd ended: {last}")),
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

/// The signals that end a run: the first one in order, the second one at once.
pub(super) struct Signals([tokio::signal::unix::Signal; 3]);

impl Signals {
    pub(super) fn listen() -> anyhow::Result<Self> {
        Ok(Self([
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        ]))
    }

    /// Waits for another one after the first. What comes within a moment is still the first one:
    /// programs such as timeout signal both a command and its group.
    pub(super) async fn another(&mut self) {
        tokio::time::sleep(SAME_SIGNAL).await;
        while self.next().now_or_never().is_some() {}
        self.next().await;
    }

    pub(super) async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

impl Folder {
    pub(super) fn make() -> anyhow::Result<Self> {
        // The name must be short: the path of a socket is limited to 107 bytes.
        let name = Uuid::new_v4().simple().to_string();
        let path = std::env::temp_dir().join(format!("taskd-own-{}", &name[..8]));
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.with_context(|| {
            format!("cannot make {}; TMPDIR names another place", path.display())
        })?;
        Ok(Self(path))
    }

    pub(super) fn data(&self) -> PathBuf {
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

/// This program, without the settings in the environment, which are for another taskd.
pub(super) fn taskd() -> anyhow::Result<Command> {
    let program = std::env::current_exe().context("cannot find the program of taskd")?;
    let mut command = Command::new(program);
    remove_settings(&mut command);
    Ok(command)
}

/// Removes the settings of taskd from a command's environment.
pub(super) fn remove_settings(command: &mut Command) {
    // taskd also reads the variables of OpenTelemetry as settings.
    let is_setting = |name: &str| {
        ["TASKD_", "OTEL_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    };
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_setting(&name.to_string_lossy())) {
        command.env_remove(name);
    }
}

/// Reads KEY=VALUE.
pub(super) fn setting(text: &str) -> Result<(String, String), &'static str> {
    let (key, value) = text
        .split_once('=')
        .ok_or("write KEY=VALUE, as in history=false")?;
    Ok((key.to_owned(), value.to_owned()))
}

fn make_token(folder: &Folder) -> anyhow::Result<Token> {
    let mut command = taskd()?;
    command
        .args(["token", "create", "own", "--roles", "admin", "--data-dir"])
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
