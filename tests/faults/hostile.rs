//! Clients that misbehave on purpose in every way. Only they themselves may suffer from it.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::json;
use taskd::wire::pb;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
};

use crate::support::{
    daemon::Daemon,
    session::{Worker, opening, seconds, try_channel},
};

const MIB: usize = 1 << 20;
/// All of them together exceed `request_budget`.
const STALLED: usize = 12;
const STALLED_BYTES: usize = 24 * MIB;
const BABBLED: usize = 30;

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Opens connections to both ports and sends nothing, or garbage.
    Silent,
    /// Sends nearly all of a large body, but never the rest.
    Stalls,
    /// Sends a list of 4 MiB with far too many entries, none of which are tasks.
    Swells,
    /// Completes tasks of a thousand queues that do not exist.
    MakesUp,
    /// Requests tasks and disconnects before reading them.
    HangsUp,
    /// Waits for tasks of a hundred queues that do not exist, and disconnects.
    Waits,
    /// Opens a stream, asks for tasks, and never reads.
    IsDeaf,
    /// Opens dozens of streams, and sends invalid frames on each.
    Babbles,
}

const KINDS: [Kind; 8] = {
    use Kind::*;
    [
        Silent, Stalls, Swells, MakesUp, HangsUp, Waits, IsDeaf, Babbles,
    ]
};

/// The running hostile clients. Dropping it stops them.
pub(crate) struct Hostile {
    clients: JoinSet<()>,
    outcomes: Arc<Outcomes>,
}

/// For each kind, its last round, or one in which it did its worst.
type Outcomes = Mutex<[Option<std::io::Result<()>>; KINDS.len()]>;

