//! Retries of a whole transaction, on another connection, after a conflict or a server's restart.
//!
//! The crash window: when a connection breaks during COMMIT, nobody knows whether it took effect. The retry then meets
//! its own work. Each operation is made so that this changes nothing, except that `add_turned_away` counts twice:
//!
//! - `insert`: a row whose id is stored is `New` again, never a duplicate of itself. It is neither counted nor put into
//!   a batch or the outbox again. The answer names another batch than the one that was stored, so the mark gives each
//!   task an offset of its own.
//! - `settle`: the reports are `repeated`. Their discovered tasks are in a batch, where the watchdog finds them.
//! - `mark_published`: the batch is marked with these offsets, the rows have left the outbox, and the offsets are the
//!   same.
//! - `unpublish`: the row gets a new turn. At worst the task is published once more, and the queue knows it.
//! - `remove_finished`, and all that removes old rows: the rows are gone, and the answer does not count them. The
//!   watchdog goes on at its next turn.
//! - `purge`: the rows are gone, and the answer is the greatest number of an attempt.
//! - `retry`: the acts of the first attempt are recorded, so that its tasks are answered as sent again.
//! - `add_token`, `revoke_token`, `pause`, `resume`: the act is recorded, and the answer is the same.
//! - `keep_letters`, `keep_failures`, `keep_acts`: each has its id, and is kept once.
//! - `want_change`: the wish is kept in another turn. A task that was reopened is unfinished, and gets a wish, too.
//! - `end_changes`: the tasks have ended already, and the answer has their status.
//! - `due_deadlines`: the page is not due any more, so none is answered. It is due again a little later.
//! - `replace_holder`: the answer is no, and the caller reads the holder again.
//! - `begin_rebuild`, `close_shard`: the generation is raised, or the shard closed, already.
//! - `end_rebuild`: the shard is not being rebuilt any more.
//! - `open_shards`: the shard is open already, so that nobody opens it in Redis. The watchdog finds it lost and opens
//!   it.
//! - `remove_batches`: they are gone.
//! - `add_job`, `advance_job`, `stop_job`: the job is there, has advanced or has ended already. The answer to
//!   `advance_job` is then no, and the caller reads the job again.
//! - `bring_forward`: the rows are due already.

use std::{future::Future, time::Duration};

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::time::Instant;

use crate::{
    store::{Cause, Error, Result},
    telemetry::metrics,
};

/// The time for retries: longer than a server takes to restart, shorter than what `/readyz` calls a stall.
const RETRY_FOR: Duration = Duration::from_secs(20);
/// The longest that a call takes, also when the server has accepted it and falls silent.
const PATIENCE: Duration = Duration::from_secs(60);

/// Repeats `attempt` while another one may help: after a conflict, or while the server is away.
///
/// A caller that got no connection because all are in use has waited enough.
pub(super) async fn repeating<T, Fut>(operation: &'static str, mut attempt: impl FnMut() -> Fut) -> Result<T>
where
    Fut: Future<Output = Result<T>>,
{
    let began = Instant::now();
    let mut last: Cause = "no answer".into();
    let repeated = async {
        for pause in pauses() {
            match attempt().await {
                Err(Error::Transient(cause)) if began.elapsed() < RETRY_FOR => last = cause,
                Err(Error::Transient(cause)) => return Err(Error::GaveUp { after: began.elapsed(), cause }),
                done => return done,
            }
            metrics::sql_retry(operation);
            tokio::time::sleep(pause).await;
        }
        unreachable!("the pauses have no end")
    };
    match tokio::time::timeout(PATIENCE, repeated).await {
        Ok(done) => done,
        Err(_) => Err(Error::GaveUp { after: PATIENCE, cause: last }),
    }
}

fn pauses() -> impl Iterator<Item = Duration> + Send {
    let pauses =
        ExponentialBuilder::new().with_min_delay(Duration::from_millis(10)).with_max_delay(Duration::from_secs(1));
    pauses.without_max_times().with_jitter().build()
}
