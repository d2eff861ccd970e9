//! One client's connection, over HTTP/1 or HTTP/2, from its first byte to its end.

use std::{
    convert::Infallible,
    future::Future,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    http::{Request, Response, request},
};
use bytes::Bytes;
use http_body::Body;
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
    service::Service,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::{sleep, timeout},
};
use tokio_util::{io::InspectReader, sync::CancellationToken};

use super::{
    body::{BoxError, Counted, Cut, Pace, Unread},
    budget::Budget,
    delivery::{LOOK_EVERY, Record, Shipped, ship},
    messages::Messages,
    socket::Socket,
    standing::Standing,
    staying::OfConnection,
    tls::Tls,
};
use crate::model::{Client, Protocol};

/// How many bytes HTTP/1 may read ahead of a handler, including the head.
const READ_BUFFER: usize = 64 << 10;
/// The most calls on one HTTP/2 connection at a time.
const STREAMS: u32 = 1024;
/// The most bytes that a client may send in a call that may stay open.
const MAX_BYTES_OF_STAYING: usize = 64 << 10;
/// The pings of HTTP/2. A client that does not answer in time counts as gone; its calls end before
/// the default lease does.
const PING_EVERY: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// The length of the preface that an HTTP/2 client sends first.
const PREFACE: usize = 24;
/// How long the last bytes to an idle client may take after a stop.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How long a request may stay open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ingress) enum Stay {
    /// Until its answer.
    No,
    /// As long as its client likes. It may send only little in all, and holds memory of the budget
    /// only while a part of a message passes. A stop does not wait for it.
    Small,
    /// As long as both sides like. Its handler gives back the memory of each message, and ends the
    /// request at a stop.
    Stream,
}

/// The handlers of a listener's requests. Cheap to clone.
pub(in crate::ingress) trait Handlers: Clone + Send + Sync + 'static {
    type Body: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static;

    fn answer(self, request: Request<Counted>)
    -> impl Future<Output = Response<Self::Body>> + Send;
}

impl Handlers for Router {
    type Body = axum::body::Body;

    async fn answer(self, request: Request<Counted>) -> Response<Self::Body> {
        let Ok(response) = TowerToHyperService::new(self).call(request).await;
        response
    }
}

/// How a listener answers requests. Cheap to clone.
#[derive(Clone)]
pub(in crate::ingress) struct Answering<H> {
    pub(in crate::ingress) protocol: Protocol,
    pub(in crate::ingress) tls: Option<Tls>,
    pub(in crate::ingress) handlers: H,
    pub(in crate::ingress) budget: Budget,
    /// How fast a request's body must arrive; `None` if it may take any time.
    pub(in crate::ingress) pace: fn(&request::Parts) -> Option<Pace>,
    pub(in crate::ingress) stay: fn(&request::Parts) -> Stay,
    /// The largest message of gRPC; `None` if bodies do not consist of messages.
    pub(in crate::ingress) max_message: Option<usize>,
    /// Makes the error that a handler gets from a body that was cut off.
    pub(in crate::ingress) wrap: fn(Cut) -> BoxError,
    pub(in crate::ingress) stop: CancellationToken,
}

/// Serves a client until it leaves, or has been silent for `patience`. After a stop, or if its
/// standing says that it must end, finishes the requests in flight.
pub(in crate::ingress) async fn serve(
    stream: TcpStream,
    answering: Answering<impl Handlers>,
    standing: Standing,
    patience: Duration,
) {
    let record = Arc::<Record>::default();
    let client = Client {
        protocol: answering.protocol,
        peer: stream.peer_addr().ok(),
    };
    let socket = Socket::new(stream, Arc::clone(&record));
    let stop = answering.stop.clone();
    let acceptor = answering
        .tls
        .as_ref()
        .map(|tls| tls.acceptor(answering.protocol));
    let requests = Requests {
        answering,
        client,
        record,
        standing,
        staying: OfConnection::default(),
    };
    match acceptor {
        None => converse(socket, requests, patience).await,
        Some(acceptor) => match stop
            .run_until_cancelled(timeout(patience, acceptor.accept(socket)))
            .await
        {
            Some(Ok(Ok(encrypted))) => Box::pin(converse(encrypted, requests, patience)).await,
            Some(Ok(Err(error))) => tracing::debug!("a connection did not begin with TLS: {error}"),
            Some(Err(_)) => tracing::debug!("a connection did not begin with TLS in time"),
            None => {}
        },
    }
}

