//! The tasks service over a real queue, without the pipelines around it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::poll;
use metrics_exporter_prometheus::PrometheusBuilder;
use prost::Message as _;
use taskd::{
    api::{Api, Authentication, Error, Kind},
    bus::{Bus, Log, Reading, Topic, redis_streams::RedisStreams},
    config::Settings,
    model::{
        Access, Batch, Caller, Client, Completion, Encoding, Extension, GetTasks, Item, ItemAnswer,
        ItemStatus, LeaseToken, LeasedTask, NewTask, Offset, Protocol, QueueName, Rejection,
        ShardId, TaskBody, TaskId, validate,
    },
    pipelines::{admission::KnownTopologies, tasks},
    queue::{Enqueue, EnqueueTask, Queue, Source},
    redis_pool::Redis,
    runtime::Supervisor,
    store::{NewRow, Settlement, Store, Unpublished},
    wire::{
        self,
        pb::{self, tasks_client::TasksClient},
    },
};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::{
    discovery_insert::watched,
    ingress_grpc, ingress_http,
    support::{
        redis::{Fsync, RedisServer},
        sqlite::SqliteFile,
        store_contract::Database,
        until,
    },
};

const CALLER: Caller = Caller {
    client: Client {
        protocol: Protocol::Grpc,
        peer: None,
    },
    access: Access::Open,
};

/// The operations of a process that runs this service alone.
fn api_of(tasks: tasks::Handle) -> Api {
    Api {
        discovery: None,
        tasks: Some(tasks),
        query: None,
        changing: None,
        authentication: Authentication::Open,
        waits: taskd::api::Waits::default(),
        workers: taskd::api::HeardWorkers::new(taskd::runtime::Clock::of_this_machine()),
        stop: CancellationToken::new(),
    }
}

/// A worker's report about a leased task.
fn item<T>(leased: &LeasedTask, report: T) -> Result<Item<T>, ItemAnswer> {
    Ok(Item {
        id: leased.id.to_string(),
        lease_token: leased.token.to_string(),
        report: Ok(report),
    })
}

fn batch<T>(items: Vec<Result<Item<T>, ItemAnswer>>) -> Batch<T> {
    Batch {
        worker: "w".into(),
        items,
    }
}

pub(crate) fn shard(name: &str) -> ShardId {
    ShardId {
        queue: QueueName::new(name).unwrap(),
        number: 0,
    }
}

/// A queue with one task.
async fn one_task(queue: &Queue, name: &str) {
    put(queue, name, TaskId::new(), 2, 1).await;
}

/// Puts a task in, at this offset of its own partition.
pub(crate) async fn put(queue: &Queue, name: &str, id: TaskId, priority: i32, offset: u64) {
    put_in(queue, name, task(id, priority, offset)).await;
}

pub(crate) fn task(id: TaskId, priority: i32, offset: u64) -> EnqueueTask {
    let record = pb::PipelineRecord {
        priority,
        max_attempts: 5,
        lease_ms: 30_000,
        ..Default::default()
    };
    let offset = Offset {
        major: offset,
        minor: 0,
    };
    let (body, credited) = (wire::body_blob(&record), vec![]);
    EnqueueTask {
        offset,
        id,
        replicas: 1,
        not_before_unix_ms: 0,
        body,
        credited,
        epoch: 0,
    }
}

async fn put_in(queue: &Queue, name: &str, task: EnqueueTask) {
    let shard = shard(name);
    queue
        .upkeep
        .open_shard(&shard, 1, "topic", None)
        .await
        .unwrap();
    queue.add_shard(&shard);
    queue.enqueuer.enqueue(&shard, &alone(&task)).await.unwrap();
}

