//! The owner of a partition of `pipeline`, and a process that only believes to own it.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use prost::Message as _;
use sqlx::{Connection, SqliteConnection};
use taskd::{
    bus::{Bus, Record, Topic, redis_streams::RedisStreams},
    model::{self, Offset, QueueName, ShardId, TaskId},
    queue::{Closing, Enqueue, EnqueueTask, Enqueued, Queue, Source},
    redis_pool::Redis,
    runtime::Supervisor,
    wire::{self, pb},
};

use crate::support::{
    coordination,
    process::{Process, work_off},
    redis::{Fsync, RedisServer},
    sqlite::SqliteFile,
    store_contract::Database,
    until,
};

fn record() -> pb::PipelineRecord {
    pb::PipelineRecord {
        id: TaskId::new().as_bytes().to_vec().into(),
        queue: "q".into(),
        replicas: 1,
        priority: pb::Priority::Medium.into(),
        max_attempts: 5,
        lease_ms: 30_000,
        published_unix_ms: model::now_unix_ms(),
        ..Default::default()
    }
}

/// An owner with this epoch enqueues the record that it read at `offset`.
async fn enqueue(queue: &Queue, bus: &dyn Bus, shard: &ShardId, epoch: u64, offset: Offset) -> Enqueued {
    let record = record();
    let id = TaskId::from_slice(&record.id).unwrap();
    let (body, credited) = (wire::body_blob(&record), vec![]);
    let task = EnqueueTask { offset, id, replicas: 1, not_before_unix_ms: 0, body, credited, epoch: 0 };
    let batch = Enqueue {
        source: Source::Partition {
            topic_generation: bus.generation(),
            epoch,
            predecessor: None,
            upto: offset,
            again: false,
        },
        tasks: &[task],
        high_water_tasks: 100,
        high_water_bytes: 1 << 20,
        live_tasks_max: u64::MAX,
    };
    queue.enqueuer.enqueue(shard, &batch).await.unwrap()
}

#[tokio::test]
async fn an_owner_of_before_is_refused_and_the_present_one_joins_anew() {
    let (server, database) = (RedisServer::start(Fsync::EverySecond), SqliteFile::create().await);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
    let (process, supervisor) = (Process::new(&redis, &database.open().await, bus.clone()), Supervisor::new());
    let queue = &process.queue;
    let shard = ShardId { queue: QueueName::new("q").unwrap(), number: 0 };
    let zombie = coordination(&redis, "zombie").take_epoch(0).await.unwrap();

    process.fanout(&Arc::default(), &supervisor);
    let mut published = 0;
    let mut publish = async || {
        published += 1;
        let record = Record { partition: 0, value: record().encode_to_vec().into() };
        let offset = bus.publish(Topic::Pipeline, &[record]).await.unwrap()[0];
        until("it is enqueued", async || queue.stats(&shard).await.is_ok_and(|stats| stats.open == published)).await;
        offset
    };
    let offset = publish().await;
    let behind = |by| Offset { major: offset.major + by, minor: 0 };
    // Held up since before; what it has read lies behind what is stored, so that only the epoch tells.
    let refused = enqueue(queue, &*bus, &shard, zombie, behind(1)).await;
    assert_eq!(refused, Enqueued::Fenced(zombie + 1));

    // A Redis that was set back gives the same epochs again: another owner has one far above the fanout's next.
    let taken = enqueue(queue, &*bus, &shard, 100, offset).await;
    assert_eq!(taken, Enqueued::Done { dealt_with: 1, added: 0 });
    publish().await;
    assert_eq!(enqueue(queue, &*bus, &shard, 100, offset).await, Enqueued::Fenced(101));
    supervisor.stop();
    supervisor.wait().await;
}

/// A fanout that can be stopped and started again.
struct Fixture {
    redis: Redis,
    bus: Arc<RedisStreams>,
    process: Process,
    queue: Queue,
    database: SqliteFile,
    supervisor: Supervisor,
    _server: RedisServer,
}

impl Fixture {
    async fn start() -> Self {
        let (server, database) = (RedisServer::start(Fsync::EverySecond), SqliteFile::create().await);
        let redis = Redis::connect(&server.url(), "t").await.unwrap();
        let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
        let process = Process::new(&redis, &database.open().await, bus.clone());
        let (queue, supervisor) = (process.queue.clone(), Supervisor::new());
        let fixture = Self { redis, bus, process, queue, database, supervisor, _server: server };
        fixture.run();
        fixture
    }

