//! A process must not choose a partition while others know more partitions than it does.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use taskd::{
    bus::{Reading, Record, Topic, redis_streams::RedisStreams},
    config::Settings,
    model::{self, NewTask, QueueName, ShardId, TaskId, validate},
    pipelines::{
        checking::{Failed, Published},
        publishing,
    },
    redis_pool::Redis,
    runtime::Supervisor,
    store::{Store, Stretch, Turn, sqlite::SqliteStore},
};

use crate::support::{
    process::Process,
    redis::{Fsync, RedisServer},
    sqlite::SqliteFile,
    store_contract::Database,
    until,
};

struct Fixture {
    redis: Redis,
    store: Arc<dyn Store>,
    _server: RedisServer,
    _database: SqliteFile,
}

impl Fixture {
    async fn start() -> Self {
        let (server, database) = (
            RedisServer::start(Fsync::EverySecond),
            SqliteFile::create().await,
        );
        let redis = Redis::connect(&server.url(), "t").await.unwrap();
        let store: Arc<dyn Store> =
            Arc::new(SqliteStore::open(&database.path(), None).await.unwrap());
        Self {
            redis,
            store,
            _server: server,
            _database: database,
        }
    }

    /// As one process opens it.
    async fn process(&self, partitions: u32) -> Process {
        let bus = Arc::new(
            RedisStreams::open(self.redis.clone(), "", partitions)
                .await
                .unwrap(),
        );
        Process::new(&self.redis, &self.store, bus)
    }
}

impl Fixture {
    /// How often a script asked where a partition begins and ends.
    async fn asked(&self) -> u64 {
        let stats: String = redis::cmd("INFO")
            .arg("commandstats")
            .query_async(&mut self.redis.conn())
            .await
            .unwrap();
        let calls = stats
            .lines()
            .find_map(|line| line.strip_prefix("cmdstat_xinfo|stream:calls="));
        calls
            .and_then(|rest| rest.split(',').next()?.parse().ok())
            .unwrap_or(0)
    }
}

/// A task of the shard with this number.
fn task(settings: &Settings, key: &str, partition: u32) -> model::TaskRow {
    let new = NewTask {
        queue: "q".into(),
        key: key.to_owned().into(),
        ..Default::default()
    };
    let row = validate::task_row(
        new,
        TaskId::new(),
        &settings.task_rules("q"),
        1,
        model::now_unix_ms(),
    )
    .unwrap();
    model::TaskRow { partition, ..row }
}

#[tokio::test]
async fn a_task_of_a_partition_that_a_process_does_not_know_is_left_to_others() {
    let fixture = Fixture::start().await;
    let (settings, old) = (Settings::default(), fixture.process(2).await);
    old.bus.raise_partitions(Topic::Pipeline, 5).await.unwrap();
    let rows = [task(&settings, "a", 0), task(&settings, "b", 4)];
    let new_rows: Vec<_> = rows
        .iter()
        .map(|row| publishing::new_row(row.clone(), &old.gates, &settings))
        .collect();
    fixture.store.insert(&new_rows).await.unwrap();
    let turns: Vec<_> = rows.iter().map(|row| (row, Turn::FIRST)).collect();

    // In partition 0 it would be handed out a second time when it stands in 4 already.
    let refused = old
        .publisher(&Arc::default())
        .publish(&turns, true)
        .await
        .unwrap_err();
    assert!(refused.is_lost(), "{refused}");
    assert_eq!(old.bus.backlog(Topic::Pipeline).await.unwrap(), 0);
    let new = fixture.process(2).await;
    let last = new
        .publisher(&Arc::default())
        .publish(&turns, true)
        .await
        .unwrap();
    assert_eq!(last.into_keys().collect::<Vec<_>>(), [0, 4]);

    // On a bus that began anew with fewer it goes to one of those.
    redis::cmd("FLUSHALL")
        .query_async::<()>(&mut fixture.redis.conn())
        .await
        .unwrap();
    let anew = fixture.process(2).await;
    let last = anew
        .publisher(&Arc::default())
        .publish(&turns, true)
        .await
        .unwrap();
    assert_eq!(last.into_keys().collect::<Vec<_>>(), [0]);
}

