//! The boundary between a worker and the way its tasks come.

use std::{
    future::{Future, pending, ready},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

use crate::{error::Error, pb};

/// The shortest time for a call that brings nothing: a taskd that is about to stop does not wait,
/// nor does one that is not asked to.
const SHORTEST_ROUND: Duration = Duration::from_millis(100);

/// A lease that ended: its token, and what taskd says.
pub type EndedLease = (String, pb::ItemResult);

/// Gives tasks to one worker and takes its reports. Each call may be repeated.
///
/// An error that [may pass](Error::may_pass) lets the worker try again; any other one ends it.
pub trait Source: Send + Sync + 'static {
    /// Up to `most` tasks; an empty answer after a while without any. `None`: no task will come any
    /// more.
    fn get(
        &self,
        most: usize,
    ) -> impl Future<Output = Result<Option<Vec<pb::LeasedTask>>, Error>> + Send;

    /// Reports tasks as done. The answers are in the order of the completions; so are those of the
    /// next three calls.
    fn complete(
        &self,
        all: Vec<pb::Completion>,
    ) -> impl Future<Output = Result<Vec<pb::ItemResult>, Error>> + Send;

    /// True if [`Self::complete_and_get`] can bring tasks.
    fn brings_tasks(&self) -> bool {
        false
    }

    /// Reports tasks as done, and leases up to `most` others that are there. The worker makes no
    /// call of `get` meanwhile. It may drop this call, and calls [`Self::complete`] then; so it
    /// does after an error. By default it leases none.
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

    /// Gives back tasks that the worker has not started, at no cost. By default it rejects them;
    /// `not_started` is set.
    fn give_back(
        &self,
        all: Vec<pb::Rejection>,
    ) -> impl Future<Output = Result<Vec<pb::ItemResult>, Error>> + Send {
        self.reject(all)
    }

    /// Says how many tasks the worker has room for from now on, also while a call of `get` is under
    /// way.
    fn room(&self, _most: usize) {}

    /// Waits for leases that ended although the worker has not reported them. A source may know
    /// none: by default it waits for ever.
    fn ended(&self) -> impl Future<Output = Vec<EndedLease>> + Send {
        pending()
    }

    /// The worker takes no more. The answer has the tasks that came and that no `get` has given; no
    /// task comes behind.
    fn drain(&self) -> impl Future<Output = Vec<pb::LeasedTask>> + Send {
        ready(Vec::new())
    }

    /// The worker has reported all that it will.
    fn close(&self) -> impl Future<Output = ()> + Send {
        ready(())
    }
}

/// Gets tasks, and lets time pass if there are none.
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
