//! On a Redis Cluster: the contract of the bus, the queue, the filter and whole processes, while
//! masters die and slots move.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use nix::sys::signal::Signal;
use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use taskd::{
    bus::{Bus, Reading, Record, Topic, redis_streams::RedisStreams},
    config::RedisAccess,
    dedup::Filter,
    model::{KeyHash, Offset, QueueName, ShardId, TaskId, WorkerName},
    queue::{Claim, Code, Completion, Enqueue, EnqueueTask, Enqueued, Queue, Source},
    redis_pool::Redis,
    runtime::Supervisor,
};
use tokio::{sync::Semaphore, task::JoinHandle};

use crate::support::{
    bus_contract::{Backend, PARTITIONS, bus_contract, subscribe, within},
    daemon::Daemon,
    logs_contract::logs_contract,
    redis_cluster::{RedisCluster, own_prefix, shared},
    until,
};

struct OnCluster {
    prefix: String,
}

#[async_trait]
impl Backend for OnCluster {
    async fn open(&self) -> Arc<dyn Bus> {
        let redis = Redis::connect(shared().await, &self.prefix)
            .await
            .expect("redis");
        let bus = RedisStreams::open(redis, "my.", PARTITIONS)
            .await
            .expect("open");
        Arc::new(bus.take_over_after(Duration::from_millis(500)))
    }

    async fn remove(&self) {}
}

async fn cluster() -> OnCluster {
    OnCluster {
        prefix: own_prefix(),
    }
}

bus_contract!(cluster);
logs_contract!(cluster);

/// Shards of one queue over one Redis, and the work on them.
struct Bed {
    redis: Redis,
    queue: Queue,
    completed: Mutex<Vec<TaskId>>,
    /// The calls of the worker that failed.
    failed: AtomicUsize,
    /// One for each task that the worker may still complete.
    permits: Semaphore,
    is_over: AtomicBool,
}

impl Bed {
    async fn new(url: &str, access: &RedisAccess) -> Arc<Self> {
        let redis = Redis::connect_as(url, &own_prefix(), access)
            .await
            .expect("connect");
        redis.check().await.expect("a good cluster");
        let queue = Queue::new(redis.clone());
        for number in 0..SHARDS {
            queue
                .upkeep
                .open_shard(&shard(number), 1, "topic", None)
                .await
                .expect("open");
            queue.add_shard(&shard(number));
        }
        let (completed, failed) = (Mutex::default(), AtomicUsize::new(0));
        Arc::new(Self {
            redis,
            queue,
            completed,
            failed,
            permits: Semaphore::new(0),
            is_over: AtomicBool::new(false),
        })
    }

    fn key(&self, number: u32) -> String {
        format!("{}:{{{}}}:generation", self.redis.prefix(), shard(number))
    }

    /// Tasks `from` to `to` of a shard. Again until it is done: what was done already is known.
    async fn enqueue(&self, number: u32, from: usize, to: usize) -> Vec<TaskId> {
        let task = |i: usize| EnqueueTask {
            offset: Offset {
                major: 1 + i as u64,
                minor: 0,
            },
            id: TaskId::new(),
            replicas: 1,
            not_before_unix_ms: 0,
            body: taskd::wire::body_blob(&taskd::wire::pb::PipelineRecord {
                priority: 2,
                max_attempts: 100,
                lease_ms: 1000,
                ..Default::default()
            }),
            credited: vec![],
            epoch: 0,
        };
        let tasks: Vec<_> = (from..to).map(task).collect();
        for tasks in tasks.chunks(100) {
            let batch = Enqueue {
                source: Source::Partition {
                    topic_generation: "topic",
                    epoch: 1,
                    predecessor: None,
                    upto: tasks[tasks.len() - 1].offset,
                    again: false,
                },
                tasks,
                high_water_tasks: 1_000_000,
                high_water_bytes: 1 << 30,
                live_tasks_max: u64::MAX,
            };
            until("the batch is enqueued", async || {
                matches!(
                    self.queue.enqueuer.enqueue(&shard(number), &batch).await,
                    Ok(Enqueued::Done { .. })
                )
            })
            .await;
        }
        tasks.iter().map(|task| task.id).collect()
    }

    /// Starts one worker over all shards, which completes so many tasks at first.
    fn start_work(self: &Arc<Self>, permits: usize) -> JoinHandle<()> {
        self.permits.add_permits(permits);
        tokio::spawn(Arc::clone(self).work())
    }

