//! Sessions without streams, and the cap of a worker, on several processes.

use serde_json::json;
use taskd::wire::pb::{self, ItemStatus, tasks_client::TasksClient};
use tonic::{Code, transport::Channel};

use crate::support::{
    daemon::Daemon,
    mariadb::MysqlDatabase,
    redis::{Fsync, RedisServer},
    session::{Worker, channel, completion, long_opening, opening, seconds},
    store_contract::Database,
    until,
};

const CONFIG: &str =
    "max_session_tasks = 8\nmax_worker_tasks = 10\n[queues.q]\nlease = \"10m\"\nbackoff = [\"0s\"]";

/// Two processes with the same servers.
struct Two {
    one: Daemon,
    two: Daemon,
    redis: RedisServer,
    database: MysqlDatabase,
}

impl Two {
    async fn start() -> Self {
        let (redis, database) = (
            RedisServer::start(Fsync::Always),
            MysqlDatabase::create().await,
        );
        let (redis_url, database_url) = (redis.url(), database.url());
        let backends = ["--redis-url", &redis_url, "--database-url", &database_url];
        let (one, two) = (
            Daemon::start(CONFIG, &backends).await,
            Daemon::start(CONFIG, &backends).await,
        );
        Self {
            one,
            two,
            redis,
            database,
        }
    }

    async fn insert(&self, from: usize, to: usize) {
        let task = |n: usize| json!({"queue": "q", "key": format!("{n}")});
        self.one
            .insert(&(from..to).map(task).collect::<Vec<_>>())
            .await;
    }

    /// The keys of sessions that Redis has.
    async fn keys(&self) -> Vec<String> {
        let client = redis::Client::open(self.redis.url()).unwrap();
        let mut conn = crate::support::redis::connect(&client).await.unwrap();
        redis::cmd("KEYS")
            .arg("taskd:{sessions:*")
            .query_async(&mut conn)
            .await
            .unwrap()
    }

    async fn end(mut self) {
        assert!(self.one.stop().await.success());
        assert!(self.two.stop().await.success());
        self.database.remove().await;
    }
}

async fn client(daemon: &Daemon) -> TasksClient<Channel> {
    TasksClient::new(channel(daemon.grpc_port()).await)
}

/// A session, as its client knows it: any process takes its calls.
struct Session {
    worker: &'static str,
    id: String,
    granted: u32,
}

impl Session {
    async fn open(daemon: &Daemon, worker: &'static str, open: pb::OpenSessionRequest) -> Self {
        let (queues, tells_started) = (vec!["q".to_owned()], true);
        let open = pb::OpenSessionRequest {
            worker: worker.into(),
            queues,
            tells_started,
            ..open
        };
        let opened = client(daemon)
            .await
            .open_session(open)
            .await
            .unwrap()
            .into_inner();
        Self {
            worker,
            id: opened.session,
            granted: opened.granted,
        }
    }

    async fn want(&self, daemon: &Daemon, want: u32, wait: i64) -> pb::WantTasksResponse {
        let (worker, session) = (self.worker.into(), self.id.clone());
        let want = pb::WantTasksRequest {
            worker,
            session,
            want,
            wait: seconds(wait),
        };
        client(daemon)
            .await
            .want_tasks(want)
            .await
            .unwrap()
            .into_inner()
    }

    /// Takes tasks until it has so many.
    async fn tasks(&self, daemon: &Daemon, count: usize) -> Vec<pb::LeasedTask> {
        let mut tasks = Vec::new();
        until("it has as many tasks", async || {
            tasks.extend(self.want(daemon, 0, 1).await.tasks);
            tasks.len() == count
        })
        .await;
        tasks
    }

    async fn report(
        &self,
        daemon: &Daemon,
        report: pb::ReportTasksRequest,
    ) -> pb::ReportTasksResponse {
        let report = pb::ReportTasksRequest {
            worker: self.worker.into(),
            session: self.id.clone(),
            ..report
        };
        client(daemon)
            .await
            .report_tasks(report)
            .await
            .unwrap()
            .into_inner()
    }

    async fn complete(&self, daemon: &Daemon, tasks: &[pb::LeasedTask]) -> pb::ReportTasksResponse {
        let completions = tasks.iter().map(completion).collect();
        self.report(
            daemon,
            pb::ReportTasksRequest {
                completions,
                ..Default::default()
            },
        )
        .await
    }

    async fn close(&self, daemon: &Daemon) -> Result<pb::CloseSessionResponse, tonic::Status> {
        let close = pb::CloseSessionRequest {
            worker: self.worker.into(),
            session: self.id.clone(),
        };
        Ok(client(daemon)
            .await
            .close_session(close)
            .await?
            .into_inner())
    }
}

