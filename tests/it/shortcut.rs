//! Tasks that go from SQL into the queue, past the bus: which do, which may not, and that none is
//! handed out twice.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::poll;
use redis::AsyncCommands;
use taskd::{
    bus::{Bus, Topic, redis_streams::RedisStreams},
    config::Settings,
    model::{
        InsertStatus, NewTask, Offset, QueueName, ShardId, TaskId, TaskRow, limit_hash, now_unix_ms,
    },
    pipelines::{
        admission::Shortage,
        checking::{Failed, Published},
        discovery::Handle,
        shortcut::{Moment, Shortcut},
    },
    redis_pool::Redis,
    runtime::Supervisor,
    store::{self, NewRow, Store, Stretch, Turn, Unpublished},
};

use crate::support::{
    process::{Process, work_off},
    redis::{Fsync, RedisServer},
    sqlite::SqliteFile,
    store_contract::{Database, completed, row},
    until,
};

/// A process with discovery, fanout and the shortcut between them.
struct Fixture {
    redis: Redis,
    bus: Arc<RedisStreams>,
    store: Arc<dyn Store>,
    process: Process,
    shortcut: Shortcut,
    discovery: Handle,
    supervisor: Supervisor,
    shard: ShardId,
    _server: RedisServer,
    _database: SqliteFile,
}

impl Fixture {
    async fn start(change: impl FnOnce(&mut Settings)) -> Self {
        let (server, database) = (
            RedisServer::start(Fsync::EverySecond),
            SqliteFile::create().await,
        );
        let redis = Redis::connect(&server.url(), "t").await.unwrap();
        let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
        let store = database.open().await;
        let mut settings = Settings::default();
        change(&mut settings);
        let settings = Arc::new(settings);
        let mut process = Process::new(&redis, &store, bus.clone());
        let (shortcut, supervisor) = (process.make_shortcut(&settings), Supervisor::new());
        process.fanout(&settings, &supervisor);
        let discovery = process.discovery(&settings, &supervisor);
        let shard = ShardId {
            queue: QueueName::new("q").unwrap(),
            number: 0,
        };
        let (_server, _database) = (server, database);
        let fixture = Self {
            redis,
            bus,
            store,
            process,
            shortcut,
            discovery,
            supervisor,
            shard,
            _server,
            _database,
        };
        fixture.open().await;
        fixture
    }

    /// The first task opens the shard. With the second one the process asks for the fence.
    async fn open(&self) {
        for number in 0..2 {
            self.insert(&format!("first {number}")).await;
            self.has_open(number + 1).await;
        }
    }

    async fn insert(&self, key: &str) -> TaskId {
        self.insert_into("q", key).await
    }

    async fn insert_into(&self, queue: &str, key: &str) -> TaskId {
        let task = NewTask {
            queue: queue.into(),
            key: key.to_owned().into(),
            ..Default::default()
        };
        let answer = self.discovery.insert(vec![task]).await.unwrap().remove(0);
        assert_eq!(answer.status, InsertStatus::Created);
        answer.id.unwrap()
    }

    async fn has_open(&self, count: u64) {
        let queue = &self.process.queue;
        until("they are in the queue", async || {
            queue
                .stats(&self.shard)
                .await
                .is_ok_and(|s| s.open == count)
        })
        .await;
    }

    /// New tasks in SQL that no loop sends anywhere.
    async fn stored(&self, count: usize) -> Vec<(TaskRow, Turn)> {
        let rows: Vec<_> = (0..count)
            .map(|_| in_shard(row("q", TaskId::new().as_bytes())))
            .collect();
        let stored = self.store.insert(&rows).await.unwrap();
        let turns: Vec<Turn> = rows.iter().filter_map(|row| stored.turn_of(row)).collect();
        rows.into_iter().map(|row| row.task).zip(turns).collect()
    }

    async fn send(&self, rows: &[(TaskRow, Turn)], stored_behind: Moment) -> Outcome {
        let sent = self.shortcut.send(&borrowed(rows), stored_behind).await;
        let ids = |published: &store::Published| {
            published
                .tasks
                .iter()
                .map(|(id, _)| *id)
                .collect::<Vec<_>>()
        };
        Outcome {
            taken: sent.published.iter().flat_map(ids).collect(),
            rest: sent.rest.iter().map(|(row, _)| row.id).collect(),
            again: sent.again.iter().map(|(row, _)| row.id).collect(),
        }
    }

