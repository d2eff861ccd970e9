//! Retries of a whole transaction, on another connection, after a conflict or a restart of the
//! server.
//!
//! If a connection breaks during COMMIT, nobody knows whether the commit took effect. If it did,
//! the retry encounters the work of the first attempt. Each operation is written such that
//! repeating it then changes nothing, except that `add_turned_away` counts twice:
//!
//! - `insert`: a row whose id is already stored is `New` again, never a duplicate of itself. It is
//!   neither counted nor put into a batch or the outbox again. The answer names a different batch
//!   than the stored one, so marking the tasks as published gives each of them its own offset. Those
//!   that wait behind others of their sequences, or have ended since, are again not to be published.
//! - `settle`: the reports are `repeated`. Their discovered tasks are in a batch, where the
//!   watchdog finds them.
//! - `mark_published`: the batch is already marked with these offsets, the rows are no longer in
//!   the outbox, and the offsets are the same.
//! - `unpublish`: the row gets a new turn. At worst the task is published once more, and the queue
//!   recognises it.
//! - `remove_finished`, and all other operations that remove old rows: the rows are gone, and the
//!   answer does not count them. The watchdog continues in its next round.
//! - `purge`: the rows are gone, and the answer is the highest count of all attempts.
//! - `retry`: the acts of the first attempt are recorded, so its tasks are returned as sent again.
//! - `add_token`, `revoke_token`, `pause`, `resume`: the act is recorded, and the answer is the
//!   same.
//! - `keep_letters`, `keep_failures`, `keep_acts`: each row has its own id, and is stored once.
//! - `want_change`: the pending change gets another turn. A task that was reopened is unfinished,
//!   and so gets a pending change, too.
//! - `end_changes`: the tasks have already ended, and the answer has their status.
//! - `due_deadlines`: the page is no longer due, so the answer is empty. It becomes due again a
//!   little later.
//! - `replace_holder`: the answer is no, and the caller reads the holder again.
//! - `begin_rebuild`, `close_shard`: the generation is already raised, or the shard closed.
//! - `end_rebuild`: the shard is no longer being rebuilt.
//! - `open_shards`: the shard is already open, so nobody opens it in Redis. The watchdog finds that
//!   it is lost, and opens it.
//! - `remove_batches`: they are gone.
//! - `add_bulk_change`, `advance_bulk_change`, `stop_bulk_change`: the bulk change already exists,
//!   has advanced, or has ended. The answer to `advance_bulk_change` is then no, and the caller
//!   reads the bulk change again.
//! - `bring_forward`: the rows are already due.
//! - `cancel_tree`: the tree is already marked. `correct_tree`: the tree is right.
//!   `remove_ended_trees`: they are gone.

use std::{future::Future, time::Duration};

use backon::{BackoffBuilder, ExponentialBuilder};
use parking_lot::{Mutex, RwLock};
use tokio::time::{Instant, timeout};

use crate::{
    model::in_short,
    store::{Cause, Error, Result},
    telemetry::metrics,
};

/// How long calls keep trying.
struct Patience {
    /// How long to retry. Longer than a server takes to restart, and shorter than the time after
    /// which `/readyz` reports a stall.
    retries: Duration,
    /// The maximum duration of a call, even if the server has accepted it and then does not
    /// respond.
    whole: Duration,
    /// How long a call tries that begins while the server is known to be unavailable. Still long
    /// enough for a short restart.
    if_away: Duration,
}

const PATIENCE: Patience = Patience {
    retries: Duration::from_secs(20),
    whole: Duration::from_secs(60),
    if_away: Duration::from_secs(5),
};

/// Whether the server is known to be unavailable, and why, according to the last ping.
#[derive(Default)]
pub(super) struct Outage(RwLock<Option<String>>);

impl Outage {
    /// Records the result of a ping.
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

/// Repeats `attempt` as long as that may help: after a conflict, or while the server is
/// unavailable.
///
/// It does not retry if all connections are in use, because that caller has already waited long
/// enough. A call that begins during an outage waits only a few seconds, unless the server responds
/// again in the meantime.
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

        // A pool without connections does not respond for a long time.
        repeating_with(&SHORT, "read", &outage, std::future::pending::<Result<()>>)
            .await
            .unwrap_err();

        // The server is back before the call gives up, but the call takes long.
        let answer = repeating_with(&SHORT, "read", &outage, || async {
            outage.note(None);
            tokio::time::sleep(SHORT.if_away * 3).await;
            Ok(7)
        });
        assert_eq!(answer.await.unwrap(), 7);
    }
}
