//! The HTTP API. Each handler reads as one line of the table in [`router`].

use std::time::Duration;

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Request, State as Extract},
    http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use serde::Serialize;
use tokio::{net::TcpListener, time::timeout};
use tower_http::trace::TraceLayer;

use super::{
    State, check_insert_size,
    json::{self, Malformed},
    listener, ndjson,
    problem::Problem,
};
use crate::{
    discovery,
    model::TaskId,
    pb, reading, tasks,
    telemetry::metrics::{self, Dropped, Source},
};

/// A body that is not NDJSON must be here after so long.
const BODY_TIMEOUT: Duration = Duration::from_secs(120);
/// … and no part of it may let us wait so long.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(30);

type Answer = Result<Response, Problem>;

/// Serves until `state.stop`, then until the requests in hand are answered.
pub async fn serve(listener: TcpListener, state: State) {
    let stop = state.stop.clone();
    listener::serve(listener, router(state), stop).await;
}

pub fn router(state: State) -> Router {
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
        // What failed on our side is logged where it failed.
        .layer(TraceLayer::new_for_http().on_failure(()))
        // Behind the trace: a probe that is answered 503 again and again is no news.
        .route("/metrics", get(render_metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .with_state(state)
}

async fn insert_tasks(Extract(state): Extract<State>, headers: HeaderMap, body: Body) -> Answer {
    match content_type(&headers)? {
        "application/json" => {}
        "application/x-ndjson" | "application/ndjson" | "application/jsonl" | "application/x-jsonl" => {
            return ndjson::insert(state, body).await;
        }
        other => {
            return Err(not_understood(other, "application/json (a task or an array of them) or application/x-ndjson"));
        }
    }
    let body = whole(&headers, body, state.settings.limits.max_request_bytes).await?;
    let items = json::new_tasks(&body)?;
    check_insert_size(items.len(), &state.settings).map_err(|why| Problem::new(StatusCode::PAYLOAD_TOO_LARGE, why))?;
    let results = insert(discovery(&state)?, items).await?;
    list("results", results.iter().map(json::InsertAnswer::from))
}

async fn get_task(Extract(state): Extract<State>, Path(id): Path<String>) -> Answer {
    let id = task_id(&id)?;
    let task = reading(&state)?.task(id).await?.ok_or_else(|| no_such_task(id))?;
    Ok(Json(json::Task::from(&task)).into_response())
}

async fn get_results(Extract(state): Extract<State>, Path(id): Path<String>) -> Answer {
    let id = task_id(&id)?;
    let results = reading(&state)?.results(id).await?.ok_or_else(|| no_such_task(id))?;
    list("results", results.iter().map(json::TaskResult::from))
}

async fn get_queues(Extract(state): Extract<State>) -> Answer {
    let queues = reading(&state)?.queues().await?;
    list("queues", queues.iter().map(json::Queue::from))
}

async fn lease_tasks(Extract(state): Extract<State>, headers: HeaderMap, body: Body) -> Answer {
    let request = json::get_tasks(&json_body(&state, &headers, body).await?)?;
    // A stop ends the wait: dropping the call gives back what it got.
    let leased = state.stop.run_until_cancelled(tasks(&state)?.get(request)).await;
    let response = leased.unwrap_or_else(|| Ok(tasks::Answer::default()))?.deliver();
    list("tasks", response.tasks.iter().map(json::LeasedTask::from))
}

async fn complete_tasks(Extract(state): Extract<State>, headers: HeaderMap, body: Body) -> Answer {
    let (worker, items) = json::complete_tasks(&json_body(&state, &headers, body).await?)?;
    let (completions, known) = split(items);
    let answers = match completions.is_empty() {
        true => Vec::new(),
        false => tasks(&state)?.complete(pb::CompleteTasksRequest { worker, completions }).await?.results,
    };
    item_answers(known, answers)
}

async fn reject_tasks(Extract(state): Extract<State>, headers: HeaderMap, body: Body) -> Answer {
    let (worker, items) = json::reject_tasks(&json_body(&state, &headers, body).await?)?;
    let (rejections, known) = split(items);
    let answers = match rejections.is_empty() {
        true => Vec::new(),
        false => tasks(&state)?.reject(pb::RejectTasksRequest { worker, rejections }).await?.results,
    };
    item_answers(known, answers)
}

async fn extend_tasks(Extract(state): Extract<State>, headers: HeaderMap, body: Body) -> Answer {
    let (worker, items) = json::extend_tasks(&json_body(&state, &headers, body).await?)?;
    let (extensions, known) = split(items);
    let answers = match extensions.is_empty() {
        true => Vec::new(),
        false => tasks(&state)?.extend(pb::ExtendTasksRequest { worker, extensions }).await?.results,
    };
    item_answers(known, answers)
}

async fn render_metrics(Extract(state): Extract<State>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], state.metrics.render()).into_response()
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

/// Inserts what could be read; the others are answered as rejected.
pub(super) async fn insert(
    discovery: &discovery::Handle,
    items: Vec<Result<pb::NewTask, String>>,
) -> Result<Vec<pb::InsertResult>, discovery::Error> {
    let (tasks, known) = split(items.into_iter().map(|item| item.map_err(json::rejected)).collect());
    let unreadable = known.len() - tasks.len();
    let answers = if tasks.is_empty() { Vec::new() } else { discovery.insert(tasks).await? };
    metrics::discovery_dropped(Source::Api, Dropped::Rejected, unreadable);
    Ok(merge(known, answers))
}

/// Parts what can be passed on from what is answered already. [`merge`] puts the answers together in the order of the items.
fn split<T, A>(items: Vec<Result<T, A>>) -> (Vec<T>, Vec<Option<A>>) {
    let mut passed = Vec::with_capacity(items.len());
    let mut note = |item| match item {
        Ok(item) => {
            passed.push(item);
            None
        }
        Err(answer) => Some(answer),
    };
    let known = items.into_iter().map(&mut note).collect();
    (passed, known)
}

fn merge<A>(known: Vec<Option<A>>, answers: Vec<A>) -> Vec<A> {
    let mut answers = answers.into_iter();
    known.into_iter().filter_map(|known| known.or_else(|| answers.next())).collect()
}

fn item_answers(known: Vec<Option<pb::ItemResult>>, answers: Vec<pb::ItemResult>) -> Answer {
    list("results", merge(known, answers).iter().map(json::ItemAnswer::from))
}

fn list<T: Serialize>(name: &'static str, entries: impl IntoIterator<Item = T>) -> Answer {
    let text = json::list(name, entries).map_err(|error| {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot write the answer: {error}"))
    })?;
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}

pub(super) fn discovery(state: &State) -> Result<&discovery::Handle, Problem> {
    state.discovery.as_ref().ok_or_else(|| Problem::not_run_here("discovery"))
}

fn tasks(state: &State) -> Result<&tasks::Handle, Problem> {
    state.tasks.as_ref().ok_or_else(|| Problem::not_run_here("tasks"))
}

fn reading(state: &State) -> Result<&reading::Handle, Problem> {
    state.reading.as_ref().ok_or_else(|| Problem::not_run_here("discovery or tasks"))
}

fn task_id(text: &str) -> Result<TaskId, Problem> {
    text.parse().map_err(|_| {
        Problem::bad_request(format!("{text:?} is not a task id; ids are UUIDs, as an insert answers them"))
    })
}

fn no_such_task(id: TaskId) -> Problem {
    Problem::new(
        StatusCode::NOT_FOUND,
        format!("there is no task {id}, or it finished so long ago that it was removed"),
    )
}

async fn json_body(state: &State, headers: &HeaderMap, body: Body) -> Result<Bytes, Problem> {
    match content_type(headers)? {
        "application/json" => whole(headers, body, state.settings.limits.max_request_bytes).await,
        other => Err(not_understood(other, "application/json")),
    }
}

/// Refuses a body that is compressed.
fn content_type(headers: &HeaderMap) -> Result<&str, Problem> {
    let value = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok()).unwrap_or_default();
    let encoding = value(header::CONTENT_ENCODING);
    if !matches!(encoding, "" | "identity") {
        let why = format!("content encoding {encoding:?} is not understood; send the body as it is");
        return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
    }
    Ok(value(header::CONTENT_TYPE).split(';').next().unwrap_or_default().trim())
}

