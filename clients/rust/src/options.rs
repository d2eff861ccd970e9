//! The options of a run.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use crate::{
    event::Tell,
    outcome::{Done, Failure},
    stop::Stop,
    surplus::Surplus,
    task::TaskInfo,
};

/// A run of a handler that has not begun, with the hooks inside of another one.
pub type Next = Pin<Box<dyn Future<Output = Result<Done, Failure>> + Send>>;

/// Wraps the run of a handler.
pub(crate) type Around = Arc<dyn Fn(Arc<TaskInfo>, Next) -> Next + Send + Sync>;

pub(crate) struct Options {
    pub(crate) concurrency: usize,
    pub(crate) prefetch: usize,
    pub(crate) lease: Duration,
    pub(crate) time_limit: Duration,
    pub(crate) drain_limit: Duration,
    pub(crate) has_signals: bool,
    pub(crate) stop: Stop,
    pub(crate) tell: Tell,
    /// The first is the outermost.
    pub(crate) around: Vec<Around>,
    /// `None` if the source accepts a completion with any number of discovered tasks.
    pub(crate) surplus: Option<Surplus>,
}
