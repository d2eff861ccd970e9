//! Stops a worker.

use tokio::sync::watch;

/// A handle that stops the worker it comes from. Clones stop the same worker.
#[derive(Clone, Debug)]
pub struct Stop(watch::Sender<Level>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    #[default]
    Run,
    /// Takes no new tasks, and finishes what runs.
    Drain,
    /// Also aborts what runs.
    Now,
}

impl Default for Stop {
    fn default() -> Self {
        Self(watch::Sender::new(Level::Run))
    }
}

impl Stop {
    /// Drains the worker: it takes no more tasks, gives back those that it has not started,
    /// finishes those that run, and reports them.
    pub fn drain(&self) {
        self.raise(Level::Drain);
    }

    /// Stops the worker now: it also drops the running handlers and rejects their tasks, so that
    /// other workers get them at once.
    pub fn now(&self) {
        self.raise(Level::Now);
    }

    /// Drains with the first call and stops now with the next, for signal handlers.
    pub fn next(&self) {
        let now = *self.0.borrow() >= Level::Drain;
        self.raise(if now { Level::Now } else { Level::Drain });
    }

    fn raise(&self, level: Level) {
        self.0.send_if_modified(|now| {
            let higher = level > *now;
            *now = level.max(*now);
            higher
        });
    }

    pub(crate) fn watch(&self) -> watch::Receiver<Level> {
        self.0.subscribe()
    }
}

/// The first SIGINT or SIGTERM drains, the second one stops now.
#[cfg(unix)]
pub(crate) async fn stop_on_signals(stop: Stop) -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    );
    loop {
        tokio::select! {
            _ = interrupt.recv() => stop.next(),
            _ = terminate.recv() => stop.next(),
        }
    }
}

/// The first Ctrl-C drains, the second one stops now.
#[cfg(not(unix))]
pub(crate) async fn stop_on_signals(stop: Stop) -> std::io::Result<()> {
    loop {
        tokio::signal::ctrl_c().await?;
        stop.next();
    }
}
