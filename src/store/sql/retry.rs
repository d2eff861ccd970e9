//! Retries of a whole transaction, on another connection, after a conflict or a server's restart.
//!
//! The crash window: when a connection breaks during COMMIT, nobody knows whether it took effect.
//! The retry then meets its own work. Each operation is made so that this changes nothing, except
//! that `add_turned_away` counts twice:
//!
//! - `insert`: a row whose id is stored is `New` again, never a duplicate of itself. It is neither
//!   counted nor put into a batch or the outbox again. The answer names another batch than the one
//!   that was stored, so the mark gives each task an offset of its own.
//! - `settle`: the reports are `repeated`. Their discovered tasks are in a batch, where the
//!   watchdog finds them.
//! - `mark_published`: the batch is marked with these offsets, the rows have left the outbox, and
//!   the offsets are the same.
//! - `unpublish`: the row gets a new turn. At worst the task is published once more, and the queue
//!   knows it.
//! - `remove_finished`, and all that removes old rows: the rows are gone, and the answer does not
//!   count them. The watchdog goes on at its next turn.
//! - `purge`: the rows are gone, and the answer is the greatest number of an attempt.
//! - `retry`: the acts of the first attempt are recorded, so that its tasks are answered as sent
//!   again.
//! - `add_token`, `revoke_token`, `pause`, `resume`: the act is recorded, and the answer is the
//!   same.
//! - `keep_letters`, `keep_failures`, `keep_acts`: each has its id, and is kept once.
//! - `want_change`: the wish is kept in another turn. A task that was reopened is unfinished, and
//!   gets a wish, too.
//! - `end_changes`: the tasks have ended already, and the answer has their status.
//! - `due_deadlines`: the page is not due any more, so none is answered. It is due again a little
//!   later.
//! - `replace_holder`: the answer is no, and the caller reads the holder again.
//! - `begin_rebuild`, `close_shard`: the generation is raised, or the shard closed, already.
//! - `end_rebuild`: the shard is not being rebuilt any more.
//! - `open_shards`: the shard is open already, so that nobody opens it in Redis. The watchdog finds
//!   it lost and opens it.
//! - `remove_batches`: they are gone.
//! - `add_bulk_change`, `advance_bulk_change`, `stop_bulk_change`: the bulk change is there, has
//!   advanced or has ended already. The answer to `advance_bulk_change` is then no, and the caller
//!   reads the bulk change again.
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

/// How long calls try.
struct Patience {
    /// The time for retries: longer than a server takes to restart, shorter than what `/readyz`
    /// calls a stall.
    retries: Duration,
    /// The longest that a call takes, also when the server has accepted it and falls silent.
    whole: Duration,
    /// The time for a call that begins while the server is known to be away. It rides out a short
    /// restart all the same.
    if_away: Duration,
}

const PATIENCE: Patience = Patience {
    retries: Duration::from_secs(20),
    whole: Duration::from_secs(60),
    if_away: Duration::from_secs(5),
};

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
/// A caller that got no connection because all are in use has waited enough. A call that begins
/// during an outage waits a few seconds only, unless the server answers again meanwhile.
pub(super) async fn repeating<T, Fut>(
    operation: &'static str,
    outage: &Outage,
    attempt: impl FnMut() -> Fut,
) -> Result<T>
where
    Fut: Future<Output = Result<T>>,
{
    repeating_with(&PATIENCE, operation, outage, attempt).await
}

async fn repeating_with<T, Fut>(
    patience: &Patience,
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
                Err(Error::Transient(cause)) if began.elapsed() < patience.retries => {
                    *last.lock() = cause
                }
                Err(Error::Transient(cause)) => {
                    return Err(Error::GaveUp {
                        after: began.elapsed(),
                        cause,
                    });
                }
                done => return done,
            }
            metrics::sql_retry(operation);
            tokio::time::sleep(pause).await;
        }
        unreachable!("the pauses have no end")
    };
    let mut repeated = std::pin::pin!(repeated);
    if is_away {
        if let Ok(done) = timeout(patience.if_away, &mut repeated).await {
            return done;
        }
        if let Some(why) = outage.why() {
            return Err(Error::GaveUp {
                after: patience.if_away,
                cause: why.into(),
            });
        }
    }
    let left = patience.whole.saturating_sub(began.elapsed());
    if let Ok(done) = timeout(left, &mut repeated).await {
        return done;
    }
    let cause = std::mem::replace(&mut *last.lock(), "no answer".into());
    Err(Error::GaveUp {
        after: patience.whole,
        cause,
    })
}

fn pauses() -> impl Iterator<Item = Duration> + Send {
    let pauses = ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(10))
        .with_max_delay(Duration::from_secs(1));
    pauses.without_max_times().with_jitter().build()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Patience = Patience {
        retries: Duration::from_millis(400),
        whole: Duration::from_secs(600),
        if_away: Duration::from_millis(50),
    };

    fn away() -> Error {
        Error::Transient("connection refused".into())
    }

    #[tokio::test]
    async fn a_call_during_an_outage_gives_up_soon_and_others_ride_it_out() {
        let outage = Outage::default();
        let refused = || async { Err::<(), _>(away()) };
        let began = Instant::now();
        let error = repeating_with(&SHORT, "read", &outage, refused)
            .await
            .unwrap_err();
        assert!(began.elapsed() >= SHORT.retries, "nobody knew of an outage");
        assert!(error.is_transient());

        outage.note(Some(&away()));
        let error = repeating_with(&SHORT, "read", &outage, refused)
            .await
            .unwrap_err();
        assert!(
            matches!(error, Error::GaveUp { after, .. } if after == SHORT.if_away),
            "{error}"
        );

        // A pool that has no connection answers nothing for long.
        repeating_with(&SHORT, "read", &outage, std::future::pending::<Result<()>>)
            .await
            .unwrap_err();

        // The server is back before the call gives up, and the call takes long.
        let answer = repeating_with(&SHORT, "read", &outage, || async {
            outage.note(None);
            tokio::time::sleep(SHORT.if_away * 3).await;
            Ok(7)
        });
        assert_eq!(answer.await.unwrap(), 7);
    }
}