    async fn end(&self) -> Option<Offset> {
        self.bus.ends(Topic::Pipeline).await.unwrap()[0]
    }

    async fn stop(self) {
        self.supervisor.stop();
        self.supervisor.wait().await;
    }
}

#[derive(Debug, Default, PartialEq)]
struct Outcome {
    taken: Vec<TaskId>,
    rest: Vec<TaskId>,
    again: Vec<TaskId>,
}

impl Outcome {
    fn taken(rows: &[(TaskRow, Turn)]) -> Self {
        Self {
            taken: ids(rows),
            ..Self::default()
        }
    }

    fn left(rows: &[(TaskRow, Turn)]) -> Self {
        Self {
            rest: ids(rows),
            ..Self::default()
        }
    }

    fn refused(rows: &[(TaskRow, Turn)]) -> Self {
        Self {
            again: ids(rows),
            ..Self::default()
        }
    }
}

/// In the only partition that there is.
fn in_shard(row: NewRow) -> NewRow {
    NewRow {
        task: TaskRow {
            partition: 0,
            ..row.task
        },
        ..row
    }
}

fn ids(rows: &[(TaskRow, Turn)]) -> Vec<TaskId> {
    rows.iter().map(|(row, _)| row.id).collect()
}

fn borrowed(rows: &[(TaskRow, Turn)]) -> Vec<(&TaskRow, Turn)> {
    rows.iter().map(|(row, turn)| (row, *turn)).collect()
}

#[tokio::test]
async fn tasks_of_the_same_process_are_never_on_the_bus() {
    let f = Fixture::start(|_| {}).await;
    let end = f.end().await;
    let mut ids = Vec::new();
    for number in 0..5 {
        ids.push(f.insert(&number.to_string()).await);
        f.has_open(number + 3).await;
    }
    assert_eq!(f.end().await, end);

    // SQL knows that they are out, and would miss them.
    let published = Published::new(
        f.store.clone(),
        f.process.queue.shards.clone(),
        f.bus.clone(),
    );
    let first = f
        .store
        .on_bus(Stretch::ALL, 100)
        .await
        .unwrap()
        .tasks
        .remove(&f.shard)
        .unwrap();
    assert_eq!(first.len(), 7);
    let marked = async || {
        f.store
            .published_among(f.bus.generation(), &first)
            .await
            .unwrap()
            .len()
    };
    until("all are marked", async || marked().await == 7).await;
    let mut unchecked = BTreeMap::new();
    let mut failed = Failed::OfCheck(&mut unchecked);
    assert_eq!(
        published
            .page(Stretch::ALL, 100, &mut failed)
            .await
            .unwrap()
            .missing,
        []
    );
    let () = f
        .redis
        .conn()
        .hdel("t:{q:0}:bodies", &ids[3].as_bytes()[..])
        .await
        .unwrap();
    assert_eq!(
        published
            .page(Stretch::ALL, 100, &mut failed)
            .await
            .unwrap()
            .missing,
        [(f.shard.clone(), ids[3])]
    );
    f.stop().await;
}

/// Held up between SQL and Redis, until the watchdog has published its tasks, and they are done and
/// forgotten.
#[tokio::test]
async fn a_process_that_was_held_up_is_refused() {
    let f = Fixture::start(|_| {}).await;
    let before = f.shortcut.moment();
    let rows = f.stored(2).await;
    f.process
        .publisher(&Arc::default())
        .publish(&borrowed(&rows), true)
        .await
        .unwrap();
    f.has_open(4).await;
    for id in ids(&rows) {
        let () = f
            .redis
            .conn()
            .hdel("t:{q:0}:bodies", &id.as_bytes()[..])
            .await
            .unwrap();
    }
    assert_eq!(f.send(&rows, before).await, Outcome::refused(&rows));
    // For tasks that are stored later the fence is known, when the pause is over.
    let rows = f.stored(1).await;
    until("it is asked", async || {
        f.send(&rows, f.shortcut.moment()).await == Outcome::taken(&rows)
    })
    .await;
    f.stop().await;
}

