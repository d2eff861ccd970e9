//! The probes: whether the process lives, and whether it does its work.

use std::time::Instant;

use axum::{
    Json, Router,
    extract::{Request, State as Extract},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use schemars::JsonSchema;
use serde::Serialize;

use super::{super::State, guard::Guard};

/// The routes of probes. They are outside the guard and the trace: a probe may use any name, and repeated 503s are no
/// news. Only callers that the guard lets in get the details of `/readyz`.
pub(super) fn routes(guard: Guard) -> Router<State> {
    let readyz = move |state: Extract<State>, request: Request| {
        let (head, _) = request.into_parts();
        let shows_details = guard.check(&head).is_ok();
        async move { readyz(&state, shows_details) }
    };
    Router::new().route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(readyz))
}

/// How the process does.
#[derive(JsonSchema, Serialize)]
pub(super) struct Readiness {
    /// `ready`, or the reason why it is not.
    status: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stalled: Vec<StalledLoop>,
    /// The reason why inserts are refused, if Redis has little memory left.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<String>,
    /// The words of the database, if it has no room for new tasks.
    #[serde(skip_serializing_if = "Option::is_none")]
    database: Option<String>,
}

/// A loop that makes no progress.
#[derive(JsonSchema, Serialize)]
struct StalledLoop {
    name: String,
    /// How long ago it did.
    age: String,
}

fn readyz(state: &State, shows_details: bool) -> Response {
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
    if !shows_details {
        let status_only = Readiness { status, stalled: Vec::new(), memory: None, database: None };
        return (code, Json(status_only)).into_response();
    }
    // Workers go on, and an insert may find room: the process is ready all the same.
    let database = state.gates.full_database(Instant::now());
    let memory = shortage.map(|shortage| shortage.why);
    (code, Json(Readiness { status, stalled, memory, database })).into_response()
}