impl Hostile {
    pub(crate) fn start(daemons: &[Daemon]) -> Self {
        let outcomes: Arc<Outcomes> = Arc::default();
        let mut clients = JoinSet::new();
        for (n, daemon) in daemons.iter().enumerate() {
            let ports = (daemon.http_port(), daemon.grpc_port());
            // Only the first process gets the stalling clients, which occupy all of its memory for
            // requests.
            for (place, kind) in KINDS
                .into_iter()
                .enumerate()
                .filter(|(_, kind)| n == 0 || !matches!(kind, Kind::Stalls))
            {
                let outcomes = Arc::clone(&outcomes);
                clients.spawn(async move {
                    loop {
                        // Errors do not matter to it, such as a process that disconnects or is not
                        // running.
                        let outcome = round(kind, ports).await;
                        note(&mut outcomes.lock().unwrap()[place], outcome);
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                });
            }
        }
        Self { clients, outcomes }
    }

    /// Fails while some kinds have not done their worst yet, and lists them.
    pub(crate) fn missing(&mut self) -> Result<(), String> {
        if let Some(ended) = self.clients.try_join_next() {
            panic!("a hostile client ended by itself: {ended:?}");
        }
        let outcomes = self.outcomes.lock().unwrap();
        let missing: Vec<_> = KINDS
            .iter()
            .zip(&*outcomes)
            .filter(|(_, last)| !matches!(last, Some(Ok(()))))
            .collect();
        if missing.is_empty() {
            Ok(())
        } else {
            Err(format!("not yet: {missing:?}"))
        }
    }
}

fn note(last: &mut Option<std::io::Result<()>>, outcome: std::io::Result<()>) {
    if !matches!(last, Some(Ok(()))) {
        *last = Some(outcome);
    }
}

async fn round(kind: Kind, (http, grpc): (u16, u16)) -> std::io::Result<()> {
    match kind {
        Kind::Silent => {
            let mut held = Vec::new();
            for _ in 0..50 {
                held.push(connect(http).await?);
                let mut nonsense = connect(grpc).await?;
                nonsense.write_all(b"GET / HTTP/1.1\r\n\r\n").await?;
                held.push(nonsense);
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
            Ok(())
        }
        Kind::Stalls => {
            let piece = vec![b' '; MIB];
            let mut held = Vec::new();
            for _ in 0..STALLED {
                let mut stream = connect(http).await?;
                stream
                    .write_all(head("/v1/tasks", STALLED_BYTES).as_bytes())
                    .await?;
                for _ in 1..STALLED_BYTES / MIB {
                    // If there is no memory for it, taskd answers and then disconnects.
                    if stream.write_all(&piece).await.is_err() {
                        break;
                    }
                }
                held.push(stream);
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
            Ok(())
        }
        Kind::Swells => {
            let body = format!("[{}0]", "0,".repeat(2 * MIB));
            ask(http, "/v1/tasks", &body, "413").await
        }
        Kind::MakesUp => {
            let one = |n| json!({"id": "01a201ac-c680-7000-8dd0-e681572e49a2", "lease_token": format!("no-{n}:0:1:1:1")});
            let body =
                json!({"worker": "hostile", "completions": (0..1000).map(one).collect::<Vec<_>>()});
            ask(http, "/v1/tasks:complete", &body.to_string(), "200").await
        }
        Kind::HangsUp => {
            let body =
                json!({"worker": "hostile", "queues": ["one", "two", "three"], "max_tasks": 100})
                    .to_string();
            let mut stream = connect(http).await?;
            stream
                .write_all(format!("{}{body}", head("/v1/tasks:get", body.len())).as_bytes())
                .await
        }
        Kind::Waits => {
            let queues: Vec<_> = (0..100).map(|n| format!("never-{n}")).collect();
            let body = json!({"worker": "hostile", "queues": queues, "wait": "60s"}).to_string();
            let mut held = Vec::new();
            for _ in 0..20 {
                let mut stream = connect(http).await?;
                stream
                    .write_all(format!("{}{body}", head("/v1/tasks:get", body.len())).as_bytes())
                    .await?;
                held.push(stream);
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok(())
        }
        Kind::IsDeaf => {
            let stream = Worker::open_on(channel(grpc).await?, session(100), None).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            stream.map(drop).map_err(std::io::Error::other)
        }
        Kind::Babbles => {
            let channel = channel(grpc).await?;
            let mut held = Vec::new();
            for n in 0..BABBLED {
                let stream = Worker::open_on(channel.clone(), session(0), None)
                    .await
                    .map_err(std::io::Error::other)?;
                // This fails if taskd has already ended the stream.
                drop(stream.to.try_send(nonsense(n)));
                held.push(stream);
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
            Ok(())
        }
    }
}

async fn channel(port: u16) -> std::io::Result<tonic::transport::Channel> {
    try_channel(port).await.map_err(std::io::Error::other)
}

fn session(want: u32) -> pb::OpenSession {
    let queues = ["one", "two", "three"].map(ToOwned::to_owned).into();
    pb::OpenSession {
        queues,
        ..opening("hostile", want)
    }
}

/// A frame that ends its stream, or must have no effect.
fn nonsense(n: usize) -> pb::WorkerFrame {
    let id = || "01a201ac-c680-7000-8000-e681572e49a2".to_owned();
    match n % 5 {
        // Opens a second session on the stream.
        0 => pb::WorkerFrame {
            open: Some(session(u32::MAX)),
            ..Default::default()
        },
        // Has more items than a frame may have.
        1 => pb::WorkerFrame {
            completions: vec![pb::Completion::default(); 5000],
            ..Default::default()
        },
        2 => {
            let one = |n| pb::Extension {
                id: id(),
                lease_token: format!("no-{n}:0:1:1:1"),
                by: seconds(i64::MAX),
            };
            pb::WorkerFrame {
                extensions: (0..500).map(one).collect(),
                ..Default::default()
            }
        }
        // Reports tasks that it never received.
        3 => pb::WorkerFrame {
            started: (0..1000).map(|_| id()).collect(),
            surrender: true,
            ..Default::default()
        },
        // Asks for tasks, surrenders them and closes the session, all at once.
        _ => pb::WorkerFrame {
            want: u32::MAX,
            surrender: true,
            close: true,
            number: u64::MAX,
            ..Default::default()
        },
    }
}

async fn connect(port: u16) -> std::io::Result<TcpStream> {
    TcpStream::connect(("127.0.0.1", port)).await
}

fn head(path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
}

/// Sends a complete request and reads the start of the answer, which must have this status.
async fn ask(port: u16, path: &str, body: &str, status: &str) -> std::io::Result<()> {
    let mut stream = connect(port).await?;
    stream
        .write_all(format!("{}{body}", head(path, body.len())).as_bytes())
        .await?;
    let mut begins = [0; 12];
    tokio::time::timeout(Duration::from_secs(5), stream.read_exact(&mut begins)).await??;
    match begins.ends_with(status.as_bytes()) {
        true => Ok(()),
        false => Err(std::io::Error::other(String::from_utf8_lossy(&begins))),
    }
}
