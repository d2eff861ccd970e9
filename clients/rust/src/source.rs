//! The boundary between a worker and the way its tasks come.

use std::future::Future;

use crate::{error::Error, pb};

/// Gives tasks to one worker and takes its reports. Each call may be repeated.
///
/// An error that [may pass](Error::may_pass) lets the worker try again; any other one ends it.
pub trait Source: Send + Sync + 'static {
    /// Up to `most` tasks; an empty answer after a while without any. `None`: no task will come any more.
    fn get(&self, most: usize) -> impl Future<Output = Result<Option<Vec<pb::LeasedTask>>, Error>> + Send;

    /// Reports tasks as done. The answers are in the order of the completions; so are those of the next two calls.
    fn complete(&self, all: Vec<pb::Completion>) -> impl Future<Output = Result<Vec<pb::ItemResult>, Error>> + Send;

    /// Rejects tasks.
    fn reject(&self, all: Vec<pb::Rejection>) -> impl Future<Output = Result<Vec<pb::ItemResult>, Error>> + Send;

    /// Moves the deadlines of leases.
    fn extend(&self, all: Vec<pb::Extension>) -> impl Future<Output = Result<Vec<pb::ItemResult>, Error>> + Send;
}
