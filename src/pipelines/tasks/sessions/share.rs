//! The shares of a process: how much of each worker's cap its streams may use.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::model::WorkerName;

/// How long a process keeps a share small after somebody lacked something.
const SCARCE: Duration = Duration::from_secs(10);

/// The shares of this process.
#[derive(Default)]
pub(super) struct Shares(pub(super) Mutex<BTreeMap<WorkerName, Share>>);

#[derive(Default)]
pub(super) struct Share {
    /// How much its sessions here may have in hand and on demand, as Redis knows it or more.
    pub(super) allowed: usize,
    pub(super) scarce_since: Option<Instant>,
    /// Redis may know a larger share.
    pub(super) is_unwritten: bool,
    /// One asks Redis at a time.
    pub(super) asks: Arc<tokio::sync::Mutex<()>>,
}

impl Shares {
    pub(super) fn all(&self) -> Vec<WorkerName> {
        self.0.lock().keys().cloned().collect()
    }

    /// The workers of whom somebody has lacked something a moment ago.
    pub(super) fn scarce(&self) -> Vec<WorkerName> {
        let mut shares = self.0.lock();
        for share in shares.values_mut() {
            share.scarce_since = share.scarce_since.filter(|since| since.elapsed() < SCARCE);
        }
        shares.iter().filter(|(_, share)| share.scarce_since.is_some()).map(|(worker, _)| worker.clone()).collect()
    }
}