#[tokio::test]
async fn tasks_of_a_shard_that_another_process_has_just_opened_are_not_missing() {
    let fixture = Fixture::start().await;
    let (settings, supervisor) = (Arc::new(Settings::default()), Supervisor::new());
    let (opens, compares) = (fixture.process(1).await, fixture.process(1).await);
    let row = task(&settings, "a", 0);
    fixture
        .store
        .insert(&[publishing::new_row(row.clone(), &opens.gates, &settings)])
        .await
        .unwrap();
    opens
        .publisher(&settings)
        .publish(&[(&row, Turn::FIRST)], false)
        .await
        .unwrap();
    opens.fanout(&settings, &supervisor);
    until("the fanout has read it", async || {
        opens.bus.backlog(Topic::Pipeline).await.unwrap() == 0
    })
    .await;

    let published = Published::new(
        fixture.store.clone(),
        compares.queue.shards.clone(),
        compares.bus.clone(),
    );
    let page = published
        .page(Stretch::ALL, 10, &mut Failed::OfCheck(&mut BTreeMap::new()))
        .await
        .unwrap();
    assert_eq!((page.tasks, page.missing), (1, vec![]));
    supervisor.stop();
    supervisor.wait().await;
}

#[tokio::test]
async fn a_lost_shard_waits_for_reports_in_every_partition() {
    let fixture = Fixture::start().await;
    let settings = Arc::new(Settings {
        watchdog: taskd::config::Watchdog {
            reconcile_every: Duration::from_millis(10),
            ..Default::default()
        },
        ..Default::default()
    });
    let process = fixture.process(3).await;
    let (bus, queue) = (Arc::clone(&process.bus), process.queue.clone());
    // The shard's reports went to partition 2 when there were other numbers of partitions, and
    // nobody has read them.
    let report = Record {
        partition: 2,
        value: "report".into(),
    };
    bus.publish(Topic::TaskResults, &[report]).await.unwrap();
    let shard = ShardId {
        queue: QueueName::new("q").unwrap(),
        number: 0,
    };
    fixture
        .store
        .open_shards(std::slice::from_ref(&shard))
        .await
        .unwrap();
    let row = task(&settings, "a", 0);
    fixture
        .store
        .insert(&[publishing::new_row(row.clone(), &process.gates, &settings)])
        .await
        .unwrap();
    process
        .publisher(&Arc::default())
        .publish(&[(&row, Turn::FIRST)], false)
        .await
        .unwrap();
    assert!(
        fixture
            .store
            .due(i64::MAX, 10, &std::collections::HashSet::new())
            .await
            .unwrap()
            .is_empty()
    );

    let supervisor = Supervisor::new();
    process.sync_queues(&supervisor).await;
    process.watchdog(&settings, &supervisor);
    // It asks and asks where the topic stands: by then, one that does not wait has brought the
    // shard back.
    until("it asks", async || fixture.asked().await > 30).await;
    assert_eq!(
        queue
            .upkeep
            .generations(std::slice::from_ref(&shard))
            .await
            .unwrap()[0],
        None,
        "it was brought back before its reports were read"
    );

    let mut reader = bus
        .subscribe(Topic::TaskResults, Reading::Shared)
        .await
        .unwrap();
    let reports = reader.next(10).await.unwrap();
    reader.commit(&reports).await.unwrap();
    until("it is brought back", async || {
        queue
            .upkeep
            .generations(std::slice::from_ref(&shard))
            .await
            .unwrap()[0]
            == Some(2)
    })
    .await;
    supervisor.stop();
    supervisor.wait().await;
}