/// A refused task goes by the bus, flagged, and moves the fence once more.
#[tokio::test]
async fn a_fence_that_moves_keeps_tasks_away_for_a_moment() {
    let f = Fixture::start(|_| {}).await;
    f.process
        .publisher(&Arc::default())
        .publish(&borrowed(&f.stored(1).await), true)
        .await
        .unwrap();
    f.has_open(3).await;
    let before = f.end().await;
    f.insert("refused").await;
    f.has_open(4).await;
    assert_ne!(f.end().await, before);
    let mut open = 4;
    until("tasks pass by the bus again", async || {
        let before = f.end().await;
        open += 1;
        f.insert(&open.to_string()).await;
        f.has_open(open).await;
        f.end().await == before
    })
    .await;
    f.stop().await;
}

#[tokio::test]
async fn a_fence_that_was_learned_behind_the_store_counts_for_nothing() {
    let f = Fixture::start(|_| {}).await;
    let (fresh, rows) = (
        Shortcut::new(
            f.process.queue.enqueuer.clone(),
            f.process.gates.clone(),
            Arc::default(),
        ),
        f.stored(1).await,
    );
    let before = fresh.moment();
    for _ in 0..2 {
        let sent = fresh.send(&borrowed(&rows), before).await;
        assert_eq!(
            (sent.published.len(), sent.rest.len(), sent.again.len()),
            (0, 1, 0)
        );
    }
    assert_eq!(
        fresh
            .send(&borrowed(&rows), fresh.moment())
            .await
            .published
            .len(),
        1
    );
    f.stop().await;
}

#[tokio::test]
async fn tasks_do_not_overtake_those_on_the_bus() {
    let f = Fixture::start(|_| {}).await;
    let (now, rows) = (f.shortcut.moment(), f.stored(2).await);
    let offset = Offset {
        major: u64::MAX,
        minor: 0,
    };
    f.shortcut.went_by_bus(&[store::Published {
        partition: 0,
        offset,
        tasks: vec![],
    }]);
    {
        let mut sending = Box::pin(f.send(&rows[..1], now));
        assert!(
            poll!(&mut sending).is_pending(),
            "the fanout has not read that far"
        );
        f.shortcut.note_read(0, offset);
        assert_eq!(sending.await, Outcome::taken(&rows[..1]));
    }
    // A fanout that does not read holds up nobody for long.
    let offset = Offset {
        major: u64::MAX,
        minor: 1,
    };
    f.shortcut.went_by_bus(&[store::Published {
        partition: 0,
        offset,
        tasks: vec![],
    }]);
    assert_eq!(f.send(&rows[1..], now).await, Outcome::left(&rows[1..]));
    f.stop().await;
}

#[tokio::test]
async fn tasks_do_not_overtake_those_that_the_fanout_holds() {
    let f = Fixture::start(|_| {}).await;
    let (now, rows) = (f.shortcut.moment(), f.stored(1).await);
    let offset = Offset {
        major: u64::MAX,
        minor: 0,
    };
    f.shortcut.went_by_bus(&[store::Published {
        partition: 0,
        offset,
        tasks: vec![],
    }]);
    f.shortcut.note_read(0, offset);
    let held_back = f.shortcut.hold_back(&f.shard);
    assert_eq!(f.send(&rows, now).await, Outcome::left(&rows));
    assert!(!f.shortcut.fences(vec![f.shard.clone()]).await.has(0));
    // The fanout has let go of them, and reads them again.
    drop(held_back);
    assert_eq!(f.send(&rows, now).await, Outcome::left(&rows));
    f.shortcut.note_read(0, offset);
    assert_eq!(f.send(&rows, now).await, Outcome::taken(&rows));
    f.stop().await;
}

