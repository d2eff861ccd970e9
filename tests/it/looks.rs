//! A look of the watchdog will do until something may be due.

use std::{future::Future, sync::Arc, time::Duration};

use taskd::{
    model::{ChangingTask, LeaseToken, Priority, Requeue, TaskId, WorkerName},
    queue::{
        Claim, Code, Completion, EndedLease, EnqueueTask, Extension, LookFor, OutboxEntry, Queue,
        RejectMode, Rejection, ShardSnapshot, Started,
    },
    redis_pool::Redis,
};

use crate::{
    support::redis::{Fsync, RedisServer},
    tasks_service::{alone, put, shard, task},
};

const HOUR: Duration = Duration::from_secs(3600);

struct Fixture {
    queue: Queue,
    redis: Redis,
    _server: RedisServer,
}

impl Fixture {
    /// A queue with a task that waits.
    async fn new() -> Self {
        let server = RedisServer::start(Fsync::EverySecond);
        let redis = Redis::connect(&server.url(), "t").await.unwrap();
        let queue = Queue::new(redis.clone());
        put(&queue, "q", TaskId::new(), 2, 1).await;
        Self {
            queue,
            redis,
            _server: server,
        }
    }

    /// The look of a loop to which one of the last hour will do.
    async fn look(&self) -> ShardSnapshot {
        let look_for = LookFor {
            max_age: HOUR,
            grace: HOUR,
            horizon: Duration::from_secs(600),
        };
        self.queue.upkeep.look(look_for).await.remove(0).1.unwrap()
    }

    /// Answers whether a look behind this call asks Redis: only Redis has the pointer that this
    /// puts there.
    async fn asks<T>(&self, call: impl Future<Output = T>) -> bool {
        assert_eq!(self.look().await.pointers, 0, "the last case left one");
        drop(call.await);
        let pointers = "t:{q:0}:m:P";
        let () = redis::cmd("HSET")
            .arg(pointers)
            .arg("w")
            .arg(1)
            .query_async(&mut self.redis.conn())
            .await
            .unwrap();
        let asks = self.look().await.pointers == 1;
        let () = redis::cmd("DEL")
            .arg(pointers)
            .query_async(&mut self.redis.conn())
            .await
            .unwrap();
        let sees_all = LookFor {
            max_age: Duration::ZERO,
            grace: HOUR,
            horizon: HOUR,
        };
        self.queue.upkeep.look(sees_all).await;
        asks
    }

    async fn enqueue(&self, task: EnqueueTask) {
        self.queue
            .enqueuer
            .enqueue(&shard("q"), &alone(&task))
            .await
            .unwrap();
    }

    async fn claim(&self, lease: Duration) -> Option<(TaskId, LeaseToken)> {
        let (max_tasks, max_bytes, priority) = (1, 1 << 20, None);
        let claim = Claim {
            worker: worker(),
            max_tasks,
            max_bytes,
            is_first: true,
            lease: Some(lease),
            priority,
        };
        let shard = Arc::clone(&self.queue.shards_of(&shard("q").queue)[0]);
        let granted = self.queue.worker.claim(&shard, claim).await.unwrap();
        granted
            .tasks
            .first()
            .map(|task| (task.id, task.token.clone()))
    }

    async fn complete(&self, (id, token): (TaskId, LeaseToken)) -> Code {
        let completion = Completion {
            id,
            token,
            worker: worker(),
            report: "report".into(),
            limit: Default::default(),
        };
        self.queue.worker.complete(completion).await.unwrap()
    }
}

fn worker() -> WorkerName {
    WorkerName::new("w").unwrap()
}

/// A lease that nobody has.
fn token() -> LeaseToken {
    LeaseToken {
        shard: shard("q"),
        generation: 1,
        grant: 99,
        attempt: 1,
        trace: None,
        leased_unix_ms: 0,
    }
}

#[tokio::test]
async fn work_that_makes_nothing_due_needs_no_look() {
    let f = Fixture::new().await;
    let mut leased = None;
    assert!(
        !f.asks(async { leased = f.claim(HOUR).await }).await,
        "a claim"
    );
    assert!(
        !f.asks(f.enqueue(task(TaskId::new(), 2, 2))).await,
        "a new task"
    );
    assert!(!f.asks(f.complete(leased.unwrap())).await, "a completion");
    let read = async |most| {
        f.queue
            .upkeep
            .outbox(&shard("q"), most, 1 << 20)
            .await
            .unwrap()
    };
    let mut entries: Vec<OutboxEntry> = vec![];
    assert!(
        !f.asks(async { entries = read(10).await }).await,
        "reports are read"
    );
    assert_eq!((entries.len(), f.look().await.outbox), (1, 1));
    assert!(
        !f.asks(f.queue.upkeep.forwarded(&shard("q"), &entries))
            .await,
        "reports are forwarded"
    );
    read(10).await;
    assert_eq!(f.look().await.outbox, 0, "a look knows that they are gone");
}

