//! Leases that ran out, delays that are over, elements that are spent: in each shard, when its next one is due.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use futures::StreamExt;

use super::{Watchdog, count};
use crate::{
    model::ShardId,
    queue::{self, Look, LookFor},
    supervise::Beat,
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
        let mut swept: HashMap<ShardId, Instant> = HashMap::new();
        while self.lead.wait(&beat, &self.stop).await {
            let started = Instant::now();
            let looks = self.queue.look(self.look_for(WAITING)).await;
            let (mut failed, mut wait, mut steps) = (Ok(()), interval, Vec::new());
            for (shard, look) in looks {
                // A shard that is damaged must not hold up the others.
                match look.with_context(|| format!("cannot look at {shard}")) {
                    Ok(look) => {
                        wait = wait.min(look.next.unwrap_or(interval));
                        let is_swept = swept.get(&shard).is_some_and(|at| at.elapsed() < SWEEP_EVERY);
                        let sweep = !is_swept && (look.spent > 0 || look.pointers > 0);
                        if sweep {
                            swept.insert(shard.clone(), Instant::now());
                        }
                        if look.expires || look.promotes || sweep {
                            steps.push((shard, look, sweep));
                        }
                    }
                    Err(error) => failed = failed.and(Err(error)),
                }
            }
            let steps = steps.into_iter().map(|(shard, look, sweep)| {
                let watchdog = &self;
                async move {
                    let step = watchdog.tend(&shard, look, sweep).await;
                    step.with_context(|| format!("cannot tend {shard}"))
                }
            });
            let mut steps = futures::stream::iter(steps).buffer_unordered(AT_ONCE);
            while let Some(step) = steps.next().await {
                match step {
                    Ok(true) => wait = Duration::ZERO,
                    Ok(false) => {}
                    Err(error) => failed = failed.and(Err(error)),
                }
            }
            drop(steps);
            swept.retain(|_, at| at.elapsed() < SWEEP_EVERY);
            failed?;
            metrics::watchdog_step("leases", started.elapsed());
            beat.beat();
            self.pause(wait.clamp(Duration::from_millis(5), interval)).await;
        }
        Ok(())
    }

    /// One step of what is due in the shard; whether there is more.
    async fn tend(&self, shard: &ShardId, look: Look, sweep: bool) -> queue::Result<bool> {
        let most = self.settings.watchdog.batch_max;
        let mut more = false;
        if look.expires {
            let expired = self.queue.expire(shard, most, &self.settings.queues.get(&shard.queue).backoff).await?;
            metrics::watchdog_handled(Watched::Expired, count(expired.expired));
            metrics::watchdog_handled(Watched::Dead, count(expired.dead));
            metrics::watchdog_handled(Watched::Retried, count(expired.expired - expired.dead));
            metrics::watchdog_handled(Watched::Undelivered, count(expired.undelivered));
            more |= expired.more;
        }
        if look.promotes {
            let promoted = self.queue.promote(shard, most, self.settings.watchdog.horizon).await?;
            metrics::watchdog_handled(Watched::Promoted, count(promoted.promoted));
            more |= promoted.more;
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
