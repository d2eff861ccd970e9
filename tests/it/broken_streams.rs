//! Streams that break, and workers that go on with what they have.

use serde_json::{Value, json};
use taskd::wire::pb::{self, ItemStatus, tasks_client::TasksClient};
use tonic::Code;

use crate::support::{
    daemon::Daemon,
    session::{Worker, channel, opening, seconds},
    until,
};

async fn insert(daemon: &Daemon, count: usize) -> Vec<String> {
    daemon
        .insert(
            &(0..count)
                .map(|n| json!({"queue": "q", "key": n.to_string()}))
                .collect::<Vec<_>>(),
        )
        .await
}

fn extensions(tasks: &[pb::LeasedTask]) -> Vec<pb::Extension> {
    let extension = |task: &pb::LeasedTask| {
        let (id, lease_token) = (task.id.clone(), task.lease_token.clone());
        pb::Extension {
            id,
            lease_token,
            by: seconds(300),
        }
    };
    tasks.iter().map(extension).collect()
}

#[tokio::test]
async fn leases_are_kept_while_a_worker_opens_another_stream() {
    let mut daemon = Daemon::start("[queues.q]\nlease = \"3s\"", &[]).await;
    let ids = insert(&daemon, 1).await;
    let open = |session, holding| pb::OpenSession {
        session,
        holding,
        keep_leases: true,
        timeout: seconds(120),
        ..opening("w", 1)
    };
    let mut worker = Worker::open(daemon.grpc_port(), open(String::new(), Vec::new()))
        .await
        .unwrap();
    let tasks = worker.tasks(1).await;
    let session = worker.opened.session.clone();
    drop(worker);
    let first = tasks[0].lease_expires_at.unwrap().seconds;
    until("the lease is extended twice", async || {
        let (_, task): (_, Value) = daemon
            .get(&format!("/v1/tasks:explain?id={}", ids[0]))
            .await;
        let Some(expires) = task["leases"][0]["lease_expires_at"].as_str() else {
            panic!("it is lost: {task}")
        };
        let expires = humantime::parse_rfc3339(expires)
            .unwrap()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap();
        expires.as_secs() as i64 >= first + 4
    })
    .await;
    let mut again = Worker::open(daemon.grpc_port(), open(session, ids))
        .await
        .unwrap();
    assert!(again.opened.resumed);
    assert_eq!(again.complete(&tasks, 0).await, [ItemStatus::Ok]);
    again.close().await;
    assert!(daemon.stop().await.success());
}

