//! What the commands that call a running taskd over gRPC share: connecting, and which errors are
//! transient.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use backon::BackoffBuilder as _;
use taskd_client::Client;
use tonic::{
    Code, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};
use url::Url;

use super::address::Unreachable;
pub(super) use super::address::{Server, WAITS};
use super::{
    http::HttpPort,
    probe::{self, speaks_other},
    trust::{self, Token, Trust},
};
use crate::{config::without_password, ingress::http::Ports};

/// A connection that sends the token with each call.
pub(super) type Taskd = InterceptedService<Channel, Token>;

impl Server {
    pub(super) async fn connect(&self) -> anyhow::Result<Taskd> {
        self.patiently(async || self.connect_to_first(Some(ANSWER_TIMEOUT)).await)
            .await
    }

    /// Connects for calls without a time limit. Pings detect when taskd is gone.
    pub(super) async fn connect_for_long_calls(&self) -> anyhow::Result<Taskd> {
        self.patiently(async || self.connect_to_first(None).await)
            .await
    }

    /// Tries again while taskd cannot be reached, for as long as `--wait-for-server` says.
    async fn patiently<T>(
        &self,
        connect: impl AsyncFn() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let deadline = self.waiting.deadline();
        let mut waits = WAITS.build();
        loop {
            match connect().await {
                Err(error)
                    if error.is::<Unreachable>()
                        && deadline.is_some_and(|end| Instant::now() < end) =>
                {
                    tokio::time::sleep(waits.next().unwrap_or_default()).await;
                }
                answer => return answer,
            }
        }
    }

    /// Connects without retrying if the server cannot be reached.
    pub(super) async fn connect_once(&self) -> anyhow::Result<Taskd> {
        self.connect_to_first(Some(ANSWER_TIMEOUT)).await
    }

