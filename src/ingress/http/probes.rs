//! The probes: whether the process is alive, and whether it does its work.

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
use crate::runtime::{self, Servers};

/// The routes of probes. They are outside the guard and the trace: a probe may use any name, and
/// repeated 503s would only fill the log. Only callers that the guard admits get the details of
/// `/readyz`.
pub(super) fn routes(guard: Guard) -> Router<State> {
    let readyz = move |state: Extract<State>, request: Request| {
        let (head, _) = request.into_parts();
        let shows_details = guard.check(&head).is_ok();
        async move { readyz(&state, shows_details) }
    };
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
}

/// The state of the process.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct Readiness {
    /// `ready`, `degraded` (with 200: a server is away, or has settings that break promises; calls
    /// that do not need it go on), or why the process is not ready.
    status: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stalled: Vec<StalledLoop>,
    /// The reason why inserts are refused, if Redis has little memory left.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<String>,
    /// What the database says, if it has no space for new tasks.
    #[serde(skip_serializing_if = "Option::is_none")]
    database: Option<String>,
    /// The servers that do not answer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    away: Vec<AwayServer>,
    /// The settings of servers with which taskd's promises do not hold.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unsafe_settings: Vec<UnsafeSetting>,
}

/// A server that does not answer.
#[derive(JsonSchema, Serialize)]
struct AwayServer {
    /// `database`, `redis`, or `bus` (Kafka).
    server: &'static str,
    /// For how long.
    age: String,
    why: String,
}

/// A setting that breaks a promise.
#[derive(JsonSchema, Serialize)]
struct UnsafeSetting {
    server: String,
    setting: &'static str,
    /// What it means, and what to do.
    why: String,
}

/// A loop that makes no progress.
#[derive(JsonSchema, Serialize)]
struct StalledLoop {
    name: String,
    /// The time since its last progress.
    age: String,
}

fn readyz(state: &State, shows_details: bool) -> Response {
    let stalled: Vec<_> = state
        .progress
        .stalled(state.settings.stall_after)
        .into_iter()
        .map(|(name, age)| StalledLoop {
            name,
            age: format!("{}s", age.as_secs()),
        })
        .collect();
    let shortage = state.gates.shortage();
    let is_full = shortage.as_ref().is_some_and(|shortage| shortage.is_full);
    let away = away(&state.servers);
    let unsafe_settings = unsafe_settings(&state.servers);
    let is_degraded = !away.is_empty() || !unsafe_settings.is_empty();
    let (code, status) = match (state.stop.is_cancelled(), stalled.is_empty(), is_full) {
        (true, _, _) => (StatusCode::SERVICE_UNAVAILABLE, "stopping"),
        (false, false, _) => (StatusCode::SERVICE_UNAVAILABLE, "stalled"),
        (false, true, true) => (StatusCode::SERVICE_UNAVAILABLE, "out of memory"),
        // Still 200: calls that need only the other servers go on, and another process would not
        // have the server that is away, either.
        (false, true, false) if is_degraded => (StatusCode::OK, "degraded"),
        (false, true, false) => (StatusCode::OK, "ready"),
    };
    if !shows_details {
        let status_only = Readiness {
            status,
            stalled: Vec::new(),
            memory: None,
            database: None,
            away: Vec::new(),
            unsafe_settings: Vec::new(),
        };
        return (code, Json(status_only)).into_response();
    }
    // A full database leaves the process ready: workers go on, and an insert may find space.
    let database = state.gates.full_database(Instant::now());
    let memory = shortage.map(|shortage| shortage.why);
    (
        code,
        Json(Readiness {
            status,
            stalled,
            memory,
            database,
            away,
            unsafe_settings,
        }),
    )
        .into_response()
}

fn away(servers: &Servers) -> Vec<AwayServer> {
    let mut shown = Vec::new();
    for away in servers.away() {
        let age = format!("{}s", away.since.elapsed().as_secs());
        shown.push(AwayServer {
            server: away.server.as_str(),
            age,
            why: away.why,
        });
    }
    shown
}

fn unsafe_settings(servers: &Servers) -> Vec<UnsafeSetting> {
    let mut shown = Vec::new();
    for runtime::UnsafeSetting {
        server,
        setting,
        why,
    } in servers.unsafe_settings()
    {
        shown.push(UnsafeSetting {
            server,
            setting,
            why,
        });
    }
    shown
}
