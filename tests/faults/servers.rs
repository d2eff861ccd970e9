//! The private servers of this test target. Each can be killed, stopped, cut off, and started again
//! at the same address.

use std::{
    fs,
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

use crate::support::redis::{connect, patient};

/// What faults can do to a server.
pub(crate) trait Server: Send {
    fn name(&self) -> String;
    fn pid(&self) -> Option<Pid>;
    /// Starts it at the same address with its existing data. Returns when it accepts requests.
    fn start(&mut self);

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            kill(pid, signal).ok();
        }
    }

    /// Sends SIGKILL; returns when the process is gone.
    fn kill9(&mut self) {
        let pid = self.pid().expect("it runs");
        kill(pid, Signal::SIGKILL).expect("it is ours");
        let deadline = Instant::now() + Duration::from_secs(10);
        while is_alive(pid) {
            assert!(Instant::now() < deadline, "{} lives on", self.name());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// True until all threads of the process have ended. The first thread may be a zombie while others
/// still end, and sockets keep listening until the last thread has ended.
fn is_alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| threads > 1 || !rest.starts_with('Z'))
}

/// A redis-server or valkey-server on a unix socket, with fsync always: it keeps everything that it
/// has acknowledged.
pub(crate) struct Redis {
    program: String,
    dir: PathBuf,
    child: Option<Child>,
}

impl Redis {
    pub(crate) fn start(program: &str, dir: PathBuf) -> Self {
        fs::create_dir_all(&dir).unwrap();
        let mut redis = Self {
            program: program.to_owned(),
            dir,
            child: None,
        };
        Server::start(&mut redis);
        redis
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("redis.sock")
    }

    pub(crate) fn url(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    pub(crate) async fn connect(&self) -> redis::aio::MultiplexedConnection {
        patient(self.url()).await
    }

    pub(crate) async fn command(&self, words: &[&str]) -> redis::RedisResult<redis::Value> {
        redis::cmd(words[0])
            .arg(&words[1..])
            .query_async(&mut self.connect().await)
            .await
    }

    fn answers(&self) -> bool {
        let ping = || {
            let mut stream = UnixStream::connect(self.socket())?;
            stream.set_read_timeout(Some(Duration::from_secs(1)))?;
            stream.write_all(b"PING\r\n")?;
            let mut answer = [0; 5];
            stream.read_exact(&mut answer).map(|()| &answer == b"+PONG")
        };
        ping().unwrap_or(false)
    }
}

impl Server for Redis {
    fn name(&self) -> String {
        "Redis".into()
    }

    fn pid(&self) -> Option<Pid> {
        self.child
            .as_ref()
            .map(|child| Pid::from_raw(child.id().cast_signed()))
    }

