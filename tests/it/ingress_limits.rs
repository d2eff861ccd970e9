//! Clients that send too much, by the running binary: it costs them, and nobody else.

use std::{collections::HashMap, fs, time::Duration};

use axum::http::Request;
use bytes::{Buf, BufMut, Bytes};
use futures::{FutureExt, future::join_all};
use prost::Message as _;
use serde_json::{Value, json};
use taskd::wire::pb::{self, discovery_client::DiscoveryClient, tasks_client::TasksClient};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Code, Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::Channel,
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest,
};

use crate::{
    columns::access::{post, token},
    support::{daemon::Daemon, until},
    traces::metric,
};

pub(crate) const MIB: usize = 1 << 20;

/// A figure of `/proc/<pid>/status`, in bytes.
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

/// Runs `call`, and measures the peak of taskd's memory above what it was before.
pub(crate) async fn peak_of<T>(daemon: &Daemon, call: impl Future<Output = T>) -> (T, usize) {
    // Forgets the peak until now.
    fs::write(format!("/proc/{}/clear_refs", daemon.pid()), "5").unwrap();
    let before = memory(daemon, "VmRSS");
    let answer = call.await;
    (answer, memory(daemon, "VmHWM").saturating_sub(before))
}

/// `entry` again and again, of 4 MiB in all.
fn list(before: &str, entry: &str, behind: &str) -> String {
    let entries = vec![entry; 4 * MIB / (entry.len() + 1)].join(",");
    format!("{before}{entries}{behind}")
}

/// 4 MiB of headers, for so many tasks.
fn headers(tasks: usize) -> Vec<String> {
    let of_task = 4 * MIB / 12 / tasks;
    let headers: Vec<String> = (0..of_task).map(|n| format!("\"{n:06}\":\"\"")).collect();
    vec![
        format!(
            "{{\"queue\":\"q\",\"key\":\"k\",\"headers\":{{{}}}}}",
            headers.join(",")
        );
        tasks
    ]
}

#[tokio::test]
async fn four_mib_of_hostile_json_cost_little_memory() {
    let mut daemon = Daemon::start("", &[]).await;
    let item = "{\"id\":\"1\",\"lease_token\":\"t\",";
    let worker = |list: &str| format!("{{\"worker\":\"w\",\"{list}\":[");
    let (json, lines) = ("application/json", "application/x-ndjson");
    // Of the headers of a task.
    let filter = |task: String| {
        format!(
            "{{\"yes\":true,\"filter\":{}}}",
            task.replace("\"key\":\"k\",", "")
        )
    };
    let cases = [
        (
            "/v1/tasks",
            json,
            list("[", "0", "]"),
            413,
            "more than 20000 tasks in one request",
        ),
        (
            "/v1/tasks",
            json,
            list("[", "{}", "]"),
            413,
            "more than 20000 tasks in one request",
        ),
        (
            "/v1/tasks",
            json,
            list("{\"x\":[", "0", "]}"),
            422,
            "unknown field `x`",
        ),
        (
            "/v1/tasks",
            json,
            headers(1).remove(0),
            422,
            "headers: more than 1000 headers",
        ),
        (
            "/v1/tasks",
            json,
            format!("[{}]", headers(400).join(",")),
            413,
            "bytes of memory; send fewer at once",
        ),
        ("/v1/tasks", lines, headers(400).join("\n"), 200, "CREATED"),
        (
            "/v1/tasks",
            lines,
            list("", "0", "").replace(',', "\n"),
            200,
            "line 1: expected a task",
        ),
        (
            "/v1/tasks:change",
            json,
            filter(headers(1).remove(0)),
            400,
            "more than 16 headers",
        ),
        (
            "/v1/tasks:requeue",
            json,
            filter(headers(1).remove(0)),
            400,
            "more than 16 headers",
        ),
        (
            "/v1/tasks:get",
            json,
            list("{\"worker\":\"w\",\"queues\":[", "\"\"", "]}"),
            400,
            "more than 100 entries",
        ),
        (
            "/v1/tasks:complete",
            json,
            list(&worker("completions"), "0", "]}"),
            400,
            "more than 1000 entries",
        ),
        (
            "/v1/tasks:reject",
            json,
            list(&worker("rejections"), "0", "]}"),
            400,
            "more than 1000 entries",
        ),
        (
            "/v1/tasks:extend",
            json,
            list(&worker("extensions"), "{}", "]}"),
            400,
            "more than 1000 entries",
        ),
        (
            "/v1/tasks:complete",
            json,
            list(
                &format!("{}{item}\"discovered\":[", worker("completions")),
                "{}",
                "]}]}",
            ),
            200,
            "discovered: more than 10000 entries",
        ),
        (
            "/v1/tasks:complete",
            json,
            list(
                &format!("{}{item}\"x\":[", worker("completions")),
                "0",
                "]}]}",
            ),
            200,
            "unknown field `x`",
        ),
    ];
    for (path, content_type, body, status, said) in cases {
        let what = format!("{path} {content_type} {:.60}", body);
        // On a connection of its own: one that has been idle for long is closed.
        let request = crate::support::http_client().post(format!("{}{path}", daemon.http()));
        let request = request.header("content-type", content_type).body(body);
        let (answer, peak) = peak_of(&daemon, async {
            let answer = request.send().await.unwrap();
            (answer.status(), answer.text().await.unwrap())
        })
        .await;
        let (code, text) = answer;
        assert_eq!(code, status, "{what}: {text:.300}");
        assert!(text.contains(said), "{what}: {text:.300}");
        assert!(peak <= 64 * MIB, "{what} took {} MiB", peak >> 20);
    }
    // Escaped, each byte of such an id has six, and in JSON seven.
    let id = "\x7f".repeat(4 * MIB);
    for (path, list) in [
        ("complete", "completions"),
        ("reject", "rejections"),
        ("extend", "extensions"),
    ] {
        let body = format!(
            "{}{{\"id\":\"{id}\",\"lease_token\":\"t\"}}]}}",
            worker(list)
        );
        let (status, answer) = daemon
            .post_text(&format!("/v1/tasks:{path}"), "application/json", body)
            .await;
        let answer = answer.to_string();
        assert_eq!(status, 200, "{path}: {answer:.300}");
        assert!(answer.contains("is not a task id"), "{path}: {answer:.300}");
        assert!(
            answer.len() < 2000,
            "{path}: {} bytes of an answer",
            answer.len()
        );
    }
    // Memory is not all that they could take.
    assert_eq!(
        daemon
            .post("/v1/tasks", &json!({"queue": "q", "key": "honest"}))
            .await
            .0,
        200
    );
    assert!(daemon.stop().await.success());
}

/// Messages that are none.
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, buf: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buf.put(message);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buf.copy_to_bytes(buf.remaining())))
    }
}

async fn channel(daemon: &Daemon) -> Channel {
    Channel::from_shared(daemon.grpc())
        .unwrap()
        .timeout(crate::support::PATIENCE)
        .connect()
        .await
        .unwrap()
}

async fn call(channel: Channel, method: &'static str, message: Bytes) -> Result<Bytes, Status> {
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    client
        .unary(tonic::Request::new(message), method.parse().unwrap(), Raw)
        .await
        .map(tonic::Response::into_inner)
}

