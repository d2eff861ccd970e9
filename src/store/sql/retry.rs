//! What was cut short by another transaction, or by a server that restarts, is done again: the whole transaction, on another connection.
//!
//! The crash window: a connection that breaks while COMMIT is under way leaves unknown whether it took effect. The repeat then meets its own
//! work, and each operation is made so that this changes nothing:
//!
//! - `insert`: a row whose id is stored is `New` again, never a duplicate of itself; it is neither counted nor put into the outbox again.
//! - `settle`: the reports are `repeated`. Their discoveries stand in the outbox, where the watchdog finds them.
//! - `mark_published`: the rows have left the outbox, and stand where they stand.
//! - `unpublish`: a new turn; at worst the task is published once more, and the queue knows it.
//! - `remove_finished`: the page is gone, and the next one is taken.
//! - `next_life`, `close_shard`: the life is raised, or the shard closed, already.
//! - `open_shards`: the shard is open already, so that nobody opens it in Redis: the watchdog finds it lost, and does.
//! - `bring_forward`: the rows are due already.

use std::{future::Future, time::Duration};

use backon::{ExponentialBuilder, Retryable};
use tokio::time::Instant;

use crate::store::{Error, Result};

/// So long after its beginning a call is tried again: longer than a server takes to restart, shorter than what `/readyz` calls a stall.
const RETRY_FOR: Duration = Duration::from_secs(20);
/// No call takes longer, also when the server has accepted it and says nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// Repeats `attempt` as long as another try may help.
pub(super) async fn repeating<T, F>(attempt: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let began = Instant::now();
    let backoff = ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(10))
        .with_max_delay(Duration::from_secs(1))
        .without_max_times()
        .with_jitter();
    let mut last = String::from("no answer");
    let repeated = attempt
        .retry(backoff)
        .when(|error| is_brief(error) && began.elapsed() < RETRY_FOR)
        .notify(|error, _| last = error.to_string());
    match tokio::time::timeout(PATIENCE, repeated).await {
        Ok(Err(error)) if is_brief(&error) => Err(Error::GaveUp { after: began.elapsed(), cause: error.to_string() }),
        Ok(done) => done,
        Err(_) => Err(Error::GaveUp { after: PATIENCE, cause: last }),
    }
}

/// Lost to another transaction, or the server is away. Whoever got no connection because all are in use has waited enough.
fn is_brief(error: &Error) -> bool {
    matches!(error, Error::Transient(_))
}
