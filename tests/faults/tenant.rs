//! A tenant that takes everything it can get, and strangers without a token, next to the honest
//! workers of another tenant.
//!
//! It runs a single process on taskd's embedded servers, with tokens. First the honest workers are
//! alone, then the others join. All calls of the honest workers must succeed, none of their tasks
//! may fail, and the memory of the process must stay within a bound.

use std::{
    fs,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::{BufMut, Bytes};
use serde_json::{Value, json};
use taskd::wire::pb;
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::support::{daemon::Daemon, http_client, until};

const MIB: usize = 1 << 20;
const REQUEST_BUDGET: usize = 256 * MIB;
/// How much memory the process may use in addition to its `request_budget`.
const BESIDES: usize = 300 * MIB;

const CONFIG: &str = r##"
auth = "tokens"
max_connections = 600
max_queues = 200
request_budget = "256MiB"
[queues.good]
lease = "60s"
max_attempts = 1
[queues."bad.trees"]
payload_schema = """
{"$ref": "#/$defs/node", "$defs": {"node": {"anyOf": [
  {"type": "object", "properties": {"type": {"const": "and"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "required": ["type"]},
  {"type": "object", "properties": {"type": {"const": "or"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "required": ["type"]},
  {"type": "object", "properties": {"type": {"const": "not"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "required": ["type"]}
]}}}"""
"##;

/// The number of honest workers, and how many rounds each makes, first alone and then among the
/// others.
const HONEST: usize = 4;
const ROUNDS: usize = 60;
/// How long a client pauses after it was refused or disconnected. The clients hold on to resources,
/// and do not flood taskd with new calls.
const AGAIN: Duration = Duration::from_secs(10);

pub(crate) async fn play() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let good = token(
        &daemon,
        "good",
        &["--roles", "insert,work,read", "--queues", "good"],
    );
    let bad = token(
        &daemon,
        "bad",
        &["--roles", "insert,work,read,admin", "--queues", "bad.*"],
    );
    for token in [&good, &bad] {
        until("the token is known", async || {
            try_call(&daemon, token, "/v1/tasks:get", &json!({}))
                .await
                .0
                != 401
        })
        .await;
    }
    let alone = honest(&daemon, &good, "alone").await;
    let before = memory(&daemon, "VmRSS");
    let tenant = Tenant::start(&daemon, bad);
    until(
        "each of the tenant's clients did its worst once",
        async || tenant.is_at_its_worst(),
    )
    .await;
    let among = honest(&daemon, &good, "among").await;
    let peak = memory(&daemon, "VmHWM");
    tenant.stop().await;
    println!(
        "    honest calls: p99 {:.0} ms alone, {:.0} ms next to the tenant; memory {} MiB before, {} MiB at its peak",
        alone.as_secs_f64() * 1e3,
        among.as_secs_f64() * 1e3,
        before / MIB,
        peak / MIB
    );
    assert!(peak <= REQUEST_BUDGET + BESIDES, "{} MiB", peak / MIB);
    let (_, queue) = try_get(&daemon, &good, "/v1/queues").await;
    let queue = queue["queues"]
        .as_array()
        .unwrap()
        .iter()
        .find(|queue| queue["queue"] == "good")
        .unwrap()
        .clone();
    assert_eq!(queue["dead"], 0, "{queue}");
    assert!(daemon.stop().await.success());
}

/// Inserts, gets and completes tasks in each round, mostly small and some larger ones. Returns the
/// 99th percentile of the duration of all calls.
async fn honest(daemon: &Daemon, token: &str, phase: &'static str) -> Duration {
    let mut workers = JoinSet::new();
    for n in 0..HONEST {
        let (url, token) = (daemon.http(), token.to_owned());
        workers.spawn(async move {
            let mut took = Vec::new();
            for round in 0..ROUNDS {
                let worker = format!("honest-{n}");
                let payload = "x".repeat(if round % 10 == 0 { 100 << 10 } else { 1 << 10 });
                let key = format!("{phase}-{n}-{round}");
                let task = json!({"queue": "good", "key": key, "payload": payload});
                let inserted = timed(&url, &token, "/v1/tasks", &task, &mut took).await;
                assert_eq!(inserted["results"][0]["status"], "CREATED", "{inserted}");
                let get = json!({"worker": worker, "queues": ["good"], "max_tasks": 1, "wait": "30s"});
                let got = timed(&url, &token, "/v1/tasks:get", &get, &mut took).await;
                for task in got["tasks"].as_array().unwrap() {
                    let done = json!({"id": task["id"], "lease_token": task["lease_token"], "result": payload});
                    let report = json!({"worker": worker, "completions": [done]});
                    let answer = timed(&url, &token, "/v1/tasks:complete", &report, &mut took).await;
                    assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
                }
            }
            took
        });
    }
    let mut took = workers.join_all().await.concat();
    took.sort_unstable();
    took[took.len() * 99 / 100]
}

