//! Trees of tasks, as readers and operators see them. What counts them is in [`super::Tasks`].

use std::time::Duration;

use async_trait::async_trait;

use super::{AddedBulk, Result};
use crate::model::{Act, BulkChange, QueueName, StoredStatus, TaskId, TreePages, TreeView};

/// How many tasks of a tree [`Trees::tree_counts`] and [`Trees::tree_waits_for`] look at.
pub const TREE_LOOKED_AT: u32 = 100_000;

/// The tasks of a tree in a queue that have a status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeCount {
    pub queue: QueueName,
    pub status: StoredStatus,
    pub count: u64,
}

/// A tree whose row differs from its tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongTree {
    pub id: TaskId,
    /// The queue of its root.
    pub queue: QueueName,
    /// What the row says.
    pub open: u64,
    pub held: u64,
    /// What the tasks say.
    pub counted_open: u64,
    pub counted_held: u64,
    /// How many of its subtrees are counted wrong, or are over and still there.
    pub subtrees: usize,
    /// The row is open, and the tree waits for nothing.
    pub is_over: bool,
}

/// Trees that were compared with their tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ComparedTrees {
    pub wrong: Vec<WrongTree>,
    /// The last tree that was compared, if there may be more.
    pub last: Option<TaskId>,
}

/// Reads trees, and changes them as operators want.
///
/// Every method is one transaction and may be repeated: see [`super::Store`].
#[async_trait]
pub trait Trees: Send + Sync {
    /// A page of trees, newest first.
    async fn trees(&self, pages: &TreePages) -> Result<Vec<TreeView>>;

    /// Those of `ids` that exist, in any order.
    async fn trees_by_id(&self, ids: &[TaskId]) -> Result<Vec<TreeView>>;

    /// The trees of those of these tasks that are in one, as (task, tree), in any order.
    async fn trees_of(&self, tasks: &[TaskId]) -> Result<Vec<(TaskId, TaskId)>>;

    /// Counts the oldest [`TREE_LOOKED_AT`] tasks of a tree that SQL still has. Returns also whether
    /// there are more.
    async fn tree_counts(&self, tree: TaskId) -> Result<(Vec<TreeCount>, bool)>;

    /// The oldest tasks that keep a tree open: unfinished ones, and dead ones if `holds`. Looks at
    /// the oldest [`TREE_LOOKED_AT`] tasks.
    async fn tree_waits_for(&self, tree: TaskId, holds: bool, limit: u32) -> Result<Vec<TaskId>>;

    /// The queues in which a tree has unfinished tasks. Looks at all its tasks.
    async fn queues_of_tree(&self, tree: TaskId) -> Result<Vec<QueueName>>;

    /// Adds the bulk change that cancels the tasks of a tree, as
    /// [`add_bulk_change`](super::Operators::add_bulk_change) does. If it is added, marks the tree as
    /// being cancelled, if it is open, and records `mark`. From then on nothing is added to it, and no
    /// dead task holds it, until a task of it is sent again.
    async fn cancel_tree(
        &self,
        tree: TaskId,
        bulk: &BulkChange,
        most_of_token: u32,
        start: &Act,
        mark: &Act,
    ) -> Result<AddedBulk>;

    /// The number of open trees.
    async fn open_trees(&self) -> Result<u64>;

    /// The numbers of open trees whose roots are in these queues, in any order. Those without any
    /// are left out.
    async fn open_trees_of(&self, queues: &[QueueName]) -> Result<Vec<(QueueName, u64)>>;

    /// Removes at most `limit` trees that ended at least `age` ago by the database's clock and have no
    /// tasks any more, earliest first. Returns how many.
    async fn remove_ended_trees(&self, age: Duration, limit: u32) -> Result<u64>;

    /// Compares the next trees after this one with their tasks: at most `limit` trees, and fewer if
    /// they have many tasks.
    async fn wrong_trees(&self, after: Option<TaskId>, limit: u32) -> Result<ComparedTrees>;

    /// Counts the tasks of a tree again. Ends it if it is open and waits for nothing, or opens it
    /// again if it has ended and waits for something.
    async fn correct_tree(&self, tree: TaskId) -> Result<()>;
}
