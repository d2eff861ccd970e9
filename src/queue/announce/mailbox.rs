//! The events that wait until one watcher of tasks reads them.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, Ordering},
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{model::TaskEvent, telemetry::metrics};

/// A mailbox holds this many events, plus two for each task. If it overflows, the watcher reads the
/// state of all its tasks instead.
const ROOM: usize = 64;

/// An event for a watcher of tasks, and how sure it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatcherNews {
    /// A process announced it. It may be old.
    Hint(TaskEvent),
    /// It was read from SQL and Redis.
    Truth(TaskEvent),
}

pub(super) struct Mailbox {
    told: Mutex<VecDeque<WatcherNews>>,
    room: usize,
    has_overflowed: AtomicBool,
    notify: Notify,
}

impl Mailbox {
    pub(super) fn new(tasks: usize) -> Self {
        Self {
            told: Default::default(),
            room: ROOM + 2 * tasks,
            has_overflowed: Default::default(),
            notify: Default::default(),
        }
    }

    pub(super) fn put(&self, told: WatcherNews) {
        let mut waiting = self.told.lock();
        if waiting.len() < self.room {
            waiting.push_back(told);
        } else {
            self.has_overflowed.store(true, Ordering::Relaxed);
            metrics::events_dropped(1);
        }
        drop(waiting);
        self.notify.notify_one();
    }

    /// Waits for events. Returns those since the last call, and whether some were dropped.
    pub(super) async fn told(&self) -> (Vec<WatcherNews>, bool) {
        loop {
            let told: Vec<_> = self.told.lock().drain(..).collect();
            let has_overflowed = self.has_overflowed.swap(false, Ordering::Relaxed);
            if !told.is_empty() || has_overflowed {
                return (told, has_overflowed);
            }
            self.notify.notified().await;
        }
    }
}
