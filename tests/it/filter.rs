//! The filter of keys: what it says, and what it forgets when SQL was set back.

use futures::future::join_all;
use redis::AsyncCommands;
use taskd::{
    dedup::Filter,
    model::{KeyHash, QueueName, TaskId},
    pipelines::discovery::check_filter,
    redis_pool::Redis,
    runtime::Supervisor,
};

use crate::support::{
    redis::{Fsync, RedisServer},
    sqlite::SqliteFile,
    store_contract::{Database, row},
    until,
};

type Task = (QueueName, KeyHash, TaskId);

fn task(queue: &str, key: &str) -> Task {
    let queue = QueueName::new(queue).unwrap();
    (
        queue.clone(),
        KeyHash::new(&queue, key.as_bytes()),
        TaskId::new(),
    )
}

async fn mark(filter: &Filter, tasks: &[Task]) {
    mark_up_to(filter, tasks, 100).await;
}

async fn mark_up_to(filter: &Filter, tasks: &[Task], limit: u64) {
    filter.mark(tasks, filter.era(), |_| limit).await.unwrap();
}

async fn seen(filter: &Filter, tasks: &[Task]) -> Vec<bool> {
    let keys: Vec<_> = tasks
        .iter()
        .map(|(queue, hash, _)| (queue.clone(), *hash))
        .collect();
    let seen = filter.seen(&keys).await.unwrap();
    seen.iter()
        .zip(tasks)
        .map(|(seen, (.., id))| *seen == Some(*id))
        .collect()
}

#[tokio::test]
async fn keys_of_an_era_before_are_not_seen_and_the_last_batches_are_remembered() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let filters = [Filter::new(redis.clone()), Filter::new(redis.clone())];
    let old = [task("q", "a"), task("q", "b"), task("other", "a")];
    mark(&filters[0], &old[..2]).await;
    mark(&filters[1], &old[2..]).await;
    assert_eq!(seen(&filters[1], &old).await, [true; 3]);
    let last = filters[0].last_stored().await.unwrap();
    assert_eq!(
        last.tasks,
        [(old[2].1, old[2].2), (old[1].1, old[1].2)],
        "one of each batch, the latest first"
    );

    assert!(filters[0].drop_all(&last).await.unwrap());
    assert!(!filters[1].drop_all(&last).await.unwrap(), "once is enough");
    assert_eq!(seen(&filters[0], &old).await, [false; 3]);
    assert_eq!(seen(&filters[1], &old).await, [false; 3]);
    assert_eq!(filters[0].last_stored().await.unwrap().tasks, []);

    // New marks count, and nothing of before with them.
    let new = [task("q", "c")];
    mark(&filters[0], &new).await;
    assert_eq!(
        seen(&filters[0], &[old[0].clone(), new[0].clone()]).await,
        [false, true]
    );
    // One that has not heard of it sees nothing, and its marks change nothing.
    let late = Filter::new(redis.clone());
    assert_eq!(seen(&late, &new).await, [false]);
    mark(&late, &[task("q", "d")]).await;
    let known: usize = redis.conn().hlen("t:{q}:seen").await.unwrap();
    assert_eq!(known, 2, "the era and one key");
    assert_eq!(seen(&filters[1], &new).await, [true]);
}

#[tokio::test]
async fn a_redis_that_lost_its_era_gets_marks_again() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let filter = Filter::new(redis.clone());
    assert!(
        filter
            .drop_all(&filter.last_stored().await.unwrap())
            .await
            .unwrap()
    );
    redis::cmd("FLUSHALL")
        .query_async::<()>(&mut redis.conn())
        .await
        .unwrap();
    // This process has not looked yet, and marks in the era of before.
    let [old, lost, new] = ["old", "lost", "new"].map(|key| [task("q", key)]);
    mark(&filter, &old).await;
    assert_eq!(filter.era(), 1);
    filter.last_stored().await.unwrap();
    assert_eq!(filter.era(), 0);
    mark(&filter, &lost).await;
    mark(&filter, &new).await;
    assert_eq!(
        [seen(&filter, &old).await, seen(&filter, &new).await],
        [[false], [true]]
    );
}

#[tokio::test]
async fn a_batch_that_was_stored_in_an_era_before_is_left_out() {
    let server = RedisServer::start(Fsync::EverySecond);
    let filter = Filter::new(Redis::connect(&server.url(), "t").await.unwrap());
    let (era, [lost, new]) = (filter.era(), ["lost", "new"].map(|key| task("q", key)));
    assert!(
        filter
            .drop_all(&filter.last_stored().await.unwrap())
            .await
            .unwrap()
    );
    filter
        .mark(std::slice::from_ref(&lost), era, |_| 1000)
        .await
        .unwrap();
    mark(&filter, std::slice::from_ref(&new)).await;
    assert_eq!(filter.last_stored().await.unwrap().tasks, [(new.1, new.2)]);
    assert_eq!(seen(&filter, &[lost, new]).await, [false, true]);
}