async fn timed(
    url: &str,
    token: &str,
    path: &str,
    body: &Value,
    took: &mut Vec<Duration>,
) -> Value {
    let began = Instant::now();
    let request = http_client()
        .post(format!("{url}{path}"))
        .bearer_auth(token)
        .json(body);
    let answer = request.send().await.unwrap();
    let (status, text) = (answer.status(), answer.text().await.unwrap());
    took.push(began.elapsed());
    assert_eq!(status, 200, "{path}: {text:.300}");
    serde_json::from_str(&text).unwrap()
}

/// The clients of the hostile tenant, and the strangers. Dropping it stops them.
struct Tenant {
    clients: JoinSet<()>,
    worst: Vec<(&'static str, Arc<AtomicBool>)>,
}

impl Tenant {
    fn start(daemon: &Daemon, token: String) -> Self {
        let mut tenant = Self {
            clients: JoinSet::new(),
            worst: Vec::new(),
        };
        let (http, grpc, url) = (daemon.http_port(), daemon.grpc_port(), daemon.http());
        let token: Arc<str> = token.into();
        tenant.add("lines that never end", |worst| {
            endless_lines(http, token.clone(), worst)
        });
        tenant.add("answers that are read byte by byte", |worst| {
            byte_by_byte(url.clone(), grpc, token.clone(), worst)
        });
        tenant.add("silent strangers", |worst| strangers(http, grpc, worst));
        tenant.add("recursive payloads", |worst| {
            recursive(url.clone(), token.clone(), worst)
        });
        tenant.add("polls without number", |worst| {
            polls(grpc, token.clone(), worst)
        });
        tenant.add("queues and bulk changes without number", |worst| {
            names_and_bulk_changes(url.clone(), token.clone(), worst)
        });
        tenant
    }

    fn add<F: Future<Output = ()> + Send + 'static>(
        &mut self,
        name: &'static str,
        client: impl FnOnce(Arc<AtomicBool>) -> F,
    ) {
        let worst = Arc::<AtomicBool>::default();
        self.clients.spawn(client(Arc::clone(&worst)));
        self.worst.push((name, worst));
    }

    fn is_at_its_worst(&self) -> bool {
        self.worst
            .iter()
            .all(|(_, worst)| worst.load(Ordering::Relaxed))
    }

    async fn stop(mut self) {
        self.clients.shutdown().await;
    }
}

/// Sends lines of 31 MiB, followed by a byte now and then; reconnects after each disconnect.
async fn endless_lines(port: u16, token: Arc<str>, worst: Arc<AtomicBool>) {
    let mut lines = JoinSet::new();
    for _ in 0..9 {
        let (token, worst) = (Arc::clone(&token), Arc::clone(&worst));
        lines.spawn(async move {
            loop {
                drop(endless_line(port, &token, &worst).await);
                sleep(AGAIN).await;
            }
        });
    }
    lines.join_all().await;
}

async fn endless_line(port: u16, token: &str, worst: &AtomicBool) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let head = format!(
        "POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\
         content-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    let piece = [
        format!("{MIB:x}\r\n").into_bytes(),
        vec![b' '; MIB],
        b"\r\n".to_vec(),
    ]
    .concat();
    for _ in 0..31 {
        if let Err(error) = stream.write_all(&piece).await {
            // If refused because the token's share is used up, it has done its worst, too.
            worst.store(true, Ordering::Relaxed);
            return Err(error);
        }
    }
    worst.store(true, Ordering::Relaxed);
    loop {
        stream.write_all(b"1\r\nx\r\n").await?;
        sleep(Duration::from_secs(5)).await;
    }
}