#[tokio::test]
async fn four_mib_of_hostile_protobuf_cost_little_memory() {
    let mut daemon = Daemon::start("", &[]).await;
    let channel = channel(&daemon).await;
    let repeated = |bytes: &[u8]| Bytes::from(bytes.repeat(4 * MIB / bytes.len()));
    // Completions with empty discovered tasks.
    let complete = |completions: usize, tasks: usize| {
        let mut message = Vec::new();
        for _ in 0..completions {
            prost::encoding::bytes::encode(2, &[0x22, 0].repeat(tasks), &mut message);
        }
        Bytes::from(message)
    };
    let headers: HashMap<_, _> = (0..4 * MIB / 12)
        .map(|n| (format!("{n:06}"), String::new()))
        .collect();
    let filter = pb::TaskFilter {
        queue: "q".into(),
        headers: headers.clone(),
        ..Default::default()
    };
    // As many statuses as bytes: a list of tasks would compare each task with all of them.
    let statuses = pb::TaskFilter {
        queue: "q".into(),
        statuses: vec![1; 4 * MIB],
        ..Default::default()
    };
    let list = pb::ListTasksRequest {
        filter: Some(statuses),
        ..Default::default()
    };
    let change = pb::ChangeTasksRequest {
        filter: Some(filter.clone()),
        yes: true,
        ..Default::default()
    };
    let requeue = pb::RequeueTasksRequest {
        filter: Some(filter),
        yes: true,
        ..Default::default()
    };
    let task = pb::NewTask {
        queue: "q".into(),
        key: "k".into(),
        headers,
        ..Default::default()
    };
    let cases = [
        (
            "/taskd.v1.Discovery/ListTasks",
            list.encode_to_vec().into(),
            "more than 100 statuses in a filter",
        ),
        (
            "/taskd.v1.Operator/ChangeTasks",
            change.encode_to_vec().into(),
            "more than 16 headers in a filter",
        ),
        (
            "/taskd.v1.Operator/RequeueTasks",
            requeue.encode_to_vec().into(),
            "more than 16 headers in a filter",
        ),
        (
            "/taskd.v1.Discovery/InsertTasks",
            repeated(&[0x0a, 0]),
            "more than 20000 tasks in one request",
        ),
        (
            "/taskd.v1.Tasks/CompleteTasks",
            repeated(&[0x12, 0]),
            "more than 1000 items in one call (max_items)",
        ),
        (
            "/taskd.v1.Tasks/RejectTasks",
            repeated(&[0x12, 0]),
            "more than 1000 items in one call (max_items)",
        ),
        (
            "/taskd.v1.Tasks/ExtendTasks",
            repeated(&[0x12, 0]),
            "more than 1000 items in one call (max_items)",
        ),
        (
            "/taskd.v1.Tasks/GetTasks",
            repeated(&[0x12, 0]),
            "more than 100 queues",
        ),
        (
            "/taskd.v1.Tasks/CompleteTasks",
            complete(1, 2 * MIB),
            "more than 50000 discovered tasks",
        ),
        (
            "/taskd.v1.Tasks/CompleteTasks",
            complete(1000, 2000),
            "more than 50000 discovered tasks",
        ),
        (
            "/taskd.v1.Discovery/InsertTasks",
            pb::InsertTasksRequest {
                tasks: vec![task],
                ..Default::default()
            }
            .encode_to_vec()
            .into(),
            "bytes of memory; send fewer at once",
        ),
        (
            "/taskd.v1.Discovery/InsertTasks",
            repeated(&[0xff]),
            "the message cannot be read",
        ),
        (
            "/taskd.v1.Discovery/InsertTasks",
            vec![0x0a, 3, 0x0a, 1, 0xff].into(),
            "the message cannot be read",
        ),
    ];
    for (method, message, said) in cases {
        let what = format!("{method} {:?}…", &message[..message.len().min(8)]);
        let (answer, peak) = peak_of(&daemon, call(channel.clone(), method, message)).await;
        let status = answer.unwrap_err();
        assert_eq!(
            status.code(),
            Code::InvalidArgument,
            "{what}: {}",
            status.message()
        );
        assert!(
            status.message().contains(said),
            "{what}: {}",
            status.message()
        );
        assert!(peak <= 64 * MIB, "{what} took {} MiB", peak >> 20);
    }
    assert!(daemon.stop().await.success());
}

/// Begins a request of a little more than so many bytes, and sends no more than them.
async fn unfinished(port: u16, bytes: usize) -> TcpStream {
    unfinished_of(port, "", bytes).await
}

async fn unfinished_of(port: u16, token: &str, bytes: usize) -> TcpStream {
    let mut client = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let authorization = if token.is_empty() {
        String::new()
    } else {
        format!("authorization: Bearer {token}\r\n")
    };
    let head = "POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    let head = format!(
        "{head}{authorization}content-length: {}\r\n\r\n[",
        bytes + MIB
    );
    client.write_all(head.as_bytes()).await.unwrap();
    // It is refused when it finds no room.
    client.write_all(&vec![b' '; bytes]).await.ok();
    client
}