/// A batch with one task.
pub(crate) fn alone(task: &EnqueueTask) -> Enqueue<'_> {
    Enqueue {
        source: Source::Partition {
            topic_generation: "topic",
            epoch: 1,
            predecessor: None,
            upto: task.offset,
            again: false,
        },
        tasks: std::slice::from_ref(task),
        high_water_tasks: 100,
        high_water_bytes: 1 << 30,
        live_tasks_max: u64::MAX,
    }
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
    let file = SqliteFile::create().await;
    let tasks = tasks::start(
        queue,
        file.open().await,
        bus,
        KnownTopologies::default(),
        &Arc::new(Settings::default()),
        &supervisor,
    );
    let loops = [
        "allotments",
        "deliveries",
        "forward",
        "notices",
        "sessions",
        "shared_sessions",
    ];
    assert_eq!(
        watched(&supervisor),
        loops.map(|name| format!("tasks/{name}"))
    );

    let api = api_of(tasks);
    let get = || {
        api.get(
            &CALLER,
            Ok(GetTasks {
                worker: "w".into(),
                queues: vec!["q".into()],
                ..Default::default()
            }),
        )
    };
    let leased = get().await.unwrap().deliver().remove(0);
    assert!(get().await.unwrap().tasks.is_empty());
    let by = Some(Duration::from_secs(30));
    api.extend(&CALLER, batch(vec![item(&leased, Extension { by })]))
        .await
        .unwrap();
    api.complete(&CALLER, batch(vec![item(&leased, Completion::default())]))
        .await
        .unwrap();
    let rejection = Rejection {
        reason: String::new(),
        retry: true,
        delay: None,
        not_started: false,
        limit: Default::default(),
    };
    let reject = batch(vec![item(&leased, rejection)]);
    api.reject(&CALLER, reject.clone()).await.unwrap();
    api.reject(
        &CALLER,
        Batch {
            items: vec![],
            ..reject.clone()
        },
    )
    .await
    .unwrap();
    let nobody = api
        .reject(
            &CALLER,
            Batch {
                worker: String::new(),
                ..reject
            },
        )
        .await
        .unwrap_err();
    assert_eq!(nobody.kind(), Kind::Invalid, "{nobody:?}");
    server.kill9();
    assert_eq!(
        get().await.map(|_| ()).unwrap_err().kind(),
        Kind::Unavailable
    );

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
        let line =
            format!("taskd_tasks_calls_total{{method=\"{method}\",result=\"{result}\"}} 1\n");
        assert!(text.contains(&line), "{line} is not in\n{text}");
    }
    assert!(
        text.contains("taskd_tasks_call_duration_seconds_count{method=\"get\"} 3\n"),
        "{text}"
    );
    supervisor.stop();
    supervisor.wait().await;
}

#[tokio::test]
async fn a_grpc_item_that_is_wrong_is_answered_and_counted_as_invalid() {
    use pb::ItemStatus::{Invalid, Ok};
    let recorder = PrometheusBuilder::new().build_recorder();
    let metrics = recorder.handle();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let service = Service::start(&["q"]).await;
    let leased = service.lease("q").await;
    let mut state = ingress_http::idle_state(|_| {});
    state.api = Arc::clone(&service.api);
    let (channel, _server) = ingress_grpc::start(state).await;
    let mut client = TasksClient::new(channel);
    let (id, lease_token, worker) = (
        leased.id.to_string(),
        leased.token.to_string(),
        "w".to_owned(),
    );
    let negative = Some(prost_types::Duration {
        seconds: -1,
        nanos: 0,
    });

    let extension = pb::Extension {
        id: id.clone(),
        lease_token: lease_token.clone(),
        by: negative,
    };
    let request = pb::ExtendTasksRequest {
        worker: worker.clone(),
        extensions: vec![extension],
    };
    let answers = client
        .extend_tasks(request)
        .await
        .unwrap()
        .into_inner()
        .results;
    assert_eq!(
        (answers[0].status(), &answers[0].error[..]),
        (Invalid, "by is negative or out of range")
    );
    let rejection = pb::Rejection {
        id: id.clone(),
        lease_token: lease_token.clone(),
        delay: negative,
        ..Default::default()
    };
    let request = pb::RejectTasksRequest {
        worker: worker.clone(),
        rejections: vec![rejection],
    };
    let answers = client
        .reject_tasks(request)
        .await
        .unwrap()
        .into_inner()
        .results;
    assert_eq!(
        (answers[0].status(), &answers[0].error[..]),
        (Invalid, "delay is negative or out of range")
    );
    let right = pb::Completion {
        id,
        lease_token,
        ..Default::default()
    };
    let unknown = pb::Completion {
        result_encoding: 9,
        ..right.clone()
    };
    let discovered = vec![pb::NewTask {
        priority: 9,
        queue: "q".into(),
        key: "k".into(),
        ..Default::default()
    }];
    let completions = vec![
        unknown.clone(),
        pb::Completion {
            discovered,
            ..right
        },
    ];
    let request = pb::CompleteTasksRequest {
        worker: worker.clone(),
        completions,
        next: None,
    };
    let answers = client
        .complete_tasks(request)
        .await
        .unwrap()
        .into_inner()
        .results;
    assert_eq!(
        [0, 1].map(|n| answers[n].status()),
        [Invalid, Ok],
        "{answers:?}"
    );
    assert_eq!(
        answers[0].error,
        "result_encoding 9 is unknown; expected BYTES, TEXT or JSON"
    );
    let note = "1 discovered task is not stored: discovered[0]: priority 9 is unknown; expected high, medium or low";
    assert_eq!(answers[1].error, note);
    let nobody = pb::CompleteTasksRequest {
        worker: String::new(),
        completions: vec![unknown],
        next: None,
    };
    assert_eq!(
        client.complete_tasks(nobody).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    let get = pb::GetTasksRequest {
        worker,
        queues: vec!["q".into()],
        wait: negative,
        ..Default::default()
    };
    let status = client.get_tasks(get).await.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::InvalidArgument, "wait is negative or out of range")
    );

    let text = metrics.render();
    for line in [
        r#"taskd_tasks_items_total{method="extend",status="INVALID"} 1"#,
        r#"taskd_tasks_items_total{method="reject",status="INVALID"} 1"#,
        r#"taskd_tasks_items_total{method="complete",status="INVALID"} 1"#,
        r#"taskd_tasks_items_total{method="complete",status="OK"} 1"#,
        r#"taskd_tasks_calls_total{method="extend",result="ok"} 1"#,
        r#"taskd_tasks_calls_total{method="reject",result="ok"} 1"#,
        r#"taskd_tasks_calls_total{method="complete",result="ok"} 1"#,
        r#"taskd_tasks_calls_total{method="complete",result="invalid"} 1"#,
        r#"taskd_tasks_calls_total{method="get",result="invalid"} 1"#,
    ] {
        assert!(
            text.contains(&format!("{line}\n")),
            "{line} is not in\n{text}"
        );
    }
    service.stop().await;
}

