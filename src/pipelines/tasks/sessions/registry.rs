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

use super::{
    allotment::{Allotment, Allotments},
    order::{HeardTakeovers, RepeatedTakeovers},
    session::{Attached, Session},
};
use crate::{model::WorkerName, queue::SESSION_SLOTS, telemetry::metrics};

type ById = BTreeMap<(WorkerName, Uuid), Arc<Session>>;

/// The sessions of this process.
#[derive(Default)]
pub(in crate::pipelines::tasks) struct Sessions {
    pub(super) by_id: Mutex<ById>,
    pub(super) heard: HeardTakeovers,
    /// Takeovers by sessions without streams.
    pub(super) told: RepeatedTakeovers,
    /// The streams that are running.
    pub(in crate::pipelines::tasks) streams: TaskTracker,
    pub(super) slots: Slots,
    pub(super) allotments: Allotments,
    pub(super) process: ProcessName,
}

/// The name under which Redis stores this process's allotments. It is new whenever the process
/// starts over, so that earlier allotments do not count any longer.
pub(super) struct ProcessName(pub(super) String);

impl Default for ProcessName {
    fn default() -> Self {
        Self(Uuid::new_v4().to_string())
    }
}

/// How many sessions with streams there may be.
#[derive(Clone, Copy)]
pub(super) struct SessionLimits {
    pub(super) of_process: usize,
    /// For one worker; `None` if only the bound of the process counts.
    pub(super) of_worker: Option<usize>,
}

/// There are as many sessions as are allowed. Carries the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Crowded {
    Process(usize),
    Worker(usize),
}

/// The most sessions of a worker with a token of its own, so that others can open sessions, too.
pub(super) fn most_of_worker(max_sessions: usize) -> usize {
    (max_sessions / 10).max(10)
}

/// The slots in which this process has opened sessions since it last checked them.
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
    /// The sessions of the worker, in their order.
    pub(super) fn of_worker(&self, worker: &WorkerName) -> Vec<Arc<Session>> {
        of_worker(&self.by_id.lock(), worker).cloned().collect()
    }

    /// Adds a session, later than all others of its worker, if the limits allow it.
    pub(super) fn add(
        &self,
        worker: WorkerName,
        now_unix_ms: i64,
        room: SessionLimits,
        open: impl FnOnce(Uuid) -> (Arc<Session>, Attached),
    ) -> Result<Attached, Crowded> {
        let mut sessions = self.by_id.lock();
        if sessions.len() >= room.of_process {
            return Err(Crowded::Process(room.of_process));
        }
        if let Some(most) = room
            .of_worker
            .filter(|most| of_worker(&sessions, &worker).nth(most - 1).is_some())
        {
            return Err(Crowded::Worker(most));
        }
        let before = of_worker(&sessions, &worker)
            .next_back()
            .map(|session| session.id);
        let (session, attached) = open(self.heard.next_id(before, now_unix_ms));
        sessions.insert((worker, session.id), session);
        metrics::sessions(sessions.len());
        Ok(attached)
    }

    /// Returns the id of a session without a stream, later than those of its worker here.
    pub(super) fn next_id(&self, worker: &WorkerName, now_unix_ms: i64) -> Uuid {
        let before = of_worker(&self.by_id.lock(), worker)
            .next_back()
            .map(|session| session.id);
        let id = self.heard.next_id(before, now_unix_ms);
        self.heard.hear(id);
        id
    }

    pub(super) fn all(&self) -> Vec<Arc<Session>> {
        self.by_id.lock().values().cloned().collect()
    }

    pub(super) fn remove(&self, session: &Session) {
        session.give_share_back();
        let mut sessions = self.by_id.lock();
        sessions.remove(&(session.worker.clone(), session.id));
        metrics::sessions(sessions.len());
    }

    /// Adds to the demand of a session within the allotment of its worker. Returns how much was
    /// added, or `None` if Redis must be asked for more.
    pub(super) fn want(&self, attached: &Attached, want: u32, most: u32) -> Option<u32> {
        let want = want.min(attached.session.room(most));
        // Under the lock, so that two sessions of a worker do not count on the same part of the
        // allotment.
        let allotments = self.allotments.0.lock();
        let worker = &attached.session.worker;
        let has_room = self.left(&allotments, worker, Session::noted) >= want as usize
            || self.left(&allotments, worker, Session::taken) >= want as usize;
        has_room.then(|| attached.want(want, most))
    }

    /// Adds what is left of the allotment to the demand of a session. Returns how much was added.
    pub(super) fn want_rest(&self, attached: &Attached, want: u32, most: u32) -> u32 {
        let allotments = self.allotments.0.lock();
        let left = self.left(&allotments, &attached.session.worker, Session::taken);
        attached.want(want.min(u32::try_from(left).unwrap_or(u32::MAX)), most)
    }

    /// Sets the allotment of a worker to 0 if it has no session here. Returns whether it has none.
    /// A session that opens later asks Redis.
    pub(super) fn leave_allotment(&self, worker: &WorkerName) -> bool {
        let mut allotments = self.allotments.0.lock();
        let has_left = self.of_worker(worker).is_empty();
        if let Some(allotment) = allotments.get_mut(worker).filter(|_| has_left) {
            allotment.allowed = 0;
        }
        has_left
    }

    fn left(
        &self,
        allotments: &BTreeMap<WorkerName, Allotment>,
        worker: &WorkerName,
        taken: impl Fn(&Session) -> usize,
    ) -> usize {
        let allowed = allotments
            .get(worker)
            .map_or(0, |allotment| allotment.allowed);
        let taken: usize = of_worker(&self.by_id.lock(), worker)
            .map(|session| taken(session))
            .sum();
        allowed.saturating_sub(taken)
    }

    /// The number of tasks that all sessions of the worker hold and demand.
    pub(super) fn taken_by(&self, worker: &WorkerName) -> usize {
        self.of_worker(worker)
            .iter()
            .map(|session| session.taken())
            .sum()
    }
}

fn of_worker<'a>(
    sessions: &'a ById,
    worker: &WorkerName,
) -> impl DoubleEndedIterator<Item = &'a Arc<Session>> {
    let all = (worker.clone(), Uuid::nil())..=(worker.clone(), Uuid::max());
    sessions.range(all).map(|(_, session)| session)
}
