//! The trees and the executions that callers of this process wait for.

use std::{collections::HashMap, hash::Hash, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::model::{ExecutionId, ExecutionStatus, TaskId, TreeView};

pub type TreeWatches = Watches<TaskId, TreeView>;
pub type ExecutionWatches = Watches<ExecutionId, ExecutionStatus>;

/// What callers watch: by an id, what SQL said last. Clones share it.
pub struct Watches<K, V>(Arc<Watched<K, V>>);

struct Watched<K, V> {
    /// Each lives as long as somebody watches it. `Waits` bounds the number of callers, and of the
    /// tasks whose trees inserts wait for.
    known: Mutex<HashMap<K, watch::Sender<V>>>,
    /// Somebody has begun to watch something.
    begun: Notify,
}

impl<K, V> Clone for Watches<K, V> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K, V> Default for Watches<K, V> {
    fn default() -> Self {
        Self(Arc::new(Watched {
            known: Mutex::default(),
            begun: Notify::new(),
        }))
    }
}

impl<K: Copy + Eq + Hash, V: PartialEq> Watches<K, V> {
    /// Watches what the caller has just read. What is received is closed if it is removed.
    pub(super) fn watch(&self, id: K, read: V) -> watch::Receiver<V> {
        let mut known = self.0.known.lock();
        let sender = known.entry(id).or_insert_with(|| watch::Sender::new(read));
        let receiver = sender.subscribe();
        drop(known);
        self.0.begun.notify_one();
        receiver
    }

    /// Waits until somebody begins to watch something.
    pub(super) async fn begun(&self) {
        self.0.begun.notified().await;
    }

    /// What is watched now. Forgets all else.
    pub(super) fn watched(&self) -> Vec<K> {
        let mut known = self.0.known.lock();
        known.retain(|_, sender| sender.receiver_count() > 0);
        known.keys().copied().collect()
    }

    /// Passes on what SQL says of these.
    pub(super) fn tell(&self, asked: &[K], read: impl IntoIterator<Item = (K, V)>) {
        let mut read: HashMap<K, V> = read.into_iter().collect();
        let mut known = self.0.known.lock();
        for id in asked {
            match read.remove(id) {
                Some(read) => {
                    if let Some(sender) = known.get(id) {
                        sender.send_if_modified(|known| {
                            let is_news = *known != read;
                            *known = read;
                            is_news
                        });
                    }
                }
                // Retention has removed it.
                None => drop(known.remove(id)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{QueueName, TreeOnDead, TreeState};

    fn tree(open: u64) -> TreeView {
        TreeView {
            id: TaskId::at(1_000, 0),
            queue: QueueName::new("q").unwrap(),
            state: TreeState::Open,
            epoch: 0,
            tasks: 3,
            open,
            held: 0,
            completed: 3 - open,
            dead: 0,
            cancelled: 0,
            letters: 0,
            late: 0,
            joins: 0,
            cancelling: false,
            on_dead: TreeOnDead::Count,
            then: None,
            deadline_unix_ms: None,
            opened_unix_ms: 1_000,
            ended_unix_ms: None,
        }
    }

    #[test]
    fn watchers_hear_of_changes_and_of_the_removal() {
        let watches = TreeWatches::default();
        let first = tree(3);
        let id = first.id;
        let mut watching = watches.watch(id, first.clone());
        assert_eq!(watches.watched(), [id]);
        watches.tell(&[id], [(id, first.clone())]);
        assert!(!watching.has_changed().unwrap(), "it is as it was");
        let next = TreeView { id, ..tree(2) };
        watches.tell(&[id], [(id, next.clone())]);
        assert_eq!(*watching.borrow_and_update(), next);
        watches.tell(&[id], []);
        assert!(watching.has_changed().is_err(), "nobody will tell more");
        drop(watching);
        let watching = watches.watch(id, first);
        drop(watching);
        assert!(watches.watched().is_empty());
    }
}
