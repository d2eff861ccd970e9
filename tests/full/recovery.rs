//! Recovery by the watchdog, seen from outside: through the running binary.

use std::{collections::BTreeSet, path::Path, process::Command};

use prost::Message;
use redis::AsyncCommands;
use serde_json::{Value, json};
use taskd::wire::pb;

use crate::support::{
    daemon::{Daemon, keys, once, statuses},
    mariadb::MysqlDatabase,
    redis::{Fsync, RedisServer},
    store_contract::Database,
    until,
};

fn tasks(queue: &str, from: usize, to: usize) -> Vec<Value> {
    (from..to)
        .map(|n| json!({"queue": queue, "key": format!("key-{n}")}))
        .collect()
}

#[tokio::test]
async fn what_could_not_be_published_goes_out_later_also_after_a_kill() {
    let server = RedisServer::start(Fsync::Always);
    let mut admin = crate::support::redis::patient(server.url()).await;
    let mut may_publish = async |may: &str| {
        redis::cmd("ACL")
            .arg("SETUSER")
            .arg("default")
            .arg(may)
            .query_async::<()>(&mut admin)
            .await
            .unwrap();
    };
    let mut daemon = Daemon::start(
        "republish_after = \"100ms\"",
        &["--redis-url", &server.url()],
    )
    .await;

    may_publish("-xadd").await;
    daemon.insert(&tasks("q", 0, 30)).await;
    until("a publish has failed", async || {
        daemon.log().contains("could not publish 30 new tasks")
    })
    .await;
    assert!(daemon.lease("w", "q", 100, "1ms").await.is_empty());
    may_publish("+xadd").await;
    assert_eq!(once(daemon.drain("w", "q").await), keys(0, 30));

    may_publish("-xadd").await;
    daemon.insert(&tasks("q", 30, 60)).await;
    daemon.kill9();
    may_publish("+xadd").await;
    daemon.start_again();
    daemon.ready().await;
    assert_eq!(once(daemon.drain("w", "q").await), keys(30, 60));
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn all_unfinished_work_is_back_when_the_files_of_redis_are_deleted() {
    let mut daemon = Daemon::start("[queues.default]\nreplicas = 2", &[]).await;
    let ids = daemon.insert(&tasks("q", 0, 100)).await;
    until("all wait", async || {
        daemon.queue("q").await["waiting"] == 100
    })
    .await;
    // Ten are done, ten are done by one of two, ten are being done, the others wait.
    let mut by_one = BTreeSet::new();
    for worker in ["ann", "bob"] {
        let leased = daemon.lease(worker, "q", 20, "10s").await;
        assert_eq!(leased.len(), 20);
        let done = if worker == "ann" {
            &leased[..]
        } else {
            &leased[..10]
        };
        assert!(
            daemon
                .complete(worker, done)
                .await
                .iter()
                .all(|status| status == "OK")
        );
        if worker == "ann" {
            by_one.extend(
                leased[10..]
                    .iter()
                    .map(|task| task["key"].as_str().unwrap().to_owned()),
            );
        }
    }
    until("SQL has the results", async || {
        let mut results = 0;
        for id in &ids[..20] {
            results += daemon.get(&format!("/v1/tasks/{id}/results")).await.1["results"]
                .as_array()
                .unwrap()
                .len();
        }
        results == 30
    })
    .await;

    daemon.kill9();
    daemon.kill9_redis();
    std::fs::remove_dir_all(daemon.data().join("redis")).unwrap();
    daemon.start_again();
    daemon.ready().await;

    // Credits that SQL knew count: who has done a task does not get it again.
    assert_eq!(once(daemon.work("ann", "q", 80).await), keys(20, 100));
    assert!(daemon.lease("ann", "q", 1, "1ms").await.is_empty());
    let rest = once(daemon.drain("eve", "q").await);
    assert_eq!(rest, keys(10, 100));
    assert!(by_one.iter().all(|key| rest.contains(key)));
    for id in ids {
        let (_, answer) = daemon.get(&format!("/v1/tasks/{id}/results")).await;
        let results = answer["results"].as_array().unwrap();
        let workers: BTreeSet<_> = results
            .iter()
            .map(|result| result["worker"].to_string())
            .collect();
        assert_eq!((results.len(), workers.len()), (2, 2), "{answer}");
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn tasks_that_redis_has_forgotten_go_out_again() {
    let mut daemon = Daemon::start("reconcile_every = \"100ms\"", &[]).await;
    let (redis, backup) = (daemon.data().join("redis"), daemon.data().join("backup"));
    let kill = |daemon: &mut Daemon| {
        daemon.kill9();
        assert!(daemon.kill9_redis());
    };
    daemon.insert(&tasks("q", 0, 30)).await;
    until("they wait in Redis", async || {
        daemon.queue("q").await["waiting"] == 30
    })
    .await;
    kill(&mut daemon);
    copy(&redis, &backup);
    daemon.start_again();
    daemon.ready().await;
    daemon.insert(&tasks("q", 30, 50)).await;
    until("they wait in Redis", async || {
        daemon.queue("q").await["waiting"] == 50
    })
    .await;
    kill(&mut daemon);
    // Redis comes back as it was before the last twenty.
    std::fs::remove_dir_all(&redis).unwrap();
    std::fs::rename(&backup, &redis).unwrap();
    daemon.start_again();
    daemon.ready().await;
    assert_eq!(once(daemon.drain("w", "q").await), keys(0, 50));
    assert!(daemon.stop().await.success());
}

fn copy(from: &Path, to: &Path) {
    assert!(
        Command::new("cp")
            .arg("-a")
            .args([from, to])
            .status()
            .unwrap()
            .success()
    );
}

#[tokio::test]
async fn a_backup_of_sql_that_is_restored_makes_no_duplicates_of_nothing() {
    let mut daemon = Daemon::start("", &[]).await;
    let (database, backup) = (
        daemon.data().join("taskd.db"),
        daemon.data().join("backup.db"),
    );
    let before = daemon.insert(&tasks("q", 0, 3)).await;
    assert!(daemon.stop().await.success());
    copy(&database, &backup);
    daemon.start_again();
    daemon.ready().await;
    let lost = daemon.insert(&tasks("q", 3, 5)).await;
    let mut redis = daemon.redis().await;
    until("the filter knows all", async || {
        redis.hlen::<_, usize>("taskd:{q}:seen").await.unwrap() == 6
    })
    .await;
    assert!(daemon.stop().await.success());
    std::fs::rename(&backup, &database).unwrap();
    daemon.start_again();
    daemon.ready().await;

    assert!(
        daemon.log().contains("the database was set back"),
        "{}",
        daemon.log()
    );
    let answer = daemon.post("/v1/tasks", &json!(tasks("q", 0, 5))).await.1;
    assert_eq!(
        statuses(&answer),
        ["DUPLICATE", "DUPLICATE", "DUPLICATE", "CREATED", "CREATED"],
        "{answer}"
    );
    for (result, before) in answer["results"].as_array().unwrap().iter().zip(&before) {
        assert_eq!(result["id"], **before);
    }
    assert_eq!(daemon.get(&format!("/v1/tasks/{}", lost[0])).await.0, 404);
    assert_eq!(
        daemon
            .drain("w", "q")
            .await
            .into_iter()
            .collect::<BTreeSet<_>>(),
        keys(0, 5)
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_database_server_that_is_set_back_under_a_running_taskd_is_noticed() {
    let database = MysqlDatabase::create().await;
    let mut daemon = Daemon::start("", &["--database-url", &database.url()]).await;
    daemon.insert(&tasks("q", 0, 3)).await;
    assert_eq!(once(daemon.drain("w", "q").await), keys(0, 3));
    daemon.insert(&tasks("q", 3, 4)).await;
    let mut redis = daemon.redis().await;
    until("the filter knows all", async || {
        redis.hlen::<_, usize>("taskd:{q}:seen").await.unwrap() == 5
    })
    .await;
    // A replica takes over to which the last batch had not come.
    database
        .execute("DELETE FROM tasks WHERE task_key = 'key-3'")
        .await;
    database.execute("DELETE FROM outbox").await;
    database.execute("DELETE FROM batches").await;
    until("it may be inserted again", async || {
        let answer = daemon.post("/v1/tasks", &json!(tasks("q", 3, 4))).await.1;
        statuses(&answer) == ["CREATED"]
    })
    .await;
    // A single task does not ask the filter, so it may have been there first.
    until("the loss is noticed", async || {
        daemon
            .log()
            .contains("the database was set back: 1 of the last 2 batches are not in it")
            || daemon
                .log()
                .contains("the database was set back: 1 of the last 3 batches are not in it")
    })
    .await;
    assert!(daemon.stop().await.success());
    database.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn inserts_that_were_answered_survive_kills_of_taskd() {
    let mut daemon = Daemon::start("republish_after = \"500ms\"", &[]).await;
    let (mut answered, mut unanswered) = (BTreeSet::new(), 0);
    for round in 0..8 {
        let url = format!("{}/v1/tasks", daemon.http());
        let inserts = (0..40).map(|call| {
            let (first, url) = (round * 1000 + call * 25, url.clone());
            tokio::spawn(async move {
                let request =
                    crate::support::http_client()
                        .post(url)
                        .json(&tasks("q", first, first + 25));
                let response = request.send().await.ok()?.error_for_status().ok()?;
                let answer: Value = response.json().await.ok()?;
                assert!(
                    statuses(&answer).iter().all(|status| status == "CREATED"),
                    "{answer}"
                );
                Some(keys(first, first + 25))
            })
        });
        let mut inserts: Vec<_> = inserts.collect();
        // In the middle of them: some are answered, some are not.
        for insert in inserts.drain(..4 * round) {
            answered.extend(insert.await.unwrap().unwrap());
        }
        daemon.kill9_and_restart();
        for insert in inserts {
            match insert.await.unwrap() {
                Some(keys) => answered.extend(keys),
                None => unanswered += 1,
            }
        }
        daemon.ready().await;
    }
    assert!(unanswered > 0, "no kill came in the middle");
    let done = once(daemon.drain("w", "q").await);
    let lost: Vec<_> = answered.difference(&done).collect();
    assert!(lost.is_empty(), "lost: {lost:?}");
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_worker_that_dies_again_and_again_makes_a_dead_letter() {
    let config = "[queues.q]\nlease = \"3s\"\nmax_attempts = 3\nbackoff = [\"20ms\"]";
    let mut daemon = Daemon::start(config, &[]).await;
    let id = &daemon.insert(&tasks("q", 0, 1)).await[0];
    for attempt in 1..=3 {
        let leased = daemon.lease("w", "q", 1, "30s").await;
        assert_eq!(leased[0]["attempt"], attempt, "{leased:?}");
    }
    let path = format!("/v1/tasks/{id}");
    until("the task is dead", async || {
        daemon.get(&path).await.1["status"] == "DEAD"
    })
    .await;
    let mut redis = daemon.redis().await;
    let mut reports = async |topic: &str| {
        let mut count: usize = 0;
        until("the reports are there", async || {
            count = redis
                .xlen(format!("taskd:{{bus}}:{topic}:0"))
                .await
                .unwrap();
            count > 0
        })
        .await;
        count
    };
    assert_eq!(reports("dead-letters").await, 1);
    assert_eq!(reports("expirations").await, 3);
    until("an insert of the same key is told", async || {
        let again = daemon
            .post("/v1/tasks", &json!({"queue": "q", "key": "key-0"}))
            .await
            .1;
        assert_eq!(again["results"][0]["status"], "DUPLICATE", "{again}");
        again["results"][0]["error"] == "the task with this key is DEAD"
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn poison_goes_to_dead_letters_and_the_line_goes_on() {
    let mut daemon = Daemon::start("", &[]).await;
    let mut redis = daemon.redis().await;
    // Of no priority, and to be promoted later.
    let no_priority = pb::PipelineRecord {
        id: vec![7; 16].into(),
        queue: "q".into(),
        replicas: 1,
        max_attempts: 1,
        lease_ms: 1000,
        not_before_unix_ms: i64::from(u32::MAX) * 1000,
        ..Default::default()
    };
    let garbage = b"\xffno record".to_vec();
    let poison = [
        ("pipeline", garbage.clone()),
        ("pipeline", no_priority.encode_to_vec()),
        ("task-results", garbage),
    ];
    for (topic, value) in &poison {
        let stream = format!("taskd:{{bus}}:{topic}:0");
        let _: String = redis.xadd(stream, "*", &[("v", value)]).await.unwrap();
    }
    daemon.insert(&tasks("q", 0, 10)).await;
    assert_eq!(once(daemon.drain("w", "q").await), keys(0, 10));
    let letters: redis::streams::StreamRangeReply = redis
        .xrange_all("taskd:{bus}:dead-letters:0")
        .await
        .unwrap();
    let letters = letters.ids.iter().map(|entry| {
        let value: Vec<u8> = entry.get("v").unwrap();
        let letter = pb::DeadLetter::decode(&value[..]).unwrap();
        assert!(
            !letter.reason.is_empty() && !letter.offset.is_empty(),
            "{letter:?}"
        );
        (letter.topic, letter.value.to_vec())
    });
    let poison = poison.map(|(topic, value)| (topic.to_owned(), value));
    assert_eq!(letters.collect::<BTreeSet<_>>(), poison.into());
    assert!(daemon.stop().await.success());
}

/// As after a failover of the bus's master, which a report had reached and its replica had not.
#[tokio::test]
async fn a_task_whose_report_the_bus_has_lost_is_done_again() {
    lose_a_report(false).await;
}

#[tokio::test]
async fn a_task_whose_report_the_bus_has_lost_is_done_again_while_others_end() {
    lose_a_report(true).await;
}

async fn lose_a_report(others_end: bool) {
    let server = RedisServer::start(Fsync::Always);
    let database = tempfile::tempdir().unwrap();
    let backends = [
        "--redis-url",
        &server.url(),
        "--database-url",
        &format!("sqlite://{}/t.db", database.path().display()),
    ];
    let with = |pipelines| [&["--pipelines", pipelines], &backends[..]].concat();
    let mut settling = Daemon::start("grace = \"1s\"", &with("discovery")).await;
    let mut others = Daemon::start("grace = \"1s\"", &with("fanout,watchdog,tasks")).await;
    settling.insert(&tasks("q", 0, 2)).await;
    assert_eq!(others.work("w", "q", 2).await.len(), 2);
    until("SQL has them", async || {
        others.queue("q").await["completed"] == 2
    })
    .await;

    settling.insert(&tasks("q", 2, 3)).await;
    let leased = others.lease_all("w", "q", 1).await;
    // Nobody reads the results.
    assert!(settling.stop().await.success());
    assert_eq!(others.complete("w", &leased).await, ["OK"]);
    let mut redis = crate::support::redis::patient(server.url()).await;
    until("the report is on the bus", async || {
        redis
            .xlen::<_, u64>("taskd:{bus}:task-results:0")
            .await
            .unwrap()
            == 1
    })
    .await;
    let () = redis::cmd("XTRIM")
        .arg("taskd:{bus}:task-results:0")
        .arg("MAXLEN")
        .arg(0)
        .query_async(&mut redis)
        .await
        .unwrap();
    settling.start_again();
    settling.ready().await;
    let (mut ended, mut done) = (3, Vec::new());
    until("it is done again", async || {
        if others_end {
            settling.insert(&tasks("q", ended, ended + 1)).await;
            ended += 1;
        }
        done.extend(others.work_once("w", "q").await);
        done.iter().any(|key| key == "key-2")
    })
    .await;
    others.drain("w", "q").await;
    until("SQL has it", async || {
        others.queue("q").await["completed"] == ended
    })
    .await;
    assert!(
        others
            .log()
            .contains("the reports of 1 tasks of q:0 are lost")
    );
    assert!(settling.stop().await.success());
    assert!(others.stop().await.success());
}