#[tokio::test]
async fn what_a_full_queue_does_not_take_goes_by_the_bus() {
    let f = Fixture::start(|settings| settings.queues.default.high_water_tasks = 4).await;
    let (now, rows) = (f.shortcut.moment(), f.stored(3).await);
    let sent = f.send(&rows, now).await;
    assert_eq!(
        sent,
        Outcome {
            taken: ids(&rows[..2]),
            rest: ids(&rows[2..]),
            again: vec![]
        }
    );
    // The fanout parks it.
    f.process
        .publisher(&Arc::default())
        .publish(&borrowed(&rows[2..]), false)
        .await
        .unwrap();
    until("the queue is closed", async || {
        f.process.gates.is_closed(&f.shard.queue)
    })
    .await;
    let now = f.shortcut.moment();
    assert_eq!(f.send(&rows[2..], now).await, Outcome::left(&rows[2..]));
    f.stop().await;
}

/// Tasks that wait in SQL for room, as a watchdog has read them.
async fn waiting(f: &Fixture, count: usize) -> Vec<(TaskRow, Turn)> {
    let rows: Vec<_> = f.stored(count).await;
    f.store
        .unpublish(&ids(&rows), Unpublished::Parked)
        .await
        .unwrap();
    let parked = f
        .store
        .parked(&f.shard.queue, 100, &HashSet::new())
        .await
        .unwrap();
    assert!(parked.iter().all(|row| row.is_as_new));
    parked.into_iter().map(|row| (row.task, row.turn)).collect()
}

#[tokio::test]
async fn what_waited_for_room_passes_by_the_bus_as_often_as_it_is_released() {
    let f = Fixture::start(|settings| settings.queues.default.high_water_tasks = 4).await;
    let rows = waiting(&f, 3).await;
    // There is room for two. A watchdog that is killed before it marks them finds them again.
    for _ in 0..2 {
        let fences = f.shortcut.fences(vec![f.shard.clone()]).await;
        let released = f.shortcut.release(&borrowed(&rows), &fences).await;
        assert!(!released.has_moved && released.error.is_none());
        assert_eq!(
            released.published[0]
                .tasks
                .iter()
                .map(|(id, _)| *id)
                .collect::<Vec<_>>(),
            ids(&rows[..2])
        );
        f.has_open(4).await;
    }
    f.stop().await;
}

/// Held up between SQL and Redis, until a task that another watchdog had released is done and
/// forgotten.
#[tokio::test]
async fn a_watchdog_that_was_held_up_is_refused() {
    let f = Fixture::start(|_| {}).await;
    let rows = waiting(&f, 1).await;
    let look = async || f.shortcut.fences(vec![f.shard.clone()]).await;
    assert_eq!(
        f.shortcut
            .release(&borrowed(&rows), &look().await)
            .await
            .published
            .len(),
        1
    );
    f.has_open(3).await;
    // The mark is missing. Another watchdog looks at the fence, and finds the row.
    let fences = look().await;
    work_off(&f.process.queue, &f.shard).await;
    f.has_open(0).await;
    let released = f.shortcut.release(&borrowed(&rows), &fences).await;
    assert!(released.has_moved && released.published.is_empty() && released.error.is_none());
    f.has_open(0).await;
    f.stop().await;
}

/// Tasks of one limit key, more than a shard takes of it that is half full.
async fn a_crowd(f: &Fixture) -> Vec<(TaskRow, Turn)> {
    let mut rows: Vec<NewRow> = (0..100)
        .map(|_| in_shard(row("q", TaskId::new().as_bytes())))
        .collect();
    for row in &mut rows {
        row.task.limit_key = "example.org".to_owned();
        // New ones: those that are late are flagged as sent again.
        row.task.created_unix_ms = now_unix_ms();
    }
    let stored = f.store.insert(&rows).await.unwrap();
    let turns: Vec<Turn> = rows.iter().filter_map(|row| stored.turn_of(row)).collect();
    rows.into_iter().map(|row| row.task).zip(turns).collect()
}

