//! The cost of announcements of status changes, and that nobody depends on them.

use std::{collections::BTreeSet, process::Stdio, time::Duration};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use taskd::{
    model::{QueueName, ShardId, TaskId, TaskStatus, Watched},
    queue::{Queue, QueueWatch},
    redis_pool::Redis,
    runtime::Supervisor,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
};

use crate::{
    columns::events::Events,
    support::{
        daemon::Daemon,
        proxy::{Proxy, Upstream},
        redis::{Fsync, RedisServer},
        until,
    },
};

/// The next words to a watcher.
async fn told(watch: &mut QueueWatch) -> Vec<Watched> {
    tokio::time::timeout(Duration::from_secs(60), watch.next())
        .await
        .expect("a word")
        .unwrap()
}

async fn stat(redis: &Redis, command: &str) -> u64 {
    let info: String = redis::cmd("INFO")
        .arg("commandstats")
        .query_async(&mut redis.conn())
        .await
        .unwrap();
    let name = format!("cmdstat_{command}:calls=");
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix(&name))
        .unwrap_or("0,");
    line.split(',').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn nothing_is_announced_while_nobody_watches_and_little_while_somebody_does() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    // One process works, the other watches.
    let (works, watches, supervisor) = (
        Queue::new(redis.clone()),
        Queue::new(redis.clone()),
        Supervisor::new(),
    );
    works.start_listening(&supervisor);
    watches.start_listening(&supervisor);
    let shard = ShardId {
        queue: QueueName::new("q").unwrap(),
        number: 0,
    };
    let news = || (0..100).map(|_| (TaskId::new(), None));
    let announce = || works.announcer().announce(&shard.queue, 1, news());
    for _ in 0..100 {
        announce();
    }
    let other = QueueName::new("other").unwrap();
    let of_other = watches.announcer().watch_queue(other).unwrap();
    until("the process that works knows of the watcher", async || {
        works.announcer().is_wanted()
    })
    .await;
    announce();
    assert_eq!(stat(&redis, "publish").await, 0);

    // A hundred steps of a hundred tasks each.
    let ends = watches
        .announcer()
        .watch_queue(shard.queue.clone())
        .unwrap();
    until("announcements go out", async || {
        announce();
        stat(&redis, "publish").await > 0
    })
    .await;
    let before = stat(&redis, "publish").await;
    let mut unheard = BTreeSet::new();
    for _ in 0..100 {
        let ids: Vec<TaskId> = news().map(|(id, _)| id).collect();
        works
            .announcer()
            .announce(&shard.queue, 1, ids.iter().map(|id| (*id, None)));
        unheard.extend(ids);
    }
    // They come in several messages.
    until("they are heard", async || {
        watches.announcer().take_asked(false).iter().for_each(|id| {
            unheard.remove(id);
        });
        unheard.is_empty()
    })
    .await;
    let published = stat(&redis, "publish").await - before;
    assert!(
        published <= 20,
        "{published} commands for 10,000 announcements"
    );
    drop((of_other, ends));
    supervisor.stop();
    supervisor.wait().await;
}

#[tokio::test]
async fn watchers_see_changes_without_the_channel() {
    let daemon = Daemon::start("", &[]).await;
    // taskd may neither publish nor subscribe, but for wakes.
    let mut redis = daemon.redis().await;
    let () = redis::cmd("ACL")
        .arg(&["SETUSER", "default", "resetchannels", "&taskd:wake"])
        .query_async(&mut redis)
        .await
        .unwrap();
    let id = daemon
        .insert(&[json!({"queue": "q", "key": "k"})])
        .await
        .remove(0);
    let mut events = Events::of_task(&daemon, &id).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    events.until("ASSIGNED").await;
    let task = json!({"queue": "q", "key": "k"});
    let wait = daemon.post("/v1/tasks?wait=50s", &task);
    let complete = async { assert_eq!(daemon.complete("w", &leased).await, ["OK"]) };
    let ((_, answer), ()) = tokio::join!(wait, complete);
    assert_eq!(answer["results"][0]["task_status"], "COMPLETED", "{answer}");
    assert_eq!(events.rest().await, ["COMPLETED"]);
}

