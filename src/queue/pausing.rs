//! Pauses and resumes queues in this process.

use std::collections::BTreeSet;

use super::shards::Shards;
use crate::model::QueueName;

impl Shards {
    /// Whether claims leave out the queue.
    pub fn is_paused(&self, queue: &QueueName) -> bool {
        self.pauses().0.read().contains(queue)
    }

    /// The paused queues, by name.
    pub fn paused(&self) -> Vec<QueueName> {
        self.pauses().0.read().iter().cloned().collect()
    }

    /// Pauses these queues and resumes all others. Wakes the callers that wait for a queue that is resumed.
    pub fn pause_only(&self, queues: BTreeSet<QueueName>) {
        let before = {
            let mut paused = self.pauses().0.write();
            if *paused == queues {
                return;
            }
            std::mem::replace(&mut *paused, queues.clone())
        };
        before.difference(&queues).for_each(|resumed| self.resumed(resumed));
        queues.difference(&before).for_each(|queue| tracing::info!(%queue, "queue {queue} is paused"));
    }

    /// Pauses or resumes one queue at once, before the others hear of it.
    pub fn set_paused(&self, queue: &QueueName, is_paused: bool) {
        if is_paused {
            self.pauses().0.write().insert(queue.clone());
        } else if self.pauses().0.write().remove(queue) {
            self.resumed(queue);
        }
    }

    fn resumed(&self, queue: &QueueName) {
        tracing::info!(%queue, "queue {queue} is resumed");
        self.shards_of(queue).iter().for_each(|shard| shard.offered());
        self.wakes().wake(queue);
    }
}
