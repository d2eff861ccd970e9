//! The allotments of a process: how much of each worker's cap its streams may use.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::model::WorkerName;

/// How long a process keeps an allotment small after somebody lacked something.
const SCARCE: Duration = Duration::from_secs(10);

pub(super) type Asks = Arc<tokio::sync::Mutex<()>>;

/// The allotments of this process.
#[derive(Default)]
pub(super) struct Allotments(pub(super) Mutex<BTreeMap<WorkerName, Allotment>>);

#[derive(Default)]
pub(super) struct Allotment {
    /// How much its sessions here may have in hand and on demand, as Redis knows it or more.
    pub(super) allowed: usize,
    pub(super) scarce_since: Option<Instant>,
    /// Redis may know another allotment.
    pub(super) is_unwritten: bool,
    /// One asks Redis at a time. While somebody has it, the allotment stays.
    pub(super) asks: Asks,
}

impl Allotments {
    /// The turn to ask Redis for this worker's allotment. `None`: it has none here.
    pub(super) fn asks(&self, worker: &WorkerName) -> Option<Asks> {
        self.0
            .lock()
            .get(worker)
            .map(|allotment| Arc::clone(&allotment.asks))
    }

    /// The turn to ask Redis for the allotment of a worker with a session here. Makes an allotment
    /// where there is none.
    pub(super) fn asks_anew(&self, worker: &WorkerName) -> Asks {
        Arc::clone(&self.0.lock().entry(worker.clone()).or_default().asks)
    }

    /// Changes an allotment. The caller that has its turn finds it.
    pub(super) fn change(&self, worker: &WorkerName, change: impl FnOnce(&mut Allotment)) {
        if let Some(allotment) = self.0.lock().get_mut(worker) {
            change(allotment);
        }
    }

    /// Removes an allotment of 0 that Redis knows, unless another caller has, or waits for, its
    /// turn.
    pub(super) fn forget(&self, worker: &WorkerName, asks: &Asks) {
        let mut allotments = self.0.lock();
        let is_free =
            |one: &Allotment| one.allowed == 0 && !one.is_unwritten && Arc::strong_count(asks) == 2;
        if allotments.get(worker).is_some_and(is_free) {
            allotments.remove(worker);
        }
    }

    /// How many of these workers have an allotment that Redis should know. `None`: none of them is
    /// known here.
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

    /// The workers of whom somebody has lacked something a moment ago.
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