/// Strict, because browsers send the other types to any address without asking: a web page must not insert tasks here.
fn not_understood(content_type: &str, expected: &str) -> Problem {
    let given =
        if content_type.is_empty() { "no content type".into() } else { format!("content type {content_type:?}") };
    Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, format!("{given} is not understood; send {expected}"))
}

/// The body, of at most `limit` bytes.
async fn whole(headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, Problem> {
    let too_large = || {
        let why = format!("the body has more than {limit} bytes (max_request_bytes); send less at once, or NDJSON");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, why)
    };
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let late = |limit| {
        Problem::new(StatusCode::REQUEST_TIMEOUT, format!("the body, or more of it, was not here after {limit:?}"))
    };
    let reading = async {
        let mut chunks = body.into_data_stream();
        let mut text = BytesMut::with_capacity(announced.unwrap_or_default());
        while let Some(chunk) = timeout(CHUNK_TIMEOUT, chunks.next()).await.map_err(|_| late(CHUNK_TIMEOUT))? {
            let chunk = chunk.map_err(|error| Problem::bad_request(format!("the body broke off: {error}")))?;
            if text.len() + chunk.len() > limit {
                return Err(too_large());
            }
            text.extend_from_slice(&chunk);
        }
        Ok(text.freeze())
    };
    timeout(BODY_TIMEOUT, reading).await.map_err(|_| late(BODY_TIMEOUT))?
}

impl From<Malformed> for Problem {
    fn from(malformed: Malformed) -> Self {
        Self::bad_request(malformed.detail).at(malformed.line, malformed.column)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_in_the_order_of_the_items() {
        let (passed, known) = split(vec![Ok("a"), Err(2), Ok("c"), Err(4)]);
        assert_eq!(passed, ["a", "c"]);
        assert_eq!(merge(known, vec![1, 3]), [1, 2, 3, 4]);
    }
}
