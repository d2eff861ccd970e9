//! The embedded redis-server: it keeps its data through every kind of death, and a folder never has
//! two.

use std::{
    env, fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use redis::AsyncCommands;
use taskd::embedded::{DataDir, Error, RedisServer};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::support::{self, PATIENCE, kill9_process_of, until};

/// A data folder in which a test starts servers one after the other.
struct Folder {
    _root: TempDir,
    path: PathBuf,
}

impl Drop for Folder {
    fn drop(&mut self) {
        kill9_process_of(&self.path.join("redis.pid"), &self.path);
    }
}

impl Folder {
    fn new() -> Self {
        Self::below("data")
    }

    fn below(name: impl AsRef<Path>) -> Self {
        let root = tempfile::tempdir().expect("a temp dir");
        let path = root.path().join(name);
        Self { _root: root, path }
    }

    /// A child that another test has forked holds a copy of an open lock until it executes its
    /// program.
    fn lock(&self) -> DataDir {
        let began = Instant::now();
        loop {
            match DataDir::lock(&self.path) {
                Ok(data_dir) => return data_dir,
                Err(error) => assert!(
                    began.elapsed() < Duration::from_secs(10),
                    "the data folder: {error:?}"
                ),
            }
            std::thread::yield_now();
        }
    }

    async fn start(&self) -> RedisServer {
        RedisServer::start(&self.lock())
            .await
            .expect("redis-server starts")
    }

    /// The pid that redis-server wrote.
    fn pid(&self) -> i32 {
        let text = fs::read_to_string(self.path.join("redis.pid")).expect("a pid file");
        text.trim().parse().expect("a pid")
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("redis-server can be signalled");
    }
}

/// A supervised server, and the way to end it.
struct Watched {
    url: String,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Watched {
    fn new(server: RedisServer) -> Self {
        let (url, stop) = (server.url().to_owned(), CancellationToken::new());
        let (server, token) = (Arc::new(server), stop.clone());
        let task = tokio::spawn(async move { server.supervise(token).await });
        Self { url, stop, task }
    }

    async fn end(self) {
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.task)
            .await
            .expect("an end in time")
            .expect("no panic");
    }
}

async fn try_get(url: &str) -> redis::RedisResult<Option<String>> {
    let client = redis::Client::open(url)?;
    support::redis::connect(&client).await?.get("key").await
}

async fn get(url: &str) -> Option<String> {
    try_get(url).await.expect("redis-server answers")
}

async fn set(url: &str, value: &str) {
    let mut conn = support::redis::patient(url).await;
    conn.set::<_, _, ()>("key", value)
        .await
        .expect("SET is answered");
}

/// The first answer of the server after it comes back.
async fn get_after_death(url: &str) -> Option<String> {
    let mut value = None;
    until("redis-server is back", async || {
        let answer = try_get(url).await;
        let is_back = answer.is_ok();
        value = answer.ok().flatten();
        is_back
    })
    .await;
    value
}

fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[tokio::test]
async fn it_starts_and_stops_and_keeps_its_data() {
    let folder = Folder::new();
    let watched = Watched::new(folder.start().await);
    set(&watched.url, "kept").await;
    let pid = folder.pid();
    watched.end().await;
    assert!(!is_alive(pid));
    let again = folder.start().await;
    assert_eq!(get(again.url()).await.as_deref(), Some("kept"));
}

#[tokio::test]
async fn taskd_runs_on_the_settings_it_starts() {
    let folder = Folder::new();
    let server = folder.start().await;
    let redis = taskd::redis_pool::Redis::connect(server.url(), "taskd:")
        .await
        .expect("a connection");
    redis
        .check()
        .await
        .expect("a Redis on which the promises hold");
    let fsync: Vec<String> = redis::cmd("CONFIG")
        .arg("GET")
        .arg("appendfsync")
        .query_async(&mut redis.conn())
        .await
        .expect("an answer");
    assert_eq!(fsync, ["appendfsync", "always"]);
}

#[tokio::test]
async fn a_killed_server_is_back_with_its_data() {
    let folder = Folder::new();
    let watched = Watched::new(folder.start().await);
    for round in 0..3 {
        let value = format!("round {round}");
        set(&watched.url, &value).await;
        folder.signal(Signal::SIGKILL);
        assert_eq!(get_after_death(&watched.url).await, Some(value));
    }
    watched.end().await;
}

#[tokio::test]
async fn the_stop_comes_through_while_the_server_cannot_be_started() {
    let folder = Folder::new();
    let watched = Watched::new(folder.start().await);
    for _ in 0..10 {
        set(&watched.url, "some value that takes a few bytes").await;
    }
    spoil_the_middle(&folder.path.join("redis/appendonlydir"));
    let log = folder.path.join("redis.log");
    folder.signal(Signal::SIGKILL);
    let failures = || {
        fs::read_to_string(&log)
            .expect("the log")
            .matches("Bad file format")
            .count()
    };
    until("it has been tried again and again", async || {
        failures() >= 3
    })
    .await;
    watched.end().await;
}

#[tokio::test]
async fn it_is_not_handed_out_before_its_data_is_loaded() {
    const KEYS: usize = 300_000;
    let folder = Folder::new();
    let data = folder.lock();
    let aof = folder.path.join("redis/appendonlydir");
    fs::create_dir_all(&aof).expect("a folder");
    fs::write(
        aof.join("appendonly.aof.manifest"),
        "file appendonly.aof.1.incr.aof seq 1 type i\n",
    )
    .expect("written");
    let sets = (0..KEYS).map(|key| format!("*3\r\n$3\r\nSET\r\n$6\r\n{key:06}\r\n$1\r\nv\r\n"));
    fs::write(
        aof.join("appendonly.aof.1.incr.aof"),
        sets.collect::<String>(),
    )
    .expect("written");
    let server = RedisServer::start(&data)
        .await
        .expect("redis-server starts");
    let redis = taskd::redis_pool::Redis::connect(server.url(), "")
        .await
        .expect("a connection");
    let size: usize = redis::cmd("DBSIZE")
        .query_async(&mut redis.conn())
        .await
        .expect("an answer");
    assert_eq!(size, KEYS);
}

#[tokio::test]
async fn ctrl_c_on_the_terminal_does_not_reach_it() {
    let folder = Folder::new();
    let _server = folder.start().await;
    let stat = fs::read_to_string(format!("/proc/{}/stat", folder.pid())).expect("its state");
    let (_, rest) = stat.rsplit_once(") ").expect("fields");
    let group = rest.split(' ').nth(2).expect("a group");
    assert_eq!(
        group,
        folder.pid().to_string(),
        "it leads a process group of its own"
    );
}

#[tokio::test]
async fn a_server_that_hangs_does_not_hold_up_the_stop_for_ever() {
    let folder = Folder::new();
    let watched = Watched::new(folder.start().await);
    let pid = folder.pid();
    folder.signal(Signal::SIGSTOP);
    watched.end().await;
    assert!(!is_alive(pid));
}

#[tokio::test]
async fn a_server_that_is_dropped_ends() {
    let folder = Folder::new();
    let server = folder.start().await;
    let pid = folder.pid();
    drop(server);
    until("redis-server has ended", async || !is_alive(pid)).await;
}

/// Starts another process that has a server in this folder, as taskd has.
fn helper(folder: &Folder) -> Child {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args([
        "embedded::helper_process",
        "--exact",
        "--ignored",
        "--nocapture",
    ]);
    command
        .env("TASKD_TEST_HELPER_DIR", &folder.path)
        .stdout(Stdio::piped());
    let mut child = command.spawn().expect("a helper");
    let mut lines = BufReader::new(child.stdout.as_mut().expect("its output")).lines();
    assert!(
        lines.any(|line| line.expect("a line").contains("helper is ready")),
        "the helper ended early"
    );
    child
}

/// Not a test: the program of `helper`.
#[tokio::test]
#[ignore = "run by other tests, in a process of its own"]
async fn helper_process() {
    let Ok(path) = env::var("TASKD_TEST_HELPER_DIR") else {
        return;
    };
    let data = DataDir::lock(path).expect("the data folder");
    let _server = RedisServer::start(&data)
        .await
        .expect("redis-server starts");
    println!("helper is ready");
    std::future::pending::<()>().await;
}

/// Leaves a redis-server behind that holds "kept" and whose taskd was killed.
async fn leave_an_orphan(folder: &Folder) -> i32 {
    let mut helper = helper(folder);
    let socket = folder.path.join("redis.sock");
    set(&format!("unix://{}", socket.display()), "kept").await;
    helper.kill().expect("a kill");
    helper.wait().expect("an end");
    assert!(is_alive(folder.pid()), "redis-server outlives its taskd");
    folder.pid()
}

#[tokio::test]
async fn what_a_killed_taskd_left_behind_is_replaced() {
    let folder = Folder::new();
    let orphan = leave_an_orphan(&folder).await;
    let server = folder.start().await;
    assert!(!is_alive(orphan));
    assert_ne!(folder.pid(), orphan);
    assert_eq!(get(server.url()).await.as_deref(), Some("kept"));
}

#[tokio::test]
async fn an_orphan_that_hangs_is_killed() {
    let folder = Folder::new();
    let orphan = leave_an_orphan(&folder).await;
    folder.signal(Signal::SIGSTOP);
    let server = folder.start().await;
    assert!(!is_alive(orphan));
    assert_eq!(get(server.url()).await.as_deref(), Some("kept"));
}

#[tokio::test]
async fn an_orphan_without_its_socket_is_found_by_its_pid_file() {
    let folder = Folder::new();
    let orphan = leave_an_orphan(&folder).await;
    fs::remove_file(folder.path.join("redis.sock")).expect("the socket");
    let server = folder.start().await;
    assert!(!is_alive(orphan));
    assert_eq!(get(server.url()).await.as_deref(), Some("kept"));
}

#[tokio::test]
async fn a_pid_file_that_names_somebody_else_harms_nobody() {
    let folder = Folder::new();
    drop(folder.lock());
    let mut other = Command::new("sleep")
        .arg("60")
        .spawn()
        .expect("another process");
    fs::write(folder.path.join("redis.pid"), other.id().to_string()).expect("a pid file");
    let _server = folder.start().await;
    assert_eq!(other.try_wait().expect("its state"), None, "it lives");
    other.kill().expect("a kill");
    other.wait().expect("an end");
}

#[tokio::test]
async fn a_redis_of_another_folder_on_our_socket_is_left_alone() {
    let (folder, theirs) = (Folder::new(), Folder::new());
    drop(folder.lock());
    drop(theirs.lock());
    let socket = folder.path.join("redis.sock");
    let mut server = std::process::Command::new("redis-server")
        .args([
            "--port",
            "0",
            "--daemonize",
            "no",
            "--unixsocket",
            socket.to_str().unwrap(),
        ])
        .args(["--dir", theirs.path.to_str().unwrap()])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("redis-server");
    let url = format!("unix://{}", socket.display());
    until("the other redis-server answers", async || {
        try_get(&url).await.is_ok()
    })
    .await;
    let error = RedisServer::start(&folder.lock())
        .await
        .expect_err("not ours");
    assert!(matches!(error, Error::Foreign { .. }), "{error}");
    assert_eq!(get(&url).await, None, "it answers as before");
    server.kill().expect("it runs");
    server.wait().expect("it has ended");
}

#[test]
fn a_folder_has_one_taskd() {
    let folder = Folder::new();
    let first = folder.lock();
    let error = DataDir::lock(&folder.path).expect_err("taken").to_string();
    let (shown, pid) = (folder.path.display(), std::process::id());
    assert_eq!(
        error,
        format!(
            "data folder {shown} is in use by another taskd (pid {pid}); stop it, or choose another folder with \
             --data-dir"
        )
    );
    drop(first);
    folder.lock();
}

#[test]
fn a_folder_that_cannot_be_had_is_answered_with_one_line() {
    let folder = Folder::new();
    drop(folder.lock());
    let below_a_file = folder.path.join("lock").join("data");
    for path in [below_a_file.as_path(), Path::new("/proc/taskd-data")] {
        let error = DataDir::lock(path).expect_err("no folder").to_string();
        assert!(
            error.starts_with(&format!("cannot use data folder {}: ", path.display())),
            "{error}"
        );
        assert!(
            error.ends_with("or choose another one with --data-dir") && !error.contains('\n'),
            "{error}"
        );
    }
}

#[tokio::test]
async fn any_path_will_do_however_long_or_odd() {
    for name in [
        "d".repeat(150),
        "with space, 50% \"and\" ünïcode".to_owned(),
    ] {
        let folder = Folder::below(name);
        let server = folder.start().await;
        set(server.url(), "kept").await;
        assert_eq!(get(server.url()).await.as_deref(), Some("kept"));
        assert!(folder.path.join("redis/appendonlydir").is_dir());
        let socket = PathBuf::from(server.url().trim_start_matches("unix://"));
        drop(server);
        let socket_folder = socket.parent().expect("a folder");
        if socket_folder
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("taskd-"))
        {
            fs::remove_dir_all(socket_folder).expect("removed");
        }
    }
}

