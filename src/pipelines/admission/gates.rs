//! Gates between SQL and the bus: a closed gate keeps new tasks in SQL.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::RwLock;

use crate::model::{LimitHash, QueueName, TaskRow, limit_hash};

/// How long the database counts as full after it has refused an insert. The time is limited because
/// only another insert can show that there is space again.
const FULL_FOR: Duration = Duration::from_secs(10);

/// For how long new tasks of a crowded limit key stay in SQL without asking its shard.
const CROWDED_FOR: Duration = Duration::from_secs(1);
/// The most crowded limit keys that a process remembers. The shards are asked about others.
const CROWDED_KEYS: usize = 100_000;

/// One gate per queue. Clones share them.
///
/// A closed gate parks new tasks in SQL. The watchdog opens it when no task is parked any more, so
/// that new tasks do not overtake parked ones for ever. A gate is only a hint: the fanout parks a
/// task that meets a full queue.
#[derive(Clone, Default)]
pub struct Gates(Arc<RwLock<Closed>>);

/// A Redis with little memory left. It closes all gates, and discovery refuses inserts.
#[derive(Clone, Debug)]
pub struct Shortage {
    /// The reason given to callers that are refused.
    pub why: String,
    /// Redis has no memory left.
    pub is_full: bool,
}

#[derive(Default)]
struct Closed {
    shortage: Option<Shortage>,
    /// Topics of users should lose what all their subscriptions have read.
    logs_are_large: bool,
    /// Why topics of users take no records: Redis needs what is left for tasks.
    logs_shortage: Option<String>,
    /// The bytes that topics of users may take until the next check of memory; `None`: any.
    logs_room: Option<u64>,
    /// When the database last refused new tasks for lack of space, and its message. `None` once it
    /// has stored a task since.
    full_database: Option<(Instant, String)>,
    queues: HashSet<QueueName>,
    /// Limit keys of which enough tasks are in Redis, and until when that counts.
    crowded: HashMap<LimitHash, Instant>,
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

    /// Records that the shards of these limit keys have enough of their tasks.
    pub fn note_crowded(&self, keys: impl IntoIterator<Item = LimitHash>) {
        let now = Instant::now();
        let mut closed = self.0.write();
        for key in keys {
            if closed.crowded.len() >= CROWDED_KEYS {
                closed.crowded.retain(|_, until| now < *until);
                if closed.crowded.len() >= CROWDED_KEYS {
                    return;
                }
            }
            closed.crowded.insert(key, now + CROWDED_FOR);
        }
    }

    /// Whether a new task stays in SQL because enough tasks of its limit key are in Redis.
    pub fn is_crowded(&self, task: &TaskRow) -> bool {
        if task.limit_key.is_empty() {
            return false;
        }
        let closed = self.0.read();
        if closed.crowded.is_empty() {
            return false;
        }
        let until = closed
            .crowded
            .get(&limit_hash(&task.queue, &task.limit_key));
        until.is_some_and(|until| Instant::now() < *until)
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

    pub fn set_logs_large(&self, are_large: bool) {
        self.0.write().logs_are_large = are_large;
    }

    /// Whether Redis has so little memory left that records that are read should leave it.
    pub fn logs_are_large(&self) -> bool {
        self.0.read().logs_are_large
    }

    pub fn set_logs_shortage(&self, why: Option<String>) {
        self.0.write().logs_shortage = why;
    }

    /// Why topics of users take no records, if they are in Redis.
    pub fn logs_shortage(&self) -> Option<String> {
        self.0.read().logs_shortage.clone()
    }

    pub fn set_logs_room(&self, bytes: Option<u64>) {
        self.0.write().logs_room = bytes;
    }

    /// Takes room for a record of a topic of users, if the topics are in Redis. False: what they may
    /// take until the next check of memory is used up. The last record may be larger than what is
    /// left, so that one of any size finds room.
    pub fn take_logs_room(&self, bytes: u64) -> bool {
        if self.0.read().logs_room.is_none() {
            return true;
        }
        let mut gates = self.0.write();
        match &mut gates.logs_room {
            None => true,
            Some(0) => false,
            Some(room) => {
                *room = room.saturating_sub(bytes);
                true
            }
        }
    }

    /// Whether Redis has little memory left.
    pub fn is_short(&self) -> bool {
        self.0.read().shortage.is_some()
    }

    /// Records that the database has no space for new tasks. Closes no gate, because the next
    /// insert may succeed.
    pub fn set_database_full(&self, why: String, now: Instant) {
        self.0.write().full_database = Some((now, why));
    }

    /// Records that the database has stored new tasks.
    pub fn clear_database_full(&self) {
        if self.0.read().full_database.is_some() {
            self.0.write().full_database = None;
        }
    }

    /// Returns the message with which the database refused new tasks, if that was in the last ten
    /// seconds and it has stored none since.
    pub fn full_database(&self, now: Instant) -> Option<String> {
        let closed = self.0.read();
        let (at, why) = closed.full_database.as_ref()?;
        (now.saturating_duration_since(*at) < FULL_FOR).then(|| why.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_is_full_until_it_stores_a_task_or_nobody_tries() {
        let gates = Gates::default();
        let now = Instant::now();
        assert_eq!(gates.full_database(now), None);
        gates.set_database_full("no room".into(), now);
        assert_eq!(
            gates.full_database(now + FULL_FOR / 2).as_deref(),
            Some("no room")
        );
        assert_eq!(gates.full_database(now + FULL_FOR), None);
        gates.set_database_full("no room".into(), now + FULL_FOR);
        assert!(gates.full_database(now + FULL_FOR).is_some());
        gates.clear_database_full();
        assert_eq!(gates.full_database(now + FULL_FOR), None);
    }
}