    async fn work(self: Arc<Self>) {
        let worker = WorkerName::new("w").expect("a name");
        while !self.is_over.load(Ordering::Relaxed) {
            for shard in self.queue.shards_of(&queue_name()) {
                let claim = Claim {
                    worker: worker.clone(),
                    max_tasks: 10,
                    max_bytes: 1 << 20,
                    is_first: true,
                    lease: None,
                    priority: None,
                };
                let Ok(granted) = self.queue.worker.claim(&shard, claim).await else {
                    self.failed.fetch_add(1, Ordering::Relaxed);
                    continue;
                };
                for task in granted.deliver() {
                    self.permits
                        .acquire()
                        .await
                        .expect("it stays open")
                        .forget();
                    // As a worker does: the same again until there is an answer.
                    let code = loop {
                        let completion = Completion {
                            id: task.id,
                            token: task.token.clone(),
                            worker: worker.clone(),
                            report: "r".into(),
                            limit: Default::default(),
                        };
                        match self.queue.worker.complete(completion).await {
                            Ok(code) => break code,
                            Err(_) => self.failed.fetch_add(1, Ordering::Relaxed),
                        };
                    };
                    if matches!(code, Code::Ok | Code::Repeat) {
                        self.completed.lock().push(task.id);
                    }
                }
            }
            for number in 0..SHARDS {
                drop(
                    self.queue
                        .upkeep
                        .expire(&shard(number), 100, &[Duration::ZERO])
                        .await,
                );
                drop(
                    self.queue
                        .upkeep
                        .promote(&shard(number), 100, Duration::from_secs(600))
                        .await,
                );
            }
        }
    }

    /// Adds 20 tasks to each shard, as soon as most of the others are completed.
    async fn feed(&self, ids: &mut BTreeSet<TaskId>) {
        let shards = SHARDS as usize;
        until("most are completed", async || {
            ids.len() < self.completed() + 10 * shards
        })
        .await;
        let from = ids.len() / shards;
        for number in 0..SHARDS {
            ids.extend(self.enqueue(number, from, from + 20).await);
        }
    }

    fn completed(&self) -> usize {
        self.completed.lock().len()
    }

    /// The open tasks of a shard; `None`: nobody answers.
    async fn open(&self, number: u32) -> Option<u64> {
        Some(self.queue.stats(&shard(number)).await.ok()?.open)
    }

    /// Waits until no shard has anything open, held or delayed, and ends the worker. Answers the
    /// completed tasks.
    async fn work_off(&self, working: JoinHandle<()>) -> Vec<TaskId> {
        for number in 0..SHARDS {
            until("the shard is worked off", async || {
                let stats = self.queue.stats(&shard(number)).await;
                stats.is_ok_and(|stats| stats.open + stats.leases + stats.delayed == 0)
            })
            .await;
        }
        self.is_over.store(true, Ordering::Relaxed);
        working.await.expect("the worker");
        std::mem::take(&mut *self.completed.lock())
    }
}

const SHARDS: u32 = 6;
/// More than there are tasks, each several times.
const MANY: usize = 1_000_000;

fn queue_name() -> QueueName {
    QueueName::new("q").expect("a name")
}