#[tokio::test]
async fn watchers_of_a_queue_are_told_that_announcements_got_lost() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let acl = async |rules: &[&str]| {
        let () = redis::cmd("ACL")
            .arg("SETUSER")
            .arg("works")
            .arg(rules)
            .query_async(&mut redis.conn())
            .await
            .unwrap();
    };
    // The process that works may not publish what happens.
    acl(&["on", ">secret", "~*", "+@all", "resetchannels", "&t:wake"]).await;
    let url = format!("{}?user=works&pass=secret", server.url());
    let works = Queue::new(Redis::connect(&url, "t").await.unwrap());
    let (watches, supervisor) = (Queue::new(redis.clone()), Supervisor::new());
    works.start_listening(&supervisor);
    watches.start_listening(&supervisor);
    let queue = QueueName::new("q").unwrap();
    let mut watch = watches.announcer().watch_queue(queue.clone()).unwrap();
    tokio::time::timeout(Duration::from_secs(60), watch.begin())
        .await
        .expect("the queue is heard");
    until("the process that works knows of the watcher", async || {
        works.announcer().is_wanted()
    })
    .await;
    works.announcer().announce(
        &queue,
        1,
        std::iter::once((TaskId::new(), Some(TaskStatus::Completed))),
    );
    let refused = async || {
        let info: String = redis::cmd("INFO")
            .arg("commandstats")
            .query_async(&mut redis.conn())
            .await
            .unwrap();
        info.lines()
            .any(|line| line.starts_with("cmdstat_publish:") && !line.contains("rejected_calls=0"))
    };
    until("an announcement is refused", refused).await;
    acl(&["allchannels"]).await;
    assert_eq!(told(&mut watch).await, [Watched::Gap], "the first word");
    works.announcer().announce(
        &queue,
        2,
        std::iter::once((TaskId::new(), Some(TaskStatus::Completed))),
    );
    assert!(
        matches!(&told(&mut watch).await[..], [Watched::Event(event)] if event.at_unix_ms == 2)
    );
    supervisor.stop();
    supervisor.wait().await;
}

#[tokio::test]
async fn an_insert_that_waits_watches_no_queue_that_it_may_not_make() {
    let mut daemon = Daemon::start("max_queues = 1", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "k"})]).await;
    let stray: Vec<_> = (0..50)
        .map(|n| json!({"queue": format!("stray-{n}"), "key": "k"}))
        .collect();
    let (_, answer) = daemon.post("/v1/tasks?wait=1ms", &json!(stray)).await;
    assert_eq!(answer["results"][49]["status"], "REJECTED", "{answer}");
    daemon
        .post("/v1/tasks?wait=1ms", &json!({"queue": "q", "key": "k"}))
        .await;
    let mut watched: Vec<String> = Vec::new();
    until("a queue is watched", async || {
        let mut read = redis::cmd("ZRANGE");
        watched = read
            .arg("taskd:watched")
            .arg(0)
            .arg(-1)
            .query_async(&mut daemon.redis().await)
            .await
            .unwrap();
        !watched.is_empty()
    })
    .await;
    assert_eq!(watched, ["ends:q"]);
    assert!(daemon.stop().await.success());
}

/// Nothing closes the connections of a taskd that hangs.
#[tokio::test]
async fn the_command_watches_on_behind_a_taskd_that_hangs() {
    let (hangs, works, proxy) = (
        Daemon::start("", &[]).await,
        Daemon::start("", &[]).await,
        Proxy::start().await,
    );
    let lead_to =
        |daemon: &Daemon| proxy.lead_to(Upstream::Tcp(format!("127.0.0.1:{}", daemon.grpc_port())));
    lead_to(&hangs);
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let command = command.args([
        "watch",
        "--queue",
        "q",
        "--server",
        &format!("127.0.0.1:{}", proxy.port()),
    ]);
    let mut watch = command
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    // A gap has no id.
    let mut line = async || {
        let line = lines.next_line().await.unwrap().expect("the watch goes on");
        serde_json::from_str::<Value>(&line).unwrap()["id"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    // It watches from now on, and nobody says when that is.
    let knocks = async |daemon: &Daemon| {
        for n in 0.. {
            daemon
                .insert(&[json!({"queue": "q", "key": n.to_string()})])
                .await;
        }
    };
    tokio::select! {
        _ = line() => {}
        () = knocks(&hangs) => {}
    }
    hangs.signal(Signal::SIGSTOP);
    lead_to(&works);
    let shown = async { while works.get(&format!("/v1/tasks/{}", line().await)).await.0 != 200 {} };
    tokio::select! {
        shown = tokio::time::timeout(Duration::from_secs(60), shown) => shown.expect("another taskd"),
        () = knocks(&works) => {}
    }
}

#[tokio::test]
async fn an_insert_of_the_command_waits_for_results_of_many_mebibytes() {
    let mut daemon = Daemon::start("", &[]).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    let keys: Vec<String> = (0..8).map(|n| format!("{n}\n")).collect();
    std::fs::write(file.path(), keys.concat()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let command = command
        .args([
            "insert",
            "--queue",
            "q",
            "--wait",
            "50s",
            "--server",
            &daemon.grpc(),
        ])
        .arg(file.path());
    let insert = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let result = "x".repeat(1_000_000);
    let completion = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"], "result": result.as_str()});
    let completions: Vec<Value> = daemon
        .lease_all("w", "q", 8)
        .await
        .iter()
        .map(completion)
        .collect();
    let (status, answer) = daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": completions}),
        )
        .await;
    assert_eq!(status, 200, "{answer}");
    let output = insert.wait_with_output().await.unwrap();
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert_eq!(
        (output.status.code(), stdout.lines().count()),
        (Some(0), 8),
        "{stderr}"
    );
    for line in stdout.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert!(
            line["results"][0]["result"] == result.as_str(),
            "line {} has another result",
            line["line"]
        );
    }
    assert!(daemon.stop().await.success());
}
