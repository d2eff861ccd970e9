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
use parking_lot::{Mutex, RwLock};
use tokio::time::{Instant, timeout};

use crate::{
    model::in_short,
    store::{Cause, Error, Result},
    telemetry::metrics,
};

/// The time for retries: longer than a server takes to restart, shorter than what `/readyz` calls a stall.
const RETRY_FOR: Duration = Duration::from_secs(20);
/// The longest that a call takes, also when the server has accepted it and falls silent.
const PATIENCE: Duration = Duration::from_secs(60);

/// The time for a call that begins while the server is known to be away. It rides out a short restart all the same.
const PATIENCE_IF_AWAY: Duration = Duration::from_secs(5);

/// Whether the server is known to be away, and why: what the last ping found.
#[derive(Default)]
pub(super) struct Outage(RwLock<Option<String>>);

impl Outage {
    /// Notes the answer to a ping.
    pub(super) fn note(&self, error: Option<&Error>) {
        let why = error.map(|error| in_short(error));
        if self.0.read().is_some() || why.is_some() {
            *self.0.write() = why;
        }
    }

    fn why(&self) -> Option<String> {
        self.0.read().clone()
    }
}

/// Repeats `attempt` while another one may help: after a conflict, or while the server is away.
///
/// A caller that got no connection because all are in use has waited enough. A call that begins during an outage waits
/// a few seconds only, unless the server answers again meanwhile.
pub(super) async fn repeating<T, Fut>(
    operation: &'static str,
    outage: &Outage,
    mut attempt: impl FnMut() -> Fut,
) -> Result<T>
where
    Fut: Future<Output = Result<T>>,
{
    let began = Instant::now();
    let is_away = outage.why().is_some();
    let last: Mutex<Cause> = Mutex::new("no answer".into());
    let repeated = async {
        for pause in pauses() {
            match attempt().await {
                Err(Error::Transient(cause)) if began.elapsed() < RETRY_FOR => *last.lock() = cause,
                Err(Error::Transient(cause)) => return Err(Error::GaveUp { after: began.elapsed(), cause }),
                done => return done,
            }
            metrics::sql_retry(operation);
            tokio::time::sleep(pause).await;
        }
        unreachable!("the pauses have no end")
    };
    let mut repeated = std::pin::pin!(repeated);
    if is_away {
        if let Ok(done) = timeout(PATIENCE_IF_AWAY, &mut repeated).await {
            return done;
        }
        if let Some(why) = outage.why() {
            return Err(Error::GaveUp { after: PATIENCE_IF_AWAY, cause: why.into() });
        }
    }
    let left = PATIENCE.saturating_sub(began.elapsed());
    if let Ok(done) = timeout(left, &mut repeated).await {
        return done;
    }
    let cause = std::mem::replace(&mut *last.lock(), "no answer".into());
    Err(Error::GaveUp { after: PATIENCE, cause })
}

fn pauses() -> impl Iterator<Item = Duration> + Send {
    let pauses =
        ExponentialBuilder::new().with_min_delay(Duration::from_millis(10)).with_max_delay(Duration::from_secs(1));
    pauses.without_max_times().with_jitter().build()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn away() -> Error {
        Error::Transient("connection refused".into())
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_during_an_outage_gives_up_soon_and_others_ride_it_out() {
        let outage = Outage::default();
        let refused = || async { Err::<(), _>(away()) };
        let began = Instant::now();
        let error = repeating("read", &outage, refused).await.unwrap_err();
        assert!(began.elapsed() >= RETRY_FOR, "nobody knew of an outage");
        assert!(error.is_transient());

        outage.note(Some(&away()));
        let began = Instant::now();
        let error = repeating("read", &outage, refused).await.unwrap_err();
        assert_eq!(began.elapsed(), PATIENCE_IF_AWAY);
        assert_eq!(error.to_string(), "gave up after 5 s: connection refused");

        // A pool that has no connection answers nothing for long.
        let began = Instant::now();
        repeating("read", &outage, std::future::pending::<Result<()>>).await.unwrap_err();
        assert_eq!(began.elapsed(), PATIENCE_IF_AWAY);

        // The server is back before the call gives up, and the call takes long.
        let (answer, ()) = tokio::join!(
            repeating("read", &outage, || async {
                tokio::time::sleep(PATIENCE_IF_AWAY * 3).await;
                Ok(7)
            }),
            async {
                tokio::time::sleep(PATIENCE_IF_AWAY / 2).await;
                outage.note(None);
            }
        );
        assert_eq!(answer.unwrap(), 7);
    }
}
