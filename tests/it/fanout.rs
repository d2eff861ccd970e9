//! The owner of a partition of `pipeline`, and a process that only believes to own it.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message as _;
use serde_json::json;
use sqlx::{Connection, SqliteConnection};
use taskd::{
    bus::{Bus, Record, Topic, redis_streams::RedisStreams},
    config::Settings,
    model::{self, NewTask, Offset, QueueName, ShardId, TaskId, WorkerName},
    queue::{Claim, Closing, Enqueue, EnqueueTask, Enqueued, Queue, Source},
    redis_pool::Redis,
    runtime::{Clock, Supervisor},
    wire::{self, pb},
};

use crate::support::{
    coordination,
    daemon::Daemon,
    process::{Process, work_off},
    redis::{Fsync, RedisServer, patient},
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
async fn enqueue(
    queue: &Queue,
    bus: &dyn Bus,
    shard: &ShardId,
    epoch: u64,
    offset: Offset,
) -> Enqueued {
    let record = record();
    let id = TaskId::from_slice(&record.id).unwrap();
    let (body, credited) = (wire::body_blob(&record), vec![]);
    let task = EnqueueTask {
        offset,
        id,
        replicas: 1,
        not_before_unix_ms: 0,
        body,
        credited,
        epoch: 0,
    };
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
    let (server, database) = (
        RedisServer::start(Fsync::EverySecond),
        SqliteFile::create().await,
    );
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
    let (process, supervisor) = (
        Process::new(&redis, &database.open().await, bus.clone()),
        Supervisor::new(),
    );
    let queue = &process.queue;
    let shard = ShardId {
        queue: QueueName::new("q").unwrap(),
        number: 0,
    };
    let zombie = coordination(&redis, "zombie").take_epoch(0).await.unwrap();

    process.fanout(&Arc::default(), &supervisor);
    let mut published = 0;
    let mut publish = async || {
        published += 1;
        let record = Record {
            partition: 0,
            value: record().encode_to_vec().into(),
        };
        let offset = bus.publish(Topic::Pipeline, &[record]).await.unwrap()[0];
        until("it is enqueued", async || {
            queue
                .stats(&shard)
                .await
                .is_ok_and(|stats| stats.open == published)
        })
        .await;
        offset
    };
    let offset = publish().await;
    let behind = |by| Offset {
        major: offset.major + by,
        minor: 0,
    };
    // Held up since before; what it has read lies behind what is stored, so that only the epoch
    // tells.
    let refused = enqueue(queue, &*bus, &shard, zombie, behind(1)).await;
    assert_eq!(refused, Enqueued::Fenced(zombie + 1));

    // A Redis that was set back gives the same epochs again: another owner has one far above the
    // fanout's next.
    let taken = enqueue(queue, &*bus, &shard, 100, offset).await;
    assert_eq!(
        taken,
        Enqueued::Done {
            dealt_with: 1,
            added: 0,
            crowded: Vec::new(),
        }
    );
    publish().await;
    assert_eq!(
        enqueue(queue, &*bus, &shard, 100, offset).await,
        Enqueued::Fenced(101)
    );
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
    /// Of the supervisor.
    clock: Clock,
    server: RedisServer,
}

impl Fixture {
    async fn start() -> Self {
        let (server, database) = (
            RedisServer::start(Fsync::EverySecond),
            SqliteFile::create().await,
        );
        let redis = Redis::connect(&server.url(), "t").await.unwrap();
        let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
        let process = Process::new(&redis, &database.open().await, bus.clone());
        let (queue, clock) = (process.queue.clone(), Clock::of_this_machine());
        let supervisor = Supervisor::with_clock(clock.clone());
        let fixture = Self {
            redis,
            bus,
            process,
            queue,
            database,
            supervisor,
            clock,
            server,
        };
        fixture.run();
        fixture
    }

    fn run(&self) {
        let mut settings = Settings::default();
        // The tasks are not in SQL, so nobody may ask it about those that wait for long.
        settings.watchdog.grace = Duration::from_secs(3600);
        self.process.fanout(&Arc::new(settings), &self.supervisor);
    }

    async fn stop(&mut self) {
        self.supervisor.stop();
        self.supervisor.wait().await;
        self.supervisor = Supervisor::with_clock(self.clock.clone());
    }

    /// A task for each of the queues; where it stands, and the record.
    async fn publish(&self, queues: &[impl AsRef<str>]) -> Vec<(Offset, Bytes)> {
        let record = |queue: &str| pb::PipelineRecord {
            queue: queue.into(),
            ..record()
        };
        let records = queues
            .iter()
            .map(|queue| record(queue.as_ref()).encode_to_vec().into());
        let records: Vec<_> = records
            .map(|value| Record {
                partition: 0,
                value,
            })
            .collect();
        let offsets = self.bus.publish(Topic::Pipeline, &records).await.unwrap();
        offsets
            .into_iter()
            .zip(records)
            .map(|(offset, record)| (offset, record.value))
            .collect()
    }

    /// The bus has these records once more, all that were published and read.
    async fn put_back(&self, records: &[(Offset, Bytes)]) {
        // A later commit would remove what is put back.
        self.has_committed(records.last().unwrap().0).await;
        let mut pipe = redis::pipe();
        for (offset, value) in records {
            pipe.cmd("XADD")
                .arg("t:{bus}:copy")
                .arg(offset.to_string())
                .arg("v")
                .arg(&value[..]);
        }
        pipe.rename("t:{bus}:copy", "t:{bus}:pipeline:0");
        pipe.query_async::<()>(&mut self.redis.conn())
            .await
            .unwrap();
    }

    async fn has_committed(&self, last: Offset) {
        until("they are committed", async || {
            self.bus.committed(Topic::Pipeline).await.unwrap()[0] == Some(last)
        })
        .await;
    }

    async fn redis(&self, command: &str) {
        let mut words = command.split(' ');
        let mut command = redis::cmd(words.next().unwrap());
        words.for_each(|word| _ = command.arg(word));
        command
            .query_async::<()>(&mut self.redis.conn())
            .await
            .unwrap();
    }

    /// Redis refuses all calls of shards whose queues begin with "s".
    async fn refuse(&self) {
        self.redis("ACL SETUSER default resetkeys ~t:[^{]* ~t:{[^s]*")
            .await;
    }

    async fn refuse_no_more(&self) {
        self.redis("ACL SETUSER default allkeys").await;
    }

    async fn refusals(&self) -> u64 {
        let info: String = redis::cmd("INFO")
            .arg("errorstats")
            .query_async(&mut self.redis.conn())
            .await
            .unwrap();
        let count = info
            .lines()
            .find_map(|line| line.strip_prefix("errorstat_NOPERM:count="));
        count.map_or(0, |count| count.trim().parse().unwrap())
    }

    /// Waits for tries that Redis refuses: one of before has ended, and the loop has come round
    /// behind another.
    async fn is_tried(&self) {
        let refusals = self.refusals().await;
        until("it was tried again", async || {
            self.refusals().await > refusals + 2
        })
        .await;
    }

    /// True if the fanout shows no progress while it tries held shards.
    async fn stalls(&self) -> bool {
        self.clock.advance(2 * STALL_AFTER);
        self.is_tried().await;
        self.stalled() == ["fanout"]
    }

    fn stalled(&self) -> Vec<String> {
        let stalled = self.supervisor.progress().stalled(STALL_AFTER);
        stalled.into_iter().map(|(name, _)| name).collect()
    }

    /// The tasks that a worker gets, in its order.
    async fn claim(&self, name: &str) -> Vec<TaskId> {
        let known = self.queue.shards_of(&shard(name).queue).remove(0);
        let worker = WorkerName::new("w").unwrap();
        let (max_tasks, max_bytes, is_first, lease, priority) = (1000, 1 << 30, true, None, None);
        let claim = Claim {
            worker,
            max_tasks,
            max_bytes,
            is_first,
            lease,
            priority,
        };
        let granted = self.queue.worker.claim(&known, claim).await.unwrap();
        granted.delivery.delivered();
        granted.tasks.iter().map(|task| task.id).collect()
    }

    /// How many epochs were taken.
    async fn epochs(&self) -> u64 {
        redis::cmd("HGET")
            .arg("t:epochs")
            .arg(0)
            .query_async(&mut self.redis.conn())
            .await
            .unwrap()
    }

    async fn has(&self, name: &str, open: u64) {
        let shard = shard(name);
        let has = async || {
            self.queue
                .stats(&shard)
                .await
                .map(|stats| stats.open)
                .unwrap_or(0)
        };
        until(&format!("{name} has {open}"), async || has().await == open).await;
    }

    async fn redis_reads(&self) -> u64 {
        let info: String = redis::cmd("INFO")
            .arg("stats")
            .query_async(&mut self.redis.conn())
            .await
            .unwrap();
        let reads = info
            .lines()
            .find_map(|line| line.strip_prefix("total_reads_processed:"));
        reads.unwrap().trim().parse().unwrap()
    }

    /// How many transactions have opened or closed shards.
    async fn openings(&self) -> u64 {
        self.process
            .store
            .shards(None)
            .await
            .unwrap()
            .iter()
            .map(|shard| shard.version)
            .max()
            .unwrap_or(0)
    }

    /// All keys of a shard.
    async fn dump(&self, name: &str) -> Vec<(String, Vec<u8>)> {
        let mut conn = self.redis.conn();
        let keys: Vec<String> = redis::cmd("KEYS")
            .arg(format!("t:{{{name}:0}}:*"))
            .query_async(&mut conn)
            .await
            .unwrap();
        let mut dump = Vec::new();
        for key in keys {
            let value = redis::cmd("DUMP")
                .arg(&key)
                .query_async(&mut conn)
                .await
                .unwrap();
            dump.push((key, value));
        }
        dump
    }

    /// As after a restart of Redis that had not synced what came later.
    async fn restore(&self, name: &str, dump: &[(String, Vec<u8>)]) {
        let mut conn = self.redis.conn();
        for (key, _) in self.dump(name).await {
            redis::cmd("DEL")
                .arg(key)
                .query_async::<()>(&mut conn)
                .await
                .unwrap();
        }
        for (key, value) in dump {
            redis::cmd("RESTORE")
                .arg(key)
                .arg(0)
                .arg(value)
                .query_async::<()>(&mut conn)
                .await
                .unwrap();
        }
    }

    async fn close_in_redis(&self, name: &str) {
        assert!(matches!(
            self.queue
                .upkeep
                .close_shard(&shard(name), Duration::ZERO)
                .await
                .unwrap(),
            Closing::In(_)
        ));
        assert_eq!(
            self.queue
                .upkeep
                .close_shard(&shard(name), Duration::ZERO)
                .await
                .unwrap(),
            Closing::Closed(1)
        );
        assert_eq!(self.dump(name).await, []);
    }
}

fn shard(name: &str) -> ShardId {
    ShardId {
        queue: QueueName::new(name).unwrap(),
        number: 0,
    }
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
        SqliteConnection::connect(&format!("sqlite://{}", fixture.database.path().display()))
            .await
            .unwrap();
    let lock = rival.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let (openings, reads) = (fixture.openings().await, fixture.redis_reads().await);
    fixture.run();
    fixture.has("old", 2).await;
    assert_eq!(fixture.queue.shards().len(), 1);
    lock.rollback().await.unwrap();

    until("the new ones are there", async || {
        fixture.queue.shards().len() == 1000
    })
    .await;
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
    // The fanout still knows it, and SQL does not know yet that it is closed: perhaps Redis lost
    // it.
    fixture.publish(&["q", "other"]).await;
    fixture.has("other", 1).await;
    assert_eq!(
        fixture
            .queue
            .upkeep
            .generations(&[shard("q")])
            .await
            .unwrap()[0],
        None
    );
    assert!(
        fixture
            .process
            .store
            .close_shard(&shard("q"), 1)
            .await
            .unwrap()
    );
    fixture.has("q", 1).await;
    assert_eq!(
        fixture
            .queue
            .upkeep
            .generations(&[shard("q")])
            .await
            .unwrap()[0],
        Some(2)
    );

    // Closed in both, and known to nobody.
    work_off(&fixture.queue, &shard("q")).await;
    assert!(matches!(
        fixture
            .queue
            .upkeep
            .close_shard(&shard("q"), Duration::ZERO)
            .await
            .unwrap(),
        Closing::In(_)
    ));
    assert_eq!(
        fixture
            .queue
            .upkeep
            .close_shard(&shard("q"), Duration::ZERO)
            .await
            .unwrap(),
        Closing::Closed(2)
    );
    assert!(
        fixture
            .process
            .store
            .close_shard(&shard("q"), 2)
            .await
            .unwrap()
    );
    fixture.queue.remove_shard(&shard("q"));
    fixture.publish(&["q"]).await;
    fixture.has("q", 1).await;
    assert_eq!(
        fixture
            .queue
            .upkeep
            .generations(&[shard("q")])
            .await
            .unwrap()[0],
        Some(3)
    );
    fixture.stop().await;
}

#[tokio::test]
async fn a_closing_that_was_killed_between_its_steps_is_brought_back_empty() {
    let mut fixture = Fixture::start().await;
    fixture.publish(&["q"]).await;
    fixture.has("q", 1).await;
    work_off(&fixture.queue, &shard("q")).await;
    fixture.close_in_redis("q").await;
    let Fixture {
        process,
        queue,
        supervisor,
        ..
    } = &fixture;
    process.sync_queues(supervisor).await;
    process.watchdog(&Arc::default(), supervisor);
    until("it lives again", async || {
        queue.upkeep.generations(&[shard("q")]).await.unwrap()[0] == Some(2)
    })
    .await;
    fixture.has("q", 0).await;
    fixture.publish(&["q"]).await;
    fixture.has("q", 1).await;
    fixture.stop().await;
}

#[tokio::test]
async fn all_queues_of_a_partition_that_fell_back_are_read_again() {
    let mut fixture = Fixture::start().await;
    let (mut dumps, mut records) = (Vec::new(), Vec::new());
    for (published, keeps) in [
        ("a", true),
        ("a", false),
        ("b", false),
        ("b", true),
        ("b", false),
    ] {
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

const STALL_AFTER: Duration = Duration::from_secs(30);

/// A new reader's first batch has records of this queue only.
const A_BATCH: [&str; 100] = ["sick"; 100];

/// The tasks of a queue among these records, in their order.
fn tasks_of(name: &str, records: &[(Offset, Bytes)]) -> Vec<TaskId> {
    let records = records
        .iter()
        .map(|(_, value)| pb::PipelineRecord::decode(&value[..]).unwrap());
    let of_queue = records.filter(|record| record.queue == name);
    of_queue
        .map(|record| TaskId::from_slice(&record.id).unwrap())
        .collect()
}

#[tokio::test]
async fn a_shard_that_refuses_calls_holds_up_no_other_queue() {
    let mut fixture = Fixture::start().await;
    let mut records = fixture.publish(&["sick", "good"]).await;
    fixture.has("sick", 1).await;
    fixture.has("good", 1).await;
    fixture.refuse().await;
    records.extend(fixture.publish(&A_BATCH).await);
    for count in 2..5 {
        records.extend(
            fixture
                .publish(&["sick", "good", &format!("new{count}"), "sick"])
                .await,
        );
        fixture.has("good", count).await;
        fixture.has(&format!("new{count}"), 1).await;
    }
    assert_eq!(fixture.claim("good").await, tasks_of("good", &records));

    fixture.refuse_no_more().await;
    fixture.has("sick", 107).await;
    assert_eq!(fixture.claim("sick").await, tasks_of("sick", &records));
    fixture.has_committed(records.last().unwrap().0).await;
    // It takes tasks at once again.
    let more = fixture.publish(&["sick", "good"]).await;
    fixture.has("sick", 1).await;
    fixture.has_committed(more[1].0).await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_hold_ends_while_records_of_its_shard_keep_coming() {
    let mut fixture = Fixture::start().await;
    fixture.publish(&["sick"]).await;
    fixture.has("sick", 1).await;
    fixture.refuse().await;
    let held = fixture.publish(&A_BATCH).await.last().unwrap().0;
    fixture.is_tried().await;
    fixture.refuse_no_more().await;
    let mut published = 0;
    tokio::select! {
        never = async { loop { fixture.publish(&["sick"]).await; published += 1; } } => never,
        () = until("it commits", async || fixture.bus.committed(Topic::Pipeline).await.unwrap()[0] >= Some(held)) => {}
    }
    assert!(
        published < 50_000,
        "it ended only because the reader was full"
    );
    fixture.stop().await;
}

#[tokio::test]
async fn what_is_held_comes_again_after_a_restart() {
    let mut fixture = Fixture::start().await;
    let mut records = fixture.publish(&["sick", "good"]).await;
    fixture.has("sick", 1).await;
    fixture.has("good", 1).await;
    fixture.refuse().await;
    records.extend(fixture.publish(&A_BATCH).await);
    for restarts in 1..4 {
        records.extend(fixture.publish(&["sick", "good", "sick"]).await);
        fixture.has("good", 1 + restarts).await;
        fixture.stop().await;
        fixture.run();
    }
    records.extend(fixture.publish(&["good"]).await);
    fixture.has("good", 5).await;
    fixture.refuse_no_more().await;
    fixture.has("sick", 107).await;
    fixture.has_committed(records.last().unwrap().0).await;
    for name in ["sick", "good"] {
        assert_eq!(fixture.claim(name).await, tasks_of(name, &records));
    }
    fixture.stop().await;
}

#[tokio::test]
async fn what_is_held_comes_again_when_another_queue_of_the_partition_fell_back() {
    let mut fixture = Fixture::start().await;
    fixture.publish(&["sick"]).await;
    fixture.has("sick", 1).await;
    fixture.claim("sick").await;
    fixture.refuse().await;
    let mut records = fixture.publish(&["sick", "good"]).await;
    fixture.has("good", 1).await;
    let dump = fixture.dump("good").await;
    records.extend(fixture.publish(&["good", "sick"]).await);
    fixture.has("good", 2).await;
    fixture.restore("good", &dump).await;
    records.extend(fixture.publish(&["good"]).await);
    fixture.has("good", 3).await;
    fixture.is_tried().await;
    fixture.refuse_no_more().await;
    fixture.has("sick", 2).await;
    fixture.has_committed(records.last().unwrap().0).await;
    for name in ["sick", "good"] {
        assert_eq!(fixture.claim(name).await, tasks_of(name, &records));
    }
    fixture.stop().await;
}

#[tokio::test]
async fn a_new_queue_that_redis_does_not_open_holds_up_no_other() {
    let mut fixture = Fixture::start().await;
    let discovery = fixture
        .process
        .discovery(&Arc::default(), &fixture.supervisor);
    fixture.refuse().await;
    let task = |queue: &str| NewTask {
        queue: queue.into(),
        key: TaskId::new().to_string().into(),
        ..Default::default()
    };
    discovery.insert(A_BATCH.map(task).to_vec()).await.unwrap();
    discovery.insert(vec![task("good")]).await.unwrap();
    fixture.has("good", 1).await;
    fixture.refuse_no_more().await;
    // SQL has remembered the shard before, so it looks lost.
    fixture.process.sync_queues(&fixture.supervisor).await;
    fixture
        .process
        .watchdog(&Arc::default(), &fixture.supervisor);
    fixture.has("sick", 100).await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_reader_that_would_leave_too_much_uncommitted_reads_no_more_and_stalls() {
    let mut fixture = Fixture::start().await;
    fixture.publish(&["sick", "good"]).await;
    fixture.has("sick", 1).await;
    fixture.has("good", 1).await;
    fixture.refuse().await;
    let mut records = fixture.publish(&["sick", "good"]).await;
    fixture.has("good", 2).await;
    assert!(!fixture.stalls().await, "there is room");
    let epochs = fixture.epochs().await;
    let body = pb::TaskBody {
        payload: vec![0; 1 << 20].into(),
        ..Default::default()
    }
    .encode_to_vec();
    let large = pb::PipelineRecord {
        queue: "good".into(),
        body: body.into(),
        ..record()
    };
    for _ in 0..100 {
        let large = pb::PipelineRecord {
            id: TaskId::new().as_bytes().to_vec().into(),
            ..large.clone()
        };
        let record = Record {
            partition: 0,
            value: large.encode_to_vec().into(),
        };
        let offset = fixture
            .bus
            .publish(Topic::Pipeline, std::slice::from_ref(&record))
            .await
            .unwrap()[0];
        records.push((offset, record.value));
    }
    until("it stalls", async || fixture.stalls().await).await;
    let read = fixture.queue.stats(&shard("good")).await.unwrap().open;
    assert!((60..100).contains(&read), "it has read {read}");

    fixture.refuse_no_more().await;
    fixture.has("sick", 2).await;
    fixture.has("good", 102).await;
    fixture.has_committed(records.last().unwrap().0).await;
    until("it makes progress again", async || {
        fixture.stalled().is_empty()
    })
    .await;
    assert_eq!(fixture.epochs().await, epochs, "another reader has begun");
    fixture.stop().await;
}

/// The lines that this test's thread logs.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn of_this_thread() -> (Self, tracing::subscriber::DefaultGuard) {
        let log = Self::default();
        let writer = log.clone();
        let lines = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        (log, tracing::subscriber::set_default(lines))
    }

    fn has(&self, words: &str) -> bool {
        String::from_utf8_lossy(&self.0.lock()).contains(words)
    }
}

impl io::Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn an_owner_of_before_that_everything_refuses_takes_no_epoch_above_the_present_owners() {
    let (mut fixture, (log, _logs)) = (Fixture::start().await, Log::of_this_thread());
    let mut records = fixture.publish(&["sick"]).await;
    fixture.has("sick", 1).await;
    let ours = fixture.epochs().await;
    fixture.refuse().await;
    fixture.redis("HINCRBY t:epochs 0 1").await;
    records.extend(fixture.publish(&A_BATCH).await);
    let fenced = format!("another owner, with epoch {} above our {ours}", ours + 1);
    until("it gives the partition up", async || log.has(&fenced)).await;
    // It has got the partition again.
    until("it holds them", async || fixture.epochs().await == ours + 2).await;
    fixture.is_tried().await;
    fixture.refuse_no_more().await;
    fixture.has_committed(records.last().unwrap().0).await;
    assert_eq!(fixture.claim("sick").await, tasks_of("sick", &records));
    assert_eq!(fixture.epochs().await, ours + 2);
    fixture.stop().await;
}

#[tokio::test]
async fn an_owner_of_before_puts_nothing_of_what_it_holds_into_the_shard() {
    let (mut fixture, (log, _logs)) = (Fixture::start().await, Log::of_this_thread());
    fixture.publish(&["sick"]).await;
    fixture.has("sick", 1).await;
    let ours = fixture.epochs().await;
    fixture.refuse().await;
    let records = fixture.publish(&A_BATCH).await;
    fixture.is_tried().await;
    // The present owner has another user, and enqueues another task, so that the others count as
    // known from then on.
    fixture
        .redis("ACL SETUSER other on >other allkeys allchannels +@all")
        .await;
    let other = Redis::connect(
        &format!("{}?user=other&pass=other", fixture.server.url()),
        "t",
    )
    .await
    .unwrap();
    let present = Queue::new(other);
    let (last, by) = (records.last().unwrap().0, ours + 5);
    let taken = enqueue(&present, &*fixture.bus, &shard("sick"), by, last).await;
    assert_eq!(
        taken,
        Enqueued::Done {
            dealt_with: 1,
            added: 1,
            crowded: Vec::new(),
        }
    );

    fixture.refuse_no_more().await;
    let fenced = format!("another owner, with epoch {by} above our {ours}");
    until("it gives the partition up", async || log.has(&fenced)).await;
    fixture.has_committed(last).await;
    fixture.has("sick", 2).await;
    assert_eq!(fixture.epochs().await, by + 1);
    fixture.stop().await;
}

#[tokio::test]
async fn a_shard_that_refuses_calls_now_and_then_is_named_once() {
    let server = RedisServer::start(Fsync::EverySecond);
    let mut conn = patient(server.url()).await;
    let mut acl = async |rules: &[&str]| {
        redis::cmd("ACL")
            .arg("SETUSER")
            .arg("default")
            .arg(rules)
            .exec_async(&mut conn)
            .await
            .unwrap();
    };
    let mut daemon = Daemon::start("log = \"taskd=debug\"", &["--redis-url", &server.url()]).await;
    daemon
        .insert(&[json!({"queue": "xq", "key": "first"})])
        .await;
    let mut keys = daemon.drain("w", "xq").await;
    let count = |log: &str, words: &str| log.lines().filter(|line| line.contains(words)).count();
    for number in 1..4 {
        acl(&["resetkeys", "~taskd:[^{]*", "~taskd:{[^x]*"]).await;
        daemon
            .insert(&[json!({"queue": "xq", "key": number.to_string()})])
            .await;
        until("it is tried", async || {
            count(&daemon.log(), "xq:0 still takes no tasks") >= 2 * number
        })
        .await;
        acl(&["allkeys"]).await;
        keys.extend(daemon.work("w", "xq", 1).await);
        until("it is held no more", async || {
            count(&daemon.log(), "xq:0 takes tasks again") == number
        })
        .await;
    }
    assert_eq!(keys, ["first", "1", "2", "3"]);
    let (log, once) = (daemon.log(), (1, 1));
    assert_eq!(
        (
            count(&log, "cannot enqueue to xq:0"),
            count(&log, "all shards of pipeline/0")
        ),
        once,
        "{log}"
    );
    assert!(daemon.stop().await.success());
}
