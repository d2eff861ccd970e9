//! The process and its protocols.

use std::time::Duration;

use ::metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use crate::model::Protocol;

pub const HTTP_DURATION: &str = "taskd_http_request_duration_seconds";
pub const GRPC_DURATION: &str = "taskd_grpc_call_duration_seconds";
pub const GRPC_OVERSIZED: &str = "taskd_grpc_oversized_answers_total";
pub const CERTIFICATE_EXPIRES: &str = "taskd_tls_certificate_expires_timestamp_seconds";
pub const DENIED_CALLS: &str = "taskd_denied_calls_total";
pub const REQUESTS_HELD: &str = "taskd_requests_held_bytes";
pub const WAITING_CALLS: &str = "taskd_waiting_calls";
pub const REFUSED_CONNECTIONS: &str = "taskd_refused_connections_total";
pub const LOG_LINES_DROPPED: &str = "taskd_log_lines_dropped_total";
pub const BUILD_INFO: &str = "taskd_build_info";

pub(super) fn describe() {
    describe_histogram!(
        HTTP_DURATION,
        Unit::Seconds,
        "HTTP requests, by route and class of status, until the answer begins; a get includes its wait"
    );
    describe_histogram!(
        GRPC_DURATION,
        Unit::Seconds,
        "gRPC calls, by method and code, until the answer begins; a get includes its wait"
    );
    describe_counter!(
        GRPC_OVERSIZED,
        Unit::Count,
        "Answers with a single task above the 4 MiB that gRPC clients take by default: see max_decoding_message_size"
    );
    describe_counter!(
        LOG_LINES_DROPPED,
        Unit::Count,
        "Log lines that were dropped because stderr took no more"
    );
    describe_gauge!(
        CERTIFICATE_EXPIRES,
        Unit::Seconds,
        "When the certificate of the ports expires, in Unix time"
    );
    describe_counter!(
        DENIED_CALLS,
        Unit::Count,
        "Calls that were refused for their token, by reason"
    );
    describe_gauge!(
        REQUESTS_HELD,
        Unit::Bytes,
        "Bytes of the request_budget that requests in hand and answers on their way take"
    );
    describe_gauge!(
        WAITING_CALLS,
        Unit::Count,
        "Calls that wait for tasks, ends, events or lines"
    );
    describe_counter!(
        REFUSED_CONNECTIONS,
        Unit::Count,
        "Connections beyond max_connections, by protocol"
    );
    describe_gauge!(BUILD_INFO, Unit::Count, "1, with the version of this taskd");
}

/// An HTTP request was answered. `route` is one of the router's.
pub fn http_request(route: &str, status: u16, elapsed: Duration) {
    let class = match status / 100 {
        1 => "1xx",
        2 => "2xx",
        3 => "3xx",
        4 => "4xx",
        _ => "5xx",
    };
    histogram!(HTTP_DURATION, "route" => route.to_owned(), "status" => class).record(elapsed);
}

/// A gRPC call was answered.
pub fn grpc_request(method: &'static str, code: &'static str, elapsed: Duration) {
    histogram!(GRPC_DURATION, "method" => method, "code" => code).record(elapsed);
}

/// A worker that set no `max_bytes` was sent more than clients accept by default.
pub fn grpc_oversized_answer() {
    counter!(GRPC_OVERSIZED).increment(1);
}

/// A certificate was read that expires at this time.
pub fn certificate_expires(unix_seconds: i64) {
    gauge!(CERTIFICATE_EXPIRES).set(unix_seconds as f64);
}

/// A call was refused for its token.
pub fn denied_call(reason: &'static str) {
    counter!(DENIED_CALLS, "reason" => reason).increment(1);
}

/// A connection was refused, since `max_connections` are open.
pub fn refused_connection(protocol: Protocol) {
    let protocol = match protocol {
        Protocol::Http => "http",
        Protocol::Grpc => "grpc",
    };
    counter!(REFUSED_CONNECTIONS, "protocol" => protocol).increment(1);
}

/// How many bytes of the request budget are taken.
pub fn requests_held(bytes: usize) {
    gauge!(REQUESTS_HELD).set(bytes as f64);
}

/// The number of calls that wait right now.
pub fn waiting_calls(count: usize) {
    gauge!(WAITING_CALLS).set(count as f64);
}

/// Updates what the system knows of this process: memory, CPU, file descriptors.
pub fn process() {
    metrics_process::Collector::default().collect();
}

/// As many log lines were dropped since the start.
pub(super) fn dropped_log_lines(count: u64) {
    counter!(LOG_LINES_DROPPED).absolute(count);
}
