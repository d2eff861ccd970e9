//! `taskd fsck`, `taskd dump` and the watchdog's checks through the running binary: each planted
//! damage is found, named and mended, and a busy system has none.

use std::{collections::BTreeSet, process::Command, sync::Arc};

use nix::sys::signal::Signal;
use redis::{AsyncCommands as _, aio::MultiplexedConnection};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, SqliteConnection};
use taskd::{
    bus::redis_streams::RedisStreams,
    model::{FindKind, QueueName, ShardId, TaskId},
    pipelines::checking::{Checker, Pace},
    redis_pool::Redis,
};

use crate::support::{
    daemon::{Daemon, statuses},
    process::Process,
    redis::{Fsync, RedisServer},
    sqlite::SqliteFile,
    store_contract::Database as _,
    until,
};

/// Nothing but fsck mends.
const CONFIG: &str = "\
    partitions = 1\n\
    reconcile_every = \"1h\"\n\
    [queues.default]\n\
    lease = \"10m\"\n\
    backoff = [\"1h\"]\n";

fn taskd(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_taskd"))
        .args(args)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// Exit code and finds.
fn fsck(daemon: &Daemon, more: &[&str]) -> (i32, Vec<Value>) {
    let grpc = daemon.grpc();
    let args = [&["fsck", "--json", "--server", &grpc], more].concat();
    let (code, stdout, stderr) = taskd(&args);
    let finds: Vec<Value> = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(stderr.contains(" published tasks checked: "), "{stderr}");
    (code, finds)
}

fn key(name: &str) -> String {
    format!("taskd:{{q:0}}:{name}")
}

fn bytes(id: &str) -> Vec<u8> {
    id.parse::<TaskId>().unwrap().as_bytes().to_vec()
}

fn element(offer: u8, id: &str) -> Vec<u8> {
    [&[0x93, 1, offer, 0xb0][..], &bytes(id)].concat()
}

/// A task of each state, at rest.
struct Tasks {
    daemon: Daemon,
    redis: MultiplexedConnection,
    /// The first to be claimed, of several.
    waiting: String,
    held: String,
    backoff: String,
    near: String,
    done: String,
}

impl Tasks {
    async fn start() -> Self {
        Self::start_with(CONFIG).await
    }

    async fn start_with(config: &str) -> Self {
        let daemon = Daemon::start(config, &[]).await;
        let of = |key: &str| json!({"queue": "q", "key": key});
        let ids = daemon.insert(&["held", "backoff", "done"].map(of)).await;
        daemon
            .insert(&[json!({"queue": "other", "key": "sound"})])
            .await;
        let leased = daemon.lease_all("w", "q", 3).await;
        let of_key = |key: &str| {
            leased
                .iter()
                .find(|task| task["key"] == key)
                .unwrap()
                .clone()
        };
        assert_eq!(daemon.complete("w", &[of_key("done")]).await, ["OK"]);
        let back = of_key("backoff");
        let item =
            json!({"id": back["id"], "lease_token": back["lease_token"], "reason": "no luck"});
        let (status, _) = daemon
            .post(
                "/v1/tasks:reject",
                &json!({"worker": "w", "rejections": [item]}),
            )
            .await;
        assert_eq!(status, 200);
        let mut tasks: Vec<Value> = ["a", "b", "c"].map(of).into();
        tasks.push(json!({"queue": "q", "key": "near", "delay": "5m"}));
        let others = daemon.insert(&tasks).await;
        let redis = daemon.redis().await;
        let this = Self {
            redis,
            waiting: others[0].clone(),
            held: ids[0].clone(),
            backoff: ids[1].clone(),
            near: others[3].clone(),
            done: ids[2].clone(),
            daemon,
        };
        until("everything is at rest", async || {
            let (_, answer) = this.daemon.get("/v1/books?queue=q").await;
            let books = &answer["queues"][0];
            books["state"] == "BALANCED"
                && books["held"]["redis"]["live"] == 6
                && books["out"]["completed"] == 1
        })
        .await;
        assert_eq!(
            fsck(&this.daemon, &[]),
            (0, Vec::new()),
            "nothing is damaged yet"
        );
        this
    }

    async fn sql(&self, text: &str) {
        let url = format!("sqlite://{}", self.daemon.data().join("taskd.db").display());
        let mut connection = SqliteConnection::connect(&url).await.unwrap();
        sqlx::query("PRAGMA busy_timeout = 5000")
            .execute(&mut connection)
            .await
            .unwrap();
        sqlx::query(AssertSqlSafe(text))
            .execute(&mut connection)
            .await
            .unwrap();
        connection.close().await.unwrap();
    }

    /// The member of a sorted set that begins with the task's id.
    async fn member(&mut self, zset: &str, id: &str) -> Vec<u8> {
        let members: Vec<Vec<u8>> = self.redis.zrange(key(zset), 0, -1).await.unwrap();
        members
            .into_iter()
            .find(|member| member.starts_with(&bytes(id)))
            .unwrap()
    }

    /// Finds exactly this, changes nothing, then mends it, and finds nothing any more. Everything
    /// is done in the end.
    async fn found_and_mended(self, kinds: &[&str], task: Option<&str>, left: usize) {
        let Self { daemon, .. } = &self;
        let (code, finds) = fsck(daemon, &[]);
        let found: BTreeSet<&str> = finds
            .iter()
            .map(|find| find["kind"].as_str().unwrap())
            .collect();
        assert_eq!(
            (code, found),
            (1, kinds.iter().copied().collect()),
            "{finds:?}"
        );
        assert_eq!(finds.len(), kinds.len(), "{finds:?}");
        for find in &finds {
            assert_eq!(
                (&find["queue"], &find["mended"]),
                (&json!("q"), &json!(false)),
                "{find}"
            );
            assert!(
                !find["says"].as_str().unwrap().is_empty()
                    && !find["repair"].as_str().unwrap().is_empty()
            );
        }
        if let Some(task) = task {
            assert_eq!(finds[0]["task"], task, "{finds:?}");
        }
        assert_eq!(
            fsck(daemon, &["--queue", "other"]),
            (0, Vec::new()),
            "of another queue"
        );
        assert_eq!(
            fsck(daemon, &["--queue", "q"]).1,
            finds,
            "it is there still"
        );

        let (code, mended) = fsck(daemon, &["--repair"]);
        assert!(
            code == 0 && mended.iter().all(|find| find["mended"] == true),
            "{mended:?}"
        );
        until("everything is mended", async || {
            fsck(daemon, &[]) == (0, Vec::new())
        })
        .await;
        until("the books balance", async || {
            let (_, answer) = daemon.get("/v1/books?queue=q").await;
            answer["queues"][0]["state"] == "BALANCED"
        })
        .await;
        let waiting = daemon.lease_all("v", "q", left).await;
        let keys: BTreeSet<&str> = waiting
            .iter()
            .map(|task| task["key"].as_str().unwrap())
            .collect();
        assert_eq!(keys.len(), left, "{keys:?}");
        assert!(
            daemon
                .complete("v", &waiting)
                .await
                .iter()
                .all(|status| status == "OK")
        );
        let (_, acts) = daemon.get("/v1/acts").await;
        assert_eq!(
            (&acts["acts"][0]["what"], &acts["acts"][0]["on"]),
            (&json!("fsck --repair"), &json!("all queues"))
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_lease_found_and_mended() {
    let mut tasks = Tasks::start().await;
    let member = tasks.member("leases", &tasks.held.clone()).await;
    let _: i64 = tasks.redis.zrem(key("leases"), member).await.unwrap();
    let held = tasks.held.clone();
    tasks
        .found_and_mended(&["held_without_lease"], Some(&held), 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_nobody_holds_found_and_mended() {
    let mut tasks = Tasks::start().await;
    let member = [bytes(&tasks.waiting), b"99".to_vec()].concat();
    let far = 4_000_000_000_000_i64;
    let _: i64 = tasks.redis.zadd(key("leases"), member, far).await.unwrap();
    let waiting = tasks.waiting.clone();
    tasks
        .found_and_mended(&["lease_without_holder"], Some(&waiting), 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backoff_without_an_end_found_and_mended() {
    let mut tasks = Tasks::start().await;
    let member = tasks.member("delayed", &tasks.backoff.clone()).await;
    let _: i64 = tasks.redis.zrem(key("delayed"), member).await.unwrap();
    let backoff = tasks.backoff.clone();
    tasks
        .found_and_mended(&["waits_without_delay"], Some(&backoff), 4)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_time_was_lost_is_published_again_with_its_time() {
    let mut tasks = Tasks::start().await;
    let member = tasks.member("delayed", &tasks.near.clone()).await;
    let _: i64 = tasks.redis.zrem(key("delayed"), member).await.unwrap();
    let near = tasks.near.clone();
    tasks
        .found_and_mended(&["waits_without_delay"], Some(&near), 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delay_that_nothing_waits_for_found_and_mended() {
    let mut tasks = Tasks::start().await;
    let member = [bytes(&tasks.waiting), b"99".to_vec()].concat();
    let far = 4_000_000_000_000_i64;
    let _: i64 = tasks.redis.zadd(key("delayed"), member, far).await.unwrap();
    let waiting = tasks.waiting.clone();
    tasks
        .found_and_mended(&["delay_without_task"], Some(&waiting), 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_payload_is_found_and_comes_back_from_sql() {
    let mut tasks = Tasks::start().await;
    let _: i64 = tasks
        .redis
        .hdel(key("bodies"), bytes(&tasks.held))
        .await
        .unwrap();
    let held = tasks.held.clone();
    tasks
        .found_and_mended(&["lost_payload"], Some(&held), 4)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payload_without_a_task_found_and_mended() {
    let mut tasks = Tasks::start().await;
    let id = TaskId::new().to_string();
    let head = [bytes(&id), b"h".to_vec()].concat();
    let _: i64 = tasks
        .redis
        .hset(key("bodies"), head, "left behind")
        .await
        .unwrap();
    tasks
        .found_and_mended(&["body_without_task"], Some(&id), 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_cannot_be_read_is_found_and_comes_back_from_sql() {
    let mut tasks = Tasks::start().await;
    let _: i64 = tasks
        .redis
        .hset(key("records"), bytes(&tasks.waiting), b"\xc1")
        .await
        .unwrap();
    let waiting = tasks.waiting.clone();
    // A record that cannot be read counts as none, so the task is lost, too.
    tasks
        .found_and_mended(&["unreadable_record", "lost_task"], Some(&waiting), 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_task_without_an_element_found_and_mended() {
    let mut tasks = Tasks::start().await;
    let removed: i64 = tasks
        .redis
        .lrem(key("m:T"), 0, element(0, &tasks.waiting))
        .await
        .unwrap();
    assert_eq!(removed, 1);
    let waiting = tasks.waiting.clone();
    tasks
        .found_and_mended(&["open_without_element"], Some(&waiting), 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_element_that_is_there_twice_found_and_mended() {
    let mut tasks = Tasks::start().await;
    let _: i64 = tasks
        .redis
        .lpush(key("m:T"), element(0, &tasks.waiting))
        .await
        .unwrap();
    let waiting = tasks.waiting.clone();
    tasks
        .found_and_mended(&["element_twice"], Some(&waiting), 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_final_record_that_no_list_has_found_and_mended() {
    let mut tasks = Tasks::start().await;
    let removed: i64 = tasks
        .redis
        .lrem(key("finals"), 0, bytes(&tasks.done))
        .await
        .unwrap();
    assert_eq!(removed, 1);
    let done = tasks.done.clone();
    tasks
        .found_and_mended(&["final_not_listed"], Some(&done), 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_live_task_among_the_final_ones_found_and_mended() {
    let mut tasks = Tasks::start().await;
    let _: i64 = tasks
        .redis
        .rpush(key("finals"), bytes(&tasks.waiting))
        .await
        .unwrap();
    // ["L", 1, 0, [], [], [], 0, 0, [], [], 1, false, 1]: it was sent again, and the entry is of
    // its past end.
    let again = b"\x9d\xa1L\x01\x00\x90\x90\x90\x00\x00\x90\x90\x01\xc2\x01";
    let _: i64 = tasks
        .redis
        .hset(key("records"), bytes(&tasks.waiting), again)
        .await
        .unwrap();
    assert_eq!(fsck(&tasks.daemon, &[]), (0, Vec::new()));
    let _: i64 = tasks
        .redis
        .rpush(key("finals"), bytes(&tasks.waiting))
        .await
        .unwrap();
    let waiting = tasks.waiting.clone();
    tasks
        .found_and_mended(&["live_among_finals"], Some(&waiting), 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pointer_out_of_range_found_and_mended() {
    let mut tasks = Tasks::start().await;
    let _: i64 = tasks.redis.hset(key("m:P"), "x", 9999).await.unwrap();
    tasks
        .found_and_mended(&["pointer_out_of_range"], None, 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_counters_are_found_and_mended() {
    let mut tasks = Tasks::start().await;
    for (counter, by) in [
        ("live", 3),
        ("open", -1),
        ("open_bytes", 7),
        ("outbox_bytes", 1),
        ("front4", 1000),
    ] {
        let _: i64 = tasks
            .redis
            .hincr(key("counters"), counter, by)
            .await
            .unwrap();
    }
    let (_, finds) = fsck(&tasks.daemon, &[]);
    let says: Vec<&str> = finds
        .iter()
        .map(|find| find["says"].as_str().unwrap())
        .collect();
    assert_eq!(says.len(), 5, "{says:?}");
    assert!(
        says.contains(&"the counter live is 9, and should be 6"),
        "{says:?}"
    );
    tasks.found_and_mended(&["wrong_counter"; 5], None, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_ended_in_sql_and_not_in_redis_found_and_mended() {
    let tasks = Tasks::start().await;
    let waiting = tasks.waiting.clone();
    let id = waiting.replace('-', "");
    tasks
        .sql(&format!(
            "UPDATE tasks SET status = 2, on_bus = 0 WHERE id = X'{id}'"
        ))
        .await;
    tasks
        .sql("UPDATE queue_counts SET count = count - 1 WHERE queue = 'q' AND status = 0")
        .await;
    tasks
        .found_and_mended(&["ended_and_live"], Some(&waiting), 2)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_published_task_that_redis_does_not_have_found_and_mended() {
    let mut tasks = Tasks::start().await;
    let id = bytes(&tasks.waiting);
    let weight: i64 = redis::cmd("HSTRLEN")
        .arg(key("bodies"))
        .arg(&id)
        .query_async(&mut tasks.redis)
        .await
        .unwrap();
    let _: i64 = tasks.redis.hdel(key("records"), &id).await.unwrap();
    let _: i64 = tasks.redis.hdel(key("bodies"), &id).await.unwrap();
    let _: i64 = tasks
        .redis
        .lrem(key("m:T"), 0, element(0, &tasks.waiting))
        .await
        .unwrap();
    for (counter, by) in [("live", -1), ("open", -1), ("open_bytes", -weight - 400)] {
        let _: i64 = tasks
            .redis
            .hincr(key("counters"), counter, by)
            .await
            .unwrap();
    }
    let waiting = tasks.waiting.clone();
    tasks
        .found_and_mended(&["lost_task"], Some(&waiting), 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_nobody_would_publish_found_and_mended() {
    let tasks = Tasks::start().await;
    let waiting = tasks.waiting.clone();
    tasks
        .sql(&format!(
            "UPDATE tasks SET on_bus = 0 WHERE id = X'{}'",
            waiting.replace('-', "")
        ))
        .await;
    tasks
        .found_and_mended(&["stranded_task"], Some(&waiting), 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_that_stands_still_behind_a_finished_task_goes_on() {
    let tasks = Tasks::start().await;
    let of = |key: &str| json!({"queue": "q", "key": key, "sequence": "s"});
    tasks.daemon.insert(&["s1", "s2"].map(of)).await;
    until("the first one is in Redis", async || {
        let (_, answer) = tasks.daemon.get("/v1/books?queue=q").await;
        let books = &answer["queues"][0];
        books["state"] == "BALANCED" && books["held"]["redis"]["live"] == 7
    })
    .await;
    let done = tasks.done.clone();
    let head = done.replace('-', "");
    tasks
        .sql(&format!("UPDATE sequences SET head = X'{head}'"))
        .await;
    tasks
        .found_and_mended(&["broken_sequence"], Some(&done), 5)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_counts_of_sql_are_found_and_mended() {
    for by in [5, -2] {
        let tasks = Tasks::start().await;
        tasks
            .sql(&format!(
                "UPDATE queue_counts SET count = count + {by} WHERE queue = 'q' AND status = 0"
            ))
            .await;
        tasks
            .found_and_mended(&["wrong_queue_count"], None, 3)
            .await;
    }
}

/// `count` tasks of the queue that wait, and their ids.
async fn waiting(daemon: &Daemon, count: usize) -> Vec<String> {
    let tasks: Vec<Value> = (0..count)
        .map(|n| json!({"queue": "q", "key": n.to_string()}))
        .collect();
    let ids = daemon.insert(&tasks).await;
    until("they wait", async || {
        let (_, answer) = daemon.get("/v1/books?queue=q").await;
        let books = &answer["queues"][0];
        books["state"] == "BALANCED" && books["held"]["redis"]["waiting"] == count
    })
    .await;
    ids
}

/// How often the store has done this.
async fn operations(daemon: &Daemon, name: &str) -> f64 {
    let text = reqwest::get(format!("{}/metrics", daemon.http()))
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    let series = format!("taskd_sql_operation_duration_seconds_count{{operation=\"{name}\"}} ");
    text.lines()
        .find_map(|line| line.strip_prefix(&series))
        .map_or(0.0, |value| value.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn many_lost_tasks_are_confirmed_together() {
    let daemon = Daemon::start(CONFIG, &[]).await;
    waiting(&daemon, 300).await;
    let mut redis = daemon.redis().await;
    let _: i64 = redis
        .del(["records", "bodies", "m:T"].map(key).to_vec())
        .await
        .unwrap();
    for counter in ["live", "open", "open_bytes"] {
        let _: i64 = redis.hset(key("counters"), counter, 0).await.unwrap();
    }
    let before = operations(&daemon, "published").await;
    let (code, finds) = fsck(&daemon, &[]);
    assert_eq!((code, finds.len()), (1, 300));
    assert!(
        finds.iter().all(|find| find["kind"] == "lost_task"),
        "{finds:?}"
    );
    let asked = operations(&daemon, "published").await - before;
    // Twice for all that seem lost, the places of their batches, and their shards.
    assert!(
        asked > 0.0 && asked < 30.0,
        "{asked} statements for 300 tasks"
    );
    assert_eq!(fsck(&daemon, &["--repair"]).0, 0);
    assert_eq!(daemon.lease_all("v", "q", 300).await.len(), 300);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_of_many_damaged_records_goes_on_where_a_step_ended() {
    let daemon = Daemon::start(CONFIG, &[]).await;
    let ids = waiting(&daemon, 60).await;
    let mut redis = daemon.redis().await;
    for id in &ids[..50] {
        let _: i64 = redis
            .hset(key("records"), bytes(id), b"\xc1")
            .await
            .unwrap();
    }
    let (code, mended) = fsck(&daemon, &["--repair"]);
    let kinds = |kind: &str| {
        mended
            .iter()
            .filter(|find| find["kind"] == kind && find["mended"] == true)
            .count()
    };
    assert_eq!((code, kinds("unreadable_record")), (0, 50), "{mended:?}");
    until("all is well", async || {
        fsck(&daemon, &[]) == (0, Vec::new())
    })
    .await;
    assert_eq!(daemon.lease_all("v", "q", 60).await.len(), 60);
}

#[tokio::test]
async fn a_large_shard_is_compared_in_passes() {
    let (server, database) = (
        RedisServer::start(Fsync::EverySecond),
        SqliteFile::create().await,
    );
    let redis = Redis::connect(&server.url(), "taskd").await.unwrap();
    let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
    let store = database.open().await;
    let process = Process::new(&redis, &store, bus.clone());
    let shard = ShardId {
        queue: QueueName::new("q").unwrap(),
        number: 0,
    };
    let ids: Vec<TaskId> = (0..60).map(|_| TaskId::new()).collect();
    let mut pipe = redis::pipe();
    pipe.set(key("generation"), 1);
    for (n, id) in ids.iter().enumerate() {
        // Every seventh is in no lane, and every eleventh twice.
        pipe.hset(key("records"), id.as_bytes(), "1").hset(
            key("bodies"),
            id.as_bytes(),
            "\x02\0\0\0\x01\0\0\0\x01",
        );
        let times = if n.is_multiple_of(7) {
            0
        } else {
            1 + usize::from(n.is_multiple_of(11))
        };
        for _ in 0..times {
            pipe.lpush(key("m:T"), element(0, &id.to_string()));
        }
    }
    let (bytes, count) = (60 * (9 + 400), ids.len());
    pipe.hset_multiple(
        key("counters"),
        &[("live", count), ("open", count), ("open_bytes", bytes)],
    );
    let () = pipe.query_async(&mut redis.conn()).await.unwrap();

    for kept in [1_000, 30] {
        let checker = Checker::new(
            store.clone(),
            process.queue.shards.clone(),
            bus.clone(),
            Pace::FAST.keeping(kept),
        );
        let (found, Ok(())) = checker.shard(&shard, false).await else {
            panic!("the shard fails")
        };
        let of = |kind| found.finds.iter().filter(|find| find.kind == kind).count();
        assert_eq!(
            (of(FindKind::OpenWithoutElement), of(FindKind::ElementTwice)),
            (9, 5),
            "{kept}: {:?}",
            found.finds
        );
        assert_eq!(
            (found.finds.len(), found.more.len(), found.unchecked),
            (14, 0, 0),
            "{kept}"
        );
    }
    // A count that is too low: what has no room in a pass is not looked at, and counted.
    let () = redis::cmd("HSET")
        .arg(key("counters"))
        .arg(&["live", "0"])
        .query_async(&mut redis.conn())
        .await
        .unwrap();
    let checker = Checker::new(
        store.clone(),
        process.queue.shards.clone(),
        bus,
        Pace::FAST.keeping(20),
    );
    let (found, Ok(())) = checker.shard(&shard, true).await else {
        panic!("the shard fails")
    };
    assert_eq!(found.unchecked, 20);
    assert!(
        found
            .finds
            .iter()
            .any(|find| find.kind == FindKind::WrongCounter)
    );
    // Now the count is right.
    let (rest, Ok(())) = checker.shard(&shard, true).await else {
        panic!("the shard fails")
    };
    assert_eq!(
        (
            rest.unchecked,
            checker.shard(&shard, false).await.0.finds.len()
        ),
        (0, 0)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_questions_are_one_line() {
    let daemon = Daemon::start(CONFIG, &[]).await;
    let grpc = daemon.grpc();
    let (code, _, stderr) = taskd(&["fsck", "--server", &grpc, "--queue", "a b"]);
    assert_eq!((code, stderr.lines().count()), (2, 1), "{stderr}");
    let (code, _, stderr) = taskd(&["fsck", "--server", &grpc, "--queue", "nowhere"]);
    assert_eq!(code, 1, "{stderr}");
    assert!(
        stderr.contains("queue nowhere has no shard and no published task"),
        "{stderr}"
    );
    for (command, want) in [
        ("books", "queue nowhere has no task;"),
        ("dump", "queue nowhere has no open shard;"),
    ] {
        let (code, stdout, stderr) = taskd(&[command, "nowhere", "--server", &daemon.http()]);
        assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
        assert!(
            stderr.contains(want) && stderr.contains("; taskd stats lists the queues"),
            "{stderr}"
        );
    }
    let of_another = format!("tasks/p/{}", TaskId::new());
    let cursors = [
        (
            json!({"cursor": "elsewhere"}),
            "cursor \"elsewhere\" is none; send the one of the answer before",
        ),
        (
            json!({"queue": "q", "cursor": of_another}),
            "cursor is of queue p, not of q; send the one of the answer before",
        ),
    ];
    for (request, detail) in cursors {
        let (status, problem) = daemon.post("/v1/fsck", &request).await;
        assert_eq!((status, &problem["detail"]), (400, &json!(detail)));
    }
    assert_eq!(daemon.get("/v1/dump?queue=q&limit=0").await.0, 400);
    assert_eq!(daemon.get("/v1/dump?queue=q&shards=1").await.0, 400);
    let (_, acts) = daemon.get("/v1/acts").await;
    assert_eq!(acts["acts"], json!([]), "nothing was asked to be mended");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_watchdog_reports_and_mends_where_it_is_told_to() {
    let config = format!("repair = true\n{CONFIG}");
    let mut tasks = Tasks::start_with(&config).await;
    let _: i64 = tasks.redis.hset(key("m:P"), "x", 9999).await.unwrap();
    until("the watchdog mends it", async || {
        let pointers: Vec<String> = redis::cmd("HKEYS")
            .arg(key("m:P"))
            .query_async(&mut tasks.redis.clone())
            .await
            .unwrap();
        pointers.is_empty()
    })
    .await;
    until("it shows the round", async || {
        metric(&tasks.daemon, "pointer_out_of_range").await == Some(1.0)
    })
    .await;
    let find = "fsck: pointer_out_of_range q:0: x has passed 9999 of ";
    assert!(tasks.daemon.log().contains(find), "it logs a line for each");
    until("the next round is clean", async || {
        metric(&tasks.daemon, "pointer_out_of_range").await == Some(0.0)
    })
    .await;
}

/// The watchdog counts once a minute at most, and has a round every ten seconds.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_count_of_sql_is_shown_until_the_next_count() {
    let mut tasks = Tasks::start().await;
    tasks
        .sql("UPDATE queue_counts SET count = count + 5 WHERE queue = 'q' AND status = 0")
        .await;
    // A new process counts in its first round.
    tasks.daemon.kill9_and_restart();
    tasks.daemon.ready().await;
    until("a round shows it", async || {
        metric(&tasks.daemon, "wrong_queue_count").await == Some(1.0)
    })
    .await;
    let _: i64 = tasks
        .daemon
        .redis()
        .await
        .hset(key("m:P"), "x", 9999)
        .await
        .unwrap();
    until("a later round shows both", async || {
        metric(&tasks.daemon, "pointer_out_of_range").await == Some(1.0)
            && metric(&tasks.daemon, "wrong_queue_count").await == Some(1.0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_does_not_reach_redis_does_not_lead() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let leads = async || crate::traces::metric(&daemon, "taskd_watchdog_leading_processes ").await;
    until("it leads", async || leads().await == 1.0).await;
    assert!(daemon.signal_redis(Signal::SIGSTOP));
    until("it leads no longer", async || leads().await == 0.0).await;
    assert!(daemon.signal_redis(Signal::SIGCONT));
    until("it leads again", async || leads().await == 1.0).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_lost_the_lead_shows_no_differences() {
    let mut tasks = Tasks::start().await;
    let _: i64 = tasks.redis.hset(key("m:P"), "x", 9999).await.unwrap();
    until("a round shows it", async || {
        metric(&tasks.daemon, "pointer_out_of_range").await == Some(1.0)
    })
    .await;
    until("another process leads, and shows it", async || {
        let mut redis = tasks.redis.clone();
        let _: () = redis
            .pset_ex("taskd:lease:watchdog", "another", 4000)
            .await
            .unwrap();
        metric(&tasks.daemon, "pointer_out_of_range").await == Some(0.0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_that_fails_holds_up_no_round() {
    let mut tasks = Tasks::start().await;
    redis::cmd("RENAME")
        .arg("taskd:{other:0}:counters")
        .arg("taskd:{other:0}:away")
        .exec_async(&mut tasks.redis)
        .await
        .unwrap();
    let _: () = tasks
        .redis
        .set("taskd:{other:0}:counters", "no hash")
        .await
        .unwrap();
    let _: i64 = tasks.redis.hset(key("m:P"), "x", 9999).await.unwrap();
    until("a round shows it, and the shard that failed", async || {
        let text = reqwest::get(format!("{}/metrics", tasks.daemon.http()))
            .await
            .unwrap()
            .text()
            .await
            .unwrap();
        text.lines()
            .any(|line| line == "taskd_fsck_unchecked_shards 1")
            && metric(&tasks.daemon, "pointer_out_of_range").await == Some(1.0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fsck_names_a_shard_that_fails_and_checks_the_others() {
    let mut tasks = Tasks::start().await;
    let [counters, away, records] =
        ["counters", "away", "records"].map(|name| format!("taskd:{{other:0}}:{name}"));
    let _: () = tasks.redis.rename(&counters, &away).await.unwrap();
    // A task that nobody has had has no record of its own.
    for key in [&counters, &records] {
        let _: () = tasks.redis.set(key, "no hash").await.unwrap();
    }
    let _: i64 = tasks.redis.hset(key("m:P"), "x", 9999).await.unwrap();
    for (args, mended) in [
        (&["fsck", "--json"][..], false),
        (&["fsck", "--json", "--repair"], true),
    ] {
        let (code, stdout, stderr) = taskd(&[args, &["--server", &tasks.daemon.http()]].concat());
        let find: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(
            (code, &find["kind"], &find["mended"]),
            (1, &json!("pointer_out_of_range"), &json!(mended))
        );
        assert_eq!(
            stderr.matches("cannot check other:0: ").count(),
            1,
            "{stderr}"
        );
    }
    for place in ["shards", "tasks"] {
        let (status, page) = tasks
            .daemon
            .post("/v1/fsck", &json!({"queue": "other", "cursor": place}))
            .await;
        let unchecked = &page["unchecked_shards"];
        assert_eq!(
            (status, &unchecked[0]["queue"], &unchecked[0]["shard"]),
            (200, &json!("other"), &json!(0)),
            "{page}"
        );
    }
    let _: () = tasks.redis.del(&records).await.unwrap();
    let _: () = tasks.redis.rename(&away, &counters).await.unwrap();
    assert_eq!(fsck(&tasks.daemon, &[]), (0, Vec::new()));

    // A shard that fails midway: what was mended before is told.
    let _: () = tasks.redis.del(key("finals")).await.unwrap();
    let _: () = tasks.redis.set(key("finals"), "no list").await.unwrap();
    let _: i64 = tasks.redis.hset(key("m:P"), "x", 9999).await.unwrap();
    let (code, stdout, stderr) = taskd(&[
        "fsck",
        "--json",
        "--repair",
        "--server",
        &tasks.daemon.http(),
    ]);
    let find: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        (code, &find["kind"], &find["mended"]),
        (1, &json!("pointer_out_of_range"), &json!(true)),
        "{stderr}"
    );
    assert_eq!(stderr.matches("cannot check q:0: ").count(), 1, "{stderr}");
}

/// The watchdog's finds of a kind.
async fn metric(daemon: &Daemon, kind: &str) -> Option<f64> {
    let text = reqwest::get(format!("{}/metrics", daemon.http()))
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    let series = format!("taskd_invariant_violations{{kind=\"{kind}\"}} ");
    text.lines()
        .find_map(|line| line.strip_prefix(&series))
        .map(|value| value.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_queue_has_no_differences() {
    let config =
        "partitions = 2\ngrace = \"1s\"\n[queues.default]\nlease = \"1s\"\nbackoff = [\"1ms\"]\n";
    let daemon = Daemon::start(config, &[]).await;
    let work = async {
        let mut taken = 0;
        for round in 0..12 {
            let task = |n: usize| {
                let key = format!("{round}/{n}");
                json!({"queue": "q", "key": key, "replicas": 1 + n % 3, "max_attempts": 2})
            };
            daemon.insert(&(0..150).map(task).collect::<Vec<_>>()).await;
            for worker in ["u", "v", "w", "x"] {
                let tasks = daemon.lease(worker, "q", 100, "0s").await;
                let (done, rest) = tasks.split_at(tasks.len() / 2);
                let mut answers = daemon.complete(worker, done).await;
                // Some are rejected, and some leases are left to expire.
                let items: Vec<Value> = rest
                    .iter()
                    .skip(rest.len() / 3)
                    .map(|task| json!({"id": task["id"], "lease_token": task["lease_token"], "reason": "no luck"}))
                    .collect();
                let (status, answer) = daemon
                    .post(
                        "/v1/tasks:reject",
                        &json!({"worker": worker, "rejections": items}),
                    )
                    .await;
                assert_eq!(status, 200, "{answer}");
                answers.extend(statuses(&answer));
                // On a slow machine some leases are over before their reports come.
                taken += answers.iter().filter(|answer| *answer == "OK").count();
            }
        }
        taken
    };
    let expired = "taskd_watchdog_handled_tasks_total{what=\"expired\"} ";
    let (mut checks, mut shards) = (0, 0);
    let check = until("leases have expired between checks", async || {
        let mut cursor = json!("");
        while !cursor.is_null() {
            let (status, answer) = daemon.post("/v1/fsck", &json!({"cursor": cursor})).await;
            assert_eq!((status, &answer["finds"]), (200, &json!([])), "{answer}");
            assert_eq!(
                (&answer["unchecked"], &answer["unchecked_shards"]),
                (&json!(0), &json!([])),
                "{answer}"
            );
            shards += answer["shards"].as_u64().unwrap();
            cursor = answer["cursor"].clone();
        }
        checks += 1;
        checks >= 15 && shards > 0 && crate::traces::metric(&daemon, expired).await > 0.0
    });
    let (taken, ()) = tokio::join!(work, check);
    assert!(taken > 100, "{taken} reports");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dump_shows_what_redis_holds() {
    let tasks = Tasks::start().await;
    let http = tasks.daemon.http();
    let (code, text, _) = taskd(&["dump", "q", "--server", &http]);
    assert_eq!(code, 0, "{text}");
    let hex = |id: &str| id.replace('-', "");
    assert!(
        text.starts_with("shard q:0\n") && text.contains("  counters: ") && text.contains("live=6"),
        "{text}"
    );
    assert!(
        text.contains(&format!("id={}", hex(&tasks.waiting))) && text.contains("worker=w"),
        "{text}"
    );
    let (code, text, _) = taskd(&["dump", "q", "--json", "--limit", "1", "--server", &http]);
    let answer: Value = serde_json::from_str(&text).unwrap();
    let holds = &answer["shards"][0]["holds"];
    assert_eq!(
        (code, &holds["leases"][0]["id"]),
        (0, &json!(hex(&tasks.held))),
        "{answer}"
    );
    let lane = &holds["lanes"][0];
    assert_eq!(
        (&lane["lane"], lane["elements"].as_array().unwrap().len()),
        (&json!("m"), 1),
        "{answer}"
    );
    assert_eq!(
        (&lane["elements"][0]["id"], &lane["elements"][0]["spent"]),
        (&json!(hex(&tasks.waiting)), &json!(false))
    );
    let (_, dump) = tasks.daemon.get("/v1/dump?queue=q&shard=7").await;
    assert_eq!(dump["shards"], json!([]));
    let (code, _, stderr) = taskd(&["dump", "q", "--shard", "7", "--server", &http]);
    assert_eq!(
        (code, &*stderr),
        (1, "taskd: queue q has no open shard 7; it has 0\n")
    );
}