/// Asks for 60 MiB of tasks on a connection, and lets taskd send one byte of the answer at a time.
async fn byte_by_byte(url: String, port: u16, token: Arc<str>, worst: Arc<AtomicBool>) {
    let payload = "x".repeat(900 << 10);
    for n in 0..64 {
        let task = json!({"queue": "bad.large", "key": n.to_string(), "payload": payload});
        // May be refused if there is no memory for it; fewer tasks suffice.
        drop(send(&url, &token, "/v1/tasks", &task).await);
    }
    let mut asking = JoinSet::new();
    for _ in 0..4 {
        let (token, worst) = (Arc::clone(&token), Arc::clone(&worst));
        asking.spawn(async move {
            loop {
                drop(timeout(Duration::from_secs(600), deaf(port, &token, &worst)).await);
                sleep(AGAIN).await;
            }
        });
    }
    asking.join_all().await;
}

async fn deaf(port: u16, token: &str, worst: &AtomicBool) -> Option<()> {
    let socket = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    let mut client = h2::client::Builder::new();
    let (sender, connection) = client
        .initial_window_size(1)
        .handshake::<_, Bytes>(socket)
        .await
        .ok()?;
    let mut connection = std::pin::pin!(connection);
    let get = pb::GetTasksRequest {
        worker: "deaf".into(),
        queues: vec!["bad.large".into()],
        max_tasks: 64,
        max_bytes: 60 << 20,
        ..Default::default()
    };
    let read = async {
        let request = axum::http::Request::post("http://localhost/taskd.v1.Tasks/GetTasks")
            .header("content-type", "application/grpc")
            .header("authorization", format!("Bearer {token}"))
            .header("te", "trailers")
            .body(())
            .unwrap();
        let (answer, mut body) = sender
            .ready()
            .await
            .ok()?
            .send_request(request, false)
            .ok()?;
        body.send_data(message(&get), true).ok()?;
        let mut answer = answer.await.ok()?.into_body();
        worst.store(true, Ordering::Relaxed);
        while let Some(Ok(bytes)) = answer.data().await {
            sleep(Duration::from_secs(5)).await;
            answer.flow_control().release_capacity(bytes.len()).ok()?;
        }
        Some(())
    };
    tokio::select! {
        _ = connection.as_mut() => { worst.store(true, Ordering::Relaxed); None }
        read = read => read,
    }
}

fn message(message: &impl prost::Message) -> Bytes {
    let mut bytes = vec![0];
    bytes.put_u32(u32::try_from(message.encoded_len()).unwrap());
    message.encode(&mut bytes).unwrap();
    bytes.into()
}

/// Takes all connections of both ports: over gRPC it answers pings, over HTTP it requests the
/// health.
async fn strangers(http: u16, grpc: u16, worst: Arc<AtomicBool>) {
    let mut strangers = JoinSet::new();
    let opened = Arc::<AtomicUsize>::default();
    for n in 0..1300 {
        let (opened, worst) = (Arc::clone(&opened), Arc::clone(&worst));
        strangers.spawn(async move {
            loop {
                let port = if n % 2 == 0 { grpc } else { http };
                if let Ok(socket) = TcpStream::connect(("127.0.0.1", port)).await {
                    if opened.fetch_add(1, Ordering::Relaxed) > 1200 {
                        worst.store(true, Ordering::Relaxed);
                    }
                    stay(socket, n % 2 == 0).await.unwrap_or_default();
                }
                sleep(AGAIN).await;
            }
        });
    }
    strangers.join_all().await;
}

async fn stay(mut socket: TcpStream, over_grpc: bool) -> Option<()> {
    if over_grpc {
        let (_sender, connection) = h2::client::handshake(socket).await.ok()?;
        return connection.await.ok();
    }
    loop {
        socket
            .write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            .await
            .ok()?;
        let mut answer = [0; 1024];
        if tokio::io::AsyncReadExt::read(&mut socket, &mut answer)
            .await
            .ok()?
            == 0
        {
            return None;
        }
        sleep(Duration::from_secs(10)).await;
    }
}

