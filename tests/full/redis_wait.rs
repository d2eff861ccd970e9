//! A completion that waits for replicas, and for append-only files where the server can.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use futures::FutureExt as _;
use nix::sys::signal::Signal;
use serde_json::json;
use taskd::{
    config::RedisAccess,
    model::{LeaseToken, Offset, QueueName, ShardId, TaskId, WorkerName},
    queue::{Claim, Code, Completion, Enqueue, EnqueueTask, Error, Leased, Queue, Source},
    redis_pool::{self, Redis},
    wire::pb::{self, ItemStatus},
};

use crate::support::{
    PATIENCE,
    daemon::Daemon,
    redis_cluster::{own_prefix, shared},
    redis_private::PrivateRedis,
    session::{Worker, completion, opening, seconds},
    until,
};

fn access(wait_replicas: u32, wait_aof: bool) -> RedisAccess {
    RedisAccess {
        wait_replicas,
        wait_aof,
        wait_timeout: Duration::from_millis(200),
        ..Default::default()
    }
}

fn shard() -> ShardId {
    ShardId {
        queue: QueueName::new("q").unwrap(),
        number: 0,
    }
}

/// Two tasks, leased.
async fn leased(queue: &Queue) -> Vec<Leased> {
    queue
        .upkeep
        .open_shard(&shard(), 1, "topic", None)
        .await
        .unwrap();
    queue.add_shard(&shard());
    let record = pb::PipelineRecord {
        priority: 2,
        max_attempts: 5,
        lease_ms: 600_000,
        ..Default::default()
    };
    let task = |major| EnqueueTask {
        offset: Offset { major, minor: 0 },
        id: TaskId::new(),
        replicas: 1,
        not_before_unix_ms: 0,
        body: taskd::wire::body_blob(&record),
        credited: vec![],
        epoch: 0,
    };
    let batch = Enqueue {
        source: Source::Partition {
            topic_generation: "topic",
            epoch: 1,
            predecessor: None,
            upto: Offset { major: 2, minor: 0 },
            again: false,
        },
        tasks: &[task(1), task(2)],
        high_water_tasks: 100,
        high_water_bytes: 1 << 20,
        live_tasks_max: u64::MAX,
    };
    queue.enqueuer.enqueue(&shard(), &batch).await.unwrap();
    let claim = Claim {
        worker: WorkerName::new("w").unwrap(),
        max_tasks: 2,
        max_bytes: 1 << 20,
        is_first: true,
        lease: None,
        priority: None,
    };
    queue
        .worker
        .claim(&queue.shards_of(&shard().queue)[0], claim)
        .await
        .unwrap()
        .deliver()
}

async fn complete(queue: &Queue, task: &Leased) -> Result<Code, Error> {
    let worker = WorkerName::new("w").unwrap();
    queue
        .worker
        .complete(Completion {
            id: task.id,
            token: task.token.clone(),
            worker,
            report: "r".into(),
            limit: Default::default(),
        })
        .await
}

