//! The allotments that this process has: how much of each worker's cap its streams may use. See
//! `allotments.rs` for the protocol.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::model::WorkerName;

/// How long a process keeps an allotment small after another one ran short of the cap.
const SCARCE: Duration = Duration::from_secs(10);

pub(super) type AllotmentLock = Arc<tokio::sync::Mutex<()>>;

/// The allotments of this process.
#[derive(Default)]
pub(super) struct Allotments(pub(super) Mutex<BTreeMap<WorkerName, Allotment>>);

#[derive(Default)]
pub(super) struct Allotment {
    /// How many tasks the worker's sessions here may hold and demand. Never less than Redis has
    /// stored.
    pub(super) allowed: usize,
    pub(super) scarce_since: Option<Instant>,
    /// Redis may have another number stored.
    pub(super) is_unwritten: bool,
    /// Held by the one caller that asks Redis. The allotment is not removed while it is held.
    pub(super) lock_of_allotment: AllotmentLock,
}

impl Allotments {
    /// Returns the lock under which to ask Redis for this worker's allotment, or `None` if it has
    /// none here.
    pub(super) fn lock_of_allotment(&self, worker: &WorkerName) -> Option<AllotmentLock> {
        self.0
            .lock()
            .get(worker)
            .map(|allotment| Arc::clone(&allotment.lock_of_allotment))
    }

    /// Returns the lock under which to ask Redis for the allotment of a worker with a session here.
    /// Inserts an allotment if there is none.
    pub(super) fn lock_or_insert(&self, worker: &WorkerName) -> AllotmentLock {
        Arc::clone(
            &self
                .0
                .lock()
                .entry(worker.clone())
                .or_default()
                .lock_of_allotment,
        )
    }

    /// Changes an allotment. The caller holds its lock, so it exists.
    pub(super) fn change(&self, worker: &WorkerName, change: impl FnOnce(&mut Allotment)) {
        if let Some(allotment) = self.0.lock().get_mut(worker) {
            change(allotment);
        }
    }

    /// Removes an allotment of 0 that Redis has stored, unless another caller has its lock or waits
    /// for it.
    pub(super) fn forget(&self, worker: &WorkerName, lock_of_allotment: &AllotmentLock) {
        let mut allotments = self.0.lock();
        let is_free = |one: &Allotment| {
            one.allowed == 0 && !one.is_unwritten && Arc::strong_count(lock_of_allotment) == 2
        };
        if allotments.get(worker).is_some_and(is_free) {
            allotments.remove(worker);
        }
    }

    /// Returns how many of these workers have an allotment that Redis should know, or `None` if
    /// none of them is known here.
    pub(super) fn count(&self, of: impl Fn(&WorkerName) -> bool) -> Option<usize> {
        let allotments = self.0.lock();
        let mut theirs = allotments
            .iter()
            .filter(|(worker, _)| of(worker))
            .peekable();
        theirs.peek()?;
        Some(theirs.filter(|(_, one)| one.allowed > 0).count())
    }

    pub(super) fn all(&self) -> Vec<WorkerName> {
        self.0.lock().keys().cloned().collect()
    }

    /// Returns the workers whose cap was too small for some process within the last [`SCARCE`].
    pub(super) fn scarce(&self) -> Vec<WorkerName> {
        let mut allotments = self.0.lock();
        for allotment in allotments.values_mut() {
            allotment.scarce_since = allotment
                .scarce_since
                .filter(|since| since.elapsed() < SCARCE);
        }
        allotments
            .iter()
            .filter(|(_, allotment)| allotment.scarce_since.is_some())
            .map(|(worker, _)| worker.clone())
            .collect()
    }
}
