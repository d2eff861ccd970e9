//! SIGTERM and Ctrl-C.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::{embedded::RedisServer, runtime::Supervisor};

/// Cancels `stop` at the first signal, and ends the process at the second.
pub(super) fn watch(
    stop: CancellationToken,
    grace: Duration,
    own_redis: Arc<OnceLock<Arc<RedisServer>>>,
    supervisor: &Supervisor,
) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for Ctrl-C")?;
    let watching = async move {
        let mut next = async || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        next().await;
        let grace = humantime::format_duration(grace);
        tracing::info!("draining, at most {grace}; a second signal ends at once");
        stop.cancel();
        next().await;
        tracing::warn!("ended by a second signal");
        if let Some(server) = own_redis.get() {
            server.terminate();
        }
        std::process::exit(130);
    };
    let end = supervisor.stop_token();
    supervisor.spawn_once(async move {
        end.run_until_cancelled(watching).await;
    });
    Ok(())
}
