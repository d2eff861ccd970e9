//! Trees: a task, its root, and all that is discovered from it.

use std::time::Duration;

use crate::{duration::proto, pb};

/// A new tree, for its root. taskd tells when all that came out of the root is over.
///
/// ```
/// # use {std::time::Duration, taskd_client::{NewTask, NewTree}};
/// let tree = NewTree::new().then("reports").timeout(Duration::from_secs(3600));
/// let root = NewTask::new("crawl", "https://example.org/").new_tree(tree);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[must_use]
pub struct NewTree(pb::TaskTree);

impl NewTree {
    /// A tree that only counts.
    pub fn new() -> Self {
        Self::default()
    }

    /// When the tree has ended, this queue gets one task, whose payload is its counts in JSON.
    pub fn then(self, queue: impl Into<String>) -> Self {
        Self(pb::TaskTree {
            then: queue.into(),
            ..self.0
        })
    }

    /// All tasks of the tree must be completed within this time; otherwise they are dead then.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self(pb::TaskTree {
            timeout: Some(proto(timeout)),
            ..self.0
        })
    }

    /// The tree is done, whatever became of its tasks.
    pub fn ignore_dead(self) -> Self {
        self.on_dead(pb::TreeOnDead::Ignore)
    }

    /// A dead task keeps the tree open until it is sent again or purged.
    pub fn hold_on_dead(self) -> Self {
        self.on_dead(pb::TreeOnDead::Hold)
    }

    fn on_dead(self, on_dead: pb::TreeOnDead) -> Self {
        Self(pb::TaskTree {
            on_dead: on_dead.into(),
            ..self.0
        })
    }
}

impl From<NewTree> for pb::TaskTree {
    fn from(tree: NewTree) -> Self {
        tree.0
    }
}