/// A replica of `master`, that has all of it.
fn replica_of(master: &PrivateRedis) -> PrivateRedis {
    let replica = PrivateRedis::start(&[&format!("replicaof 127.0.0.1 {}", master.port())]);
    let began = Instant::now();
    while !replica
        .run(&["info", "replication"])
        .contains("master_link_status:up")
    {
        assert!(
            began.elapsed() < PATIENCE,
            "the replica does not follow its master"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    replica
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_is_ok_only_when_a_replica_has_it() {
    let master = PrivateRedis::start(&["repl-diskless-sync-delay 0"]);
    let redis = Redis::connect_as(&master.url(), "t", &access(1, false))
        .await
        .unwrap();
    // Fewer replicas than asked for is a warning.
    redis.check().await.unwrap();
    let queue = Queue::new(redis);
    let tasks = leased(&queue).await;
    for _ in 0..2 {
        let alone = complete(&queue, &tasks[0]).await;
        assert!(matches!(alone, Err(Error::NotDurable(_))), "{alone:?}");
        assert_eq!(
            alone.unwrap_err().to_string(),
            "not yet durable (on 0 of 1 replicas): try again"
        );
    }
    let replica = replica_of(&master);
    until("the repeat is answered", async || {
        complete(&queue, &tasks[0]).await.is_ok()
    })
    .await;
    let patient = RedisAccess {
        wait_timeout: Duration::from_secs(20),
        ..access(1, false)
    };
    let patient = Queue::new(
        Redis::connect_as(&master.url(), "t", &patient)
            .await
            .unwrap(),
    );
    assert_eq!(complete(&patient, &tasks[0]).await.unwrap(), Code::Repeat);
    assert_eq!(complete(&patient, &tasks[1]).await.unwrap(), Code::Ok);
    let entries = |server: &PrivateRedis| server.run(&["xlen", "t:{q:0}:outbox"]);
    assert_eq!(
        (entries(&replica), entries(&master)),
        ("2".into(), "2".into())
    );
}

/// Else a worker whose first call had no answer would take for safe what is not.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_waits_for_what_another_process_wrote() {
    let master = PrivateRedis::start(&["repl-diskless-sync-delay 0"]);
    let replica = replica_of(&master);
    let process = async || {
        Queue::new(
            Redis::connect_as(&master.url(), "t", &access(1, false))
                .await
                .unwrap(),
        )
    };
    let queue = process().await;
    let tasks = leased(&queue).await;
    until("the replica has it", async || {
        complete(&queue, &tasks[0]).await.is_ok()
    })
    .await;
    // Connected, and deaf.
    replica.signal(Signal::SIGSTOP);
    for queue in [&queue, &process().await] {
        let short = complete(queue, &tasks[1]).await;
        assert!(matches!(short, Err(Error::NotDurable(_))), "{short:?}");
    }
    replica.signal(Signal::SIGCONT);
    let queue = process().await;
    until("the replica has caught up", async || {
        matches!(complete(&queue, &tasks[1]).await, Ok(Code::Repeat))
    })
    .await;
}

/// The claim for the `want` of a frame goes to Redis with its reports. The worker does not see
/// that: tasks come behind the answer, and a surrender gives them back.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_gets_its_next_task_while_its_report_waits_and_not_before_the_answer() {
    let master = PrivateRedis::start(&[]);
    let (url, lease) = (master.url(), "[queues.q]\nlease = \"10m\"");
    let args = [
        "--redis-url",
        &url,
        "--redis-wait-replicas",
        "1",
        "--redis-wait-timeout",
        "5s",
    ];
    let daemon = Daemon::start(lease, &args).await;
    daemon
        .insert(
            &(0..5)
                .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
                .collect::<Vec<_>>(),
        )
        .await;
    let queued = async |count: u64| {
        until("so many wait", async || {
            daemon.queue("q").await["waiting"] == count
        })
        .await
    };
    // A task that is held goes back after a second. The count of claims keeps it.
    let claims = async || {
        let (_, metrics) = daemon.get("/metrics").await;
        let mut lines = metrics.as_str().unwrap().lines();
        let count = lines
            .find_map(|line| line.strip_prefix("taskd_tasks_claimed_tasks_total{queue=\"q\"} "));
        count.map_or(0, |count| count.parse::<u64>().unwrap())
    };
    let claimed =
        async |before: u64| until("a task is claimed", async || claims().await > before).await;
    queued(5).await;

    // The forwarder waits for the replica, too, so an answer takes several times as long.
    let open = pb::OpenSession {
        timeout: seconds(120),
        ..opening("w", 1)
    };
    let mut worker = Worker::open(daemon.grpc_port(), open).await.unwrap();
    let report = |number, task| pb::WorkerFrame {
        number,
        completions: vec![completion(task)],
        want: 1,
        ..empty()
    };
    let first = worker.tasks(1).await;
    let before = claims().await;
    worker.send(report(7, &first[0])).await;
    claimed(before).await;
    assert!(
        worker.from.message().now_or_never().is_none(),
        "the replica is missing, so nothing is answered yet"
    );
    let answer = next_answer(&mut worker).await;
    assert_eq!(
        (
            answer.number,
            answer.granted,
            worker.demand,
            worker.tasks.len()
        ),
        (7, 1, 1, 0)
    );
    assert_eq!(answer.completions[0].status(), ItemStatus::TryLater);
    let second = worker.tasks(1).await;
    assert_eq!(worker.demand, 0);

    // The answer takes longer than a second: the task goes back meanwhile. Another frame wants it,
    // and gets it at once.
    let before = claims().await;
    worker.send(report(8, &second[0])).await;
    claimed(before).await;
    queued(3).await;
    worker
        .send(pb::WorkerFrame {
            number: 9,
            want: 1,
            ..empty()
        })
        .await;
    let answer = next_answer(&mut worker).await;
    assert_eq!((answer.number, answer.granted, worker.demand), (9, 1, 1));
    let third = worker.tasks(1).await;
    let answer = next_answer(&mut worker).await;
    assert_eq!(
        (
            answer.number,
            answer.granted,
            worker.demand,
            worker.tasks.len()
        ),
        (8, 1, 1, 0)
    );
    worker.tasks(1).await;

    let before = claims().await;
    worker.send(report(10, &third[0])).await;
    claimed(before).await;
    worker
        .send(pb::WorkerFrame {
            number: 11,
            surrender: true,
            ..empty()
        })
        .await;
    let surrendered = next_answer(&mut worker).await;
    assert_eq!(
        (surrendered.number, surrendered.surrendered),
        (11, 0),
        "the worker does not know of any demand"
    );
    queued(1).await;
    let answer = next_answer(&mut worker).await;
    assert_eq!(
        (
            answer.number,
            answer.granted,
            worker.demand,
            worker.tasks.len()
        ),
        (10, 0, 0, 0)
    );
    let last = worker
        .ask(pb::WorkerFrame { want: 1, ..empty() })
        .await
        .unwrap();
    assert_eq!((last.granted, worker.tasks(1).await.len()), (1, 1));
}

/// Behind heartbeats.
async fn next_answer(worker: &mut Worker) -> pb::FrameAnswer {
    loop {
        if let Some(answer) = worker
            .read()
            .await
            .unwrap()
            .expect("the stream goes on")
            .answer
        {
            return answer;
        }
    }
}

fn empty() -> pb::WorkerFrame {
    pb::WorkerFrame::default()
}

/// While a replica is missing, Redis lets one call after the other wait. A call that would come too
/// late is told so, and does not queue up.
#[tokio::test(flavor = "multi_thread")]
async fn many_that_wait_for_a_missing_replica_are_all_told_to_try_again() {
    let master = PrivateRedis::start(&[]);
    let slow = RedisAccess {
        wait_timeout: Duration::from_secs(4),
        ..access(1, false)
    };
    let queue = Queue::new(Redis::connect_as(&master.url(), "t", &slow).await.unwrap());
    let completes = (0..5).map(|number| {
        let queue = queue.clone();
        async move {
            let shard = ShardId { number, ..shard() };
            queue
                .upkeep
                .open_shard(&shard, 1, "topic", None)
                .await
                .unwrap();
            queue.add_shard(&shard);
            let token = LeaseToken {
                shard,
                generation: 1,
                grant: 1,
                attempt: 1,
                trace: None,
                leased_unix_ms: 0,
            };
            let worker = WorkerName::new("w").unwrap();
            queue
                .worker
                .complete(Completion {
                    id: TaskId::new(),
                    token,
                    worker,
                    report: "r".into(),
                    limit: Default::default(),
                })
                .await
        }
    });
    for answer in futures::future::join_all(completes).await {
        assert!(matches!(answer, Err(Error::NotDurable(_))), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_on_a_cluster_waits_for_the_replica_of_its_master() {
    let redis = Redis::connect_as(shared().await, &own_prefix(), &access(1, false))
        .await
        .unwrap();
    redis.check().await.unwrap();
    let queue = Queue::new(redis.clone());
    let tasks = leased(&queue).await;
    until("the replica has it", async || {
        complete(&queue, &tasks[0]).await.is_ok()
    })
    .await;
    // Each master has one. The wait is longer than a connection to a cluster may answer no call
    // otherwise.
    let access = RedisAccess {
        wait_timeout: Duration::from_millis(2500),
        ..access(2, false)
    };
    let two = Queue::new(
        Redis::connect_as(shared().await, redis.prefix(), &access)
            .await
            .unwrap(),
    );
    let short = complete(&two, &tasks[1]).await;
    let short = short.unwrap_err().to_string();
    assert!(short.ends_with(" of 2 replicas): try again"), "{short}");
}

#[tokio::test]
async fn a_server_without_waitaof_is_refused_where_it_is_asked_for() {
    let server = PrivateRedis::start(&[]);
    let redis = Redis::connect_as(&server.url(), "t", &access(0, true))
        .await
        .unwrap();
    let checked = redis.check().await;
    if server
        .run(&["command", "info", "waitaof"])
        .contains("waitaof")
    {
        // A newer redis-server than most have.
        checked.unwrap();
        return;
    }
    let error = checked.unwrap_err();
    assert!(
        matches!(error, redis_pool::Error::NoWaitAof { .. }),
        "{error}"
    );
    assert!(!error.is_transient());
    let error = error.to_string();
    assert!(
        error.ends_with(
            "has no WAITAOF; set redis_wait_aof = false, or use Redis 7.2, Valkey or newer"
        ),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_waits_for_the_append_only_file_of_valkey() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/start-valkey");
    let output = Command::new(script).arg("--program").output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let program = String::from_utf8(output.stdout).unwrap();
    let server = PrivateRedis::start_program(program.trim(), &[]);
    let redis = Redis::connect_as(&server.url(), "t", &access(0, true))
        .await
        .unwrap();
    redis.check().await.unwrap();
    let queue = Queue::new(redis);
    let tasks = leased(&queue).await;
    until("it is in the file", async || {
        complete(&queue, &tasks[0]).await.is_ok()
    })
    .await;
    let both = RedisAccess {
        wait_timeout: Duration::from_secs(5),
        ..access(1, true)
    };
    let both = Queue::new(Redis::connect_as(&server.url(), "t", &both).await.unwrap());
    let short = complete(&both, &tasks[1]).await.unwrap_err().to_string();
    assert_eq!(short, "not yet durable (on 0 of 1 replicas): try again");
    // Not to be had without the file.
    server.run(&["config", "set", "appendonly", "no"]);
    let redis = Redis::connect_as(&server.url(), "t", &access(0, true))
        .await
        .unwrap();
    assert!(matches!(redis.check().await, Err(redis_pool::Error::NoAof)));
}
