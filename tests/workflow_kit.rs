//! The specification's conformance kit, unchanged, on a running taskd with its embedded servers, and
//! with a stand-in for the hosts that it calls: once undisturbed, and once more with taskd killed after
//! each append that is seen. The histories are equal, and the stand-in sees one request under each key.
//! So are those of its examples that taskd does not refuse.
//!
//! Its files are in `../shared/swf-spec`. Where they are missing, the test passes and says so.

// The runtime ends with the test.
#![allow(clippy::disallowed_methods)]

#[macro_use]
#[path = "support/mod.rs"]
mod support;

use std::{
    collections::BTreeMap, fmt, fs, net::SocketAddr, path::Path, process::ExitCode, sync::OnceLock,
};

use axum::{
    Json, Router,
    body::{Body, to_bytes},
    extract::{Path as Parts, Query, Request},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::get,
};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use cucumber::{StatsWriter as _, World as _, gherkin::Step, given, then, when};
use serde_json::{Value, json};
use taskd::workflow::definition::Definition;
use tokio::{net::TcpListener, sync::Mutex};

use self::support::{daemon::Daemon, until};

const SCENARIOS: usize = 21;
/// Those of the examples that run. The others are refused.
const EXAMPLES: usize = 28;
const HOSTS: [&str; 6] = [
    "petstore.swagger.io",
    "httpbin.org",
    "swapi.dev",
    "superbet-casinos.com",
    "fake-hospital.com",
    "external-service.example.com",
];

/// Where taskd listens.
static TASKD: OnceLock<String> = OnceLock::new();
/// taskd, while it is to be killed.
static KILLED: Mutex<Option<Daemon>> = Mutex::const_new(None);
/// The histories of the undisturbed executions, by definition and input.
static CALM: Mutex<BTreeMap<String, Vec<Value>>> = Mutex::const_new(BTreeMap::new());
/// The requests that the stand-in has seen, by idempotency key.
static REQUESTS: Mutex<BTreeMap<String, String>> = Mutex::const_new(BTreeMap::new());

#[derive(Default, cucumber::World)]
struct World {
    definition: String,
    input: Value,
    /// As taskd shows it.
    execution: Value,
    /// Its events.
    history: Vec<Value>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}\n{}\n{:#}",
            self.definition, self.input, self.execution
        )
    }
}

impl World {
    fn output(&self) -> &Value {
        assert_eq!(self.execution["status"], "completed", "{self:?}");
        &self.execution["output"]
    }

    fn error(&self) -> &Value {
        assert_eq!(self.execution["status"], "faulted", "{self:?}");
        &self.execution["error"]
    }

    /// The value of a property of the output, such as `error.type`.
    fn property(&self, path: &str) -> Option<&Value> {
        let mut names = path.split('.');
        names.try_fold(self.output(), |value, name| value.get(name))
    }

    /// The names of the tasks in the order of their starts.
    fn started(&self) -> Vec<&str> {
        let started = self
            .history
            .iter()
            .filter(|event| event["kind"] == "task_started");
        let paths = started.filter_map(|event| event["path"].as_str());
        paths.filter_map(|path| path.rsplit('/').next()).collect()
    }

    /// The place of a task among those that started.
    fn place(&self, task: &str) -> usize {
        let started = self.started();
        let place = started.iter().position(|name| *name == task);
        place.unwrap_or_else(|| panic!("{task} did not run: {started:?}"))
    }
}

/// The text of a step, without the media type in its first line.
fn text(step: &Step) -> &str {
    let text = step.docstring.as_deref().expect("the step has a text");
    let text = text.strip_prefix("yaml").unwrap_or(text);
    text.trim_start_matches('\n')
}

