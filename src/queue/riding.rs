//! Claims that ride: a caller that waits for a task claims in the exchange that puts the task in.
//!
//! Redis runs both scripts one right after the other, and waits for the disk once. So a task that comes alone costs one
//! exchange and one fsync less, and its worker need not be woken by a message.
//!
//! Each script is a step of its own, as if the claim had come a moment later, so a crash leaves nothing that a claim
//! alone would not leave. If only the first one ran, the task waits in its lane. If the answer is lost, the callers
//! wait on, and the leases are undelivered, and cost nothing when they run out.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{
    calls::{Claiming, Outcome},
    combiner::{Askers, Held},
    delivery::Granted,
    enqueue::Enqueuer,
    error::{Error, Result},
    shard::Shard,
    types::{Claim, Enqueued},
};
use crate::{
    model::ShardId,
    redis_pool::{Batch, Call},
};

/// Callers that wait for what an enqueue brings.
pub(super) struct Riders {
    shard: Arc<Shard>,
    /// Other callers gather until the exchange is over.
    _held: Held<Claim, Granted>,
    claiming: Claiming,
    askers: Askers<Granted>,
}

impl Enqueuer {
    /// Wakes a caller that waits for the queue, and lets it ask. `None` if nobody did.
    ///
    /// Not where a caller would look at other shards first. And not on a cluster: what becomes of a pipeline whose slot
    /// moves is not known.
    pub(super) async fn riders(&self, id: &ShardId) -> Option<Riders> {
        if self.is_cluster() || !self.wakes().is_awaited(&id.queue) || self.is_paused(&id.queue) {
            return None;
        }
        let of_queue = self.shards_of(&id.queue);
        let (shard, others): (Vec<_>, Vec<_>) = of_queue.into_iter().partition(|shard| shard.id == *id);
        let shard = shard.into_iter().next().filter(|_| others.iter().all(|other| other.is_drained()))?;
        let held = shard.claims.hold()?;
        // First, so that the caller does not take the shard for empty.
        shard.offered();
        self.wakes().wake_one(&id.queue);
        // The runtime runs a task that was woken here before it comes back.
        tokio::task::yield_now().await;
        let (claims, askers) = held.gathered()?;
        let claiming = shard.claiming(claims);
        Some(Riders { shard, _held: held, claiming, askers })
    }

    /// Enqueues, and claims for the riders.
    pub(super) async fn ride(&self, enqueue: Call, riders: Riders) -> Result<Enqueued> {
        let (answer, answered) = oneshot::channel();
        let shards = self.0.clone();
        // Not in the caller's own future: it may be dropped, and the riders wait for this exchange, too.
        self.calls().spawn(async move {
            let Riders { shard, _held, claiming, askers } = riders;
            let mut exchange = Batch::default();
            exchange.script(enqueue);
            exchange.script(claiming.call());
            let (enqueued, claimed) = match exchange.run(&mut shards.conn()).await {
                Ok(answers) => {
                    let mut answers = answers.into_iter().map(|answer| answer.map_err(Error::from));
                    let mut next = || answers.next().unwrap_or_else(|| Err(Error::Answer("one is missing".into())));
                    (next().and_then(Enqueued::read), next())
                }
                Err(error) => (Err(error.clone().into()), Err(error.into())),
            };
            let outcome = match claimed {
                Err(error) if !error.is_out_of_memory() => claiming.give_up(),
                claimed => claiming.finish(claimed).await,
            };
            shard.touch();
            if leaves_something(&enqueued, &outcome) {
                shard.offered();
                shards.wakes().wake_one(&shard.id.queue);
            }
            askers.tell(outcome.map(|outcome| outcome.granted));
            drop(answer.send(enqueued));
        });
        answered.await.unwrap_or(Err(Error::Stopped))
    }
}

/// True if something may be left of what the enqueue brought.
///
/// Then somebody has to be woken, as by the message that this process does not read: the caller that was woken before
/// may have looked too early, and the riders be others.
fn leaves_something(enqueued: &Result<Enqueued>, outcome: &Result<Outcome>) -> bool {
    let Ok(Enqueued::Done { added, .. }) = enqueued else { return false };
    let (taken, is_drained) = outcome
        .as_ref()
        .map_or((0, false), |Outcome { granted, is_drained }| (granted.iter().map(Granted::len).sum(), *is_drained));
    // A Redis that did not know the script `enqueue` ran it behind the claim, which left no element all the same.
    *added > 0 && (!is_drained || taken < *added)
}