/// The service over queues with one task each.
pub(crate) struct Service {
    pub(crate) queue: Queue,
    api: Arc<Api>,
    bus: Arc<RedisStreams>,
    store: Arc<dyn Store>,
    pub(crate) redis: Redis,
    supervisor: Supervisor,
    server: RedisServer,
    _file: SqliteFile,
}

impl Service {
    pub(crate) async fn start(queues: &[&str]) -> Self {
        Self::start_on(queues, |bus| bus).await
    }

    /// The same with another bus in front of Redis Streams.
    pub(crate) async fn start_on(
        queues: &[&str],
        on: impl FnOnce(Arc<RedisStreams>) -> Arc<dyn Bus>,
    ) -> Self {
        let server = RedisServer::start(Fsync::EverySecond);
        let redis = Redis::connect(&server.url(), "t").await.unwrap();
        let queue = Queue::new(redis.clone());
        for name in queues {
            one_task(&queue, name).await;
        }
        let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
        let supervisor = Supervisor::new();
        queue.start_listening(&supervisor);
        let file = SqliteFile::create().await;
        let store = file.open().await;
        let tasks = tasks::start(
            queue.clone(),
            Arc::clone(&store),
            on(bus.clone()),
            KnownTopologies::default(),
            &Arc::new(Settings::default()),
            &supervisor,
        );
        Self {
            queue,
            api: Arc::new(api_of(tasks)),
            bus,
            store,
            redis,
            supervisor,
            server,
            _file: file,
        }
    }

    pub(crate) async fn get(
        &self,
        queues: &[&str],
        max_tasks: u32,
        wait_s: u64,
    ) -> Result<Vec<LeasedTask>, Error> {
        let get = GetTasks {
            worker: "w".into(),
            queues: queues.iter().map(ToString::to_string).collect(),
            max_tasks,
            wait: Duration::from_secs(wait_s),
            ..Default::default()
        };
        Ok(self.api.get(&CALLER, Ok(get)).await?.deliver())
    }

    pub(crate) async fn lease(&self, queue: &str) -> LeasedTask {
        self.get(&[queue], 1, 0).await.unwrap().remove(0)
    }

    pub(crate) async fn complete_all(
        &self,
        worker: &str,
        leased: &[&LeasedTask],
    ) -> Result<Vec<ItemStatus>, Error> {
        let items = leased
            .iter()
            .map(|leased| item(leased, Completion::default()))
            .collect();
        let answers = self
            .api
            .complete(
                &CALLER,
                Batch {
                    worker: worker.into(),
                    items,
                },
            )
            .await?;
        Ok(answers.iter().map(|answer| answer.status).collect())
    }

