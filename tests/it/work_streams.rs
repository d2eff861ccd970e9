//! The worker of `taskd-client` on its stream, with a running taskd: cuts, kills, cancels, drains,
//! and a taskd that is too old for streams.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::json;
use taskd::wire::pb::{self, tasks_client::TasksClient, tasks_server};
use taskd_client::{
    Client, Done, Ended, Error, Event, Failure, NewTask, Stop, Summary, Task, Worker,
};
use tokio::{
    net::TcpListener,
    sync::{Barrier, Semaphore},
    task::JoinHandle,
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming, transport::Channel};

use crate::support::{
    daemon::Daemon,
    proxy::{Mode, Proxy, Upstream},
    session::channel,
    until,
};

/// Long leases, so that nothing comes back because its lease ran out; no backoff.
const CONFIG: &str = "[queues.q]\nlease = \"10m\"\nbackoff = [\"0s\"]";
const LONG: Duration = Duration::from_secs(600);

async fn insert(daemon: &Daemon, count: usize) -> Vec<String> {
    daemon
        .insert(
            &(0..count)
                .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
                .collect::<Vec<_>>(),
        )
        .await
}

/// A worker whose handlers wait until they may end.
struct Held {
    running: JoinHandle<Result<Summary, Error>>,
    stop: Stop,
    may_end: Arc<Semaphore>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Attempts of the handlers that began, by key.
    began: Vec<(String, u32)>,
    /// Tasks whose handlers heard that nobody waits for them.
    cancelled: Vec<String>,
    ended: Vec<(String, Ended, String)>,
}

impl Held {
    fn start(client: Client, worker: Worker) -> Self {
        let (state, may_end) = (Arc::<Mutex<State>>::default(), Arc::new(Semaphore::new(0)));
        let (heard, stop) = (state.clone(), worker.stop());
        let worker = worker.on_event(move |event| {
            if let Event::Ended {
                task,
                ended,
                reason,
                ..
            } = event
            {
                heard.lock().unwrap().ended.push((
                    task.key().into_owned(),
                    ended,
                    reason.to_owned(),
                ));
            }
        });
        let (began, release) = (state.clone(), may_end.clone());
        let handler = move |task: Task<()>| {
            let (state, release) = (began.clone(), release.clone());
            async move {
                state
                    .lock()
                    .unwrap()
                    .began
                    .push((task.key().into_owned(), task.attempt()));
                let (cancelled, key) = (task.cancelled(), task.key().into_owned());
                tokio::spawn(async move {
                    cancelled.await;
                    state.lock().unwrap().cancelled.push(key);
                });
                release.acquire().await.unwrap().forget();
                Ok::<_, Failure>(Done::text(task.attempt().to_string()))
            }
        };
        let running = tokio::spawn(async move { worker.run(&client, handler).await });
        Self {
            running,
            stop,
            may_end,
            state,
        }
    }

    async fn began(&self, count: usize) {
        until("the handlers run", async || {
            self.state.lock().unwrap().began.len() == count
        })
        .await;
    }

    async fn drained(self) -> Summary {
        self.stop.drain();
        self.running.await.unwrap().unwrap()
    }
}

