//! redis-server as a child process.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::{fs::OpenOptionsExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicI32, Ordering},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use redis::aio::MultiplexedConnection;
use tokio::{
    process::{Child, Command},
    sync::Mutex,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{DataDir, Error, data_dir, machine, orphan::Traces};

/// How long a server may take to end once it was asked.
pub(super) const STOP: Duration = Duration::from_secs(10);
/// How long a server without data may take to answer …
const START: Duration = Duration::from_secs(30);
/// … and how slowly a poor disk loads the append-only file.
const LOADED_PER_SECOND: u64 = 5 << 20;
/// How often a server that is killed at its first start is started.
const STARTS: usize = 5;
/// A server that has run so long is in good health: when it dies, the next one starts at once.
const HEALTHY: Duration = Duration::from_secs(30);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const LARGEST_LOG: u64 = 8 << 20;

/// A running redis-server. When it is dropped, the server is killed: nothing that was answered is lost by that.
#[derive(Debug)]
pub struct RedisServer {
    /// `None` between the death of one and the start of the next.
    child: Mutex<Option<Child>>,
    launch: Launch,
}

impl RedisServer {
    /// Starts redis-server in the data folder and waits until it has loaded its data.
    pub async fn start(data: &DataDir) -> Result<Self, Error> {
        Self::start_binary(data, "redis-server").await
    }

    /// The same with so many bytes as its `maxmemory`; 0: half of what there is.
    pub async fn start_with(data: &DataDir, max_memory: u64) -> Result<Self, Error> {
        Self::start_program(data, "redis-server", max_memory).await
    }

    /// The same with another name or path of the program.
    pub async fn start_binary(data: &DataDir, binary: &str) -> Result<Self, Error> {
        Self::start_program(data, binary, 0).await
    }

    async fn start_program(data: &DataDir, binary: &str, max_memory: u64) -> Result<Self, Error> {
        check_version(binary).await?;
        let launch = Launch::new(data, binary, max_memory)?;
        let traces =
            Traces { url: &launch.url, socket: &launch.socket, pid_file: &launch.pid_file, redis: &launch.redis };
        traces.end().await?;
        let mut pauses = Pauses::default();
        for _ in 1..STARTS {
            match launch.start().await {
                Ok(child) => return Ok(Self { child: Mutex::new(Some(child)), launch }),
                // Somebody or the kernel killed it; what it does not like itself it says, and exits.
                Err(error @ Error::Ended { status, .. }) if status.signal().is_some() => {
                    tracing::warn!("starting redis-server again: {error}");
                    sleep(pauses.after(Duration::ZERO)).await;
                }
                Err(error) => return Err(error),
            }
        }
        let child = launch.start().await?;
        Ok(Self { child: Mutex::new(Some(child)), launch })
    }

    /// The way to it. It stays the same when the server is started again.
    pub fn url(&self) -> &str {
        &self.launch.url
    }

    /// Sends SIGTERM, at which it ends by itself, and waits for nothing.
    pub fn terminate(&self) {
        let pid = self.launch.pid.load(Ordering::Relaxed);
        if pid != 0
            && let Err(error) = kill(Pid::from_raw(pid), Signal::SIGTERM)
        {
            tracing::debug!("redis-server (pid {pid}) does not get its signal: {error}");
        }
    }

    /// Starts the server again whenever it dies, until the stop; then ends it. So `stop` must come last, when nobody needs Redis any more.
    pub async fn supervise(&self, stop: CancellationToken) {
        let mut child = self.child.lock().await;
        let mut pauses = Pauses::default();
        loop {
            let began = Instant::now();
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                error = self.run(&mut child) => tracing::error!("redis-server is down: {error}"),
            }
            let pause = pauses.after(began.elapsed());
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = sleep(pause) => tracing::info!("starting redis-server again"),
            }
        }
        if let Some(child) = child.take() {
            self.launch.stop(child).await;
        }
    }

    /// Starts the server if there is none, waits for its end, and says why it came.
    async fn run(&self, slot: &mut Option<Child>) -> Error {
        let child = match slot {
            Some(child) => child,
            None => match self.launch.start().await {
                Ok(child) => slot.insert(child),
                Err(error) => return error,
            },
        };
        let end = child.wait().await;
        self.launch.pid.store(0, Ordering::Relaxed);
        *slot = None;
        match end {
            Ok(status) => self.launch.ended(status),
            Err(cause) => self.launch.cannot_run(cause),
        }
    }
}

