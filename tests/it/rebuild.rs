//! Shards that Redis lost, and what comes between the steps of their rebuild.
//!
//! Without a fanout a walk stops when so many pages are in flight: in the middle, for as long as a
//! test likes.

use std::{collections::HashSet, sync::Arc, time::Duration};

use taskd::{
    bus::{Bus, Record, Topic, redis_streams::RedisStreams},
    config::{self, Settings},
    model::{
        Encoding, LeaseNumber, NewTask, Offset, QueueName, ShardId, TaskId, TaskRow, now_unix_ms,
        validate,
    },
    pipelines::publishing,
    redis_pool::Redis,
    runtime::{Clock, Supervisor},
    store::{NewRow, Published, Settlement, Store},
};

use crate::support::{
    process::Process,
    redis::{Fsync, RedisServer},
    sqlite::SqliteFile,
    store_contract::Database,
    until,
};

/// More than the walk has in flight.
const MANY: usize = 20_000;
/// The most that it has in flight: eight pages of 2,000.
const IN_FLIGHT: u64 = 16_000;

struct Fixture {
    redis: Redis,
    bus: Arc<RedisStreams>,
    store: Arc<dyn Store>,
    settings: Arc<Settings>,
    rows: Vec<TaskRow>,
    database: SqliteFile,
    _server: RedisServer,
}

/// A process of which the test starts the pipelines.
struct Running {
    process: Process,
    supervisor: Supervisor,
}

impl Running {
    async fn stop(self) {
        self.supervisor.stop();
        self.supervisor.wait().await;
    }
}

fn shard(name: &str) -> ShardId {
    ShardId {
        queue: QueueName::new(name).unwrap(),
        number: 0,
    }
}

fn row(name: &str, key: impl ToString, replicas: u32) -> TaskRow {
    let (queue, key, replicas) = (name.into(), key.to_string().into(), Some(replicas));
    let new = NewTask {
        queue,
        key,
        replicas,
        ..Default::default()
    };
    validate::task_row(
        new,
        TaskId::new(),
        &Settings::default().task_rules(name),
        1,
        now_unix_ms(),
    )
    .unwrap()
}

fn completed(id: TaskId) -> Settlement {
    Settlement::Completed {
        id,
        worker: "ann".into(),
        lease: LeaseNumber {
            generation: 1,
            grant: 1,
        },
        result: "done".into(),
        encoding: Encoding::Text,
        attempt: 1,
        leased_unix_ms: 0,
        at_unix_ms: now_unix_ms(),
        discovered: vec![],
        joining: None,
    }
}

impl Fixture {
    /// A Redis that has lost `count` tasks of the queue `q`, which SQL takes for published.
    async fn with_lost(count: usize) -> Self {
        let (server, database) = (
            RedisServer::start(Fsync::EverySecond),
            SqliteFile::create().await,
        );
        let redis = Redis::connect(&server.url(), "t").await.unwrap();
        let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
        let settings = Settings {
            watchdog: config::Watchdog {
                reconcile_every: Duration::from_millis(10),
                ..Default::default()
            },
            ..Default::default()
        };
        let store = database.open().await;
        store.open_shards(&[shard("q")]).await.unwrap();
        let rows = (0..count)
            .map(|n| row("q", n, 1 + u32::from(n % 100 == 1)))
            .collect();
        let settings = Arc::new(settings);
        let fixture = Self {
            redis,
            bus,
            store,
            settings,
            rows,
            database,
            _server: server,
        };
        for rows in fixture.rows.chunks(1000) {
            fixture
                .store_published(rows, Offset { major: 0, minor: 1 })
                .await;
        }
        fixture
    }

    async fn store_published(&self, rows: &[TaskRow], offset: Offset) {
        let process = Process::new(&self.redis, &self.store, self.bus.clone());
        let new: Vec<NewRow> = rows
            .iter()
            .map(|row| publishing::new_row(row.clone(), &process.gates, &self.settings))
            .collect();
        let batch = self.store.insert(&new).await.unwrap().batch;
        let tasks = rows.iter().map(|row| (row.id, batch)).collect();
        let published = Published {
            partition: 0,
            offset,
            tasks,
        };
        self.store
            .mark_published(self.bus.generation(), &[published])
            .await
            .unwrap();
    }