#[tokio::test]
async fn any_process_serves_a_session_and_another_ends_it_when_one_is_killed() {
    let mut all = Two::start().await;
    all.insert(0, 6).await;
    let open = pb::OpenSessionRequest {
        want: 4,
        timeout: seconds(10),
        ..Default::default()
    };
    let session = Session::open(&all.one, "w", open).await;
    assert_eq!(session.granted, 4);
    let tasks = session.tasks(&all.two, 4).await;
    let answer = session.complete(&all.one, &tasks[..1]).await;
    assert_eq!(
        (
            answer.counted,
            answer.in_hand,
            answer.completions[0].status()
        ),
        (1, 3, ItemStatus::Ok)
    );
    assert_eq!(
        session.complete(&all.two, &tasks[..1]).await.counted,
        0,
        "a repeat at another process"
    );
    let started = vec![tasks[1].id.clone()];
    session
        .report(
            &all.two,
            pb::ReportTasksRequest {
                started,
                ..Default::default()
            },
        )
        .await;
    // The process that opened it dies, and then its worker.
    all.one.kill9();
    assert_eq!(session.want(&all.two, 0, 0).await.in_hand, 3);
    let mut attempts: Vec<_> = Vec::new();
    until("its tasks are back", async || {
        let leased = all.two.lease("v", "q", 10, "1s").await;
        attempts.extend(
            leased
                .into_iter()
                .map(|task| (task["id"].clone(), task["attempt"].clone())),
        );
        attempts.len() == 5
    })
    .await;
    let failed: Vec<_> = attempts
        .iter()
        .filter(|(_, attempt)| *attempt != 1)
        .collect();
    assert_eq!(
        failed,
        [&(json!(tasks[1].id), json!(2))],
        "only what was started has failed"
    );
    until("nothing is left", async || all.keys().await.is_empty()).await;
    assert_eq!(
        session.close(&all.two).await.unwrap_err().code(),
        Code::NotFound
    );
    all.one.start_again();
    all.one.ready().await;
    all.end().await;
}

#[tokio::test]
async fn the_cap_of_a_worker_holds_over_processes_and_both_kinds_of_sessions() {
    let all = Two::start().await;
    // A stream takes what it may, …
    let mut stream = Worker::open(all.one.grpc_port(), long_opening("w", 7))
        .await
        .unwrap();
    assert_eq!(stream.opened.granted, 7);
    // … and the others get exactly the rest, whatever the first process kept for its streams.
    let open = pb::OpenSessionRequest {
        want: 2,
        timeout: seconds(600),
        ..Default::default()
    };
    let session = Session::open(&all.two, "w", open).await;
    assert_eq!(session.granted, 2);
    let mut second = Worker::open(all.two.grpc_port(), long_opening("w", 5))
        .await
        .unwrap();
    let mut granted = second.opened.granted;
    until("the first process keeps no more than it uses", async || {
        granted += second
            .ask(pb::WorkerFrame {
                want: 5,
                ..Default::default()
            })
            .await
            .unwrap()
            .granted;
        granted >= 1
    })
    .await;
    assert_eq!(granted, 1);
    assert_eq!(session.want(&all.one, 3, 0).await.granted, 0);
    // Another worker has a cap of its own.
    let other = Session::open(
        &all.two,
        "v",
        pb::OpenSessionRequest {
            want: 9,
            ..Default::default()
        },
    )
    .await;
    assert_eq!(other.granted, 8);
    other.close(&all.one).await.unwrap();

    // A surrender and a report make room for the others, and for no more.
    let surrendered = second
        .ask(pb::WorkerFrame {
            surrender: true,
            ..Default::default()
        })
        .await
        .unwrap()
        .surrendered;
    assert_eq!(surrendered, 1);
    let mut granted = 0;
    until("the session gets what is free", async || {
        granted += session.want(&all.one, 3, 0).await.granted;
        granted >= 1
    })
    .await;
    all.insert(0, 7).await;
    let tasks = stream.tasks(7).await;
    assert_eq!(stream.complete(&tasks[..4], 0).await, [ItemStatus::Ok; 4]);
    until("the second stream gets what is free", async || {
        granted += second
            .ask(pb::WorkerFrame {
                want: 8,
                ..Default::default()
            })
            .await
            .unwrap()
            .granted;
        granted >= 5
    })
    .await;
    assert_eq!(
        granted, 5,
        "three in hand, three wanted by the session, four by the second stream"
    );
    assert_eq!(session.want(&all.two, 9, 0).await.granted, 0);

    // With its last session a worker leaves no key.
    stream.close().await;
    session.close(&all.one).await.unwrap();
    second.close().await;
    until("nothing is left", async || all.keys().await.is_empty()).await;
    all.end().await;
}

#[tokio::test]
async fn what_a_killed_process_had_of_a_cap_comes_back() {
    let mut all = Two::start().await;
    let stream = Worker::open(all.one.grpc_port(), opening("w", 8))
        .await
        .unwrap();
    let session = Session::open(
        &all.two,
        "w",
        pb::OpenSessionRequest {
            want: 8,
            ..Default::default()
        },
    )
    .await;
    assert_eq!(session.granted, 2);
    all.one.kill9();
    drop(stream);
    let mut granted = 2;
    until("the rest is granted", async || {
        granted += session.want(&all.two, 8 - granted, 0).await.granted;
        assert!(granted <= 8);
        granted == 8
    })
    .await;
    session.close(&all.two).await.unwrap();
    until("nothing is left", async || all.keys().await.is_empty()).await;
    all.one.start_again();
    all.one.ready().await;
    all.end().await;
}

#[tokio::test]
async fn an_allotment_that_redis_lost_comes_back() {
    let all = Two::start().await;
    let stream = Worker::open(all.one.grpc_port(), long_opening("w", 8))
        .await
        .unwrap();
    let client = redis::Client::open(all.redis.url()).unwrap();
    let mut conn = crate::support::redis::connect(&client).await.unwrap();
    let _: () = redis::cmd("DEL")
        .arg(all.keys().await)
        .query_async(&mut conn)
        .await
        .unwrap();
    until("it is there again", async || {
        all.keys().await.iter().any(|key| key.ends_with(":of:w"))
    })
    .await;
    let session = Session::open(
        &all.two,
        "w",
        pb::OpenSessionRequest {
            want: 8,
            ..Default::default()
        },
    )
    .await;
    assert_eq!(session.granted, 2);
    session.close(&all.one).await.unwrap();
    stream.close().await;
    until("nothing is left", async || all.keys().await.is_empty()).await;
    all.end().await;
}
