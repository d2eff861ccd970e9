//! The address flags of a running taskd, shared by all commands over HTTP and gRPC.

use std::time::{Duration, Instant};

use backon::ExponentialBuilder;
use clap::Args;
use tokio::sync::OnceCell;

use super::trust::Trust;
use crate::config::{Time, without_password};

/// The address of taskd, and the way to call it. `http` and `client` connect to it.
#[derive(Args, Default)]
pub(super) struct Server {
    /// Address of taskd, the one of its HTTP port, which names the gRPC port; host:port is enough;
    /// of several with commas between them, work and load use all, and others the first
    #[arg(
        long = "server",
        env = "TASKD_URL",
        hide_env_values = true,
        value_name = "URL",
        value_parser = with_scheme,
        default_value = "http://127.0.0.1:7600"
    )]
    pub(super) url: String,

    #[command(flatten)]
    pub(super) trust: Trust,

    #[command(flatten)]
    pub(super) waiting: Waiting,

    /// The gRPC ports, once they are found.
    #[arg(skip)]
    pub(super) grpc: OnceCell<Vec<String>>,
}

impl Server {
    /// The address for messages.
    pub(super) fn shown(&self) -> String {
        without_password(&self.url)
    }
}

/// How long a command waits for a taskd that is not there yet.
#[derive(Args, Clone, Copy, Default)]
pub(super) struct Waiting {
    /// Wait this long for taskd if it cannot be reached at the start [default: do not wait]
    #[arg(long, value_name = "TIME")]
    wait_for_server: Option<Time>,
}

impl Waiting {
    /// Returns when to stop waiting, or `None` if the command does not wait.
    pub(super) fn deadline(self) -> Option<Instant> {
        let time = self.wait_for_server?;
        Instant::now().checked_add(time.0)
    }
}

/// taskd cannot be reached now. A later attempt may succeed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Unreachable(pub(super) String);

impl Unreachable {
    pub(super) fn at(shown: &str, cause: impl std::fmt::Display) -> Self {
        Self(format!(
            "cannot reach taskd at {shown}: {cause}; is it running there? --server (TASKD_URL) names another place"
        ))
    }
}

/// The backoff between retries.
pub(super) const WAITS: ExponentialBuilder = ExponentialBuilder::new()
    .with_jitter()
    .with_min_delay(Duration::from_millis(50))
    .with_max_delay(Duration::from_secs(2))
    .without_max_times();

/// Parses one or more addresses, separated by commas. Those without a scheme get `http://`.
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