    pub(crate) async fn complete_each(
        &self,
        done: impl Iterator<Item = (&LeasedTask, Completion)>,
    ) {
        let items = done
            .map(|(leased, completion)| item(leased, completion))
            .collect();
        let answers = self.api.complete(&CALLER, batch(items)).await.unwrap();
        assert!(
            answers.iter().all(|answer| answer.status == ItemStatus::Ok),
            "{answers:?}"
        );
    }

    async fn complete(&self, leased: &LeasedTask, discovered: Vec<NewTask>) -> ItemAnswer {
        let completion = Completion {
            discovered,
            ..Default::default()
        };
        self.api
            .complete(&CALLER, batch(vec![item(leased, completion)]))
            .await
            .unwrap()
            .remove(0)
    }

    pub(crate) fn redis_url(&self) -> String {
        self.server.url()
    }

    pub(crate) async fn redis(&self, command: &str, args: &[&str]) {
        redis::cmd(command)
            .arg(args)
            .query_async::<redis::Value>(&mut self.redis.conn())
            .await
            .unwrap();
    }

    /// Every call on the queue's shard fails until [`Self::mend`].
    async fn damage(&self, queue: &str) {
        self.redis(
            "RENAME",
            &[&format!("t:{{{queue}:0}}:generation"), "t:aside"],
        )
        .await;
        self.redis(
            "RPUSH",
            &[&format!("t:{{{queue}:0}}:generation"), "not a string"],
        )
        .await;
    }

    async fn mend(&self, queue: &str) {
        self.redis(
            "RENAME",
            &["t:aside", &format!("t:{{{queue}:0}}:generation")],
        )
        .await;
    }

    pub(crate) async fn reject(&self, leased: &LeasedTask, delay_s: u64) -> ItemAnswer {
        let delay = Some(Duration::from_secs(delay_s));
        let rejection = Rejection {
            reason: String::new(),
            retry: true,
            delay,
            not_started: false,
            limit: Default::default(),
        };
        self.api
            .reject(&CALLER, batch(vec![item(leased, rejection)]))
            .await
            .unwrap()
            .remove(0)
    }

    pub(crate) async fn stop(self) {
        self.supervisor.stop();
        self.supervisor.wait().await;
    }
}

#[tokio::test]
async fn a_stop_gives_back_what_a_claim_leased_for_a_caller_that_had_left() {
    let service = Service::start(&["q"]).await;
    // Redis answers behind the time that a stop takes.
    service.redis("CLIENT", &["PAUSE", "1000"]).await;
    let mut get = Box::pin(service.get(&["q"], 1, 0));
    for _ in 0..10 {
        assert!(poll!(&mut get).is_pending());
        tokio::task::yield_now().await;
    }
    drop(get);
    service.supervisor.stop();
    service.supervisor.wait().await;
    let stats = service.queue.stats(&shard("q")).await.unwrap();
    assert_eq!((stats.open, stats.leases), (1, 0));
}

#[tokio::test]
async fn a_report_larger_than_the_bus_takes_is_invalid() {
    let service = Service::start(&["q"]).await;
    let leased = service.lease("q").await;
    let task = NewTask {
        queue: "q".into(),
        payload: vec![0; 900_000].into(),
        ..Default::default()
    };
    let result = service.complete(&leased, vec![task.clone(); 20]).await;
    assert_eq!(result.status, ItemStatus::Invalid);
    assert!(
        result.error.contains("bytes together; at most 8388608"),
        "{}",
        result.error
    );
    assert_eq!(
        service.complete(&leased, vec![task; 9]).await.status,
        ItemStatus::Ok
    );
    service.stop().await;
}

