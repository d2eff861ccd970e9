//! A receiver of spans, which is a real OTLP server over gRPC, and a check of the trace that one
//! crawled page must produce.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::any_value::Value as Any,
    trace::v1::Span as OtlpSpan,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::Server};

use super::{daemon::Daemon, until};

/// A span, as it was received.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(crate) name: String,
    pub(crate) trace: String,
    pub(crate) id: String,
    /// Empty for a root span.
    pub(crate) parent: String,
    /// The trace id and the span id of each link.
    pub(crate) links: Vec<(String, String)>,
    pub(crate) attributes: BTreeMap<String, String>,
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// The error message, if the span failed.
    pub(crate) error: Option<String>,
}

impl Span {
    pub(crate) fn attribute(&self, name: &str) -> &str {
        self.attributes.get(name).map_or("", String::as_str)
    }

    pub(crate) fn outcome(&self) -> &str {
        self.attribute("taskd.outcome")
    }
}

/// The server. Clones share the received spans.
#[derive(Clone, Default)]
pub(crate) struct Receiver {
    spans: Arc<Mutex<Vec<Span>>>,
    /// The values of the header `x-team` of all calls.
    headers: Arc<Mutex<BTreeSet<String>>>,
    services: Arc<Mutex<BTreeSet<String>>>,
}

impl Receiver {
    /// Starts a server, which runs until the runtime of the test ends.
    pub(crate) async fn start() -> (Self, SocketAddr) {
        let receiver = Self::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        receiver.serve(listener);
        (receiver, address)
    }