    async fn run(&self, name: &str) -> Running {
        let bus = self.bus.clone();
        let process = Process::named(
            name,
            &self.redis,
            &self.store,
            bus,
            Clock::of_this_machine(),
        );
        let running = Running {
            process,
            supervisor: Supervisor::new(),
        };
        running.process.sync_queues(&running.supervisor).await;
        running
    }

    async fn watchdog(&self, name: &str) -> Running {
        let running = self.run(name).await;
        running
            .process
            .watchdog(&self.settings, &running.supervisor);
        running
    }

    /// A watchdog that is in the middle of the rebuild.
    async fn watchdog_in_the_middle(&self, name: &str) -> Running {
        let before = self.backlog().await;
        let running = self.watchdog(name).await;
        until("the walk waits", async || {
            self.backlog().await == before + IN_FLIGHT
        })
        .await;
        running
    }

    async fn fanout(&self) -> Running {
        let running = self.run("fanout").await;
        running.process.fanout(&self.settings, &running.supervisor);
        running
    }

    async fn backlog(&self) -> u64 {
        self.bus.backlog(Topic::Pipeline).await.unwrap()
    }

    async fn generation(&self, name: &str) -> Option<u64> {
        let process = Process::new(&self.redis, &self.store, self.bus.clone());
        process
            .queue
            .upkeep
            .generations(&[shard(name)])
            .await
            .unwrap()[0]
    }

    async fn lose(&self, name: &str) {
        let key = format!("t:{{{}}}:generation", shard(name));
        redis::cmd("DEL")
            .arg(key)
            .query_async::<()>(&mut self.redis.conn())
            .await
            .unwrap();
    }

    async fn is_rebuilt(&self) {
        until("the rebuild ends", async || {
            self.store.rebuilding().await.unwrap().shards.is_empty()
        })
        .await;
    }

    /// All unfinished tasks are in the queue, each once, and no row was written for any of them.
    async fn all_are_there(&self, final_ones: &[TaskId]) {
        self.is_rebuilt().await;
        until("the fanout has read all", async || {
            self.backlog().await == 0
        })
        .await;
        let process = Process::new(&self.redis, &self.store, self.bus.clone());
        let stats = process.queue.stats(&shard("q")).await.unwrap();
        assert_eq!(stats.open, (self.rows.len() - final_ones.len()) as u64);
        let ids: Vec<TaskId> = self.rows.iter().map(|row| row.id).collect();
        for ids in ids.chunks(1000) {
            let (_, records) = process.queue.inspect(&shard("q"), ids).await.unwrap();
            for (id, record) in ids.iter().zip(records) {
                assert_eq!(
                    record.is_none(),
                    final_ones.contains(id),
                    "{id:?}: {record:?}"
                );
            }
        }
        assert_eq!(
            self.database
                .number("SELECT COUNT(*) FROM tasks WHERE pub_generation <> ''")
                .await,
            0
        );
        assert_eq!(self.database.number("SELECT COUNT(*) FROM outbox").await, 0);
    }
}

#[tokio::test]
async fn a_rebuild_that_was_killed_begins_anew() {
    let fixture = Fixture::with_lost(MANY).await;
    fixture.watchdog_in_the_middle("a").await.stop().await;
    assert_eq!(
        fixture.store.rebuilding().await.unwrap().shards,
        [(shard("q"), 2)].into()
    );
    // The shard is not lost any more: the mark alone says that its tasks are.
    assert_eq!(fixture.generation("q").await, Some(2));
    let watchdog = fixture.watchdog_in_the_middle("b").await;
    let fanout = fixture.fanout().await;
    fixture.all_are_there(&[]).await;
    assert_eq!(fixture.generation("q").await, Some(2));
    watchdog.stop().await;
    fanout.stop().await;
}

#[tokio::test]
async fn a_shard_that_was_marked_and_not_opened_gets_another_generation() {
    let fixture = Fixture::with_lost(100).await;
    assert_eq!(
        fixture
            .store
            .begin_rebuild(&[(shard("q"), 1)])
            .await
            .unwrap(),
        [2]
    );
    let (watchdog, fanout) = (fixture.watchdog("a").await, fixture.fanout().await);
    fixture.all_are_there(&[]).await;
    assert_eq!(fixture.generation("q").await, Some(3));
    watchdog.stop().await;
    fanout.stop().await;
}

