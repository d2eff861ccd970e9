//! Spans of tasks: what reaches a collector, and that a collector which is away holds up nothing.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::http::{HeaderMap, StatusCode};
use bytes::Bytes;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
    trace_service_server::{TraceService, TraceServiceServer},
};
use prost::Message as _;
use serde_json::{Value, json};
use sqlx::{Connection, SqliteConnection};
use taskd::wire::pb::{self, discovery_client::DiscoveryClient};
use tokio::net::TcpListener;

use crate::support::{
    daemon::Daemon,
    port::Port,
    spans::{CALLER, Receiver, TRACE, check_the_trace_of_a_page, traceparent},
    until,
};

async fn insert(daemon: &Daemon, task: &Value) -> String {
    daemon.insert(std::slice::from_ref(task)).await.remove(0)
}

/// Leases and completes the only task of a queue; its traceparent.
async fn work(daemon: &Daemon, queue: &str) -> String {
    let leased = daemon.lease_all("w", queue, 1).await;
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    leased[0]["traceparent"].as_str().unwrap().to_owned()
}

pub(crate) async fn metric(daemon: &Daemon, line: &str) -> f64 {
    let text = reqwest::get(format!("{}/metrics", daemon.http()))
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    let value = text.lines().find_map(|found| found.strip_prefix(line));
    value.map_or(0.0, |value| value.trim().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_and_its_child_are_one_trace_in_a_collector() {
    let (receiver, address) = Receiver::start().await;
    let endpoint = format!("http://{address}");
    let mut daemon = Daemon::start(
        "",
        &[
            "--otlp-endpoint",
            &endpoint,
            "--otlp-headers",
            "X-Team=crawl",
        ],
    )
    .await;
    check_the_trace_of_a_page(&daemon, &receiver).await;
    assert_eq!(
        (receiver.headers(), receiver.services()),
        (["crawl".to_owned()].into(), ["taskd".to_owned()].into())
    );
    let exported = "taskd_traces_spans_total{outcome=\"exported\"}";
    until("they are counted", async || {
        metric(&daemon, exported).await >= 14.0
    })
    .await;

    // The last spans go out at the stop.
    let before = receiver.spans().len();
    let task = json!({"queue": "q", "key": "last", "traceparent": traceparent(TRACE, true)});
    insert(&daemon, &task).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    until("its report is settled", async || {
        daemon.unfinished("q").await == 0
    })
    .await;
    assert!(daemon.stop().await.success());
    assert_eq!(receiver.spans().len(), before + 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_callers_flag_decides_and_trace_sample_where_there_is_none() {
    let (receiver, address) = Receiver::start().await;
    let endpoint = format!("http://{address}");
    let mut daemon = Daemon::start("", &["--otlp-endpoint", &endpoint]).await;
    insert(
        &daemon,
        &json!({"queue": "unsampled", "key": "k", "traceparent": traceparent(TRACE, false)}),
    )
    .await;
    assert_eq!(
        work(&daemon, "unsampled").await,
        traceparent(TRACE, false),
        "the context itself goes on"
    );
    insert(&daemon, &json!({"queue": "none", "key": "k"})).await;
    assert!(work(&daemon, "none").await.ends_with("-00"));

    // The context of the call is for the tasks that have none.
    let mut client = DiscoveryClient::connect(daemon.grpc()).await.unwrap();
    let task = |key: &'static str, traceparent: String| pb::NewTask {
        queue: "grpc".into(),
        key: key.into(),
        traceparent,
        ..Default::default()
    };
    let own = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned();
    let tasks = vec![task("callers", String::new()), task("own", own)];
    let mut request = tonic::Request::new(pb::InsertTasksRequest {
        tasks,
        ..Default::default()
    });
    request
        .metadata_mut()
        .insert("traceparent", traceparent(TRACE, true).parse().unwrap());
    let ids = client
        .insert_tasks(request)
        .await
        .unwrap()
        .into_inner()
        .results;
    for (answer, trace) in ids.iter().zip([TRACE, "1af7651916cd43dd8448eb211c80319c"]) {
        let span = receiver.wait_for(&answer.id, "insert", 1).await.remove(0);
        assert_eq!((&span.trace[..], &span.parent[..]), (trace, CALLER));
    }
    // The same for lines.
    let lines = crate::support::http_client().post(format!("{}/v1/tasks", daemon.http()));
    let lines = lines
        .header("content-type", "application/x-ndjson")
        .header("traceparent", traceparent(TRACE, true));
    let answer = lines
        .body("{\"queue\":\"lines\",\"key\":\"k\"}\n")
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let id = answer["id"].as_str().unwrap();
    assert_eq!(receiver.wait_for(id, "insert", 1).await[0].trace, TRACE);
    let duplicate = json!({"queue": "lines", "key": "k", "traceparent": traceparent(TRACE, true)});
    daemon.post("/v1/tasks", &duplicate).await;
    let outcomes: Vec<_> = receiver
        .wait_for(id, "insert", 2)
        .await
        .iter()
        .map(|span| span.outcome().to_owned())
        .collect();
    assert_eq!(outcomes, ["created", "duplicate"]);
    assert!(daemon.stop().await.success());
    assert!(
        receiver
            .spans()
            .iter()
            .all(|span| ["grpc", "lines"].contains(&span.attribute("messaging.destination.name")))
    );
}

/// By OTLP over HTTP, as the variables of OpenTelemetry say.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_and_its_child_reach_a_collector_over_http() {
    let (receiver, refusals) = (Receiver::default(), Arc::new(AtomicUsize::new(2)));
    let (taking, refusing) = (receiver.clone(), Arc::clone(&refusals));
    let take = move |headers: HeaderMap, body: Bytes| {
        let (taking, refusing) = (taking.clone(), Arc::clone(&refusing));
        async move {
            if refusing.load(Ordering::Relaxed) > 0 {
                refusing.fetch_sub(1, Ordering::Relaxed);
                return (StatusCode::SERVICE_UNAVAILABLE, Vec::new());
            }
            assert_eq!(headers["content-type"], "application/x-protobuf");
            let team = headers
                .get("x-team")
                .map(|team| team.to_str().unwrap().to_owned());
            taking.take(team, ExportTraceServiceRequest::decode(body).unwrap());
            (
                StatusCode::OK,
                ExportTraceServiceResponse::default().encode_to_vec(),
            )
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let router = axum::Router::new().route("/v1/traces", axum::routing::post(take));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let env = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-team=crawl%20two"),
        ("OTEL_SERVICE_NAME", "crawler"),
    ];
    let env = env
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec();
    let mut daemon = Daemon::begin_in("", &[], env);
    daemon.ready().await;
    check_the_trace_of_a_page(&daemon, &receiver).await;
    assert_eq!(
        (receiver.headers(), receiver.services()),
        (
            ["crawl two".to_owned()].into(),
            ["crawler".to_owned()].into()
        )
    );
    assert_eq!(
        refusals.load(Ordering::Relaxed),
        0,
        "the same batch went out again"
    );
    assert!(daemon.stop().await.success());
    let warned =
        "cannot export spans, and drops those that find no room: the collector answered 503";
    assert!(daemon.log().contains(warned), "{}", daemon.log());
}

/// The buckets of the latency name the traces of sampled tasks, for a scraper that asks for
/// OpenMetrics.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_of_the_latency_leads_to_a_trace() {
    let (receiver, address) = Receiver::start().await;
    let endpoint = format!("http://{address}");
    let mut daemon = Daemon::start("", &["--otlp-endpoint", &endpoint]).await;
    let sampled = json!({"queue": "q", "key": "k", "priority": "high", "traceparent": traceparent(TRACE, true)});
    let id = insert(&daemon, &sampled).await;
    work(&daemon, "q").await;
    insert(&daemon, &json!({"queue": "q", "key": "another"})).await;
    work(&daemon, "q").await;
    until("their reports are settled", async || {
        daemon.unfinished("q").await == 0
    })
    .await;
    receiver.wait_for(&id, "settle", 1).await;
    let exported = "taskd_traces_spans_total{outcome=\"exported\"}";
    until("its spans are counted", async || {
        metric(&daemon, exported).await >= 6.0
    })
    .await;
    for (priority, is_sampled) in [("high", true), ("medium", false)] {
        let count =
            format!("taskd_tasks_latency_seconds_count{{queue=\"q\",priority=\"{priority}\"}}");
        until("it is measured", async || {
            metric(&daemon, &count).await == 1.0
        })
        .await;
        let metrics = crate::support::http_client().get(format!("{}/metrics", daemon.http()));
        let accept =
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4";
        let answer = metrics.header("accept", accept).send().await.unwrap();
        assert_eq!(
            answer.headers()["content-type"],
            "application/openmetrics-text; version=1.0.0; charset=utf-8"
        );
        let text = answer.text().await.unwrap();
        let of_series =
            |line: &&str| line.contains("latency_seconds_bucket") && line.contains(priority);
        let exemplars: Vec<_> = text
            .lines()
            .filter(of_series)
            .filter_map(|line| line.split_once(" # "))
            .collect();
        assert_eq!(exemplars.len(), usize::from(is_sampled), "{text}");
        let trace = format!("{{trace_id=\"{TRACE}\"}} ");
        assert!(
            exemplars
                .iter()
                .all(|(_, exemplar)| exemplar.starts_with(&trace)),
            "{exemplars:?}"
        );
        assert!(
            text.contains("# TYPE taskd_traces_spans counter\n") && text.ends_with("\n# EOF\n"),
            "{text}"
        );
        assert!(!text.contains("\n\n"), "OpenMetrics has no empty lines");
    }
    assert!(daemon.stop().await.success());
}

/// The task is stored all the same, and its other spans have the insert as their parent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_insert_whose_caller_goes_away_has_its_span() {
    let (receiver, address) = Receiver::start().await;
    let endpoint = format!("http://{address}");
    let mut daemon =
        Daemon::start("", &["--otlp-endpoint", &endpoint, "--trace-sample", "1"]).await;
    let mut rival = SqliteConnection::connect(&format!(
        "sqlite://{}",
        daemon.data().join("taskd.db").display()
    ))
    .await
    .unwrap();
    let lock = rival.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let url = format!("{}/v1/tasks", daemon.http());
    let call = reqwest::Client::new()
        .post(url)
        .json(&json!([{"queue": "q", "key": "k"}]))
        .send();
    let waits = async || metric(&daemon, "taskd_discovery_depth_tasks ").await == 1.0;
    tokio::select! {
        answer = call => panic!("{answer:?}"),
        () = until("the task waits for SQL", waits) => {}
    }
    lock.rollback().await.unwrap();
    let leased = daemon.lease_all("w", "q", 1).await.remove(0);
    until("nothing waits", async || {
        metric(&daemon, "taskd_discovery_depth_tasks ").await == 0.0
    })
    .await;
    let insert = receiver
        .wait_for(leased["id"].as_str().unwrap(), "insert", 1)
        .await
        .remove(0);
    assert_eq!((insert.outcome(), &insert.parent[..]), ("unanswered", ""));
    assert!(daemon.stop().await.success());
}

/// With `trace_discovered = link` each discovered task has a trace of its own, which names its
/// parent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_discovered_task_may_have_a_trace_of_its_own() {
    let (receiver, address) = Receiver::start().await;
    let endpoint = format!("http://{address}");
    let args = [
        "--otlp-endpoint",
        &endpoint,
        "--trace-sample",
        "1",
        "--trace-discovered",
        "link",
    ];
    let mut daemon = Daemon::start("", &args).await;
    let page = insert(&daemon, &json!({"queue": "pages", "key": "page"})).await;
    let leased = daemon.lease_all("w", "pages", 1).await.remove(0);
    let child = json!({"queue": "children", "key": "child"});
    let completion =
        json!({"id": page, "lease_token": leased["lease_token"], "discovered": [child]});
    daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": [completion]}),
        )
        .await;
    let child = daemon.lease_all("w", "children", 1).await.remove(0);

    let work = receiver.wait_for(&page, "work", 1).await.remove(0);
    let inserted = receiver
        .wait_for(child["id"].as_str().unwrap(), "insert", 1)
        .await
        .remove(0);
    assert_eq!(
        receiver.wait_for(&page, "insert", 1).await[0].parent,
        "",
        "taskd began the trace"
    );
    assert_ne!(inserted.trace, work.trace);
    assert_eq!(
        (&inserted.parent[..], &inserted.links[..]),
        ("", &[(work.trace, work.id)][..])
    );
    assert!(daemon.stop().await.success());
}

