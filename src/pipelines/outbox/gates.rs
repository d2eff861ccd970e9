//! A process's knowledge about the queues of the installation, beside their shards.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::{Duration, Instant},
};

use crate::{config::Queues, model::QueueName};

/// A name that was let in, and of which SQL knows nothing after this time, was not stored.
const LET_IN: Duration = Duration::from_secs(10);

/// Which queues there are, how much they have, and which are full. A closed gate parks new tasks in SQL; the watchdog
/// opens it when none is parked any more, so that parked ones are not overtaken for ever. Only a hint: what passes an
/// open gate and finds its queue full is parked by the fanout. [`super::QueueSync`] keeps it up to date. Clones share
/// it.
#[derive(Clone, Default)]
pub struct Gates(Arc<RwLock<Known>>);

/// Redis has little memory left. All gates are closed: new tasks stay in SQL, and inserts are refused.
#[derive(Clone, Debug)]
pub struct Shortage {
    /// The reason, for callers that are refused.
    pub why: String,
    /// Redis has no memory left.
    pub is_full: bool,
}

#[derive(Default)]
struct Known {
    shortage: Option<Shortage>,
    closed: HashSet<QueueName>,
    unfinished: HashMap<QueueName, u64>,
    /// When the oldest task came that waits in SQL.
    oldest: HashMap<QueueName, i64>,
    /// Names with unfinished tasks, an open shard, or tasks that were let in just now.
    names: HashSet<QueueName>,
    let_in: HashMap<QueueName, Instant>,
}

impl Gates {
    fn read(&self) -> RwLockReadGuard<'_, Known> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Known> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn close(&self, queue: &QueueName) {
        if !self.read().closed.contains(queue) {
            tracing::info!(%queue, "queue {queue} is full: new tasks stay in SQL until there is room");
            self.write().closed.insert(queue.clone());
        }
    }

    pub fn open(&self, queue: &QueueName) {
        self.write().closed.remove(queue);
    }

    /// Another process may have parked tasks, or released the last.
    pub fn follow(&self, parked: &[QueueName]) {
        parked.iter().for_each(|queue| self.close(queue));
        self.write().closed.retain(|queue| parked.contains(queue));
    }

    pub fn is_closed(&self, queue: &QueueName) -> bool {
        let known = self.read();
        known.shortage.is_some() || known.closed.contains(queue)
    }

    pub fn set_shortage(&self, shortage: Option<Shortage>) {
        self.write().shortage = shortage;
    }

    pub fn shortage(&self) -> Option<Shortage> {
        self.read().shortage.clone()
    }

    /// Whether Redis has little memory left.
    pub fn is_short(&self) -> bool {
        self.read().shortage.is_some()
    }

    pub fn closed(&self) -> Vec<QueueName> {
        self.read().closed.iter().cloned().collect()
    }

    /// Takes over the counts of SQL, and the queues that have an open shard.
    pub(super) fn set_names(&self, unfinished: HashMap<QueueName, u64>, open: impl Iterator<Item = QueueName>) {
        let mut known = self.write();
        let mut names: HashSet<_> = open.chain(unfinished.keys().cloned()).collect();
        known.let_in.retain(|queue, at| at.elapsed() < LET_IN && !names.contains(queue));
        names.extend(known.let_in.keys().cloned());
        (known.unfinished, known.names) = (unfinished, names);
    }

    pub(super) fn set_oldest(&self, oldest: HashMap<QueueName, i64>) {
        self.write().oldest = oldest;
    }

    /// How many unfinished tasks each queue has that has any, as of half a second ago.
    pub fn unfinished(&self) -> HashMap<QueueName, u64> {
        self.read().unfinished.clone()
    }

    /// When the oldest task of each queue came that waits in SQL, as of two seconds ago.
    pub fn oldest(&self) -> HashMap<QueueName, i64> {
        self.read().oldest.clone()
    }

    /// Whether tasks may go to a queue of this name: it is there, or there are fewer than `max` others. One with
    /// settings of its own is always let in.
    pub fn lets_in(&self, queue: &QueueName, max: usize, queues: &Queues) -> bool {
        if self.read().names.contains(queue) {
            return true;
        }
        let mut known = self.write();
        if known.names.len() >= max && !known.names.contains(queue) && !queues.named.contains_key(queue) {
            return false;
        }
        known.names.insert(queue.clone());
        known.let_in.insert(queue.clone(), Instant::now());
        true
    }

    /// Takes room for `count` new tasks; false when the queue has its `max_unfinished`.
    pub fn admit(&self, queue: &QueueName, count: u64, queues: &Queues) -> bool {
        let mut known = self.write();
        let unfinished = known.unfinished.entry(queue.clone()).or_default();
        if *unfinished >= queues.get(queue).max_unfinished {
            return false;
        }
        *unfinished += count;
        true
    }

    /// Takes room for `count` tasks that may be new; false when there is not so much, and then none is taken.
    pub fn admit_all(&self, queue: &QueueName, count: u64, queues: &Queues) -> bool {
        let mut known = self.write();
        let unfinished = known.unfinished.entry(queue.clone()).or_default();
        if unfinished.saturating_add(count) > queues.get(queue).max_unfinished {
            return false;
        }
        *unfinished += count;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(name: &str) -> QueueName {
        QueueName::new(name).unwrap()
    }

    #[test]
    fn names_beyond_the_bound_are_not_let_in() {
        let (gates, mut queues) = (Gates::default(), Queues::default());
        queues.named.insert(queue("named"), queues.default.clone());
        gates.set_names([(queue("busy"), 1)].into(), [queue("open"), queue("busy")].into_iter());
        for name in ["busy", "open", "new", "new", "named"] {
            assert!(gates.lets_in(&queue(name), 3, &queues), "{name}");
        }
        assert!(!gates.lets_in(&queue("beyond"), 3, &queues));
        // A name that was let in counts until SQL has it or the time is over; one that has gone makes room.
        gates.set_names(HashMap::new(), [queue("open")].into_iter());
        assert!(!gates.lets_in(&queue("beyond"), 3, &queues));
        gates.write().let_in.clear();
        gates.set_names([(queue("new"), 1)].into(), [queue("open")].into_iter());
        assert!(gates.lets_in(&queue("beyond"), 3, &queues));
    }

    #[test]
    fn room_is_taken_once() {
        let (gates, mut queues) = (Gates::default(), Queues::default());
        queues.default.max_unfinished = 10;
        gates.set_names([(queue("q"), 7)].into(), std::iter::empty());
        assert!(gates.admit_all(&queue("q"), 2, &queues));
        assert!(!gates.admit_all(&queue("q"), 2, &queues));
        assert!(gates.admit_all(&queue("q"), 1, &queues));
        assert!(!gates.admit(&queue("q"), 1, &queues));
    }
}