/// Reads YAML by the reader of definitions: as the constant that a task sets.
fn value(step: &Step) -> Value {
    let indented = text(step).replace('\n', "\n          ");
    let text = format!(
        "document: {{ dsl: '1.0.3', namespace: a, name: a, version: '1.0.0' }}\ndo:\n  - a:\n      set:\n        value:\n          {indented}\n"
    );
    let read = Definition::read(&text).unwrap_or_else(|mistakes| panic!("{mistakes:?}\n{text}"));
    read.json["do"][0]["a"]["set"]["value"].clone()
}

/// Whether two values are equal, with numbers compared as numbers.
fn same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => one.as_f64() == other.as_f64(),
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            let is_same = |(name, value): (&String, &Value)| {
                other.get(name).is_some_and(|other| same(value, other))
            };
            one.len() == other.len() && one.iter().all(is_same)
        }
        _ => one == other,
    }
}

#[given("a workflow with definition:")]
fn a_definition(world: &mut World, step: &Step) {
    world.definition = text(step).to_owned();
}

#[given("given the workflow input is:")]
fn an_input(world: &mut World, step: &Step) {
    world.input = value(step);
}

/// Deploys a definition and starts it. Returns the URL of the execution.
async fn start(definition: &str, input: &Value) -> String {
    let client = support::http_client();
    let url = |path: &str| format!("{}/v1/{path}", TASKD.get().unwrap());
    let document = Definition::read(definition).unwrap().definition.document;
    let workflow = format!(
        "workflows/{}/{}/{}",
        document.namespace, document.name, document.version
    );
    // Some scenarios have the same name.
    client.delete(url(&workflow)).send().await.unwrap();
    let deploying = client
        .put(url("workflows"))
        .header("content-type", "application/yaml")
        .body(definition.to_owned());
    let deployed = deploying.send().await.unwrap();
    let status = deployed.status();
    assert_eq!(status, 201, "{}", deployed.text().await.unwrap());
    let start = json!({ "input": input });
    let starting = client.post(url(&format!("{workflow}:start"))).json(&start);
    let started: Value = starting.send().await.unwrap().json().await.unwrap();
    url(&format!("executions/{}", started["id"].as_str().unwrap()))
}

/// Waits until an execution has ended, and returns what taskd shows of it. Kills taskd, if it is to be
/// killed, whenever the execution has more events.
async fn ended(execution: &str) -> Value {
    let client = support::http_client();
    let mut shown = Value::Null;
    let mut daemon = KILLED.lock().await;
    let mut seen = 0;
    until("the execution ends", async || {
        let answer = client.get(execution).send().await.unwrap();
        shown = answer.json().await.unwrap();
        let events = shown["events"].as_u64().unwrap();
        if let Some(daemon) = &mut *daemon
            && events > seen
        {
            seen = events;
            daemon.kill9_and_restart();
            daemon.ready().await;
        }
        shown["ended_at"].is_string()
    })
    .await;
    shown
}

/// An event without its time, and without what differs between executions.
fn comparable(event: &Value, execution: &str) -> Value {
    let mut event = event.clone();
    let fields = event.as_object_mut().unwrap();
    fields.remove("at");
    fields.remove("due");
    if let Some(emitted) = fields.get_mut("event").and_then(Value::as_object_mut) {
        emitted.remove("id");
        emitted.remove("time");
    }
    let text = event.to_string().replace(execution, "EXECUTION");
    serde_json::from_str(&text).unwrap()
}

/// Starts all examples that can be deployed. Returns their names and executions.
async fn start_examples(folder: &Path) -> Vec<(String, String)> {
    let input = json!({
        "petId": 1, "id": 1, "token": "t", "searchQuery": "luke", "orderType": "physical",
        "customer": { "age": 20 }, "bet": 1, "patient": { "fullName": "a" }, "room": { "number": 1 },
    });
    let mut started = Vec::new();
    for (number, file) in fs::read_dir(folder).unwrap().enumerate() {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let text = fs::read_to_string(path).unwrap();
        if Definition::read(&text).is_err() {
            continue;
        }
        // Some have the same name, and run at the same time.
        let text = text.replacen("namespace: ", &format!("namespace: n{number}-"), 1);
        started.push((name, start(&text, &input).await));
    }
    started
}