#[tokio::test]
async fn a_task_that_has_not_started_goes_back_at_no_cost_to_others_first() {
    let service = Service::start(&["q"]).await;
    let give_back = async |worker: &str, leased: &LeasedTask, retry, delay| {
        let rejection = Rejection {
            reason: String::new(),
            retry,
            delay,
            not_started: true,
            limit: Default::default(),
        };
        let items = Batch {
            worker: worker.into(),
            items: vec![item(leased, rejection)],
        };
        service.api.reject(&CALLER, items).await.unwrap().remove(0)
    };
    let get_by = async |worker: &str, wait_s| {
        let (worker, queues, wait) = (worker.into(), vec!["q".into()], Duration::from_secs(wait_s));
        let get = GetTasks {
            worker,
            queues,
            max_tasks: 1,
            wait,
            ..Default::default()
        };
        service.api.get(&CALLER, Ok(get)).await.unwrap().deliver()
    };
    // More often than it may fail, and each time by another worker.
    for n in 0..6 {
        let worker = format!("w{n}");
        let leased = get_by(&worker, 0).await.remove(0);
        assert_eq!(leased.token.attempt, 1);
        let answer = give_back(&worker, &leased, false, None).await;
        assert_eq!(answer.status, ItemStatus::Invalid);
        assert!(
            answer.error.starts_with("not_started does not go with"),
            "{}",
            answer.error
        );
        assert_eq!(
            give_back(&worker, &leased, true, Some(Duration::ZERO))
                .await
                .status,
            ItemStatus::Ok
        );
        assert_eq!(
            give_back(&worker, &leased, true, None).await.status,
            ItemStatus::LeaseLost
        );
    }
    // If nobody else asks, it comes back a moment later: nothing else wakes the caller.
    let leased = get_by("w", 0).await.remove(0);
    let given_back = Instant::now();
    assert_eq!(
        give_back("w", &leased, true, None).await.status,
        ItemStatus::Ok
    );
    let leased = get_by("w", 60).await.remove(0);
    assert_eq!(leased.token.attempt, 1);
    assert!(
        given_back.elapsed() > Duration::from_millis(900),
        "{:?}",
        given_back.elapsed()
    );
    assert!(
        given_back.elapsed() < Duration::from_secs(30),
        "{:?}",
        given_back.elapsed()
    );
    // With a delay it waits for everybody, and costs nothing either.
    assert_eq!(
        give_back("w", &leased, true, Some(Duration::from_secs(3600)))
            .await
            .status,
        ItemStatus::Ok
    );
    assert!(get_by("v", 0).await.is_empty());
    let stats = service.queue.stats(&shard("q")).await.unwrap();
    assert_eq!((stats.delayed, stats.open), (1, 0));
    service.stop().await;
}

#[tokio::test]
async fn a_task_is_rejected_for_a_year_at_most() {
    let service = Service::start(&["q"]).await;
    let leased = service.lease("q").await;
    let result = service.reject(&leased, 365 * 24 * 3600 + 1).await;
    assert_eq!(result.status, ItemStatus::Invalid);
    assert_eq!(
        result.error,
        "delay is 31536001s; at most 31536000s, 365 days"
    );
    assert_eq!(
        service.reject(&leased, 365 * 24 * 3600).await.status,
        ItemStatus::Ok
    );
    service.stop().await;
}

#[tokio::test]
async fn a_damaged_outbox_holds_up_no_other_shard() {
    let service = Service::start(&["a", "q"]).await;
    let damage = redis::cmd("XADD")
        .arg("t:{a:0}:outbox")
        .arg(&["*", "x", "no id"])
        .clone();
    damage
        .query_async::<()>(&mut service.redis.conn())
        .await
        .unwrap();
    let leased = service.lease("q").await;
    assert_eq!(
        service.complete(&leased, vec![]).await.status,
        ItemStatus::Ok
    );
    until("the report of q is on the bus", async || {
        service.bus.ends(Topic::TaskResults).await.unwrap()[0].is_some()
    })
    .await;
    service.stop().await;
}

#[tokio::test]
async fn one_shard_that_fails_fails_its_own_items_only() {
    let service = Service::start(&["a", "q"]).await;
    let of_a = service.lease("a").await;
    service.damage("a").await;
    let of_q = service.get(&["a", "q"], 10, 0).await.unwrap().remove(0);
    assert_eq!(of_q.token.shard.queue.as_str(), "q");
    let extension = |of: &LeasedTask| {
        item(
            of,
            Extension {
                by: Some(Duration::from_secs(60)),
            },
        )
    };
    let extended = service
        .api
        .extend(&CALLER, batch(vec![extension(&of_a), extension(&of_q)]))
        .await
        .unwrap();
    let statuses = [extended[0].status, extended[1].status];
    assert_eq!(statuses, [ItemStatus::TryLater, ItemStatus::Ok]);
    let statuses = service.complete_all("w", &[&of_a, &of_q]).await.unwrap();
    assert_eq!(statuses, [ItemStatus::TryLater, ItemStatus::Ok]);

    // Where nothing else is named there is no answer at all.
    let kind = |error: Error| error.kind();
    assert_eq!(
        service.get(&["a"], 1, 30).await.map_err(kind).unwrap_err(),
        Kind::Unavailable
    );
    assert_eq!(
        service
            .complete_all("w", &[&of_a])
            .await
            .map_err(kind)
            .unwrap_err(),
        Kind::Unavailable
    );
    let of_both = service.get(&["a", "q"], 1, 0).await;
    assert_eq!(
        of_both.map_err(kind).unwrap_err(),
        Kind::Unavailable,
        "nothing else was there"
    );
    service.mend("a").await;
    assert_eq!(
        service.complete_all("w", &[&of_a]).await.unwrap(),
        [ItemStatus::Ok]
    );
    service.stop().await;
}

