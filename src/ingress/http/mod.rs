//! The HTTP API. Each handler reads as one line of the table in [`router`].

mod answer;
mod guard;
mod ndjson;
mod problem;
mod request;
mod waiting;

use axum::{
    Extension, Json, Router,
    body::Body,
    extract::{Path, Request, State as Extract, rejection::PathRejection},
    http::{HeaderMap, Method, StatusCode, Uri, header},
    middleware,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use prost::Message as _;
use serde::Serialize;
use tokio::net::TcpListener;
use tower_http::trace::TraceLayer;
pub use waiting::Waiting;

use self::{
    answer::{Answer, insert, item_answers, list, split, within},
    problem::Problem,
    request::{json_body, pace, task_id},
};
use super::{
    State,
    budget::Share,
    connection::{Answering, Protocol},
    delivery::Deliveries,
    descriptors, json,
    listener::{self, Door},
    measure,
    tally::{Excess, Tally},
};
use crate::{
    api::query,
    pipelines::{discovery, tasks},
    telemetry::metrics,
    wire::pb,
};

/// Serves until `state.stop`, then until the requests in hand are answered.
pub async fn serve(listener: TcpListener, state: State) {
    let max_connections = descriptors::for_each_listener(&state.settings);
    let (without_room, budget, stop) = (full(state.clone(), max_connections), state.budget.clone(), state.stop.clone());
    let answering = Answering {
        protocol: Protocol::Http1,
        router: router(state),
        budget,
        pace,
        may_stay: |_| false,
        wrap: |cut| Box::new(cut),
        stop,
    };
    listener::serve(listener, Door { name: "HTTP", answering, max_connections, without_room: Some(without_room) })
        .await;
}

fn router(state: State) -> Router {
    let guard = guard::Guard::new(&state.settings);
    Router::new()
        .route("/v1/tasks", post(insert_tasks))
        .route("/v1/tasks/{id}", get(get_task))
        .route("/v1/tasks/{id}/results", get(get_results))
        .route("/v1/queues", get(get_queues))
        .route("/v1/tasks:get", post(lease_tasks))
        .route("/v1/tasks:complete", post(complete_tasks))
        .route("/v1/tasks:reject", post(reject_tasks))
        .route("/v1/tasks:extend", post(extend_tasks))
        .fallback(no_such_route)
        .method_not_allowed_fallback(wrong_method)
        // Our own failures are logged where they happen.
        .layer(TraceLayer::new_for_http().on_failure(()))
        .route("/metrics", get(render_metrics))
        .layer(middleware::from_fn_with_state(guard, guard::check))
        .layer(middleware::from_fn(measure::http))
        .merge(probes())
        .with_state(state)
}

/// Behind the guard and the trace: a probe may ask under any name, and one that is answered 503 again and again is no
/// news.
fn probes() -> Router<State> {
    Router::new().route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(readyz))
}

/// Where there are as many connections as there may be: probes are answered, all others are told so.
fn full(state: State, max_connections: usize) -> Router {
    let refuse = move || async move {
        let why = format!("{max_connections} connections are open, and there may be no more; try again later");
        Problem::later(StatusCode::SERVICE_UNAVAILABLE, why).and_close()
    };
    probes().with_state(state).fallback(refuse)
}

async fn insert_tasks(
    Extract(state): Extract<State>,
    Extension(share): Extension<Share>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    if request::is_ndjson(&headers)? {
        return ndjson::insert(state, share, body).await;
    }
    let expected = "application/json (a task or an array of them) or application/x-ndjson";
    let body = json_body(&state, &headers, body, expected).await?;
    let mut tally = Tally::new(&state.settings, &share, body.len());
    let asked = json::insert::new_tasks(&body, &mut tally)?;
    tally.keep();
    let results = insert(discovery(&state)?, asked.tasks).await?;
    let is_rejected = asked.is_single && results.iter().all(|result| result.status() == pb::InsertStatus::Rejected);
    let answer = list("results", results.iter().map(json::insert::InsertAnswer::from))?;
    Ok(if is_rejected { (StatusCode::UNPROCESSABLE_ENTITY, answer).into_response() } else { answer })
}

async fn get_task(Extract(state): Extract<State>, id: Result<Path<String>, PathRejection>) -> Answer {
    let id = task_id(id)?;
    let task = reading(&state)?.task(id).await?.ok_or_else(|| request::no_such_task(id))?;
    Ok(Json(json::read::Task::from(&task)).into_response())
}

async fn get_results(Extract(state): Extract<State>, id: Result<Path<String>, PathRejection>) -> Answer {
    let id = task_id(id)?;
    let reading = reading(&state)?;
    // Before they are read: they may have 100 MiB.
    let room = state.budget.answer(reading.results_bytes(id).await?).map_err(Excess::from)?;
    let results = reading.results(id).await?.ok_or_else(|| request::no_such_task(id))?;
    let answer = list("results", results.iter().map(json::read::TaskResult::from))?;
    drop((results, room));
    within(&state.budget, answer)
}

async fn get_queues(Extract(state): Extract<State>) -> Answer {
    let queues = reading(&state)?.queues().await?;
    within(&state.budget, list("queues", queues.iter().map(json::read::Queue::from))?)
}

