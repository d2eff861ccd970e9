//! A caller that waits claims in the exchange that brings the task.

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, StreamExt, poll, stream::FuturesUnordered};
use taskd::{
    model::{ItemStatus, QueueName, TaskId},
    queue::{Queue, Waiter},
    redis_pool::{Redis, scripts},
    runtime::Supervisor,
};

use crate::{
    support::{
        bus_contract::within,
        redis::{Fsync, RedisServer},
        until,
    },
    tasks_service::{Service, alone, shard, task},
};

/// A worker that waits for a task of `q`.
async fn waiting(service: &Arc<Service>) -> tokio::task::JoinHandle<TaskId> {
    let worker = tokio::spawn({
        let service = Arc::clone(service);
        async move { service.get(&["q"], 1, 3600).await.unwrap().remove(0).id }
    });
    until("the worker looks", async || {
        service.queue.wakes().is_awaited(&shard("q").queue)
    })
    .await;
    until("it found nothing", async || {
        service.queue.shards_of(&shard("q").queue)[0].is_drained()
    })
    .await;
    worker
}

async fn start() -> Arc<Service> {
    let service = Service::start(&["q"]).await;
    service.lease("q").await;
    Arc::new(service)
}

async fn stop(service: Arc<Service>) {
    Arc::into_inner(service)
        .expect("no worker is left")
        .stop()
        .await;
}

#[tokio::test]
async fn both_scripts_go_together() {
    let service = start().await;
    let client = redis::Client::open(service.redis_url()).unwrap();
    let mut lines = client
        .get_async_monitor()
        .await
        .unwrap()
        .into_on_message::<String>();
    for offset in 2..12 {
        let (worker, new) = (waiting(&service).await, task(TaskId::new(), 2, offset));
        service
            .queue
            .enqueuer
            .enqueue(&shard("q"), &alone(&new))
            .await
            .unwrap();
        assert_eq!(within("the task", worker).await.unwrap(), new.id);
        while next_script(&mut lines).await != "enqueue" {}
        assert_eq!(next_script(&mut lines).await, "claim");
    }
    drop(lines);
    stop(service).await;
}

#[tokio::test]
async fn a_task_that_is_given_back_at_once_goes_to_a_waiting_worker_in_the_same_exchange() {
    let service = Service::start(&["q"]).await;
    let leased = service.lease("q").await;
    let service = Arc::new(service);
    let worker = waiting(&service).await;
    let client = redis::Client::open(service.redis_url()).unwrap();
    let mut lines = client
        .get_async_monitor()
        .await
        .unwrap()
        .into_on_message::<String>();
    assert_eq!(service.reject(&leased, 0).await.status, ItemStatus::Ok);
    assert_eq!(within("the task", worker).await.unwrap(), leased.id);
    while next_script(&mut lines).await != "reject" {}
    assert_eq!(next_script(&mut lines).await, "claim");
    drop(lines);
    stop(service).await;
}

#[tokio::test]
async fn a_task_whose_delay_is_over_goes_to_a_waiting_worker() {
    let service = Service::start(&["q"]).await;
    let leased = service.lease("q").await;
    let service = Arc::new(service);
    assert_eq!(service.reject(&leased, 1).await.status, ItemStatus::Ok);
    let worker = waiting(&service).await;
    // Until then each of these calls offers nothing, and the worker waits on.
    until("it is due", async || {
        service
            .queue
            .upkeep
            .promote(&shard("q"), 10, Duration::ZERO)
            .await
            .unwrap()
            .promoted
            == 1
    })
    .await;
    assert_eq!(within("the task", worker).await.unwrap(), leased.id);
    stop(service).await;
}

