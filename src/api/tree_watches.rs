//! The trees that callers of this process watch.
//!
//! SQL alone says when a tree has ended. However many callers wait for trees, a process reads each
//! of these trees once in a while, and several in one statement.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::model::{TaskId, TreeView};

/// The trees that callers watch. Clones share them.
#[derive(Clone, Default)]
pub struct TreeWatches(Arc<Watched>);

#[derive(Default)]
struct Watched {
    /// Each lives as long as somebody watches it. `Waits` bounds the number of callers, and of the
    /// tasks whose trees inserts wait for.
    trees: Mutex<HashMap<TaskId, watch::Sender<TreeView>>>,
    /// Somebody has begun to watch a tree.
    begun: Notify,
}

impl TreeWatches {
    /// Watches a tree, which the caller has just read. What is received is closed if the tree is
    /// removed.
    pub(super) fn watch(&self, tree: &TreeView) -> watch::Receiver<TreeView> {
        let mut trees = self.0.trees.lock();
        let sender = trees
            .entry(tree.id)
            .or_insert_with(|| watch::Sender::new(tree.clone()));
        let receiver = sender.subscribe();
        drop(trees);
        self.0.begun.notify_one();
        receiver
    }

    /// Waits until somebody begins to watch a tree.
    pub(super) async fn begun(&self) {
        self.0.begun.notified().await;
    }

    /// The trees that are watched now. Forgets the others.
    pub(super) fn watched(&self) -> Vec<TaskId> {
        let mut trees = self.0.trees.lock();
        trees.retain(|_, sender| sender.receiver_count() > 0);
        trees.keys().copied().collect()
    }

    /// Passes on what SQL says of these trees.
    pub(super) fn tell(&self, asked: &[TaskId], read: Vec<TreeView>) {
        let mut read: HashMap<TaskId, TreeView> =
            read.into_iter().map(|tree| (tree.id, tree)).collect();
        let mut trees = self.0.trees.lock();
        for id in asked {
            match read.remove(id) {
                Some(tree) => {
                    if let Some(sender) = trees.get(id) {
                        sender.send_if_modified(|known| {
                            let is_news = *known != tree;
                            *known = tree;
                            is_news
                        });
                    }
                }
                // Retention has removed it.
                None => drop(trees.remove(id)),
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
        let mut watching = watches.watch(&TreeView {
            id: TaskId(first.id.0),
            ..first.clone()
        });
        let id = first.id;
        assert_eq!(watches.watched(), [id]);
        watches.tell(&[id], vec![first.clone()]);
        assert!(!watching.has_changed().unwrap(), "it is as it was");
        let next = TreeView { id, ..tree(2) };
        watches.tell(&[id], vec![next.clone()]);
        assert_eq!(*watching.borrow_and_update(), next);
        watches.tell(&[id], Vec::new());
        assert!(watching.has_changed().is_err(), "nobody will tell more");
        drop(watching);
        let watching = watches.watch(&first);
        drop(watching);
        assert!(watches.watched().is_empty());
    }
}
