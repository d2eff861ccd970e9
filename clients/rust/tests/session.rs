//! The worker on its stream, with a made server: it does what a taskd does only when something goes
//! wrong.

use std::{
    convert::Infallible,
    future::{Future, Ready, ready},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use taskd_client::{
    Client, Done, Ended, Event, Failure, Task, Worker,
    pb::{self, ItemStatus},
};
use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc},
    task::JoinSet,
};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{
    Request, Response, Status, Streaming,
    body::Body,
    codegen::{BoxFuture, Service, http},
    server::{Grpc, NamedService, StreamingService},
    transport::Server,
};
use tonic_prost::ProstCodec;

/// The longest wait for what must come.
const PATIENCE: Duration = Duration::from_secs(30);

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what)
        .await
        .expect("it comes")
}

/// A server whose streams the test serves.
struct Taskd {
    client: Client,
    streams: mpsc::UnboundedReceiver<Stream>,
    /// The server, and workers.
    running: JoinSet<()>,
}

/// A stream of a worker.
struct Stream {
    /// The worker's end of the connection.
    port: u16,
    from: Streaming<pb::WorkerFrame>,
    to: mpsc::Sender<Result<pb::TaskdFrame, Status>>,
}

impl Taskd {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = Client::new(listener.local_addr().unwrap().to_string()).unwrap();
        let (opened, streams) = mpsc::unbounded_channel();
        let server = Server::builder().add_service(StreamTasks(opened));
        let mut running = JoinSet::new();
        running.spawn(async {
            server
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .unwrap()
        });
        Self {
            client,
            streams,
            running,
        }
    }

    /// The next stream that a worker opens, with its first frame.
    async fn stream(&mut self) -> (Stream, pb::OpenSession) {
        let mut stream = soon(self.streams.recv()).await.unwrap();
        let open = stream.hear().await.open.unwrap();
        (stream, open)
    }

    fn work<H, F>(&mut self, worker: Worker, handler: H)
    where
        H: Fn(Task) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Done, Failure>> + Send + 'static,
    {
        let client = self.client.clone();
        self.running.spawn(async move {
            worker.run(&client, handler).await.unwrap();
        });
    }
}

impl Stream {
    async fn hear(&mut self) -> pb::WorkerFrame {
        soon(self.from.message()).await.unwrap().unwrap()
    }

    /// The next frame that `is_it`.
    async fn hear_until(&mut self, is_it: impl Fn(&pb::WorkerFrame) -> bool) -> pb::WorkerFrame {
        loop {
            let frame = self.hear().await;
            if is_it(&frame) {
                return frame;
            }
        }
    }

    async fn say(&self, frame: pb::TaskdFrame) {
        self.to.send(Ok(frame)).await.unwrap();
    }

    /// Accepts the rejections of a frame. The worker may have left the stream.
    async fn answer(&self, frame: &pb::WorkerFrame) {
        let is_ok = |rejection: &pb::Rejection| pb::ItemResult {
            id: rejection.id.clone(),
            status: ItemStatus::Ok.into(),
            ..Default::default()
        };
        let answer = pb::FrameAnswer {
            number: frame.number,
            rejections: frame.rejections.iter().map(is_ok).collect(),
            ..Default::default()
        };
        let frame = pb::TaskdFrame {
            answer: Some(answer),
            ..Default::default()
        };
        self.to.send(Ok(frame)).await.ok();
    }
}

/// The server may be silent for long.
fn opened(resumed: bool) -> pb::SessionOpened {
    let timeout = Some(prost_types::Duration {
        seconds: 600,
        nanos: 0,
    });
    pb::SessionOpened {
        session: "s".to_owned(),
        resumed,
        timeout,
        ..Default::default()
    }
}

/// A lease of the task `t`.
fn lease(token: &str, attempt: u32) -> Vec<pb::LeasedTask> {
    lease_of("t", token, attempt)
}

fn lease_of(id: &str, token: &str, attempt: u32) -> Vec<pb::LeasedTask> {
    vec![pb::LeasedTask {
        id: id.to_owned(),
        lease_token: token.to_owned(),
        attempt,
        ..Default::default()
    }]
}

/// The service, which has one method.
#[derive(Clone)]
struct StreamTasks(mpsc::UnboundedSender<Stream>);

impl NamedService for StreamTasks {
    const NAME: &'static str = "taskd.v1.Tasks";
}

impl Service<http::Request<Body>> for StreamTasks {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = self.clone();
        let codec = ProstCodec::<pb::TaskdFrame, pb::WorkerFrame>::default();
        Box::pin(async move { Ok(Grpc::new(codec).streaming(method, request).await) })
    }
}

impl StreamingService<pb::WorkerFrame> for StreamTasks {
    type Response = pb::TaskdFrame;
    type ResponseStream = ReceiverStream<Result<pb::TaskdFrame, Status>>;
    type Future = Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<pb::WorkerFrame>>) -> Self::Future {
        let port = request.remote_addr().unwrap().port();
        let (to, frames) = mpsc::channel(4);
        self.0
            .send(Stream {
                port,
                from: request.into_inner(),
                to,
            })
            .ok();
        ready(Ok(Response::new(ReceiverStream::new(frames))))
    }
}

