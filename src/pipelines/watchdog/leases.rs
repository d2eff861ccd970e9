//! Leases that ran out, delays that are over, elements that are spent: in each shard, when its next one is due.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt;

use super::{Watchdog, count};
use crate::{
    model::ShardId,
    queue::{self, Failing, Look, LookFor},
    runtime::Beat,
    telemetry::metrics::{self, Watched},
};

/// How often a shard is asked in which tasks only wait, and no lease or delay runs. Another process may have leased them.
const WAITING: Duration = Duration::from_secs(1);
/// Elements per lane that one sweep looks at.
const SWEEP: usize = 512;
/// How often a shard is swept, where elements or pointers are spent.
const SWEEP_EVERY: Duration = Duration::from_millis(250);
/// Shards that are tended at once. Each has one step a round, so that none holds up the others.
const AT_ONCE: usize = 8;

impl Watchdog {
    pub(super) async fn leases(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        let interval = self.settings.watchdog.interval;
        let (mut swept, mut failing) = (HashMap::<ShardId, Instant>::new(), Failing::default());
        while self.lead.wait(&beat, &self.stop).await {
            let started = Instant::now();
            let looks = self.queue.look(self.look_for(WAITING)).await;
            let (mut wait, mut steps) = (interval, Vec::new());
            for (shard, look) in looks.into_iter().filter(|(shard, _)| !failing.leaves_out(shard)).collect::<Vec<_>>() {
                let look = match look {
                    Ok(look) => look,
                    Err(error) => {
                        failing.note::<(), _>(&shard, started, Err(error));
                        continue;
                    }
                };
                // A step does what is due now, and says whether to come again at once.
                wait = wait.min(look.next.filter(|next| !next.is_zero()).unwrap_or(interval));
                let is_swept = swept.get(&shard).is_some_and(|at| at.elapsed() < SWEEP_EVERY);
                let sweep = !is_swept && (look.spent > 0 || look.pointers > 0);
                if sweep {
                    swept.insert(shard.clone(), Instant::now());
                }
                match look.expires || look.promotes || sweep {
                    true => steps.push((shard, look, sweep)),
                    false => drop(failing.note(&shard, started, anyhow::Ok(()))),
                }
            }
            let steps = steps.into_iter().map(|(shard, look, sweep)| {
                let watchdog = &self;
                async move {
                    let step = watchdog.tend(&shard, look, sweep).await;
                    (shard, step)
                }
            });
            let mut steps = futures::stream::iter(steps).buffer_unordered(AT_ONCE);
            while let Some((shard, step)) = steps.next().await {
                if failing.note(&shard, started, step) == Some(true) {
                    wait = Duration::ZERO;
                }
            }
            drop(steps);
            swept.retain(|_, at| at.elapsed() < SWEEP_EVERY);
            failing.end_round("tend")?;
            metrics::watchdog_step("leases", started.elapsed());
            beat.beat();
            self.pause(wait.clamp(Duration::from_millis(5), interval)).await;
        }
        Ok(())
    }

    /// One step of what is due in the shard; whether to come again at once. Not while expiries pause: nothing moves then.
    async fn tend(&self, shard: &ShardId, look: Look, sweep: bool) -> queue::Result<bool> {
        let most = self.settings.watchdog.batch_max;
        let mut more = false;
        if look.expires {
            let expired = self.queue.expire(shard, most, &self.settings.queues.get(&shard.queue).backoff).await?;
            metrics::watchdog_handled(Watched::Expired, count(expired.expired));
            metrics::watchdog_handled(Watched::Dead, count(expired.dead));
            metrics::watchdog_handled(Watched::Retried, count(expired.expired - expired.dead));
            metrics::watchdog_handled(Watched::Undelivered, count(expired.undelivered));
            more |= expired.expired + expired.undelivered > 0;
        }
        if look.promotes {
            let promoted = self.queue.promote(shard, most, self.settings.watchdog.horizon).await?;
            metrics::watchdog_handled(Watched::Promoted, count(promoted.promoted));
            more |= promoted.promoted > 0;
        }
        if sweep {
            self.queue.sweep(shard, SWEEP).await?;
        }
        Ok(more)
    }

    pub(super) fn look_for(&self, max_age: Duration) -> LookFor {
        LookFor { max_age, grace: self.settings.watchdog.grace, horizon: self.settings.watchdog.horizon }
    }
}
