//! More partitions under running processes.

use std::process::Command;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    processes::work,
    support::{
        daemon::{Daemon, statuses},
        kafka,
        mariadb::MysqlDatabase,
        redis::{Fsync, RedisServer},
        store_contract::Database,
        until,
    },
};

const TASKS: usize = 1000;

fn tasks(from: usize, to: usize) -> Vec<Value> {
    (from..to)
        .map(|n| json!({"queue": "q", "key": n.to_string()}))
        .collect()
}

/// The exit code and the output of `taskd partitions COUNT`.
fn raise(count: &str, backends: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_taskd"))
        .args(["partitions", count])
        .args(backends)
        .output()
        .unwrap();
    let said =
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), said)
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_are_added_under_running_processes_on_kafka() {
    add_partitions(Some(format!("kafka://{}", kafka::shared().await))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_are_added_under_running_processes_on_redis_streams() {
    add_partitions(None).await;
}

/// Two processes with waiting and leased tasks go from two partitions to five. Then they are
/// restarted, one after the other.
async fn add_partitions(bus: Option<String>) {
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let prefix = format!("partitions-{}-", uuid::Uuid::new_v4());
    let (redis_url, database_url) = (redis.url(), database.url());
    let mut backends = vec![
        "--redis-url",
        &redis_url,
        "--database-url",
        &database_url,
        "--topic-prefix",
        &prefix,
    ];
    if let Some(bus) = &bus {
        backends.extend(["--bus-url", bus]);
    }
    let mut daemons = Vec::new();
    for _ in 0..2 {
        daemons.push(Daemon::start("partitions = 2", &backends).await);
    }
    daemons[0].insert(&tasks(0, TASKS)).await;
    let held = daemons[1].lease_all("holder", "q", 50).await;
    let stop = CancellationToken::new();
    let _stop_when_dropped = stop.clone().drop_guard();
    let workers: Vec<_> = (0..4)
        .map(|n| tokio::spawn(work(format!("w{n}"), daemons[n % 2].http(), stop.clone())))
        .collect();
    until("some are done", async || {
        daemons[0].queue("q").await["completed"].as_u64() > Some(100)
    })
    .await;

    let (code, said) = raise("5", &backends);
    assert_eq!(code, 0, "{said}");
    assert!(
        said.contains("pipeline: 2 -> 5 partitions\ntask-results: 2 -> 5 partitions\n"),
        "{said}"
    );
    // While both are finding out, tasks go on coming through both, each key twice.
    let mut created = 0;
    for first in (TASKS..2 * TASKS).step_by(100) {
        for daemon in &daemons {
            let mut answer = Value::Null;
            until("the insert is answered", async || {
                let Some((200, some)) = daemon
                    .try_post("/v1/tasks", &json!(tasks(first, first + 100)))
                    .await
                else {
                    return false;
                };
                answer = some;
                true
            })
            .await;
            created += statuses(&answer)
                .iter()
                .filter(|status| *status == "CREATED")
                .count();
        }
    }
    // An insert whose answer was lost was repeated, and its tasks were duplicates then.
    assert!(created <= TASKS, "{created} were new");
    for daemon in &mut daemons {
        until("it knows the new partitions", async || {
            daemon.log().contains("5 partitions now, no longer 2")
        })
        .await;
        daemon.ready().await;
    }
    for daemon in &mut daemons {
        assert!(daemon.stop().await.success());
        daemon.start_again();
        daemon.ready().await;
    }
    daemons[0].insert(&tasks(2 * TASKS, 3 * TASKS)).await;
    let mut answer = daemons[1]
        .post("/v1/tasks", &json!(tasks(0, TASKS)))
        .await
        .1;
    let duplicates = statuses(&answer.take())
        .iter()
        .filter(|status| *status == "DUPLICATE")
        .count();
    assert_eq!(duplicates, TASKS);

    // The leases of before still hold, or have expired and are another worker's.
    let answered = daemons[0].complete("holder", &held).await;
    assert!(
        answered.iter().all(|status| status == "OK"
            || status == "LEASE_LOST"
            || status == "ALREADY_COMPLETED"),
        "{answered:?}"
    );
    until("all is done", async || {
        daemons[0].queue("q").await["completed"] == 3 * TASKS
    })
    .await;
    stop.cancel();
    let mut done = answered.iter().filter(|status| *status == "OK").count();
    for worker in workers {
        done += worker.await.unwrap();
    }
    assert!(done <= 3 * TASKS, "{done} completions were answered OK");
    assert_eq!(
        database.number("SELECT COUNT(*) FROM results").await,
        3 * TASKS as i64,
        "each is completed once"
    );
    let reached = "SELECT COUNT(DISTINCT shard) FROM tasks";
    assert_eq!(database.number(reached).await, 5);

    let (code, said) = raise("4", &backends);
    assert_eq!(code, 1);
    assert_eq!(
        said,
        "taskd: pipeline has 5 partitions, and there is no way back: unread tasks would go with them\n"
    );
    assert_eq!(raise("5", &backends).0, 0, "again does no harm");
    let wrong = format!("wrong-{prefix}");
    let elsewhere: Vec<&str> = backends
        .iter()
        .map(|arg| if *arg == prefix { &wrong[..] } else { arg })
        .collect();
    let (code, said) = raise("6", &elsewhere);
    assert_eq!(
        (
            code,
            said.contains(&format!("there is no topic {wrong}pipeline: "))
        ),
        (1, true),
        "{said}"
    );
    assert_eq!(
        raise("6", &elsewhere),
        (code, said),
        "the first try made no topic"
    );
    for daemon in &mut daemons {
        assert!(daemon.stop().await.success());
    }
    database.remove().await;
}

#[tokio::test]
async fn the_embedded_bus_gets_more_partitions_while_taskd_is_stopped() {
    let mut daemon = Daemon::start("", &[]).await;
    daemon.insert(&tasks(0, 10)).await;
    let data = daemon.data();
    let place = ["--data-dir", data.to_str().unwrap()];
    let (code, said) = raise("3", &place);
    assert_eq!((code, said.lines().count()), (1, 1), "{said}");
    assert!(said.contains("taskd"), "{said}");
    assert!(daemon.stop().await.success());
    let (code, said) = raise("3", &place);
    assert_eq!(code, 0, "{said}");
    daemon.start_again();
    daemon.ready().await;
    daemon.insert(&tasks(10, 60)).await;
    assert_eq!(daemon.drain("w", "q").await.len(), 60);
    let mut redis = daemon.redis().await;
    let begun: usize = redis::cmd("EXISTS")
        .arg("taskd:{q:2}:generation")
        .query_async(&mut redis)
        .await
        .unwrap();
    assert_eq!(begun, 1, "the third shard was used");
    assert!(daemon.stop().await.success());
}