async fn lease_tasks(Extract(state): Extract<State>, headers: HeaderMap, body: Body) -> Answer {
    let request = json::work::get_tasks(&json_body(&state, &headers, body, JSON).await?)?;
    // A stop ends the wait: dropping the call gives back what it got.
    let leased = state.stop.run_until_cancelled(tasks(&state)?.get(request)).await;
    let tasks::Answer { response, deliveries } = leased.unwrap_or_else(|| Ok(tasks::Answer::default()))?;
    // Before they are written as JSON.
    let room = state.budget.answer(response.encoded_len()).map_err(Excess::from)?;
    let answer = list("tasks", response.tasks.iter().map(json::work::LeasedTask::from))?;
    drop((response, room));
    let mut answer = within(&state.budget, answer)?;
    answer.extensions_mut().insert(Deliveries::from(deliveries));
    Ok(answer)
}

async fn complete_tasks(
    Extract(state): Extract<State>,
    Extension(share): Extension<Share>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let body = json_body(&state, &headers, body, JSON).await?;
    let mut tally = Tally::new(&state.settings, &share, body.len());
    let (worker, items) = json::work::complete_tasks(&body, &mut tally)?;
    tally.keep();
    let (completions, known) = split(items);
    let answers = match completions.is_empty() {
        true => Vec::new(),
        false => tasks(&state)?.complete(pb::CompleteTasksRequest { worker, completions }).await?.results,
    };
    item_answers(known, answers)
}

async fn reject_tasks(
    Extract(state): Extract<State>,
    Extension(share): Extension<Share>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let body = json_body(&state, &headers, body, JSON).await?;
    let mut tally = Tally::new(&state.settings, &share, body.len());
    let (worker, items) = json::work::reject_tasks(&body, &mut tally)?;
    tally.keep();
    let (rejections, known) = split(items);
    let answers = match rejections.is_empty() {
        true => Vec::new(),
        false => tasks(&state)?.reject(pb::RejectTasksRequest { worker, rejections }).await?.results,
    };
    item_answers(known, answers)
}

async fn extend_tasks(
    Extract(state): Extract<State>,
    Extension(share): Extension<Share>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let body = json_body(&state, &headers, body, JSON).await?;
    let mut tally = Tally::new(&state.settings, &share, body.len());
    let (worker, items) = json::work::extend_tasks(&body, &mut tally)?;
    tally.keep();
    let (extensions, known) = split(items);
    let answers = match extensions.is_empty() {
        true => Vec::new(),
        false => tasks(&state)?.extend(pb::ExtendTasksRequest { worker, extensions }).await?.results,
    };
    item_answers(known, answers)
}

const JSON: &str = "application/json";

async fn render_metrics(Extract(state): Extract<State>) -> Answer {
    metrics::requests_held(state.budget.held());
    metrics::process();
    let text = state.metrics.render();
    let room = state.budget.small_answer(text.len()).map_err(Excess::from)?;
    let mut answer = ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response();
    answer.extensions_mut().insert(room);
    Ok(answer)
}

#[derive(Serialize)]
struct Readiness {
    status: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stalled: Vec<StalledLoop>,
    /// The reason why inserts are refused, if Redis has little memory left.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<String>,
}

#[derive(Serialize)]
struct StalledLoop {
    name: String,
    age: String,
}

async fn readyz(Extract(state): Extract<State>) -> Response {
    let stalled: Vec<_> = state
        .progress
        .stalled(state.settings.stall_after)
        .into_iter()
        .map(|(name, age)| StalledLoop { name, age: format!("{}s", age.as_secs()) })
        .collect();
    let shortage = state.gates.shortage();
    let is_full = shortage.as_ref().is_some_and(|shortage| shortage.is_full);
    let (code, status) = match (state.stop.is_cancelled(), stalled.is_empty(), is_full) {
        (true, _, _) => (StatusCode::SERVICE_UNAVAILABLE, "stopping"),
        (false, false, _) => (StatusCode::SERVICE_UNAVAILABLE, "stalled"),
        (false, true, true) => (StatusCode::SERVICE_UNAVAILABLE, "out of memory"),
        (false, true, false) => (StatusCode::OK, "ready"),
    };
    let memory = shortage.map(|shortage| shortage.why);
    (code, Json(Readiness { status, stalled, memory })).into_response()
}

async fn no_such_route(method: Method, uri: Uri) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, format!("there is no {method} {}", uri.path()))
}

async fn wrong_method(request: Request) -> Problem {
    let why =
        format!("{} does not take {}; the header Allow says what it takes", request.uri().path(), request.method());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, why)
}

fn discovery(state: &State) -> Result<&discovery::Handle, Problem> {
    state.discovery.as_ref().ok_or_else(|| Problem::not_run_here("discovery"))
}

fn tasks(state: &State) -> Result<&tasks::Handle, Problem> {
    state.tasks.as_ref().ok_or_else(|| Problem::not_run_here("tasks"))
}

fn reading(state: &State) -> Result<&query::Handle, Problem> {
    state.reading.as_ref().ok_or_else(|| Problem::not_run_here("discovery or tasks"))
}