    fn start(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().unwrap();
        }
        let child = Command::new(&self.program)
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
            .args([
                "--appendfsync",
                "always",
                "--logfile",
                "redis.log",
                "--maxmemory-policy",
                "noeviction",
            ])
            .arg("--dir")
            .arg(&self.dir)
            .current_dir(&self.dir)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed");
        self.child = Some(child);
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.answers() {
            assert!(
                Instant::now() < deadline,
                "{} does not come up: see {}",
                self.program,
                self.dir.display()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

/// A server started by a script in `scripts/`: `start-NAME DIR` prints its address, and writes its
/// pid to a file.
pub(crate) struct Scripted {
    script: &'static str,
    dir: PathBuf,
    pid_file: PathBuf,
    env: Vec<(String, String)>,
    address: String,
    /// The command line of a database, for later starts: its script would choose a different port.
    command: Vec<String>,
    again: Option<Child>,
}

impl Scripted {
    pub(crate) fn start(script: &'static str, dir: PathBuf, env: Vec<(String, String)>) -> Self {
        let pid_file = dir.join("pid");
        let (address, command) = (String::new(), Vec::new());
        let mut server = Self {
            script,
            dir,
            pid_file,
            env,
            address,
            command,
            again: None,
        };
        server.address = server.run();
        if let Some(pid) = server.pid().filter(|_| server.address.contains("mysql://")) {
            let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
            server.command = words.split_terminator('\0').map(str::to_owned).collect();
        }
        server
    }

    /// One of several servers started by the same script, with its own pid file.
    pub(crate) fn member(&self, pid_file: PathBuf) -> Self {
        let (dir, env, address) = (self.dir.clone(), self.env.clone(), self.address.clone());
        Self {
            script: self.script,
            dir,
            pid_file,
            env,
            address,
            command: Vec::new(),
            again: None,
        }
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn pid_file(&self) -> &Path {
        &self.pid_file
    }

    /// The script's name, the state of the process, and the end of its log.
    pub(crate) fn last_words(&self) -> String {
        let folder = self.pid_file.parent().unwrap();
        let log = fs::read_to_string(
            folder.join(format!("{}.log", self.script.trim_start_matches("start-"))),
        );
        let lines: Vec<String> = log
            .unwrap_or_default()
            .lines()
            .rev()
            .take(10)
            .map(str::to_owned)
            .collect();
        let lines: String = lines
            .iter()
            .rev()
            .map(|line| format!("\n      {line}"))
            .collect();
        format!(
            "{} {}{lines}",
            self.name(),
            if self.pid().is_some() {
                "lives"
            } else {
                "is dead"
            }
        )
    }

    fn run(&self) -> String {
        let script = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("scripts")
            .join(self.script);
        let output = Command::new(script)
            .arg(&self.dir)
            .envs(self.env.iter().cloned())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy;
        assert!(
            output.status.success(),
            "{} failed:\n{}",
            self.script,
            text(&output.stderr)
        );
        text(&output.stdout)
            .lines()
            .last()
            .expect("it prints its address")
            .trim()
            .to_owned()
    }
}

impl Server for Scripted {
    fn name(&self) -> String {
        let name = self.script.trim_start_matches("start-");
        match self
            .pid_file
            .parent()
            .filter(|parent| *parent != self.dir)
            .and_then(Path::file_name)
        {
            Some(member) => format!("{name} {}", member.display()),
            None => name.to_owned(),
        }
    }

    fn pid(&self) -> Option<Pid> {
        if let Some(child) = &self.again {
            return Some(Pid::from_raw(child.id().cast_signed())).filter(|pid| is_alive(*pid));
        }
        let pid = Pid::from_raw(
            fs::read_to_string(&self.pid_file)
                .ok()?
                .trim()
                .parse()
                .ok()?,
        );
        is_alive(pid).then_some(pid)
    }

    fn start(&mut self) {
        if self.command.is_empty() {
            assert_eq!(self.run(), self.address, "it came back at another place");
            return;
        }
        if self.pid().is_none() {
            if let Some(mut before) = self.again.take() {
                before.wait().unwrap();
            }
            let log = fs::File::options()
                .create(true)
                .append(true)
                .open(self.dir.join("again.log"))
                .unwrap();
            let mut command = Command::new(&self.command[0]);
            command
                .args(&self.command[1..])
                .stdin(Stdio::null())
                .stdout(log.try_clone().unwrap())
                .stderr(log);
            self.again = Some(command.spawn().unwrap());
        }
        let url = url::Url::parse(&self.address).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while std::net::TcpStream::connect(("127.0.0.1", url.port().unwrap())).is_err() {
            assert!(
                Instant::now() < deadline,
                "{} does not come up: see {}",
                self.name(),
                self.dir.display()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Three masters with one replica each. After a failover, the last acknowledged writes of the old
/// master may be missing.
pub(crate) struct Cluster(Scripted);

impl Cluster {
    const NODES: usize = 6;
    pub(crate) const SCRIPT: &str = "start-redis-cluster";

    pub(crate) fn start(dir: PathBuf) -> Self {
        Self(Scripted::start(
            Self::SCRIPT,
            dir,
            vec![("TASKD_REDIS_NODE_TIMEOUT".to_owned(), "2000".to_owned())],
        ))
    }

    pub(crate) fn url(&self) -> String {
        self.0.address().to_owned()
    }

    /// The numbers of the masters, with a connection to each.
    pub(crate) async fn masters(&self) -> Vec<(usize, redis::aio::MultiplexedConnection)> {
        let mut masters = Vec::new();
        for node in 0..Self::NODES {
            let port = fs::read_to_string(self.0.dir().join(format!("{node}/port"))).unwrap();
            let client = redis::Client::open(format!("redis://127.0.0.1:{}", port.trim())).unwrap();
            let Ok(mut connection) = connect(&client).await else {
                continue;
            };
            let role: Vec<redis::Value> = redis::cmd("ROLE")
                .query_async(&mut connection)
                .await
                .unwrap();
            if role[0] == redis::Value::BulkString(b"master".to_vec()) {
                masters.push((node, connection));
            }
        }
        masters
    }

    pub(crate) fn node(&self, node: usize) -> Scripted {
        self.0.member(self.0.dir().join(format!("{node}/pid")))
    }

    /// Starts the nodes that died, as replicas of the new masters.
    pub(crate) fn start_again(&mut self) {
        self.0.start();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        (0..Self::NODES).for_each(|node| self.node(node).signal(Signal::SIGKILL));
    }
}

/// True if this checkout has the script.
pub(crate) fn has_script(name: &str) -> bool {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("scripts")
        .join(name)
        .exists()
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        if let Some(mut child) = self.again.take() {
            child.wait().ok();
        }
    }
}
