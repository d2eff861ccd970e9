//! Gates between SQL and the bus: a closed gate keeps new tasks in SQL.

use std::{collections::HashSet, sync::Arc};

use parking_lot::RwLock;

use crate::model::QueueName;

/// One gate per queue. Clones share them.
///
/// A closed gate parks new tasks in SQL. The watchdog opens it when no task is parked any more, so that new tasks do
/// not overtake parked ones for ever. A gate is only a hint: the fanout parks a task that meets a full queue.
#[derive(Clone, Default)]
pub struct Gates(Arc<RwLock<Closed>>);

/// A Redis with little memory left. It closes all gates, and discovery refuses inserts.
#[derive(Clone, Debug)]
pub struct Shortage {
    /// The reason that refused callers are told.
    pub why: String,
    /// Redis has no memory left.
    pub is_full: bool,
}

#[derive(Default)]
struct Closed {
    shortage: Option<Shortage>,
    queues: HashSet<QueueName>,
}

impl Gates {
    pub fn close(&self, queue: &QueueName) {
        if !self.0.read().queues.contains(queue) {
            tracing::info!(%queue, "queue {queue} is full: new tasks stay in SQL until there is room");
            self.0.write().queues.insert(queue.clone());
        }
    }

    pub fn open(&self, queue: &QueueName) {
        self.0.write().queues.remove(queue);
    }

    /// Closes the gates of the queues with parked tasks and opens all others.
    pub fn follow(&self, parked: &[QueueName]) {
        parked.iter().for_each(|queue| self.close(queue));
        self.0.write().queues.retain(|queue| parked.contains(queue));
    }

    /// Whether new tasks of the queue stay in SQL: it is full, or Redis has little memory left.
    pub fn is_closed(&self, queue: &QueueName) -> bool {
        let closed = self.0.read();
        closed.shortage.is_some() || closed.queues.contains(queue)
    }

    /// The full queues.
    pub fn closed(&self) -> Vec<QueueName> {
        self.0.read().queues.iter().cloned().collect()
    }

    pub fn set_shortage(&self, shortage: Option<Shortage>) {
        self.0.write().shortage = shortage;
    }

    pub fn shortage(&self) -> Option<Shortage> {
        self.0.read().shortage.clone()
    }

    /// Whether Redis has little memory left.
    pub fn is_short(&self) -> bool {
        self.0.read().shortage.is_some()
    }
}
