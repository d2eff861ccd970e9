//! Named tasks under supervision: a token stops them, a failed loop runs again after a pause, and
//! the supervisor awaits every task.

use std::{
    error::Error,
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use backon::{BackoffBuilder as _, ExponentialBuilder};
use tokio::{
    sync::SetOnce,
    task::{JoinError, JoinHandle},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{Beat, Clock, Progress};
use crate::model::in_short;

/// How long a repeated failure with the same reason stays out of the log, so that an outage of an
/// hour does not fill the disk.
const SAY_AGAIN_AFTER: Duration = Duration::from_secs(60);
/// After a run of this length, the next failure counts as the first.
const HEALTHY: Duration = Duration::from_secs(30);

/// The error of a supervised loop.
pub trait LoopError: Error + Send + Sync + 'static {
    /// True if running the loop again cannot help, and the process must begin a new round. The
    /// supervisor then does not restart the loop.
    fn ends_round(&self) -> bool {
        false
    }
}

/// What a run of a loop returns: `()` if the loop cannot fail, otherwise a result.
pub trait LoopEnd {
    fn into_result(self) -> Result<(), Box<dyn LoopError>>;
}

impl LoopEnd for () {
    fn into_result(self) -> Result<(), Box<dyn LoopError>> {
        Ok(())
    }
}

impl<E: LoopError> LoopEnd for Result<(), E> {
    fn into_result(self) -> Result<(), Box<dyn LoopError>> {
        self.map_err(|error| Box::new(error) as Box<dyn LoopError>)
    }
}

/// One run of a loop.
type Run = Pin<Box<dyn Future<Output = Result<(), Box<dyn LoopError>>> + Send>>;

/// A panic of a loop.
#[derive(Debug, thiserror::Error)]
#[error("panicked: {0}")]
struct Panicked(JoinError);

impl LoopError for Panicked {}

/// Starts tasks and waits for their end. Clones are the same supervisor.
#[derive(Clone)]
pub struct Supervisor {
    stop: CancellationToken,
    tasks: TaskTracker,
    progress: Progress,
    round_end: Arc<SetOnce<Box<dyn LoopError>>>,
}

impl Default for Supervisor {
    fn default() -> Self {
        Self::new()
    }
}

impl Supervisor {
    pub fn new() -> Self {
        Self::with_clock(Clock::of_this_machine())
    }

    /// A supervisor whose pauses and signs of life follow `clock`.
    pub fn with_clock(clock: Clock) -> Self {
        Self {
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            progress: Progress::new(clock),
            round_end: Arc::default(),
        }
    }

    /// Waits for the first error that ends the round. The other tasks keep running until they are
    /// stopped.
    pub async fn given_up(&self) -> &dyn LoopError {
        &**self.round_end.wait().await
    }

    /// The token that is cancelled at shutdown. A loop then takes no new work, finishes what it has
    /// begun, and returns.
    pub fn stop_token(&self) -> CancellationToken {
        self.stop.clone()
    }

    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Runs a named loop until it ends without an error or the supervisor is stopped. Each run gets
    /// a clone of `of`, and must return soon after the stop.
    ///
    /// After an error or a panic the loop runs again after a pause, unless the error [ends the
    /// round](LoopError::ends_round).
    pub fn spawn_loop<T, Fut>(
        &self,
        name: &str,
        of: T,
        run: impl Fn(T, Loop) -> Fut + Send + 'static,
    ) where
        T: Clone + Send + 'static,
        Fut: Future<Output: LoopEnd> + Send + 'static,
    {
        let cx = Loop {
            beat: Arc::new(self.progress.register(name)),
            stop: self.stop.clone(),
        };
        let beat = Arc::clone(&cx.beat);
        let make = move || -> Run {
            let run = run(of.clone(), cx.clone());
            Box::pin(async move { run.await.into_result() })
        };
        self.supervise(name.to_owned(), beat, Box::new(make));
    }

    /// Not generic over the loop: tokio compiles its code for each type of future that is spawned,
    /// twice, and 45 loops would add two megabytes to the binary.
    #[allow(
        clippy::disallowed_methods,
        reason = "every other task is spawned through this supervisor"
    )]
    fn supervise(&self, name: String, beat: Arc<Beat>, mut make: Box<dyn FnMut() -> Run + Send>) {
        let stop = self.stop.clone();
        let clock = self.progress.clock().clone();
        let round_end = Arc::clone(&self.round_end);
        self.tasks.spawn(async move {
            let mut failures = Failures::new(name.clone());
            loop {
                let started = Instant::now();
                // The run has a task of its own, so a panic ends the run and not its supervision.
                #[allow(clippy::disallowed_methods)] // this loop awaits it
                let error = match tokio::spawn(make()).await {
                    Ok(Ok(())) => break,
                    Ok(Err(error)) => error,
                    Err(error) => Box::new(Panicked(error)) as Box<dyn LoopError>,
                };
                if stop.is_cancelled() {
                    tracing::debug!(task = %name, "ended at the stop with {}", in_short(&*error));
                    break;
                }
                if error.ends_round() {
                    tracing::debug!(task = %name, "{name} gave up: {}", in_short(&*error));
                    // Several loops may fail like this; the first error is kept.
                    drop(round_end.set(error));
                    break;
                }
                beat.failed();
                let wait = failures.note(&*error, started.elapsed());
                if stop.run_until_cancelled(clock.sleep(wait)).await.is_none() {
                    break;
                }
            }
            tracing::debug!(task = %name, "{name} ended");
        });
    }

    /// Runs a future that ends by itself, like a batch in flight. [`Self::wait`] waits for it, too.
    pub fn spawn_once<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.tasks.spawn(future)
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