/// Killed at each step: before the park, before the mark, before the mark of a refill, and after
/// the mark of the limit key was lost.
#[tokio::test]
async fn each_crowded_task_comes_once_whatever_step_was_the_last() {
    let f = Fixture::start(|settings| settings.queues.default.high_water_tasks = 12).await;
    let (now, rows) = (f.shortcut.moment(), a_crowd(&f).await);
    let (taken, crowd) = rows.split_at(64);
    let sent = f.shortcut.send(&borrowed(&rows), now).await;
    assert_eq!(sent.crowded, ids(crowd));
    assert_eq!(sent.published[0].tasks.len(), rows.len());
    f.has_open(66).await;
    // They are not parked, and come by the bus. The fanout parks them.
    f.process
        .publisher(&Arc::default())
        .publish(&borrowed(&rows), false)
        .await
        .unwrap();
    let key = limit_hash(&f.shard.queue, "example.org");
    let in_sql = async || {
        let rows = f
            .store
            .crowded(&f.shard.queue, &key, 1000, &HashSet::new())
            .await
            .unwrap();
        rows.into_iter()
            .map(|row| (row.task, row.turn))
            .collect::<Vec<_>>()
    };
    until("they are parked", async || {
        in_sql().await.len() == crowd.len()
    })
    .await;
    assert_eq!(ids(&in_sql().await), ids(crowd));
    // The late mark of the batch leaves them there.
    f.store
        .mark_published(f.bus.generation(), &sent.published)
        .await
        .unwrap();
    assert_eq!(ids(&in_sql().await), ids(crowd));
    f.has_open(2 + taken.len() as u64).await;

    // A watchdog that is killed before it marks what it has released finds it again.
    for _ in 0..2 {
        let some: Vec<_> = in_sql().await.into_iter().take(20).collect();
        let fences = f.shortcut.fences(vec![f.shard.clone()]).await;
        let released = f.shortcut.release(&borrowed(&some), &fences).await;
        assert!(!released.has_moved && released.error.is_none() && released.crowded.is_empty());
        assert_eq!(released.published[0].tasks.len(), 20);
        f.has_open(86).await;
    }
    // Redis has lost the mark, so only the walk finds the key.
    let () = f.redis.conn().del("t:{q:0}:crowded").await.unwrap();
    f.process
        .watchdog(&Arc::new(Settings::default()), &f.supervisor);
    until("none is crowded", async || in_sql().await.is_empty()).await;
    f.has_open(102).await;
    f.stop().await;
}

/// New tasks do not look at what was forgotten: the process knows none of it.
#[tokio::test]
async fn what_is_forgotten_does_not_keep_new_tasks_away() {
    let f = Fixture::start(|_| {}).await;
    let (before, rows) = (f.shortcut.moment(), f.stored(1).await);
    work_off(&f.process.queue, &f.shard).await;
    assert_eq!(f.send(&rows, before).await, Outcome::taken(&rows));
    f.stop().await;
}

/// Held up behind the store, until the watchdog of another process has published its task into a
/// full queue, which parked it, and it was released, done and forgotten.
#[tokio::test]
async fn a_process_that_was_held_up_until_its_task_was_parked_and_released_is_refused() {
    let f = Fixture::start(|_| {}).await;
    let before = f.shortcut.moment();
    let (rows, fences) = (
        waiting(&f, 1).await,
        f.shortcut.fences(vec![f.shard.clone()]).await,
    );
    let released = f.shortcut.release(&borrowed(&rows), &fences).await;
    assert_eq!(released.published.len(), 1);
    work_off(&f.process.queue, &f.shard).await;
    f.has_open(0).await;
    assert_eq!(f.send(&rows, before).await, Outcome::refused(&rows));
    f.has_open(0).await;
    f.stop().await;
}

#[tokio::test]
async fn the_watchdog_releases_what_waits_past_the_bus_but_for_what_has_a_past() {
    let f = Fixture::start(|_| {}).await;
    let settings = Arc::new(Settings::default());
    waiting(&f, 3).await;
    f.process.gates.close(&f.shard.queue);
    let before = f.end().await;
    f.process.watchdog(&settings, &f.supervisor);
    let parked = async || {
        f.store
            .parked(&f.shard.queue, 1, &HashSet::new())
            .await
            .unwrap()
    };
    until("none waits", async || parked().await.is_empty()).await;
    f.has_open(5).await;
    assert_eq!(f.end().await, before, "none was on the bus");
    until("the gate is open", async || {
        !f.process.gates.is_closed(&f.shard.queue)
    })
    .await;

    // One of its two workers has completed it: SQL is asked who.
    let mut half = in_shard(row("q", b"half done"));
    half.task.replicas = 2;
    half.due_unix_ms = i64::MAX >> 1;
    f.store.insert(std::slice::from_ref(&half)).await.unwrap();
    f.store.settle(&[completed(&half, "w")]).await.unwrap();
    f.store
        .unpublish(&[half.task.id], Unpublished::Parked)
        .await
        .unwrap();
    f.process.gates.close(&f.shard.queue);
    until("it does not wait any more", async || {
        parked().await.is_empty()
    })
    .await;
    f.has_open(6).await;
    assert_ne!(f.end().await, before);
    let record: Vec<u8> = f
        .redis
        .conn()
        .hget("t:{q:0}:records", &half.task.id.as_bytes()[..])
        .await
        .unwrap();
    assert!(record.contains(&b'w'), "{record:?}");
    f.stop().await;
}