/// Deploys the definition and runs it to its end.
#[when("the workflow is executed")]
async fn executed(world: &mut World) {
    let execution = start(&world.definition, &world.input).await;
    world.execution = ended(&execution).await;
    let history = support::http_client().get(format!("{execution}/history"));
    let lines = history.send().await.unwrap().text().await.unwrap();
    let lines = lines.lines().map(serde_json::from_str);
    world.history = lines.collect::<Result<_, _>>().unwrap();
    let id = world.execution["id"].as_str().unwrap();
    let history = world.history.iter().map(|event| comparable(event, id));
    let history: Vec<Value> = history.collect();
    let key = format!("{}\n{}", world.definition, world.input);
    let mut calm = CALM.lock().await;
    let before = calm.entry(key).or_insert_with(|| history.clone());
    assert_eq!(*before, history);
}

#[then("the workflow should complete")]
fn completes(world: &mut World) {
    world.output();
}

#[then("the workflow should complete with output:")]
fn completes_with(world: &mut World, step: &Step) {
    let (output, expected) = (world.output(), value(step));
    assert!(same(output, &expected), "{output} is not {expected}");
}

#[then("the workflow should fault")]
fn faults(world: &mut World) {
    world.error();
}

#[then("the workflow should fault with error:")]
fn faults_with(world: &mut World, step: &Step) {
    let (error, expected) = (world.error(), value(step));
    assert!(same(error, &expected), "{error} is not {expected}");
}

#[then(regex = r"^the workflow output should have properties (.+)$")]
fn has_properties(world: &mut World, names: String) {
    for name in names.split(", ") {
        let name = name.trim_matches('\'');
        assert!(world.property(name).is_some(), "there is no {name}");
    }
}

#[then(regex = r"^the workflow output should have a '(.+)' property with value:$")]
fn has_value(world: &mut World, name: String, step: &Step) {
    let (found, expected) = (world.property(&name), value(step));
    assert!(
        found.is_some_and(|found| same(found, &expected)),
        "{found:?} is not {expected}"
    );
}

#[then(regex = r"^the workflow output should have a '(.+)' property containing (\d+) items$")]
fn has_items(world: &mut World, name: String, items: usize) {
    let found = world.property(&name).and_then(Value::as_array);
    assert_eq!(found.map(Vec::len), Some(items));
}

#[then(regex = r"^(\w+) should run first$")]
fn runs_first(world: &mut World, task: String) {
    assert_eq!(world.place(&task), 0);
}

#[then(regex = r"^(\w+) should run last$")]
fn runs_last(world: &mut World, task: String) {
    assert_eq!(world.started().last(), Some(&task.as_str()));
}

#[then(regex = r"^(\w+) should run after (\w+)$")]
fn runs_after(world: &mut World, task: String, before: String) {
    assert!(world.place(&task) > world.place(&before));
}

/// Answers as the hosts that the kit calls. Returns where it listens.
async fn stand_in() -> SocketAddr {
    let pet = |id: u64| json!({ "id": id, "name": "Milou", "status": "available" });
    let found = move |Query(query): Query<Value>| async move {
        assert_eq!(query["status"], "available");
        Json(json!([pet(1), pet(2)]))
    };
    let one = move |Parts(id): Parts<u64>| async move { Json(pet(id)) };
    let missing = || async {
        let message = json!({ "code": 404, "message": "there is no such pet" });
        (StatusCode::NOT_FOUND, Json(message))
    };
    let router = Router::new()
        .route("/v2/swagger.json", get(async || Json(petstore())))
        .route("/v2/pet/findByStatus", get(found))
        .route("/v2/pet/getPetByName/{name}", get(missing))
        .route("/v2/pet/{id}", get(one).put(one))
        .route("/basic-auth/{user}/{password}", get(authenticated))
        // What examples call.
        .fallback(async || Json(json!({ "homeworld": "https://swapi.dev/api/planets/1" })))
        .layer(middleware::from_fn(noted));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    address
}