/// A lease that came back at no cost and the next one are one attempt, and two claims.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_was_given_back_has_a_span_for_each_claim() {
    let (receiver, address) = Receiver::start().await;
    let endpoint = format!("http://{address}");
    let mut daemon = Daemon::start("", &["--otlp-endpoint", &endpoint]).await;
    let id = insert(
        &daemon,
        &json!({"queue": "q", "key": "k", "traceparent": traceparent(TRACE, true)}),
    )
    .await;
    let leased = daemon.lease_all("w", "q", 1).await.remove(0);
    let back = json!({"id": id, "lease_token": leased["lease_token"], "not_started": true});
    let (status, answer) = daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": "w", "rejections": [back]}),
        )
        .await;
    assert_eq!(
        (status, &answer["results"][0]["status"]),
        (200, &json!("OK")),
        "{answer}"
    );
    work(&daemon, "q").await;
    let claims = receiver.wait_for(&id, "claim", 2).await;
    let done = receiver.wait_for(&id, "work", 1).await.remove(0);
    assert!(
        claims[0].id != claims[1].id
            && claims
                .iter()
                .all(|claim| claim.attribute("taskd.attempt") == "1")
    );
    assert_eq!(done.parent, claims[1].id);
    assert!(daemon.stop().await.success());
}

