//! Final records that SQL shows final, and that are older than the grace time, are forgotten; so are those whose report is lost.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Watchdog, count, is_lost, unreported::Unreported};
use crate::{
    model::{ShardId, TaskId},
    queue::Failing,
    runtime::Beat,
    telemetry::metrics::{self, Watched},
};

/// How old a look may be by which a shard is left out.
const LOOK_AGE: Duration = Duration::from_secs(1);

impl Watchdog {
    pub(super) async fn finals(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        let (mut unreported, mut failing) = (Unreported::default(), Failing::default());
        let pause = (self.settings.watchdog.grace / 10).min(Duration::from_secs(1));
        while self.lead.wait(&beat, &self.stop).await {
            let started = Instant::now();
            let mut busy = false;
            for (shard, look) in self.queue.look(self.look_for(pause.min(LOOK_AGE))).await {
                if failing.leaves_out(&shard) {
                    continue;
                }
                let began = Instant::now();
                let settled = match look {
                    Ok(look) if !look.settles => Ok(false),
                    Ok(_) => self.settle_finals(&shard, &mut unreported).await,
                    Err(error) => Err(error.into()),
                };
                let settled = settled.or_else(|error| if is_lost(&error) { Ok(false) } else { Err(error) });
                busy |= failing.note(&shard, began, settled).unwrap_or(false);
            }
            failing.end_round("settle")?;
            metrics::watchdog_step("finals", started.elapsed());
            beat.beat();
            self.pause(if busy { Duration::from_millis(1) } else { pause }).await;
        }
        Ok(())
    }

    /// Forgets some final records; whether a full page was forgotten.
    async fn settle_finals(&self, shard: &ShardId, unreported: &mut Unreported) -> anyhow::Result<bool> {
        let most = self.settings.watchdog.batch_max;
        let ids = self.queue.finals(shard, self.settings.watchdog.grace, most).await?;
        if ids.is_empty() {
            return Ok(false);
        }
        let states = self.outbox.store.states(&ids).await?;
        // What SQL does not have was final for so long that it was removed.
        let open: HashSet<TaskId> = states.into_iter().filter(|s| !s.status.is_final()).map(|s| s.id).collect();
        let lost = unreported.lost(shard, &open, &self.outbox, &self.queue).await?;
        if !lost.is_empty() {
            // Without a record they are missing, and go out again.
            tracing::warn!(%shard, "the reports of {} tasks of {shard} are lost: they are done again", lost.len());
        }
        let settled: Vec<_> = ids.iter().map(|id| (*id, !open.contains(id) || lost.contains(id))).collect();
        let forgotten = self.queue.forget(shard, &settled).await?;
        metrics::watchdog_handled(Watched::Settled, count(forgotten));
        Ok(count(forgotten) == most)
    }
}