#[tokio::test]
async fn a_worker_waits_for_the_shards_that_answer() {
    let service = Service::start(&["a", "q"]).await;
    service.lease("q").await;
    service.damage("a").await;
    let later = async {
        until("the worker waits", async || {
            service.queue.wakes().is_awaited(&shard("q").queue)
        })
        .await;
        put(&service.queue, "q", TaskId::new(), 2, 2).await;
    };
    let (got, ()) = tokio::join!(service.get(&["a", "q"], 1, 60), later);
    assert_eq!(got.unwrap()[0].token.shard.queue.as_str(), "q");
    service.stop().await;
}

/// Two shards, of which either has nearly enough for one answer.
#[tokio::test]
async fn an_answer_of_several_shards_has_its_bytes_and_no_task_more() {
    let service = Service::start(&["a", "b"]).await;
    let shards = ["a", "b"];
    let body = pb::TaskBody {
        payload: vec![b'x'; 700 << 10].into(),
        replicas: 1,
        ..Default::default()
    };
    let record = pb::PipelineRecord {
        priority: 2,
        max_attempts: 5,
        lease_ms: 30_000,
        body: body.encode_to_vec().into(),
        ..Default::default()
    };
    for (name, n) in shards
        .iter()
        .flat_map(|name| (2..7).map(move |n| (name, n)))
    {
        let (id, offset) = (TaskId::new(), Offset { major: n, minor: 0 });
        let (body, credited) = (wire::body_blob(&record), vec![]);
        let task = EnqueueTask {
            offset,
            id,
            replicas: 1,
            not_before_unix_ms: 0,
            body,
            credited,
            epoch: 0,
        };
        put_in(&service.queue, name, task).await;
    }
    let got = service.get(&shards, 100, 0).await.unwrap();
    let bytes: usize = got.iter().map(|task| task.body.payload.len()).sum();
    assert!(
        bytes <= 7 << 19 && bytes > 3 << 20,
        "{} tasks of {bytes} bytes",
        got.len()
    );
    service.stop().await;
}

#[tokio::test]
async fn the_most_urgent_of_all_queues_named_goes_first() {
    let names = ["a", "b", "c"];
    let service = Service::start(&names).await;
    for (n, name) in names.iter().enumerate() {
        put(&service.queue, name, TaskId::new(), 3, 2).await;
        put(&service.queue, name, TaskId::new(), 1, 3 + n as u64).await;
    }
    let mut order = Vec::new();
    for _ in 0..9 {
        order.push(service.get(&names, 1, 0).await.unwrap()[0].id);
    }
    let of_priority = async |priority: i32| {
        let bodies: Vec<_> = names
            .iter()
            .map(|name| format!("t:{{{name}:0}}:bodies"))
            .collect();
        let mut ids = Vec::new();
        for key in bodies {
            let all: Vec<(Vec<u8>, Vec<u8>)> = redis::cmd("HGETALL")
                .arg(key)
                .query_async(&mut service.redis.conn())
                .await
                .unwrap();
            let of = all
                .into_iter()
                .filter(|(_, body)| i32::from(body[0]) == priority);
            ids.extend(of.filter_map(|(id, _)| TaskId::from_slice(&id)));
        }
        ids
    };
    for (n, priority) in [1, 2, 3].into_iter().enumerate() {
        let of_priority = of_priority(priority).await;
        assert!(
            order[n * 3..n * 3 + 3]
                .iter()
                .all(|id| of_priority.contains(id)),
            "priority {priority}"
        );
    }
    service.stop().await;
}

