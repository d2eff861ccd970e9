//! The options of a run.

use std::time::Duration;

use crate::{event::Tell, stop::Stop, surplus::Surplus};

pub(crate) struct Options {
    pub(crate) concurrency: usize,
    pub(crate) prefetch: usize,
    pub(crate) lease: Duration,
    pub(crate) time_limit: Duration,
    pub(crate) drain_limit: Duration,
    pub(crate) has_signals: bool,
    pub(crate) stop: Stop,
    pub(crate) tell: Tell,
    /// `None`: the source takes any number of discovered tasks.
    pub(crate) surplus: Option<Surplus>,
}
