//! A queue, as the service `Operator` sends it.

use super::pb;
use crate::model::OneQueue;

impl From<OneQueue> for pb::Queue {
    fn from(queue: OneQueue) -> Self {
        let OneQueue { view, drained } = queue;
        Self {
            queue: view.queue.as_str().to_owned(),
            pending: view.pending,
            waiting: view.waiting,
            assigned: view.assigned,
            delayed: view.delayed,
            leases: view.leases,
            completed: view.completed,
            dead: view.dead,
            cancelled: view.cancelled,
            oldest_waiting_ms: view.oldest_waiting_ms,
            paused: view.paused,
            unread_shards: view.unread_shards,
            drained,
        }
    }
}
