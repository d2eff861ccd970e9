//! The tasks service over a real queue, without the pipelines around it.

use std::sync::Arc;

use metrics_exporter_prometheus::PrometheusBuilder;
use taskd::{
    bus::{Bus, Topic, redis_streams::RedisStreams},
    config::Settings,
    model::{self, Offset, QueueName, ShardId, TaskId},
    pb,
    queue::{Enqueue, EnqueueTask, Queue},
    redis_pool::Redis,
    supervise::Supervisor,
    tasks::{self, Error},
};

use crate::{
    discovery_insert::watched,
    support::{
        redis::{Fsync, RedisServer},
        until,
    },
};

/// A queue with one task.
async fn one_task(queue: &Queue, name: &str) {
    let shard = ShardId { queue: QueueName::new(name).unwrap(), number: 0 };
    queue.open_shard(&shard, 1, "topic", None).await.unwrap();
    queue.add_shard(&shard);
    let offset = Offset { major: 1, minor: 0 };
    let record = pb::PipelineRecord { priority: 2, max_attempts: 5, lease_ms: 30_000, ..Default::default() };
    let task = EnqueueTask {
        offset,
        id: TaskId::new(),
        replicas: 1,
        not_before_unix_ms: 0,
        body: model::body_blob(&record),
        credited: vec![],
    };
    let batch = Enqueue {
        topic_generation: "topic",
        epoch: 1,
        predecessor: None,
        upto: offset,
        tasks: &[task],
        high_water_tasks: 100,
        high_water_bytes: 1 << 20,
    };
    queue.enqueue(&shard, &batch).await.unwrap();
}

// One thread: the recorder is that of this thread.
#[tokio::test]
async fn every_call_is_counted_with_how_it_ended() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let metrics = recorder.handle();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let mut server = RedisServer::start(Fsync::EverySecond);
    let redis = Redis::connect(&server.url(), "t").await.unwrap();
    let queue = Queue::new(redis.clone());
    one_task(&queue, "q").await;
    let bus = Arc::new(RedisStreams::open(redis, "", 1).await.unwrap());
    let supervisor = Supervisor::new();
    let tasks = tasks::start(queue, bus, &Arc::new(Settings::default()), &supervisor);
    assert_eq!(watched(&supervisor), ["tasks/forward", "tasks/release", "tasks/wakes"]);

    let get = || tasks.get(pb::GetTasksRequest { worker: "w".into(), queues: vec!["q".into()], ..Default::default() });
    let leased = get().await.unwrap().deliver().tasks.remove(0);
    assert!(get().await.unwrap().response.tasks.is_empty());
    let (id, lease_token) = (leased.id, leased.lease_token);
    let by = Some(prost_types::Duration { seconds: 30, nanos: 0 });
    let extension = pb::Extension { id: id.clone(), lease_token: lease_token.clone(), by };
    let extend = pb::ExtendTasksRequest { worker: "w".into(), extensions: vec![extension] };
    tasks.extend(extend).await.unwrap();
    let completion = pb::Completion { id: id.clone(), lease_token: lease_token.clone(), ..Default::default() };
    tasks.complete(pb::CompleteTasksRequest { worker: "w".into(), completions: vec![completion] }).await.unwrap();
    let rejection = pb::Rejection { id, lease_token, ..Default::default() };
    let reject = pb::RejectTasksRequest { worker: "w".into(), rejections: vec![rejection] };
    tasks.reject(reject.clone()).await.unwrap();
    tasks.reject(pb::RejectTasksRequest { rejections: vec![], ..reject.clone() }).await.unwrap();
    let nobody = tasks.reject(pb::RejectTasksRequest { worker: String::new(), ..reject }).await;
    assert!(matches!(nobody, Err(Error::Invalid(_))), "{nobody:?}");
    server.kill9();
    let away = get().await;
    assert!(matches!(away, Err(Error::Unavailable(_))));

    let text = metrics.render();
    for (method, result) in [
        ("get", "ok"),
        ("get", "empty"),
        ("get", "unavailable"),
        ("complete", "ok"),
        ("reject", "ok"),
        ("reject", "empty"),
        ("reject", "invalid"),
        ("extend", "ok"),
    ] {
        let line = format!("taskd_tasks_calls_total{{method=\"{method}\",result=\"{result}\"}} 1\n");
        assert!(text.contains(&line), "{line} is not in\n{text}");
    }
    assert!(text.contains("taskd_tasks_call_duration_seconds_count{method=\"get\"} 3\n"), "{text}");
    supervisor.stop();
    supervisor.wait().await;
}

