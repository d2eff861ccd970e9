//! Sessions of workers on several processes.

use std::time::{Duration, Instant};

use serde_json::json;
use taskd::wire::pb::{self, ItemStatus};
use tonic::{Code, Status};

use crate::support::{
    daemon::Daemon,
    mariadb::MysqlDatabase,
    redis::{Fsync, RedisServer},
    session::{Worker, opening, seconds},
    store_contract::Database,
    until,
};

const CONFIG: &str = "[queues.q]\nlease = \"10m\"\nbackoff = [\"0s\"]";

fn extensions(tasks: &[pb::LeasedTask]) -> pb::WorkerFrame {
    let extension = |task: &pb::LeasedTask| {
        let (id, lease_token) = (task.id.clone(), task.lease_token.clone());
        pb::Extension {
            id,
            lease_token,
            by: seconds(300),
        }
    };
    pb::WorkerFrame {
        extensions: tasks.iter().map(extension).collect(),
        ..Default::default()
    }
}

#[tokio::test]
async fn a_worker_moves_between_processes_and_one_that_starts_again_takes_over_in_all() {
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let (redis_url, database_url) = (redis.url(), database.url());
    let backends = ["--redis-url", &redis_url, "--database-url", &database_url];
    let (mut one, mut two) = (
        Daemon::start(CONFIG, &backends).await,
        Daemon::start(CONFIG, &backends).await,
    );
    let insert = async |from: usize, to: usize| {
        one.insert(
            &(from..to)
                .map(|n| json!({"queue": "q", "key": format!("{n}")}))
                .collect::<Vec<_>>(),
        )
        .await;
    };
    insert(0, 3).await;

    // A worker moves: its old session, which nobody hears any more, ends and leaves alone what it
    // took along.
    let open = pb::OpenSession {
        timeout: seconds(10),
        ..opening("w", 3)
    };
    let mut old = Worker::open(one.grpc_port(), open).await.unwrap();
    let tasks = old.tasks(3).await;
    let (session, holding) = (
        old.opened.session.clone(),
        tasks[..2].iter().map(|task| task.id.clone()).collect(),
    );
    let mut new = Worker::open(
        two.grpc_port(),
        pb::OpenSession {
            session,
            holding,
            ..opening("w", 0)
        },
    )
    .await
    .unwrap();
    assert!(!new.opened.resumed, "another process does not know it");
    let answer = new.ask(extensions(&tasks[..2])).await.unwrap();
    assert!(
        answer
            .extensions
            .iter()
            .all(|result| result.status() == ItemStatus::Ok)
    );
    assert_eq!(old.end().await.unwrap_err().code(), Code::DeadlineExceeded);
    until("the third one is back", async || {
        one.queue("q").await["waiting"] == 1
    })
    .await;
    assert_eq!(new.complete(&tasks[..1], 1).await, [ItemStatus::Ok]);
    let again = new.tasks(1).await;
    assert_eq!((&again[0].id, again[0].attempt), (&tasks[2].id, 1));

    // Its program starts again, at the first process: the session at the second one is over, and
    // its leases are void.
    let mut third = Worker::open(
        one.grpc_port(),
        pb::OpenSession {
            takeover: true,
            ..opening("w", 5)
        },
    )
    .await
    .unwrap();
    let mut ids: Vec<_> = third
        .tasks(2)
        .await
        .into_iter()
        .map(|task| task.id)
        .collect();
    ids.sort();
    let mut want = [tasks[1].id.clone(), tasks[2].id.clone()];
    want.sort();
    assert_eq!(ids, want);
    assert_eq!(new.end().await.unwrap_err().code(), Code::Aborted);
    third.close().await;
    assert_eq!(one.drain("last", "q").await.len(), 2);
    assert!(one.stop().await.success());
    assert!(two.stop().await.success());
    database.remove().await;
}

/// Reads until the stream has failed, and keeps its tasks. It sends heartbeats: the worker is not
/// silent. The last message of a takeover comes after half a minute.
async fn over(worker: &mut Worker) -> Status {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(90) {
        tokio::select! {
            read = worker.read() => match read {
                Ok(frame) => assert!(frame.is_some(), "it is not closed"),
                Err(status) => return status,
            },
            () = tokio::time::sleep(Duration::from_secs(1)) => drop(worker.to.send(pb::WorkerFrame::default()).await),
        }
    }
    panic!("its stream goes on");
}