/// A task that dies is settled under the span of its insert, with the reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_death_is_an_error_of_the_trace() {
    let (receiver, address) = Receiver::start().await;
    let endpoint = format!("http://{address}");
    let mut daemon = Daemon::start("", &["--otlp-endpoint", &endpoint]).await;
    let id = insert(
        &daemon,
        &json!({"queue": "q", "key": "k", "traceparent": traceparent(TRACE, true)}),
    )
    .await;
    let leased = daemon.lease_all("w", "q", 1).await.remove(0);
    let rejection =
        json!({"id": id, "lease_token": leased["lease_token"], "reason": "gone", "retry": false});
    daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": "w", "rejections": [rejection]}),
        )
        .await;
    let died = receiver.wait_for(&id, "work", 1).await.remove(0);
    assert_eq!(
        (died.outcome(), died.error.as_deref()),
        ("dead", Some("gone"))
    );
    let settle = receiver.wait_for(&id, "settle", 1).await.remove(0);
    assert_eq!(settle.outcome(), "dead");
    assert!(settle.error.is_some_and(|error| error.contains("gone")));
    assert_eq!(
        settle.parent,
        receiver.wait_for(&id, "insert", 1).await[0].id
    );
    // It is sent again: the new attempts are spans of the same trace, and none has an id of before.
    let letters = daemon.get("/v1/dead-letters").await.1;
    let letter = &letters["letters"][0]["id"];
    let (status, answer) = daemon
        .post("/v1/dead-letters:retry", &json!({"ids": [letter]}))
        .await;
    assert_eq!(status, 200, "{answer}");
    work(&daemon, "q").await;
    let works = receiver.wait_for(&id, "work", 2).await;
    assert!(works[0].id != works[1].id && works[0].trace == works[1].trace);
    assert!(daemon.stop().await.success());
}

