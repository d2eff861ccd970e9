//! Ends a redis-server whose taskd was killed: two servers would ruin one append-only file.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    net::UnixStream,
    time::{sleep, timeout},
};

use super::{Error, ask};

/// How long a killed server may take to be gone.
const KILLED: Duration = Duration::from_secs(10);

/// The pid that the kernel reports for a process in another container.
const UNSEEN: u32 = 0;

/// Where the redis-server of a data folder leaves traces.
pub(super) struct Traces<'a> {
    pub(super) url: &'a str,
    pub(super) socket: &'a Path,
    pub(super) pid_file: &'a Path,
    /// The working folder of the redis-server.
    pub(super) redis: &'a Path,
}

impl Traces<'_> {
    /// Ends a server that an earlier taskd left behind. Takes at most [`ask::STOP`], [`KILLED`] and
    /// some seconds.
    pub(super) async fn end(&self) -> Result<(), Error> {
        let Some(pid) = listener(self.socket).await.or_else(|| self.noted()) else {
            return Ok(());
        };
        if pid == UNSEEN {
            return Err(self.foreign("it runs in another container"));
        }
        let told = ask::folder_of(self.url).await;
        if let Some(dir) = told
            .as_ref()
            .filter(|dir| !same_folder(Path::new(dir), self.redis))
        {
            return Err(self.foreign(dir));
        }
        if told.is_none() && !self.is_ours(pid) {
            // The server may also have exited meanwhile.
            return if alive(pid) {
                Err(self.foreign("it does not say which"))
            } else {
                Ok(())
            };
        }
        tracing::info!("ending redis-server (pid {pid}), which an earlier taskd left behind");
        if told.is_some() && ask::ask_to_end(self.url).await && gone(pid, ask::STOP).await {
            return Ok(());
        }
        self.kill(pid).await
    }

    /// The pid in the pid file, if it is that of a redis-server of this folder.
    fn noted(&self) -> Option<u32> {
        let pid = fs::read_to_string(self.pid_file)
            .ok()?
            .trim()
            .parse()
            .ok()?;
        self.is_ours(pid).then_some(pid)
    }

    /// True if this process is a redis-server that works in the folder. The pid of one that has
    /// ended may belong to another process now.
    fn is_ours(&self, pid: u32) -> bool {
        let command = fs::read(proc(pid, "cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command);
        let is_redis = command.contains("redis-server") || command.contains("valkey-server");
        is_redis && same_folder(&proc(pid, "cwd"), self.redis)
    }

    fn foreign(&self, dir: &str) -> Error {
        Error::Foreign {
            socket: self.socket.to_owned(),
            dir: dir.to_owned(),
        }
    }

    async fn kill(&self, pid: u32) -> Result<(), Error> {
        if self.is_ours(pid) {
            tracing::warn!("redis-server (pid {pid}) does not end when asked: killed");
            let pid = i32::try_from(pid).map_err(|_| Error::Stuck { pid })?;
            // The kill fails if the process is gone or belongs to another user. The wait below
            // tells the two apart.
            kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
        if gone(pid, KILLED).await {
            Ok(())
        } else {
            Err(Error::Stuck { pid })
        }
    }
}

/// The pid of the process that listens on this socket. The kernel knows it even if the server
/// hangs.
async fn listener(socket: &Path) -> Option<u32> {
    let stream = timeout(Duration::from_secs(1), UnixStream::connect(socket))
        .await
        .ok()?
        .ok()?;
    u32::try_from(stream.peer_cred().ok()?.pid()?).ok()
}

async fn gone(pid: u32, limit: Duration) -> bool {
    timeout(limit, async {
        while alive(pid) {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .is_ok()
}

/// True if a process runs. A zombie counts as gone, since it has closed its files.
fn alive(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(proc(pid, "stat")) else {
        return false;
    };
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

fn proc(pid: u32, file: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{file}"))
}

/// True if two paths lead to the same folder, which links and mounts may give several names.
fn same_folder(a: &Path, b: &Path) -> bool {
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}
