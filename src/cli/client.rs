//! The common part of the commands that call a running taskd: its address, a connection, and which errors pass.

use std::{convert::Infallible, time::Duration};

use backon::ExponentialBuilder;
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};

/// How long to wait for an answer before the next try.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// The waits between two tries.
pub(super) const WAITS: ExponentialBuilder = ExponentialBuilder::new()
    .with_jitter()
    .with_min_delay(Duration::from_millis(50))
    .with_max_delay(Duration::from_secs(2))
    .without_max_times();

/// A URL of taskd; host:port is enough.
pub(super) fn with_scheme(text: &str) -> Result<String, Infallible> {
    Ok(if text.contains("://") { text.to_owned() } else { format!("http://{text}") })
}

/// Connects to the gRPC port of taskd.
pub(super) async fn connect(url: &str) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(|_| anyhow::anyhow!("--grpc {url:?} is not a URL; write http://host:7601"))?
        .connect_timeout(Duration::from_secs(5))
        .timeout(ANSWER_TIMEOUT)
        .tcp_nodelay(true);
    endpoint.connect().await.map_err(|error| {
        let cause = anyhow::Error::from(error).root_cause().to_string();
        anyhow::anyhow!("cannot reach taskd at {url}: {cause}; is it running there? --grpc names another place")
    })
}

/// True if the call may succeed later: the server is busy or away. A broken connection shows as one of several codes.
pub(super) fn is_transient(status: &Status) -> bool {
    !matches!(
        status.code(),
        Code::InvalidArgument
            | Code::Unimplemented
            | Code::OutOfRange
            | Code::NotFound
            | Code::PermissionDenied
            | Code::Unauthenticated
    )
}