fn shard(number: u32) -> ShardId {
    ShardId {
        queue: queue_name(),
        number,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_on_all_nodes_are_worked_off() {
    let bed = Bed::new(shared().await, &RedisAccess::default()).await;
    let mut ids = BTreeSet::new();
    for number in 0..SHARDS {
        ids.extend(bed.enqueue(number, 0, 100).await);
    }
    let completed = bed.work_off(bed.start_work(MANY)).await;
    assert_eq!(bed.failed.load(Ordering::Relaxed), 0);
    assert_eq!(completed.len(), ids.len());
    assert_eq!(completed.into_iter().collect::<BTreeSet<_>>(), ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_filter_knows_keys_of_queues_on_all_nodes() {
    let redis = Redis::connect(shared().await, &own_prefix())
        .await
        .expect("connect");
    let filter = Filter::new(redis);
    let hash = |text: &str| KeyHash(Sha256::digest(text).into());
    let tasks: Vec<_> = (0..20)
        .map(|i| {
            (
                QueueName::new(&format!("q{}", i % 7)).expect("a name"),
                hash(&i.to_string()),
                TaskId::new(),
            )
        })
        .collect();
    filter.mark(&tasks, 0, |_| 1000).await.expect("mark");
    let keys: Vec<_> = tasks
        .iter()
        .map(|(queue, hash, _)| (queue.clone(), *hash))
        .collect();
    let ids: Vec<_> = tasks.iter().map(|(.., id)| Some(*id)).collect();
    assert_eq!(filter.seen(&keys).await.expect("seen"), ids);
    filter.forget(&keys[..19]).await.expect("forget");
    let left = filter.seen(&keys).await.expect("seen");
    assert_eq!(left.iter().flatten().count(), 1);
    // More than the limit: some are forgotten.
    filter.mark(&tasks, 0, |_| 1).await.expect("mark");
    assert_eq!(
        filter
            .seen(&keys)
            .await
            .expect("seen")
            .iter()
            .flatten()
            .count(),
        7
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn slots_move_while_tasks_are_claimed_and_completed() {
    let cluster = Arc::new(RedisCluster::start().await);
    let bed = Bed::new(cluster.url(), &RedisAccess::default()).await;
    let (working, mut ids) = (bed.start_work(MANY), BTreeSet::new());
    for number in 0..SHARDS {
        bed.feed(&mut ids).await;
        let (cluster, key) = (Arc::clone(&cluster), bed.key(number));
        let moving = tokio::task::spawn_blocking(move || {
            let (before, after) = (cluster.master_of(&key), cluster.move_slot_of(&key));
            assert_ne!(before, after);
            assert_eq!(cluster.master_of(&key), after);
        });
        while !moving.is_finished() {
            bed.feed(&mut ids).await;
        }
        moving.await.expect("the slot moves");
    }
    let completed = bed.work_off(working).await;
    assert_eq!(completed.len(), ids.len(), "none twice");
    assert_eq!(
        completed.into_iter().collect::<BTreeSet<_>>(),
        ids,
        "and none lost"
    );
}

/// `how` takes a master away. Its replica goes on with the tasks, and without their completions.
/// How many tasks there were, and how often one was completed.
async fn survives(access: &RedisAccess, how: impl FnOnce(&RedisCluster, usize)) -> (usize, usize) {
    let cluster = RedisCluster::start().await;
    let bed = Bed::new(cluster.url(), access).await;
    let mut ids = BTreeSet::new();
    for number in 0..SHARDS {
        ids.extend(bed.enqueue(number, 0, 200).await);
    }
    let key = bed.key(0);
    let (master, replica) = tokio::task::block_in_place(|| {
        let master = cluster.replicated_master_of(&key);
        (master, cluster.cut_off_replica_of(master))
    });
    // The rest is completed when the master is gone.
    let working = bed.start_work(ids.len() / 2);
    until("a task of this master is completed", async || {
        bed.open(0).await.is_some_and(|open| open < 200)
    })
    .await;
    let answers = || bed.completed() + bed.failed.load(Ordering::Relaxed);
    let before = answers();
    let is_idle = || bed.permits.available_permits() == 0;
    until("its completion is answered", async || {
        answers() > before || is_idle()
    })
    .await;
    tokio::task::block_in_place(|| how(&cluster, master));
    let failed = bed.failed.load(Ordering::Relaxed);
    bed.permits.add_permits(MANY);
    tokio::task::block_in_place(|| {
        cluster.signal(replica, Signal::SIGCONT);
        cluster.wait_for_failover(&key, master);
        // It is a replica now, and nobody minds.
        if cluster.pids().contains_key(&master) {
            cluster.signal(master, Signal::SIGCONT);
        } else {
            cluster.restart_node(master);
        }
        cluster.wait_until_ok();
    });
    let completed = bed.work_off(working).await;
    assert!(
        bed.failed.load(Ordering::Relaxed) > failed,
        "no call met the missing master"
    );
    assert_eq!(
        completed.iter().copied().collect::<BTreeSet<_>>(),
        ids,
        "none lost"
    );
    (ids.len(), completed.len())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_is_killed_while_tasks_are_claimed_and_completed() {
    let (tasks, completions) = survives(&RedisAccess::default(), RedisCluster::kill9_node).await;
    assert!(completions > tasks, "the last ones are made again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_hangs_while_tasks_are_claimed_and_completed() {
    survives(&RedisAccess::default(), |cluster, master| {
        cluster.signal(master, Signal::SIGSTOP)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_completion_that_waited_for_a_replica_is_lost_with_its_master() {
    let access = RedisAccess {
        wait_replicas: 1,
        wait_timeout: Duration::from_millis(200),
        ..Default::default()
    };
    let (tasks, completions) = survives(&access, RedisCluster::kill9_node).await;
    assert_eq!(completions, tasks, "none is made again");
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_of_the_bus_follow_its_slot_and_its_master() {
    let cluster = RedisCluster::start().await;
    let redis = Redis::connect(cluster.url(), "p").await.expect("connect");
    let bus = RedisStreams::open(redis, "", 3).await.expect("open");
    let mut ordered = subscribe(&bus, Topic::Pipeline, Reading::Ordered).await;
    let mut shared = subscribe(&bus, Topic::TaskResults, Reading::Shared).await;
    let key = "p:{bus}:generation";
    let steps: [fn(&RedisCluster, &str); 3] = [
        |_, _| {},
        |cluster, key| {
            cluster.move_slot_of(key);
        },
        |cluster, key| {
            let gone = cluster.kill9_master_of(key);
            cluster.wait_for_failover(key, gone);
        },
    ];
    for (step, change) in steps.into_iter().enumerate() {
        tokio::task::block_in_place(|| change(&cluster, key));
        let record = |partition| Record {
            partition,
            value: format!("{step}").into(),
        };
        let records = [record(0), record(1), record(2)];
        for (topic, reading) in [
            (Topic::Pipeline, Reading::Ordered),
            (Topic::TaskResults, Reading::Shared),
        ] {
            until("published", async || {
                bus.publish(topic, &records).await.is_ok()
            })
            .await;
            let reader = if topic == Topic::Pipeline {
                &mut ordered
            } else {
                &mut shared
            };
            let mut got = BTreeSet::new();
            // A failed attempt may have published records too.
            while got.len() < 3 {
                match within("next", reader.next(100)).await {
                    Ok(messages) => {
                        let new = messages
                            .iter()
                            .filter(|message| message.value == step.to_string());
                        got.extend(new.map(|message| message.partition));
                        if reader.commit(&messages).await.is_err() {
                            *reader = subscribe(&bus, topic, reading).await;
                        }
                    }
                    Err(_) => {
                        until("subscribed", async || {
                            match bus.subscribe(topic, reading).await {
                                Ok(new) => {
                                    *reader = new;
                                    true
                                }
                                Err(_) => false,
                            }
                        })
                        .await;
                    }
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wakes_come_from_any_node_and_again_when_that_is_gone() {
    let cluster = RedisCluster::start().await;
    let redis = Redis::connect(cluster.url(), &own_prefix())
        .await
        .expect("connect");
    let queue = Queue::new(redis.clone());
    let supervisor = Supervisor::new();
    queue.start_listening(&supervisor);
    // Each with a name of its own: the last messages of the first are still on their way.
    for (name, is_last) in [("before", false), ("after", true)] {
        let waiter = queue
            .wakes()
            .waiter(&[QueueName::new(name).expect("a name")]);
        let is_woken = AtomicBool::new(false);
        let wait = async {
            let (forever, mut listening) = (Duration::from_secs(3600), waiter.listen());
            let woken = within(
                "a wake",
                waiter.look_then_wait::<()>(&mut listening, async { Err(forever) }),
            )
            .await;
            assert_eq!(woken, Err(vec![QueueName::new(name).expect("a name")]));
            is_woken.store(true, Ordering::Relaxed);
        };
        let channel = taskd::queue::keys::wake_channel(redis.prefix());
        let publish = async {
            while !is_woken.load(Ordering::Relaxed) {
                let publish = redis::cmd("PUBLISH").arg(&channel).arg(name).to_owned();
                drop(publish.query_async::<u64>(&mut redis.conn()).await);
            }
        };
        tokio::join!(wait, publish);
        if !is_last {
            // It keeps its connections, and says nothing more.
            let listened_to = tokio::task::block_in_place(|| cluster.subscribed_to(&channel));
            cluster.signal(listened_to, Signal::SIGSTOP);
        }
    }
    supervisor.stop();
    supervisor.wait().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn taskd_runs_on_a_cluster() {
    let prefix = own_prefix();
    let config = "partitions = 4\n[queues.default]\nlease = \"2s\"\nbackoff = [\"10ms\"]";
    let mut daemon = Daemon::start(
        config,
        &["--redis-url", shared().await, "--redis-prefix", &prefix],
    )
    .await;
    let tasks: Vec<Value> = (0..300)
        .map(|i| json!({"queue": format!("q{}", i % 3), "key": i.to_string()}))
        .collect();
    daemon.insert(&tasks).await;
    let mut keys = BTreeSet::new();
    for queue in ["q0", "q1", "q2"] {
        keys.extend(daemon.drain("w", queue).await);
    }
    assert_eq!(keys.len(), 300);
    let (_, answer) = daemon.post("/v1/tasks", &json!(tasks)).await;
    assert!(
        answer["results"]
            .as_array()
            .expect("results")
            .iter()
            .all(|one| one["status"] == "DUPLICATE"),
        "{answer}"
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_full_master_closes_the_door() {
    let cluster = RedisCluster::start().await;
    let daemon = Daemon::start("", &["--redis-url", cluster.url()]).await;
    let port = cluster.ports()[cluster.master_of("any key")];
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap();
    let mut master = crate::support::redis::connect(&client).await.unwrap();
    let mut limit = async |bytes: u32| -> redis::RedisResult<()> {
        redis::cmd("CONFIG")
            .arg("SET")
            .arg("maxmemory")
            .arg(bytes)
            .query_async(&mut master)
            .await
    };
    limit(1 << 20).await.unwrap();
    let insert = async |key: &str| {
        daemon
            .post("/v1/tasks", &json!([{"queue": "q", "key": key}]))
            .await
    };
    until("inserts are refused", async || {
        let (status, answer) = insert("refused").await;
        status == 429 && answer.to_string().contains(&port.to_string())
    })
    .await;
    limit(0).await.unwrap();
    until("inserts are taken again", async || {
        insert("taken").await.0 == 200
    })
    .await;
}
