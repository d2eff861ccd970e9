//! The boundary between a worker and where its tasks come from.

use std::{
    future::{Future, pending, ready},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

use crate::{error::Error, pb};

/// The minimum duration of a call that returns no tasks. It prevents a busy loop if taskd does not
/// wait, because it is about to stop or was not asked to.
const SHORTEST_ROUND: Duration = Duration::from_millis(100);

/// A lease that ended: its token, and taskd's result for it.
pub type EndedLease = (String, pb::ItemResult);

/// Delivers tasks to one worker and receives its reports. Each call may be repeated.
///
/// After an error that [may pass](Error::may_pass) the worker retries; any other error ends it.
pub trait Source: Send + Sync + 'static {
    /// Returns up to `most` tasks, an empty list if there are none for a while, or `None` if no
    /// more tasks will come.
    fn get(
        &self,
        most: usize,
    ) -> impl Future<Output = Result<Option<Vec<pb::LeasedTask>>, Error>> + Send;

    /// Reports tasks as completed. The answers are in the order of the completions; the same
    /// applies to `complete_and_get`, `reject` and `extend`.
    fn complete(
        &self,
        all: Vec<pb::Completion>,
    ) -> impl Future<Output = Result<Vec<pb::ItemResult>, Error>> + Send;

    /// True if [`Self::complete_and_get`] can return tasks.
    fn brings_tasks(&self) -> bool {
        false
    }

    /// Reports tasks as completed, and leases up to `most` further ones that are available. The
    /// worker does not call `get` at the same time. If it drops this call, or gets an error, it
    /// falls back to [`Self::complete`]. By default, this leases no tasks.
    fn complete_and_get(
        &self,
        all: Vec<pb::Completion>,
        _most: usize,
    ) -> impl Future<Output = Result<(Vec<pb::ItemResult>, Vec<pb::LeasedTask>), Error>> + Send
    {
        async { Ok((self.complete(all).await?, Vec::new())) }
    }

    /// Rejects tasks.
    fn reject(
        &self,
        all: Vec<pb::Rejection>,
    ) -> impl Future<Output = Result<Vec<pb::ItemResult>, Error>> + Send;

    /// Moves the deadlines of leases.
    fn extend(
        &self,
        all: Vec<pb::Extension>,
    ) -> impl Future<Output = Result<Vec<pb::ItemResult>, Error>> + Send;

    /// Gives back tasks that the worker has not started, which costs no attempt. `not_started` is
    /// set in them. By default, this rejects them.
    fn give_back(
        &self,
        all: Vec<pb::Rejection>,
    ) -> impl Future<Output = Result<Vec<pb::ItemResult>, Error>> + Send {
        self.reject(all)
    }

    /// Sets how many tasks the worker can take from now on, even while a call of `get` is in
    /// flight.
    fn room(&self, _most: usize) {}

    /// Waits for tasks that arrive while no call of `get` is in flight: they were sent before the
    /// source knew that the worker has no more room. Dropping the future loses no task. By default
    /// it waits forever, for a source that sends tasks only in its answers.
    fn arrived(&self) -> impl Future<Output = Vec<pb::LeasedTask>> + Send {
        pending()
    }

    /// Waits for leases that ended without a report of the worker. By default it waits forever, for
    /// a source that is not notified of them.
    fn ended(&self) -> impl Future<Output = Vec<EndedLease>> + Send {
        pending()
    }

    /// Called when the worker takes no more tasks. Returns the tasks that arrived but were not
    /// returned by `get`; no task arrives afterwards.
    fn drain(&self) -> impl Future<Output = Vec<pb::LeasedTask>> + Send {
        ready(Vec::new())
    }

    /// Called when the worker has sent its last report.
    fn close(&self) -> impl Future<Output = ()> + Send {
        ready(())
    }
}

/// Gets tasks. If there are none, it takes at least [`SHORTEST_ROUND`].
pub(crate) async fn get_round(
    source: &impl Source,
    most: usize,
) -> Result<Option<Vec<pb::LeasedTask>>, Error> {
    let end = Instant::now() + SHORTEST_ROUND;
    let got = source.get(most).await;
    if matches!(&got, Ok(Some(tasks)) if tasks.is_empty()) {
        sleep_until(end).await;
    }
    got
}
