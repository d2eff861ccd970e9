//! Claims that ride: a caller that waits for a task claims in the exchange that puts the task in.
//!
//! Redis runs both scripts one right after the other, and waits for the disk once. So a task that comes alone costs one
//! exchange and one fsync less, and its worker need not be woken by a message.
//!
//! Each script is a step of its own, as if the claim had come a moment later, so a crash leaves nothing that a claim
//! alone would not leave. If only the first one ran, the task waits in its lane, and the callers get an error. If the
//! answer is lost, the leases are undelivered, and cost nothing when they run out.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{
    calls::Claiming,
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
    /// Not on a cluster: what becomes of a pipeline whose slot moves is not known.
    pub(super) async fn riders(&self, id: &ShardId) -> Option<Riders> {
        if self.is_cluster() || !self.wakes().is_awaited(&id.queue) {
            return None;
        }
        let shard = self.shard(id)?;
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
            let granted = claiming.finish(claimed).await;
            shard.touch();
            let taken: usize = granted.iter().flatten().map(Granted::len).sum();
            // A Redis that did not know the script `enqueue` ran it behind the claim.
            if shard.is_drained() && matches!(enqueued, Ok(Enqueued::Done { added, .. }) if added > taken) {
                shard.offered();
                shards.wakes().wake_one(&shard.id.queue);
            }
            askers.tell(granted);
            drop(answer.send(enqueued));
        });
        answered.await.unwrap_or(Err(Error::Stopped))
    }
}