#[tokio::test]
async fn reports_that_come_one_by_one_are_on_the_bus_once_and_leave_the_outbox() {
    let service = Service::start(&["q"]).await;
    let mut ids = Vec::new();
    for offset in 2..30 {
        let leased = service.lease("q").await;
        assert_eq!(
            service.complete(&leased, vec![]).await.status,
            ItemStatus::Ok
        );
        ids.push(leased.id);
        put(&service.queue, "q", TaskId::new(), 2, offset).await;
    }
    // The stop waits for the last of them.
    service.supervisor.stop();
    service.supervisor.wait().await;
    let left = redis::cmd("XLEN")
        .arg("t:{q:0}:outbox")
        .query_async::<u64>(&mut service.redis.conn())
        .await
        .unwrap();
    assert_eq!(left, 0);
    let mut reader = service
        .bus
        .subscribe(Topic::TaskResults, Reading::Shared)
        .await
        .unwrap();
    let mut reported = Vec::new();
    while reported.len() < ids.len() {
        for message in reader.next(100).await.unwrap() {
            let reports = wire::read_reports(&message.value).unwrap().reports;
            reported.extend(reports.into_iter().map(|report| report.unwrap().id));
        }
    }
    assert_eq!(reported, ids);
}

#[tokio::test]
async fn a_worker_that_waits_is_woken_for_a_shard_that_was_empty_a_moment_ago() {
    let service = Service::start(&["a", "q"]).await;
    let queues = ["a", "q"];
    for offset in 2..50 {
        // The claim before took the last task of both, or found nothing.
        assert!(service.get(&queues, 10, 0).await.unwrap().len() < 3);
        let id = TaskId::new();
        let put = async {
            tokio::task::yield_now().await;
            put(&service.queue, queues[offset % 2], id, 2, offset as u64).await;
        };
        let (leased, ()) = tokio::join!(service.get(&queues, 1, 30), put);
        assert_eq!(
            leased
                .unwrap()
                .iter()
                .map(|leased| leased.id)
                .collect::<Vec<_>>(),
            [id]
        );
    }
    service.stop().await;
}

#[tokio::test]
async fn a_repeat_is_ok_for_as_long_as_sql_has_the_result() {
    let service = Service::start(&[]).await;
    let task = NewTask {
        queue: "q".into(),
        key: "k".into(),
        ..Default::default()
    };
    let task = validate::task_row(
        task,
        TaskId::new(),
        &Settings::default().task_rules("q"),
        1,
        1,
    )
    .unwrap();
    let id = task.id;
    let row = NewRow {
        task,
        unpublished: Unpublished::Fresh,
        due_unix_ms: 0,
    };
    service.store.insert(&[row]).await.unwrap();
    put(&service.queue, "q", id, 2, 1).await;
    let leased = service.lease("q").await;
    assert_eq!(
        service.complete_all("w", &[&leased]).await.unwrap(),
        [ItemStatus::Ok]
    );
    let token = leased.token.clone();
    let done = Settlement::Completed {
        id,
        worker: "w".into(),
        lease: token.lease(),
        result: "".into(),
        encoding: Encoding::Text,
        attempt: 1,
        leased_unix_ms: 0,
        at_unix_ms: 1,
        discovered: vec![],
        joining: None,
    };
    service.store.settle(&[done]).await.unwrap();

    // It was missing in Redis, for another worker, and is there again: the queue knows who, and not
    // by which lease.
    service.redis("DEL", &["t:{q:0}:records"]).await;
    let record = pb::PipelineRecord {
        priority: 2,
        max_attempts: 5,
        lease_ms: 30_000,
        ..Default::default()
    };
    let (offset, body) = (Offset { major: 9, minor: 0 }, wire::body_blob(&record));
    let again = EnqueueTask {
        offset,
        id,
        replicas: 2,
        not_before_unix_ms: 0,
        body,
        credited: vec!["w".into()],
        epoch: 0,
    };
    put_in(&service.queue, "q", again).await;
    assert_eq!(
        service.complete_all("w", &[&leased]).await.unwrap(),
        [ItemStatus::Ok]
    );

    let other = LeasedTask {
        id: TaskId::new(),
        ..leased.clone()
    };
    let later = LeasedTask {
        token: LeaseToken {
            grant: token.grant + 1,
            ..token.clone()
        },
        ..leased.clone()
    };
    let shard = ShardId {
        number: token.shard.number + 1,
        ..token.shard.clone()
    };
    let elsewhere = LeasedTask {
        token: LeaseToken { shard, ..token },
        ..leased.clone()
    };
    for lost in ["t:{q:0}:records", "t:{q:0}:generation"] {
        service.redis("DEL", &[lost]).await;
        assert_eq!(
            service.complete_all("w", &[&leased]).await.unwrap(),
            [ItemStatus::Ok],
            "without {lost}"
        );
        assert_eq!(
            service.complete_all("w", &[&later]).await.unwrap(),
            [ItemStatus::AlreadyCompleted]
        );
        assert_eq!(
            service.complete_all("w", &[&elsewhere]).await.unwrap(),
            [ItemStatus::AlreadyCompleted]
        );
        assert_eq!(
            service.complete_all("v", &[&leased]).await.unwrap(),
            [ItemStatus::AlreadyCompleted]
        );
        let unknown = service.complete_all("w", &[&other]).await.unwrap()[0];
        assert!(
            matches!(unknown, ItemStatus::UnknownTask | ItemStatus::LeaseLost),
            "{unknown:?}"
        );
    }
    service.stop().await;
}

