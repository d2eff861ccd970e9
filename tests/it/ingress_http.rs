//! The HTTP API over a real socket, as far as it answers by itself: what is wrong with a request,
//! and how the process is.

use std::{sync::Arc, time::Duration};

use metrics_exporter_prometheus::PrometheusBuilder;
use reqwest::{Client, Method, Response, StatusCode, header};
use taskd::{
    api::Authentication,
    config::Settings,
    ingress::{self, Budget, State},
    pipelines::admission::Gates,
    runtime::{Progress, Servers},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

/// A process that runs no pipeline.
pub(crate) fn idle_state(change: impl FnOnce(&mut Settings)) -> State {
    let mut settings = Settings::default();
    change(&mut settings);
    let stop = CancellationToken::new();
    State {
        budget: Budget::new(settings.limits.request_budget),
        api: Arc::new(taskd::api::Api {
            discovery: None,
            tasks: None,
            query: None,
            changing: None,
            authentication: Authentication::Open,
            waits: taskd::api::Waits::default(),
            workers: taskd::api::HeardWorkers::new(taskd::runtime::Clock::of_this_machine()),
            stop: stop.clone(),
        }),
        tls: None,
        progress: Progress::default(),
        gates: Gates::default(),
        servers: Servers::default(),
        settings: Arc::new(settings),
        ports: taskd::ingress::http::Ports {
            http: 7600,
            grpc: 7601,
        },
        metrics: PrometheusBuilder::new().build_recorder().handle().into(),
        stop,
    }
}

struct Api {
    url: String,
    client: Client,
    state: State,
    server: JoinHandle<()>,
}

impl Api {
    async fn start(change: impl FnOnce(&mut Settings)) -> Self {
        let state = idle_state(change);
        let listener = ingress::bind(([127, 0, 0, 1], 0).into(), "http")
            .await
            .unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = tokio::spawn(ingress::http::serve(listener, state.clone()));
        Self {
            url,
            client: crate::support::http_client(),
            state,
            server,
        }
    }

    async fn get(&self, path: &str) -> Response {
        self.client
            .get(format!("{}{path}", self.url))
            .send()
            .await
            .unwrap()
    }

    async fn post(
        &self,
        path: &str,
        content_type: &str,
        body: impl Into<reqwest::Body>,
    ) -> Response {
        let request = self
            .client
            .post(format!("{}{path}", self.url))
            .header(header::CONTENT_TYPE, content_type);
        request.body(body).send().await.unwrap()
    }

    fn address(&self) -> &str {
        self.url.trim_start_matches("http://")
    }
}

/// Checks that it is a problem with this status, and answers it.
async fn problem(response: Response, status: StatusCode) -> serde_json::Value {
    assert_eq!(response.status(), status);
    assert_eq!(
        response.headers()[header::CONTENT_TYPE],
        "application/problem+json"
    );
    let problem: serde_json::Value = response.json().await.unwrap();
    assert_eq!(problem["status"], status.as_u16());
    assert_eq!(problem["title"], status.canonical_reason().unwrap());
    problem
}

const JSON: &str = "application/json";

#[tokio::test]
async fn unknown_routes_and_methods_are_problems() {
    let api = Api::start(|_| {}).await;
    for path in ["/v1", "/v1/nothing", "/v1/tasks:nothing"] {
        let problem = problem(api.get(path).await, StatusCode::NOT_FOUND).await;
        assert_eq!(problem["detail"], format!("there is no GET {path}"));
    }
    let response = api
        .client
        .request(Method::DELETE, format!("{}/v1/queues", api.url))
        .send()
        .await
        .unwrap();
    assert_eq!(response.headers()[header::ALLOW], "GET,HEAD");
    problem(response, StatusCode::METHOD_NOT_ALLOWED).await;
}

#[tokio::test]
async fn probes_get_through_to_a_start_that_waits_and_has_many_clients() {
    let listener = ingress::bind(([127, 0, 0, 1], 0).into(), "http")
        .await
        .unwrap();
    let address = listener.local_addr().unwrap();
    let grpc = ingress::bind(([127, 0, 0, 1], 0).into(), "grpc")
        .await
        .unwrap();
    let waiting = ingress::Waiting::start(listener, grpc, None);
    let mut clients = Vec::new();
    for _ in 0..300 {
        let mut client = TcpStream::connect(address).await.unwrap();
        client
            .write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            .await
            .unwrap();
        let mut status = [0; 12];
        client.read_exact(&mut status).await.unwrap();
        assert_eq!(&status, b"HTTP/1.1 200", "client {}", clients.len());
        clients.push(client);
    }
    drop(clients);
    waiting.end().await;
}

#[tokio::test]
async fn a_body_that_is_no_json_is_told_where() {
    let api = Api::start(|_| {}).await;
    for path in [
        "/v1/tasks",
        "/v1/tasks:get",
        "/v1/tasks:complete",
        "/v1/tasks:reject",
        "/v1/tasks:extend",
    ] {
        let problem = problem(
            api.post(path, JSON, "{\n 1}").await,
            StatusCode::BAD_REQUEST,
        )
        .await;
        assert_eq!(
            (&problem["line"], &problem["column"]),
            (&2.into(), &2.into()),
            "{path}: {problem}"
        );
    }
    let response = api
        .post(
            "/v1/tasks:get",
            JSON,
            r#"{"worker":"w","queues":["q"],"max":1}"#,
        )
        .await;
    let problem = problem(response, StatusCode::BAD_REQUEST).await;
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .starts_with("unknown field `max`, expected one of `worker`"),
        "{problem}"
    );
}

