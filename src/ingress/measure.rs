//! Records the duration of requests, by route and result. Every unknown route counts as `other`.

use std::time::Instant;

use axum::{
    extract::{MatchedPath, Request},
    middleware::Next,
    response::Response,
};
use tonic::Code;

use crate::telemetry::metrics;

/// An unknown route, or a method that is not one of taskd's.
pub(super) const OTHER: &str = "other";

pub(super) async fn http(request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let started = Instant::now();
    let response = next.run(request).await;
    let route = route.as_ref().map_or(OTHER, MatchedPath::as_str);
    metrics::http_request(route, response.status().as_u16(), started.elapsed());
    response
}

/// Records a call. A successful call sends its code only after its answer, so no code counts as OK.
pub(super) fn grpc<B>(method: &'static str, response: &Response<B>, started: Instant) {
    let code = response
        .headers()
        .get("grpc-status")
        .map_or(Code::Ok, |code| Code::from_bytes(code.as_bytes()));
    metrics::grpc_request(method, name(code), started.elapsed());
}

/// The name of a code in the protocol.
fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