#[tokio::test]
async fn data_that_was_deleted_while_stopped_is_begun_anew() {
    let folder = Folder::new();
    let watched = Watched::new(folder.start().await);
    set(&watched.url, "gone").await;
    watched.end().await;
    fs::remove_dir_all(folder.path.join("redis")).expect("deleted");
    assert_eq!(get(folder.start().await.url()).await, None);
}

#[tokio::test]
async fn a_missing_program_is_answered_with_how_to_get_it() {
    let folder = Folder::new();
    let error = RedisServer::start_binary(&folder.lock(), "no-such-redis-server")
        .await
        .expect_err("missing");
    let error = error.to_string();
    assert!(
        error.contains("apt-get install redis-server") && error.contains("--redis-url"),
        "{error}"
    );
    assert!(!error.contains('\n'), "{error}");
}

#[tokio::test]
async fn an_old_redis_is_refused() {
    let folder = Folder::new();
    let data = folder.lock();
    let old = folder.path.join("old-redis");
    // Another process writes it: the kernel runs no file that this process, or a child forked
    // meanwhile, can write.
    let script =
        r#"printf '#!/bin/sh\necho Redis server v=6.2.14 sha=0\n' > "$0" && chmod +x "$0""#;
    assert!(
        Command::new("sh")
            .args(["-c", script])
            .arg(&old)
            .status()
            .expect("sh")
            .success()
    );
    let error = RedisServer::start_binary(&data, old.to_str().expect("a path"))
        .await
        .expect_err("old");
    assert!(
        matches!(&error, Error::TooOld { version, .. } if version == "6.2.14"),
        "{error}"
    );
}

