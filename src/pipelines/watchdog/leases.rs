//! Handles expired leases, due delays and spent elements, in each shard when its next one is due.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt;

use super::{
    error::Error,
    lead::Lead,
    shared::{count, look_for},
    sweeps::{SWEEP, Sweeps},
};
use crate::{
    config::Settings,
    model::ShardId,
    pipelines::context::Context,
    queue::{self, Failing, ShardSnapshot, Swept, Upkeep},
    runtime::Loop,
    telemetry::metrics::{self, Watched},
};

/// How often to ask a shard in which nothing is due as far as this process knows. Another process
/// may have leased tasks.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The shortest pause between two rounds.
const SHORTEST: Duration = Duration::from_millis(5);
/// How many shards are tended concurrently. Each gets one step per round, so that none holds up the
/// others.
const AT_ONCE: usize = 8;

#[derive(Clone)]
pub(super) struct Leases {
    queue: Upkeep,
    settings: Arc<Settings>,
    lead: Lead,
}

/// A shard and what has to be done in it.
struct Step {
    shard: ShardId,
    look: ShardSnapshot,
    sweep: bool,
}

/// What remains after a step.
#[derive(Default)]
struct Done {
    /// The shard needs another step at once.
    more: bool,
    swept: Option<Swept>,
}

/// The state of the loop.
#[derive(Default)]
struct Rounds {
    sweeps: Sweeps,
    failing: Failing<queue::Error>,
}

impl Leases {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        let Context {
            queue, settings, ..
        } = context.clone();
        Self {
            queue: queue.upkeep,
            settings,
            lead: lead.clone(),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        let interval = self.settings.watchdog.interval;
        let mut rounds = Rounds::default();
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            let wait = self.round(&mut rounds, started).await?;
            metrics::watchdog_step("leases", started.elapsed());
            cx.beat();
            cx.pause(wait.clamp(SHORTEST, interval)).await;
        }
        Ok(())
    }

    /// Does one step in each shard. Returns how long until something is due.
    async fn round(&self, rounds: &mut Rounds, started: Instant) -> Result<Duration, Error> {
        let (mut wait, steps) = self.steps(rounds, started).await;
        let steps = steps.into_iter().map(|step| async move {
            let done = match self.tend(&step).await {
                // The shard was lost or closed after the snapshot.
                Err(queue::Error::NoGeneration) => Ok(Done::default()),
                done => done,
            };
            (step, done)
        });
        let mut steps = futures::stream::iter(steps).buffer_unordered(AT_ONCE);
        while let Some((Step { shard, look, .. }, done)) = steps.next().await {
            let Done { more, swept } = rounds
                .failing
                .note(&shard, started, done)
                .unwrap_or_default();
            let sweeps_on = swept.is_some_and(|swept| rounds.sweeps.end(&shard, &look, swept));
            if more || sweeps_on {
                wait = Duration::ZERO;
            }
        }
        rounds.sweeps.forget_old(Instant::now());
        rounds.failing.end_round("tend")?;
        Ok(wait)
    }

    /// Takes snapshots of the shards. Returns the time until the next thing is due in any of them,
    /// and what is due now.
    async fn steps(&self, rounds: &mut Rounds, started: Instant) -> (Duration, Vec<Step>) {
        let interval = self.settings.watchdog.interval;
        let mut wait = interval;
        let mut steps = Vec::new();
        for (shard, look) in self
            .queue
            .look(look_for(&self.settings.watchdog, LOOK_EVERY))
            .await
        {
            if rounds.failing.leaves_out(&shard) {
                continue;
            }
            let look = match look {
                Ok(look) => look,
                Err(error) => {
                    rounds.failing.note::<()>(&shard, started, Err(error));
                    continue;
                }
            };
            // A step does what is due now, and tells whether another one is needed at once.
            wait = wait.min(look.next.filter(|next| !next.is_zero()).unwrap_or(interval));
            let sweep = rounds.sweeps.begin(&shard, &look, Instant::now());
            match look.expires || look.promotes || sweep {
                true => steps.push(Step { shard, look, sweep }),
                false => drop(rounds.failing.note(&shard, started, Ok(()))),
            }
        }
        (wait, steps)
    }

    /// Does what is due in the shard. Asks for another step only if something has changed: nothing
    /// does while expiries pause.
    async fn tend(&self, Step { shard, look, sweep }: &Step) -> queue::Result<Done> {
        let most = self.settings.watchdog.batch_max;
        let mut more = false;
        let mut swept = None;
        if look.expires {
            let expired = self
                .queue
                .expire(shard, most, &self.settings.queues.get(&shard.queue).backoff)
                .await?;
            metrics::watchdog_handled(Watched::Expired, count(expired.expired));
            metrics::watchdog_handled(Watched::Dead, count(expired.dead));
            metrics::watchdog_handled(Watched::Retried, count(expired.expired - expired.dead));
            metrics::watchdog_handled(Watched::Undelivered, count(expired.undelivered));
            more |= expired.expired + expired.undelivered > 0;
        }
        if look.promotes {
            let promoted = self
                .queue
                .promote(shard, most, self.settings.watchdog.horizon)
                .await?;
            metrics::watchdog_handled(Watched::Promoted, count(promoted.promoted));
            // Those of limit keys do not count as promoted.
            more |= promoted.promoted > 0 || promoted.more;
        }
        if *sweep {
            swept = Some(self.queue.sweep(shard, SWEEP).await?);
        }
        Ok(Done { more, swept })
    }
}