    /// Connects to the first of several addresses that answers.
    async fn connect_to_first(&self, within: Option<Duration>) -> anyhow::Result<Taskd> {
        // Check all addresses, because a client made from them may call any of them later.
        self.trust.suits(&self.url)?;
        let addresses = self
            .grpc
            .get_or_try_init(|| grpc_of_all(&self.url, &self.trust))
            .await?;
        let mut first = None;
        for address in addresses {
            match connect_within(address, &self.trust, within).await {
                Ok(taskd) => return Ok(taskd),
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(first.unwrap_or_else(|| anyhow::anyhow!("--server names no address")))
    }

    /// Returns a client for all addresses, after checking that one of them answers.
    pub(super) async fn client(&self) -> anyhow::Result<Client> {
        self.connect().await?;
        self.another_client()
    }

    /// Returns a client with connections of its own. [`Self::connect`] must have succeeded before.
    pub(super) fn another_client(&self) -> anyhow::Result<Client> {
        let addresses = self.grpc.get().context("taskd was not looked for")?;
        Ok(Client::builder(addresses.iter().map(String::as_str))
            .token(self.trust.token())
            .tls(self.trust.over_grpc()?)
            .build()?)
    }
}

/// Returns the gRPC addresses of several servers. For a server that does not answer now, but may do
/// so later, this assumes the same distance between its HTTP and gRPC ports as on another server.
async fn grpc_of_all(urls: &str, trust: &Trust) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    let mut distance = None;
    let mut first = None;
    for url in urls.split(',') {
        match grpc_of(url, trust).await {
            Ok(grpc) => {
                distance = distance.or_else(|| Some(port(&grpc)? - port(url)?));
                found.push(Ok(grpc));
            }
            Err(error) if error.is::<Unreachable>() => {
                first = first.or(Some(error));
                found.push(Err(url));
            }
            Err(error) => return Err(error),
        }
    }
    match (distance, first) {
        (None, Some(error)) => Err(error),
        (distance, _) => Ok(found
            .into_iter()
            .map(|grpc| grpc.unwrap_or_else(|url| beside(url, distance.unwrap_or(1))))
            .collect()),
    }
}

/// Returns the gRPC address of the taskd at `url`: with the port that its HTTP port names, or `url`
/// itself if that does not speak HTTP/1.
pub(super) async fn grpc_of(url: &str, trust: &Trust) -> anyhow::Result<String> {
    let http = HttpPort::new(url, trust.clone())?;
    Ok(match http.ports().await? {
        Some(Ports { http, grpc }) => beside(url, i32::from(grpc) - i32::from(http)),
        None => url.to_owned(),
    })
}

fn port(url: &str) -> Option<i32> {
    Url::parse(url).ok()?.port_or_known_default().map(i32::from)
}

/// Returns the URL with `distance` added to its port. The reported ports cannot be used directly,
/// because they may be published under other numbers; these mostly keep their distance.
fn beside(url: &str, distance: i32) -> String {
    let moved = || {
        let mut moved = Url::parse(url).ok()?;
        let port = i32::from(moved.port_or_known_default()?) + distance;
        moved.set_port(Some(u16::try_from(port).ok()?)).ok()?;
        Some(moved.as_str().trim_end_matches('/').to_owned())
    };
    moved().unwrap_or_else(|| url.to_owned())
}

/// Formats a failed call for the user, with a hint if it lacks a valid token.
pub(super) fn said(status: &Status) -> String {
    trust::with_hint(&why(status), status.code() == Code::Unauthenticated)
}

/// Why a call failed.
pub(super) fn why(status: &Status) -> String {
    match status.message() {
        // tonic has no better message if the server does not speak gRPC. Which of the two it has
        // depends on timing.
        vague @ ("transport error" | "operation was canceled") => {
            format!("{vague}; is that taskd?")
        }
        // For example, a ping was not answered.
        "http2 error" => "the connection broke off, or fell silent".to_owned(),
        why => why.to_owned(),
    }
}

/// Formats an error of the `taskd_client` crate in the same way.
pub(super) fn refused(error: &taskd_client::Error) -> anyhow::Error {
    let is_unauthenticated = matches!(
        error,
        taskd_client::Error::Refused {
            code: Code::Unauthenticated,
            ..
        }
    );
    anyhow::anyhow!(
        "{}",
        trust::with_hint(&error.to_string(), is_unauthenticated)
    )
}

/// How long to wait for an answer before retrying.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How often to ping taskd while a call waits, and how long to wait for the reply before the
/// connection is closed.
const PING_EVERY: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Connects to the gRPC port of taskd.
pub(super) async fn connect(url: &str, trust: &Trust) -> anyhow::Result<Taskd> {
    connect_within(url, trust, Some(ANSWER_TIMEOUT)).await
}

/// Connects. A call may take up to `within`, or any time if that is `None`.
async fn connect_within(
    url: &str,
    trust: &Trust,
    within: Option<Duration>,
) -> anyhow::Result<Taskd> {
    trust.suits(url)?;
    let shown = without_password(url);
    let mut endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(|_| anyhow::anyhow!("--server {shown:?} is not a URL; write http://host:7600"))?
        .connect_timeout(Duration::from_secs(5))
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT)
        .tcp_nodelay(true);
    if let Some(within) = within {
        endpoint = endpoint.timeout(within);
    }
    if url.starts_with("https://") {
        endpoint = endpoint
            .tls_config(trust.over_grpc()?)
            .context("cannot use these certificates")?;
    }
    let channel = endpoint.connect().await.map_err(|error| {
        if let Some(why) = trust.failure(&shown, &error) {
            return anyhow::anyhow!(why);
        }
        let cause = anyhow::Error::from(error).root_cause().to_string();
        anyhow::Error::new(Unreachable::at(&shown, cause))
    })?;
    match speaks_other(endpoint.uri()).await {
        None => {}
        Some(probe::Other::Http1) => {
            anyhow::bail!(
                "{shown} answers HTTP/1, so it is not taskd's gRPC port (7601); --server (TASKD_URL) names taskd"
            )
        }
        Some(probe::Other::Tls) => {
            anyhow::bail!(
                "{shown} wants TLS; write https://{}",
                shown.trim_start_matches("http://")
            )
        }
    }
    Ok(InterceptedService::new(channel, trust.token()))
}

/// Returns true if a later call may succeed because the server is only busy or away. All codes that
/// are not listed count as transient, because a broken connection can show as one of several.
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