#[tokio::test]
async fn a_server_that_is_killed_at_its_start_is_started_again() {
    let folder = Folder::new();
    let data = folder.lock();
    let once = folder.path.join("killed-once");
    let script = concat!(
        r#"printf '#!/bin/sh\n[ "$1" = --version ] || ! mkdir "$0.was-here" 2>/dev/null || kill -9 $$\n"#,
        r#"exec redis-server "$@"\n' > "$0" && chmod +x "$0""#
    );
    assert!(
        Command::new("sh")
            .args(["-c", script])
            .arg(&once)
            .status()
            .expect("sh")
            .success()
    );
    let server = RedisServer::start_binary(&data, once.to_str().expect("a path"))
        .await
        .expect("the second time");
    assert_eq!(get(server.url()).await, None);
    assert!(folder.path.join("killed-once.was-here").exists());
}

#[tokio::test]
async fn a_server_that_ends_at_its_start_is_quoted() {
    let folder = Folder::new();
    let watched = Watched::new(folder.start().await);
    for _ in 0..10 {
        set(&watched.url, "some value that takes a few bytes").await;
    }
    watched.end().await;
    spoil_the_middle(&folder.path.join("redis/appendonlydir"));
    let error = RedisServer::start(&folder.lock())
        .await
        .expect_err("the data is spoilt")
        .to_string();
    assert!(
        error.starts_with("redis-server ended (exit status: 1); the end of "),
        "{error}"
    );
    assert!(
        error.contains("Bad file format reading the append only file"),
        "{error}"
    );
}

fn spoil_the_middle(folder: &Path) {
    let files = fs::read_dir(folder)
        .expect("the append-only files")
        .map(|entry| entry.expect("an entry").path());
    let file = files
        .into_iter()
        .find(|path| path.to_string_lossy().ends_with(".incr.aof"))
        .expect("an increment");
    let mut bytes = fs::read(&file).expect("its bytes");
    let middle = bytes.len() / 2;
    bytes[middle..middle + 20].fill(b'?');
    fs::write(&file, bytes).expect("written");
}
