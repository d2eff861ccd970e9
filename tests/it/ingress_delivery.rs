//! Claims whose answer is lost on the way, by the running binary: they cost nothing.

use serde_json::{Value, json};
use taskd::wire::pb::{self, tasks_client::TasksClient};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy},
    net::{TcpListener, TcpSocket, TcpStream},
};
use tonic::transport::Channel;

use crate::support::{daemon::Daemon, until};

/// Long, so that nothing comes back because it ran out.
const CONFIG: &str = "[queues.q]\nlease = \"10m\"";

async fn daemon_with(tasks: usize, payload: usize) -> (Daemon, Vec<String>) {
    let daemon = Daemon::start(CONFIG, &[]).await;
    let payload = "x".repeat(payload);
    let task = |n: usize| json!({"queue": "q", "key": format!("key-{n}"), "payload": payload});
    let ids = daemon
        .insert(&(0..tasks).map(task).collect::<Vec<_>>())
        .await;
    until("all wait", async || {
        daemon.queue("q").await["waiting"] == tasks
    })
    .await;
    (daemon, ids)
}

/// A connection that takes little before it is read from.
async fn connect(port: u16) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(16 << 10).unwrap();
    socket.connect(([127, 0, 0, 1], port).into()).await.unwrap()
}

fn get_request(max_tasks: usize) -> String {
    request(
        "get",
        &json!({"worker": "lost", "queues": ["q"], "max_tasks": max_tasks}),
    )
}

fn request(call: &str, body: &Value) -> String {
    let body = body.to_string();
    let head = format!(
        "POST /v1/tasks:{call} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    );
    format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// All tasks come again at once, and were never tried.
async fn nothing_was_lost(daemon: &Daemon, ids: &[String]) {
    let tasks = daemon.lease_all("w", "q", ids.len()).await;
    assert!(
        tasks.iter().all(|task| task["attempt"] == 1),
        "a first try each"
    );
    for id in ids {
        let (_, task) = daemon.get(&format!("/v1/tasks/{id}")).await;
        assert_eq!(
            (&task["status"], &task["attempts"]),
            (&json!("ASSIGNED"), &json!(0)),
            "{task}"
        );
    }
    assert_eq!(
        daemon.complete("w", &tasks).await,
        vec!["OK"; ids.len()],
        "what was delivered is not given back"
    );
}

#[tokio::test]
async fn a_client_that_asks_and_closes_takes_nothing_with_it() {
    let (mut daemon, ids) = daemon_with(20, 10).await;
    let report = json!({"worker": "lost", "completions": [], "next": {"queues": ["q"]}});
    for request in [get_request(1), request("complete", &report)]
        .iter()
        .cycle()
        .take(20)
    {
        let mut client = connect(daemon.http_port()).await;
        client.write_all(request.as_bytes()).await.unwrap();
    }
    nothing_was_lost(&daemon, &ids).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn an_answer_that_is_cut_gives_its_tasks_back() {
    let (mut daemon, ids) = daemon_with(3, 900 << 10).await;
    let mut client = connect(daemon.http_port()).await;
    client.write_all(get_request(3).as_bytes()).await.unwrap();
    let mut some = vec![0; 64 << 10];
    client.read_exact(&mut some).await.unwrap();
    assert_eq!(daemon.queue("q").await["assigned"], 3);
    drop(client);
    nothing_was_lost(&daemon, &ids).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_client_that_reads_its_answer_and_closes_keeps_its_tasks() {
    let (mut daemon, ids) = daemon_with(40, 10).await;
    let mut tasks = Vec::new();
    for _ in 0..20 {
        let body = json!({"worker": "w", "queues": ["q"], "max_tasks": 1});
        // Each on a connection of its own, closed as soon as the answer is there.
        let answer = crate::support::http_client()
            .post(format!("{}/v1/tasks:get", daemon.http()))
            .json(&body)
            .send()
            .await;
        let mut answer: Value = answer.unwrap().json().await.unwrap();
        tasks.push(answer["tasks"][0].take());
        let mut client = TasksClient::new(channel(daemon.grpc_port()).await);
        let get = pb::GetTasksRequest {
            worker: "w".into(),
            ..get(1, 0)
        };
        let task = client
            .get_tasks(get)
            .await
            .unwrap()
            .into_inner()
            .tasks
            .remove(0);
        drop(client);
        tasks.push(json!({"id": task.id, "lease_token": task.lease_token}));
    }
    assert_eq!(daemon.complete("w", &tasks).await, vec!["OK"; ids.len()]);
    assert!(daemon.stop().await.success());
}

/// Passes on what comes, and from the server so many bytes; then it cuts the connection.
async fn cutter(server: u16, bytes: u64) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut client, _) = listener.accept().await.unwrap();
        let mut server = connect(server).await;
        let ((mut from_server, mut to_server), (mut from_client, mut to_client)) =
            (server.split(), client.split());
        let mut some = (&mut from_server).take(bytes);
        tokio::select! {
            _ = copy(&mut some, &mut to_client) => {}
            _ = copy(&mut from_client, &mut to_server) => {}
        }
    });
    port
}

