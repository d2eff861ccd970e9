//! Runs the real binary in a temporary folder; tests can kill and restart it.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{PATIENCE, port::Port, until};

/// The timeout of one request to `/readyz`.
const PROBE: Duration = Duration::from_secs(30);

pub(crate) struct Daemon {
    dir: TempDir,
    /// A wrapper command that starts taskd; empty if the binary is started directly.
    through: Vec<String>,
    args: Vec<String>,
    env: Vec<(String, String)>,
    http: Port,
    grpc: Port,
    child: Child,
    client: reqwest::Client,
}

impl Daemon {
    /// Starts taskd with this configuration and waits until it is ready. Runs all pipelines unless
    /// `args` selects some.
    pub(crate) async fn start(config: &str, args: &[&str]) -> Self {
        let mut daemon = Self::begin(config, args);
        daemon.ready().await;
        daemon
    }

    /// Like [`Self::start`], but does not wait.
    pub(crate) fn begin(config: &str, args: &[&str]) -> Self {
        Self::begin_in(config, args, Vec::new())
    }

    /// Like [`Self::begin`], with these environment variables.
    pub(crate) fn begin_in(config: &str, args: &[&str], env: Vec<(String, String)>) -> Self {
        Self::begin_through(&[], config, args, env)
    }

    /// Starts taskd with a limit of file descriptors (arguments of `ulimit`), and waits until it is
    /// ready.
    pub(crate) async fn start_with_descriptors(descriptors: &str, config: &str) -> Self {
        let limit = format!("ulimit {descriptors}; exec \"$@\"");
        let mut daemon = Self::begin_through(&["sh", "-c", &limit, "sh"], config, &[], Vec::new());
        daemon.ready().await;
        daemon
    }

    /// Starts taskd with stderr redirected to this path, and waits until it is ready.
    pub(crate) async fn start_with_stderr(path: &str) -> Self {
        let mut daemon = Self::begin_through(
            &["sh", "-c", "exec \"$@\" 2>\"$0\"", path],
            "",
            &[],
            Vec::new(),
        );
        daemon.ready().await;
        daemon
    }

    fn begin_through(
        through: &[&str],
        config: &str,
        args: &[&str],
        env: Vec<(String, String)>,
    ) -> Self {
        let through: Vec<String> = through.iter().map(ToString::to_string).collect();
        let dir = tempfile::Builder::new()
            .prefix("taskd-it-")
            .tempdir_in("/tmp")
            .unwrap();
        let file = dir.path().join("taskd.toml");
        fs::write(&file, config).unwrap();
        let [http, grpc] = [0, 1].map(|_| Port::reserve(12_000..20_000));
        let (data, http_at, grpc_at) = (
            dir.path().join("data"),
            format!("127.0.0.1:{}", http.number),
            format!("127.0.0.1:{}", grpc.number),
        );
        let [file, data] = [&file, &data].map(|path| path.to_str().unwrap());
        let own = ["--config", file, "--data-dir", data];
        let pipelines = if args.contains(&"--pipelines") {
            &[][..]
        } else {
            &["--pipelines", "all"]
        };
        let listen = ["--http-listen", &http_at, "--grpc-listen", &grpc_at];
        let args: Vec<String> = own
            .iter()
            .chain(pipelines)
            .chain(&listen)
            .chain(args)
            .map(ToString::to_string)
            .collect();
        let child = spawn(&dir, &through, &args, &env);
        Self {
            dir,
            through,
            args,
            env,
            http,
            grpc,
            child,
            client: crate::support::http_client(),
        }
    }

    /// Starts taskd with other pipelines in the folder of a daemon that has ended, and waits until
    /// it is ready.
    pub(crate) async fn start_in_the_folder_of(mut daemon: Self, args: &[&str]) -> Self {
        let pipelines = daemon
            .args
            .iter()
            .position(|arg| arg == "--pipelines")
            .expect("it names its pipelines");
        daemon.args.drain(pipelines..pipelines + 2);
        daemon.args.extend(args.iter().map(ToString::to_string));
        daemon.start_again();
        daemon.ready().await;
        daemon
    }

    pub(crate) fn http(&self) -> String {
        format!("http://127.0.0.1:{}", self.http.number)
    }

    pub(crate) fn grpc(&self) -> String {
        format!("http://127.0.0.1:{}", self.grpc.number)
    }

