//! What a reconciler, a repetition or a sweep would mend later, looked at while they are away or
//! cannot hide it.

use std::sync::Arc;

use redis::AsyncCommands as _;
use rusqlite::{Connection, OpenFlags};
use serde_json::json;
use taskd::{
    bus::{Bus as _, redis_streams::RedisStreams},
    model::{FindKind, QueueName, ShardId},
    pipelines::checking::{Checker, Pace},
    redis_pool::Redis,
    store::{NewRow, Place, Unpublished},
};

use crate::support::{
    daemon::Daemon,
    process::Process,
    proxy::{Mode, Proxy, Upstream},
    redis::{Fsync, RedisServer},
    sqlite::SqliteFile,
    store_contract::{Database as _, insert_new, row},
    until,
};

/// A number that the daemon's SQLite answers.
fn number(daemon: &Daemon, sql: &str) -> i64 {
    let file = daemon.data().join("taskd.db");
    let database = Connection::open_with_flags(file, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    database.query_row(sql, (), |row| row.get(0)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn idempotency_keys_leave_sql_when_their_window_ends() {
    let daemon = Daemon::start("[queues.short]\nidempotency_window = \"1s\"\n", &[]).await;
    let task = |queue: &str, n: usize| json!({"queue": queue, "key": n.to_string(), "idempotency_key": n.to_string()});
    let tasks = [
        task("short", 1),
        task("short", 2),
        task("short", 3),
        task("default", 4),
    ];
    daemon.insert(&tasks).await;
    let kept = || number(&daemon, "SELECT COUNT(*) FROM idempotency_keys");
    assert!(kept() >= 1);
    until("the keys of the short window are gone", async || {
        kept() == 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_that_redis_forgot_in_each_of_several_shards_come_back() {
    let config = "partitions = 4\nreconcile_every = \"100ms\"\nrepublish_after = \"200ms\"\n\
                  [queues.default]\nlease = \"10m\"\n";
    let daemon = Daemon::start(config, &[]).await;
    let tasks: Vec<_> = (0..40)
        .map(|n| json!({"queue": "q", "key": n.to_string()}))
        .collect();
    daemon.insert(&tasks).await;
    until("all are in Redis", async || {
        let (_, books) = daemon.get("/v1/books?queue=q").await;
        books["queues"][0]["state"] == "BALANCED"
            && books["queues"][0]["held"]["redis"]["live"] == 40
    })
    .await;
    let mut redis = daemon.redis().await;
    for shard in 0..4 {
        let key = |name: &str| format!("taskd:{{q:{shard}}}:{name}");
        let bodies: usize = redis.hlen(key("bodies")).await.unwrap();
        assert!(bodies > 0, "shard {shard} has none of the tasks");
        let _: i64 = redis
            .del(["records", "bodies", "m:T"].map(key).to_vec())
            .await
            .unwrap();
        for counter in ["live", "open", "open_bytes"] {
            let _: i64 = redis.hset(key("counters"), counter, 0).await.unwrap();
        }
    }
    assert_eq!(daemon.lease_all("w", "q", 40).await.len(), 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_published_in_sql_only_when_the_queue_has_them() {
    let (redis, proxy) = (RedisServer::start(Fsync::EverySecond), Proxy::start().await);
    proxy.lead_to(Upstream::Unix(redis.dir().join("redis.sock")));
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let daemon = Daemon::start("republish_after = \"10m\"", &["--redis-url", &url]).await;
    let unpublished = || {
        number(
            &daemon,
            "SELECT COUNT(*) FROM batches WHERE generation = ''",
        )
    };
    // The first tasks open the shard.
    for n in 0..3 {
        daemon
            .insert(&[json!({"queue": "q", "key": format!("before {n}")})])
            .await;
        until("it is in the queue", async || {
            daemon.queue("q").await["waiting"] == n + 1
        })
        .await;
    }
    until("SQL knows that they are published", async || {
        unpublished() == 0
    })
    .await;

    proxy.set(Mode::Stall);
    let inserts = async {
        for n in 0..5 {
            let task = json!([{"queue": "q", "key": format!("meanwhile {n}")}]);
            _ = daemon.try_post("/v1/tasks", &task).await;
        }
    };
    let watches = async {
        for stored in 4..=8 {
            until("SQL has one more", async || {
                number(&daemon, "SELECT COUNT(*) FROM tasks") >= stored
            })
            .await;
            assert!(
                unpublished() >= stored - 3,
                "Redis has taken none of {} new tasks",
                stored - 3
            );
        }
    };
    tokio::join!(inserts, watches);
    assert_eq!(unpublished(), 5);
    proxy.set(Mode::Pass);
    assert_eq!(daemon.lease_all("w", "q", 8).await.len(), 8);
    until("SQL knows that they are published", async || {
        unpublished() == 0
    })
    .await;
}

#[tokio::test]
async fn a_repair_publishes_the_tasks_that_it_drops() {
    // No watchdog runs here, which would publish them later.
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
    let rows: Vec<NewRow> = (0..3).map(|n| row("q", format!("key {n}"))).collect();
    insert_new(&*store, &rows).await;
    let key = |name: &str| format!("taskd:{{q:0}}:{name}");
    let mut pipe = redis::pipe();
    pipe.set(key("generation"), 1);
    for row in &rows {
        pipe.hset(key("records"), row.task.id.as_bytes(), b"\xc1");
    }
    let () = pipe.query_async(&mut redis.conn()).await.unwrap();
    let checker = Checker::new(
        store.clone(),
        process.queue.shards.clone(),
        bus.clone(),
        Pace::FAST,
    );
    let (found, Ok(())) = checker.shard(&shard, true).await else {
        panic!("the shard fails")
    };
    let dropped = found
        .finds
        .iter()
        .filter(|find| find.kind == FindKind::UnreadableRecord && find.mended);
    assert_eq!(dropped.count(), rows.len(), "{:?}", found.finds);
    for row in &rows {
        let place = store.place(bus.generation(), row.task.id).await.unwrap();
        assert!(
            matches!(
                place,
                Some(Place::Off {
                    why: Unpublished::Missing,
                    ..
                })
            ),
            "{place:?}"
        );
    }
}
