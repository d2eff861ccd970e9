//! Sessions of workers on several processes.

use serde_json::json;
use taskd::wire::pb::{self, ItemStatus};
use tonic::Code;

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
        pb::Extension { id, lease_token, by: seconds(300) }
    };
    pb::WorkerFrame { extensions: tasks.iter().map(extension).collect(), ..Default::default() }
}

#[tokio::test]
async fn a_worker_moves_between_processes_and_one_that_starts_again_takes_over_in_all() {
    let (redis, database) = (RedisServer::start(Fsync::Always), MysqlDatabase::create().await);
    let (redis_url, database_url) = (redis.url(), database.url());
    let backends = ["--redis-url", &redis_url, "--database-url", &database_url];
    let (mut one, mut two) = (Daemon::start(CONFIG, &backends).await, Daemon::start(CONFIG, &backends).await);
    let insert = async |from: usize, to: usize| {
        one.insert(&(from..to).map(|n| json!({"queue": "q", "key": format!("{n}")})).collect::<Vec<_>>()).await;
    };
    insert(0, 3).await;

    // A worker moves: its old session, which nobody hears any more, ends and leaves alone what it took along.
    let open = pb::OpenSession { timeout: seconds(2), ..opening("w", 3) };
    let mut old = Worker::open(one.grpc_port(), open).await.unwrap();
    let tasks = old.tasks(3).await;
    let (session, holding) = (old.opened.session.clone(), tasks[..2].iter().map(|task| task.id.clone()).collect());
    let mut new = Worker::open(two.grpc_port(), pb::OpenSession { session, holding, ..opening("w", 0) }).await.unwrap();
    assert!(!new.opened.resumed, "another process does not know it");
    let answer = new.ask(extensions(&tasks[..2])).await.unwrap();
    assert!(answer.extensions.iter().all(|result| result.status() == ItemStatus::Ok));
    assert_eq!(old.end().await.unwrap_err().code(), Code::DeadlineExceeded);
    until("the third one is back", async || one.queue("q").await["queued"] == 1).await;
    assert_eq!(new.complete(&tasks[..1], 1).await, [ItemStatus::Ok]);
    let again = new.tasks(1).await;
    assert_eq!((&again[0].id, again[0].attempt), (&tasks[2].id, 1));

    // Its program starts again, at the first process: the session at the second one is over, and its leases are void.
    let mut third = Worker::open(one.grpc_port(), pb::OpenSession { takeover: true, ..opening("w", 5) }).await.unwrap();
    let mut ids: Vec<_> = third.tasks(2).await.into_iter().map(|task| task.id).collect();
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
