//! The watchdog's sweeps: spent elements leave the lanes of a shard sooner than others come. A
//! shard in which nothing can leave costs nothing.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use parking_lot::Mutex;
use redis::AsyncCommands;
use taskd::{
    bus::redis_streams::RedisStreams,
    config::Settings,
    model::{ChangingTask, NewTask, Priority, TaskId, WorkerName},
    pipelines::discovery,
    queue::Claim,
    redis_pool::{Redis, Script, scripts},
    runtime::Supervisor,
    store::Store,
};
use tokio::task::JoinHandle;

use crate::{
    support::{
        process::Process,
        redis::{Fsync, RedisServer},
        sqlite::SqliteFile,
        store_contract::Database,
        until,
    },
    tasks_service::shard,
};

/// With a page in each quarter of a second, they would take longer than the test waits.
const SPENT: usize = 400_000;
const AT_ONCE: usize = 1000;

/// A process with queues, before its watchdog starts.
struct Fixture {
    process: Process,
    discovery: discovery::Handle,
    settings: Arc<Settings>,
    supervisor: Supervisor,
    redis: Redis,
    server: RedisServer,
    _database: SqliteFile,
}

impl Fixture {
    async fn new() -> Self {
        let (server, database) = (
            RedisServer::start(Fsync::EverySecond),
            SqliteFile::create().await,
        );
        let redis = Redis::connect(&server.url(), "t").await.unwrap();
        let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
        let store: Arc<dyn Store> = database.open().await;
        let (process, supervisor) = (Process::new(&redis, &store, bus), Supervisor::new());
        let settings = Arc::new(Settings::default());
        process.fanout(&settings, &supervisor);
        let discovery = process.discovery(&settings, &supervisor);
        Self {
            process,
            discovery,
            settings,
            supervisor,
            redis,
            server,
            _database: database,
        }
    }

    /// Inserts a task, and waits until it is in the queue.
    async fn insert(&self, queue: &str, key: &'static str, replicas: u32) -> TaskId {
        let open = async || {
            self.process
                .queue
                .stats(&shard(queue))
                .await
                .map_or(0, |stats| stats.open)
        };
        let before = open().await;
        let task = NewTask {
            queue: queue.into(),
            key: key.into(),
            replicas: Some(replicas),
            ..Default::default()
        };
        let inserted = self.discovery.insert(vec![task]).await.unwrap().remove(0);
        until("it is in the queue", async || open().await > before).await;
        inserted.id.unwrap()
    }

    /// The worker gets one task.
    async fn claim(&self, queue: &str, worker: &str) {
        let worker = WorkerName::new(worker).unwrap();
        let claim = Claim {
            worker,
            max_tasks: 1,
            max_bytes: 1 << 20,
            is_first: true,
            lease: None,
            priority: None,
        };
        let known = self.process.queue.shards_of(&shard(queue).queue).remove(0);
        let granted = self
            .process
            .queue
            .worker
            .claim(&known, claim)
            .await
            .unwrap();
        granted.delivery.delivered();
        assert_eq!(granted.tasks.len(), 1);
    }

    async fn has(&self, key: &str) -> bool {
        self.redis.conn().exists(key).await.unwrap()
    }

    fn start_watchdog(&self) {
        self.process.watchdog(&self.settings, &self.supervisor);
    }

    async fn stop(self) {
        self.supervisor.stop();
        self.supervisor.wait().await;
    }
}

#[tokio::test]
async fn what_lies_behind_a_task_that_waits_for_its_last_worker_is_swept_without_a_pause() {
    let f = Fixture::new().await;
    f.insert("q", "k", 2).await;
    let (lane, mut connection) = ("t:{q:0}:m:T", f.redis.conn());
    let element: Vec<u8> = connection.lindex(lane, 0).await.unwrap();
    // Of tasks that are gone.
    for _ in 0..SPENT / AT_ONCE {
        let spent = |_| [&element[..element.len() - 16], TaskId::new().as_bytes()].concat();
        let () = connection
            .lpush(lane, (0..AT_ONCE).map(spent).collect::<Vec<_>>())
            .await
            .unwrap();
    }
    f.start_watchdog();
    let length = async || f.redis.conn().llen::<_, usize>(lane).await.unwrap();
    until("the task is alone", async || length().await == 1).await;
    f.stop().await;
}

/// The calls that Redis has got since.
struct Calls(Arc<Mutex<Vec<String>>>, JoinHandle<()>);

impl Calls {
    async fn watch(server: &RedisServer) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        let mut lines = client
            .get_async_monitor()
            .await
            .unwrap()
            .into_on_message::<String>();
        let calls = Arc::<Mutex<Vec<String>>>::default();
        let noted = Arc::clone(&calls);
        let watching = tokio::spawn(async move {
            while let Some(line) = lines.next().await {
                noted.lock().push(line);
            }
        });
        Self(calls, watching)
    }

    /// How often the script was called for each of the queues.
    fn count(&self, script: &Script, queues: [&str; 2]) -> [usize; 2] {
        let of = |queue| format!("t:{{{queue}:0}}:");
        let calls = self.0.lock();
        queues.map(|queue| {
            let is_call = |line: &&String| line.contains(script.sha()) && line.contains(&of(queue));
            calls.iter().filter(is_call).count()
        })
    }
}

#[tokio::test]
async fn a_shard_whose_sweep_removes_nothing_is_swept_again_when_something_has_changed() {
    let f = Fixture::new().await;
    // A task waits at the tail, and the newer one behind it is cancelled.
    f.insert("cancelled", "old", 1).await;
    let id = f.insert("cancelled", "new", 1).await;
    let new = ChangingTask {
        id,
        shard: shard("cancelled"),
        replicas: 1,
        priority: Priority::Medium,
        epoch: 0,
    };
    f.process
        .queue
        .upkeep
        .changer()
        .cancel(&shard("cancelled"), &[&new])
        .await
        .unwrap();
    // A task waits for its second worker, and the first one has passed it.
    f.insert("missing", "k", 2).await;
    f.claim("missing", "w").await;

    let calls = Calls::watch(&f.server).await;
    let count = |script| calls.count(script, ["cancelled", "missing"]);
    f.start_watchdog();
    until("each is swept", async || {
        count(&scripts::SWEEP).iter().all(|sweeps| *sweeps > 0)
    })
    .await;
    let (sweeps, looks) = (count(&scripts::SWEEP), count(&scripts::LOOK));
    until("there were three looks", async || {
        (0..2).all(|n| count(&scripts::LOOK)[n] >= looks[n] + 3)
    })
    .await;
    assert_eq!(count(&scripts::SWEEP), sweeps, "nothing has changed");

    let changed = Instant::now();
    f.claim("cancelled", "w").await;
    f.claim("missing", "v").await;
    until("the spent element is gone", async || {
        !f.has("t:{cancelled:0}:m:T").await
    })
    .await;
    until("the pointer is gone", async || {
        !f.has("t:{missing:0}:m:P").await
    })
    .await;
    assert!(
        changed.elapsed() < Duration::from_secs(20),
        "the change was not seen"
    );
    calls.1.abort();
    f.stop().await;
}
