//! The common part of the commands that call a running taskd: its address, a connection, and which
//! errors pass.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use backon::{BackoffBuilder as _, ExponentialBuilder};
use clap::Args;
use taskd_client::Client;
use tonic::{
    Code, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

use super::{
    probe::{self, speaks_other},
    trust::{self, Token, Trust},
};
use crate::config::{Time, without_password};

/// The address of taskd's gRPC port, and the way to call it.
#[derive(Args)]
pub(super) struct Server {
    /// gRPC address of taskd; host:port is enough; work and load take several, with commas between
    /// them
    #[arg(
        long,
        env = "TASKD_GRPC_URL",
        hide_env_values = true,
        value_name = "URL",
        value_parser = with_scheme,
        default_value = "http://127.0.0.1:7601"
    )]
    grpc: String,

    #[command(flatten)]
    trust: Trust,

    #[command(flatten)]
    waiting: Waiting,
}

/// How long a command waits for a taskd that is not there yet.
#[derive(Args, Clone, Copy, Default)]
pub(super) struct Waiting {
    /// Wait this long for taskd if it cannot be reached at the start [default: do not wait]
    #[arg(long, value_name = "TIME")]
    wait_for_server: Option<Time>,
}

impl Waiting {
    /// When to wait no longer.
    pub(super) fn deadline(self) -> Option<Instant> {
        let time = self.wait_for_server?;
        Instant::now().checked_add(time.0)
    }
}

/// taskd cannot be reached. Later it may be.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Unreachable(pub(super) String);

/// A connection that sends the token with each call.
pub(super) type Taskd = InterceptedService<Channel, Token>;

impl Server {
    /// The address for messages.
    pub(super) fn shown(&self) -> String {
        without_password(&self.grpc)
    }

    pub(super) async fn connect(&self) -> anyhow::Result<Taskd> {
        self.patiently(async || connect(&self.grpc, &self.trust).await)
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

    /// Connects for calls that may take any time. Pings find out whether taskd is still there.
    pub(super) async fn connect_for_long_calls(&self) -> anyhow::Result<Taskd> {
        self.patiently(async || connect_within(&self.grpc, &self.trust, None).await)
            .await
    }

    /// Connects to the first of several addresses that answers.
    pub(super) async fn connect_to_any(&self) -> anyhow::Result<Taskd> {
        // A client of all addresses calls any of them later.
        self.trust.suits(&self.grpc)?;
        self.patiently(async || self.connect_to_first().await).await
    }

    pub(super) async fn connect_to_first(&self) -> anyhow::Result<Taskd> {
        let mut first = None;
        for address in self.grpc.split(',') {
            match connect(address, &self.trust).await {
                Ok(taskd) => return Ok(taskd),
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(first.unwrap_or_else(|| anyhow::anyhow!("--grpc names no address")))
    }

    /// A client of all addresses, after a look whether any of them answers.
    pub(super) async fn client(&self) -> anyhow::Result<Client> {
        self.connect_to_any().await?;
        self.another_client()
    }

    /// A client with connections of its own.
    pub(super) fn another_client(&self) -> anyhow::Result<Client> {
        let addresses = self.grpc.split(',');
        Ok(Client::builder(addresses)
            .token(self.trust.token())
            .tls(self.trust.over_grpc()?)
            .build()?)
    }
}

/// The words of a refusal.
pub(super) fn said(status: &Status) -> String {
    trust::with_hint(&why(status), status.code() == Code::Unauthenticated)
}

/// Why a call failed.
pub(super) fn why(status: &Status) -> String {
    match status.message() {
        // A server that does not speak gRPC has no better message. Which one depends on who is
        // faster.
        vague @ ("transport error" | "operation was canceled") => {
            format!("{vague}; is that taskd's gRPC port?")
        }
        // A ping had no answer, for example.
        "http2 error" => "the connection broke off, or fell silent".to_owned(),
        why => why.to_owned(),
    }
}

/// The words of a refusal, from the crate.
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

/// How long to wait for an answer before the next try.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// A connection on which a call waits is asked so often whether taskd is still there, and ends
/// without an answer.
const PING_EVERY: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// The waits between two tries.
pub(super) const WAITS: ExponentialBuilder = ExponentialBuilder::new()
    .with_jitter()
    .with_min_delay(Duration::from_millis(50))
    .with_max_delay(Duration::from_secs(2))
    .without_max_times();

/// A URL of taskd, or several with commas between them; host:port is enough.
pub(super) fn with_scheme(text: &str) -> Result<String, String> {
    let url = |text: &str| match text.split_once("://") {
        None => Ok(format!("http://{text}")),
        Some(("http" | "https", _)) => Ok(text.to_owned()),
        Some(_) => Err(format!(
            "{text:?} is not an address; write host:port, http:// or https://"
        )),
    };
    Ok(text
        .split(',')
        .map(|text| url(text.trim()))
        .collect::<Result<Vec<_>, _>>()?
        .join(","))
}

/// Connects to the gRPC port of taskd.
pub(super) async fn connect(url: &str, trust: &Trust) -> anyhow::Result<Taskd> {
    connect_within(url, trust, Some(ANSWER_TIMEOUT)).await
}

/// An answer may take `within`; `None`: any time.
async fn connect_within(
    url: &str,
    trust: &Trust,
    within: Option<Duration>,
) -> anyhow::Result<Taskd> {
    trust.suits(url)?;
    let shown = without_password(url);
    let mut endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(|_| anyhow::anyhow!("--grpc {shown:?} is not a URL; write http://host:7601"))?
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
        anyhow::Error::new(Unreachable(format!(
            "cannot reach taskd at {shown}: {cause}; is it running there? --grpc (TASKD_GRPC_URL) names another place"
        )))
    })?;
    match speaks_other(endpoint.uri()).await {
        None => {}
        Some(probe::Other::Http1) => {
            anyhow::bail!(
                "{shown} answers HTTP/1, so it is not taskd's gRPC port; --grpc names that one (7601)"
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

/// True if the call may succeed later: the server is busy or away. A broken connection shows as one
/// of several codes.
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