fn taking_over(want: u32) -> pb::OpenSession {
    pb::OpenSession {
        takeover: true,
        timeout: seconds(600),
        ..opening("w", want)
    }
}

/// Two programs of one worker start at the same time, each at its process: exactly one stays.
#[tokio::test]
async fn of_two_takeovers_at_two_processes_at_the_same_time_one_stays() {
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let (redis_url, database_url) = (redis.url(), database.url());
    let backends = ["--redis-url", &redis_url, "--database-url", &database_url];
    let (mut one, mut two) = (
        Daemon::start(CONFIG, &backends).await,
        Daemon::start(CONFIG, &backends).await,
    );
    let (first, second) = (one.grpc_port(), two.grpc_port());
    for round in 0..10 {
        one.insert(&[json!({"queue": "q", "key": round.to_string()})])
            .await;
        let opened = tokio::join!(
            Worker::open(first, taking_over(1)),
            Worker::open(second, taking_over(1))
        );
        let (ended, mut stays) = match opened {
            (Ok(mut one), Ok(mut two)) => tokio::select! {
                ended = over(&mut one) => (ended, two),
                ended = over(&mut two) => (ended, one),
            },
            (Ok(stays), Err(ended)) | (Err(ended), Ok(stays)) => (ended, stays),
            (Err(one), Err(two)) => panic!("none stays in round {round}: {one}, {two}"),
        };
        assert_eq!(ended.code(), Code::Aborted, "{ended}");
        let task = stays.tasks(1).await;
        assert_eq!(stays.complete(&task, 0).await, [ItemStatus::Ok]);
        stays.close().await;
    }
    assert!(one.stop().await.success());
    assert!(two.stop().await.success());
    database.remove().await;
}

/// No process hears the message: it is sent again.
#[tokio::test]
async fn a_takeover_whose_message_is_lost_is_told_again() {
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let (redis_url, database_url) = (redis.url(), database.url());
    let backends = ["--redis-url", &redis_url, "--database-url", &database_url];
    let (mut one, mut two) = (
        Daemon::start(CONFIG, &backends).await,
        Daemon::start(CONFIG, &backends).await,
    );
    one.insert(&[json!({"queue": "q", "key": "k"})]).await;
    let open = pb::OpenSession {
        timeout: seconds(600),
        ..opening("w", 1)
    };
    let mut old = Worker::open(one.grpc_port(), open).await.unwrap();
    let task = old.tasks(1).await;
    let mut admin = crate::support::redis::patient(redis_url.as_str()).await;
    let mut allow = async |channels: &str| {
        let mut acl = redis::cmd("ACL");
        acl.arg("SETUSER")
            .arg("default")
            .arg(channels)
            .exec_async(&mut admin)
            .await
            .unwrap();
    };
    // Nobody may publish or hear anything.
    allow("resetchannels").await;
    let mut new = Worker::open(two.grpc_port(), taking_over(1)).await.unwrap();
    old.ask(pb::WorkerFrame::default())
        .await
        .expect("its process does not know");
    allow("allchannels").await;
    let ended = over(&mut old).await;
    assert_eq!(ended.code(), Code::Aborted, "{ended}");
    // Its leases are void, at no cost.
    let again = new.tasks(1).await;
    assert_eq!((&again[0].id, again[0].attempt), (&task[0].id, 1));
    assert_eq!(new.complete(&again, 0).await, [ItemStatus::Ok]);

    // The same of a session without a stream.
    allow("resetchannels").await;
    let open = json!({"worker": "w", "queues": ["q"], "takeover": true, "timeout": "2s"});
    let (status, opened) = one.post("/v1/sessions:open", &open).await;
    assert_eq!(status, 200, "{opened}");
    new.ask(pb::WorkerFrame::default())
        .await
        .expect("its process does not know");
    allow("allchannels").await;
    let ended = over(&mut new).await;
    assert_eq!(ended.code(), Code::Aborted, "{ended}");
    assert!(one.stop().await.success());
    assert!(two.stop().await.success());
    database.remove().await;
}