#[tokio::test]
async fn other_content_types_are_refused_with_those_that_are_not() {
    let api = Api::start(|_| {}).await;
    for content_type in ["text/plain", "application/x-www-form-urlencoded"] {
        let problem = problem(
            api.post("/v1/tasks", content_type, "{}").await,
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
        )
        .await;
        let detail = problem["detail"].as_str().unwrap();
        assert!(
            detail.contains("application/x-ndjson") && detail.contains(content_type),
            "{detail}"
        );
    }
}

#[tokio::test]
async fn a_compressed_body_is_refused_with_the_name_of_its_encoding() {
    let api = Api::start(|_| {}).await;
    for (path, content_type) in [
        ("/v1/tasks", JSON),
        ("/v1/tasks", "application/x-ndjson"),
        ("/v1/tasks:get", JSON),
    ] {
        let request = api
            .client
            .post(format!("{}{path}", api.url))
            .header(header::CONTENT_TYPE, content_type);
        let response = request
            .header(header::CONTENT_ENCODING, "gzip")
            .body("\x1f")
            .send()
            .await
            .unwrap();
        let problem = problem(response, StatusCode::UNSUPPORTED_MEDIA_TYPE).await;
        assert_eq!(
            problem["detail"],
            "content encoding \"gzip\" is not understood; send the body as it is"
        );
    }
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused_announced_or_not() {
    let api = Api::start(|settings| settings.limits.max_request_bytes = 100).await;
    let body = format!("[\"{}\"]", "x".repeat(200));
    problem(
        api.post("/v1/tasks", JSON, body.clone()).await,
        StatusCode::PAYLOAD_TOO_LARGE,
    )
    .await;
    let chunks = futures::stream::iter([Ok::<_, std::io::Error>(body)]);
    let streamed = api
        .post("/v1/tasks", JSON, reqwest::Body::wrap_stream(chunks))
        .await;
    problem(streamed, StatusCode::PAYLOAD_TOO_LARGE).await;
}

#[tokio::test]
async fn more_tasks_than_the_buffer_holds_are_told_to_come_as_lines() {
    let api = Api::start(|settings| settings.discovery.buffer = 2).await;
    let problem = problem(
        api.post("/v1/tasks", JSON, "[{},{},{}]").await,
        StatusCode::PAYLOAD_TOO_LARGE,
    )
    .await;
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .starts_with("more than 2 tasks in one request"),
        "{problem}"
    );
}

