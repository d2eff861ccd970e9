//! The queues that there are, and what each holds.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
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
    /// How often SQL said the counts.
    readings: u64,
    /// When the oldest task came that waits in SQL.
    oldest: HashMap<QueueName, i64>,
    /// Names with unfinished tasks, with an open shard, or let in a moment ago.
    names: HashSet<QueueName>,
    let_in: HashMap<QueueName, Instant>,
}

/// Room for tasks that may be new. Dropped, it gives back that of the tasks that were not.
pub struct Room {
    of: Occupancy,
    reading: u64,
    left: BTreeMap<QueueName, u64>,
}

impl Room {
    /// A task of this queue is stored as new.
    pub fn keep(&mut self, queue: &QueueName) {
        if let Some(left) = self.left.get_mut(queue) {
            *left = left.saturating_sub(1);
        }
    }
}

/// Gives back what is left, unless SQL has said the counts meanwhile, in which it is not.
impl Drop for Room {
    fn drop(&mut self) {
        if self.left.values().all(|left| *left == 0) {
            return;
        }
        let mut known = self.of.0.write();
        if known.readings != self.reading {
            return;
        }
        for (queue, left) in &self.left {
            if let Some(unfinished) = known.unfinished.get_mut(queue) {
                *unfinished = unfinished.saturating_sub(*left);
            }
        }
    }
}

impl Occupancy {
    /// Takes over the counts of SQL, and the queues that have an open shard.
    pub(super) fn set_names(&self, unfinished: HashMap<QueueName, u64>, open: impl Iterator<Item = QueueName>) {
        let mut known = self.0.write();
        let mut names: HashSet<_> = open.chain(unfinished.keys().cloned()).collect();
        known.let_in.retain(|queue, at| at.elapsed() < LET_IN && !names.contains(queue));
        names.extend(known.let_in.keys().cloned());
        (known.unfinished, known.names) = (unfinished, names);
        known.readings += 1;
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

    /// Takes room for so many tasks of each queue. Takes none, and answers the queue, where one has its
    /// `max_unfinished`.
    pub fn admit(&self, tasks: BTreeMap<QueueName, u64>, queues: &Queues) -> Result<Room, QueueName> {
        let mut known = self.0.write();
        let is_full = |queue: &QueueName| {
            known.unfinished.get(queue).is_some_and(|count| *count >= queues.get(queue).max_unfinished)
        };
        if let Some(full) = tasks.keys().find(|queue| is_full(queue)) {
            return Err(full.clone());
        }
        for (queue, count) in &tasks {
            *known.unfinished.entry(queue.clone()).or_default() += count;
        }
        Ok(Room { of: self.clone(), reading: known.readings, left: tasks })
    }

    /// Takes room for `count` tasks that may be new. Takes none and answers false when there is not enough for all.
    pub fn admit_all(&self, queue: &QueueName, count: u64, queues: &Queues) -> bool {
        let mut known = self.0.write();
        let unfinished = known.unfinished.entry(queue.clone()).or_default();
        let has_room = unfinished.saturating_add(count) <= queues.get(queue).max_unfinished;
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
        assert!(occupancy.admit([(queue("q"), 1)].into(), &queues).is_err());
    }

    #[test]
    fn room_of_tasks_that_were_not_stored_comes_back() {
        let (occupancy, mut queues) = (Occupancy::default(), Queues::default());
        queues.default.max_unfinished = 10;
        let admit = |tasks: &[(&str, u64)]| {
            occupancy.admit(tasks.iter().map(|(name, count)| (queue(name), *count)).collect(), &queues)
        };
        let unfinished = |name: &str| occupancy.unfinished().get(&queue(name)).copied();
        let mut room = admit(&[("q", 9)]).ok().unwrap();
        assert_eq!(unfinished("q"), Some(9));
        room.keep(&queue("q"));
        drop(room);
        assert_eq!(unfinished("q"), Some(1), "eight were known before");
        // A call that is refused for one queue takes no room of another.
        occupancy.set_names([(queue("full"), 10)].into(), std::iter::empty());
        assert_eq!(admit(&[("a", 5), ("full", 1)]).err(), Some(queue("full")));
        assert_eq!(unfinished("a"), None);
        // SQL has counted again meanwhile.
        let room = admit(&[("a", 5)]).ok().unwrap();
        occupancy.set_names([(queue("a"), 3)].into(), std::iter::empty());
        drop(room);
        assert_eq!(unfinished("a"), Some(3));
    }
}
