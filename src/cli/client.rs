//! The common part of the commands that call a running taskd: its address, a connection, and which errors pass.

use std::{convert::Infallible, time::Duration};

use backon::ExponentialBuilder;
use clap::Args;
use tonic::{
    Code, Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, Endpoint},
};

/// Where taskd is, and what it is told about the caller.
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

    /// Access token, if taskd asks for one; better in the variable TASKD_TOKEN, which other users do not see
    #[arg(long, env = "TASKD_TOKEN", hide_env = true, value_name = "TOKEN", value_parser = bearer)]
    token: Option<Bearer>,
}

/// A connection that sends the token with each call.
pub(super) type Taskd = InterceptedService<Channel, Token>;

/// Adds the token, if there is one.
#[derive(Clone)]
pub(super) struct Token(Option<Bearer>);

type Bearer = MetadataValue<Ascii>;

fn bearer(token: &str) -> Result<Bearer, String> {
    let mut bearer: Bearer =
        format!("Bearer {}", token.trim()).parse().map_err(|_| "it is no token: it has odd characters".to_owned())?;
    bearer.set_sensitive(true);
    Ok(bearer)
}

impl Interceptor for Token {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(bearer) = &self.0 {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        Ok(request)
    }
}

impl Server {
    pub(super) async fn connect(&self) -> anyhow::Result<Taskd> {
        Ok(InterceptedService::new(connect(&self.grpc).await?, Token(self.token.clone())))
    }
}

/// What taskd said, and how a command is given a token.
pub(super) fn said(status: &Status) -> String {
    match status.code() {
        Code::Unauthenticated => format!("{}; give the command one with --token or TASKD_TOKEN", status.message()),
        _ => status.message().to_owned(),
    }
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