    /// Waits until `/readyz` answers 200. On a timeout, panics with the last answer.
    pub(crate) async fn ready(&mut self) {
        let url = format!("{}/readyz", self.http());
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("taskd ended by itself: {status}");
            }
            let said = match self.client.get(&url).timeout(PROBE).send().await {
                Ok(answer) if answer.status().is_success() => return,
                Ok(answer) => format!(
                    "{}: {}",
                    answer.status(),
                    answer.text().await.unwrap_or_default()
                ),
                Err(error) => format!("{error:?}"),
            };
            assert!(
                began.elapsed() < PATIENCE,
                "taskd is not ready: {said}\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Kills it with SIGKILL and starts it again in the same folder, without waiting.
    pub(crate) fn kill9_and_restart(&mut self) {
        self.kill9();
        self.start_again();
    }

    pub(crate) fn kill9(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn start_again(&mut self) {
        self.child = spawn(&self.dir, &self.through, &self.args, &self.env);
    }

    /// Kills its redis-server with SIGKILL; returns false if there is none at the moment.
    pub(crate) fn kill9_redis(&self) -> bool {
        self.signal_redis(Signal::SIGKILL)
    }

    pub(crate) fn signal_redis(&self, signal: Signal) -> bool {
        let Ok(pid) = fs::read_to_string(self.data().join("redis.pid")) else {
            return false;
        };
        let Ok(pid) = pid.trim().parse::<i32>() else {
            return false;
        };
        // The pid file may be stale, and the pid may belong to another program by now.
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.trim() == "redis-server" && kill(Pid::from_raw(pid), signal).is_ok()
    }

    /// The arguments that point a command to its database.
    pub(crate) fn database(&self) -> Vec<String> {
        let url = self
            .args
            .iter()
            .position(|arg| arg == "--database-url")
            .map(|at| self.args[at..at + 2].to_vec());
        let data = ["--data-dir", self.data().to_str().unwrap()].map(ToOwned::to_owned);
        url.into_iter().flatten().chain(data).collect()
    }

    /// The value of one of its command line arguments.
    pub(crate) fn arg(&self, name: &str) -> Option<&str> {
        let at = self.args.iter().position(|arg| arg == name)?;
        self.args.get(at + 1).map(String::as_str)
    }

    /// Connects to its redis-server.
    pub(crate) async fn redis(&self) -> redis::aio::MultiplexedConnection {
        let url = format!("unix://{}", self.data().join("redis.sock").display());
        super::redis::patient(url).await
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    pub(crate) fn http_port(&self) -> u16 {
        self.http.number
    }

    pub(crate) fn grpc_port(&self) -> u16 {
        self.grpc.number
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, or `None` while it runs.
    pub(crate) fn end(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Sends SIGTERM, and returns the exit status.
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

    /// The whole log.
    pub(crate) fn log(&self) -> String {
        let began = Instant::now();
        while self.is_writing_log() && began.elapsed() < Duration::from_secs(1) {
            std::thread::yield_now();
        }
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Whether taskd's thread that writes the log is at work. It sleeps when it has nothing to write.
    fn is_writing_log(&self) -> bool {
        let Ok(threads) = fs::read_dir(format!("/proc/{}/task", self.child.id())) else {
            return false;
        };
        let stats = threads.flatten().map(|thread| thread.path().join("stat"));
        stats
            .filter_map(|stat| fs::read_to_string(stat).ok())
            .any(|stat| stat.contains(" (log) R ") || stat.contains(" (log) D "))
    }

    // --- its HTTP API

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        self.try_get(path).await.unwrap()
    }

    /// Returns `None` if there is no answer.
    pub(crate) async fn try_get(&self, path: &str) -> Option<(u16, Value)> {
        Some(
            answer(
                self.client
                    .get(format!("{}{path}", self.http()))
                    .send()
                    .await
                    .ok()?,
            )
            .await,
        )
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.try_post(path, body).await.unwrap()
    }

    /// Returns `None` if there is no answer.
    pub(crate) async fn try_post(&self, path: &str, body: &Value) -> Option<(u16, Value)> {
        let request = self
            .client
            .post(format!("{}{path}", self.http()))
            .json(body);
        Some(answer(request.send().await.ok()?).await)
    }

    pub(crate) async fn post_text(
        &self,
        path: &str,
        content_type: &str,
        body: impl Into<String>,
    ) -> (u16, Value) {
        let request = self
            .client
            .post(format!("{}{path}", self.http()))
            .header("content-type", content_type);
        answer(request.body(body.into()).send().await.unwrap()).await
    }

    /// Inserts tasks, which must all be new. Returns their ids.
    pub(crate) async fn insert(&self, tasks: &[Value]) -> Vec<String> {
        let (status, answer) = self.post("/v1/tasks", &json!(tasks)).await;
        assert_eq!(status, 200, "{answer}");
        let results = answer["results"].as_array().unwrap();
        assert!(
            results.len() == tasks.len() && results.iter().all(|one| one["status"] == "CREATED"),
            "{answer}"
        );
        results
            .iter()
            .map(|one| one["id"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Leases tasks of one queue, waiting up to `wait`.
    pub(crate) async fn lease(
        &self,
        worker: &str,
        queue: &str,
        most: usize,
        wait: &str,
    ) -> Vec<Value> {
        let body = json!({"worker": worker, "queues": [queue], "max_tasks": most, "wait": wait});
        let (status, mut answer) = self.post("/v1/tasks:get", &body).await;
        assert_eq!(status, 200, "{answer}");
        serde_json::from_value(answer["tasks"].take()).unwrap()
    }

    /// Leases some tasks as `w`; none while taskd is away.
    pub(crate) async fn try_lease(&self, queue: &str, most: usize) -> Vec<Value> {
        let body = json!({"worker": "w", "queues": [queue], "max_tasks": most, "wait": "50ms"});
        match self.try_post("/v1/tasks:get", &body).await {
            Some((200, mut answer)) => serde_json::from_value(answer["tasks"].take()).unwrap(),
            _ => Vec::new(),
        }
    }

    /// Completes a task as `w`. Returns the answer, or `None` while taskd is away.
    pub(crate) async fn try_report(&self, task: &Value, completion: Value) -> Option<Value> {
        let mut answers = self.try_reports(&[task], |_| completion.clone()).await?;
        answers.pop()
    }

    /// Does so with some tasks.
    pub(crate) async fn try_reports(
        &self,
        tasks: &[&Value],
        completion: impl Fn(&Value) -> Value,
    ) -> Option<Vec<Value>> {
        if tasks.is_empty() {
            return Some(Vec::new());
        }
        let completion = |task: &&Value| {
            let mut completion = completion(task);
            completion["id"] = task["id"].clone();
            completion["lease_token"] = task["lease_token"].clone();
            completion
        };
        let completions: Vec<Value> = tasks.iter().map(completion).collect();
        let body = json!({"worker": "w", "completions": completions});
        let (_, mut answer) = self.try_post("/v1/tasks:complete", &body).await?;
        serde_json::from_value(answer["results"].take()).ok()
    }

    /// Leases tasks until there are `count`.
    pub(crate) async fn lease_all(&self, worker: &str, queue: &str, count: usize) -> Vec<Value> {
        let mut tasks = Vec::new();
        until("there are as many tasks", async || {
            tasks.extend(
                self.lease(worker, queue, (count - tasks.len()).min(1000), "1s")
                    .await,
            );
            tasks.len() == count
        })
        .await;
        tasks
    }

    /// Completes leased tasks; returns the status of each.
    pub(crate) async fn complete(&self, worker: &str, tasks: &[Value]) -> Vec<String> {
        let completion = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"], "result": worker});
        let completions: Vec<_> = tasks.iter().map(completion).collect();
        let (status, answer) = self
            .post(
                "/v1/tasks:complete",
                &json!({"worker": worker, "completions": completions}),
            )
            .await;
        assert_eq!(status, 200, "{answer}");
        let statuses = statuses(&answer);
        assert_eq!(statuses.len(), tasks.len(), "{answer}");
        statuses
    }

    /// Waits until one more task has been inserted and completed, and taskd reports that it is
    /// ready.
    pub(crate) async fn works_again(&self, queue: &str) {
        let insert = json!([{"queue": queue, "key": "works-again"}]);
        until("an insert is answered", async || {
            self.try_post("/v1/tasks", &insert)
                .await
                .is_some_and(|(status, _)| status == 200)
        })
        .await;
        let get = json!({"worker": "w", "queues": [queue], "max_tasks": 10, "wait": "1s"});
        let token = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"]});
        let mut done = false;
        // Complete everything: a task inserted before the fault may arrive last.
        until("a worker has done all there is, by SQL", async || {
            let Some((200, answer)) = self.try_post("/v1/tasks:get", &get).await else { return false };
            let leased = answer["tasks"].as_array().unwrap();
            if !leased.is_empty() {
                let complete = json!({"worker": "w", "completions": leased.iter().map(token).collect::<Vec<_>>()});
                until("its completion is taken", async || {
                    self.try_post("/v1/tasks:complete", &complete).await.is_some_and(|(status, _)| status == 200)
                })
                .await;
            }
            done |= leased.iter().any(|task| task["key"] == "works-again");
            done && self.unfinished(queue).await == 0
        })
        .await;
        until("taskd is ready", async || {
            self.try_get("/readyz")
                .await
                .is_some_and(|(status, _)| status == 200)
        })
        .await;
    }

    /// Gets and completes tasks until `queue` has none unfinished. Returns the completed keys.
    pub(crate) async fn drain(&self, worker: &str, queue: &str) -> Vec<String> {
        let mut keys = Vec::new();
        until("the queue is worked off", async || {
            keys.extend(self.work_once(worker, queue).await);
            self.unfinished(queue).await == 0
        })
        .await;
        keys
    }

    /// Like [`Self::drain`], but stops after at least `count` completions.
    pub(crate) async fn work(&self, worker: &str, queue: &str, count: usize) -> Vec<String> {
        let mut keys = Vec::new();
        until("the worker got as many", async || {
            keys.extend(self.work_once(worker, queue).await);
            keys.len() >= count
        })
        .await;
        keys
    }

    pub(crate) async fn work_once(&self, worker: &str, queue: &str) -> Vec<String> {
        let tasks = self.lease(worker, queue, 100, "100ms").await;
        assert!(
            self.complete(worker, &tasks)
                .await
                .iter()
                .all(|status| status == "OK")
        );
        tasks
            .iter()
            .map(|task| task["key"].as_str().unwrap().to_owned())
            .collect()
    }

    /// How many tasks of the queue are neither completed nor dead according to SQL. Not 0 if the
    /// number is unknown.
    pub(crate) async fn unfinished(&self, queue: &str) -> u64 {
        let queue = self.queue(queue).await;
        ["pending", "waiting", "assigned", "delayed"]
            .iter()
            .map(|state| queue[*state].as_u64().unwrap_or(1))
            .sum()
    }

    /// The queue's entry in `/v1/queues`, or null.
    pub(crate) async fn queue(&self, name: &str) -> Value {
        let Some((200, answer)) = self.try_get("/v1/queues").await else {
            return Value::Null;
        };
        answer["queues"]
            .as_array()
            .unwrap()
            .iter()
            .find(|queue| queue["queue"] == name)
            .cloned()
            .unwrap_or_default()
    }
}

pub(crate) fn keys(from: usize, to: usize) -> BTreeSet<String> {
    (from..to).map(|n| format!("key-{n}")).collect()
}

/// Converts keys to a set; panics if a key occurs twice.
pub(crate) fn once(keys: Vec<String>) -> BTreeSet<String> {
    let count = keys.len();
    let set: BTreeSet<_> = keys.into_iter().collect();
    assert_eq!(set.len(), count, "a task was done twice");
    set
}

/// The `status` of each result.
pub(crate) fn statuses(answer: &Value) -> Vec<String> {
    let results = answer["results"].as_array().unwrap();
    results
        .iter()
        .map(|one| one["status"].as_str().unwrap().to_owned())
        .collect()
}

async fn answer(response: reqwest::Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    // Convert JSON lines to a list.
    let lines = text
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<Vec<Value>, _>>();
    let value = match (serde_json::from_str(&text), lines) {
        (Ok(value), _) => value,
        (Err(_), Ok(lines)) => lines.into(),
        (Err(_), Err(_)) => text.into(),
    };
    (status, value)
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        self.kill9_redis();
        if std::thread::panicking() {
            self.dir.disable_cleanup(true);
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            eprintln!(
                "{} is kept; the end of taskd's log:\n{}",
                self.dir.path().display(),
                lines[lines.len().saturating_sub(60)..].join("\n")
            );
        }
    }
}

fn spawn(dir: &TempDir, through: &[String], args: &[String], env: &[(String, String)]) -> Child {
    let log = File::options()
        .create(true)
        .append(true)
        .open(dir.path().join("log"))
        .unwrap();
    let mut line = through
        .iter()
        .map(String::as_str)
        .chain([env!("CARGO_BIN_EXE_taskd")]);
    let mut command = Command::new(line.next().unwrap());
    command.args(line);
    // Remove the tests' own variables, because taskd rejects unknown ones.
    command.env_remove("TASKD_SEED").env_remove("TASKD_SOAK");
    command
        .args(args)
        .envs(env.iter().cloned())
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log);
    command.spawn().unwrap()
}
