//! A fanout on Kafka that holds records while its group takes a partition away and gives it back.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use prost::Message as _;
use taskd::{
    bus::{Reading, Record, Topic},
    config::Settings,
    model::{self, QueueName, ShardId, TaskId, WorkerName},
    queue::{Claim, Queue},
    redis_pool::Redis,
    runtime::Supervisor,
    wire::pb,
};

use crate::{
    bus_kafka::broker,
    support::{
        bus_contract::{Backend, PARTITIONS, subscribe, within},
        process::Process,
        redis::{Fsync, RedisServer},
        sqlite::SqliteFile,
        store_contract::Database,
        until,
    },
};

fn shard(name: &str, number: u32) -> ShardId {
    ShardId {
        queue: QueueName::new(name).unwrap(),
        number,
    }
}

fn record(queue: &str, id: TaskId) -> Record {
    let record = pb::PipelineRecord {
        id: id.as_bytes().to_vec().into(),
        queue: queue.into(),
        replicas: 1,
        priority: pb::Priority::Medium.into(),
        max_attempts: 5,
        lease_ms: 30_000,
        published_unix_ms: model::now_unix_ms(),
        ..Default::default()
    };
    Record {
        partition: 0,
        value: record.encode_to_vec().into(),
    }
}

async fn open(queue: &Queue, shard: &ShardId) -> u64 {
    queue.stats(shard).await.map_or(0, |stats| stats.open)
}

/// All tasks of the shard, in their order.
async fn claim(queue: &Queue, shard: &ShardId) -> Vec<TaskId> {
    let known = queue
        .shards_of(&shard.queue)
        .into_iter()
        .find(|known| known.id == *shard)
        .unwrap();
    let worker = WorkerName::new("w").unwrap();
    let (max_tasks, max_bytes, is_first, lease, priority) = (1000, 1 << 30, true, None, None);
    let granted = queue
        .worker
        .claim(
            &known,
            Claim {
                worker,
                max_tasks,
                max_bytes,
                is_first,
                lease,
                priority,
            },
        )
        .await
        .unwrap();
    granted.delivery.delivered();
    granted.tasks.iter().map(|task| task.id).collect()
}

async fn refusals(redis: &Redis) -> u64 {
    let info: String = redis::cmd("INFO")
        .arg("errorstats")
        .query_async(&mut redis.conn())
        .await
        .unwrap();
    let count = info
        .lines()
        .find_map(|line| line.strip_prefix("errorstat_NOPERM:count="));
    count.map_or(0, |count| count.trim().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_of_a_partition_comes_again_when_the_group_gives_it_back() {
    let (broker, server, database) = (
        broker().await,
        RedisServer::start(Fsync::EverySecond),
        SqliteFile::create().await,
    );
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let bus = broker.open().await;
    let process = Process::new(&redis, &database.open().await, Arc::clone(&bus));
    let (queue, supervisor) = (process.queue.clone(), Supervisor::new());
    let mut settings = Settings::default();
    // The tasks are not in SQL, so nobody may ask it about those that wait for long.
    settings.watchdog.grace = Duration::from_secs(3600);
    process.fanout(&Arc::new(settings), &supervisor);

    let mut published = BTreeMap::<ShardId, Vec<TaskId>>::new();
    let mut publish = async || {
        for partition in 0..PARTITIONS {
            for name in ["sick", "good"] {
                let id = TaskId::new();
                let record = Record {
                    partition,
                    ..record(name, id)
                };
                bus.publish(Topic::Pipeline, &[record]).await.unwrap();
                published
                    .entry(shard(name, partition))
                    .or_default()
                    .push(id);
            }
        }
    };
    let all = async |name: &str, count: u64| {
        for partition in 0..PARTITIONS {
            let shard = shard(name, partition);
            until(&format!("{shard} has {count}"), async || {
                open(&queue, &shard).await == count
            })
            .await;
        }
    };
    let run = async |rules: &[&str]| {
        redis::cmd("ACL")
            .arg("SETUSER")
            .arg("default")
            .arg(rules)
            .exec_async(&mut redis.conn())
            .await
            .unwrap();
    };
    publish().await;
    all("sick", 1).await;
    all("good", 1).await;
    run(&["resetkeys", "~t:[^{]*", "~t:{[^s]*"]).await;
    publish().await;
    all("good", 2).await;

    // Another member gets a partition, and its records from the committed offset on.
    let rival = broker.open().await;
    let mut reader = subscribe(&*rival, Topic::Pipeline, Reading::Ordered).await;
    let taken = within("the other has a partition", reader.next(1))
        .await
        .unwrap()
        .remove(0)
        .partition;
    // Each of the other two is tried twice, so the pause of the last try of the lost one is over.
    let before = refusals(&redis).await;
    until("they were tried again", async || {
        refusals(&redis).await > before + 4
    })
    .await;
    run(&["allkeys"]).await;
    for partition in (0..PARTITIONS).filter(|partition| *partition != taken) {
        let shard = shard("sick", partition);
        until("it has what was held", async || {
            open(&queue, &shard).await == 2
        })
        .await;
    }
    assert_eq!(
        open(&queue, &shard("sick", taken)).await,
        1,
        "the partition of another"
    );

    drop(reader);
    all("sick", 2).await;
    publish().await;
    all("sick", 3).await;
    all("good", 3).await;
    let ends = bus.ends(Topic::Pipeline).await.unwrap();
    until("all is committed", async || {
        bus.committed(Topic::Pipeline).await.unwrap() == ends
    })
    .await;
    for (shard, tasks) in &published {
        assert_eq!(claim(&queue, shard).await, *tasks, "{shard}");
    }
    supervisor.stop();
    supervisor.wait().await;
    drop(rival);
    broker.remove().await;
}
