//! gRPC while taskd waits for servers: each call is refused with what is missing, and no service is healthy.

use axum::Router;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body, service::Routes};
use tonic_health::ServingStatus;

use super::{DISCOVERY, MAX_BYTES_WITHOUT_TOKEN, OPERATOR, PACE, TASKS, WHOLE, may_stay_at, set_health};
use crate::{
    ingress::{
        Budget, Tls,
        connection::{Answering, Stay},
        listener::{self, Door},
    },
    model::Protocol,
};

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
    set_health(&reporter, &[DISCOVERY, TASKS, OPERATOR, WHOLE], ServingStatus::NotServing).await;
    let health = Routes::new(health.max_decoding_message_size(MAX_BYTES_WITHOUT_TOKEN));
    let refuse = move || std::future::ready(Status::unavailable(why()).into_http::<Body>());
    let answering = Answering {
        protocol: Protocol::Grpc,
        tls,
        handlers: health.into_axum_router().fallback(refuse),
        budget,
        pace: |_| Some(PACE),
        stay: |head| if may_stay_at(head.uri.path()) { Stay::Small } else { Stay::No },
        wrap: |cut| Box::new(Status::from(cut)),
        stop,
    };
    listener::serve(listener, Door { name: "gRPC", answering, max_connections, without_room: None::<Router> }).await;
}