    fn run(&self) {
        self.process.fanout(&Arc::default(), &self.supervisor);
    }

    async fn stop(&mut self) {
        self.supervisor.stop();
        self.supervisor.wait().await;
        self.supervisor = Supervisor::new();
    }

    /// A task for each of the queues; where it stands, and the record.
    async fn publish(&self, queues: &[impl AsRef<str>]) -> Vec<(Offset, Bytes)> {
        let record = |queue: &str| pb::PipelineRecord { queue: queue.into(), ..record() };
        let records = queues.iter().map(|queue| record(queue.as_ref()).encode_to_vec().into());
        let records: Vec<_> = records.map(|value| Record { partition: 0, value }).collect();
        let offsets = self.bus.publish(Topic::Pipeline, &records).await.unwrap();
        offsets.into_iter().zip(records).map(|(offset, record)| (offset, record.value)).collect()
    }

    /// The bus has these records once more, all that were published and read.
    async fn put_back(&self, records: &[(Offset, Bytes)]) {
        let last = records.last().unwrap().0.to_string();
        // A later commit would remove what is put back.
        until("they are committed", async || {
            let mut conn = self.redis.conn();
            let committed = redis::cmd("GET").arg("t:{bus}:pipeline:0:committed").query_async(&mut conn).await;
            committed.is_ok_and(|committed: Option<String>| committed.as_ref() == Some(&last))
        })
        .await;
        let mut pipe = redis::pipe();
        for (offset, value) in records {
            pipe.cmd("XADD").arg("t:{bus}:copy").arg(offset.to_string()).arg("v").arg(&value[..]);
        }
        pipe.rename("t:{bus}:copy", "t:{bus}:pipeline:0");
        pipe.query_async::<()>(&mut self.redis.conn()).await.unwrap();
    }

    async fn has(&self, name: &str, open: u64) {
        let shard = shard(name);
        let has = async || self.queue.stats(&shard).await.map(|stats| stats.open).unwrap_or(0);
        until(&format!("{name} has {open}"), async || has().await == open).await;
    }

    async fn redis_reads(&self) -> u64 {
        let info: String = redis::cmd("INFO").arg("stats").query_async(&mut self.redis.conn()).await.unwrap();
        let reads = info.lines().find_map(|line| line.strip_prefix("total_reads_processed:"));
        reads.unwrap().trim().parse().unwrap()
    }

    /// How many transactions have opened or closed shards.
    async fn openings(&self) -> u64 {
        self.process.store.shards(None).await.unwrap().iter().map(|shard| shard.version).max().unwrap_or(0)
    }

    /// All keys of a shard.
    async fn dump(&self, name: &str) -> Vec<(String, Vec<u8>)> {
        let mut conn = self.redis.conn();
        let keys: Vec<String> =
            redis::cmd("KEYS").arg(format!("t:{{{name}:0}}:*")).query_async(&mut conn).await.unwrap();
        let mut dump = Vec::new();
        for key in keys {
            let value = redis::cmd("DUMP").arg(&key).query_async(&mut conn).await.unwrap();
            dump.push((key, value));
        }
        dump
    }

    /// As after a restart of Redis that had not synced what came later.
    async fn restore(&self, name: &str, dump: &[(String, Vec<u8>)]) {
        let mut conn = self.redis.conn();
        for (key, _) in self.dump(name).await {
            redis::cmd("DEL").arg(key).query_async::<()>(&mut conn).await.unwrap();
        }
        for (key, value) in dump {
            redis::cmd("RESTORE").arg(key).arg(0).arg(value).query_async::<()>(&mut conn).await.unwrap();
        }
    }

    async fn close_in_redis(&self, name: &str) {
        assert!(matches!(self.queue.upkeep.close_shard(&shard(name), Duration::ZERO).await.unwrap(), Closing::In(_)));
        assert_eq!(self.queue.upkeep.close_shard(&shard(name), Duration::ZERO).await.unwrap(), Closing::Closed(1));
        assert_eq!(self.dump(name).await, []);
    }
}

fn shard(name: &str) -> ShardId {
    ShardId { queue: QueueName::new(name).unwrap(), number: 0 }
}