/// The service over queues with one task each.
struct Service {
    tasks: tasks::Handle,
    bus: Arc<RedisStreams>,
    redis: Redis,
    supervisor: Supervisor,
    _server: RedisServer,
}

impl Service {
    async fn start(queues: &[&str]) -> Self {
        let server = RedisServer::start(Fsync::EverySecond);
        let redis = Redis::connect(&server.url(), "t").await.unwrap();
        let queue = Queue::new(redis.clone());
        for name in queues {
            one_task(&queue, name).await;
        }
        let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
        let supervisor = Supervisor::new();
        let tasks = tasks::start(queue, bus.clone(), &Arc::new(Settings::default()), &supervisor);
        Self { tasks, bus, redis, supervisor, _server: server }
    }

    async fn lease(&self, queue: &str) -> pb::LeasedTask {
        let get = pb::GetTasksRequest { worker: "w".into(), queues: vec![queue.into()], ..Default::default() };
        self.tasks.get(get).await.unwrap().deliver().tasks.remove(0)
    }

    async fn complete(&self, leased: &pb::LeasedTask, discovered: Vec<pb::NewTask>) -> pb::ItemResult {
        let (id, lease_token) = (leased.id.clone(), leased.lease_token.clone());
        let completion = pb::Completion { id, lease_token, discovered, ..Default::default() };
        let complete = pb::CompleteTasksRequest { worker: "w".into(), completions: vec![completion] };
        self.tasks.complete(complete).await.unwrap().results.remove(0)
    }

    async fn reject(&self, leased: &pb::LeasedTask, delay_s: i64) -> pb::ItemResult {
        let (id, lease_token) = (leased.id.clone(), leased.lease_token.clone());
        let delay = Some(prost_types::Duration { seconds: delay_s, nanos: 0 });
        let rejection = pb::Rejection { id, lease_token, delay, ..Default::default() };
        let reject = pb::RejectTasksRequest { worker: "w".into(), rejections: vec![rejection] };
        self.tasks.reject(reject).await.unwrap().results.remove(0)
    }

    async fn stop(self) {
        self.supervisor.stop();
        self.supervisor.wait().await;
    }
}

#[tokio::test]
async fn a_report_larger_than_the_bus_takes_is_invalid() {
    let service = Service::start(&["q"]).await;
    let leased = service.lease("q").await;
    let task = pb::NewTask { queue: "q".into(), payload: vec![0; 900_000].into(), ..Default::default() };
    let result = service.complete(&leased, vec![task.clone(); 20]).await;
    assert_eq!(result.status(), pb::ItemStatus::Invalid);
    assert!(result.error.ends_with("bytes together; at most 8388608"), "{}", result.error);
    assert_eq!(service.complete(&leased, vec![task; 9]).await.status(), pb::ItemStatus::Ok);
    service.stop().await;
}

#[tokio::test]
async fn a_task_is_rejected_for_a_year_at_most() {
    let service = Service::start(&["q"]).await;
    let leased = service.lease("q").await;
    let result = service.reject(&leased, 365 * 24 * 3600 + 1).await;
    assert_eq!(result.status(), pb::ItemStatus::Invalid);
    assert_eq!(result.error, "delay is 31536001s; at most 31536000s, 365 days");
    assert_eq!(service.reject(&leased, 365 * 24 * 3600).await.status(), pb::ItemStatus::Ok);
    service.stop().await;
}

#[tokio::test]
async fn a_damaged_outbox_holds_up_no_other_shard() {
    let service = Service::start(&["a", "q"]).await;
    let damage = redis::cmd("XADD").arg("t:{a:0}:S").arg(&["*", "x", "no id"]).clone();
    damage.query_async::<()>(&mut service.redis.conn()).await.unwrap();
    let leased = service.lease("q").await;
    assert_eq!(service.complete(&leased, vec![]).await.status(), pb::ItemStatus::Ok);
    until("the report of q is on the bus", async || service.bus.ends(Topic::TaskResults).await.unwrap()[0].is_some())
        .await;
    service.stop().await;
}
