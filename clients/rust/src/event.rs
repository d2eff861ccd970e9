//! The events of a worker, and its summary.

use std::{sync::Arc, time::Duration};

use crate::{error::Error, task::TaskInfo};

pub(crate) type Tell = Arc<dyn Fn(Event<'_>) + Send + Sync>;

/// An event of a worker, for logs and progress.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A handler begins.
    Started(&'a TaskInfo),
    /// taskd has answered the report of a task, or the worker lost it.
    Ended {
        /// The task.
        task: &'a TaskInfo,
        /// How it ended.
        ended: Ended,
        /// Why it did not end well; else empty.
        reason: &'a str,
        /// How long the handler ran; `None`: it never began.
        took: Option<Duration>,
    },
    /// A call failed; the worker tries again.
    Away(&'a Error),
    /// The worker takes no more tasks; so many are in its hands.
    Draining(usize),
}

/// How a task left the hands of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Completed, and credited to the worker.
    Completed,
    /// Rejected: the attempt failed.
    Rejected,
    /// Given back because the worker stopped, or before the handler had begun with it.
    GivenBack,
    /// The lease was lost, or the task ended in another way: cancelled, or completed by others.
    Lost,
}

/// The outcome of a run: how many tasks ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Tasks that taskd credited.
    pub completed: u64,
    /// Attempts that failed.
    pub rejected: u64,
    /// Tasks given back at the stop, or before the handler had begun with them.
    pub given_back: u64,
    /// Tasks that this worker lost, or finished in vain.
    pub lost: u64,
    /// Tasks that it finished, and whose reports taskd had not answered at the end: other workers may do them again.
    pub unreported: u64,
}