/// Redis reads at once what was sent without waiting for answers in between.
#[tokio::test]
async fn a_look_over_many_queues_asks_them_at_once() {
    let names: Vec<String> = (0..100).map(|n| format!("q{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let service = Service::start(&names).await;
    let reads = async || {
        let info: String = redis::cmd("INFO")
            .arg("stats")
            .query_async(&mut service.redis.conn())
            .await
            .expect("Redis answers");
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix("total_reads_processed:"));
        line.and_then(|reads| reads.parse::<u64>().ok())
            .expect("INFO counts reads")
    };
    assert_eq!(service.get(&names, 100, 0).await.unwrap().len(), 100);
    assert!(service.get(&names, 1, 0).await.unwrap().is_empty());
    let before = reads().await;
    assert!(service.get(&names, 1, 0).await.unwrap().is_empty());
    let took = reads().await - before;
    assert!(took < 50, "{took} reads for 100 queues");
    service.stop().await;
}

#[tokio::test]
async fn made_up_queues_cost_a_bounded_number_of_calls() {
    let service = Service::start(&[]).await;
    let made_up = |n: usize| {
        let token = format!("made-up-{n}:0:1:1:1:0").parse().unwrap();
        LeasedTask {
            id: TaskId::new(),
            token,
            expires_unix_ms: 0,
            lease: Duration::ZERO,
            body: TaskBody::default(),
        }
    };
    let all: Vec<_> = (0..300).map(made_up).collect();
    let statuses = service
        .complete_all("w", &all.iter().collect::<Vec<_>>())
        .await
        .unwrap();
    let of = |status| statuses.iter().filter(|other| **other == status).count();
    assert_eq!(
        (of(ItemStatus::LeaseLost), of(ItemStatus::Invalid)),
        (100, 200)
    );
    service.stop().await;
}

#[tokio::test]
async fn a_busy_shard_does_not_hold_up_the_reports_of_others() {
    let service = Service::start(&["a", "q"]).await;
    let leased = service.lease("q").await;
    // Faster than anybody forwards, so that the outbox of a is never empty.
    let add = "for i = 1, 3000 do redis.call('XADD', KEYS[1], '*', 'x', ARGV[1], 'w', 'w', 'a', '1', 'e', '0', 'n', '1', 'g', '1') end";
    let busy = async {
        loop {
            let mut eval = redis::cmd("EVAL");
            eval.arg(add)
                .arg(1)
                .arg("t:{a:0}:outbox")
                .arg(TaskId::new().as_bytes());
            let () = eval.query_async(&mut service.redis.conn()).await.unwrap();
        }
    };
    let forwarded = async {
        until("the forwarder is at a", async || {
            service.bus.logs().ends(&Log::EXPIRATIONS).await.unwrap()[0].is_some()
        })
        .await;
        assert_eq!(
            service.complete(&leased, vec![]).await.status,
            ItemStatus::Ok
        );
        until("the report of q is on the bus", async || {
            service.bus.ends(Topic::TaskResults).await.unwrap()[0].is_some()
        })
        .await;
    };
    tokio::select! {
        () = busy => {}
        () = forwarded => {}
    }
    service.redis("DEL", &["t:{a:0}:outbox"]).await;
    service.stop().await;
}