async fn completed(daemon: &Daemon, count: usize) {
    until("they are completed", async || {
        daemon.queue("q").await["completed"] == count
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn demand_follows_the_room_and_a_drain_gives_back_at_no_cost() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 20).await;
    let client = Client::new(daemon.grpc()).unwrap();
    let held = Held::start(
        client,
        Worker::new("w", ["q"])
            .concurrency(2)
            .prefetch(3)
            .lease(LONG),
    );
    held.began(2).await;
    until("five are in hand", async || {
        daemon.queue("q").await["assigned"] == 5
    })
    .await;
    held.may_end.add_permits(2);
    completed(&daemon, 2).await;
    until("five are in hand again", async || {
        daemon.queue("q").await["assigned"] == 5
    })
    .await;
    held.began(4).await;
    // Two run; three wait, and are free at once for others, as if nobody had had them.
    held.stop.drain();
    until("two are left", async || {
        daemon.queue("q").await["assigned"] == 2
    })
    .await;
    let others = daemon.lease_all("other", "q", 16).await;
    assert!(others.iter().all(|task| task["attempt"] == 1), "{others:?}");
    held.may_end.add_permits(2);
    let state = held.state.clone();
    let summary = held.drained().await;
    assert_eq!(
        (
            summary.completed,
            summary.given_back,
            summary.lost,
            summary.unreported
        ),
        (4, 3, 0, 0)
    );
    assert!(
        state
            .lock()
            .unwrap()
            .began
            .iter()
            .all(|(_, attempt)| *attempt == 1)
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_taskd_loses_nothing_that_a_worker_has_in_hand() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 3).await;
    let client = Client::new(daemon.grpc()).unwrap();
    let held = Held::start(client, Worker::new("w", ["q"]).concurrency(3).lease(LONG));
    held.began(3).await;
    daemon.kill9();
    // Two end while taskd is away.
    held.may_end.add_permits(2);
    daemon.start_again();
    daemon.ready().await;
    completed(&daemon, 2).await;
    held.may_end.add_permits(1);
    completed(&daemon, 3).await;
    // New work comes on a new stream.
    held.may_end.add_permits(1);
    daemon
        .insert(&[json!({"queue": "q", "key": "after"})])
        .await;
    completed(&daemon, 4).await;
    let state = held.state.clone();
    let summary = held.drained().await;
    assert_eq!(
        (summary.completed, summary.lost, summary.unreported),
        (4, 0, 0)
    );
    assert!(
        state
            .lock()
            .unwrap()
            .began
            .iter()
            .all(|(_, attempt)| *attempt == 1)
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_and_a_silent_connection_lead_to_the_other_address_with_all_in_hand() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 3).await;
    let (one, two) = (Proxy::start().await, Proxy::start().await);
    for proxy in [&one, &two] {
        proxy.lead_to(Upstream::Tcp(format!("127.0.0.1:{}", daemon.grpc_port())));
    }
    let addresses = [&one, &two].map(|proxy| format!("127.0.0.1:{}", proxy.port()));
    let client = Client::builder(addresses).build().unwrap();
    // A connection may be silent for half of the lease.
    let held = Held::start(
        client,
        Worker::new("w", ["q"])
            .concurrency(3)
            .lease(Duration::from_secs(10)),
    );
    held.began(3).await;
    one.set(Mode::Refuse);
    held.may_end.add_permits(1);
    completed(&daemon, 1).await;
    // The second one does not break: nothing comes any more. New connections to the first one work.
    one.set(Mode::Pass);
    two.silence();
    // On a slow machine a lease may run out while nothing comes; then another attempt is made.
    held.may_end.add_permits(100);
    completed(&daemon, 3).await;
    let summary = held.drained().await;
    assert_eq!(
        (summary.completed, summary.unreported),
        (3, 0),
        "{summary:?}"
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_task_ends_its_handler_at_once() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let ids = insert(&daemon, 2).await;
    let client = Client::new(daemon.grpc()).unwrap();
    // Its next extension is minutes away.
    let held = Held::start(client, Worker::new("w", ["q"]).concurrency(2).lease(LONG));
    held.began(2).await;
    let (status, _) = daemon
        .post("/v1/tasks:cancel", &json!({"ids": ids[..1]}))
        .await;
    assert_eq!(status, 200);
    until("the handler is gone", async || {
        !held.state.lock().unwrap().cancelled.is_empty()
    })
    .await;
    held.may_end.add_permits(1);
    completed(&daemon, 1).await;
    let state = held.state.clone();
    let summary = held.drained().await;
    assert_eq!((summary.completed, summary.lost), (1, 1));
    let State {
        cancelled, ended, ..
    } = std::mem::take(&mut *state.lock().unwrap());
    assert_eq!(cancelled, ["key-0"]);
    assert!(
        ended.contains(&("key-0".to_owned(), Ended::Lost, "CANCELLED".to_owned())),
        "{ended:?}"
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taskd_that_stops_is_left_in_order_and_the_worker_goes_on_with_the_next_one() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 1).await;
    let client = Client::new(daemon.grpc()).unwrap();
    let held = Held::start(client, Worker::new("w", ["q"]).lease(LONG));
    held.began(1).await;
    assert!(daemon.stop().await.success());
    held.may_end.add_permits(1);
    daemon.start_again();
    daemon.ready().await;
    completed(&daemon, 1).await;
    let summary = held.drained().await;
    assert_eq!(
        (summary.completed, summary.lost, summary.unreported),
        (1, 0, 0)
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_that_are_too_much_together_are_sent_one_by_one() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 10).await;
    let client = Client::new(daemon.grpc()).unwrap();
    let worker = Worker::new("w", ["q"]).concurrency(10).lease(LONG);
    let stop = worker.stop();
    let all_run = Arc::new(Barrier::new(10));
    // They end together, and have more discovered tasks than a call may have: taskd ends the
    // stream.
    let handler = move |_: Task<()>| {
        let all_run = all_run.clone();
        async move {
            all_run.wait().await;
            let found = (0..9000).map(|n| NewTask::new("found", format!("{}", n % 10)));
            Ok::<_, Failure>(Done::new().discover(found))
        }
    };
    let done = async {
        completed(&daemon, 10).await;
        stop.drain();
    };
    let (summary, ()) = tokio::join!(worker.run(&client, handler), done);
    let summary = summary.unwrap();
    assert_eq!(
        (summary.completed, summary.rejected, summary.lost),
        (10, 0, 0)
    );
    assert!(daemon.stop().await.success());
}

/// A taskd that does not know streams: it passes all other calls of a worker on to one that does.
/// It counts the reports that ask for tasks.
struct Older(TasksClient<Channel>, Arc<AtomicUsize>);

#[tonic::async_trait]
impl tasks_server::Tasks for Older {
    async fn get_tasks(
        &self,
        call: Request<pb::GetTasksRequest>,
    ) -> Result<Response<pb::GetTasksResponse>, Status> {
        self.0.clone().get_tasks(call.into_inner()).await
    }

    async fn complete_tasks(
        &self,
        call: Request<pb::CompleteTasksRequest>,
    ) -> Result<Response<pb::CompleteTasksResponse>, Status> {
        let call = call.into_inner();
        self.1
            .fetch_add(usize::from(call.next.is_some()), Ordering::SeqCst);
        self.0.clone().complete_tasks(call).await
    }

    async fn reject_tasks(
        &self,
        call: Request<pb::RejectTasksRequest>,
    ) -> Result<Response<pb::RejectTasksResponse>, Status> {
        self.0.clone().reject_tasks(call.into_inner()).await
    }

    async fn extend_tasks(
        &self,
        call: Request<pb::ExtendTasksRequest>,
    ) -> Result<Response<pb::ExtendTasksResponse>, Status> {
        self.0.clone().extend_tasks(call.into_inner()).await
    }

    type StreamTasksStream = tokio_stream::Empty<Result<pb::TaskdFrame, Status>>;

    async fn stream_tasks(
        &self,
        _: Request<Streaming<pb::WorkerFrame>>,
    ) -> Result<Response<Self::StreamTasksStream>, Status> {
        Err(Status::unimplemented("no streams"))
    }

    async fn open_session(
        &self,
        _: Request<pb::OpenSessionRequest>,
    ) -> Result<Response<pb::OpenSessionResponse>, Status> {
        Err(Status::unimplemented("no sessions"))
    }

    async fn want_tasks(
        &self,
        _: Request<pb::WantTasksRequest>,
    ) -> Result<Response<pb::WantTasksResponse>, Status> {
        Err(Status::unimplemented("no sessions"))
    }

    async fn surrender_tasks(
        &self,
        _: Request<pb::SurrenderTasksRequest>,
    ) -> Result<Response<pb::SurrenderTasksResponse>, Status> {
        Err(Status::unimplemented("no sessions"))
    }

    async fn get_pending_count(
        &self,
        _: Request<pb::GetPendingCountRequest>,
    ) -> Result<Response<pb::GetPendingCountResponse>, Status> {
        Err(Status::unimplemented("no sessions"))
    }

    async fn report_tasks(
        &self,
        _: Request<pb::ReportTasksRequest>,
    ) -> Result<Response<pb::ReportTasksResponse>, Status> {
        Err(Status::unimplemented("no sessions"))
    }

    async fn close_session(
        &self,
        _: Request<pb::CloseSessionRequest>,
    ) -> Result<Response<pb::CloseSessionResponse>, Status> {
        Err(Status::unimplemented("no sessions"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_taskd_is_polled() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 30).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let asking = Arc::<AtomicUsize>::default();
    let client = TasksClient::new(channel(daemon.grpc_port()).await);
    let older = tasks_server::TasksServer::new(Older(client, asking.clone()));
    let serving = tonic::transport::Server::builder().add_service(older);
    let serving = tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
    for (worker, is_asked) in [("by-itself", false), ("asked", true)] {
        insert_more(&daemon, worker).await;
        let mut one = Worker::new(worker, ["q"])
            .concurrency(1)
            .wait(Duration::from_secs(1))
            .lease(LONG);
        if is_asked {
            one = one.poll();
        }
        let held = Held::start(Client::new(&address).unwrap(), one);
        held.may_end.add_permits(1000);
        until("all are completed", async || {
            daemon.unfinished("q").await == 0
        })
        .await;
        assert!(held.drained().await.completed >= 5);
        if !is_asked {
            assert!(asking.load(Ordering::SeqCst) > 0, "its reports bring tasks");
        }
    }
    serving.abort();
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_of_a_polling_worker_brings_its_next_task() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 60).await;
    let worker = Worker::new("w", ["q"])
        .poll()
        .concurrency(1)
        .wait(Duration::from_secs(1))
        .lease(LONG);
    let held = Held::start(Client::new(daemon.grpc()).unwrap(), worker);
    held.may_end.add_permits(1000);
    until("all are completed", async || {
        daemon.unfinished("q").await == 0
    })
    .await;
    assert_eq!(held.drained().await.completed, 60);
    let (_, metrics) = daemon.get("/metrics").await;
    let calls = |method| {
        let of_method =
            format!("taskd_grpc_call_duration_seconds_count{{method=\"taskd.v1.Tasks/{method}\",");
        let lines = metrics
            .as_str()
            .unwrap()
            .lines()
            .filter(move |line| line.starts_with(&of_method));
        lines
            .map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
            .sum::<u64>()
    };
    let (gets, reports) = (calls("GetTasks"), calls("CompleteTasks"));
    assert!(
        gets < 30 && reports == 60,
        "{gets} polls, {reports} reports"
    );
    assert!(daemon.stop().await.success());
}

async fn insert_more(daemon: &Daemon, name: &str) {
    daemon
        .insert(
            &(0..5)
                .map(|n| json!({"queue": "q", "key": format!("{name}-{n}")}))
                .collect::<Vec<_>>(),
        )
        .await;
}
