//! Executions of workflows whose processes are killed in turn, whose Redis loses everything, and whose
//! database goes away: each history is that of an undisturbed one.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::{
    columns::workflows::{ORDER, START, Worker, deploy, history, show},
    silent_servers::way_to,
    support::{
        daemon::Daemon,
        mariadb::MysqlDatabase,
        proxy::Mode,
        redis::{Fsync, RedisServer},
        store_contract::Database,
        until,
    },
};

/// How many executions run at once.
const EXECUTIONS: usize = 30;

/// Starts executions, and works on them until all have ended. `disturb` is called all the time, and
/// returns which of the processes is to be called.
async fn all_end_once(
    daemons: &mut [Daemon],
    mut disturb: impl AsyncFnMut(&mut [Daemon]) -> usize,
) {
    let (status, answer) = deploy(&daemons[0], ORDER).await;
    assert_eq!(status, 201, "{answer}");
    let mut worker = Worker::default();
    let start = |id: &str| json!({"id": id, "input": {"total": 21}});
    let (status, _) = daemons[0].post(START, &start("calm")).await;
    assert_eq!(status, 202);
    until("the first one ends", async || {
        worker.work(&daemons[0]).await;
        show(&daemons[0], "calm").await["ended_at"].is_string()
    })
    .await;
    let calm = history(&daemons[0], "calm").await;
    assert_eq!(calm.last().unwrap()["kind"], "completed", "{calm:?}");

    let ids: Vec<String> = (0..EXECUTIONS).map(|n| format!("order-{n}")).collect();
    let mut started = 0;
    let mut open = ids.clone();
    until("all executions have ended", async || {
        let place = disturb(daemons).await;
        let daemon = &daemons[place];
        // One at a time, so that they are at different places.
        if let Some(id) = ids.get(started) {
            let answer = daemon.try_post(START, &start(id)).await;
            started += usize::from(matches!(answer, Some((200 | 202, _))));
        }
        worker.work(daemon).await;
        if let Some(id) = open.last()
            && started == ids.len()
            && show(daemon, id).await["ended_at"].is_string()
        {
            open.pop();
        }
        open.is_empty()
    })
    .await;
    for daemon in daemons.iter_mut() {
        daemon.ready().await;
    }
    for id in &ids {
        assert_eq!(history(&daemons[0], id).await, calm, "{id}");
    }
    // Each has two tasks to pay, the first of which failed, and one to ship.
    assert_eq!(worker.tasks.len(), 3 * (EXECUTIONS + 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn executions_survive_three_processes_that_are_killed_in_turn() {
    /// Between two kills.
    const PAUSE: Duration = Duration::from_millis(1_500);
    let (redis, database) = (
        RedisServer::start(Fsync::Always),
        MysqlDatabase::create().await,
    );
    let (redis_url, database_url) = (redis.url(), database.url());
    let backends = ["--redis-url", &redis_url, "--database-url", &database_url];
    let mut daemons = Vec::new();
    for _ in 0..3 {
        daemons.push(Daemon::start("", &backends).await);
    }
    let (mut killed, mut next, mut kills) = (Instant::now(), 0, 0);
    all_end_once(&mut daemons, async |daemons| {
        if killed.elapsed() > PAUSE {
            daemons[next].kill9_and_restart();
            (killed, kills) = (Instant::now(), kills + 1);
            next = (next + 1) % daemons.len();
        }
        // One that was not killed just now.
        next
    })
    .await;
    assert!(kills >= 3, "{kills}");
    database.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn executions_survive_a_redis_that_loses_everything() {
    let mut daemons = [Daemon::start("reconcile_every = \"100ms\"", &[]).await];
    let mut redis = daemons[0].redis().await;
    let mut calls = 0;
    let mut losses = 0;
    all_end_once(&mut daemons, async |_| {
        calls += 1;
        if calls % 40 == 0 && losses < 3 {
            losses += 1;
            let lost: Result<(), _> = redis::cmd("FLUSHALL").query_async(&mut redis).await;
            lost.unwrap();
        }
        0
    })
    .await;
    assert!(losses > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn executions_survive_a_database_that_is_away() {
    const AWAY: Duration = Duration::from_secs(10);
    let database = MysqlDatabase::create().await;
    let (proxy, url) = way_to(&database).await;
    let mut daemons = [Daemon::start("", &["--database-url", url.as_str()]).await];
    let mut calls = 0;
    let mut until_when: Option<Instant> = None;
    all_end_once(&mut daemons, async |_| {
        calls += 1;
        if calls == 40 {
            proxy.set(Mode::Refuse);
            until_when = Some(Instant::now() + AWAY);
        }
        if until_when.take_if(|end| *end <= Instant::now()).is_some() {
            proxy.set(Mode::Pass);
        }
        0
    })
    .await;
    assert!(calls > 40 && until_when.is_none());
    database.remove().await;
}
