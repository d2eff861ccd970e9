//! SIGTERM, Ctrl-C, and SIGHUP of a terminal that closes.

use std::{
    io,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::{embedded::RedisServer, runtime::Supervisor, telemetry::logging};

/// Signals this soon after the first belong to the same stop: `timeout` signals its child and then
/// the child's process group.
const SAME: Duration = Duration::from_millis(500);

/// Cancels `stop` at the first signal, and ends the process at the second. A SIGHUP does not count
/// as the second: a shell sends one when its terminal closes, and then the kernel sends another.
pub(super) fn watch(
    stop: CancellationToken,
    grace: Duration,
    own_redis: Arc<OnceLock<Arc<RedisServer>>>,
    supervisor: &Supervisor,
) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for Ctrl-C")?;
    let mut hangup = hangups().context("cannot listen for SIGHUP")?;
    let watching = async move {
        let mut next = async || {
            tokio::select! {
                _ = terminate.recv() => SignalKind::terminate(),
                _ = interrupt.recv() => SignalKind::interrupt(),
                Some(_) = async { hangup.as_mut()?.recv().await } => SignalKind::hangup(),
            }
        };
        next().await;
        let first = Instant::now();
        stop.cancel();
        let grace = humantime::format_duration(grace);
        tracing::info!("draining, at most {grace}; a second signal ends at once");
        while next().await == SignalKind::hangup() || first.elapsed() < SAME {}
        tracing::warn!("ended by a second signal");
        if let Some(server) = own_redis.get() {
            server.terminate();
        }
        logging::finish();
        std::process::exit(130);
    };
    let end = supervisor.stop_token();
    supervisor.spawn_once(async move {
        end.run_until_cancelled(watching).await;
    });
    Ok(())
}

/// Returns the SIGHUPs that come when the terminal closes; `None` under nohup, where the process
/// outlives its terminal.
pub fn hangups() -> io::Result<Option<Signal>> {
    (!ignores_hangup())
        .then(|| signal(SignalKind::hangup()))
        .transpose()
}

/// True if this process was started with SIGHUP ignored, as nohup does. Linux shows it as the first
/// bit of a mask.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & 1 == 1)
}
