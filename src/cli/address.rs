//! The address of a running taskd: one for all commands, over HTTP and gRPC.

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

impl Unreachable {
    pub(super) fn at(shown: &str, cause: impl std::fmt::Display) -> Self {
        Self(format!(
            "cannot reach taskd at {shown}: {cause}; is it running there? --server (TASKD_URL) names another place"
        ))
    }
}

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