#[tokio::test]
async fn a_silent_stream_is_left_for_another_connection_to_the_same_address() {
    let mut taskd = Taskd::start().await;
    let (began, may_end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begins, ends) = (began.clone(), may_end.clone());
    let handler = move |_: Task| {
        let (begins, ends) = (begins.clone(), ends.clone());
        async move {
            begins.notify_one();
            ends.notified().await;
            Ok(Done::new())
        }
    };
    taskd.work(Worker::new("w", ["q"]), handler);
    let (first, _) = taskd.stream().await;
    let timeout = Some(prost_types::Duration {
        seconds: 1,
        nanos: 0,
    });
    let session = pb::SessionOpened {
        timeout,
        ..opened(false)
    };
    first
        .say(pb::TaskdFrame {
            opened: Some(session),
            tasks: lease("token", 1),
            ..Default::default()
        })
        .await;
    soon(began.notified()).await;
    // The server says nothing more.
    let (mut second, open) = taskd.stream().await;
    assert_ne!(first.port, second.port, "the connection may be dead");
    assert_eq!((&*open.session, open.holding), ("s", vec!["t".to_owned()]));
    second
        .say(pb::TaskdFrame {
            opened: Some(opened(true)),
            ..Default::default()
        })
        .await;
    may_end.notify_one();
    let frame = second
        .hear_until(|frame| !frame.completions.is_empty())
        .await;
    assert_eq!(frame.completions[0].lease_token, "token");
}

#[tokio::test]
async fn a_new_lease_of_a_task_outlives_the_old_one() {
    let mut taskd = Taskd::start().await;
    let (began, lost) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begins, is_lost, heard) = (began.clone(), lost.clone(), lost.clone());
    let worker = Worker::new("w", ["q"])
        .concurrency(2)
        .on_event(move |event| {
            if let Event::Ended {
                ended: Ended::Lost, ..
            } = event
            {
                heard.notify_one();
            }
        });
    // The first attempt does not end by itself, and the second one when the first lease is over.
    let handler = move |task: Task| {
        let (begins, is_lost) = (begins.clone(), is_lost.clone());
        async move {
            begins.notify_one();
            if task.attempt() == 1 {
                std::future::pending::<()>().await;
            }
            is_lost.notified().await;
            Ok(Done::new())
        }
    };
    taskd.work(worker, handler);
    let (first, _) = taskd.stream().await;
    first
        .say(pb::TaskdFrame {
            opened: Some(opened(false)),
            tasks: lease("old", 1),
            ..Default::default()
        })
        .await;
    soon(began.notified()).await;
    first
        .to
        .send(Err(Status::unavailable("the stream breaks")))
        .await
        .unwrap();
    // The session is over, and so is its lease. The task comes before the worker hears of that.
    let (mut second, open) = taskd.stream().await;
    assert_eq!(open.holding, ["t"]);
    second
        .say(pb::TaskdFrame {
            opened: Some(opened(false)),
            ..Default::default()
        })
        .await;
    let frame = second
        .hear_until(|frame| !frame.extensions.is_empty())
        .await;
    assert_eq!(frame.extensions[0].lease_token, "old");
    second
        .say(pb::TaskdFrame {
            tasks: lease("new", 2),
            ..Default::default()
        })
        .await;
    let is_over = pb::ItemResult {
        id: "t".to_owned(),
        status: ItemStatus::LeaseLost.into(),
        ..Default::default()
    };
    let answer = pb::FrameAnswer {
        number: frame.number,
        extensions: vec![is_over],
        ..Default::default()
    };
    second
        .say(pb::TaskdFrame {
            answer: Some(answer),
            ..Default::default()
        })
        .await;
    let frame = second
        .hear_until(|frame| !frame.completions.is_empty())
        .await;
    assert_eq!(frame.completions[0].lease_token, "new");
}

#[tokio::test]
async fn a_throttled_worker_gives_back_all_tasks_that_come_late() {
    let mut taskd = Taskd::start().await;
    let handler =
        |_: Task| async { Err(Failure::new("the service is away").throttle(Duration::MAX)) };
    let worker = Worker::new("w", ["q"]).concurrency(1).prefetch(2);
    taskd.work(worker, handler);
    let (mut stream, open) = taskd.stream().await;
    assert_eq!(open.want, 3);
    stream
        .say(pb::TaskdFrame {
            opened: Some(opened(false)),
            tasks: lease_of("first", "token", 1),
            demand: 2,
            ..Default::default()
        })
        .await;
    let mut unanswered = Vec::new();
    while !unanswered.iter().any(is_rejection) {
        unanswered.push(stream.hear().await);
    }
    // taskd sends two more tasks before it hears that the worker takes none. The first of them ends
    // the call that waited for tasks when the worker was throttled.
    let mut resumed = None;
    for late in ["second", "third"] {
        stream
            .say(pb::TaskdFrame {
                opened: resumed.take(),
                tasks: lease_of(late, "token", 1),
                ..Default::default()
            })
            .await;
        for frame in unanswered.drain(..) {
            stream.answer(&frame).await;
        }
        // The worker gives a task back by leaving the stream for one whose opening does not list it.
        soon(async {
            while let Ok(Some(frame)) = stream.from.message().await {
                stream.answer(&frame).await;
            }
        })
        .await;
        let (next, open) = taskd.stream().await;
        assert_eq!((&*open.session, open.want), ("s", 0));
        assert!(open.holding.is_empty(), "{late}: {:?}", open.holding);
        stream = next;
        resumed = Some(opened(true));
    }
}

fn is_rejection(frame: &pb::WorkerFrame) -> bool {
    !frame.rejections.is_empty()
}
