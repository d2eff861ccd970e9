//! Who owns a partition of `pipeline`, and who only believes it.

use std::sync::Arc;

use prost::Message as _;
use taskd::{
    bus::{Bus, Record, Topic, redis_streams::RedisStreams},
    config::Settings,
    fanout,
    model::{self, Clock, Offset, Priority, QueueName, ShardId, TaskId},
    outbox::Outbox,
    pb,
    queue::{Enqueue, EnqueueTask, Enqueued, Queue},
    redis_pool::Redis,
    store::sqlite::SqliteStore,
    supervise::Supervisor,
};

use crate::support::{
    redis::{Fsync, RedisServer},
    sqlite::SqliteFile,
    store_contract::Database,
    until,
};

fn record() -> pb::PipelineRecord {
    pb::PipelineRecord {
        id: TaskId::new().as_bytes().to_vec().into(),
        queue: "q".into(),
        replicas: 1,
        priority: Priority::Medium.to_pb().into(),
        max_attempts: 5,
        lease_ms: 30_000,
        published_unix_ms: model::now_unix_ms(),
        ..Default::default()
    }
}

/// What an owner enqueues who read `record` at `offset`.
async fn enqueue(queue: &Queue, bus: &dyn Bus, shard: &ShardId, epoch: u64, offset: Offset) -> Enqueued {
    let record = record();
    let id = TaskId::from_slice(&record.id).unwrap();
    let (body, credited) = (model::body_blob(&record), vec![]);
    let task = EnqueueTask { offset, id, replicas: 1, not_before_unix_ms: 0, body, credited };
    let batch = Enqueue {
        topic_generation: bus.generation(),
        epoch,
        predecessor: None,
        upto: offset,
        tasks: &[task],
        high_water_tasks: 100,
        high_water_bytes: 1 << 20,
    };
    queue.enqueue(shard, &batch).await.unwrap()
}

#[tokio::test]
async fn an_owner_of_before_is_refused_and_the_present_one_joins_anew() {
    let (server, database) = (RedisServer::start(Fsync::EverySecond), SqliteFile::create().await);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let store = Arc::new(SqliteStore::open(&database.path(), None).await.unwrap());
    let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
    let (queue, supervisor) = (Queue::new(redis.clone()), Supervisor::new());
    let outbox = Outbox::new(store, bus.clone(), Clock::of_this_machine());
    let shard = ShardId { queue: QueueName::new("q").unwrap(), number: 0 };
    let zombie = queue.take_epoch(0).await.unwrap();

    fanout::start(outbox, queue.clone(), &Arc::new(Settings::default()), &supervisor);
    let mut published = 0;
    let mut publish = async || {
        published += 1;
        let record = Record { partition: 0, value: record().encode_to_vec().into() };
        let offset = bus.publish(Topic::Pipeline, &[record]).await.unwrap()[0];
        until("it is enqueued", async || queue.stats(&shard).await.is_ok_and(|stats| stats.open == published)).await;
        offset
    };
    let offset = publish().await;
    let behind = |by| Offset { major: offset.major + by, minor: 0 };
    // Held up since before; what it has read lies behind what is stored, so that only the epoch tells.
    let refused = enqueue(&queue, &*bus, &shard, zombie, behind(1)).await;
    assert_eq!(refused, Enqueued::Fenced(zombie + 1));

    // A Redis that fell back hands out the same epochs again: somebody comes with one that is far above what the fanout will take next.
    let taken = enqueue(&queue, &*bus, &shard, 100, offset).await;
    assert_eq!(taken, Enqueued::Done { dealt_with: 1, added: 0 });
    publish().await;
    assert_eq!(enqueue(&queue, &*bus, &shard, 100, offset).await, Enqueued::Fenced(101));
    supervisor.stop();
    supervisor.wait().await;
}