/// A collector that is away costs spans, and nothing else; when it comes, spans reach it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_away_or_silent_holds_up_no_task() {
    let port = Port::reserve(12_000..20_000);
    let endpoint = format!("http://127.0.0.1:{}", port.number);
    let args = [
        "--otlp-endpoint",
        &endpoint,
        "--otlp-timeout",
        "200ms",
        "--trace-sample",
        "1",
    ];
    let mut daemon = Daemon::start("", &args).await;
    let tasks: Vec<Value> = (0..4000)
        .map(|n| json!({"queue": "q", "key": format!("k{n}")}))
        .collect();
    for some in tasks.chunks(1000) {
        daemon.insert(some).await;
    }
    assert_eq!(daemon.drain("w", "q").await.len(), 4000);
    until("it has said so", async || {
        daemon.log().contains("cannot export spans")
    })
    .await;
    until("spans were dropped", async || {
        metric(&daemon, "taskd_traces_spans_total{outcome=\"dropped\"}").await > 0.0
    })
    .await;

    // It accepts, and says nothing.
    let listener = TcpListener::bind(("127.0.0.1", port.number)).await.unwrap();
    insert(&daemon, &json!({"queue": "silent", "key": "k"})).await;
    work(&daemon, "silent").await;
    let receiver = Receiver::default();
    receiver.serve(listener);
    until("the log says that it is back", async || {
        daemon.log().contains("spans are exported again")
    })
    .await;
    until("it gets spans", async || !receiver.spans().is_empty()).await;
    let last = insert(&daemon, &json!({"queue": "last", "key": "k"})).await;
    receiver.wait_for(&last, "publish", 1).await;
    assert!(daemon.stop().await.success());
}

