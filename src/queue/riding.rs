//! If a caller waits for a task, its claim goes in the same exchange with Redis as the script that
//! puts a task into a lane: the claim *rides* on that script.
//!
//! Redis runs both scripts one right after the other, and waits for the disk once. So a task that
//! arrives alone costs one exchange and one fsync less, and its worker need not be woken by a
//! message.
//!
//! Each script is a step of its own, as if the claim had come a moment later, so a crash leaves
//! nothing that a claim alone would not leave. If only the first one ran, the task waits in its
//! lane. If the answer is lost, the callers keep waiting, and the leases are undelivered, which
//! costs nothing when they run out.

use std::{sync::Arc, time::Duration};

use redis::Value;
use tokio::sync::oneshot;

use super::{
    calls::{Claiming, Outcome},
    combiner::{Askers, CombinerHold},
    delivery::Granted,
    error::{Error, Result},
    shard::Shard,
    shards::Shards,
    types::Claim,
    wake_message::WakeMessage,
};
use crate::{
    model::{QueueName, ShardId},
    redis_pool::{Batch, Call},
};

/// For how long to retry a wake after an exchange whose answer was lost, and the pause between the
/// retries. If a process does not hear from Redis for longer, it wakes all of its callers when it
/// listens again.
const WAKE_WITHIN: Duration = Duration::from_secs(2);
const WAKE_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Callers that wait for what a script offers.
struct Riders {
    shard: Arc<Shard>,
    /// Makes other callers gather until the exchange is over.
    held: CombinerHold<Claim, Granted>,
    claiming: Claiming,
    askers: Askers<Granted>,
}

impl Shards {
    /// Calls a script that puts tasks of the shard into its lanes; `likely` if it probably will.
    /// `call` makes the call with the message that wakes callers. `count` returns at most how many
    /// tasks were put there, given the answer.
    pub(super) async fn offer<T: Send + 'static>(
        &self,
        id: &ShardId,
        likely: bool,
        call: impl FnOnce(&WakeMessage) -> Call,
        read: impl FnOnce(Value) -> Result<T> + Send + 'static,
        count: fn(&T) -> usize,
    ) -> Result<T> {
        let riders = if likely { self.riders(id).await } else { None };
        match riders {
            Some(riders) => {
                // This process has already woken its caller.
                let wake = WakeMessage {
                    queue: id.queue.clone(),
                    not_for: Some(self.process().to_owned()),
                    is_due: false,
                };
                self.ride(call(&wake), riders, read, count).await
            }
            None => {
                let wake = WakeMessage {
                    queue: id.queue.clone(),
                    not_for: None,
                    is_due: false,
                };
                let answer = call(&wake).run(&mut self.conn()).await;
                self.offered(id);
                read(answer?)
            }
        }
    }

    /// Wakes a caller that waits for the queue, and lets it make its request. Returns `None` if
    /// nobody did.
    ///
    /// Does nothing if a caller would ask other shards first, or on a cluster, where the outcome of
    /// a pipeline whose slot moves is not known.
    async fn riders(&self, id: &ShardId) -> Option<Riders> {
        if self.is_cluster() || !self.wakes().is_awaited(&id.queue) || self.is_paused(&id.queue) {
            return None;
        }
        let of_queue = self.shards_of(&id.queue);
        let (shard, others): (Vec<_>, Vec<_>) =
            of_queue.into_iter().partition(|shard| shard.id == *id);
        let shard = shard
            .into_iter()
            .next()
            .filter(|_| others.iter().all(|other| other.is_drained()))?;
        let held = shard.claims.hold()?;
        // First, so that the caller does not consider the shard empty.
        shard.offered();
        self.wakes().wake_one(&id.queue);
        // Yield: the runtime runs a task that was just woken before it returns here.
        tokio::task::yield_now().await;
        let (claims, askers) = held.gathered()?;
        let claiming = shard.claiming(claims);
        Some(Riders {
            shard,
            held,
            claiming,
            askers,
        })
    }

    /// Calls the script, and claims for the riders.
    async fn ride<T: Send + 'static>(
        &self,
        call: Call,
        riders: Riders,
        read: impl FnOnce(Value) -> Result<T> + Send + 'static,
        count: fn(&T) -> usize,
    ) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        let shards = self.clone();
        // In a task of its own, because the caller's future may be dropped, and the riders wait for
        // this exchange, too.
        self.calls().spawn(async move {
            let Riders {
                shard,
                held,
                claiming,
                askers,
            } = riders;
            let mut exchange = Batch::default();
            exchange.script(call);
            exchange.script(claiming.call());
            let mut is_lost = false;
            let (offered, claimed) = match exchange.run(&mut shards.conn()).await {
                Ok(answers) => {
                    let mut answers = answers
                        .into_iter()
                        .map(|answer| answer.map_err(Error::from));
                    let mut next = || {
                        answers
                            .next()
                            .unwrap_or_else(|| Err(Error::Answer("one is missing".into())))
                    };
                    (next().and_then(read), next())
                }
                Err(error) => {
                    is_lost = true;
                    (Err(error.clone().into()), Err(error.into()))
                }
            };
            let outcome = match claimed {
                Err(error) if !error.is_out_of_memory() && !matches!(error, Error::Limited) => {
                    claiming.give_up()
                }
                claimed => claiming.finish(claimed).await,
            };
            shard.note_work();
            if leaves_something(offered.as_ref().map_or(0, count), &outcome) {
                shard.offered();
                shards.wakes().wake_one(&shard.id.queue);
            }
            askers.tell(outcome.map(|outcome| outcome.granted));
            drop(answer.send(offered));
            drop(held);
            if is_lost {
                // Redis may have run it, and this process ignores the wake that names it.
                let wake = shards.wake_when_redis_answers(&shard.id.queue);
                drop(tokio::time::timeout(WAKE_WITHIN, wake).await);
            }
        });
        answered.await.unwrap_or(Err(Error::Stopped))
    }
}

impl Shards {
    async fn wake_when_redis_answers(&self, queue: &QueueName) {
        while self.wake_everywhere(queue).await.is_err() {
            tokio::time::sleep(WAKE_AGAIN_AFTER).await;
        }
    }
}

/// Returns whether something may be left of what was offered.
///
/// Then somebody has to be woken, as by the message that this process ignores: the caller that was
/// woken before may have asked too early, and the riders may be others.
fn leaves_something(offered: usize, outcome: &Result<Outcome>) -> bool {
    let (taken, is_drained) = outcome.as_ref().map_or(
        (0, false),
        |Outcome {
             granted,
             is_drained,
         }| (granted.iter().map(Granted::len).sum(), *is_drained),
    );
    // If Redis did not know the first script, it is run again, after the claim. If that claim took
    // as many other tasks, the offer waits for the next wake. This happens at most once after each
    // start of Redis.
    offered > 0 && (!is_drained || taken < offered)
}
