//! A thousand streams: five hundred workers, each with a session at both of two processes, of which
//! one is killed.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use redis::aio::MultiplexedConnection;
use serde_json::{Value, json};
use taskd::wire::pb::{self, ItemStatus};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::{Status, transport::Channel};

use crate::support::{
    daemon::Daemon,
    mariadb::MysqlDatabase,
    redis::{Fsync, RedisServer},
    session::{Worker, completion, opening, seconds, try_channel},
    store_contract::Database,
    until,
};

const WORKERS: usize = 500;
const TASKS: usize = 1000;
const NUM: usize = 3;
/// The connections to a process, which its 500 streams share.
const CONNECTIONS: usize = 4;
/// How many tasks a session wants, at any time.
const DEMAND: u32 = 2;
/// The beginning of the names of all workers, which nothing else in Redis has.
const NAME: &str = "streamer-";

/// The lease is what the tasks of the killed process wait for.
const CONFIG: &str = "\
    partitions = 2\n\
    grace = \"1s\"\n\
    [queues.q]\n\
    lease = \"8s\"\n\
    replicas = 3\n\
    max_attempts = 1000\n\
    backoff = [\"0s\"]\n";

/// The knowledge that the workers share.
struct Crowd {
    ports: [u16; 2],
    /// By task: the workers whose completion was answered OK.
    credits: Mutex<BTreeMap<String, BTreeSet<String>>>,
    open: AtomicUsize,
    done: CancellationToken,
}

impl Crowd {
    fn credited(&self) -> usize {
        self.credits
            .lock()
            .unwrap()
            .values()
            .map(BTreeSet::len)
            .sum()
    }

