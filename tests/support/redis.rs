//! A private redis-server: a child process on a unix socket in a folder of its own.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

/// Connects with a long timeout. The crate's default is half a second, and a disk may stall for
/// longer.
pub(crate) async fn patient(
    url: impl ::redis::IntoConnectionInfo,
) -> ::redis::aio::MultiplexedConnection {
    connect(&::redis::Client::open(url).unwrap()).await.unwrap()
}

pub(crate) async fn connect(
    client: &::redis::Client,
) -> ::redis::RedisResult<::redis::aio::MultiplexedConnection> {
    let config =
        ::redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(30)));
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
}

/// When Redis syncs its append-only file.
#[derive(Clone, Copy, Debug)]
pub enum Fsync {
    Always,
    EverySecond,
}

/// A running server. Dropping it stops it and removes its folder.
pub struct RedisServer {
    dir: TempDir,
    fsync: Fsync,
    child: Child,
}

impl RedisServer {
    pub fn start(fsync: Fsync) -> Self {
        // Not under target/, because the path of a socket is limited to 107 bytes.
        let dir = tempfile::Builder::new()
            .prefix("taskd-")
            .tempdir_in("/tmp")
            .expect("a folder for redis-server");
        let child = spawn(dir.path(), fsync);
        let server = Self { dir, fsync, child };
        server.wait_until_up();
        server
    }

    pub fn url(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Kills it with SIGKILL; returns when it is gone.
    pub fn kill9(&mut self) {
        self.child.kill().expect("the child is ours");
        self.child.wait().expect("the child is ours");
    }

    /// Starts it again after [`Self::kill9`], with its existing data.
    pub fn restart(&mut self) {
        self.child = spawn(self.dir.path(), self.fsync);
        self.wait_until_up();
    }

    /// Sends SIGSTOP: connections stay open, but nothing is answered.
    pub fn stop(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Sends SIGCONT.
    pub fn cont(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a pid");
        kill(Pid::from_raw(pid), signal).expect("the child is ours");
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("redis.sock")
    }

    fn wait_until_up(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !answers(&self.socket()) {
            let log =
                || std::fs::read_to_string(self.dir.path().join("redis.log")).unwrap_or_default();
            assert!(
                Instant::now() < deadline,
                "redis-server does not come up:\n{}",
                log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn spawn(dir: &Path, fsync: Fsync) -> Child {
    let fsync = match fsync {
        Fsync::Always => "always",
        Fsync::EverySecond => "everysec",
    };
    Command::new("redis-server")
        .args([
            "--port",
            "0",
            "--unixsocket",
            "redis.sock",
            "--save",
            "",
            "--appendonly",
            "yes",
        ])
        .args(["--appendfsync", fsync, "--logfile", "redis.log"])
        .arg("--dir")
        .arg(dir)
        .current_dir(dir)
        .stdout(Stdio::null())
        .spawn()
        .expect("redis-server is installed")
}

/// True if it accepts commands, so that it is neither starting nor loading.
fn answers(socket: &Path) -> bool {
    let ping = || {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(b"PING\r\n")?;
        let mut answer = [0; 5];
        stream.read_exact(&mut answer).map(|()| &answer == b"+PONG")
    };
    ping().unwrap_or(false)
}
