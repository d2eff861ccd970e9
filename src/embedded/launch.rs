//! One start of redis-server as a child process: its arguments, the wait until it answers, its end.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicI32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use tokio::{
    process::{Child, Command},
    time::{sleep, timeout},
};

use super::{
    DataDir, Error,
    ask::{self, STOP},
    data_dir, machine,
    orphan::Traces,
};

/// How long a server without data may take to answer.
const START: Duration = Duration::from_secs(30);
/// How many bytes of the append-only file a slow disk loads in a second.
const LOADED_PER_SECOND: u64 = 5 << 20;
const LARGEST_LOG: u64 = 8 << 20;

/// The program, its files and its arguments. They do not change while taskd runs.
#[derive(Debug)]
pub(super) struct Launch {
    binary: String,
    pub(super) url: String,
    socket: PathBuf,
    pid_file: PathBuf,
    log: PathBuf,
    /// The size of the log before the last start, in bytes.
    log_begin: AtomicU64,
    redis: PathBuf,
    /// 0 for no limit.
    max_memory: u64,
    /// The pid of the running server; 0 while none runs.
    pub(super) pid: AtomicI32,
    /// Keeps the folder locked as long as the server may run in it.
    _data: DataDir,
}

impl Launch {
    pub(super) fn new(data: &DataDir, binary: &str, max_memory: u64) -> Result<Self, Error> {
        let max_memory = match max_memory {
            0 => machine::half_of_memory().unwrap_or(0),
            bytes => bytes,
        };
        let socket = data.socket(&data_dir::temp())?;
        Ok(Self {
            binary: binary.to_owned(),
            url: url_of(&socket),
            socket,
            pid_file: data.path().join("redis.pid"),
            log: data.path().join("redis.log"),
            log_begin: AtomicU64::new(0),
            redis: data.private_folder("redis")?,
            max_memory,
            pid: AtomicI32::new(0),
            _data: data.clone(),
        })
    }

    /// Ends a server that an earlier taskd left behind.
    pub(super) async fn end_orphan(&self) -> Result<(), Error> {
        let url = &self.url;
        let socket = &self.socket;
        let pid_file = &self.pid_file;
        let redis = &self.redis;
        Traces {
            url,
            socket,
            pid_file,
            redis,
        }
        .end()
        .await
    }

    /// Starts the server and waits until it answers.
    pub(super) async fn start(&self) -> Result<Child, Error> {
        let mut child = self.spawn()?;
        if let Err(error) = self.ready(&mut child).await {
            child.kill().await.ok();
            return Err(error);
        }
        let pid = child
            .id()
            .and_then(|pid| i32::try_from(pid).ok())
            .unwrap_or_default();
        self.pid.store(pid, Ordering::Relaxed);
        tracing::info!(pid, "redis-server answers at {}", self.url);
        Ok(child)
    }

    fn spawn(&self) -> Result<Child, Error> {
        let log = self.open_log()?;
        let copy = log.try_clone().map_err(|cause| self.cannot_run(cause))?;
        let mut command = Command::new(&self.binary);
        // The log gets these as well: the server complains about its arguments before it opens the
        // log.
        command
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(copy)
            .kill_on_drop(true);
        // With a process group of its own, Ctrl-C on the terminal does not end Redis before taskd
        // has drained.
        command.process_group(0);
        // A user who wants to start from scratch may have removed the folder.
        fs::create_dir_all(&self.redis).map_err(|cause| Error::Folder {
            folder: self.redis.clone(),
            cause,
        })?;
        for (name, path) in [
            ("--dir", &self.redis),
            ("--unixsocket", &self.socket),
            ("--pidfile", &self.pid_file),
            ("--logfile", &self.log),
        ] {
            command.arg(name).arg(path);
        }
        // DEBUG and MODULE are off by default and stay so.
        command.args([
            "--port",
            "0",
            "--unixsocketperm",
            "700",
            "--daemonize",
            "no",
            "--supervised",
            "no",
        ]);
        command.args([
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
            "--save",
            "",
        ]);
        // A file of this size is loaded in two or three seconds. With a lower limit, Redis would
        // rewrite it again and again while many tasks come and go.
        command.args([
            "--auto-aof-rewrite-min-size",
            "256mb",
            "--auto-aof-rewrite-percentage",
            "100",
        ]);
        // A crash may cut the last write short. Redis has not acknowledged that write.
        command.args(["--aof-load-truncated", "yes", "--lua-time-limit", "5000"]);
        command.args([
            "--maxmemory",
            &self.max_memory.to_string(),
            "--maxmemory-policy",
            "noeviction",
        ]);
        // To find an entry in a listpack, Redis scans it. In a larger one this costs more than the
        // memory that it saves.
        command.args([
            "--hash-max-listpack-entries",
            "64",
            "--zset-max-listpack-entries",
            "32",
        ]);
        command.spawn().map_err(|cause| self.cannot_run(cause))
    }