/// Queues with open shards, and so many tasks each that wait in SQL for room.
async fn waiting_in(
    f: &Fixture,
    names: impl Iterator<Item = String>,
    count: usize,
) -> Vec<QueueName> {
    let mut queues = Vec::new();
    for name in names {
        f.insert_into(&name, "first").await;
        let queue = QueueName::new(&name).unwrap();
        let shard = ShardId {
            queue: queue.clone(),
            number: 0,
        };
        until("the shard is open", async || {
            f.process
                .queue
                .stats(&shard)
                .await
                .is_ok_and(|stats| stats.open == 1)
        })
        .await;
        let rows: Vec<_> = (0..count)
            .map(|_| in_shard(row(&name, TaskId::new().as_bytes())))
            .collect();
        f.store.insert(&rows).await.unwrap();
        let ids: Vec<_> = rows.iter().map(|row| row.task.id).collect();
        f.store.unpublish(&ids, Unpublished::Parked).await.unwrap();
        f.process.gates.close(&queue);
        queues.push(queue);
    }
    queues
}

#[tokio::test]
async fn a_shard_that_does_not_answer_holds_up_no_task_of_other_queues_that_waits_for_room() {
    let f = Fixture::start(|_| {}).await;
    let queues = waiting_in(&f, (0..6).map(|number| format!("q{number}")), 1).await;
    let (damaged, sound): (Vec<_>, Vec<_>) = queues
        .iter()
        .enumerate()
        .partition(|(number, _)| number % 2 == 0);
    for (_, queue) in damaged {
        let counters = format!("t:{{{queue}:0}}:counters");
        let () = f.redis.conn().del(&counters).await.unwrap();
        let () = f.redis.conn().set(&counters, "no hash").await.unwrap();
    }
    f.process
        .watchdog(&Arc::new(Settings::default()), &f.supervisor);
    for (_, queue) in sound {
        let is_released = async || {
            f.store
                .parked(queue, 1, &HashSet::new())
                .await
                .unwrap()
                .is_empty()
        };
        until("its task does not wait any more", is_released).await;
    }
    f.stop().await;
}

#[tokio::test]
async fn a_release_ends_when_redis_has_little_memory_left() {
    let f = Fixture::start(|_| {}).await;
    let queues = waiting_in(&f, (0..20).map(|number| format!("q{number}")), 16).await;
    let left = async || {
        let mut left = 0;
        for queue in &queues {
            left += f
                .store
                .parked(queue, 100, &HashSet::new())
                .await
                .unwrap()
                .len();
        }
        left
    };
    let mut settings = Settings::default();
    settings.watchdog.batch_max = 1;
    f.process.watchdog(&Arc::new(settings), &f.supervisor);
    until("the first ones are released", async || left().await < 320).await;
    f.process.gates.set_shortage(Some(Shortage {
        why: "as it is meant to".into(),
        is_full: false,
    }));
    let mut seen = (0, Instant::now());
    until("no more are released", async || {
        let now = left().await;
        if now != seen.0 {
            seen = (now, Instant::now());
        }
        seen.1.elapsed() > Duration::from_millis(200)
    })
    .await;
    assert!(seen.0 > 100, "of 320 tasks only {} wait", seen.0);
    f.process.gates.set_shortage(None);
    until("all are released", async || left().await == 0).await;
    f.stop().await;
}
