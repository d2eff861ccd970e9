//! What both ports answer while taskd waits for servers: probes and callers are told what is
//! missing instead of being left hanging.

use std::sync::Arc;

use axum::{
    Json, Router,
    http::{StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::json;
use tokio::{net::TcpListener, sync::watch};

use super::{
    super::{
        Budget, Tls, grpc,
        net::connection::{Answering, Stay},
        net::listener::{self, Door},
    },
    ports::Ports,
    problem::Problem,
    request::pace,
};
use crate::{model::Protocol, runtime::Supervisor};

/// The most connections of each port during this time.
const MAX_CONNECTIONS: usize = 256;
/// A small budget is enough: no handler reads a body.
const BUDGET: usize = 1 << 20;

/// Answers on both ports until [`Waiting::end`].
pub struct Waiting {
    what: watch::Sender<&'static str>,
    server: Supervisor,
}

impl Waiting {
    pub fn start(http: TcpListener, grpc: TcpListener, tls: Option<Tls>) -> Self {
        let (what, server) = (watch::Sender::new("its redis-server"), Supervisor::new());
        let port = |listener: &TcpListener| listener.local_addr().map_or(0, |at| at.port());
        let ports = Ports {
            http: port(&http),
            grpc: port(&grpc),
        };
        let (router, budget) = (router(what.subscribe(), ports), Budget::new(BUDGET));
        let answering = Answering {
            protocol: Protocol::Http,
            tls: tls.clone(),
            handlers: router.clone(),
            budget: budget.clone(),
            pace,
            stay: |_| Stay::No,
            max_message: None,
            wrap: |cut| Box::new(cut),
            stop: server.stop_token(),
        };
        let door = Door {
            name: "HTTP",
            answering,
            max_connections: MAX_CONNECTIONS,
            strangers_stay: None,
            is_valid: Arc::new(|_| true),
            without_room: Some(router),
        };
        server.spawn_once(listener::serve(http, door));
        let asked = what.subscribe();
        let why = move || why(*asked.borrow());
        server.spawn_once(grpc::refuse(
            grpc,
            tls,
            budget,
            MAX_CONNECTIONS,
            why,
            server.stop_token(),
        ));
        Self { what, server }
    }

    /// Sets which server callers are told that taskd waits for.
    pub fn wait_for(&self, what: &'static str) {
        self.what.send_replace(what);
    }

    /// Stops, and returns when all callers have been answered.
    pub async fn end(self) {
        self.server.stop();
        self.server.wait().await;
    }
}

fn router(what: watch::Receiver<&'static str>, ports: Ports) -> Router {
    let asked = what.clone();
    let readyz = move || {
        let body = json!({"status": "waiting", "for": *asked.borrow()});
        async move { (StatusCode::SERVICE_UNAVAILABLE, Json(body)) }
    };
    let fallback = move |uri: Uri| {
        let what = *what.borrow();
        async move {
            let is_page = uri.path().starts_with("/ui/");
            let answer = if is_page {
                page(what)
            } else {
                refuse(why(what))
            };
            (ports.header(), answer)
        }
    };
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .fallback(fallback)
}

fn why(what: &str) -> String {
    format!("taskd is not ready: it waits for {what}; try again later")
}

/// For the dashboard: says what taskd waits for, and loads itself again.
fn page(what: &str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'"),
        (header::REFRESH, "2"),
        (header::RETRY_AFTER, "1"),
    ];
    let text = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>taskd starts</title>\
         <p>taskd starts, and waits for {what}. This page loads itself again."
    );
    (StatusCode::SERVICE_UNAVAILABLE, headers, text).into_response()
}

fn refuse(why: String) -> Response {
    Problem::later(StatusCode::SERVICE_UNAVAILABLE, why).into_response()
}
