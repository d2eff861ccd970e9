//! HTTP calls of workflows on a running taskd, with servers on loopback.

use std::{
    fs,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use axum::{
    Json, Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode, Uri, header},
    response::{IntoResponse as _, Response},
};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::support::{daemon::Daemon, until};

/// A request as the server saw it.
#[derive(Clone, Debug)]
struct Seen {
    path: String,
    headers: HeaderMap,
    body: Bytes,
}

/// A server that remembers its requests.
#[derive(Clone, Default)]
struct Server {
    seen: Arc<Mutex<Vec<Seen>>>,
    /// The server answers requests of `/held` from then on.
    released: Arc<Mutex<bool>>,
}

impl Server {
    async fn start() -> (Self, SocketAddr) {
        let server = Self::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().fallback(answer).with_state(server.clone());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        (server, address)
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    fn release(&self) {
        *self.released.lock().unwrap() = true;
    }
}

async fn answer(
    State(server): State<Server>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let path = uri.path().to_owned();
    let said = headers.get(header::AUTHORIZATION).cloned();
    let seen = Seen {
        path: path.clone(),
        headers,
        body: body.clone(),
    };
    server.seen.lock().unwrap().push(seen);
    match path.as_str() {
        "/held" if !*server.released.lock().unwrap() => std::future::pending().await,
        "/moved" => (StatusCode::FOUND, [(header::LOCATION, "/pet")]).into_response(),
        "/api.json" => Json(json!({
            "openapi": "3.1.0",
            "paths": { "/pet/{id}": { "get": {
                "operationId": "getPet",
                "parameters": [{ "name": "id", "in": "path", "required": true }],
            } } },
        }))
        .into_response(),
        "/large" => "x".repeat(100_000).into_response(),
        "/missing" => StatusCode::NOT_FOUND.into_response(),
        "/private" => {
            let said = said.map(|said| said.to_str().unwrap().to_owned());
            (
                [("x-said", said.clone().unwrap())],
                Json(json!({ "said": said })),
            )
                .into_response()
        }
        _ => Json(json!({ "name": "Milou" })).into_response(),
    }
}

fn definition(name: &str, rest: &str) -> String {
    format!(
        "document: {{ dsl: '1.0.3', namespace: shop, name: {name}, version: '1.0.0' }}\n{rest}\n"
    )
}

/// Deploys a definition. Returns the status and the text of the answer.
async fn deploy(daemon: &Daemon, name: &str, rest: &str) -> (u16, String) {
    let client = crate::support::http_client();
    let deploying = client
        .put(format!("{}/v1/workflows", daemon.http()))
        .header("content-type", "application/yaml")
        .body(definition(name, rest));
    let deployed = deploying.send().await.unwrap();
    let status = deployed.status().as_u16();
    (status, deployed.text().await.unwrap())
}

/// Deploys a definition and starts it. Returns the path of the execution.
async fn start(daemon: &Daemon, name: &str, rest: &str, id: &str) -> String {
    let (status, deployed) = deploy(daemon, name, rest).await;
    assert!(matches!(status, 200 | 201), "{deployed}");
    let start = format!("/v1/workflows/shop/{name}/1.0.0:start");
    let (status, started) = daemon.post(&start, &json!({ "id": id })).await;
    assert_eq!(status, 202, "{started}");
    format!("/v1/executions/{id}")
}

/// Waits until an execution has ended.
async fn ended(daemon: &Daemon, execution: &str) -> Value {
    let mut shown = Value::Null;
    until("the execution ends", async || {
        if let Some((200, execution)) = daemon.try_get(execution).await {
            shown = execution;
        }
        shown["ended_at"].is_string()
    })
    .await;
    shown
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_is_sent_again_with_its_key_after_a_kill() {
    let (server, address) = Server::start().await;
    let config = "workflow_call_override = \"https://shop.example -> http://ADDRESS\"";
    let config = config.replace("ADDRESS", &address.to_string());
    let mut daemon = Daemon::start(&config, &[]).await;
    let rest = "
do:
  - pay:
      try:
        - send:
            call: http
            with:
              method: post
              endpoint: https://shop.example/held
              headers: { x-shop: '${ \"a\" + \"b\" }' }
              body: { amount: 42 }
            metadata: { taskd: { lease: 1s, backoff: { kind: constant, initial: 100ms } } }
      catch: {}";
    let execution = start(&daemon, "pay", rest, "one").await;
    for times in 1..=2 {
        until("the request is there", async || {
            server.seen().len() >= times
        })
        .await;
        daemon.kill9_and_restart();
        daemon.ready().await;
    }
    server.release();
    let shown = ended(&daemon, &execution).await;
    assert_eq!(shown["output"], json!({ "name": "Milou" }), "{shown}");
    let seen = server.seen();
    assert!(seen.len() >= 3, "{seen:?}");
    let id = shown["id"].as_str().unwrap();
    for one in seen {
        let key = one.headers["idempotency-key"].to_str().unwrap();
        assert_eq!(key, format!("{id}//do/0/pay/try/0/send#0.0"));
        assert_eq!(one.headers["x-shop"], "ab");
        assert_eq!(one.headers["content-type"], "application/json");
        assert_eq!(one.body, r#"{"amount":42}"#);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn private_addresses_and_the_queue_of_calls_are_closed() {
    let (server, address) = Server::start().await;
    let daemon = Daemon::start("", &[]).await;
    for (name, host) in [("address", "127.0.0.1"), ("name", "localhost")] {
        let port = address.port();
        let rest = format!(
            "do: [{{ a: {{ call: http, with: {{ method: get, endpoint: 'http://{host}:{port}/pet' }} }} }}]"
        );
        let execution = start(&daemon, name, &rest, name).await;
        let error = ended(&daemon, &execution).await["error"].take();
        assert_eq!(error["status"], 403, "{error}");
        assert!(
            error["type"].as_str().unwrap().ends_with("/authorization"),
            "{error}"
        );
        let says = error["detail"].as_str().unwrap();
        assert!(
            says.contains("workflow_call_allow") && !says.contains('\n'),
            "{says}"
        );
    }
    let openapi = format!(
        "do: [{{ a: {{ call: openapi, with: {{ document: {{ endpoint: 'http://{address}/api.json' }}, operationId: o }} }} }}]"
    );
    let (status, refused) = deploy(&daemon, "document", &openapi).await;
    assert_eq!(status, 422, "{refused}");
    assert!(
        refused.contains("workflow_call_allow") && refused.contains("\"line\":2"),
        "{refused}"
    );
    assert!(server.seen().is_empty(), "{:?}", server.seen());

    let insert = json!([{ "queue": "wf.http", "key": "k", "payload": {} }]);
    let (_, answer) = daemon.post("/v1/tasks", &insert).await;
    let says = answer["results"][0]["error"].as_str().unwrap_or_default();
    assert!(says.contains("which taskd sends itself"), "{answer}");
    let get = json!({ "worker": "w", "queues": ["wf.http"] });
    let (status, answer) = daemon.post("/v1/tasks:get", &get).await;
    assert_eq!(status, 400, "{answer}");
}

const SECRET: &str = "sesame-5f3a";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_named_secret_reaches_the_server_and_nothing_else() {
    let (server, address) = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    fs::write(&file, SECRET).unwrap();
    let config = format!(
        "workflow_call_allow = \"127.0.0.1\"\nworkflow_secrets = \"bank = file:{}\"\nlog = \"taskd=trace\"\n",
        file.display()
    );
    let daemon = Daemon::start(&config, &[]).await;
    let rest = format!(
        "
use: {{ secrets: [bank, none], authentications: {{ bank: {{ bearer: {{ use: bank }} }}, none: {{ bearer: {{ use: none }} }} }} }}
do:
  - told:
      call: http
      with: {{ method: get, endpoint: {{ uri: 'http://{address}/private', authentication: {{ use: bank }} }}, output: response }}
      export: {{ as: . }}
  - missing:
      call: http
      with: {{ method: get, endpoint: {{ uri: 'http://{address}/private', authentication: {{ use: none }} }} }}"
    );
    let execution = start(&daemon, "secret", &rest, "one").await;
    let shown = ended(&daemon, &execution).await;
    assert_eq!(shown["error"]["status"], 401, "{shown}");
    let says = shown["error"]["detail"].as_str().unwrap();
    assert!(says.contains("workflow_secrets"), "{says}");
    let seen = server.seen();
    let sent: Vec<_> = seen
        .iter()
        .map(|one| &one.headers["authorization"])
        .collect();
    assert_eq!(sent, [&format!("Bearer {SECRET}")]);

    let history = format!("{}{execution}/history", daemon.http());
    let history = reqwest::get(history).await.unwrap().text().await.unwrap();
    assert!(history.contains("Bearer ***"), "{history}");
    let mut texts = vec![history, shown.to_string(), daemon.log()];
    for path in ["/v1/tasks?queue=wf.http", "/v1/dead-letters", "/metrics"] {
        let (_, answer) = daemon.get(path).await;
        for task in answer["tasks"].as_array().into_iter().flatten() {
            let id = task["id"].as_str().unwrap();
            texts.push(daemon.get(&format!("/v1/tasks/{id}")).await.1.to_string());
            texts.push(
                daemon
                    .get(&format!("/v1/tasks/{id}/results"))
                    .await
                    .1
                    .to_string(),
            );
        }
        texts.push(answer.to_string());
    }
    for text in texts {
        assert!(!text.contains(SECRET), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_results_or_errors_that_try_catches() {
    let (server, address) = Server::start().await;
    let config = "workflow_call_allow = \"127.0.0.1\"\nmax_result_bytes = \"64KiB\"";
    let daemon = Daemon::start(config, &[]).await;
    let get = |path: &str, more: &str| {
        format!("call: http, with: {{ method: get, endpoint: 'http://{address}{path}'{more} }}")
    };
    let tried = |name: &str, call: &str| {
        format!(
            "  - {name}:
      try: [{{ send: {{ {call} }} }}]
      catch: {{ as: e, do: [{{ note: {{ set: {{ status: '${{ $e.status }}', type: '${{ $e.type }}' }} }} }}] }}
      export: {{ as: '${{ $context + {{ {name}: . }} }}' }}"
        )
    };
    let steps = [
        tried("found", &get("/pet", "")),
        tried("missing", &get("/missing", "")),
        tried("large", &get("/large", "")),
        tried("moved", &get("/moved", "")),
        tried(
            "stays",
            &get("/moved", ", redirect: true, output: response"),
        ),
    ];
    let rest = format!(
        "do:\n{}\n  - all: {{ set: '${{ $context }}' }}",
        steps.join("\n")
    );
    let execution = start(&daemon, "answers", &rest, "one").await;
    let shown = ended(&daemon, &execution).await;
    let output = &shown["output"];
    let pet = json!({ "name": "Milou" });
    assert_eq!(
        (&output["found"], &output["moved"]),
        (&pet, &pet),
        "{shown}"
    );
    assert_eq!(output["missing"]["status"], 404, "{shown}");
    assert_eq!(output["large"]["status"], 500, "{shown}");
    for failed in ["missing", "large"] {
        let kind = output[failed]["type"].as_str().unwrap();
        assert!(kind.ends_with("/communication"), "{shown}");
    }
    assert_eq!(output["stays"]["statusCode"], 302, "{shown}");
    assert_eq!(output["stays"]["headers"]["location"], "/pet", "{shown}");
    let paths: Vec<String> = server.seen().into_iter().map(|one| one.path).collect();
    let expected = ["/pet", "/missing", "/large", "/moved", "/pet", "/moved"];
    assert_eq!(paths, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_does_not_answer_holds_up_no_other() {
    let (slow, slow_at) = Server::start().await;
    let (_, quick_at) = Server::start().await;
    let daemon = Daemon::start("workflow_call_allow = \"127.0.0.1\"", &[]).await;
    let call = |address: SocketAddr, path: &str| {
        format!(
            "do: [{{ a: {{ call: http, with: {{ method: get, endpoint: 'http://{address}{path}' }} }} }}]"
        )
    };
    for number in 0..40 {
        let id = format!("slow-{number}");
        start(&daemon, "slow", &call(slow_at, "/held"), &id).await;
    }
    until("the host has as many requests as it may", async || {
        slow.seen().len() == 16
    })
    .await;
    let quick = start(&daemon, "quick", &call(quick_at, "/pet"), "quick").await;
    let shown = ended(&daemon, &quick).await;
    assert_eq!(shown["output"], json!({ "name": "Milou" }), "{shown}");
    assert_eq!(slow.seen().len(), 16);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_document_is_fetched_once_and_kept() {
    let (server, address) = Server::start().await;
    let mut daemon = Daemon::start("workflow_call_allow = \"127.0.0.1\"", &[]).await;
    let call = |operation: &str| {
        format!(
            "do: [{{ a: {{ call: openapi, with: {{ document: {{ endpoint: 'http://{address}/api.json' }}, operationId: {operation}, parameters: {{ id: 7 }} }} }} }}]"
        )
    };
    let (status, refused) = deploy(&daemon, "other", &call("getHorse")).await;
    assert_eq!(status, 422, "{refused}");
    assert!(refused.contains("no operation getHorse"), "{refused}");
    let call = call("getPet");
    assert_eq!(deploy(&daemon, "pet", &call).await.0, 201);
    daemon.kill9_and_restart();
    daemon.ready().await;
    let execution = start(&daemon, "pet", &call, "one").await;
    let shown = ended(&daemon, &execution).await;
    assert_eq!(shown["output"], json!({ "name": "Milou" }), "{shown}");
    let paths: Vec<String> = server.seen().into_iter().map(|one| one.path).collect();
    assert_eq!(paths, ["/api.json", "/api.json", "/pet/7"]);
}