fn get(max_tasks: u32, max_bytes: u64) -> pb::GetTasksRequest {
    let (worker, queues) = ("lost".to_owned(), vec!["q".to_owned()]);
    let wait = Some(prost_types::Duration {
        seconds: 30,
        nanos: 0,
    });
    pb::GetTasksRequest {
        worker,
        queues,
        max_tasks,
        max_bytes,
        wait,
        ..Default::default()
    }
}

async fn channel(port: u16) -> Channel {
    Channel::from_shared(format!("http://127.0.0.1:{port}"))
        .unwrap()
        .timeout(crate::support::PATIENCE)
        .connect()
        .await
        .unwrap()
}

#[tokio::test]
async fn a_grpc_answer_that_is_cut_gives_its_tasks_back() {
    let (mut daemon, ids) = daemon_with(3, 900 << 10).await;
    for bytes in [300, 64 << 10, 1 << 20] {
        let mut client = TasksClient::new(channel(cutter(daemon.grpc_port(), bytes).await).await);
        client.get_tasks(get(3, 0)).await.unwrap_err();
    }
    nothing_was_lost(&daemon, &ids).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_grpc_answer_that_arrives_is_not_given_back() {
    let (mut daemon, ids) = daemon_with(3, 900 << 10).await;
    let mut client = TasksClient::new(channel(daemon.grpc_port()).await);
    let tasks = client
        .get_tasks(get(3, 0))
        .await
        .unwrap()
        .into_inner()
        .tasks;
    // Whatever is to be given back has been, when these are.
    drop(client);
    let mut other = TasksClient::new(channel(cutter(daemon.grpc_port(), 64 << 10).await).await);
    daemon
        .insert(&[json!({"queue": "q", "key": "of another", "payload": "x".repeat(900 << 10)})])
        .await;
    other.get_tasks(get(1, 0)).await.unwrap_err();
    until("the other's task is back", async || {
        daemon.queue("q").await["waiting"] == 1
    })
    .await;
    assert_eq!(daemon.queue("q").await["leases"], 3);
    let completion = |task: pb::LeasedTask| pb::Completion {
        id: task.id,
        lease_token: task.lease_token,
        ..Default::default()
    };
    let completions: Vec<_> = tasks.into_iter().map(completion).collect();
    assert_eq!(completions.len(), ids.len());
    let mut client = TasksClient::new(channel(daemon.grpc_port()).await);
    let results = client
        .complete_tasks(pb::CompleteTasksRequest {
            worker: "lost".into(),
            completions,
            next: None,
        })
        .await
        .unwrap();
    assert!(
        results
            .into_inner()
            .results
            .iter()
            .all(|result| result.status() == pb::ItemStatus::Ok)
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn an_answer_fits_a_grpc_client_that_says_nothing() {
    // 6 MiB in all.
    let (mut daemon, _) = daemon_with(6, (1 << 20) - 1000).await;
    let mut client = TasksClient::new(channel(daemon.grpc_port()).await);
    let some = client
        .get_tasks(get(6, 0))
        .await
        .unwrap()
        .into_inner()
        .tasks
        .len();
    assert!((1..=3).contains(&some), "{some} of 1 MiB");
    let one = client
        .get_tasks(get(6, 1000))
        .await
        .unwrap()
        .into_inner()
        .tasks
        .len();
    assert_eq!(one, 1, "a task that is larger than asked for comes alone");
    let mut client = client.max_decoding_message_size(16 << 20);
    let rest = client
        .get_tasks(get(6, 16 << 20))
        .await
        .unwrap()
        .into_inner()
        .tasks
        .len();
    assert_eq!(some + one + rest, 6);
    assert!(daemon.stop().await.success());
}
