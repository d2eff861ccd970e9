//! Named tasks: a token stops them, a policy says what follows an error, and the supervisor awaits each.

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use backon::{BackoffBuilder as _, ExponentialBuilder};
use tokio::sync::SetOnce;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// How long the log leaves out a task that fails again for the same reason. A server that is away for an hour fills no
/// disk.
const SAY_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// Starts tasks and waits for their end. Clones are the same supervisor.
#[derive(Clone)]
pub struct Supervisor {
    stop: CancellationToken,
    tasks: TaskTracker,
    progress: Progress,
    is_hopeless: fn(&anyhow::Error) -> bool,
    hopeless: Arc<SetOnce<anyhow::Error>>,
}

impl Default for Supervisor {
    fn default() -> Self {
        Self::new()
    }
}

impl Supervisor {
    pub fn new() -> Self {
        Self::giving_up_at(|_| false)
    }

    /// A task whose error is hopeless is not run again.
    pub fn giving_up_at(is_hopeless: fn(&anyhow::Error) -> bool) -> Self {
        Self {
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            progress: Progress::default(),
            is_hopeless,
            hopeless: Arc::default(),
        }
    }

    /// Waits for the first hopeless error. The other tasks go on until they are stopped.
    pub async fn given_up(&self) -> &anyhow::Error {
        self.hopeless.wait().await
    }

    /// Is cancelled when it is time to stop: take no new work, finish what is in hand, return.
    pub fn stop_token(&self) -> CancellationToken {
        self.stop.clone()
    }

    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Runs a named loop until it returns `Ok` or the stop comes. `run` gets a new [`Loop`] for each run, and must return
    /// soon after the stop.
    pub fn spawn_loop<F, Fut, E>(&self, name: &str, policy: Policy, mut run: F)
    where
        F: FnMut(Loop) -> Fut + Send + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<anyhow::Error>,
    {
        let cx = Loop { beat: Arc::new(self.progress.register(name)), stop: self.stop.clone() };
        let ends_round = match policy {
            Policy::Restart => self.is_hopeless,
            Policy::EndRound => |_: &anyhow::Error| true,
        };
        self.supervise(name.to_owned(), ends_round, move || {
            let run = run(cx.clone());
            async move { run.await.map_err(Into::into) }
        });
    }

    /// Runs `make()` until it returns `Ok` or the stop comes; after an error (but a hopeless one) again, with a wait that doubles from 100 ms to 5 s.
    /// `make` must return by itself soon after the stop token is cancelled.
    pub fn spawn<F, Fut>(&self, name: impl Into<String>, make: F)
    where
        F: FnMut() -> Fut + Send + 'static,
        Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        self.supervise(name.into(), self.is_hopeless, make);
    }

    fn supervise<F, Fut>(&self, name: String, is_hopeless: fn(&anyhow::Error) -> bool, mut make: F)
    where
        F: FnMut() -> Fut + Send + 'static,
        Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let (stop, hopeless) = (self.stop.clone(), Arc::clone(&self.hopeless));
        self.tasks.spawn(async move {
            let mut waits = pauses();
            let mut said: Option<(String, Instant)> = None;
            loop {
                let started = Instant::now();
                // In a task of its own, so that a panic ends this run and not the supervision.
                let error = match tokio::spawn(make()).await {
                    Ok(Ok(())) => break,
                    Ok(Err(error)) => error,
                    Err(join) => anyhow::anyhow!("panicked: {join}"),
                };
                if stop.is_cancelled() {
                    tracing::debug!(task = %name, "ended at the stop with {error:#}");
                    break;
                }
                if is_hopeless(&error) {
                    tracing::debug!(task = %name, "{name} gave up: {error:#}");
                    // Several may find out; who was first is told.
                    drop(hopeless.set(error));
                    break;
                }
                if started.elapsed() > Duration::from_secs(30) {
                    waits = pauses();
                }
                let wait = waits.next().unwrap_or(LONGEST_PAUSE);
                let reason = in_short(&error);
                if said.as_ref().is_some_and(|(said, at)| *said == reason && at.elapsed() < SAY_AGAIN_AFTER) {
                    tracing::debug!(task = %name, "{name} failed again, starts again in {wait:?}: {reason}");
                } else {
                    tracing::warn!(task = %name, "{name} failed, starts again in {wait:?}: {reason}");
                    said = Some((reason, Instant::now()));
                }
                tokio::select! {
                    () = tokio::time::sleep(wait) => {}
                    () = stop.cancelled() => break,
                }
            }
            tracing::debug!(task = %name, "{name} ended");
        });
    }

    /// Runs a future that ends by itself (an answer being written, a batch in flight): the stop waits for it.
    pub fn spawn_once(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(future);
    }

    /// Cancels the token.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Waits until every task has ended.
    pub async fn wait(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// What follows an error or a panic of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The loop runs again after a pause with jitter, doubling from 100 ms to 5 s. A hopeless error ends the round.
    Restart,
    /// The round ends.
    EndRound,
}