#[tokio::test]
async fn a_look_knows_when_the_leases_of_its_process_end() {
    let f = Fixture::new().await;
    assert_eq!(f.look().await.next, None);
    let (id, token) = f.claim(Duration::from_secs(100)).await.unwrap();
    let next = async || f.look().await.next.unwrap();
    assert!((Duration::from_secs(80)..=Duration::from_secs(100)).contains(&next().await));
    let by = Duration::from_secs(50);
    f.queue
        .worker
        .extend(
            &shard("q"),
            &[Extension {
                id,
                token,
                worker: worker(),
                by,
            }],
        )
        .await
        .unwrap();
    assert!(next().await <= by, "it ends sooner than before");
}

#[tokio::test]
async fn what_may_be_due_is_looked_for() {
    let f = Fixture::new().await;
    let (queue, shard) = (&f.queue, &shard("q"));
    let later = EnqueueTask {
        not_before_unix_ms: i64::MAX / 2,
        ..task(TaskId::new(), 2, 3)
    };
    assert!(
        f.asks(f.enqueue(later)).await,
        "a task that waits for its time"
    );
    let rejection = Rejection {
        id: TaskId::new(),
        token: token(),
        worker: worker(),
        mode: RejectMode::Retry(Some(HOUR)),
        reason: String::new(),
        limit: Default::default(),
    };
    assert!(
        f.asks(queue.worker.reject(shard, &[rejection], &[HOUR]))
            .await,
        "a rejection"
    );
    let (id, token) = (TaskId::new(), token());
    let ended = EndedLease {
        id,
        token,
        worker: worker(),
        deadline_unix_ms: 0,
        started: Started::Yes,
    };
    assert!(
        f.asks(queue.worker.end_leases(shard, &[ended], &[HOUR], "gone"))
            .await,
        "the end of a session"
    );
    let task = ChangingTask {
        id,
        shard: shard.clone(),
        replicas: 1,
        priority: Priority::High,
        epoch: 0,
    };
    let changer = queue.upkeep.changer();
    assert!(
        f.asks(changer.cancel(shard, &[&task])).await,
        "a cancellation"
    );
    assert!(f.asks(changer.update(shard, &[&task])).await, "a change");
    assert!(
        f.asks(changer.requeue(shard, &[&task], &Requeue::All))
            .await,
        "a task that is offered anew"
    );
    assert!(
        f.asks(changer.end_overdue(shard, &[(&task, String::new())]))
            .await,
        "the end of a deadline"
    );
    assert!(
        f.asks(queue.upkeep.promote(shard, 1, HOUR)).await,
        "some of what is due"
    );
    assert!(
        f.asks(queue.upkeep.expire(shard, 1, &[HOUR])).await,
        "some leases that ran out"
    );
    assert!(
        f.asks(queue.upkeep.forget(shard, HOUR, &[(id, true)]))
            .await,
        "some final records"
    );
    assert!(
        !f.asks(queue.upkeep.sweep(shard, 10)).await,
        "a sweep without effect"
    );
}

/// Nobody else would get its other replica.
#[tokio::test]
async fn a_completion_that_ends_a_reservation_makes_a_replica_due() {
    let f = Fixture::new().await;
    f.complete(f.claim(HOUR).await.unwrap()).await;
    let reserved = EnqueueTask {
        replicas: 2,
        ..task(TaskId::new(), 2, 2)
    };
    f.enqueue(reserved.clone()).await;
    let changing = ChangingTask {
        id: reserved.id,
        shard: shard("q"),
        replicas: 2,
        priority: Priority::Medium,
        epoch: 0,
    };
    let to = Requeue::To {
        worker: worker(),
        until_unix_ms: None,
    };
    f.queue
        .upkeep
        .changer()
        .requeue(&shard("q"), &[&changing], &to)
        .await
        .unwrap();
    let leased = f.claim(HOUR).await.unwrap();
    assert!(!f.look().await.promotes);
    assert_eq!(f.complete(leased).await, Code::Ok);
    assert!(f.look().await.promotes);
}
