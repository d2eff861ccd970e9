//! The price of sessions that wait, in memory.

use futures::{StreamExt, stream::FuturesUnordered};
use serde_json::json;
use taskd::wire::pb::{self, ItemStatus};

use crate::support::{
    daemon::Daemon,
    session::{Worker, channel, opening, seconds},
};

const SESSIONS: usize = 1000;
const CONNECTIONS: usize = 8;
/// An unoptimized build takes 14 KiB. It took 22 while the channel of each session had room for 32
/// frames.
const MOST_BYTES: f64 = 20.0 * 1024.0;

async fn resident_bytes(daemon: &Daemon) -> f64 {
    let (_, text) = daemon.get("/metrics").await;
    let mut lines = text.as_str().unwrap().lines();
    lines
        .find_map(|line| line.strip_prefix("process_resident_memory_bytes "))
        .unwrap()
        .parse()
        .unwrap()
}

#[tokio::test]
async fn a_thousand_sessions_wait_for_little_memory_and_one_of_them_gets_the_task() {
    let mut daemon = Daemon::start("[queues.q]\nlease = \"10m\"", &[]).await;
    let mut channels = Vec::new();
    for _ in 0..CONNECTIONS {
        channels.push(channel(daemon.grpc_port()).await);
    }
    let open = |number: usize| {
        // No heartbeat is due for as long as this takes.
        let open = pb::OpenSession {
            timeout: seconds(600),
            ..opening(&format!("w{number}"), 1)
        };
        Worker::open_on(channels[number % CONNECTIONS].clone(), open, None)
    };
    let mut workers = Vec::new();
    for number in 0..CONNECTIONS {
        workers.push(open(number).await.unwrap());
    }
    let before = resident_bytes(&daemon).await;
    for number in CONNECTIONS..SESSIONS {
        workers.push(open(number).await.unwrap());
    }
    let each = (resident_bytes(&daemon).await - before) / (SESSIONS - CONNECTIONS) as f64;
    println!("a session that waits takes {each:.0} bytes");
    assert!(
        each <= MOST_BYTES,
        "a session that waits takes {each:.0} bytes"
    );

    daemon.insert(&[json!({"queue": "q", "key": "k"})]).await;
    let mut waiting: FuturesUnordered<_> = workers
        .into_iter()
        .map(|mut worker| async move {
            let tasks = worker.tasks(1).await;
            worker.complete(&tasks, 0).await
        })
        .collect();
    assert_eq!(waiting.next().await.unwrap(), [ItemStatus::Ok]);
    drop(waiting);
    assert!(daemon.stop().await.success());
}