/// The rejection may offer nothing: its lease is lost.
#[tokio::test]
async fn a_rejection_without_a_lease_leaves_the_worker_waiting() {
    let service = Service::start(&["q"]).await;
    let leased = service.lease("q").await;
    let service = Arc::new(service);
    assert_eq!(service.reject(&leased, 3600).await.status, ItemStatus::Ok);
    let worker = waiting(&service).await;
    assert_eq!(
        service.reject(&leased, 0).await.status,
        ItemStatus::LeaseLost
    );
    let new = task(TaskId::new(), 2, 2);
    service
        .queue
        .enqueuer
        .enqueue(&shard("q"), &alone(&new))
        .await
        .unwrap();
    assert_eq!(within("the task", worker).await.unwrap(), new.id);
    stop(service).await;
}

/// The next script that a client calls.
async fn next_script(lines: &mut (impl futures::Stream<Item = String> + Unpin)) -> &'static str {
    loop {
        let line = within("a line", lines.next()).await.unwrap();
        let called = scripts::ALL
            .iter()
            .find(|script| line.contains(script.sha()));
        if let Some(script) = called {
            return script.name;
        }
    }
}

/// Redis learns `enqueue` after it has run the claim behind it.
#[tokio::test]
async fn a_redis_that_does_not_know_the_first_script_leaves_no_worker_waiting() {
    let service = start().await;
    let () = redis::cmd("SCRIPT")
        .arg("FLUSH")
        .query_async(&mut service.redis.conn())
        .await
        .unwrap();
    assert!(
        service.get(&["q"], 1, 0).await.unwrap().is_empty(),
        "so Redis knows the claim"
    );
    let (worker, new) = (waiting(&service).await, task(TaskId::new(), 2, 2));
    service
        .queue
        .enqueuer
        .enqueue(&shard("q"), &alone(&new))
        .await
        .unwrap();
    assert_eq!(within("the task", worker).await.unwrap(), new.id);
    stop(service).await;
}

#[tokio::test]
async fn the_worker_is_answered_when_the_one_that_enqueues_goes_away() {
    let service = start().await;
    let (worker, new) = (waiting(&service).await, task(TaskId::new(), 2, 2));
    let (q, batch) = (shard("q"), alone(&new));
    let mut enqueue = Box::pin(service.queue.enqueuer.enqueue(&q, &batch));
    assert!(poll!(&mut enqueue).is_pending(), "it lets the worker ask");
    tokio::task::yield_now().await;
    assert!(
        poll!(&mut enqueue).is_pending(),
        "the exchange is under way"
    );
    drop(enqueue);
    assert_eq!(within("the task", worker).await.unwrap(), new.id);
    stop(service).await;
}

#[tokio::test]
async fn an_enqueue_that_fails_leaves_the_workers_waiting() {
    let service = start().await;
    let workers = [waiting(&service).await, waiting(&service).await];
    let shutdown = redis::cmd("SHUTDOWN")
        .arg("NOSAVE")
        .exec_async(&mut service.redis.conn())
        .await;
    shutdown.expect_err("the connection is closed");
    service
        .queue
        .enqueuer
        .enqueue(&shard("q"), &alone(&task(TaskId::new(), 2, 2)))
        .await
        .unwrap_err();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(workers.iter().all(|worker| !worker.is_finished()));
    workers.iter().for_each(|worker| worker.abort());
}

