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

/// The allotments of this process.
#[derive(Default)]
pub(super) struct Allotments(pub(super) Mutex<BTreeMap<WorkerName, Allotment>>);

#[derive(Default)]
pub(super) struct Allotment {
    /// How much its sessions here may have in hand and on demand, as Redis knows it or more.
    pub(super) allowed: usize,
    pub(super) scarce_since: Option<Instant>,
    /// Redis may know a larger allotment.
    pub(super) is_unwritten: bool,
    /// One asks Redis at a time.
    pub(super) asks: Arc<tokio::sync::Mutex<()>>,
}

impl Allotments {
    pub(super) fn all(&self) -> Vec<WorkerName> {
        self.0.lock().keys().cloned().collect()
    }

    /// The workers of whom somebody has lacked something a moment ago.
    pub(super) fn scarce(&self) -> Vec<WorkerName> {
        let mut allotments = self.0.lock();
        for allotment in allotments.values_mut() {
            allotment.scarce_since = allotment.scarce_since.filter(|since| since.elapsed() < SCARCE);
        }
        allotments
            .iter()
            .filter(|(_, allotment)| allotment.scarce_since.is_some())
            .map(|(worker, _)| worker.clone())
            .collect()
    }
}
