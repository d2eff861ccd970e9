//! A step that runs before a transaction commits which changes the status of tasks.

use std::future::Future;

use crate::{
    model::{QueueName, StoredStatus, TaskId, TaskRow},
    store::{Result, sql::session::Session},
};

/// A task whose status a transaction changes.
pub(crate) enum StatusChange<'a> {
    /// The task is new, and unfinished.
    Added(&'a TaskRow),
    /// The task ended, or came back: it was final before.
    ///
    /// A task that is unfinished before and after begins another epoch.
    Moved {
        id: TaskId,
        queue: &'a QueueName,
        from: StoredStatus,
        to: StoredStatus,
    },
    /// The task was final, and its row is gone.
    Removed {
        #[expect(dead_code, reason = "no step needs it yet")]
        id: TaskId,
        #[expect(dead_code, reason = "no step needs it yet")]
        status: StoredStatus,
    },
}

/// A step: collects what it needs while the transaction goes on, and stores it at the end.
pub(crate) trait Step: Send {
    /// Takes note of a change. Called once for each change, whether or not the step needs it.
    fn hear(&mut self, change: &StatusChange<'_>);

    /// Writes what the step has collected. Every other row of the transaction is written before.
    fn store<S: Session>(self, session: &mut S) -> impl Future<Output = Result<()>> + Send;
}
