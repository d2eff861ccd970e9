//! The sessions of a process.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::{allotment::Allotments, session::Session};
use crate::{model::WorkerName, queue::SESSION_SLOTS, telemetry::metrics};

type ById = BTreeMap<(WorkerName, Uuid), Arc<Session>>;

/// The sessions of this process.
#[derive(Default)]
pub(in crate::pipelines::tasks) struct Sessions {
    pub(super) by_id: Mutex<ById>,
    /// The streams under way.
    pub(super) streams: TaskTracker,
    pub(super) slots: Slots,
    pub(super) allotments: Allotments,
}

/// The slots in which this process has opened sessions since its last look.
#[derive(Default)]
pub(super) struct Slots([AtomicBool; SESSION_SLOTS as usize]);

impl Slots {
    pub(super) fn note(&self, slot: u32) {
        self.0[slot as usize].store(true, Ordering::Relaxed);
    }

    pub(super) fn take(&self, slot: u32) -> bool {
        self.0[slot as usize].swap(false, Ordering::Relaxed)
    }
}

impl Sessions {
    pub(super) fn of_worker(&self, worker: &WorkerName) -> Vec<Arc<Session>> {
        let sessions = self.by_id.lock();
        sessions.range((worker.clone(), Uuid::nil())..=(worker.clone(), Uuid::max())).map(|(_, s)| s.clone()).collect()
    }

    pub(super) fn all(&self) -> Vec<Arc<Session>> {
        self.by_id.lock().values().cloned().collect()
    }

    pub(super) fn remove(&self, session: &Session) {
        let mut sessions = self.by_id.lock();
        sessions.remove(&(session.worker.clone(), session.id));
        metrics::sessions(sessions.len());
    }

    /// The tasks that all sessions of the worker have in hand and on demand.
    pub(super) fn taken_by(&self, worker: &WorkerName) -> usize {
        self.of_worker(worker).iter().map(|session| session.taken()).sum()
    }
}