#[tokio::test]
async fn no_more_than_the_limit_is_kept() {
    let server = RedisServer::start(Fsync::EverySecond);
    let filter = Filter::new(Redis::connect(&server.url(), "t").await.unwrap());
    let many: Vec<Task> = (0..2500).map(|n| task("q", &n.to_string())).collect();
    filter.mark(&many, 0, |_| 3000).await.unwrap();
    assert_eq!(seen(&filter, &many).await, [true; 2500]);
    for limit in [2000, 1, 1] {
        filter.mark(&many[..1], 0, |_| limit).await.unwrap();
        let left = seen(&filter, &many)
            .await
            .into_iter()
            .filter(|seen| *seen)
            .count();
        assert_eq!(left as u64, limit);
    }
    for n in 0..1100 {
        mark(&filter, &many[n..=n]).await;
    }
    assert_eq!(filter.last_stored().await.unwrap().tasks.len(), 1000);
}

#[tokio::test]
async fn marks_that_wait_are_written_together_and_at_the_stop() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let (filter, supervisor) = (Filter::new(redis.clone()), Supervisor::new());
    supervisor.spawn_loop("marks", filter.clone(), |filter, cx| async move {
        filter.write_marks(|_| 1000, cx).await
    });
    let tasks: Vec<Task> = (0..100)
        .map(|n| task(["q", "other"][n % 2], &n.to_string()))
        .collect();
    for n in 0..100 {
        mark(&filter, &tasks[n..=n]).await;
    }
    until("all keys are marked", async || {
        seen(&filter, &tasks).await == [true; 100]
    })
    .await;
    let stored = filter.last_stored().await.unwrap().tasks;
    assert_eq!(stored[0], (tasks[99].1, tasks[99].2), "the latest first");

    // A key that is forgotten before it was marked stays forgotten.
    let new: Vec<Task> = ["a", "b", "c"].map(|key| task("q", key)).to_vec();
    mark(&filter, &new).await;
    filter
        .forget(&[(new[0].0.clone(), new[0].1)])
        .await
        .unwrap();
    supervisor.stop();
    supervisor.wait().await;
    assert_eq!(seen(&filter, &new).await, [false, true, true]);
    // Nobody writes later any more.
    let last = [task("q", "d")];
    mark(&filter, &last).await;
    assert_eq!(seen(&filter, &last).await, [true]);
}

/// A task whose id was made at this time.
fn task_at(unix_ms: i64) -> Task {
    let (queue, hash, _) = task("q", &unix_ms.to_string());
    (queue, hash, TaskId::at(unix_ms, 0))
}

#[tokio::test]
async fn keys_that_are_learnt_again_drive_out_no_batch_and_count_in_their_era_only() {
    let server = RedisServer::start(Fsync::EverySecond);
    let filter = Filter::new(Redis::connect(&server.url(), "t").await.unwrap());
    let learn = async |tasks: &[Task], era| filter.mark_known(tasks, era, |_| 1000).await.unwrap();
    let named = async || filter.last_stored().await.unwrap().tasks;
    let [old, older, late, new, latest] = [2, 1, 4, 3, 5].map(task_at);
    // Redis has lost all names: the latest of those that are learnt has to do.
    learn(&[older.clone(), old.clone()], 0).await;
    assert_eq!(named().await, [(old.1, old.2)]);
    mark(&filter, std::slice::from_ref(&new)).await;
    for _ in 0..100 {
        learn(&[old.clone(), older.clone()], 0).await;
    }
    assert_eq!(named().await, [(new.1, new.2), (old.1, old.2)]);
    // Nobody has named it: its process was killed before.
    learn(&[late.clone(), old.clone()], 0).await;
    assert_eq!(
        named().await,
        [(late.1, late.2), (new.1, new.2), (old.1, old.2)]
    );
    assert_eq!(
        seen(&filter, &[old.clone(), older, late, new]).await,
        [true; 4]
    );

    // Since SQL told of these, it was set back.
    let era = filter.era();
    assert!(
        filter
            .drop_all(&filter.last_stored().await.unwrap())
            .await
            .unwrap()
    );
    learn(std::slice::from_ref(&latest), era).await;
    assert_eq!(
        (
            named().await,
            seen(&filter, std::slice::from_ref(&latest)).await
        ),
        (vec![], vec![false])
    );
    learn(&[latest.clone(), old], filter.era()).await;
    assert_eq!(
        (
            named().await,
            seen(&filter, std::slice::from_ref(&latest)).await
        ),
        (vec![(latest.1, latest.2)], vec![true])
    );
}

