//! Supervises redis-server: starts it again whenever it dies.

use std::{
    os::unix::process::ExitStatusExt,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{process::Child, sync::Mutex, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    DataDir, Error,
    launch::{Launch, check_version},
};
use crate::runtime::{Supervisor, pauses};

/// How often the first start is tried if the server is killed.
const STARTS: usize = 5;
/// A server that ran for this long was healthy. When it dies, the next one starts at once.
const HEALTHY: Duration = Duration::from_secs(30);

/// A running redis-server. Dropping it kills the server, which loses nothing that was acknowledged.
#[derive(Debug)]
pub struct RedisServer {
    /// `None` between the death of a server and the next start.
    child: Mutex<Option<Child>>,
    launch: Launch,
}

impl RedisServer {
    /// Starts redis-server in the data folder and waits until it has loaded its data.
    pub async fn start(data: &DataDir) -> Result<Self, Error> {
        Self::start_binary(data, "redis-server").await
    }

    /// Starts it with `max_memory` bytes as its `maxmemory`; 0 means half of the machine's memory.
    pub async fn start_with(data: &DataDir, max_memory: u64) -> Result<Self, Error> {
        Self::start_program(data, "redis-server", max_memory).await
    }

    /// Starts it with another name or path of the program.
    pub async fn start_binary(data: &DataDir, binary: &str) -> Result<Self, Error> {
        Self::start_program(data, binary, 0).await
    }

    async fn start_program(data: &DataDir, binary: &str, max_memory: u64) -> Result<Self, Error> {
        check_version(binary).await?;
        let launch = Launch::new(data, binary, max_memory)?;
        launch.end_orphan().await?;
        let mut restarts = Restarts::default();
        for _ in 1..STARTS {
            match launch.start().await {
                Ok(child) => {
                    return Ok(Self {
                        child: Mutex::new(Some(child)),
                        launch,
                    });
                }
                // Something killed it, the user or the kernel. A server that refuses its data exits
                // by itself and says why.
                Err(error @ Error::Ended { status, .. }) if status.signal().is_some() => {
                    tracing::warn!("starting redis-server again: {error}");
                    sleep(restarts.after(Duration::ZERO)).await;
                }
                Err(error) => return Err(error),
            }
        }
        let child = launch.start().await?;
        Ok(Self {
            child: Mutex::new(Some(child)),
            launch,
        })
    }

    /// The URL of the server, which stays the same when it is restarted.
    pub fn url(&self) -> &str {
        &self.launch.url
    }

    /// Sends SIGTERM, which makes the server exit, and does not wait.
    pub fn terminate(&self) {
        let pid = self.launch.pid.load(Ordering::Relaxed);
        if pid != 0
            && let Err(error) = kill(Pid::from_raw(pid), Signal::SIGTERM)
        {
            tracing::debug!("redis-server (pid {pid}) does not get its signal: {error}");
        }
    }

    /// Supervises the server until the supervisor stops, which must come after all users of Redis.
    pub fn keep_running(self: &Arc<Self>, supervisor: &Supervisor) {
        let server = Arc::clone(self);
        supervisor.spawn_loop("redis-server", server, |server, cx| async move {
            server.supervise(cx.stop).await
        });
    }

    /// Starts the server again whenever it dies. Ends it at the stop.
    pub async fn supervise(&self, stop: CancellationToken) {
        let mut child = self.child.lock().await;
        let mut restarts = Restarts::default();
        loop {
            let began = Instant::now();
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                error = self.run(&mut child) => tracing::error!("redis-server is down: {error}"),
            }
            let pause = restarts.after(began.elapsed());
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = sleep(pause) => tracing::info!("starting redis-server again"),
            }
        }
        if let Some(child) = child.take() {
            self.launch.stop(child).await;
        }
    }

    /// Starts the server if none runs, waits until it ends, and returns why it did.
    async fn run(&self, slot: &mut Option<Child>) -> Error {
        let child = match slot {
            Some(child) => child,
            None => match self.launch.start().await {
                Ok(child) => slot.insert(child),
                Err(error) => return error,
            },
        };
        let end = child.wait().await;
        self.launch.pid.store(0, Ordering::Relaxed);
        *slot = None;
        match end {
            Ok(status) => self.launch.ended(status),
            Err(cause) => self.launch.cannot_run(cause),
        }
    }
}

/// The pauses before the next start: none after the first death, then longer and longer.
struct Restarts(Box<dyn Iterator<Item = Duration> + Send>);

impl Default for Restarts {
    fn default() -> Self {
        Self(Box::new(std::iter::once(Duration::ZERO).chain(pauses())))
    }
}

impl Restarts {
    fn after(&mut self, lived: Duration) -> Duration {
        if lived > HEALTHY {
            *self = Self::default();
        }
        self.0.next().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_restart_is_at_once_and_a_dying_server_is_given_time() {
        let mut restarts = Restarts::default();
        let quick = Duration::from_secs(1);
        assert_eq!(restarts.after(quick), Duration::ZERO);
        // The jitter adds up to the same again.
        for least in [100, 200, 400, 800, 1600, 2500, 2500] {
            let pause = restarts.after(quick).as_millis();
            assert!(
                (least..=2 * least).contains(&pause),
                "{pause} after {least}"
            );
        }
        assert_eq!(restarts.after(HEALTHY * 2), Duration::ZERO);
    }
}
