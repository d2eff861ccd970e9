//! The state shared by a session's worker and the task that serves its stream.

use std::{
    collections::{HashSet, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Notify, oneshot};

use crate::{error::Error, pb, source::EndedLease};

/// A request of the worker to the session.
pub(super) enum Command {
    Report(Report),
    /// The worker takes no more tasks. Answered when no task is in flight.
    Drain(oneshot::Sender<()>),
    /// The worker reports nothing more. Answered, or dropped, when the session is closed.
    Close(oneshot::Sender<()>),
}

/// Reports of one kind.
#[derive(Debug)]
pub(super) enum Items {
    Completions(Vec<pb::Completion>),
    Rejections(Vec<pb::Rejection>),
    Extensions(Vec<pb::Extension>),
    /// Tasks that were not started.
    Returns(Vec<pb::Rejection>),
}

/// The answer to reports.
#[derive(Debug)]
pub(super) enum Answer {
    Items(Vec<pb::ItemResult>),
    /// taskd has no streams: the worker must send the items by a call.
    ByCall(Items),
}

/// Reports that wait for their answers. `reply` is `None` for extensions that the session makes
/// itself.
pub(super) struct Report {
    pub(super) items: Items,
    pub(super) reply: Option<oneshot::Sender<Result<Answer, Error>>>,
}

impl Report {
    pub(super) fn answer(self, answer: Result<Answer, Error>) {
        if let Some(reply) = self.reply {
            // The worker may have given up.
            reply.send(answer).ok();
        }
    }

    pub(super) fn by_call(self) {
        if let Some(reply) = self.reply {
            reply.send(Ok(Answer::ByCall(self.items))).ok();
        }
    }

    /// True if the caller no longer waits.
    pub(super) fn is_over(&self) -> bool {
        self.reply.as_ref().is_some_and(oneshot::Sender::is_closed)
    }
}

#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Signals that [`Self::take`] or [`Self::take_arrived`] has something to return.
    for_worker: Notify,
    has_ended: Notify,
    /// Signals that the worker's capacity changed.
    pub(super) has_room: Notify,
}

#[derive(Default)]
struct State {
    /// How many tasks the worker can take, including those in `arrived`.
    room: usize,
    /// Tasks that the worker has not taken out yet.
    arrived: VecDeque<pb::LeasedTask>,
    ended: Vec<EndedLease>,
    way: Way,
}

impl State {
    /// Takes the tasks that have arrived, which reduces the capacity.
    fn take_arrived(&mut self) -> Vec<pb::LeasedTask> {
        self.room = self.room.saturating_sub(self.arrived.len());
        self.arrived.drain(..).collect()
    }
}

/// How tasks arrive.
#[derive(Default)]
enum Way {
    #[default]
    Stream,
    /// taskd has no streams.
    Polls,
    Refused(Error),
}

/// The outcome of a wait for tasks.
pub(super) enum Taken {
    Tasks(Vec<pb::LeasedTask>),
    Polls,
    Refused(Error),
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // No method panics while the state is half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_room(&self, room: usize) {
        let before = std::mem::replace(&mut self.state().room, room);
        if before != room {
            self.has_room.notify_one();
        }
    }

    /// The demand that matches the worker's capacity.
    pub(super) fn target(&self) -> u32 {
        let state = self.state();
        u32::try_from(state.room.saturating_sub(state.arrived.len())).unwrap_or(u32::MAX)
    }

    pub(super) fn arrive(&self, tasks: Vec<pb::LeasedTask>) {
        self.state().arrived.extend(tasks);
        self.for_worker.notify_one();
    }

    /// Waits for tasks, or for another state of the session.
    pub(super) async fn take(&self) -> Taken {
        loop {
            {
                let mut state = self.state();
                if !state.arrived.is_empty() {
                    return Taken::Tasks(state.take_arrived());
                }
                match &state.way {
                    Way::Stream => {}
                    Way::Polls => return Taken::Polls,
                    Way::Refused(error) => return Taken::Refused(error.clone()),
                }
            }
            self.for_worker.notified().await;
        }
    }

    /// Waits for tasks, whatever the state of the session. Only for a worker that does not wait in
    /// [`Self::take`] at the same time, because a notification wakes one of the two.
    pub(super) async fn take_arrived(&self) -> Vec<pb::LeasedTask> {
        loop {
            let tasks = self.take_rest();
            if !tasks.is_empty() {
                return tasks;
            }
            self.for_worker.notified().await;
        }
    }

    /// Takes the remaining tasks.
    pub(super) fn take_rest(&self) -> Vec<pb::LeasedTask> {
        self.state().take_arrived()
    }

    /// Notifies the worker of leases that ended. Discards their tasks if the worker has not taken
    /// them yet.
    pub(super) fn end(&self, leases: Vec<EndedLease>) {
        if leases.is_empty() {
            return;
        }
        let mut state = self.state();
        // Compare tokens, too: a newer lease of the same task may have arrived.
        let ended: HashSet<_> = leases
            .iter()
            .map(|(token, result)| (&*result.id, &**token))
            .collect();
        state
            .arrived
            .retain(|task| !ended.contains(&(&*task.id, &*task.lease_token)));
        state.ended.extend(leases);
        drop(state);
        self.has_ended.notify_one();
    }

    /// Waits for leases that ended.
    pub(super) async fn ended(&self) -> Vec<EndedLease> {
        loop {
            let ended = std::mem::take(&mut self.state().ended);
            if !ended.is_empty() {
                return ended;
            }
            self.has_ended.notified().await;
        }
    }

    pub(super) fn go_by_polls(&self) {
        self.state().way = Way::Polls;
        self.for_worker.notify_one();
    }

    /// True once taskd turned out to have no streams.
    pub(super) fn goes_by_polls(&self) -> bool {
        matches!(self.state().way, Way::Polls)
    }

    pub(super) fn refusal(&self) -> Option<Error> {
        match &self.state().way {
            Way::Refused(error) => Some(error.clone()),
            Way::Stream | Way::Polls => None,
        }
    }

    pub(super) fn refuse(&self, error: Error) {
        self.state().way = Way::Refused(error);
        self.for_worker.notify_one();
    }
}