    pub(crate) fn serve(&self, listener: TcpListener) {
        let server = Server::builder().add_service(TraceServiceServer::new(self.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        self.spans.lock().clone()
    }

    /// Waits until there are `count` spans of a task with this name, and returns them.
    pub(crate) async fn wait_for(&self, task: &str, name: &str, count: usize) -> Vec<Span> {
        let of_task = || {
            let is_of =
                |span: &Span| span.name == name && span.attribute("messaging.message.id") == task;
            let mut spans: Vec<_> = self.spans().into_iter().filter(is_of).collect();
            spans.sort_by_key(|span| span.start);
            spans
        };
        until(&format!("{count} spans {name} of {task}"), async || {
            of_task().len() >= count
        })
        .await;
        let spans = of_task();
        assert_eq!(spans.len(), count, "{spans:#?}");
        spans
    }

    pub(crate) fn headers(&self) -> BTreeSet<String> {
        self.headers.lock().clone()
    }

    pub(crate) fn services(&self) -> BTreeSet<String> {
        self.services.lock().clone()
    }
}

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let team = request
            .metadata()
            .get("x-team")
            .and_then(|team| team.to_str().ok())
            .map(ToOwned::to_owned);
        self.take(team, request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Receiver {
    /// Stores the spans of a call with this header `x-team`.
    pub(crate) fn take(&self, team: Option<String>, request: ExportTraceServiceRequest) {
        self.headers.lock().extend(team);
        for resource in request.resource_spans {
            let attributes = resource.resource.unwrap_or_default().attributes.into_iter();
            let service = attributes
                .filter(|one| one.key == "service.name")
                .filter_map(|one| shown(one.value));
            self.services.lock().extend(service);
            self.spans.lock().extend(
                resource
                    .scope_spans
                    .into_iter()
                    .flat_map(|scope| scope.spans)
                    .map(read),
            );
        }
    }
}

fn read(span: OtlpSpan) -> Span {
    let attributes = span.attributes.into_iter();
    let links = span.links.into_iter();
    Span {
        name: span.name,
        trace: hex(&span.trace_id),
        id: hex(&span.span_id),
        parent: hex(&span.parent_span_id),
        links: links
            .map(|link| (hex(&link.trace_id), hex(&link.span_id)))
            .collect(),
        attributes: attributes
            .filter_map(|one| Some((one.key, shown(one.value)?)))
            .collect(),
        start: span.start_time_unix_nano,
        end: span.end_time_unix_nano,
        error: span
            .status
            .filter(|status| status.code == 2)
            .map(|status| status.message),
    }
}

fn shown(value: Option<opentelemetry_proto::tonic::common::v1::AnyValue>) -> Option<String> {
    match value?.value? {
        Any::StringValue(text) => Some(text),
        Any::IntValue(number) => Some(number.to_string()),
        other => Some(format!("{other:?}")),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
pub(crate) const CALLER: &str = "b7ad6b7169203331";

pub(crate) fn traceparent(trace: &str, is_sampled: bool) -> String {
    format!("00-{trace}-{CALLER}-0{}", u8::from(is_sampled))
}

/// Inserts a page in the caller's trace, rejects it once, completes it and discovers a child, and
/// completes the child. Checks all spans of this.
pub(crate) async fn check_the_trace_of_a_page(daemon: &Daemon, receiver: &Receiver) {
    let client = crate::support::http_client();
    let insert = client
        .post(format!("{}/v1/tasks", daemon.http()))
        .header("traceparent", traceparent(TRACE, true));
    let answer: Value = insert
        .json(&json!({"queue": "pages", "key": "page"}))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(answer["results"][0]["status"], "CREATED", "{answer}");
    let page = answer["results"][0]["id"].as_str().unwrap().to_owned();

    let first = daemon.lease_all("w", "pages", 1).await.remove(0);
    let rejection = json!({"id": first["id"], "lease_token": first["lease_token"], "reason": "no", "delay": "0s"});
    daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": "w", "rejections": [rejection]}),
        )
        .await;
    let second = daemon.lease_all("w", "pages", 1).await.remove(0);
    assert_eq!(second["attempt"], 2);
    let (id, token) = (&second["id"], &second["lease_token"]);
    let child = json!({"queue": "pages", "key": "child"});
    let completion = json!({"id": id, "lease_token": token, "discovered": [child]});
    let body = json!({"worker": "w", "completions": [completion]});
    assert_eq!(
        daemon.post("/v1/tasks:complete", &body).await.1["results"][0]["status"],
        "OK"
    );
    let leased_child = daemon.lease_all("w", "pages", 1).await;
    assert_eq!(daemon.complete("w", &leased_child).await, ["OK"]);
    let child = leased_child[0]["id"].as_str().unwrap().to_owned();

    let [insert] = take(receiver.wait_for(&page, "insert", 1).await);
    assert_eq!((&insert.parent[..], insert.outcome()), (CALLER, "created"));
    let [publish] = take(receiver.wait_for(&page, "publish", 1).await);
    assert_eq!(publish.parent, insert.id);
    let [enqueue] = take(receiver.wait_for(&page, "enqueue", 1).await);
    assert_eq!(
        (&enqueue.parent, enqueue.outcome()),
        (&publish.id, "enqueued")
    );
    let claims: [Span; 2] = take(receiver.wait_for(&page, "claim", 2).await);
    let works: [Span; 2] = take(receiver.wait_for(&page, "work", 2).await);
    for (attempt, (claim, work)) in ["1", "2"].into_iter().zip(claims.iter().zip(&works)) {
        assert_eq!(
            (&claim.parent, &work.parent),
            (&publish.id, &claim.id),
            "{claim:?} {work:?}"
        );
        assert!(
            [claim, work]
                .iter()
                .all(|span| span.attribute("taskd.attempt") == attempt)
        );
        assert!(
            [claim, work]
                .iter()
                .all(|span| span.attribute("taskd.worker") == "w")
        );
    }
    let [rejected, completed] = works;
    assert_eq!(
        (rejected.outcome(), rejected.error.as_deref()),
        ("rejected", Some("no"))
    );
    assert_eq!(
        (completed.outcome(), completed.error.as_deref()),
        ("completed", None)
    );
    assert!(
        claims[0].links.is_empty() && rejected.links.is_empty(),
        "a first attempt has no link"
    );
    let to_first = [(TRACE.to_owned(), rejected.id.clone())];
    assert_eq!(
        (&claims[1].links[..], &completed.links[..]),
        (&to_first[..], &to_first[..])
    );
    // The worker's own spans become children of the work span.
    for (leased, work) in [(&first, &rejected), (&second, &completed)] {
        assert_eq!(leased["traceparent"], format!("00-{TRACE}-{}-01", work.id));
    }
    let [settle] = take(receiver.wait_for(&page, "settle", 1).await);
    assert_eq!(
        (&settle.parent, settle.outcome()),
        (&completed.id, "completed")
    );

    let [insert_child] = take(receiver.wait_for(&child, "insert", 1).await);
    assert_eq!(
        (&insert_child.parent, insert_child.outcome()),
        (&completed.id, "created")
    );
    let mut parent = insert_child.id.clone();
    for hop in ["publish", "claim", "work", "settle"] {
        let [span] = take(receiver.wait_for(&child, hop, 1).await);
        assert_eq!(span.parent, parent, "{hop}");
        parent = span.id;
    }
    receiver.wait_for(&child, "enqueue", 1).await;

    let spans: Vec<Span> = receiver
        .spans()
        .into_iter()
        .filter(|span| span.trace == TRACE)
        .collect();
    assert_eq!(spans.len(), 14, "{spans:#?}");
    let ids: BTreeSet<&str> = spans.iter().map(|span| span.id.as_str()).collect();
    assert_eq!(ids.len(), spans.len(), "each span has an id of its own");
    for span in &spans {
        assert!(span.start <= span.end, "{span:?}");
        assert_eq!(span.attribute("messaging.destination.name"), "pages");
    }
    // A new task is published while its caller is still being answered, so only their starts are
    // ordered.
    assert!(insert.start <= publish.start, "{insert:?} {publish:?}");
    let order = [&publish, &rejected, &completed, &insert_child, &settle];
    assert!(order.is_sorted_by_key(|span| span.end), "{order:#?}");
    assert_eq!(receiver.services().len(), 1, "{:?}", receiver.services());
}

fn take<const N: usize>(spans: Vec<Span>) -> [Span; N] {
    spans.try_into().unwrap()
}
