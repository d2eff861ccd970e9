//! Signs of life: which loop makes no progress.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::Clock;

/// The last sign of life of each loop. A loop beats in each iteration, whether there was work or
/// not.
#[derive(Clone)]
pub struct Progress {
    beats: Arc<Mutex<BTreeMap<String, Instant>>>,
    clock: Clock,
}

impl Default for Progress {
    fn default() -> Self {
        Self::new(Clock::of_this_machine())
    }
}

impl Progress {
    pub(super) fn new(clock: Clock) -> Self {
        Self {
            beats: Arc::default(),
            clock,
        }
    }

    pub(super) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Registers a loop until its beat is dropped.
    pub fn register(&self, name: impl Into<String>) -> Beat {
        let beat = Beat {
            name: name.into(),
            progress: self.clone(),
            has_failed: AtomicBool::default(),
        };
        beat.beat();
        beat
    }

    /// The loops that have not ended.
    pub fn running(&self) -> Vec<String> {
        self.beats.lock().keys().cloned().collect()
    }

    /// The loops without a beat for longer than `limit`, with the time since their last one.
    pub fn stalled(&self, limit: Duration) -> Vec<(String, Duration)> {
        let beats = self.beats.lock();
        let now = self.clock.now();
        let stalled = beats
            .iter()
            .map(|(name, at)| (name.clone(), now.saturating_duration_since(*at)));
        stalled.filter(|(_, age)| *age > limit).collect()
    }
}

/// A loop's sign of life.
pub struct Beat {
    name: String,
    progress: Progress,
    /// True if the last run ended with an error and nothing has been done since.
    has_failed: AtomicBool,
}

/// A wait of at least this length shows that there is no work.
const NO_WORK: Duration = Duration::from_secs(10);

impl Beat {
    pub(super) fn clock(&self) -> &Clock {
        self.progress.clock()
    }

    /// Shows that the loop is alive.
    pub fn beat(&self) {
        self.has_failed.store(false, Ordering::Relaxed);
        let now = self.progress.clock.now();
        let mut beats = self.progress.beats.lock();
        match beats.get_mut(&self.name) {
            Some(at) => *at = now,
            None => drop(beats.insert(self.name.clone(), now)),
        }
    }

    /// Waits for `future` and beats once a second meanwhile: for waits that may be long because
    /// there is nothing to do.
    pub async fn idle<T>(&self, future: impl Future<Output = T>) -> T {
        tokio::pin!(future);
        loop {
            tokio::select! {
                done = &mut future => { self.beat(); return done; }
                () = tokio::time::sleep(Duration::from_secs(1)) => self.beat(),
            }
        }
    }

    /// Waits for work and beats while it waits, but not when the work arrives: only finished work
    /// is progress.
    ///
    /// After a failed run, the loop beats only once it has waited for [`NO_WORK`]. So a loop that
    /// keeps getting the same work and failing is reported as stalled.
    pub async fn await_work<T>(&self, work: impl Future<Output = T>) -> T {
        let began = self.progress.clock.now();
        tokio::pin!(work);
        loop {
            tokio::select! {
                work = &mut work => return work,
                () = tokio::time::sleep(Duration::from_secs(1)) => {
                    let waited = self.progress.clock.now().saturating_duration_since(began);
                    if waited >= NO_WORK || !self.has_failed.load(Ordering::Relaxed) {
                        self.beat();
                    }
                }
            }
        }
    }

    pub(super) fn failed(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        let mut beats = self.progress.beats.lock();
        beats.remove(&self.name);
    }
}