    /// Waits until the server answers. The limit grows with the size of its data.
    async fn ready(&self, child: &mut Child) -> Result<(), Error> {
        const SAY_EVERY: Duration = Duration::from_secs(3);
        let megabytes = bytes_in(&self.redis) >> 20;
        let limit = START + Duration::from_secs((megabytes << 20) / LOADED_PER_SECOND);
        let began = Instant::now();
        let mut said = Instant::now();
        loop {
            if let Some(status) = child.try_wait().map_err(|cause| self.cannot_run(cause))? {
                return Err(self.ended(status));
            }
            if ask::is_ready(&self.url).await {
                return Ok(());
            }
            if began.elapsed() > limit {
                return Err(Error::Slow {
                    limit,
                    log: self.log.clone(),
                    last: self.tail(),
                });
            }
            if said.elapsed() > SAY_EVERY {
                tracing::info!(
                    "waiting for redis-server to load {megabytes} MiB from {}, at most {limit:?}",
                    self.redis.display()
                );
                said = Instant::now();
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Asks the server to exit, and kills it if it does not.
    pub(super) async fn stop(&self, mut child: Child) {
        let ended = ask::ask_to_end(&self.url).await && timeout(STOP, child.wait()).await.is_ok();
        if ended {
            tracing::info!("redis-server has ended");
            return;
        }
        tracing::warn!("redis-server does not end when asked: killed");
        if let Err(cause) = child.kill().await {
            tracing::warn!("cannot kill redis-server: {cause}");
        }
    }

    /// Opens the log. Begins a new one if it is large.
    fn open_log(&self) -> Result<File, Error> {
        if self.log.metadata().is_ok_and(|log| log.len() > LARGEST_LOG) {
            fs::rename(&self.log, self.log.with_extension("log.old")).ok();
        }
        let opened = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&self.log);
        let opened = opened.map_err(|cause| Error::Folder {
            folder: self.log.clone(),
            cause,
        })?;
        self.log_begin.store(
            opened.metadata().map_or(0, |log| log.len()),
            Ordering::Relaxed,
        );
        Ok(opened)
    }

    /// The last lines that this start wrote into the log.
    fn tail(&self) -> String {
        tail(&self.log, self.log_begin.load(Ordering::Relaxed))
    }

    pub(super) fn ended(&self, status: std::process::ExitStatus) -> Error {
        Error::Ended {
            status,
            log: self.log.clone(),
            last: self.tail(),
        }
    }

    pub(super) fn cannot_run(&self, cause: io::Error) -> Error {
        Error::Run {
            binary: self.binary.clone(),
            cause,
        }
    }
}

/// Refuses a program that is missing or too old.
pub(super) async fn check_version(binary: &str) -> Result<(), Error> {
    let fail = |cause: io::Error| match cause.kind() {
        io::ErrorKind::NotFound => Error::Missing {
            binary: binary.to_owned(),
        },
        _ => Error::Run {
            binary: binary.to_owned(),
            cause,
        },
    };
    let mut command = Command::new(binary);
    command
        .arg("--version")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(Duration::from_secs(10), command.output());
    let output = output
        .await
        .unwrap_or_else(|_| Err(io::Error::other("it does not tell its version")))
        .map_err(fail)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version =
        version_in(&text).ok_or_else(|| fail(io::Error::other("it does not tell its version")))?;
    match version
        .split('.')
        .next()
        .and_then(|major| major.parse::<u32>().ok())
    {
        Some(major) if major >= 7 => Ok(()),
        _ => Err(Error::TooOld {
            binary: binary.to_owned(),
            version: version.to_owned(),
        }),
    }
}

/// The version in `Redis server v=7.0.15 sha=…`.
fn version_in(text: &str) -> Option<&str> {
    text.split_whitespace()
        .find_map(|word| word.strip_prefix("v="))
}

/// The URL of the Redis of a taskd that runs in this data folder.
pub fn url_of_running(data_dir: &Path) -> Result<String, Error> {
    Ok(url_of(&data_dir::socket_of_running(data_dir)?))
}

/// The URL `unix:///…` of a socket, escaped.
fn url_of(socket: &Path) -> String {
    let url = url::Url::from_file_path(socket).expect("the data folder's path is absolute");
    url.as_str().replacen("file:", "unix:", 1)
}

/// The size of all files in and below the folder.
fn bytes_in(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    let sizes = entries.flatten().map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes_in(&entry.path()),
        Ok(found) => found.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

/// The last lines of the log after its first `begin` bytes.
fn tail(log: &Path, begin: u64) -> String {
    const BYTES: u64 = 4096;
    const LINES: usize = 8;
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let from = file.metadata()?.len().saturating_sub(BYTES).max(begin);
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_else(|cause| format!("(cannot be read: {cause})").into_bytes());
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let last = lines
        .iter()
        .skip(lines.len().saturating_sub(LINES))
        .map(|line| format!("  {line}"));
    last.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_redis_and_valkey() {
        assert_eq!(
            version_in("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0"),
            Some("7.0.15")
        );
        assert_eq!(
            version_in("Valkey server v=9.1.2 sha=0 bits=64"),
            Some("9.1.2")
        );
        assert_eq!(version_in("something else"), None);
    }

    #[test]
    fn a_url_can_hold_any_path() {
        assert_eq!(
            url_of(Path::new("/a b/50%/redis.sock")),
            "unix:///a%20b/50%25/redis.sock"
        );
    }
}