#[tokio::test]
async fn bodies_that_do_not_end_have_one_budget() {
    let mut daemon = Daemon::start("request_budget = \"80MiB\"", &[]).await;
    let begin = async {
        let mut clients = Vec::new();
        for _ in 0..12 {
            clients.push(unfinished(daemon.http_port(), 31 * MIB).await);
        }
        clients
    };
    let (clients, peak) = peak_of(&daemon, begin).await;
    assert!(
        peak <= 112 * MIB,
        "{} MiB for 12 bodies of 31 MiB",
        peak >> 20
    );
    let mut refused = 0;
    for mut client in clients {
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.ok();
        let answer = String::from_utf8_lossy(&answer);
        refused += usize::from(answer.starts_with("HTTP/1.1 429 ") || answer.is_empty());
    }
    assert!(refused >= 10, "two have room, {} had", 12 - refused);
    // A small request has room beside them, a large one finds it when they have gone.
    assert_eq!(
        daemon
            .post("/v1/tasks", &json!({"queue": "q", "key": "small"}))
            .await
            .0,
        200
    );
    until("their room is free again", async || {
        let body = format!("[{}]", " ".repeat(31 * MIB));
        daemon
            .post_text("/v1/tasks", "application/json", body)
            .await
            .0
            == 200
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn answers_that_nobody_reads_have_the_same_budget() {
    let limits =
        "max_payload_bytes = \"8MiB\"\nmax_request_bytes = \"10MiB\"\nrequest_budget = \"28MiB\"\n";
    let config = format!("{limits}[queues.q]\nlease = \"10m\"");
    let mut daemon = Daemon::start(&config, &[]).await;
    let payload = "x".repeat(7 * MIB);
    for n in 0..5 {
        daemon
            .insert(&[json!({"queue": "q", "key": n.to_string(), "payload": payload})])
            .await;
    }
    until("all wait", async || daemon.queue("q").await["waiting"] == 5).await;
    let get = json!({"worker": "deaf", "queues": ["q"]}).to_string();
    let head = "POST /v1/tasks:get HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: ";
    let mut deaf = Vec::new();
    for n in 1..=3 {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(16 << 10).unwrap();
        let mut client = socket
            .connect(([127, 0, 0, 1], daemon.http_port()).into())
            .await
            .unwrap();
        client
            .write_all(format!("{head}{}\r\n\r\n{get}", get.len()).as_bytes())
            .await
            .unwrap();
        deaf.push(client);
        until("its answer waits", async || {
            held_bytes(&daemon).await >= n * 7 * MIB
        })
        .await;
    }
    let (status, problem) = daemon
        .post("/v1/tasks:get", &json!({"worker": "w", "queues": ["q"]}))
        .await;
    assert_eq!(status, 429, "{:.300}", problem.to_string());
    let mut client = TasksClient::new(channel(&daemon).await);
    let get = pb::GetTasksRequest {
        worker: "w".into(),
        queues: vec!["q".into()],
        ..Default::default()
    };
    let status = client.get_tasks(get.clone()).await.unwrap_err();
    assert_eq!(
        status.code(),
        Code::ResourceExhausted,
        "{}",
        status.message()
    );
    // A refused answer leaves no task in the book of a session.
    let open = json!({"worker": "s", "queues": ["q"], "want": 1});
    let session = daemon.post("/v1/sessions:open", &open).await.1["session"].clone();
    let call = json!({"worker": "s", "session": session});
    assert_eq!(daemon.post("/v1/sessions:want", &call).await.0, 429);
    assert_eq!(
        daemon.post("/v1/sessions:pending", &call).await.1,
        json!({"demand": 1, "in_hand": 0})
    );
    assert_eq!(daemon.post("/v1/sessions:close", &call).await.0, 200);
    // Answers that were not sent cost nothing, nor do those to clients that hung up.
    drop(deaf);
    until("their answers are given up", async || {
        held_bytes(&daemon).await < 7 * MIB
    })
    .await;
    let status = client
        .clone()
        .max_decoding_message_size(4 * MIB)
        .get_tasks(get)
        .await
        .unwrap_err();
    assert!(
        status.message().contains("message length too large"),
        "{}",
        status.message()
    );
    assert!(
        daemon
            .get("/metrics")
            .await
            .1
            .as_str()
            .unwrap()
            .contains("taskd_grpc_oversized_answers_total 1\n")
    );
    let tasks = daemon.lease_all("other", "q", 4).await;
    assert!(tasks.iter().all(|task| task["attempt"] == 1));
    assert!(daemon.stop().await.success());
}

/// Sends tasks that are none, and reads no more than that there is an answer.
async fn deaf_inserter(daemon: &Daemon, content_type: &str, body: &str) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(16 << 10).unwrap();
    let mut client = socket
        .connect(([127, 0, 0, 1], daemon.http_port()).into())
        .await
        .unwrap();
    let head = format!(
        "POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\ncontent-length: "
    );
    client
        .write_all(format!("{head}{}\r\n\r\n{body}", body.len()).as_bytes())
        .await
        .unwrap();
    let mut begin = [0; 15];
    client.read_exact(&mut begin).await.unwrap();
    assert_eq!(&begin, b"HTTP/1.1 200 OK");
    client
}

#[tokio::test]
async fn answers_about_tasks_count_until_they_are_written() {
    let mut daemon = Daemon::start("", &[]).await;
    let body = format!("[{}]", vec!["{\"a\":0}"; 20_000].join(","));
    let deaf = deaf_inserter(&daemon, "application/json", &body).await;
    assert!(held_bytes(&daemon).await >= 2 * MIB, "its answer waits");
    drop(deaf);
    until("its room is free again", async || {
        held_bytes(&daemon).await < MIB
    })
    .await;
    let deaf = deaf_inserter(&daemon, "application/x-ndjson", &"{\"a\":0}\n".repeat(5000)).await;
    until("its answers wait", async || {
        held_bytes(&daemon).await >= 192 << 10
    })
    .await;
    drop(deaf);
    until("their room is free again", async || {
        held_bytes(&daemon).await < 128 << 10
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn results_that_find_no_room_are_not_read() {
    let limits = "max_result_bytes = \"7MiB\"\nmax_payload_bytes = \"7MiB\"\n";
    let mut daemon = Daemon::start(&format!("{limits}{LITTLE}"), &[]).await;
    let id = daemon
        .insert(&[json!({"queue": "q", "key": "k"})])
        .await
        .remove(0);
    let task = daemon.lease_all("w", "q", 1).await.remove(0);
    let result = "x".repeat(3 * MIB);
    let completion =
        json!({"id": task["id"], "lease_token": task["lease_token"], "result": result});
    let (_, answer) = daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": [completion]}),
        )
        .await;
    assert_eq!(answer["results"][0]["status"], "OK");
    let path = format!("/v1/tasks/{id}/results");
    until("it is stored", async || {
        daemon.get(&path).await.1["results"][0]["result"] == result
    })
    .await;
    let port = daemon.http_port();
    let held = [
        unfinished(port, 7 * MIB - (28 << 10)).await,
        unfinished(port, 5 * MIB).await,
    ];
    until("there is little room", async || {
        held_bytes(&daemon).await >= 12 * MIB - (64 << 10)
    })
    .await;
    let ((status, problem), peak) = peak_of(&daemon, daemon.get(&path)).await;
    assert_eq!(status, 429, "{:.300}", problem.to_string());
    assert!(peak < 4 * MIB, "{peak} bytes for what was refused");
    drop(held);
    until("its room is free", async || {
        daemon.get(&path).await.0 == 200
    })
    .await;
    assert!(daemon.stop().await.success());
}

/// So little that a few thousand headers are too many.
const LITTLE: &str = "max_request_bytes = \"8MiB\"\nrequest_budget = \"16MiB\"";

fn with_headers(key: usize, headers: usize) -> Value {
    let headers: serde_json::Map<_, _> = (0..headers).map(|n| (n.to_string(), json!(""))).collect();
    json!({"queue": "q", "key": key.to_string(), "headers": headers})
}

#[tokio::test]
async fn a_line_that_finds_no_room_is_not_rejected() {
    let mut daemon = Daemon::start(LITTLE, &[]).await;
    let port = daemon.http_port();
    // They leave 100 KiB. The answers that `until` reads fit beside them, while their bodies still
    // come in.
    let held = [
        unfinished(port, 7 * MIB - (50 << 10)).await,
        unfinished(port, 7 * MIB - (50 << 10)).await,
    ];
    until("there is little room", async || {
        held_bytes(&daemon).await >= 14 * MIB - (110 << 10)
    })
    .await;
    let insert = async |line: &Value| {
        daemon
            .post_text("/v1/tasks", "application/x-ndjson", line.to_string())
            .await
    };
    // Decoded it has 128 kB.
    let line = with_headers(0, 1000);
    let (status, problem) = insert(&line).await;
    assert_eq!(status, 429, "{problem}");
    assert_eq!(insert(&with_headers(1, 1)).await.1["status"], "CREATED");
    drop(held);
    until("its room is free", async || {
        insert(&line).await.1["status"] == "CREATED"
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn lines_that_are_dropped_hold_no_room() {
    let mut daemon = Daemon::start(LITTLE, &[]).await;
    let insert = async |body: String| {
        daemon
            .post_text("/v1/tasks", "application/x-ndjson", body)
            .await
    };
    let (status, answer) = insert("x".repeat(40 * MIB)).await;
    assert_eq!(
        (status, &answer["status"]),
        (200, &json!("REJECTED")),
        "{answer}"
    );
    let (status, answer) = insert(format!("{}{}", "\n".repeat(40 * MIB), with_headers(0, 0))).await;
    assert_eq!(
        (status, &answer["status"]),
        (200, &json!("CREATED")),
        "{answer}"
    );
    until("all room is free", async || {
        held_bytes(&daemon).await < 64 << 10
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_request_that_never_fits_is_not_told_to_come_again() {
    let mut daemon = Daemon::start(LITTLE, &[]).await;
    let tasks: Vec<_> = (0..6000).map(|n| with_headers(n, 20)).collect();
    let (status, problem) = daemon.post("/v1/tasks", &json!(tasks)).await;
    assert_eq!(status, 413, "{problem:.300}");
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .ends_with("bytes of memory; send fewer at once"),
        "{problem}"
    );
    let headers: HashMap<_, _> = (0..20).map(|n| (n.to_string(), String::new())).collect();
    let task = pb::NewTask {
        queue: "q".into(),
        key: "k".into(),
        headers,
        ..Default::default()
    };
    let request = pb::InsertTasksRequest {
        tasks: vec![task; 6000],
        ..Default::default()
    };
    let status = DiscoveryClient::new(channel(&daemon).await)
        .insert_tasks(request)
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{}", status.message());
    // Less of them fits.
    assert_eq!(daemon.post("/v1/tasks", &json!(tasks[..2000])).await.0, 200);
    assert!(daemon.stop().await.success());
}

/// A call over HTTP/2 that has sent its head, and the rest of its connection.
struct Http2Call {
    answer: h2::client::ResponseFuture,
    body: h2::SendStream<Bytes>,
    sender: h2::client::SendRequest<Bytes>,
    connection: tokio::task::JoinHandle<()>,
}

/// Begins a call whose answers find room for `window` bytes.
async fn call_over_http2(port: u16, window: u32, method: &str) -> Http2Call {
    let socket = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let mut client = h2::client::Builder::new();
    let (sender, connection) = client
        .initial_window_size(window)
        .handshake::<_, Bytes>(socket)
        .await
        .unwrap();
    let connection = tokio::spawn(async move { drop(connection.await) });
    let mut sender = sender.ready().await.unwrap();
    let (answer, body) = sender.send_request(grpc_head(method), false).unwrap();
    Http2Call {
        answer,
        body,
        sender,
        connection,
    }
}

fn grpc_head(method: &str) -> Request<()> {
    Request::post(format!("http://localhost{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .unwrap()
}

/// A message as gRPC sends it.
fn framed(message: &impl prost::Message) -> Bytes {
    let mut framed = vec![0];
    framed.put_u32(u32::try_from(message.encoded_len()).unwrap());
    message.encode(&mut framed).unwrap();
    framed.into()
}

/// Asks for tasks over HTTP/2, with room for `window` bytes of the answer. It answers pings and
/// reads nothing. Its future ends with the connection.
async fn deaf_over_http2(port: u16, window: u32) -> impl Future<Output = ()> {
    let Http2Call {
        answer,
        mut body,
        connection,
        ..
    } = call_over_http2(port, window, "/taskd.v1.Tasks/GetTasks").await;
    let get = pb::GetTasksRequest {
        worker: "deaf".into(),
        queues: vec!["q".into()],
        ..Default::default()
    };
    body.send_data(framed(&get), true).unwrap();
    async move {
        let answer = answer.await;
        drop(connection.await);
        drop(answer);
    }
}

/// As a client that makes room for one more byte every second or so.
async fn byte_by_byte_over_http2(port: u16) -> impl Future<Output = usize> {
    let Http2Call {
        answer,
        mut body,
        connection,
        ..
    } = call_over_http2(port, 1, "/taskd.v1.Tasks/GetTasks").await;
    let get = pb::GetTasksRequest {
        worker: "deaf".into(),
        queues: vec!["q".into()],
        ..Default::default()
    };
    body.send_data(framed(&get), true).unwrap();
    async move {
        let mut answer = answer.await.unwrap().into_body();
        let mut bytes = 0;
        while let Some(Ok(some)) = answer.data().await {
            bytes += some.len();
            tokio::time::sleep(Duration::from_secs(1)).await;
            answer.flow_control().release_capacity(some.len()).unwrap();
        }
        connection.await.unwrap();
        bytes
    }
}

#[tokio::test]
async fn a_grpc_answer_that_nobody_reads_ends_its_connection() {
    let mut daemon = Daemon::start("[queues.q]\nlease = \"10m\"", &[]).await;
    let payload = "x".repeat(900 << 10);
    let task = |n: usize| json!({"queue": "q", "key": n.to_string(), "payload": payload});
    daemon.insert(&(0..2).map(task).collect::<Vec<_>>()).await;
    until("all wait", async || daemon.queue("q").await["waiting"] == 2).await;
    // One makes no room at all, one too little.
    let deaf = [
        deaf_over_http2(daemon.grpc_port(), 0).await,
        deaf_over_http2(daemon.grpc_port(), 1000).await,
    ];
    until("the answers wait", async || {
        held_bytes(&daemon).await >= 2 * payload.len()
    })
    .await;
    // A stream that has nothing to say does not count as one.
    let mut watch = HealthClient::new(channel(&daemon).await);
    let mut watch = watch
        .watch(HealthCheckRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert!(watch.message().await.unwrap().is_some());
    let ended = join_all(deaf);
    tokio::time::timeout(Duration::from_secs(60), ended)
        .await
        .expect("taskd ends their connections");
    let tasks = daemon.lease_all("other", "q", 2).await;
    assert!(
        tasks.iter().all(|task| task["attempt"] == 1),
        "what was not read is no attempt"
    );
    assert!(held_bytes(&daemon).await < payload.len());
    assert!(watch.message().now_or_never().is_none(), "it goes on");
    drop(watch);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_grpc_answer_that_is_read_byte_by_byte_ends_its_connection() {
    let mut daemon = Daemon::start("[queues.q]\nlease = \"10m\"", &[]).await;
    let payload = "x".repeat(900 << 10);
    let task = |n: usize| json!({"queue": "q", "key": n.to_string(), "payload": payload});
    daemon.insert(&(0..2).map(task).collect::<Vec<_>>()).await;
    until("all wait", async || daemon.queue("q").await["waiting"] == 2).await;
    let slow = byte_by_byte_over_http2(daemon.grpc_port()).await;
    let bytes = tokio::time::timeout(Duration::from_secs(100), slow)
        .await
        .expect("taskd ends its connection");
    assert!(bytes < 1000, "{bytes}");
    until("its room is free", async || {
        held_bytes(&daemon).await < 64 << 10
    })
    .await;
    let tasks = daemon.lease_all("other", "q", 2).await;
    assert!(
        tasks.iter().all(|task| task["attempt"] == 1),
        "what was not read is no attempt"
    );
    assert!(daemon.stop().await.success());
}

/// Begins a chunked body of lines.
async fn lines(port: u16) -> TcpStream {
    let mut client = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let head = "POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-ndjson\r\n\
                transfer-encoding: chunked\r\nconnection: close\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    client
}

async fn chunk(client: &mut (impl AsyncWriteExt + Unpin), bytes: &[u8]) -> std::io::Result<()> {
    client
        .write_all(format!("{:x}\r\n", bytes.len()).as_bytes())
        .await?;
    client.write_all(bytes).await?;
    client.write_all(b"\r\n").await
}

/// Calls `drip` every few seconds until it fails, or taskd has ended the call.
async fn dripping<T>(ended: impl Future<Output = T>, mut drip: impl AsyncFnMut() -> bool) -> T {
    let drips = async {
        while drip().await {
            tokio::time::sleep(Duration::from_secs(3)).await;
        }
        std::future::pending().await
    };
    let either = async {
        tokio::select! {
            ended = ended => ended,
            ended = drips => ended,
        }
    };
    tokio::time::timeout(Duration::from_secs(300), either)
        .await
        .expect("taskd ends it")
}

#[tokio::test]
async fn a_line_that_does_not_end_is_cut_and_a_stream_of_lines_is_not() {
    let mut daemon = Daemon::start("", &[]).await;
    let mut long = lines(daemon.http_port()).await;
    chunk(&mut long, &vec![b'x'; 4 * MIB]).await.unwrap();
    until("the line has room", async || {
        held_bytes(&daemon).await >= 4 * MIB
    })
    .await;
    let mut honest = lines(daemon.http_port()).await;
    let mut sent = 0;
    let (mut answer, mut rest) = long.split();
    let mut read = Vec::new();
    let ended = dripping(answer.read_to_end(&mut read), async || {
        sent += 1;
        // Each of its lines takes a while.
        let line = json!({"queue": "q", "key": sent.to_string()}).to_string();
        let (begin, end) = line.split_at(8);
        chunk(&mut honest, begin.as_bytes()).await.unwrap();
        chunk(&mut honest, format!("{end}\n").as_bytes())
            .await
            .unwrap();
        chunk(&mut rest, b"x").await.is_ok()
    });
    // taskd may reset the connection behind its answer: it has not read the last byte.
    drop(ended.await);
    let read = String::from_utf8_lossy(&read);
    assert!(read.starts_with("HTTP/1.1 408 "), "{read}");
    assert!(
        read.contains("a line did not end within 120s of its first byte"),
        "{read}"
    );
    drop(long);
    until("its room is free", async || held_bytes(&daemon).await < MIB).await;
    honest.write_all(b"0\r\n\r\n").await.unwrap();
    let mut answers = String::new();
    honest.read_to_string(&mut answers).await.unwrap();
    assert_eq!(answers.matches("CREATED").count(), sent, "{answers}");
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_message_of_a_stream_that_does_not_end_is_cut() {
    let mut daemon = Daemon::start("", &[]).await;
    let Http2Call {
        answer,
        mut body,
        sender,
        connection,
    } = call_over_http2(daemon.grpc_port(), 1 << 20, "/taskd.v1.Tasks/StreamTasks").await;
    let timeout = Some(prost_types::Duration {
        seconds: 600,
        nanos: 0,
    });
    let open = pb::OpenSession {
        worker: "w".into(),
        queues: vec!["q".into()],
        timeout,
        ..Default::default()
    };
    body.send_data(
        framed(&pb::WorkerFrame {
            open: Some(open),
            ..Default::default()
        }),
        false,
    )
    .unwrap();
    let mut answer = answer.await.unwrap().into_body();
    assert!(answer.data().await.unwrap().is_ok(), "the session is open");
    let large = [&[0][..], &(8u32 << 20).to_be_bytes(), &vec![7; 4 * MIB]].concat();
    body.send_data(large.into(), false).unwrap();
    until("the message has room", async || {
        held_bytes(&daemon).await >= 4 * MIB
    })
    .await;
    let ended = async {
        while answer.data().await.is_some_and(|data| data.is_ok()) {}
        answer.trailers().await
    };
    let trailers = dripping(ended, async || {
        body.send_data(vec![7].into(), false).is_ok()
    })
    .await;
    let trailers = trailers.unwrap().expect("the stream ends with a status");
    assert_eq!(trailers["grpc-status"], "4", "{trailers:?}");
    until("its room is free", async || held_bytes(&daemon).await < MIB).await;
    drop((sender, body));
    connection.abort();
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_token_with_a_scope_holds_half_of_the_budget() {
    let mut daemon = Daemon::start("auth = \"tokens\"\nrequest_budget = \"80MiB\"", &[]).await;
    let scoped = token(
        &daemon,
        "scoped",
        &["--roles", "insert,read", "--queues", "a.*"],
    )
    .await;
    let other = token(&daemon, "other", &["--roles", "insert", "--queues", "b.*"]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let held = async || {
        let request = crate::support::http_client()
            .get(format!("{}/metrics", daemon.http()))
            .bearer_auth(&admin);
        let metrics = request.send().await.unwrap().text().await.unwrap();
        let held = metrics
            .lines()
            .find_map(|line| line.strip_prefix("taskd_requests_held_bytes "));
        held.unwrap().parse::<usize>().unwrap()
    };
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(unfinished_of(daemon.http_port(), &scoped, 24 * MIB).await);
    }
    until("it has what it may have", async || {
        (24 * MIB..=40 * MIB).contains(&held().await)
    })
    .await;
    let task = json!({"queue": "a.x", "key": "small"});
    assert_eq!(
        post(&daemon, "/v1/tasks", &scoped, task).await.0,
        200,
        "what is small finds room"
    );
    let large = async |queue: &str, token: &str| {
        let payload = Bytes::from(vec![b'x'; 900 << 10]);
        let task = |n: usize| {
            let (queue, key) = (queue.to_owned(), n.to_string().into());
            pb::NewTask {
                queue,
                key,
                payload: payload.clone(),
                ..Default::default()
            }
        };
        let tasks = (0..20).map(task).collect();
        let mut request = tonic::Request::new(pb::InsertTasksRequest {
            tasks,
            ..Default::default()
        });
        request
            .metadata_mut()
            .insert("authorization", format!("Bearer {token}").parse().unwrap());
        DiscoveryClient::new(channel(&daemon).await)
            .insert_tasks(request)
            .await
    };
    let status = large("a.x", &scoped).await.unwrap_err();
    assert_eq!(
        status.code(),
        Code::ResourceExhausted,
        "{}",
        status.message()
    );
    assert!(
        status
            .message()
            .contains("half of request_budget; try again later"),
        "{}",
        status.message()
    );
    large("b.x", &other).await.unwrap();
    // A token without a scope may use all.
    let mut all = Vec::new();
    for _ in 0..2 {
        all.push(unfinished_of(daemon.http_port(), &admin, 20 * MIB).await);
    }
    until("another token has the rest", async || {
        held().await >= 60 * MIB
    })
    .await;
    drop((clients, all));
    until("their room is free again", async || held().await < MIB).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn announced_bytes_take_no_address_space() {
    // 300 bodies and 300 messages of 32 MiB have 19 GiB.
    let mut daemon = Daemon::start_with_descriptors("-v 6291456", "").await;
    let before = memory(&daemon, "VmSize");
    let mut clients = Vec::new();
    let head = "POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                content-length: 33554432\r\n\r\n";
    for _ in 0..300 {
        let mut client = TcpStream::connect(("127.0.0.1", daemon.http_port()))
            .await
            .unwrap();
        client.write_all(head.as_bytes()).await.unwrap();
        clients.push(client);
    }
    let announced = Bytes::from([&[0][..], &(32u32 << 20).to_be_bytes(), b"some"].concat());
    let mut first = call_over_http2(
        daemon.grpc_port(),
        1 << 20,
        "/taskd.v1.Discovery/InsertTasks",
    )
    .await;
    first.body.send_data(announced.clone(), false).unwrap();
    let mut calls = Vec::new();
    for _ in 1..300 {
        let mut sender = first.sender.clone().ready().await.unwrap();
        let (answer, mut body) = sender
            .send_request(grpc_head("/taskd.v1.Discovery/InsertTasks"), false)
            .unwrap();
        body.send_data(announced.clone(), false).unwrap();
        calls.push((answer, body));
    }
    for n in 0..50 {
        daemon
            .insert(&[json!({"queue": "q", "key": n.to_string()})])
            .await;
    }
    until("all messages have begun", async || {
        held_bytes(&daemon).await >= 300 << 10
    })
    .await;
    let more = memory(&daemon, "VmSize").saturating_sub(before);
    assert!(more < 1 << 30, "{} MiB of address space", more >> 20);
    drop((clients, calls, first));
    assert!(daemon.stop().await.success());
}

/// Reads answers to the end, each on a connection of its own and all at once. Answers their bytes
/// and the peak of taskd's memory.
async fn read_at_once(
    daemon: &Daemon,
    requests: Vec<reqwest::RequestBuilder>,
) -> (Vec<Bytes>, usize) {
    let read = async |request: reqwest::RequestBuilder| {
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), 200);
        answer.bytes().await.unwrap()
    };
    peak_of(daemon, join_all(requests.into_iter().map(read))).await
}

#[tokio::test]
async fn answers_that_grow_as_json_are_written_piece_by_piece() {
    const COUNT: usize = 16;
    let config = "request_budget = \"64MiB\"\n[queues.q]\nlease = \"10m\"";
    let mut daemon = Daemon::start(config, &[]).await;
    let text = "\u{1}".repeat(MIB - 1000);
    // As JSON each byte has six.
    let whole = COUNT * text.len() * 6;
    let new = pb::NewTask {
        queue: "r".into(),
        key: "many".into(),
        replicas: Some(u32::try_from(COUNT).unwrap()),
        ..Default::default()
    };
    let insert = pb::InsertTasksRequest {
        tasks: vec![new],
        ..Default::default()
    };
    let mut inserts = DiscoveryClient::new(channel(&daemon).await);
    let id = inserts
        .insert_tasks(insert)
        .await
        .unwrap()
        .into_inner()
        .results
        .remove(0)
        .id;
    let mut tasks = TasksClient::new(channel(&daemon).await);
    for n in 0..COUNT {
        let worker = format!("w{n}");
        let wait = Some(prost_types::Duration {
            seconds: 30,
            nanos: 0,
        });
        let get = pb::GetTasksRequest {
            worker: worker.clone(),
            queues: vec!["r".into()],
            wait,
            ..Default::default()
        };
        let task = tasks
            .get_tasks(get)
            .await
            .unwrap()
            .into_inner()
            .tasks
            .remove(0);
        let completion = pb::Completion {
            id: task.id,
            lease_token: task.lease_token,
            result: text.clone().into(),
            result_encoding: pb::Encoding::Text.into(),
            ..Default::default()
        };
        let report = pb::CompleteTasksRequest {
            worker,
            completions: vec![completion],
            next: None,
        };
        let answer = tasks.complete_tasks(report).await.unwrap().into_inner();
        assert_eq!(answer.results[0].status(), pb::ItemStatus::Ok);
    }
    let path = format!("/v1/tasks/{id}");
    until("all results are stored", async || {
        daemon.get(&path).await.1["results"] == COUNT
    })
    .await;
    let get = |path: &str| crate::support::http_client().get(format!("{}{path}", daemon.http()));
    let post = |path: &str, body: &Value| {
        crate::support::http_client()
            .post(format!("{}{path}", daemon.http()))
            .json(body)
    };
    let results = || get(&format!("{path}/results"));
    let (answers, peak) = read_at_once(&daemon, vec![results(), results(), results()]).await;
    assert!(
        answers.iter().all(|answer| answer.len() > whole),
        "{:?}",
        answers.iter().map(Bytes::len).max()
    );
    assert!(
        peak <= 96 * MIB,
        "three lists of results took {} MiB",
        peak >> 20
    );
    let first: Value = serde_json::from_slice(&answers[0]).unwrap();
    let workers = first["results"].as_array().unwrap();
    assert_eq!(workers.len(), COUNT);
    assert!(
        workers
            .iter()
            .all(|result| result["result"] == text && result["result_encoding"] == "text")
    );
    drop(answers);

    let again = json!({"queue": "r", "key": "many", "replicas": COUNT});
    let wait = post("/v1/tasks?wait=30s", &again);
    let (answers, peak) = read_at_once(&daemon, vec![wait]).await;
    assert!(answers[0].len() > whole, "{}", answers[0].len());
    assert!(
        peak <= 96 * MIB,
        "an insert that waited took {} MiB",
        peak >> 20
    );
    drop(answers);

    for n in 0..3 * COUNT {
        let task = pb::NewTask {
            queue: "q".into(),
            key: n.to_string().into(),
            payload: text.clone().into(),
            payload_encoding: pb::Encoding::Text.into(),
            ..Default::default()
        };
        inserts
            .insert_tasks(pb::InsertTasksRequest {
                tasks: vec![task],
                ..Default::default()
            })
            .await
            .unwrap();
    }
    until("all wait", async || {
        daemon.queue("q").await["waiting"] == 3 * COUNT
    })
    .await;
    let most = 64 * MIB;
    let ask = json!({"worker": "w", "queues": ["q"], "max_tasks": COUNT, "max_bytes": most});
    let asks = (0..3).map(|_| post("/v1/tasks:get", &ask)).collect();
    let (answers, peak) = read_at_once(&daemon, asks).await;
    assert!(
        answers.iter().all(|answer| answer.len() > whole / 2),
        "{:?}",
        answers.iter().map(Bytes::len).min()
    );
    assert!(
        peak <= 160 * MIB,
        "three answers with tasks took {} MiB",
        peak >> 20
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn every_answer_with_large_payloads_has_them_as_they_came() {
    let config =
        "max_payload_bytes = \"4MiB\"\nmax_result_bytes = \"4MiB\"\n[queues.q]\nlease = \"10m\"";
    let mut daemon = Daemon::start(config, &[]).await;
    // Larger than 1 MiB each, of every kind.
    let values = [
        json!({"payload": "\u{1}é\"\\𝄞".repeat(300_000)}),
        json!({"payload": {"list": vec!["ü"; 400_000]}}),
        json!({"payload_base64": format!("{}/w==", "////".repeat(500_000))}),
    ];
    let insert = async |round: &str| {
        for (n, value) in values.iter().enumerate() {
            let mut task = value.clone();
            task["queue"] = json!("q");
            task["key"] = json!(format!("{round}{n}"));
            daemon.insert(&[task]).await;
        }
        until("all wait", async || {
            daemon.queue("q").await["waiting"] == values.len()
        })
        .await;
    };
    let check = |answer: &Value| {
        let tasks = answer["tasks"].as_array().unwrap();
        assert_eq!(tasks.len(), values.len());
        for task in tasks {
            let key = task["key"].as_str().unwrap();
            let value = &values[key[key.len() - 1..].parse::<usize>().unwrap()];
            for name in ["payload", "payload_base64"] {
                assert!(task[name] == value[name], "{name} of {key}");
            }
        }
        tasks.clone()
    };
    insert("get").await;
    let ask = json!({"worker": "w", "queues": ["q"], "max_tasks": 10, "max_bytes": 60 * MIB});
    let leased = check(&daemon.post("/v1/tasks:get", &ask).await.1);
    insert("next").await;
    let mut completions = Vec::new();
    for task in &leased {
        let mut completion = json!({"id": task["id"], "lease_token": task["lease_token"]});
        for name in ["payload", "payload_base64"] {
            if !task[name].is_null() {
                completion[name.replace("payload", "result")] = task[name].clone();
            }
        }
        completions.push(completion);
    }
    let mut next = ask.clone();
    next.as_object_mut().unwrap().remove("worker");
    let report = json!({"worker": "w", "completions": completions, "next": next});
    let (_, answer) = daemon.post("/v1/tasks:complete", &report).await;
    assert!(
        answer["results"]
            .as_array()
            .unwrap()
            .iter()
            .all(|result| result["status"] == "OK")
    );
    let leased_next = check(&answer);
    assert_eq!(daemon.complete("w", &leased_next).await, ["OK"; 3]);
    insert("want").await;
    let open = json!({"worker": "w", "queues": ["q"], "want": 10, "max_bytes": 60 * MIB});
    let session = daemon.post("/v1/sessions:open", &open).await.1["session"].clone();
    let wanted = daemon
        .post(
            "/v1/sessions:want",
            &json!({"worker": "w", "session": session, "wait": "30s"}),
        )
        .await
        .1;
    assert_eq!(wanted["in_hand"], 3, "{:.300}", wanted.to_string());
    check(&wanted);
    for task in &leased {
        let path = format!("/v1/tasks/{}/results", task["id"].as_str().unwrap());
        until("the result is stored", async || {
            let answer = daemon.get(&path).await.1;
            answer["results"]
                .as_array()
                .is_some_and(|results| results.len() == 1)
        })
        .await;
        let answer = daemon.get(&path).await.1;
        for name in ["payload", "payload_base64"] {
            let result = &answer["results"][0][name.replace("payload", "result")];
            assert!(*result == task[name], "{name} of {}", task["key"]);
        }
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_stream_of_reflection_takes_nothing_from_the_budget_and_sends_little() {
    let mut daemon = Daemon::start("", &[]).await;
    let mut client = ServerReflectionClient::new(channel(&daemon).await);
    let ask = |bytes: usize| ServerReflectionRequest {
        host: "h".repeat(bytes),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let (asked, questions) = tokio::sync::mpsc::channel(1);
    asked.send(ask(3 << 10)).await.unwrap();
    let mut answers = client
        .server_reflection_info(ReceiverStream::new(questions))
        .await
        .unwrap()
        .into_inner();
    assert!(answers.message().await.unwrap().is_some());
    asked.send(ask(3 << 10)).await.unwrap();
    assert!(answers.message().await.unwrap().is_some());
    assert!(
        held_bytes(&daemon).await < 3 << 10,
        "the stream is still open"
    );
    // A message may have 4 KiB, and all of them 64 KiB.
    asked.send(ask(5 << 10)).await.unwrap();
    assert!(
        !matches!(answers.message().await, Ok(Some(_))),
        "the stream ends"
    );
    let (asked, questions) = tokio::sync::mpsc::channel(1);
    let mut answers = client
        .server_reflection_info(ReceiverStream::new(questions))
        .await
        .unwrap()
        .into_inner();
    let mut answered = 0;
    while asked.send(ask(3 << 10)).await.is_ok() && matches!(answers.message().await, Ok(Some(_))) {
        answered += 1;
        assert!(answered < 22, "the stream ends");
    }
    assert!(answered > 15, "{answered}");
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn calls_without_a_token_that_stay_are_few_and_probes_are_answered_beside_them() {
    let mut daemon = Daemon::start("", &[]).await;
    let watch = async |channel: &Channel| {
        HealthClient::new(channel.clone())
            .watch(HealthCheckRequest::default())
            .await
            .map(tonic::Response::into_inner)
    };
    let one = channel(&daemon).await;
    let mut open = Vec::new();
    for _ in 0..10 {
        open.push(watch(&one).await.unwrap());
    }
    let status = watch(&one).await.unwrap_err();
    assert_eq!(
        status.code(),
        Code::ResourceExhausted,
        "{}",
        status.message()
    );
    open.pop();
    until("there is a place again", async || {
        watch(&one).await.map(|stream| open.push(stream)).is_ok()
    })
    .await;
    let mut channels = Vec::new();
    for _ in 1..100 {
        let another = channel(&daemon).await;
        for _ in 0..10 {
            open.push(watch(&another).await.unwrap());
        }
        channels.push(another);
    }
    let another = channel(&daemon).await;
    let status = watch(&another).await.unwrap_err();
    assert_eq!(
        status.message(),
        "1000 calls without a token are open here; try again later"
    );
    HealthClient::new(another)
        .check(HealthCheckRequest::default())
        .await
        .unwrap();
    drop(open);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn messages_and_bodies_share_the_budget() {
    let mut daemon = Daemon::start("request_budget = \"80MiB\"", &[]).await;
    let held = [
        unfinished(daemon.http_port(), 31 * MIB).await,
        unfinished(daemon.http_port(), 31 * MIB).await,
    ];
    let message = Bytes::from(vec![0x7a; 31 * MIB]);
    let status = call(
        channel(&daemon).await,
        "/taskd.v1.Discovery/InsertTasks",
        message,
    )
    .await
    .unwrap_err();
    assert_eq!(
        status.code(),
        Code::ResourceExhausted,
        "{}",
        status.message()
    );
    assert!(
        status
            .message()
            .contains("(request_budget); try again later"),
        "{}",
        status.message()
    );
    let task = pb::NewTask {
        queue: "q".into(),
        key: "k".into(),
        ..Default::default()
    };
    let request = pb::InsertTasksRequest {
        tasks: vec![task],
        ..Default::default()
    };
    DiscoveryClient::new(channel(&daemon).await)
        .insert_tasks(request)
        .await
        .unwrap();
    assert!(held_bytes(&daemon).await >= 50 * MIB);
    drop(held);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn an_insert_over_grpc_that_waits_keeps_no_room_of_its_request() {
    let mut daemon = Daemon::start(
        "max_payload_bytes = \"8MiB\"\nmax_request_bytes = \"10MiB\"\n",
        &[],
    )
    .await;
    let mut client = DiscoveryClient::new(channel(&daemon).await);
    let task = pb::NewTask {
        queue: "q".into(),
        key: "k".into(),
        payload: vec![7; 4 * MIB].into(),
        ..Default::default()
    };
    let wait = Some(prost_types::Duration {
        seconds: 60,
        nanos: 0,
    });
    let call = tokio::spawn(async move {
        client
            .insert_tasks(pb::InsertTasksRequest {
                tasks: vec![task],
                wait,
                ..Default::default()
            })
            .await
    });
    let leased = daemon.lease_all("w", "q", 1).await;
    until("its room is free again", async || {
        held_bytes(&daemon).await < MIB
    })
    .await;
    assert!(!call.is_finished());
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    let answer = call.await.unwrap().unwrap().into_inner();
    assert_eq!(answer.results[0].task_status(), pb::TaskStatus::Completed);
    assert!(daemon.stop().await.success());
}

/// Bytes of the budget that are taken.
async fn held_bytes(daemon: &Daemon) -> usize {
    let (_, metrics) = daemon.get("/metrics").await;
    let held = metrics
        .as_str()
        .unwrap()
        .lines()
        .find_map(|line| line.strip_prefix("taskd_requests_held_bytes "));
    held.unwrap().parse().unwrap()
}

async fn silent(port: u16, count: usize) -> Vec<TcpStream> {
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.push(TcpStream::connect(("127.0.0.1", port)).await.unwrap());
    }
    clients
}

/// Long polls over HTTP, each on a connection of its own, until there is no room for another
/// connection.
async fn polls_until_it_is_full(daemon: &Daemon, count: usize) -> Vec<TcpStream> {
    let body = json!({"worker": "w", "queues": ["q"], "wait": "60s"}).to_string();
    let head = "POST /v1/tasks:get HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: ";
    let request = format!("{head}{}\r\n\r\n{body}", body.len());
    let mut polls = silent(daemon.http_port(), count).await;
    for poll in &mut polls {
        // Some have made way by then.
        poll.write_all(request.as_bytes()).await.ok();
    }
    until("each connection has had a call", async || {
        // The request below may have taken the place of a connection whose call was not read yet.
        let mut poll = silent(daemon.http_port(), 1).await;
        poll[0].write_all(request.as_bytes()).await.ok();
        polls.append(&mut poll);
        let answer = crate::support::http_client()
            .get(format!("{}/v1/queues", daemon.http()))
            .send()
            .await;
        answer.is_ok_and(|answer| answer.status() == 503)
    })
    .await;
    polls
}

/// Until the other side has closed it.
async fn closed(client: &mut TcpStream) {
    let mut rest = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(60), client.read_to_end(&mut rest));
    drop(read.await.expect("a silent connection is closed"));
}

#[tokio::test]
async fn silent_grpc_connections_take_nothing_from_others_and_end() {
    let mut daemon = Daemon::start_with_descriptors("-n 1024", "").await;
    let mut clients = silent(daemon.grpc_port(), 1121).await;
    // This one says hello, and nothing more.
    clients[0]
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .unwrap();
    for n in 0..20 {
        assert_eq!(daemon.get("/healthz").await.0, 200);
        daemon
            .insert(&[json!({"queue": "q", "key": n.to_string()})])
            .await;
    }
    assert_eq!(daemon.drain("w", "q").await.len(), 20);
    // The oldest make way at once, the others end after a while.
    for client in &mut clients {
        closed(client).await;
    }
    let request = pb::GetTaskRequest { id: "x".into() };
    let status = DiscoveryClient::new(channel(&daemon).await)
        .get_task(request)
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "it is served again");
    let said = "connections over gRPC: the oldest without an accepted call makes way";
    assert_eq!(daemon.log().matches(said).count(), 1, "once a minute");
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn probes_are_answered_beside_as_many_long_polls_as_there_is_room_for() {
    let mut daemon = Daemon::start_with_descriptors("-n 1024", "").await;
    let polls = polls_until_it_is_full(&daemon, 600).await;
    for _ in 0..20 {
        // Each on a connection of its own.
        let client = crate::support::http_client();
        let answer = client
            .get(format!("{}/healthz", daemon.http()))
            .send()
            .await
            .unwrap();
        assert_eq!(answer.status(), 200);
        let answer = client
            .get(format!("{}/v1/queues", daemon.http()))
            .send()
            .await
            .unwrap();
        assert_eq!(
            (
                answer.status().as_u16(),
                answer.headers()["retry-after"].to_str().unwrap()
            ),
            (503, "1")
        );
    }
    drop(polls);
    until("there is room again", async || {
        daemon
            .try_get("/v1/queues")
            .await
            .is_some_and(|(status, _)| status == 200)
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn the_soft_limit_of_descriptors_is_raised_to_the_hard_one() {
    let mut daemon = Daemon::start_with_descriptors("-Sn 256", "").await;
    let limits = fs::read_to_string(format!("/proc/{}/limits", daemon.pid())).unwrap();
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))
        .unwrap();
    let [soft, hard, ..] = line.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("{line}")
    };
    assert_eq!(soft, hard);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn max_connections_bounds_each_listener() {
    let mut daemon = Daemon::start("max_connections = 16", &[]).await;
    let polls = polls_until_it_is_full(&daemon, 20).await;
    let client = crate::support::http_client();
    let answer = client
        .get(format!("{}/v1/queues", daemon.http()))
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    assert!(
        answer.contains("16 connections are open, and there may be no more"),
        "{answer}"
    );
    assert_eq!(
        client
            .get(format!("{}/readyz", daemon.http()))
            .send()
            .await
            .unwrap()
            .status(),
        200
    );
    drop(polls);
    let refused = "taskd_refused_connections_total{protocol=\"http\"} ";
    until("the refused ones are counted", async || {
        metric(&daemon, refused).await >= 4.0
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_call_that_waits_for_tasks_keeps_no_room_of_its_request() {
    let mut daemon = Daemon::start("", &[]).await;
    let open = json!({"worker": "w", "queues": ["q"]});
    let session = async || {
        daemon.post("/v1/sessions:open", &open).await.1["session"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    // Of one session, a call may bring what the other one wants.
    let sessions = [session().await, session().await];
    let get = json!({"worker": "w", "queues": ["q"], "wait": "60s"}).to_string();
    let want = json!({"worker": "w", "session": sessions[0], "want": 1, "wait": "60s"}).to_string();
    // A large body says no more than a small one.
    let spaces = " ".repeat(4 * MIB);
    let post = |path: &str, body: String| {
        let request = crate::support::http_client().post(format!("{}{path}", daemon.http()));
        tokio::spawn(
            request
                .header("content-type", "application/json")
                .body(format!("{body}{spaces}"))
                .send(),
        )
    };
    let calls = [post("/v1/tasks:get", get), post("/v1/sessions:want", want)];
    let wait = Some(prost_types::Duration {
        seconds: 60,
        nanos: 0,
    });
    let get = pb::GetTasksRequest {
        worker: "w".into(),
        queues: vec!["q".into()],
        wait,
        ..Default::default()
    };
    let want = pb::WantTasksRequest {
        worker: "w".into(),
        session: sessions[1].clone(),
        want: 1,
        wait,
    };
    let channel = channel(&daemon).await;
    let grpc = [
        ("/taskd.v1.Tasks/GetTasks", get.encode_to_vec()),
        ("/taskd.v1.Tasks/WantTasks", want.encode_to_vec()),
    ]
    .map(|(method, mut message)| {
        // A field that taskd does not know.
        prost::encoding::bytes::encode(1000, &vec![0; 4 * MIB], &mut message);
        tokio::spawn(call(channel.clone(), method, message.into()))
    });
    for session in sessions {
        let call = json!({"worker": "w", "session": session});
        until("the session's call waits", async || {
            daemon.post("/v1/sessions:pending", &call).await.1["demand"] == 1
        })
        .await;
    }
    // Nothing tells when the others wait, so the room must stay free for a second.
    let mut free = 0;
    until("their room is free again", async || {
        free = if held_bytes(&daemon).await < MIB {
            free + 1
        } else {
            0
        };
        tokio::time::sleep(Duration::from_millis(50)).await;
        free == 20
    })
    .await;
    assert!(
        calls.iter().all(|call| !call.is_finished()) && grpc.iter().all(|call| !call.is_finished())
    );
    daemon
        .insert(
            &(0..4)
                .map(|n| json!({"queue": "q", "key": n.to_string()}))
                .collect::<Vec<_>>(),
        )
        .await;
    for call in calls {
        let answer: Value = call.await.unwrap().unwrap().json().await.unwrap();
        assert_eq!(answer["tasks"].as_array().unwrap().len(), 1, "{answer}");
    }
    for call in grpc {
        assert!(!call.await.unwrap().unwrap().is_empty());
    }
    assert!(daemon.stop().await.success());
}