/// A stop does not wait for a collector that says nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_waits_seconds_for_a_silent_collector() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let args = [
        "--otlp-endpoint",
        &endpoint,
        "--otlp-timeout",
        "60s",
        "--trace-sample",
        "1",
    ];
    let mut daemon = Daemon::start("", &args).await;
    insert(&daemon, &json!({"queue": "q", "key": "k"})).await;
    let ended = tokio::time::timeout(Duration::from_secs(30), daemon.stop())
        .await
        .expect("it ends");
    assert!(ended.success());
    assert!(
        daemon.log().contains("did not reach the collector"),
        "{}",
        daemon.log()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_an_endpoint_a_sampled_context_goes_through_unchanged() {
    let mut daemon = Daemon::start("", &[]).await;
    let context = traceparent(TRACE, true);
    insert(
        &daemon,
        &json!({"queue": "q", "key": "k", "traceparent": context}),
    )
    .await;
    let leased = daemon.lease_all("w", "q", 1).await.remove(0);
    assert_eq!(leased["traceparent"], context);
    assert!(
        !leased["lease_token"].as_str().unwrap().contains('-'),
        "the token has no trace"
    );
    assert!(daemon.stop().await.success());
}

/// Whoever may insert tasks has only a bounded part of the spans.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_cannot_have_any_number_of_tasks_traced() {
    const TASKS: usize = 10_000;
    let (receiver, address) = Receiver::start().await;
    let endpoint = format!("http://{address}");
    let mut daemon = Daemon::start("", &["--otlp-endpoint", &endpoint]).await;
    let began = Instant::now();
    let tasks: Vec<Value> = (0..TASKS)
        .map(|n| json!({"queue": "q", "key": n.to_string(), "traceparent": traceparent(TRACE, true)}))
        .collect();
    for some in tasks.chunks(1000) {
        daemon.insert(some).await;
    }
    // A burst, and a thousand for each second that has passed.
    let most = 1000 * (usize::try_from(began.elapsed().as_secs()).unwrap() + 2);
    assert!(daemon.stop().await.success());
    let inserts = receiver
        .spans()
        .iter()
        .filter(|span| span.name == "insert")
        .count();
    assert!(
        (1..=most).contains(&inserts),
        "{inserts} tasks were traced; at most {most} of {TASKS}"
    );
}

/// A collector that refuses every call, in words that look like a line of the log.
struct Forger;

#[tonic::async_trait]
impl TraceService for Forger {
    async fn export(
        &self,
        _: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        Err(tonic::Status::unavailable(
            "bad\n2026-11-28T00:00:00Z  INFO taskd: FORGED\u{202e}\u{9b}1m LINE",
        ))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_words_of_a_collector_begin_no_line_of_the_log() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(Forger));
    tokio::spawn(
        server.serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)),
    );
    for format in ["pretty", "json"] {
        let args = ["--otlp-endpoint", &endpoint, "--trace-sample", "1"];
        let mut daemon = Daemon::start(&format!("log_format = \"{format}\""), &args).await;
        insert(&daemon, &json!({"queue": "q", "key": "k"})).await;
        until("the log has the words", async || {
            daemon.log().contains("FORGED")
        })
        .await;
        let log = daemon.log();
        assert!(
            !log.lines()
                .any(|line| line.starts_with("2026-11-28T00:00:00Z")),
            "{format}: {log}"
        );
        assert!(
            log.contains("bad\\n2026-11-28T00:00:00Z"),
            "{format}: {log}"
        );
        assert!(!log.contains(['\u{202e}', '\u{9b}']), "{format}: {log}");
        assert!(daemon.stop().await.success());
    }
}
