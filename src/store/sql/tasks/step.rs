//! A step that runs just before the commit of a transaction that changes the status of tasks.

use std::future::Future;

use crate::{
    model::{ExecutionId, QueueName, StoredStatus, TaskId, TaskRow},
    store::{Result, sql::session::Session},
};

/// A status change of a task in a transaction.
pub(crate) enum StatusChange<'a> {
    /// A new, unfinished task.
    Added(&'a TaskRow),
    /// The task ended, or a final task became unfinished again.
    ///
    /// If it is unfinished before and after, it begins another epoch.
    Moved {
        id: TaskId,
        queue: &'a QueueName,
        from: StoredStatus,
        to: StoredStatus,
        /// The tree of the task, if it is in one, and when its status changes.
        tree: Option<(InTree, i64)>,
        /// The execution that the task is a step of, and when its status changes.
        step_of: Option<(ExecutionId, i64)>,
    },
    /// The task was final, and its row is removed.
    Removed {
        id: TaskId,
        status: StoredStatus,
        tree: Option<InTree>,
    },
}

/// Where a task is in a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InTree {
    pub(crate) tree: TaskId,
    /// The innermost subtree that it is in.
    pub(crate) subtree: Option<TaskId>,
}

/// A step: collects what it needs during the transaction, and stores it at the end.
pub(crate) trait Step: Send {
    /// Records a change. Called once for each change, whether or not the step needs it.
    fn hear(&mut self, change: &StatusChange<'_>);

    /// Stores what the step has collected. All other rows of the transaction have been written by
    /// then.
    fn store<S: Session>(self, session: &mut S) -> impl Future<Output = Result<()>> + Send;
}