async fn converse<S, H>(stream: S, requests: Requests<H>, patience: Duration)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    H: Handlers,
{
    // How many bytes the client has sent, without those of TLS.
    let received = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&received);
    let counted = InspectReader::new(stream, move |bytes| {
        count.fetch_add(bytes.len(), Ordering::Relaxed);
    });
    let (io, record) = (TokioIo::new(counted), Arc::clone(&requests.record));
    let protocol = requests.answering.protocol;
    let stop = requests.answering.stop.clone();
    let standing = requests.standing.clone();
    let ending = async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = standing.wait_for_end() => {}
        }
    };
    match protocol {
        Protocol::Http => {
            let mut builder = http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                .header_read_timeout(patience)
                .max_buf_size(READ_BUFFER);
            let connection = pin!(builder.serve_connection(io, requests));
            let written = Arc::clone(&record);
            let silence = async move {
                while !written.has_unread() {
                    sleep(LOOK_EVERY).await;
                }
            };
            drive(
                connection,
                http1::Connection::graceful_shutdown,
                silence,
                &record,
                ending,
            )
            .await;
        }
        Protocol::Grpc => {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder
                .timer(TokioTimer::new())
                .keep_alive_interval(PING_EVERY)
                .keep_alive_timeout(PING_TIMEOUT)
                .max_concurrent_streams(STREAMS);
            let connection = pin!(builder.serve_connection(io, requests));
            // Pings begin after the preface. They do not notice a client that answers pings but
            // reads no answers, because HTTP/2 sends only as much of an answer as the client's
            // window allows.
            let (begun, written) = (Instant::now(), Arc::clone(&record));
            let silence = async move {
                let is_silent =
                    || received.load(Ordering::Relaxed) < PREFACE && begun.elapsed() >= patience;
                while !is_silent() && !written.has_unread() {
                    sleep(LOOK_EVERY).await;
                }
            };
            drive(
                connection,
                http2::Connection::graceful_shutdown,
                silence,
                &record,
                ending,
            )
            .await;
        }
    }
}

async fn drive<C: Future<Output = hyper::Result<()>>>(
    mut connection: Pin<&mut C>,
    shut_down: impl FnOnce(Pin<&mut C>),
    silence: impl Future<Output = ()>,
    record: &Record,
    ending: impl Future<Output = ()>,
) {
    let mut silence = pin!(silence);
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = silence.as_mut() => return,
        () = ending => {
            shut_down(connection.as_mut());
            let nothing_left = async {
                record.idle().await;
                sleep(LAST_WORDS).await;
            };
            tokio::select! {
                served = connection => served,
                () = silence => return,
                // The client is in the middle of a request's head, or idle.
                () = nothing_left => return,
            }
        }
    };
    if let Err(error) = served {
        tracing::debug!("a connection ended with {error}");
    }
}

/// The requests of one connection.
struct Requests<H> {
    answering: Answering<H>,
    client: Client,
    record: Arc<Record>,
    standing: Standing,
    staying: OfConnection,
}

impl<H: Handlers> Service<Request<Incoming>> for Requests<H> {
    type Response = Response<Shipped<H::Body>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let Answering {
            protocol,
            handlers,
            budget,
            pace,
            stay,
            max_message,
            wrap,
            stop,
            ..
        } = &self.answering;
        let (mut parts, body) = request.into_parts();
        let stay = stay(&parts);
        let is_small = stay == Stay::Small;
        let share = if is_small {
            Budget::new(MAX_BYTES_OF_STAYING).share()
        } else {
            budget.share()
        };
        let passing = is_small.then(|| budget.share());
        let (in_hand, unread) = (self.record.begin(!is_small), Unread::default());
        let stop = if stay == Stay::Stream {
            CancellationToken::new()
        } else {
            stop.clone()
        };
        let messages = max_message.filter(|_| !is_small).map(Messages::new);
        let body = Counted::new(
            body,
            unread.clone(),
            share.clone(),
            passing,
            messages,
            stop,
            pace(&parts),
            *wrap,
        );
        if is_small {
            parts.extensions.insert(self.staying.clone());
        }
        parts.extensions.insert(share.clone());
        parts.extensions.insert(self.client);
        parts.extensions.insert(self.standing.clone());
        let (handlers, protocol) = (handlers.clone(), *protocol);
        let request = Request::from_parts(parts, body);
        Box::pin(async move {
            // The future of `answer` is made here, so it is stored once in this one. Passed as an
            // argument, it would be stored twice.
            let response = ship(handlers.answer(request).await, in_hand, share);
            if protocol == Protocol::Grpc {
                unread.drain().await;
            }
            Ok(response)
        })
    }
}