/// taskd does not keep what a worker has taken to another session: the end of the old one would end
/// it.
#[tokio::test]
async fn leases_that_moved_are_not_kept_by_the_session_of_before() {
    let mut daemon = Daemon::start("[queues.q]\nlease = \"3s\"", &[]).await;
    insert(&daemon, 2).await;
    let open = pb::OpenSession {
        keep_leases: true,
        timeout: seconds(6),
        ..opening("w", 2)
    };
    let mut old = Worker::open(daemon.grpc_port(), open).await.unwrap();
    let tasks = old.tasks(2).await;
    drop(old);
    let mut new = Worker::open(daemon.grpc_port(), opening("w", 0))
        .await
        .unwrap();
    let extensions = extensions(&tasks[..1]);
    let answer = new
        .ask(pb::WorkerFrame {
            extensions,
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!(answer.extensions[0].status(), ItemStatus::Ok);
    // The old session has kept the other one, and its end gives it back at no cost.
    let back = daemon.lease_all("other", "q", 1).await;
    assert_eq!(
        (&back[0]["id"], &back[0]["attempt"]),
        (&json!(tasks[1].id), &json!(1))
    );
    assert_eq!(new.complete(&tasks[..1], 0).await, [ItemStatus::Ok]);
    new.close().await;
    assert!(daemon.stop().await.success());
}

/// The way to the old session is broken, and nothing closes it.
#[tokio::test]
async fn leases_that_moved_are_not_kept_by_a_session_whose_worker_is_silent() {
    let mut daemon = Daemon::start("[queues.q]\nlease = \"6s\"\nbackoff = [\"0s\"]", &[]).await;
    insert(&daemon, 2).await;
    let open = pb::OpenSession {
        keep_leases: true,
        timeout: seconds(9),
        ..opening("w", 2)
    };
    let mut old = Worker::open(daemon.grpc_port(), open).await.unwrap();
    let tasks = old.tasks(2).await;
    old.read()
        .await
        .unwrap()
        .expect("taskd's heartbeat: the worker has missed its own");
    let open = pb::OpenSession {
        timeout: seconds(120),
        ..opening("w", 0)
    };
    let mut new = Worker::open(daemon.grpc_port(), open).await.unwrap();
    let extensions = extensions(&tasks[..1]);
    let answer = new
        .ask(pb::WorkerFrame {
            extensions,
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!(answer.extensions[0].status(), ItemStatus::Ok);
    assert_eq!(old.end().await.unwrap_err().code(), Code::DeadlineExceeded);
    let back = daemon.lease_all("other", "q", 1).await;
    assert_eq!(
        (&back[0]["id"], &back[0]["attempt"]),
        (&json!(tasks[1].id), &json!(1)),
        "the one that it has kept"
    );
    assert_eq!(new.complete(&tasks[..1], 0).await, [ItemStatus::Ok]);
    new.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn what_moved_and_has_not_started_costs_nothing() {
    let mut daemon = Daemon::start("[queues.q]\nlease = \"10m\"\nbackoff = [\"0s\"]", &[]).await;
    insert(&daemon, 3).await;
    let mut old = Worker::open(daemon.grpc_port(), opening("w", 3))
        .await
        .unwrap();
    let tasks = old.tasks(3).await;
    old.start(&tasks[..2]).await;
    let mut new = Worker::open(daemon.grpc_port(), opening("w", 0))
        .await
        .unwrap();
    // A worker may say it before it hears that taskd does not know its session.
    new.start(&tasks[..1]).await;
    let (extensions, started) = (extensions(&tasks), vec![tasks[1].id.clone()]);
    let answer = new
        .ask(pb::WorkerFrame {
            extensions,
            started,
            ..Default::default()
        })
        .await
        .unwrap();
    assert!(
        answer
            .extensions
            .iter()
            .all(|result| result.status() == ItemStatus::Ok),
        "{answer:?}"
    );
    new.close().await;
    let mut back: Vec<_> = daemon.lease_all("other", "q", 3).await;
    back.sort_by_key(|task| task["id"].to_string());
    let mut want: Vec<_> = tasks
        .iter()
        .zip([2, 2, 1])
        .map(|(task, attempt)| (json!(task.id), json!(attempt)))
        .collect();
    want.sort_by_key(|(id, _)| id.to_string());
    let back: Vec<_> = back
        .iter()
        .map(|task| (task["id"].clone(), task["attempt"].clone()))
        .collect();
    assert_eq!(back, want);
    old.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_session_may_end_with_its_first_frame() {
    let mut daemon = Daemon::start("", &[]).await;
    let open = Some(opening("w", 1));
    let frame = pb::WorkerFrame {
        open,
        number: 7,
        close: true,
        ..Default::default()
    };
    // This side of the stream stays open.
    let (to, frames) = tokio::sync::mpsc::channel(1);
    to.send(frame).await.unwrap();
    let mut client = TasksClient::new(channel(daemon.grpc_port()).await);
    let frames = tokio_stream::wrappers::ReceiverStream::new(frames);
    let mut from = client.stream_tasks(frames).await.unwrap().into_inner();
    assert!(from.message().await.unwrap().unwrap().opened.is_some());
    assert_eq!(
        from.message()
            .await
            .unwrap()
            .unwrap()
            .answer
            .unwrap()
            .number,
        7
    );
    assert_eq!(from.message().await.unwrap(), None, "the stream ends well");
    let (_, metrics) = daemon.get("/metrics").await;
    let ended = "taskd_sessions_ended_total{reason=\"closed\"} 1";
    assert!(
        metrics.as_str().unwrap().contains(ended),
        "it does not stay for its time-out"
    );
    assert!(daemon.stop().await.success());
}
