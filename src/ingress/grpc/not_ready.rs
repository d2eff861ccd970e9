//! gRPC while taskd waits for servers: each call is refused with a message that says what is
//! missing, and no service is healthy.

use std::sync::Arc;

use hyper::{Request, Response};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body, service::Routes};
use tonic_health::ServingStatus;

use super::{
    DISCOVERY, MAX_BYTES_WITHOUT_TOKEN, OPERATOR, PACE, TASKS, TOPICS, TOPOLOGIES, TREES, WHOLE,
    may_stay_at, others::Others, set_health,
};
use crate::{
    ingress::{
        Budget, Tls,
        net::body::Counted,
        net::connection::{Answering, Handlers, Stay},
        net::listener::{self, Door},
    },
    model::Protocol,
};

/// The path of health calls, without the method.
const HEALTH: &str = "/grpc.health.v1.Health/";

/// Answers health calls, and refuses all others.
#[derive(Clone)]
struct Refusing<F> {
    others: Arc<Others>,
    why: F,
}

impl<F: Fn() -> String + Clone + Send + Sync + 'static> Handlers for Refusing<F> {
    type Body = Body;

    async fn answer(self, request: Request<Counted>) -> Response<Body> {
        match request.uri().path().starts_with(HEALTH) {
            true => self.others.answer(request).await,
            false => Status::unavailable((self.why)()).into_http(),
        }
    }
}

/// Refuses calls until the stop. `why` is what callers are told.
pub(in crate::ingress) async fn refuse(
    listener: TcpListener,
    tls: Option<Tls>,
    budget: Budget,
    max_connections: usize,
    why: impl Fn() -> String + Clone + Send + Sync + 'static,
    stop: CancellationToken,
) {
    let (reporter, health) = tonic_health::server::health_reporter();
    set_health(
        &reporter,
        &[DISCOVERY, TASKS, TOPICS, TOPOLOGIES, TREES, OPERATOR, WHOLE],
        ServingStatus::NotServing,
    )
    .await;
    let others = Others::new(Routes::new(
        health.max_decoding_message_size(MAX_BYTES_WITHOUT_TOKEN),
    ));
    let answering = Answering {
        protocol: Protocol::Grpc,
        tls,
        handlers: Refusing {
            others: Arc::new(others),
            why,
        },
        budget,
        pace: |_| Some(PACE),
        stay: |head| {
            if may_stay_at(head.uri.path()) {
                Stay::Small
            } else {
                Stay::No
            }
        },
        max_message: None,
        wrap: |cut| Box::new(Status::from(cut)),
        stop,
    };
    let door = Door {
        name: "gRPC",
        answering,
        max_connections,
        strangers_stay: None,
        is_valid: Arc::new(|_| true),
        without_room: None,
    };
    listener::serve(listener, door).await;
}
