//! The paused queues, as this process knows them. Workers get nothing from them.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::RwLock;

use crate::model::QueueName;

/// The paused queues, and what this process has paused and resumed itself.
#[derive(Default)]
pub(super) struct Pauses(pub(super) RwLock<KnownPauses>);

#[derive(Default)]
pub(super) struct KnownPauses {
    pub(super) paused: BTreeSet<QueueName>,
    /// How often this process has paused or resumed a queue.
    pub(super) changes: u64,
    /// The number of each queue's last change, and whether it paused the queue. Kept until a read
    /// that began after the change.
    own: BTreeMap<QueueName, (u64, bool)>,
}

impl KnownPauses {
    /// Pauses or resumes a queue. Returns whether it was paused before.
    pub(super) fn set(&mut self, queue: &QueueName, is_paused: bool) -> bool {
        self.changes += 1;
        self.own.insert(queue.clone(), (self.changes, is_paused));
        match is_paused {
            true => !self.paused.insert(queue.clone()),
            false => self.paused.remove(queue),
        }
    }

    /// Takes over the result of a read that began after this number of changes. Later changes stay,
    /// because the read may have missed them. Returns what was paused before, and what is paused
    /// now.
    pub(super) fn read(
        &mut self,
        mut queues: BTreeSet<QueueName>,
        changes: u64,
    ) -> (BTreeSet<QueueName>, BTreeSet<QueueName>) {
        self.own.retain(|_, (change, _)| *change > changes);
        for (queue, (_, is_paused)) in &self.own {
            match is_paused {
                true => queues.insert(queue.clone()),
                false => queues.remove(queue),
            };
        }
        let before = std::mem::replace(&mut self.paused, queues.clone());
        (before, queues)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(names: &[&str]) -> BTreeSet<QueueName> {
        names
            .iter()
            .map(|name| QueueName::new(name).unwrap())
            .collect()
    }

    /// As when a call pauses or resumes a queue while the pauses are read.
    #[test]
    fn a_read_undoes_no_change_that_came_after_its_beginning() {
        let mut known = KnownPauses::default();
        known.read(queues(&["old", "other"]), 0);
        let begun = known.changes;
        for (queue, is_paused) in [("new", true), ("old", false)] {
            let queue = QueueName::new(queue).unwrap();
            assert_eq!(known.set(&queue, is_paused), !is_paused);
        }
        let (before, now) = known.read(queues(&["old", "other"]), begun);
        assert_eq!(
            (before, now),
            (queues(&["new", "other"]), queues(&["new", "other"]))
        );
        // A read that began later counts, because another process may have changed them again.
        let begun = known.changes;
        known.read(queues(&["old"]), begun);
        assert_eq!(known.paused, queues(&["old"]));
        assert!(known.own.is_empty());
    }
}