/// Inserts deeply nested trees that match no variant of their schema.
async fn recursive(url: String, token: Arc<str>, worst: Arc<AtomicBool>) {
    let mut senders = JoinSet::new();
    for _ in 0..4 {
        let (url, token, worst) = (url.clone(), Arc::clone(&token), Arc::clone(&worst));
        senders.spawn(async move {
            let tree = (0..50).fold(
                json!({"type": "bad"}),
                |tree, _| json!({"type": "bad", "children": [tree]}),
            );
            loop {
                let task = json!({"queue": "bad.trees", "key": "tree", "payload": tree});
                if let Some((status, _)) = send(&url, &token, "/v1/tasks", &task).await {
                    worst.fetch_or(status == 422 || status == 429, Ordering::Relaxed);
                }
                sleep(Duration::from_millis(200)).await;
            }
        });
    }
    senders.join_all().await;
}

/// Waits for tasks with an unlimited number of calls, a thousand per connection.
async fn polls(port: u16, token: Arc<str>, worst: Arc<AtomicBool>) {
    let mut connections = JoinSet::new();
    for _ in 0..20 {
        let (token, worst) = (Arc::clone(&token), Arc::clone(&worst));
        connections.spawn(async move {
            loop {
                thousand_polls(port, &token, &worst)
                    .await
                    .unwrap_or_default();
                sleep(AGAIN).await;
            }
        });
    }
    connections.join_all().await;
}

async fn thousand_polls(port: u16, token: &str, worst: &AtomicBool) -> Option<()> {
    let socket = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    let (sender, connection) = h2::client::handshake(socket).await.ok()?;
    let get = pb::GetTasksRequest {
        worker: "poll".into(),
        queues: vec!["bad.empty".into()],
        wait: Some(prost_types::Duration {
            seconds: 60,
            nanos: 0,
        }),
        ..Default::default()
    };
    let ask = async {
        let mut open = Vec::new();
        for _ in 0..1000 {
            let request = axum::http::Request::post("http://localhost/taskd.v1.Tasks/GetTasks")
                .header("content-type", "application/grpc")
                .header("authorization", format!("Bearer {token}"))
                .header("te", "trailers")
                .body(())
                .unwrap();
            let (answer, mut body) = sender
                .clone()
                .ready()
                .await
                .ok()?
                .send_request(request, false)
                .ok()?;
            body.send_data(message(&get), true).ok()?;
            open.push(answer);
        }
        worst.store(true, Ordering::Relaxed);
        for answer in open {
            drop(answer.await);
        }
        Some(())
    };
    tokio::select! {
        _ = connection => None,
        asked = ask => asked,
    }
}

/// Creates queues under made-up names, and starts bulk changes that match nothing.
async fn names_and_bulk_changes(url: String, token: Arc<str>, worst: Arc<AtomicBool>) {
    for n in 0.. {
        let task = json!({"queue": format!("bad.{n}"), "key": "k"});
        drop(send(&url, &token, "/v1/tasks", &task).await);
        let filter =
            json!({"filter": {"queue": "bad.large", "key_prefix": "nothing"}, "yes": true});
        drop(send(&url, &token, "/v1/tasks:cancel", &filter).await);
        if n > 250 {
            worst.store(true, Ordering::Relaxed);
            sleep(Duration::from_millis(200)).await;
        }
    }
}

async fn send(url: &str, token: &str, path: &str, body: &Value) -> Option<(u16, Value)> {
    let request = http_client()
        .post(format!("{url}{path}"))
        .bearer_auth(token)
        .json(body);
    let answer = request.send().await.ok()?;
    let status = answer.status().as_u16();
    Some((status, answer.json().await.ok()?))
}

async fn try_call(daemon: &Daemon, token: &str, path: &str, body: &Value) -> (u16, Value) {
    send(&daemon.http(), token, path, body)
        .await
        .unwrap_or_default()
}

async fn try_get(daemon: &Daemon, token: &str, path: &str) -> (u16, Value) {
    let request = http_client()
        .get(format!("{}{path}", daemon.http()))
        .bearer_auth(token);
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

/// Creates a token in the database of the daemon.
fn token(daemon: &Daemon, name: &str, args: &[&str]) -> String {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command
        .env_clear()
        .envs(own)
        .args(["token", "create", name])
        .args(args)
        .args(daemon.database());
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout)
        .unwrap()
        .trim_end()
        .to_owned()
}

/// A value from `/proc/<pid>/status`, in bytes.
fn memory(daemon: &Daemon, name: &str) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap();
    line.trim_start_matches(':')
        .trim()
        .trim_end_matches(" kB")
        .parse::<usize>()
        .unwrap()
        << 10
}