#[tokio::test]
async fn a_large_batch_does_not_wait_nor_one_of_an_era_before() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let (filter, other, supervisor) = (
        Filter::new(redis.clone()),
        Filter::new(redis),
        Supervisor::new(),
    );
    supervisor.spawn_loop("marks", filter.clone(), |filter, cx| async move {
        filter.write_marks(|_| 5000, cx).await
    });
    let many: Vec<Task> = (0..1500).map(|n| task("q", &n.to_string())).collect();
    mark_up_to(&filter, &many, 5000).await;
    assert_eq!(seen(&filter, &many).await, [true; 1500]);

    let lost = [task("q", "lost")];
    mark(&filter, &lost).await;
    assert!(
        other
            .drop_all(&other.last_stored().await.unwrap())
            .await
            .unwrap()
    );
    filter.last_stored().await.unwrap();
    let new = [task("q", "new")];
    mark(&filter, &new).await;
    supervisor.stop();
    supervisor.wait().await;
    assert_eq!(
        seen(&filter, &[lost[0].clone(), new[0].clone()]).await,
        [false, true]
    );
}

#[tokio::test]
async fn of_many_batches_at_once_the_last_ones_are_named() {
    let server = RedisServer::start(Fsync::EverySecond);
    let (filter, supervisor) = (
        Filter::new(Redis::connect(&server.url(), "t").await.unwrap()),
        Supervisor::new(),
    );
    supervisor.spawn_loop("marks", filter.clone(), |filter, cx| async move {
        filter.write_marks(|_| 5000, cx).await
    });
    until("marks wait for the loop", async || {
        let first = [task("q", "first")];
        mark(&filter, &first).await;
        seen(&filter, &first).await == [false]
    })
    .await;
    // The loop has this test's thread only, so it writes none of them before the last.
    let tasks: Vec<Task> = (0..900).map(|n| task("q", &n.to_string())).collect();
    for n in 0..900 {
        mark_up_to(&filter, &tasks[n..=n], 5000).await;
    }
    until("all keys are marked", async || {
        seen(&filter, &tasks).await == [true; 900]
    })
    .await;
    let named = filter.last_stored().await.unwrap().tasks;
    let named: Vec<_> = named
        .into_iter()
        .filter(|(_, id)| tasks.iter().any(|(.., of)| of == id))
        .collect();
    assert_eq!(
        named,
        [(tasks[899].1, tasks[899].2), (tasks[898].1, tasks[898].2)]
    );
    supervisor.stop();
    supervisor.wait().await;
}

#[tokio::test]
async fn a_loss_is_noticed_however_many_batches_are_stored_meanwhile() {
    let (server, database) = (
        RedisServer::start(Fsync::EverySecond),
        SqliteFile::create().await,
    );
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let (filter, store) = (Filter::new(redis.clone()), database.open().await);
    let rows = [row("q", "lost"), row("q", "kept")];
    store.insert(&rows).await.unwrap();
    let [lost, kept] = rows.map(|row| [(row.task.queue, row.task.key_hash, row.task.id)]);
    mark(&filter, &lost).await;
    mark(&filter, &kept).await;
    check_filter(&*store, &filter).await.unwrap();
    assert_eq!(
        [seen(&filter, &lost).await, seen(&filter, &kept).await],
        [[true], [true]]
    );

    database
        .execute("DELETE FROM tasks WHERE task_key = CAST('lost' AS BLOB)")
        .await;
    redis::cmd("CONFIG")
        .arg("RESETSTAT")
        .query_async::<()>(&mut redis.conn())
        .await
        .unwrap();
    let checker = filter.clone();
    let checked = tokio::spawn(async move { check_filter(&*store, &checker).await });
    let has_read = async || {
        let stats: String = redis::cmd("INFO")
            .arg("commandstats")
            .query_async(&mut redis.conn())
            .await
            .unwrap();
        stats.contains("cmdstat_lrange")
    };
    until("the last batches are read", has_read).await;
    // Before the second look.
    join_all((0..1100).map(|_| mark(&filter, &kept))).await;
    checked.await.unwrap().unwrap();
    assert_eq!(
        [seen(&filter, &lost).await, seen(&filter, &kept).await],
        [[false], [false]]
    );
}
