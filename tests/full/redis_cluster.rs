//! On a Redis Cluster: the contract of the bus, the queue, the filter and whole processes, while masters die and slots
//! move.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use taskd::{
    bus::{Bus, Reading, Record, Topic, redis_streams::RedisStreams},
    dedup::Filter,
    model::{KeyHash, Offset, QueueName, ShardId, TaskId, WorkerName},
    queue::{Claim, Code, Completion, Enqueue, EnqueueTask, Enqueued, Queue, Source},
    redis_pool::Redis,
    runtime::Supervisor,
};

use crate::support::{
    bus_contract::{Backend, PARTITIONS, bus_contract, subscribe, within},
    daemon::Daemon,
    redis_cluster::{RedisCluster, own_prefix, shared},
    until,
};

struct OnCluster {
    prefix: String,
}

#[async_trait]
impl Backend for OnCluster {
    async fn open(&self) -> Arc<dyn Bus> {
        let redis = Redis::connect(shared().await, &self.prefix).await.expect("redis");
        let bus = RedisStreams::open(redis, "my.", PARTITIONS).await.expect("open");
        Arc::new(bus.take_over_after(Duration::from_millis(500)))
    }

    async fn remove(&self) {}
}

async fn cluster() -> OnCluster {
    OnCluster { prefix: own_prefix() }
}

bus_contract!(cluster);

/// Shards of one queue over one Redis.
struct Bed {
    redis: Redis,
    queue: Queue,
}

impl Bed {
    async fn new(url: &str, shards: u32) -> Self {
        let redis = Redis::connect(url, &own_prefix()).await.expect("connect");
        redis.check().await.expect("a good cluster");
        let queue = Queue::new(redis.clone());
        for number in 0..shards {
            queue.upkeep.open_shard(&shard(number), 1, "topic", None).await.expect("open");
            queue.add_shard(&shard(number));
        }
        Self { redis, queue }
    }

    fn key(&self, number: u32) -> String {
        format!("{}:{{{}}}:generation", self.redis.prefix(), shard(number))
    }

    /// Again until it is done: what was done already is known.
    async fn enqueue(&self, number: u32, count: usize) -> Vec<TaskId> {
        let task = |i: usize| EnqueueTask {
            offset: Offset { major: 1 + i as u64, minor: 0 },
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
        let tasks: Vec<_> = (0..count).map(task).collect();
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
                matches!(self.queue.enqueuer.enqueue(&shard(number), &batch).await, Ok(Enqueued::Done { .. }))
            })
            .await;
        }
        tasks.iter().map(|task| task.id).collect()
    }

    /// One worker over all shards until `done`; how often each of its calls failed, and the tasks it completed.
    async fn work(&self, name: &str, done: &AtomicBool) -> (usize, Vec<TaskId>) {
        let worker = WorkerName::new(name).expect("a name");
        let (mut failed, mut completed) = (0, Vec::new());
        while !done.load(Ordering::Relaxed) {
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
                    failed += 1;
                    continue;
                };
                for task in granted.deliver() {
                    // As a worker does: the same again until there is an answer.
                    let code = loop {
                        let completion = Completion {
                            id: task.id,
                            token: task.token.clone(),
                            worker: worker.clone(),
                            report: "r".into(),
                        };
                        match self.queue.worker.complete(completion).await {
                            Ok(code) => break code,
                            Err(_) => failed += 1,
                        }
                    };
                    if matches!(code, Code::Ok | Code::Repeat) {
                        completed.push(task.id);
                    }
                }
            }
            for number in 0..SHARDS {
                drop(self.queue.upkeep.expire(&shard(number), 100, &[Duration::ZERO]).await);
                drop(self.queue.upkeep.promote(&shard(number), 100, Duration::from_secs(600)).await);
            }
        }
        (failed, completed)
    }

    /// Until no shard has anything open, held or delayed.
    async fn worked_off(&self) {
        for number in 0..SHARDS {
            until("the shard is worked off", async || {
                let stats = self.queue.stats(&shard(number)).await;
                stats.is_ok_and(|stats| stats.open + stats.leases + stats.delayed == 0)
            })
            .await;
        }
    }
}

