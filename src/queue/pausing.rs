//! Pauses and resumes queues in this process.

use std::collections::BTreeSet;

use super::shards::Shards;
use crate::model::QueueName;

impl Shards {
    /// Returns whether claims leave out the queue.
    pub fn is_paused(&self, queue: &QueueName) -> bool {
        self.pauses().0.read().paused.contains(queue)
    }

    /// The paused queues, by name.
    pub fn paused(&self) -> Vec<QueueName> {
        self.pauses().0.read().paused.iter().cloned().collect()
    }

    /// How often this process has paused or resumed a queue. Read it before reading the pauses, for
    /// [`Self::pause_only`].
    pub fn pause_changes(&self) -> u64 {
        self.pauses().0.read().changes
    }

    /// Pauses these queues and resumes all others, according to a read that began after this number
    /// of changes. Later changes stay, because the read may have missed them. Wakes the callers
    /// that wait for a queue that is resumed.
    pub fn pause_only(&self, queues: BTreeSet<QueueName>, changes: u64) {
        let (before, now) = self.pauses().0.write().read(queues, changes);
        before
            .difference(&now)
            .for_each(|resumed| self.resumed(resumed));
        now.difference(&before)
            .for_each(|queue| tracing::info!(%queue, "queue {queue} is paused"));
    }

    /// Pauses or resumes one queue at once, before other processes know.
    pub fn set_paused(&self, queue: &QueueName, is_paused: bool) {
        let was_paused = self.pauses().0.write().set(queue, is_paused);
        if was_paused && !is_paused {
            self.resumed(queue);
        }
    }

    fn resumed(&self, queue: &QueueName) {
        tracing::info!(%queue, "queue {queue} is resumed");
        self.shards_of(queue)
            .iter()
            .for_each(|shard| shard.offered());
        self.wakes().wake(queue);
    }
}