/// How to start it. Does not change while taskd runs.
#[derive(Debug)]
struct Launch {
    binary: String,
    url: String,
    socket: PathBuf,
    pid_file: PathBuf,
    log: PathBuf,
    redis: PathBuf,
    /// 0: without a limit.
    max_memory: u64,
    /// Of the one that runs; 0 before the first and when one has ended.
    pid: AtomicI32,
    /// Nobody else may take the folder while our server runs in it.
    _data: DataDir,
}

impl Launch {
    fn new(data: &DataDir, binary: &str, max_memory: u64) -> Result<Self, Error> {
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
            redis: data.private_folder("redis")?,
            max_memory,
            pid: AtomicI32::new(0),
            _data: data.clone(),
        })
    }

    /// Starts the server and waits until it answers.
    async fn start(&self) -> Result<Child, Error> {
        let mut child = self.spawn()?;
        if let Err(error) = self.ready(&mut child).await {
            child.kill().await.ok();
            return Err(error);
        }
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).unwrap_or_default();
        self.pid.store(pid, Ordering::Relaxed);
        tracing::info!(pid, "redis-server answers at {}", self.url);
        Ok(child)
    }

    fn spawn(&self) -> Result<Child, Error> {
        let log = self.open_log()?;
        let copy = log.try_clone().map_err(|cause| self.cannot_run(cause))?;
        let mut command = Command::new(&self.binary);
        // What is wrong with its arguments it says before it opens its log.
        command.stdin(Stdio::null()).stdout(log).stderr(copy).kill_on_drop(true);
        // A group of its own: Ctrl-C on the terminal must not end Redis before taskd has drained.
        command.process_group(0);
        // It may have been removed by somebody who wants to begin anew.
        fs::create_dir_all(&self.redis).map_err(|cause| Error::Folder { folder: self.redis.clone(), cause })?;
        for (name, path) in [
            ("--dir", &self.redis),
            ("--unixsocket", &self.socket),
            ("--pidfile", &self.pid_file),
            ("--logfile", &self.log),
        ] {
            command.arg(name).arg(path);
        }
        // DEBUG and MODULE are off by default and stay so; so do the limits at which the append-only file is rewritten.
        command.args(["--port", "0", "--unixsocketperm", "700", "--daemonize", "no", "--supervised", "no"]);
        command.args(["--appendonly", "yes", "--appendfsync", "always", "--save", ""]);
        // A last write that was cut short by a crash was never answered.
        command.args(["--aof-load-truncated", "yes", "--lua-time-limit", "5000"]);
        command.args(["--maxmemory", &self.max_memory.to_string(), "--maxmemory-policy", "noeviction"]);
        command.spawn().map_err(|cause| self.cannot_run(cause))
    }

    /// Waits until the server answers, for a time that grows with what it has to load.
    async fn ready(&self, child: &mut Child) -> Result<(), Error> {
        const SAY_EVERY: Duration = Duration::from_secs(3);
        let megabytes = bytes_in(&self.redis) >> 20;
        let limit = START + Duration::from_secs((megabytes << 20) / LOADED_PER_SECOND);
        let (began, mut said) = (Instant::now(), Instant::now());
        loop {
            if let Some(status) = child.try_wait().map_err(|cause| self.cannot_run(cause))? {
                return Err(self.ended(status));
            }
            if is_ready(&self.url).await {
                return Ok(());
            }
            if began.elapsed() > limit {
                return Err(Error::Slow { limit, log: self.log.clone(), last: tail(&self.log) });
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

    /// Asks it to end, and kills it when it does not.
    async fn stop(&self, mut child: Child) {
        let ended = ask_to_end(&self.url).await && timeout(STOP, child.wait()).await.is_ok();
        if ended {
            tracing::info!("redis-server has ended");
            return;
        }
        tracing::warn!("redis-server does not end when asked: killed");
        if let Err(cause) = child.kill().await {
            tracing::warn!("cannot kill redis-server: {cause}");
        }
    }

    /// The log, begun anew when it has grown large.
    fn open_log(&self) -> Result<File, Error> {
        if self.log.metadata().is_ok_and(|log| log.len() > LARGEST_LOG) {
            fs::rename(&self.log, self.log.with_extension("log.old")).ok();
        }
        let opened = OpenOptions::new().create(true).append(true).mode(0o600).open(&self.log);
        opened.map_err(|cause| Error::Folder { folder: self.log.clone(), cause })
    }

    fn ended(&self, status: std::process::ExitStatus) -> Error {
        Error::Ended { status, log: self.log.clone(), last: tail(&self.log) }
    }

    fn cannot_run(&self, cause: io::Error) -> Error {
        Error::Run { binary: self.binary.clone(), cause }
    }
}

/// How long to wait before the next start: not at all after the first death, up to five seconds if it goes on like that.
#[derive(Default)]
struct Pauses {
    next: Duration,
}

impl Pauses {
    fn after(&mut self, lived: Duration) -> Duration {
        if lived > HEALTHY {
            self.next = Duration::ZERO;
        }
        let pause = self.next;
        self.next = (pause * 2).clamp(Duration::from_millis(100), LONGEST_PAUSE);
        pause
    }
}

async fn check_version(binary: &str) -> Result<(), Error> {
    let fail = |cause: io::Error| match cause.kind() {
        io::ErrorKind::NotFound => Error::Missing { binary: binary.to_owned() },
        _ => Error::Run { binary: binary.to_owned(), cause },
    };
    let mut command = Command::new(binary);
    command.arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(Duration::from_secs(10), command.output());
    let output =
        output.await.unwrap_or_else(|_| Err(io::Error::other("it does not tell its version"))).map_err(fail)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = version_in(&text).ok_or_else(|| fail(io::Error::other("it does not tell its version")))?;
    match version.split('.').next().and_then(|major| major.parse::<u32>().ok()) {
        Some(major) if major >= 7 => Ok(()),
        _ => Err(Error::TooOld { binary: binary.to_owned(), version: version.to_owned() }),
    }
}

/// From `Redis server v=7.0.15 sha=…`.
fn version_in(text: &str) -> Option<&str> {
    text.split_whitespace().find_map(|word| word.strip_prefix("v="))
}

/// `unix:///…`, with what a URL cannot hold escaped.
fn url_of(socket: &Path) -> String {
    let url = url::Url::from_file_path(socket).expect("the data folder's path is absolute");
    url.as_str().replacen("file:", "unix:", 1)
}

/// A connection for one question. A server that is loading or hangs does not hold us up.
async fn connect(url: &str) -> redis::RedisResult<MultiplexedConnection> {
    const PATIENCE: Option<Duration> = Some(Duration::from_secs(2));
    let config = redis::AsyncConnectionConfig::new().set_connection_timeout(PATIENCE).set_response_timeout(PATIENCE);
    redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await
}

/// Answers, and is not loading its data any more: PING is refused until then.
async fn is_ready(url: &str) -> bool {
    let Ok(mut conn) = connect(url).await else { return false };
    redis::cmd("PING").query_async::<String>(&mut conn).await.is_ok()
}

/// The folder in which the server at this URL keeps its data.
pub(super) async fn folder_of(url: &str) -> Option<String> {
    let mut conn = connect(url).await.ok()?;
    let answer: Vec<String> = redis::cmd("CONFIG").arg("GET").arg("dir").query_async(&mut conn).await.ok()?;
    answer.into_iter().nth(1)
}

/// Asks for the end without a snapshot, which the append-only file makes needless. Says whether the server was reached.
pub(super) async fn ask_to_end(url: &str) -> bool {
    let Ok(mut conn) = connect(url).await else { return false };
    // There is no answer when it succeeds: the connection ends.
    match redis::cmd("SHUTDOWN").arg("NOSAVE").query_async::<()>(&mut conn).await {
        Ok(()) => true,
        Err(error) => error.is_io_error() || error.is_connection_dropped(),
    }
}

/// The size of all files in and below the folder.
fn bytes_in(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let sizes = entries.flatten().map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes_in(&entry.path()),
        Ok(found) => found.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

/// The last lines of the log.
fn tail(log: &Path) -> String {
    const BYTES: u64 = 4096;
    const LINES: usize = 8;
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let from = file.metadata()?.len().saturating_sub(BYTES);
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_else(|cause| format!("(cannot be read: {cause})").into_bytes());
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines.iter().skip(lines.len().saturating_sub(LINES)).map(|line| format!("  {line}"));
    last.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_restart_is_at_once_and_a_dying_server_is_given_time() {
        let mut pauses = Pauses::default();
        let quick = Duration::from_secs(1);
        let seen: Vec<u128> = (0..8).map(|_| pauses.after(quick).as_millis()).collect();
        assert_eq!(seen, [0, 100, 200, 400, 800, 1600, 3200, 5000]);
        assert_eq!(pauses.after(HEALTHY * 2), Duration::ZERO);
    }

    #[test]
    fn versions_are_read_from_redis_and_valkey() {
        assert_eq!(version_in("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0"), Some("7.0.15"));
        assert_eq!(version_in("Valkey server v=9.1.2 sha=0 bits=64"), Some("9.1.2"));
        assert_eq!(version_in("something else"), None);
    }

    #[test]
    fn a_url_can_hold_any_path() {
        assert_eq!(url_of(Path::new("/a b/50%/redis.sock")), "unix:///a%20b/50%25/redis.sock");
    }
}