const SHARDS: u32 = 6;

fn queue_name() -> QueueName {
    QueueName::new("q").expect("a name")
}

fn shard(number: u32) -> ShardId {
    ShardId { queue: queue_name(), number }
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_on_all_nodes_are_worked_off() {
    let bed = Bed::new(shared().await, SHARDS).await;
    let mut ids = BTreeSet::new();
    for number in 0..SHARDS {
        ids.extend(bed.enqueue(number, 100).await);
    }
    let done = AtomicBool::new(false);
    let stop = async {
        bed.worked_off().await;
        done.store(true, Ordering::Relaxed);
    };
    let ((failed, completed), ()) = tokio::join!(bed.work("w", &done), stop);
    assert_eq!(failed, 0);
    assert_eq!(completed.len(), ids.len());
    assert_eq!(completed.into_iter().collect::<BTreeSet<_>>(), ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_filter_knows_keys_of_queues_on_all_nodes() {
    let redis = Redis::connect(shared().await, &own_prefix()).await.expect("connect");
    let filter = Filter::new(redis);
    let hash = |text: &str| KeyHash(Sha256::digest(text).into());
    let tasks: Vec<_> = (0..20)
        .map(|i| (QueueName::new(&format!("q{}", i % 7)).expect("a name"), hash(&i.to_string()), TaskId::new()))
        .collect();
    filter.mark(&tasks, 0, |_| 1000).await.expect("mark");
    let keys: Vec<_> = tasks.iter().map(|(queue, hash, _)| (queue.clone(), *hash)).collect();
    let ids: Vec<_> = tasks.iter().map(|(.., id)| Some(*id)).collect();
    assert_eq!(filter.seen(&keys).await.expect("seen"), ids);
    filter.forget(&keys[..19]).await.expect("forget");
    let left = filter.seen(&keys).await.expect("seen");
    assert_eq!(left.iter().flatten().count(), 1);
    // More than the limit: some are forgotten.
    filter.mark(&tasks, 0, |_| 1).await.expect("mark");
    assert_eq!(filter.seen(&keys).await.expect("seen").iter().flatten().count(), 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn slots_move_while_tasks_are_claimed_and_completed() {
    let cluster = RedisCluster::start().await;
    let bed = Bed::new(cluster.url(), SHARDS).await;
    let mut ids = BTreeSet::new();
    for number in 0..SHARDS {
        ids.extend(bed.enqueue(number, 500).await);
    }
    let done = AtomicBool::new(false);
    let move_slots = async {
        for number in 0..SHARDS {
            let (before, after) = tokio::task::block_in_place(|| {
                (cluster.master_of(&bed.key(number)), cluster.move_slot_of(&bed.key(number)))
            });
            assert_ne!(before, after);
            assert_eq!(tokio::task::block_in_place(|| cluster.master_of(&bed.key(number))), after);
        }
        bed.worked_off().await;
        done.store(true, Ordering::Relaxed);
    };
    let ((_, completed), ()) = tokio::join!(bed.work("w", &done), move_slots);
    assert_eq!(completed.len(), ids.len(), "none twice");
    assert_eq!(completed.into_iter().collect::<BTreeSet<_>>(), ids, "and none lost");
}

/// `how` takes a master away. Its replica goes on without the completions of the last moment, which are made again. The
/// tasks had been enqueued long before.
async fn survives(how: impl FnOnce(&RedisCluster, &str) -> usize) {
    let cluster = RedisCluster::start().await;
    let bed = Bed::new(cluster.url(), SHARDS).await;
    let mut ids = BTreeSet::new();
    for number in 0..SHARDS {
        ids.extend(bed.enqueue(number, 200).await);
    }
    let done = AtomicBool::new(false);
    let key = bed.key(0);
    let fail = async {
        let gone = tokio::task::block_in_place(|| how(&cluster, &key));
        tokio::task::block_in_place(|| cluster.wait_for_failover(&key, gone));
        bed.worked_off().await;
        done.store(true, Ordering::Relaxed);
        gone
    };
    let ((_, completed), gone) = tokio::join!(bed.work("w", &done), fail);
    let completed: BTreeSet<_> = completed.into_iter().collect();
    assert_eq!(completed.difference(&ids).count(), 0);
    assert_eq!(completed.len(), ids.len(), "none lost");
    tokio::task::block_in_place(|| {
        if cluster.pids().contains_key(&gone) {
            cluster.signal(gone, Signal::SIGCONT);
        } else {
            cluster.restart_node(gone);
        }
        cluster.wait_until_ok();
    });
    // It is a replica now, and nobody minds.
    let more = bed.queue.stats(&shard(0)).await.expect("stats");
    assert_eq!(more.open, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_is_killed_while_tasks_are_claimed_and_completed() {
    survives(|cluster, key| cluster.kill9_master_of(key)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_hangs_while_tasks_are_claimed_and_completed() {
    survives(|cluster, key| cluster.stop_master_of(key)).await;
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
        let record = |partition| Record { partition, value: format!("{step}").into() };
        let records = [record(0), record(1), record(2)];
        for (topic, reading) in [(Topic::Pipeline, Reading::Ordered), (Topic::TaskResults, Reading::Shared)] {
            until("published", async || bus.publish(topic, &records).await.is_ok()).await;
            let reader = if topic == Topic::Pipeline { &mut ordered } else { &mut shared };
            let mut got = BTreeSet::new();
            // A failed attempt may have published records too.
            while got.len() < 3 {
                match within("next", reader.next(100)).await {
                    Ok(messages) => {
                        let new = messages.iter().filter(|message| message.value == step.to_string());
                        got.extend(new.map(|message| message.partition));
                        if reader.commit(&messages).await.is_err() {
                            *reader = subscribe(&bus, topic, reading).await;
                        }
                    }
                    Err(_) => {
                        until("subscribed", async || match bus.subscribe(topic, reading).await {
                            Ok(new) => {
                                *reader = new;
                                true
                            }
                            Err(_) => false,
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
    let redis = Redis::connect(cluster.url(), &own_prefix()).await.expect("connect");
    let queue = Queue::new(redis.clone());
    let supervisor = Supervisor::new();
    queue.start_listening(&supervisor);
    // Each with a name of its own: the last messages of the first are still on their way.
    for (name, is_last) in [("before", false), ("after", true)] {
        let waiter = queue.wakes().waiter(&[QueueName::new(name).expect("a name")]);
        let is_woken = AtomicBool::new(false);
        let wait = async {
            let (forever, mut listening) = (Duration::from_secs(3600), waiter.listen());
            let woken = within("a wake", waiter.look_then_wait::<()>(&mut listening, async { None }, forever)).await;
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
    let mut daemon = Daemon::start(config, &["--redis-url", shared().await, "--redis-prefix", &prefix]).await;
    let tasks: Vec<Value> = (0..300).map(|i| json!({"queue": format!("q{}", i % 3), "key": i.to_string()})).collect();
    daemon.insert(&tasks).await;
    let mut keys = BTreeSet::new();
    for queue in ["q0", "q1", "q2"] {
        keys.extend(daemon.drain("w", queue).await);
    }
    assert_eq!(keys.len(), 300);
    let (_, answer) = daemon.post("/v1/tasks", &json!(tasks)).await;
    assert!(answer["results"].as_array().expect("results").iter().all(|one| one["status"] == "DUPLICATE"), "{answer}");
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
        redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes).query_async(&mut master).await
    };
    limit(1 << 20).await.unwrap();
    let insert = async |key: &str| daemon.post("/v1/tasks", &json!([{"queue": "q", "key": key}])).await;
    until("inserts are refused", async || {
        let (status, answer) = insert("refused").await;
        status == 429 && answer.to_string().contains(&port.to_string())
    })
    .await;
    limit(0).await.unwrap();
    until("inserts are taken again", async || insert("taken").await.0 == 200).await;
}
