//! The common part of the commands that call a running taskd: its address, a connection, and which errors pass.

use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use anyhow::Context as _;
use backon::ExponentialBuilder;
use clap::Args;
use tonic::{
    Code, Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
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
    #[arg(long, env = "TASKD_TOKEN", hide_env = true, value_name = "TOKEN")]
    token: Option<Token>,

    /// Authority of the certificate of an https:// address [default: the authorities of the system]
    #[arg(long, env = "TASKD_TLS_CA", hide_env = true, value_name = "PEM")]
    tls_ca: Option<PathBuf>,

    /// Certificate of this client, if taskd asks for one
    #[arg(long, value_name = "PEM", requires = "client_key")]
    client_cert: Option<PathBuf>,

    /// The key of that certificate
    #[arg(long, value_name = "PEM", requires = "client_cert")]
    client_key: Option<PathBuf>,
}

/// A connection that sends the token with each call.
pub(super) type Taskd = InterceptedService<Channel, Token>;

/// Adds the token, if there is one.
#[derive(Clone, Default)]
pub(super) struct Token(Option<Bearer>);

type Bearer = MetadataValue<Ascii>;

impl FromStr for Token {
    type Err = String;

    fn from_str(token: &str) -> Result<Self, String> {
        let mut bearer: Bearer = format!("Bearer {}", token.trim())
            .parse()
            .map_err(|_| "it is no token: it has odd characters".to_owned())?;
        bearer.set_sensitive(true);
        Ok(Self(Some(bearer)))
    }
}

impl Token {
    /// The header `Authorization` of HTTP.
    pub(super) fn header(&self) -> Option<&[u8]> {
        self.0.as_ref().map(Bearer::as_encoded_bytes)
    }
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
        connect_with(&self.grpc, self.tls()?, self.token.clone().unwrap_or_default()).await
    }

    fn tls(&self) -> anyhow::Result<ClientTlsConfig> {
        let read = |file: &Path| std::fs::read(file).with_context(|| format!("cannot read {}", file.display()));
        let mut tls = ClientTlsConfig::new();
        tls = match &self.tls_ca {
            Some(file) => tls.ca_certificate(Certificate::from_pem(read(file)?)),
            None => tls.with_native_roots(),
        };
        if let (Some(cert), Some(key)) = (&self.client_cert, &self.client_key) {
            tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
        }
        Ok(tls)
    }
}

/// The words of taskd, and the way to give a command a token.
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
pub(super) async fn connect(url: &str, token: Token) -> anyhow::Result<Taskd> {
    connect_with(url, ClientTlsConfig::new().with_native_roots(), token).await
}

async fn connect_with(url: &str, tls: ClientTlsConfig, token: Token) -> anyhow::Result<Taskd> {
    let mut endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(|_| anyhow::anyhow!("--grpc {url:?} is not a URL; write http://host:7601"))?
        .connect_timeout(Duration::from_secs(5))
        .timeout(ANSWER_TIMEOUT)
        .tcp_nodelay(true);
    if url.starts_with("https://") {
        endpoint = endpoint.tls_config(tls).context("cannot use these certificates")?;
    }
    let channel = endpoint.connect().await.map_err(|error| {
        let cause = anyhow::Error::from(error).root_cause().to_string();
        anyhow::anyhow!("cannot reach taskd at {url}: {cause}; is it running there? --grpc names another place")
    })?;
    Ok(InterceptedService::new(channel, token))
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
