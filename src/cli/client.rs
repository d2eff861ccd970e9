//! The common part of the commands that call a running taskd: its address, a connection, and which errors pass.

use std::{convert::Infallible, time::Duration};

use anyhow::Context as _;
use backon::ExponentialBuilder;
use clap::Args;
use tonic::{
    Code, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

use super::trust::{self, Token, Trust};

/// The address of taskd's gRPC port, and the way to call it.
#[derive(Args)]
pub(super) struct Server {
    /// gRPC address of taskd; host:port is enough
    #[arg(
        long,
        env = "TASKD_GRPC_URL",
        hide_env = true,
        value_name = "URL",
        value_parser = with_scheme,
        default_value = "http://127.0.0.1:7601"
    )]
    pub(super) grpc: String,

    #[command(flatten)]
    trust: Trust,
}

/// A connection that sends the token with each call.
pub(super) type Taskd = InterceptedService<Channel, Token>;

impl Server {
    pub(super) async fn connect(&self) -> anyhow::Result<Taskd> {
        connect(&self.grpc, &self.trust).await
    }
}

/// The words of a refusal.
pub(super) fn said(status: &Status) -> String {
    trust::with_hint(status.message(), status.code() == Code::Unauthenticated)
}

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
pub(super) async fn connect(url: &str, trust: &Trust) -> anyhow::Result<Taskd> {
    let mut endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(|_| anyhow::anyhow!("--grpc {url:?} is not a URL; write http://host:7601"))?
        .connect_timeout(Duration::from_secs(5))
        .timeout(ANSWER_TIMEOUT)
        .tcp_nodelay(true);
    if url.starts_with("https://") {
        endpoint = endpoint.tls_config(trust.over_grpc()?).context("cannot use these certificates")?;
    }
    let channel = endpoint.connect().await.map_err(|error| {
        let cause = anyhow::Error::from(error).root_cause().to_string();
        anyhow::anyhow!("cannot reach taskd at {url}: {cause}; is it running there? --grpc names another place")
    })?;
    Ok(InterceptedService::new(channel, trust.token()))
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