/// The failure that the log named last.
pub struct LastSaid(Option<(String, Instant)>);

impl LastSaid {
    pub const fn nothing() -> Self {
        Self(None)
    }

    /// True if the log should name this reason: it differs from the last one, or a minute has
    /// passed.
    pub fn is_news(&mut self, reason: &str) -> bool {
        if self
            .0
            .as_ref()
            .is_some_and(|(said, at)| said == reason && at.elapsed() < SAY_AGAIN_AFTER)
        {
            return false;
        }
        self.0 = Some((reason.to_owned(), Instant::now()));
        true
    }
}

/// The failures of one loop: how long it pauses after each, and which are logged.
struct Failures {
    name: String,
    pauses: Box<dyn Iterator<Item = Duration> + Send>,
    said: LastSaid,
}

impl Failures {
    fn new(name: String) -> Self {
        Self {
            name,
            pauses: Box::new(pauses()),
            said: LastSaid::nothing(),
        }
    }

    /// Logs the failure of a run that lasted for `ran`. Returns the pause before the next run.
    fn note(&mut self, error: &dyn Error, ran: Duration) -> Duration {
        if ran > HEALTHY {
            self.pauses = Box::new(pauses());
        }
        let wait = self.pauses.next().unwrap_or(LONGEST_PAUSE);
        let shown = Duration::from_millis(wait.as_millis().try_into().unwrap_or(u64::MAX));
        let name = &self.name;
        let reason = in_short(error);
        if self.said.is_news(&reason) {
            tracing::warn!(task = %name, "{name} failed, starts again in {shown:?}: {reason}");
        } else {
            tracing::debug!(task = %name, "{name} failed again, starts again in {shown:?}: {reason}");
        }
        wait
    }
}

const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The pauses of a loop that keeps failing: they double from 100 ms to 5 s.
///
/// The jitter, up to half of a pause, keeps processes that lost the same server from retrying in
/// step.
pub fn pauses() -> impl Iterator<Item = Duration> + Send {
    let pauses = ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(100))
        .with_max_delay(LONGEST_PAUSE / 2);
    pauses.with_jitter().without_max_times().build()
}

/// The context of a loop under supervision.
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

    /// Waits for `future` and beats meanwhile: for waits that may be long because there is nothing
    /// to do.
    pub async fn idle<T>(&self, future: impl Future<Output = T>) -> T {
        self.beat.idle(future).await
    }

    /// Waits for work and beats meanwhile, but not when it comes.
    pub async fn await_work<T>(&self, work: impl Future<Output = T>) -> T {
        self.beat.await_work(work).await
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// The clock by which the loop waits.
    pub fn clock(&self) -> &Clock {
        self.beat.clock()
    }

    /// Waits for `duration` of the clock's time. Returns false if the stop comes first.
    pub async fn pause(&self, duration: Duration) -> bool {
        self.stop
            .run_until_cancelled(self.clock().sleep(duration))
            .await
            .is_some()
    }

    /// Pauses, runs `step` and beats, again and again, until the stop or an error.
    pub async fn every<Fut, E>(&self, duration: Duration, step: impl Fn() -> Fut) -> Result<(), E>
    where
        Fut: Future<Output = Result<(), E>>,
    {
        while self.pause(duration).await {
            step().await?;
            self.beat();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::{Semaphore, SemaphorePermit};

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the bus is gone")]
    struct Gone;

    impl LoopError for Gone {
        fn ends_round(&self) -> bool {
            true
        }
    }

    #[tokio::test]
    async fn an_error_that_ends_the_round_is_told_and_its_loop_does_not_run_again() {
        let supervisor = Supervisor::new();
        supervisor.spawn_loop("reader", (), |(), _| std::future::ready(Err(Gone)));
        assert_eq!(supervisor.given_up().await.to_string(), "the bus is gone");
        supervisor.wait().await;
    }

    #[derive(Debug, thiserror::Error)]
    #[error("cannot do it")]
    struct Failed;

    impl LoopError for Failed {}

    #[tokio::test]
    async fn a_loop_that_panics_runs_again() {
        let supervisor = Supervisor::new();
        let runs = Arc::new(Semaphore::new(0));
        supervisor.spawn_loop("reader", Arc::clone(&runs), |runs, _| async move {
            runs.add_permits(1);
            assert!(runs.available_permits() > 1, "the first run panics");
        });
        supervisor.wait().await;
        assert_eq!(runs.available_permits(), 2);
    }

    #[tokio::test]
    async fn a_reader_that_fails_with_the_same_work_again_and_again_stalls() {
        let clock = Clock::of_this_machine();
        let supervisor = Supervisor::with_clock(clock.clone());
        let runs = Arc::new(Semaphore::new(0));
        supervisor.spawn_loop("reader", Arc::clone(&runs), |runs, cx| async move {
            cx.await_work(std::future::ready(())).await;
            runs.add_permits(1);
            Err(Failed)
        });
        for _ in 0..10 {
            // Ends the supervisor's pause.
            clock.advance(Duration::from_secs(5));
            while runs.try_acquire().map(SemaphorePermit::forget).is_err() {
                tokio::task::yield_now().await;
                clock.advance(Duration::from_secs(5));
            }
        }
        let stalled = supervisor.progress().stalled(Duration::from_secs(30));
        assert_eq!(
            stalled
                .into_iter()
                .map(|(name, _)| name)
                .collect::<Vec<_>>(),
            ["reader"]
        );
        supervisor.stop();
        supervisor.wait().await;
    }
}
