//! The way in while servers are waited for: probes and callers are told what is missing, instead of hanging until it is there.

use axum::{
    Json, Router,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::json;
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{
    super::{
        Budget,
        connection::Answering,
        listener::{self, Door},
    },
    problem::Problem,
    request::pace,
};
use crate::model::Protocol;

/// Until there is more to do than to tell that.
const MAX_CONNECTIONS: usize = 256;
/// Nobody reads the bodies.
const BUDGET: usize = 1 << 20;

/// Answers on the HTTP port until [`Waiting::end`].
pub struct Waiting {
    what: watch::Sender<&'static str>,
    stop: CancellationToken,
    server: JoinHandle<()>,
}

impl Waiting {
    pub fn start(http: TcpListener) -> Self {
        let (what, stop) = (watch::Sender::new("its redis-server"), CancellationToken::new());
        let answering = Answering {
            protocol: Protocol::Http,
            router: router(what.subscribe()),
            budget: Budget::new(BUDGET),
            pace,
            may_stay: |_| false,
            wrap: |cut| Box::new(cut),
            stop: stop.clone(),
        };
        let door = Door { name: "HTTP", answering, max_connections: MAX_CONNECTIONS, without_room: None };
        let server = tokio::spawn(listener::serve(http, door));
        Self { what, stop, server }
    }

    /// Names what callers are told.
    pub fn wait_for(&self, what: &'static str) {
        self.what.send_replace(what);
    }

    /// Ends when those who asked are answered.
    pub async fn end(self) {
        self.stop.cancel();
        if let Err(error) = self.server.await {
            tracing::warn!("the listener of the start ended with {error}");
        }
    }
}

fn router(what: watch::Receiver<&'static str>) -> Router {
    let asked = what.clone();
    let readyz = move || {
        let body = json!({"status": "waiting", "for": *asked.borrow()});
        async move { (StatusCode::SERVICE_UNAVAILABLE, Json(body)) }
    };
    let fallback = move || {
        let why = format!("taskd is not ready: it waits for {}; try again later", *what.borrow());
        async move { refuse(why) }
    };
    Router::new().route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(readyz)).fallback(fallback)
}

fn refuse(why: String) -> Response {
    Problem::later(StatusCode::SERVICE_UNAVAILABLE, why).into_response()
}
