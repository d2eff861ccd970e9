//! The queues that there are, and what each holds.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::RwLock;

use crate::{config::Queues, model::QueueName};

/// How long a name keeps its place before SQL knows a task of it. After that its task was not stored.
const LET_IN: Duration = Duration::from_secs(10);

/// The names and unfinished tasks of the installation, as SQL said last, plus what was let in since. Clones share it.
#[derive(Clone, Default)]
pub struct Occupancy(Arc<RwLock<Known>>);

#[derive(Default)]
struct Known {
    unfinished: HashMap<QueueName, u64>,
    /// When the oldest task came that waits in SQL.
    oldest: HashMap<QueueName, i64>,
    /// Names with unfinished tasks, with an open shard, or let in a moment ago.
    names: HashSet<QueueName>,
    let_in: HashMap<QueueName, Instant>,
}

impl Occupancy {
    /// Takes over the counts of SQL, and the queues that have an open shard.
    pub(super) fn set_names(&self, unfinished: HashMap<QueueName, u64>, open: impl Iterator<Item = QueueName>) {
        let mut known = self.0.write();
        let mut names: HashSet<_> = open.chain(unfinished.keys().cloned()).collect();
        known.let_in.retain(|queue, at| at.elapsed() < LET_IN && !names.contains(queue));
        names.extend(known.let_in.keys().cloned());
        (known.unfinished, known.names) = (unfinished, names);
    }

    pub(super) fn set_oldest(&self, oldest: HashMap<QueueName, i64>) {
        self.0.write().oldest = oldest;
    }

    /// The number of unfinished tasks of each queue that has any. Half a second old at most.
    pub fn unfinished(&self) -> HashMap<QueueName, u64> {
        self.0.read().unfinished.clone()
    }

    /// When the oldest task of each queue came that waits in SQL. Two seconds old at most.
    pub fn oldest(&self) -> HashMap<QueueName, i64> {
        self.0.read().oldest.clone()
    }

    /// Whether the queue has unfinished tasks or an open shard, or was let in a moment ago.
    pub fn knows(&self, queue: &QueueName) -> bool {
        self.0.read().names.contains(queue)
    }

    /// Whether tasks may go to a queue of this name. A known name always passes, and so does one with settings of its
    /// own; a new name passes while there are fewer than `max`.
    pub fn lets_in(&self, queue: &QueueName, max: usize, queues: &Queues) -> bool {
        if self.0.read().names.contains(queue) {
            return true;
        }
        let mut known = self.0.write();
        if known.names.len() >= max && !known.names.contains(queue) && !queues.named.contains_key(queue) {
            return false;
        }
        known.names.insert(queue.clone());
        known.let_in.insert(queue.clone(), Instant::now());
        true
    }

    /// Takes room for `count` new tasks; false when the queue has its `max_unfinished`.
    pub fn admit(&self, queue: &QueueName, count: u64, queues: &Queues) -> bool {
        self.take(queue, count, |unfinished| unfinished < queues.get(queue).max_unfinished)
    }

    /// Takes room for `count` tasks that may be new. Takes none and answers false when there is not enough for all.
    pub fn admit_all(&self, queue: &QueueName, count: u64, queues: &Queues) -> bool {
        self.take(queue, count, |unfinished| unfinished.saturating_add(count) <= queues.get(queue).max_unfinished)
    }

    fn take(&self, queue: &QueueName, count: u64, has_room: impl FnOnce(u64) -> bool) -> bool {
        let mut known = self.0.write();
        let unfinished = known.unfinished.entry(queue.clone()).or_default();
        let has_room = has_room(*unfinished);
        if has_room {
            *unfinished += count;
        }
        has_room
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
        let (occupancy, mut queues) = (Occupancy::default(), Queues::default());
        queues.named.insert(queue("named"), queues.default.clone());
        occupancy.set_names([(queue("busy"), 1)].into(), [queue("open"), queue("busy")].into_iter());
        for name in ["busy", "open", "new", "new", "named"] {
            assert!(occupancy.lets_in(&queue(name), 3, &queues), "{name}");
        }
        assert!(!occupancy.lets_in(&queue("beyond"), 3, &queues));
        // A name counts until SQL has it or its time is over; a name that is gone makes room.
        occupancy.set_names(HashMap::new(), [queue("open")].into_iter());
        assert!(!occupancy.lets_in(&queue("beyond"), 3, &queues));
        occupancy.0.write().let_in.clear();
        occupancy.set_names([(queue("new"), 1)].into(), [queue("open")].into_iter());
        assert!(occupancy.lets_in(&queue("beyond"), 3, &queues));
    }

    #[test]
    fn room_is_taken_once() {
        let (occupancy, mut queues) = (Occupancy::default(), Queues::default());
        queues.default.max_unfinished = 10;
        occupancy.set_names([(queue("q"), 7)].into(), std::iter::empty());
        assert!(occupancy.admit_all(&queue("q"), 2, &queues));
        assert!(!occupancy.admit_all(&queue("q"), 2, &queues));
        assert!(occupancy.admit_all(&queue("q"), 1, &queues));
        assert!(!occupancy.admit(&queue("q"), 1, &queues));
    }
}