/// Notes a request, and that it is the same as those under its key before.
async fn noted(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap();
    // OpenAPI documents are fetched without one.
    if let Some(key) = parts.headers.get("idempotency-key") {
        let key = key.to_str().unwrap().to_owned();
        let request = format!("{} {} {body:?}", parts.method, parts.uri);
        let mut requests = REQUESTS.lock().await;
        let before = requests.entry(key).or_insert_with(|| request.clone());
        assert_eq!(*before, request);
    }
    let mut response = next.run(Request::from_parts(parts, Body::from(body))).await;
    // Executions show it.
    let date = HeaderValue::from_static("Mon, 30 Nov 2026 00:00:00 GMT");
    response.headers_mut().insert(header::DATE, date);
    response
}

async fn authenticated(
    Parts((user, password)): Parts<(String, String)>,
    headers: HeaderMap,
) -> Response {
    let expected = format!("Basic {}", BASE64.encode(format!("{user}:{password}")));
    match headers
        .get("authorization")
        .is_some_and(|given| *given == expected)
    {
        true => Json(json!({ "authenticated": true, "user": user })).into_response(),
        false => StatusCode::UNAUTHORIZED.into_response(),
    }
}

/// The part of the pet store's document that the kit uses.
fn petstore() -> Value {
    json!({
        "swagger": "2.0",
        "host": "petstore.swagger.io",
        "basePath": "/v2",
        "schemes": ["https", "http"],
        "paths": {
            "/pet/findByStatus": { "get": {
                "operationId": "findPetsByStatus",
                "parameters": [{ "name": "status", "in": "query", "required": true, "type": "array" }],
            } },
            "/pet/{petId}": { "get": {
                "operationId": "getPetById",
                "parameters": [{ "name": "petId", "in": "path", "required": true, "type": "integer" }],
            } },
        },
    })
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let specification = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/swf-spec/1.0-main");
    if !specification.is_dir() {
        println!("skipped: there is no {}", specification.display());
        return ExitCode::SUCCESS;
    }
    let address = stand_in().await;
    let overrides = HOSTS.map(|host| format!("https://{host} -> http://{address}"));
    let overrides = format!("workflow_call_override = \"{}\"", overrides.join(", "));
    let daemon = Daemon::start(&overrides, &[]).await;
    TASKD.set(daemon.http()).unwrap();
    let features = specification.join("ctk/features");
    let examples = start_examples(&specification.join("examples")).await;
    let mut are_all = kit(&features, "").await;
    for (name, execution) in &examples {
        let shown = ended(execution).await;
        let expected = match name.starts_with("raise") {
            true => "faulted",
            false => "completed",
        };
        assert_eq!(shown["status"], expected, "{name}: {shown}");
    }
    assert_eq!(examples.len(), EXAMPLES);
    println!("{EXAMPLES} examples ran");
    *KILLED.lock().await = Some(daemon);
    are_all &= kit(&features, ", with taskd killed after each append").await;
    println!(
        "{} requests had keys of their own",
        REQUESTS.lock().await.len()
    );
    // Stops it.
    drop(KILLED.lock().await.take());
    match are_all {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Runs all scenarios. Returns whether all passed.
async fn kit(features: &Path, how: &str) -> bool {
    let ran = World::cucumber()
        .max_concurrent_scenarios(1)
        .fail_on_skipped()
        .with_default_cli()
        .run(features)
        .await;
    let passed = ran.scenarios_stats().passed;
    println!("{passed} of {SCENARIOS} scenarios passed{how}");
    passed == SCENARIOS && !ran.execution_has_failed()
}