    /// A worker's half: opens stream after stream at one process, until all is done. Where `moves`,
    /// it goes to the other process when its own one is gone.
    async fn hold(self: Arc<Self>, name: String, mut at: usize, moves: bool, shared: Channel) {
        let (mut in_hand, mut shared) = (Vec::new(), Some(shared));
        while !self.done.is_cancelled() {
            let channel = match shared.take() {
                Some(channel) => Ok(channel),
                None => try_channel(self.ports[at]).await,
            };
            // Nothing but its own end may end a session here, however slow this machine is.
            let open = pb::OpenSession {
                timeout: seconds(300),
                keep_leases: moves,
                ..opening(&name, DEMAND)
            };
            let stream = match channel {
                Ok(channel) => Worker::open_on(channel, open, None).await,
                Err(status) => Err(status),
            };
            let Ok(mut stream) = stream else {
                at = if moves { 1 - at } else { at };
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            assert_eq!(stream.opened.granted, DEMAND);
            self.open.fetch_add(1, Ordering::SeqCst);
            // It reports here the tasks of its last stream, too.
            let served = self.serve(&name, &mut stream, &mut in_hand).await;
            self.open.fetch_sub(1, Ordering::SeqCst);
            if served.is_ok() {
                stream.close().await;
            }
        }
    }

    /// Works until all is done, or an error of the stream.
    async fn serve(
        &self,
        name: &str,
        stream: &mut Worker,
        in_hand: &mut Vec<pb::LeasedTask>,
    ) -> Result<(), Status> {
        let mut wanted = DEMAND;
        loop {
            while !in_hand.is_empty() {
                let on_their_way = wanted.checked_sub(u32::try_from(stream.tasks.len()).unwrap());
                let want = DEMAND - on_their_way.expect("taskd never sends more than is wanted");
                wanted += want;
                let completions = in_hand.iter().map(completion).collect();
                let answer = stream
                    .ask(pb::WorkerFrame {
                        completions,
                        want,
                        ..Default::default()
                    })
                    .await?;
                assert_eq!(
                    (answer.granted, answer.completions.len()),
                    (want, in_hand.len())
                );
                self.note(name, in_hand, &answer.completions);
            }
            if stream.tasks.is_empty() {
                tokio::select! {
                    () = self.done.cancelled() => return Ok(()),
                    frame = stream.read() => drop(frame?.ok_or_else(|| Status::unavailable("the stream has ended"))?),
                }
            }
            let came = u32::try_from(stream.tasks.len()).unwrap();
            wanted = wanted
                .checked_sub(came)
                .expect("taskd never sends more than is wanted");
            in_hand.append(&mut stream.tasks);
        }
    }

    /// Notes answers; keeps in hand what is to be sent again.
    fn note(&self, name: &str, in_hand: &mut Vec<pb::LeasedTask>, results: &[pb::ItemResult]) {
        let mut results = results.iter();
        in_hand.retain(|task| {
            let result = results.next().expect("each is answered");
            match result.status() {
                ItemStatus::Ok => {
                    let mut credits = self.credits.lock().unwrap();
                    credits
                        .entry(task.id.clone())
                        .or_default()
                        .insert(name.to_owned());
                    false
                }
                // Its lease has ended, because the process that gave it is gone, or this machine is
                // slow. Redis may have forgotten the task that others completed.
                ItemStatus::LeaseLost | ItemStatus::AlreadyCompleted | ItemStatus::UnknownTask => {
                    false
                }
                ItemStatus::TryLater => true,
                other => panic!("{other:?}: {result:?}"),
            }
        });
    }
}

async fn insert(daemon: &Daemon, numbers: std::ops::Range<usize>) {
    daemon
        .insert(
            &numbers
                .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
                .collect::<Vec<_>>(),
        )
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_streams_complete_each_task_num_times_while_a_process_is_killed() {
    let (redis, database) = (
        RedisServer::start(Fsync::EverySecond),
        MysqlDatabase::create().await,
    );
    let (redis_url, database_url) = (redis.url(), database.url());
    let backends = ["--redis-url", &redis_url, "--database-url", &database_url];
    let (mut one, mut two) = (
        Daemon::start(CONFIG, &backends).await,
        Daemon::start(CONFIG, &backends).await,
    );
    insert(&one, 0..TASKS / 2).await;

    let ports = [one.grpc_port(), two.grpc_port()];
    let (credits, open, done) = (
        Mutex::default(),
        AtomicUsize::new(0),
        CancellationToken::new(),
    );
    let crowd = Arc::new(Crowd {
        ports,
        credits,
        open,
        done,
    });
    let mut streams = JoinSet::new();
    for (at, port) in ports.into_iter().enumerate() {
        let mut shared = Vec::new();
        for _ in 0..CONNECTIONS {
            shared.push(try_channel(port).await.unwrap());
        }
        for worker in 0..WORKERS {
            let (name, channel) = (
                format!("{NAME}{worker}"),
                shared[worker % CONNECTIONS].clone(),
            );
            streams.spawn(Arc::clone(&crowd).hold(name, at, worker % 2 == 0, channel));
        }
    }
    let credited = async |streams: &mut JoinSet<()>, count: usize| {
        until("the streams complete as many", async || {
            if let Some(ended) = streams.try_join_next() {
                panic!("a worker ended by itself: {ended:?}");
            }
            crowd.credited() >= count
        })
        .await;
    };
    until("all streams are open", async || {
        crowd.open.load(Ordering::SeqCst) == 2 * WORKERS
    })
    .await;
    credited(&mut streams, TASKS / 4).await;
    insert(&one, TASKS / 2..TASKS).await;
    credited(&mut streams, TASKS).await;
    two.kill9();
    credited(&mut streams, TASKS * 5 / 4).await;
    two.start_again();
    two.ready().await;
    credited(&mut streams, TASKS * NUM).await;
    until("SQL has all reports", async || {
        one.unfinished("q").await == 0
    })
    .await;
    crowd.done.cancel();
    while let Some(ended) = streams.join_next().await {
        ended.unwrap();
    }

    let credits = std::mem::take(&mut *crowd.credits.lock().unwrap());
    each_is_done_by_num_workers(&one, &credits).await;
    let mut connection = crate::support::redis::patient(redis.url()).await;
    let mut left = Vec::new();
    until("no lease and no worker is left in Redis", async || {
        left = leftovers(&mut connection).await;
        left.is_empty()
    })
    .await;
    for daemon in [&one, &two] {
        until("the books balance, and fsck finds nothing", async || {
            let (_, books) = daemon.get("/v1/books?queue=q").await;
            let books = &books["queues"][0];
            let mut fsck = Command::new(env!("CARGO_BIN_EXE_taskd"));
            let fsck = fsck
                .args(["fsck", "--queue", "q", "--server", &daemon.http()])
                .output()
                .unwrap();
            books["state"] == "BALANCED" && books["held"]["total"] == 0 && fsck.status.success()
        })
        .await;
    }
    for daemon in [&mut one, &mut two] {
        assert!(daemon.stop().await.success());
        assert!(!daemon.log().contains("panicked"));
    }
    database.remove().await;
}

/// SQL and the answers to the workers agree.
async fn each_is_done_by_num_workers(
    daemon: &Daemon,
    credits: &BTreeMap<String, BTreeSet<String>>,
) {
    let (status, answer) = daemon
        .get(&format!("/v1/tasks?queue=q&limit={TASKS}"))
        .await;
    assert_eq!(status, 200, "{answer}");
    let tasks = answer["tasks"].as_array().unwrap();
    assert_eq!((tasks.len(), credits.len()), (TASKS, TASKS));
    for task in tasks {
        let workers = &credits[task["id"].as_str().unwrap()];
        assert_eq!(
            (&task["status"], &task["completed"]),
            (&json!("COMPLETED"), &json!(NUM)),
            "{task}"
        );
        assert_eq!(workers.len(), NUM, "{task}: {workers:?}");
    }
    for id in credits.keys().step_by(100) {
        let (_, answer) = daemon.get(&format!("/v1/tasks/{id}/results")).await;
        let of = |one: &Value| one["worker"].as_str().unwrap().to_owned();
        assert_eq!(
            answer["results"]
                .as_array()
                .unwrap()
                .iter()
                .map(of)
                .collect::<BTreeSet<_>>(),
            credits[id]
        );
    }
}

/// The keys of the queue that hold a lease, or the name of a worker.
async fn leftovers(redis: &mut MultiplexedConnection) -> Vec<String> {
    let keys: Vec<String> = redis::cmd("KEYS")
        .arg("*")
        .query_async(redis)
        .await
        .unwrap();
    let mut left = Vec::new();
    // Topics are not the queue's: records of results are removed by their readers, and others are
    // for people. Processes name the workers that they heard of last, for a while.
    let of_queues = |key: &String| !key.contains("{bus") && !key.contains("{processes}");
    for key in keys.into_iter().filter(of_queues) {
        let kind: String = redis::cmd("TYPE")
            .arg(&key)
            .query_async(redis)
            .await
            .unwrap();
        let (command, arguments): (&str, &[&str]) = match kind.as_str() {
            "hash" => ("HGETALL", &[]),
            "set" => ("SMEMBERS", &[]),
            "list" => ("LRANGE", &["0", "-1"]),
            "zset" => ("ZRANGE", &["0", "-1"]),
            "stream" => ("XRANGE", &["-", "+"]),
            // It has expired meanwhile.
            "none" => continue,
            _ => ("GET", &[]),
        };
        let value: redis::Value = redis::cmd(command)
            .arg(&key)
            .arg(arguments)
            .query_async(redis)
            .await
            .unwrap();
        let is_lease = key.ends_with(":leases") || key.ends_with(":undelivered");
        if is_lease || key.contains(NAME) || names_in(&value) {
            left.push(key);
        }
    }
    left
}

fn names_in(value: &redis::Value) -> bool {
    match value {
        redis::Value::BulkString(bytes) => bytes
            .windows(NAME.len())
            .any(|part| part == NAME.as_bytes()),
        redis::Value::Array(values) => values.iter().any(names_in),
        redis::Value::Map(pairs) => pairs
            .iter()
            .any(|(key, value)| names_in(key) || names_in(value)),
        _ => false,
    }
}