#[tokio::test]
async fn a_thousand_new_queues_cost_one_transaction_and_hold_up_nobody() {
    let mut fixture = Fixture::start().await;
    fixture.publish(&["old"]).await;
    fixture.has("old", 1).await;
    fixture.stop().await;
    let mut names: Vec<String> = (0..999).map(|n| format!("new{n}")).collect();
    // In the first batch, which is small.
    names.insert(30, "old".into());
    fixture.publish(&names).await;

    // Nobody can write to SQL: what is known does not wait for what is new.
    let mut rival =
        SqliteConnection::connect(&format!("sqlite://{}", fixture.database.path().display())).await.unwrap();
    let lock = rival.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let (openings, reads) = (fixture.openings().await, fixture.redis_reads().await);
    fixture.run();
    fixture.has("old", 2).await;
    assert_eq!(fixture.queue.shards().len(), 1);
    lock.rollback().await.unwrap();

    until("the new ones are there", async || fixture.queue.shards().len() == 1000).await;
    let reads = fixture.redis_reads().await - reads;
    for name in names.iter().filter(|name| *name != "old") {
        fixture.has(name, 1).await;
    }
    // One for each batch, and a reader's batches grow.
    let openings = fixture.openings().await - openings;
    assert!(openings < 10, "{openings} transactions");
    // Of sockets, by Redis: one for each new queue would be a round trip for each.
    assert!(reads < 500, "{reads} reads");
    fixture.stop().await;
}

#[tokio::test]
async fn a_queue_that_was_closed_is_opened_in_its_next_life() {
    let mut fixture = Fixture::start().await;
    fixture.publish(&["q"]).await;
    fixture.has("q", 1).await;
    work_off(&fixture.queue, &shard("q")).await;
    fixture.close_in_redis("q").await;
    // The fanout still knows it, and SQL does not know yet that it is closed: perhaps Redis lost it.
    fixture.publish(&["q", "other"]).await;
    fixture.has("other", 1).await;
    assert_eq!(fixture.queue.upkeep.generations(&[shard("q")]).await.unwrap()[0], None);
    assert!(fixture.process.store.close_shard(&shard("q"), 1).await.unwrap());
    fixture.has("q", 1).await;
    assert_eq!(fixture.queue.upkeep.generations(&[shard("q")]).await.unwrap()[0], Some(2));

    // Closed in both, and known to nobody.
    work_off(&fixture.queue, &shard("q")).await;
    assert!(matches!(fixture.queue.upkeep.close_shard(&shard("q"), Duration::ZERO).await.unwrap(), Closing::In(_)));
    assert_eq!(fixture.queue.upkeep.close_shard(&shard("q"), Duration::ZERO).await.unwrap(), Closing::Closed(2));
    assert!(fixture.process.store.close_shard(&shard("q"), 2).await.unwrap());
    fixture.queue.remove_shard(&shard("q"));
    fixture.publish(&["q"]).await;
    fixture.has("q", 1).await;
    assert_eq!(fixture.queue.upkeep.generations(&[shard("q")]).await.unwrap()[0], Some(3));
    fixture.stop().await;
}

#[tokio::test]
async fn a_closing_that_was_killed_between_its_steps_is_brought_back_empty() {
    let mut fixture = Fixture::start().await;
    fixture.publish(&["q"]).await;
    fixture.has("q", 1).await;
    work_off(&fixture.queue, &shard("q")).await;
    fixture.close_in_redis("q").await;
    let Fixture { process, queue, supervisor, .. } = &fixture;
    process.sync_queues(supervisor).await;
    process.watchdog(&Arc::default(), supervisor);
    until("it lives again", async || queue.upkeep.generations(&[shard("q")]).await.unwrap()[0] == Some(2)).await;
    fixture.has("q", 0).await;
    fixture.publish(&["q"]).await;
    fixture.has("q", 1).await;
    fixture.stop().await;
}

#[tokio::test]
async fn all_queues_of_a_partition_that_fell_back_are_read_again() {
    let mut fixture = Fixture::start().await;
    let (mut dumps, mut records) = (Vec::new(), Vec::new());
    for (published, keeps) in [("a", true), ("a", false), ("b", false), ("b", true), ("b", false)] {
        records.extend(fixture.publish(&[published]).await);
        let count = dumps.iter().filter(|(name, _)| *name == published).count() as u64 + 1;
        fixture.has(published, count).await;
        let dump = fixture.dump(published).await;
        dumps.push((published, keeps.then_some(dump)));
    }
    for (name, dump) in dumps {
        if let Some(dump) = dump {
            fixture.restore(name, &dump).await;
        }
    }
    fixture.has("a", 1).await;
    fixture.has("b", 2).await;
    fixture.put_back(&records).await;
    fixture.publish(&["b"]).await;
    fixture.has("b", 4).await;
    fixture.has("a", 2).await;
    fixture.stop().await;
}