#[tokio::test]
async fn two_watchdogs_rebuild_a_shard_once() {
    let fixture = Fixture::with_lost(MANY).await;
    let first = fixture.watchdog_in_the_middle("a").await;
    let second = fixture.watchdog("b").await;
    // It does not know the walk of the first one, and begins its own when it leads, too.
    until("the second one walks", async || {
        redis::cmd("DEL")
            .arg("t:lease:watchdog")
            .query_async::<()>(&mut fixture.redis.conn())
            .await
            .unwrap();
        fixture.backlog().await == 2 * IN_FLIGHT
    })
    .await;
    let fanout = fixture.fanout().await;
    fixture.all_are_there(&[]).await;
    assert_eq!(fixture.generation("q").await, Some(2));
    for running in [first, second, fanout] {
        running.stop().await;
    }
}

#[tokio::test]
async fn a_shard_that_is_lost_again_meanwhile_is_rebuilt_in_another_generation() {
    let fixture = Fixture::with_lost(MANY).await;
    let watchdog = fixture.watchdog_in_the_middle("a").await;
    let before = fixture.backlog().await;
    fixture.lose("q").await;
    until("it begins anew", async || {
        fixture.backlog().await == before + IN_FLIGHT
    })
    .await;
    assert_eq!(
        fixture.store.rebuilding().await.unwrap().shards,
        [(shard("q"), 3)].into()
    );
    let fanout = fixture.fanout().await;
    fixture.all_are_there(&[]).await;
    assert_eq!(fixture.generation("q").await, Some(3));
    watchdog.stop().await;
    fanout.stop().await;
}

/// Reports that come late, of tasks that the walk has passed and of others.
#[tokio::test]
async fn what_happens_to_tasks_during_the_rebuild_counts() {
    let fixture = Fixture::with_lost(MANY).await;
    let watchdog = fixture.watchdog_in_the_middle("a").await;
    let done = [0, MANY - 100].map(|n| fixture.rows[n].id);
    let for_two = [1, MANY - 99].map(|n| fixture.rows[n].id);
    let reports: Vec<Settlement> = done
        .iter()
        .chain(&for_two)
        .map(|id| completed(*id))
        .collect();
    fixture.store.settle(&reports).await.unwrap();

    let fanout = fixture.fanout().await;
    fixture.all_are_there(&done).await;
    let (_, records) = watchdog
        .process
        .queue
        .inspect(&shard("q"), &for_two)
        .await
        .unwrap();
    assert!(
        records
            .iter()
            .all(|record| record.as_ref().unwrap().credited == 1),
        "{records:?}"
    );
    watchdog.stop().await;
    fanout.stop().await;
}

/// The reconciler knows where the walk has published the tasks, and leaves them alone until the
/// fanout has read them.
#[tokio::test]
async fn rebuilt_tasks_on_their_way_are_not_missing() {
    let fixture = Fixture::with_lost(3000).await;
    // So that the shard is opened behind the place at which they were published before.
    let before = Record {
        partition: 0,
        value: "of before".into(),
    };
    fixture
        .bus
        .publish(Topic::Pipeline, &[before])
        .await
        .unwrap();
    let watchdog = fixture.watchdog("a").await;
    until("all are published", async || {
        fixture.backlog().await == 3001
    })
    .await;
    fixture.is_rebuilt().await;

    // The reconciler comes to a task that is missing: an open shard has read past it.
    let (other, missing) = (shard("other"), row("other", "missing", 1));
    fixture
        .store
        .open_shards(std::slice::from_ref(&other))
        .await
        .unwrap();
    let end = fixture.bus.ends(Topic::Pipeline).await.unwrap()[0];
    watchdog
        .process
        .queue
        .upkeep
        .open_shard(&other, 1, fixture.bus.generation(), end)
        .await
        .unwrap();
    fixture
        .store_published(
            std::slice::from_ref(&missing),
            Offset { major: 0, minor: 1 },
        )
        .await;
    until("it goes out again", async || fixture.backlog().await > 3001).await;
    // It looked at the others in the same page.
    let marked = async || {
        fixture
            .database
            .number("SELECT COUNT(*) FROM tasks WHERE pub_generation <> ''")
            .await
    };
    until("it is marked", async || marked().await > 0).await;
    assert_eq!((marked().await, fixture.backlog().await), (1, 3002));
    assert!(
        fixture
            .store
            .due(i64::MAX, 10, &HashSet::new())
            .await
            .unwrap()
            .is_empty()
    );
    watchdog.stop().await;
}
