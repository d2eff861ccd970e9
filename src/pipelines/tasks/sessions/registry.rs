//! The sessions of a process.

use std::{
    collections::{BTreeMap, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::{
    order::Heard,
    session::{Attached, Session},
};
use crate::{model::WorkerName, telemetry::metrics};

type ById = BTreeMap<(WorkerName, Uuid), Arc<Session>>;

/// Locks for the demand of workers. Two workers may share one.
const WANTS: usize = 16;

/// The sessions of this process.
#[derive(Default)]
pub(in crate::pipelines::tasks) struct Sessions {
    pub(super) by_id: Mutex<ById>,
    pub(super) heard: Heard,
    wants: [Mutex<()>; WANTS],
    /// The streams under way.
    pub(super) streams: TaskTracker,
}

impl Sessions {
    /// The sessions of the worker, in their order.
    pub(super) fn of_worker(&self, worker: &WorkerName) -> Vec<Arc<Session>> {
        of_worker(&self.by_id.lock(), worker).cloned().collect()
    }

    /// Adds a session that is later than all others of its worker. `None`: there are `most`.
    pub(super) fn add(
        &self,
        worker: WorkerName,
        now_unix_ms: i64,
        most: usize,
        open: impl FnOnce(Uuid) -> (Arc<Session>, Attached),
    ) -> Option<Attached> {
        let mut sessions = self.by_id.lock();
        if sessions.len() >= most {
            return None;
        }
        let before = of_worker(&sessions, &worker).next_back().map(|session| session.id);
        let (session, attached) = open(self.heard.next_id(before, now_unix_ms));
        sessions.insert((worker, session.id), session);
        metrics::sessions(sessions.len());
        Some(attached)
    }

    pub(super) fn all(&self) -> Vec<Arc<Session>> {
        self.by_id.lock().values().cloned().collect()
    }

    pub(super) fn remove(&self, session: &Session) {
        let mut sessions = self.by_id.lock();
        sessions.remove(&(session.worker.clone(), session.id));
        metrics::sessions(sessions.len());
    }

    /// Adds to the demand of a session, as far as it and its worker may have more; answers how much.
    pub(super) fn want(&self, attached: &Attached, want: u32, most_of_session: u32, most_of_worker: usize) -> u32 {
        let worker = &attached.session.worker;
        let mut hasher = DefaultHasher::new();
        worker.hash(&mut hasher);
        let number = usize::try_from(hasher.finish() % WANTS as u64).unwrap_or(0);
        // One at a time: two sessions of a worker must not count on the same room.
        let _turn = self.wants[number].lock();
        let taken: usize = self.of_worker(worker).iter().map(|session| session.taken()).sum();
        let left = u32::try_from(most_of_worker.saturating_sub(taken)).unwrap_or(u32::MAX);
        attached.want(want.min(left), most_of_session)
    }
}

fn of_worker<'a>(sessions: &'a ById, worker: &WorkerName) -> impl DoubleEndedIterator<Item = &'a Arc<Session>> {
    let all = (worker.clone(), Uuid::nil())..=(worker.clone(), Uuid::max());
    sessions.range(all).map(|(_, session)| session)
}
