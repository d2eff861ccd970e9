//! The tasks that a worker holds, from their arrival until their reports are answered.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::task::{AbortHandle, Id};

use crate::{event::Ended, pb, task::TaskInfo};

/// Identifies a held task. The task id would not be unique: a worker may still hold a task that it
/// lost, and receive it again.
pub(crate) type Number = u64;

pub(crate) struct Held {
    pub(crate) info: Arc<TaskInfo>,
    place: Place,
    began: Option<Instant>,
    /// How often the worker has said that the handler still runs.
    said: u32,
    pub(crate) took: Option<Duration>,
    /// How the task ends if its report is accepted.
    pub(crate) ending: Ended,
    /// Why it did not end well.
    pub(crate) reason: String,
}

impl Held {
    pub(crate) fn is_reported(&self) -> bool {
        matches!(self.place, Place::Reported)
    }
}

enum Place {
    Waiting(Bytes),
    Running(AbortHandle),
    /// Its report waits to be sent, or for its answer.
    Reported,
}

#[derive(Default)]
pub(crate) struct Table {
    all: BTreeMap<Number, Held>,
    waiting: VecDeque<Number>,
    by_handler: HashMap<Id, Number>,
    last: Number,
}

impl Table {
    pub(crate) fn add(&mut self, task: pb::LeasedTask) {
        let (info, payload) = TaskInfo::split(task);
        self.last += 1;
        let held = Held {
            info: Arc::new(info),
            place: Place::Waiting(payload),
            began: None,
            said: 0,
            took: None,
            ending: Ended::Lost,
            reason: String::new(),
        };
        self.all.insert(self.last, held);
        self.waiting.push_back(self.last);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// How many tasks wait or run.
    pub(crate) fn unfinished(&self) -> usize {
        self.waiting.len() + self.by_handler.len()
    }

    pub(crate) fn running(&self) -> usize {
        self.by_handler.len()
    }

    /// Takes the next waiting task, with its payload.
    pub(crate) fn next(&mut self) -> Option<(Number, Arc<TaskInfo>, Bytes)> {
        let number = self.waiting.pop_front()?;
        let held = self.all.get_mut(&number)?;
        match std::mem::replace(&mut held.place, Place::Reported) {
            Place::Waiting(payload) => Some((number, held.info.clone(), payload)),
            Place::Running(_) | Place::Reported => None,
        }
    }

    pub(crate) fn started(&mut self, number: Number, handler: AbortHandle) {
        self.by_handler.insert(handler.id(), number);
        if let Some(held) = self.all.get_mut(&number) {
            held.place = Place::Running(handler);
            held.began = Some(Instant::now());
        }
    }

    /// Records that a handler ended and returns its task, or `None` if the task was lost before.
    pub(crate) fn ended(&mut self, handler: Id) -> Option<(Number, &mut Held)> {
        let number = self.by_handler.remove(&handler)?;
        let held = self.all.get_mut(&number)?;
        held.place = Place::Reported;
        held.took = held.began.map(|began| began.elapsed());
        Some((number, held))
    }

    /// Removes a task, and aborts its handler.
    pub(crate) fn remove(&mut self, number: Number) -> Option<Held> {
        let mut held = self.all.remove(&number)?;
        match &held.place {
            Place::Waiting(_) => self.waiting.retain(|waiting| *waiting != number),
            Place::Running(handler) => {
                handler.abort();
                held.took = held.began.map(|began| began.elapsed());
            }
            Place::Reported => {}
        }
        Some(held)
    }

    /// Finds a task by its id and lease token.
    pub(crate) fn find(&self, id: &str, token: &str) -> Option<Number> {
        let is_it = |info: &TaskInfo| info.id() == id && info.lease_token == token;
        self.all
            .iter()
            .find(|(_, held)| is_it(&held.info))
            .map(|(number, _)| *number)
    }

    /// How many tasks are finished, but have no answer to their reports yet.
    pub(crate) fn finished(&self) -> usize {
        let is_finished = |held: &&Held| matches!(held.ending, Ended::Completed | Ended::Rejected);
        self.all
            .values()
            .filter(|held| held.is_reported())
            .filter(is_finished)
            .count()
    }

    pub(crate) fn get_mut(&mut self, number: Number) -> Option<&mut Held> {
        self.all.get_mut(&number)
    }

    pub(crate) fn abort_all(&self) {
        for held in self.all.values() {
            if let Place::Running(handler) = &held.place {
                handler.abort();
            }
        }
    }

    /// All leases, in order of arrival.
    /// Returns the tasks whose handlers have run for `first`, with how long they have run. A task is
    /// returned again when its handler has run for twice as long as the last time.
    pub(crate) fn long_running(&mut self, first: Duration) -> Vec<(Arc<TaskInfo>, Duration)> {
        let mut found = Vec::new();
        for held in self.all.values_mut() {
            let (Place::Running(_), Some(began)) = (&held.place, held.began) else {
                continue;
            };
            let so_far = began.elapsed();
            if so_far >= first.saturating_mul(1 << held.said.min(31)) {
                held.said += 1;
                found.push((held.info.clone(), so_far));
            }
        }
        found
    }

    pub(crate) fn leases(&self) -> impl Iterator<Item = (Number, &TaskInfo)> {
        self.all.iter().map(|(number, held)| (*number, &*held.info))
    }
}
