//! SIGINT and SIGTERM during `taskd insert`: the first signal stops the reading, another one ends
//! the process.

use std::{
    future::Future,
    io,
    process::exit,
    time::{Duration, Instant},
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::timeout,
};

/// How long to wait after a signal for the answers to requests in flight.
const LAST_ANSWERS: Duration = Duration::from_secs(10);
/// Further signals within this time after the first are ignored: `timeout` signals its child and
/// then its group.
const SAME: Duration = Duration::from_millis(500);

/// A signal ended the insert.
#[derive(Debug, thiserror::Error)]
#[error("stopped by {}, and read no further; inserting the same file again makes no task twice", self.name())]
pub struct Stopped(SignalKind);

impl Stopped {
    /// Returns the exit code that shells use for the signal.
    pub fn exit_code(&self) -> u8 {
        u8::try_from(128 + self.0.as_raw_value()).unwrap_or(u8::MAX)
    }

    fn name(&self) -> &'static str {
        if self.0 == SignalKind::interrupt() {
            "SIGINT"
        } else {
            "SIGTERM"
        }
    }
}

pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub(super) fn listen() -> io::Result<Self> {
        let [interrupt, terminate] = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
        Ok(Self {
            interrupt: interrupt?,
            terminate: terminate?,
        })
    }

    /// Waits for a signal.
    pub(super) async fn next(&mut self) -> Stopped {
        tokio::select! {
            _ = self.interrupt.recv() => Stopped(SignalKind::interrupt()),
            _ = self.terminate.recv() => Stopped(SignalKind::terminate()),
        }
    }

    /// Waits a while for the answers to requests in flight. Another signal ends the process.
    pub(super) async fn last(
        &mut self,
        answers: impl Future<Output = anyhow::Result<()>>,
    ) -> anyhow::Result<()> {
        let first = Instant::now();
        let again = async {
            loop {
                let stopped = self.next().await;
                if first.elapsed() >= SAME {
                    return stopped;
                }
            }
        };
        tokio::select! {
            answered = timeout(LAST_ANSWERS, answers) => answered.unwrap_or(Ok(())),
            stopped = again => exit(stopped.exit_code().into()),
        }
    }
}
