//! The duration of requests, by route and result. Every unknown route counts as `other`.

use std::time::Instant;

use axum::{
    extract::{MatchedPath, Request},
    middleware::Next,
    response::Response,
};
use tonic::Code;

use crate::telemetry::metrics;

const OTHER: &str = "other";

pub(super) async fn http(request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let started = Instant::now();
    let response = next.run(request).await;
    let route = route.as_ref().map_or(OTHER, MatchedPath::as_str);
    metrics::http_request(route, response.status().as_u16(), started.elapsed());
    response
}

/// Records a call of a known method. A successful call sends its code only behind its answer.
pub(super) fn grpc(method: &'static str, response: &Response, started: Instant) {
    let code = response.headers().get("grpc-status").map_or(Code::Ok, |code| Code::from_bytes(code.as_bytes()));
    metrics::grpc_request(method, name(code), started.elapsed());
}

/// The name of a known method, or `other`.
pub(super) fn grpc_method(path: &str) -> &'static str {
    const METHODS: [&str; 10] = [
        "taskd.v1.Discovery/InsertTasks",
        "taskd.v1.Discovery/GetTask",
        "taskd.v1.Tasks/GetTasks",
        "taskd.v1.Tasks/CompleteTasks",
        "taskd.v1.Tasks/RejectTasks",
        "taskd.v1.Tasks/ExtendTasks",
        "taskd.v1.Operator/ListDeadLetters",
        "taskd.v1.Operator/GetDeadLetter",
        "taskd.v1.Operator/RetryDeadLetters",
        "taskd.v1.Operator/PurgeDeadLetters",
    ];
    let path = path.strip_prefix('/').unwrap_or(path);
    METHODS.into_iter().find(|method| *method == path).unwrap_or(OTHER)
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