#[tokio::test]
async fn a_claim_that_fails_behind_an_enqueue_leaves_no_worker_waiting() {
    let service = start().await;
    let worker = || {
        let service = Arc::clone(&service);
        async move {
            loop {
                // An error ends a call, and the worker asks again.
                match service.get(&["q"], 1, 3600).await {
                    Ok(leased) => break leased[0].id,
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            }
        }
    };
    let mut workers = FuturesUnordered::from_iter([tokio::spawn(worker()), tokio::spawn(worker())]);
    until("a worker looks", async || {
        service.queue.wakes().is_awaited(&shard("q").queue)
    })
    .await;
    until("it found nothing", async || {
        service.queue.shards_of(&shard("q").queue)[0].is_drained()
    })
    .await;
    // Only claims look at pointers.
    let pointers = ["hr", "h", "mr", "m", "lr", "l"].map(|lane| format!("t:{{q:0}}:{lane}:P"));
    for key in &pointers {
        service.redis("SET", &[key.as_str(), "no hash"]).await;
    }
    let client = redis::Client::open(service.redis_url()).unwrap();
    let mut lines = client
        .get_async_monitor()
        .await
        .unwrap()
        .into_on_message::<String>();
    let new = task(TaskId::new(), 2, 2);
    service
        .queue
        .enqueuer
        .enqueue(&shard("q"), &alone(&new))
        .await
        .unwrap();
    while next_script(&mut lines).await != "claim" {}
    for key in &pointers {
        service.redis("DEL", &[key.as_str()]).await;
    }
    assert_eq!(
        within("the task", workers.next()).await.unwrap().unwrap(),
        new.id
    );
    workers.iter().for_each(tokio::task::JoinHandle::abort);
}

async fn woken(waiter: &Waiter) {
    waiter
        .look_then_wait::<()>(
            &mut waiter.listen(),
            std::future::ready(Err(Duration::from_secs(3600))),
        )
        .await
        .unwrap_err();
}

#[tokio::test]
async fn a_wake_of_a_paused_queue_is_passed_on_to_nobody() {
    let service = Arc::new(Service::start(&["q"]).await);
    let waiter = |name: &str| {
        service
            .queue
            .wakes()
            .waiter(&[QueueName::new(name).unwrap()])
    };
    let publish = async |wake: &str| -> u64 {
        redis::cmd("PUBLISH")
            .arg("t:wake")
            .arg(wake)
            .query_async(&mut service.redis.conn())
            .await
            .unwrap()
    };
    // All are woken once when the process begins to listen.
    let begun = waiter("begun");
    let mut has_begun = Box::pin(woken(&begun));
    assert!((&mut has_begun).now_or_never().is_none());
    until("the process listens", async || publish("begun").await > 0).await;
    within("the first wake", has_begun).await;

    service.queue.set_paused(&shard("q").queue, true);
    let worker = tokio::spawn({
        let service = Arc::clone(&service);
        async move { service.get(&["q"], 1, 3600).await.unwrap().len() }
    });
    until("the worker waits", async || {
        service.queue.wakes().is_awaited(&shard("q").queue)
    })
    .await;
    let [next, behind] = ["q", "behind"].map(waiter);
    let (mut of_next, mut of_behind) = (Box::pin(woken(&next)), Box::pin(woken(&behind)));
    assert!((&mut of_next).now_or_never().is_none() && (&mut of_behind).now_or_never().is_none());
    publish("q").await;
    publish("behind").await;
    within("the wake behind it", of_behind).await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(
        (&mut of_next).now_or_never().is_none(),
        "nobody can take anything"
    );
    service.queue.set_paused(&shard("q").queue, false);
    within("the resumption", of_next).await;
    assert_eq!(within("the task", worker).await.unwrap(), 1);
    drop((begun, next, behind));
    stop(service).await;
}

#[tokio::test]
async fn a_process_has_heard_of_its_own_wakes() {
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let (queue, supervisor) = (
        Queue::of_process(redis.clone(), "me".into()),
        Supervisor::new(),
    );
    queue.start_listening(&supervisor);
    let waiters = ["a", "b"].map(|name| queue.wakes().waiter(&[QueueName::new(name).unwrap()]));
    let [a, b] = &waiters;
    // They are woken once when the process begins to listen.
    within("wakes", futures::future::join(woken(a), woken(b))).await;
    let (mut of_a, mut of_b) = (Box::pin(woken(a)), Box::pin(woken(b)));
    for (wake, wakes_a) in [("a me", false), ("a another", true)] {
        assert!((&mut of_a).now_or_never().is_none() && (&mut of_b).now_or_never().is_none());
        for message in [wake, "b"] {
            redis::cmd("PUBLISH")
                .arg("t:wake")
                .arg(message)
                .exec_async(&mut redis.conn())
                .await
                .unwrap();
        }
        within("the wake behind it", &mut of_b).await;
        of_b.set(woken(b));
        assert_eq!((&mut of_a).now_or_never().is_some(), wakes_a, "{wake}");
    }
    supervisor.stop();
    supervisor.wait().await;
}