#[tokio::test]
async fn a_process_without_the_pipeline_says_so() {
    let api = Api::start(|_| {}).await;
    let task = r#"{"queue":"q","key":"k"}"#;
    for content_type in [
        JSON,
        "application/json; charset=utf-8",
        "application/x-ndjson",
        "application/jsonl",
    ] {
        let problem = problem(
            api.post("/v1/tasks", content_type, task).await,
            StatusCode::SERVICE_UNAVAILABLE,
        )
        .await;
        assert_eq!(
            problem["detail"],
            "this process does not run the pipeline discovery"
        );
    }
    // A byte order mark is no mistake.
    let problem_of_get = api
        .post(
            "/v1/tasks:get",
            JSON,
            "\u{feff}{\"worker\":\"w\",\"queues\":[\"q\"]}",
        )
        .await;
    let problem_of_get = problem(problem_of_get, StatusCode::SERVICE_UNAVAILABLE).await;
    assert_eq!(
        problem_of_get["detail"],
        "this process does not run the pipeline tasks"
    );
    problem(api.get("/v1/queues").await, StatusCode::SERVICE_UNAVAILABLE).await;
}

#[tokio::test]
async fn a_wrong_item_is_answered_for_itself() {
    let api = Api::start(|_| {}).await;
    let body =
        r#"{"worker":"w","completions":[{"id":"7","lease_token":"t","result":1,"outcome":2}]}"#;
    let answer: serde_json::Value = api
        .post("/v1/tasks:complete", JSON, body)
        .await
        .json()
        .await
        .unwrap();
    let result = &answer["results"][0];
    assert_eq!(
        (&result["id"], &result["status"]),
        (&"7".into(), &"INVALID".into()),
        "{answer}"
    );
    assert!(
        result["error"]
            .as_str()
            .unwrap()
            .starts_with("unknown field `outcome`"),
        "{answer}"
    );
}

#[tokio::test]
async fn an_id_that_is_none_is_a_bad_request() {
    let api = Api::start(|_| {}).await;
    for path in ["/v1/tasks/42", "/v1/tasks/42/results"] {
        let problem = problem(api.get(path).await, StatusCode::BAD_REQUEST).await;
        assert!(
            problem["detail"]
                .as_str()
                .unwrap()
                .starts_with("\"42\" is not a task id"),
            "{problem}"
        );
    }
}

#[tokio::test]
async fn health_readiness_and_metrics_are_answered() {
    let api = Api::start(|settings| settings.stall_after = Duration::ZERO).await;
    assert_eq!(api.get("/healthz").await.text().await.unwrap(), "ok\n");
    assert_eq!(api.get("/readyz").await.status(), StatusCode::OK);
    let metrics = api.get("/metrics").await;
    assert!(
        metrics.headers()[header::CONTENT_TYPE]
            .to_str()
            .unwrap()
            .starts_with("text/plain; version=0.0.4")
    );

    let beat = api.state.progress.register("fanout/p3");
    let stalled = api.get("/readyz").await;
    assert_eq!(stalled.status(), StatusCode::SERVICE_UNAVAILABLE);
    let stalled: serde_json::Value = stalled.json().await.unwrap();
    assert_eq!(
        (&stalled["status"], &stalled["stalled"][0]["name"]),
        (&"stalled".into(), &"fanout/p3".into())
    );
    drop(beat);
    assert_eq!(api.get("/readyz").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_stop_ends_idle_connections_and_lets_requests_finish() {
    let api = Api::start(|_| {}).await;
    let mut half = TcpStream::connect(api.address()).await.unwrap();
    half.write_all(
        b"POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n[",
    )
    .await
    .unwrap();
    // Keeps a connection open that asks for nothing more.
    api.get("/healthz").await;
    api.state.stop.cancel();
    half.write_all(b"]").await.unwrap();
    let mut answer = String::new();
    half.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    tokio::time::timeout(crate::support::PATIENCE, api.server)
        .await
        .expect("the server ends by itself")
        .unwrap();
}