const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The pauses of a loop that fails again and again. The jitter, up to the same again, parts processes that lost one server.
pub fn pauses() -> impl Iterator<Item = Duration> + Send {
    let pauses = ExponentialBuilder::new().with_min_delay(Duration::from_millis(100)).with_max_delay(LONGEST_PAUSE / 2);
    pauses.with_jitter().without_max_times().build()
}

/// What a loop needs to run under supervision.
#[derive(Clone)]
pub struct Loop {
    pub beat: Arc<Beat>,
    pub stop: CancellationToken,
}

impl Loop {
    /// Shows that the loop is alive.
    pub fn beat(&self) {
        self.beat.beat();
    }

    /// Waits for `future` and beats meanwhile: for waits that may be long because there is nothing to do.
    pub async fn idle<T>(&self, future: impl Future<Output = T>) -> T {
        self.beat.idle(future).await
    }

    /// Waits for `duration`; false at the stop.
    pub async fn pause(&self, duration: Duration) -> bool {
        self.stop.run_until_cancelled(tokio::time::sleep(duration)).await.is_some()
    }
}

/// When each loop was last seen alive. A loop beats each time it comes round, whether there was work or not.
#[derive(Clone, Default)]
pub struct Progress(Arc<Mutex<BTreeMap<String, Instant>>>);

impl Progress {
    /// A loop under this name; forgotten when the beat is dropped.
    pub fn register(&self, name: impl Into<String>) -> Beat {
        let beat = Beat { name: name.into(), progress: self.clone() };
        beat.beat();
        beat
    }

    /// The loops that have not come round for `limit`, with how long.
    pub fn stalled(&self, limit: Duration) -> Vec<(String, Duration)> {
        let beats = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let stalled = beats.iter().map(|(name, at)| (name.clone(), at.elapsed()));
        stalled.filter(|(_, age)| *age > limit).collect()
    }
}

/// A loop's sign of life.
pub struct Beat {
    name: String,
    progress: Progress,
}

impl Beat {
    pub fn beat(&self) {
        let mut beats = self.progress.0.lock().unwrap_or_else(PoisonError::into_inner);
        match beats.get_mut(&self.name) {
            Some(at) => *at = Instant::now(),
            None => drop(beats.insert(self.name.clone(), Instant::now())),
        }
    }

    /// Waits for `future` and beats meanwhile: for waits that may be long because there is nothing to do.
    pub async fn idle<T>(&self, future: impl Future<Output = T>) -> T {
        tokio::pin!(future);
        loop {
            tokio::select! {
                done = &mut future => { self.beat(); return done; }
                () = tokio::time::sleep(Duration::from_secs(1)) => self.beat(),
            }
        }
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        let mut beats = self.progress.0.lock().unwrap_or_else(PoisonError::into_inner);
        beats.remove(&self.name);
    }
}

/// An error with its causes, without those that only repeat what has been said.
pub fn in_short(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_that_repeat_are_said_once() {
        let error = anyhow::anyhow!("refused").context("connecting: refused").context("cannot open mysql");
        assert_eq!(in_short(&error), "cannot open mysql: connecting: refused");
    }
}
