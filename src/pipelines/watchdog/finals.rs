//! Forgets final records that are older than the grace time and that SQL shows as final, or whose
//! report is lost. If a record says that its task is cancelled, tells SQL so, because there is no
//! report of that.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    error::Error,
    lead::Lead,
    lost_reports::LostReports,
    shared::{Forgets, count, look_for},
};
use crate::{
    config::Settings,
    model::{ShardId, TaskId},
    pipelines::{changing::Changing, context::Context},
    queue::{self, Failing, Upkeep},
    runtime::Loop,
    store::Tasks,
    telemetry::metrics::{self, Watched},
};

/// The age up to which a snapshot may show that a shard has nothing to settle.
const LOOK_AGE: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub(super) struct Finals {
    store: Arc<dyn Tasks>,
    queue: Upkeep,
    settings: Arc<Settings>,
    lost_reports: LostReports,
    changing: Changing,
    forgets: Forgets,
    lead: Lead,
}

impl Finals {
    pub(super) fn new(context: &Context, lead: &Lead, forgets: &Forgets) -> Self {
        let Context {
            store,
            queue,
            settings,
            ..
        } = context.clone();
        let lost_reports = LostReports::new(context);
        let changing = context.changing();
        let forgets = Arc::clone(forgets);
        Self {
            store,
            queue: queue.upkeep,
            settings,
            lost_reports,
            changing,
            forgets,
            lead: lead.clone(),
        }
    }

    pub(super) async fn run(mut self, cx: Loop) -> Result<(), Error> {
        let mut failing = Failing::default();
        let pause = (self.settings.watchdog.grace / 10).min(LOOK_AGE);
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            let mut busy = false;
            // If this process also tends leases, the snapshots of that are recent enough.
            for (shard, look) in self
                .queue
                .look(look_for(&self.settings.watchdog, 2 * pause))
                .await
            {
                if failing.leaves_out(&shard) {
                    continue;
                }
                let began = Instant::now();
                let settled = match look {
                    Ok(look) if !look.settles => Ok(false),
                    Ok(_) => self.settle(&shard).await,
                    Err(error) => Err(error.into()),
                };
                let settled = settled.or_else(|error| {
                    if error.is_without_generation() {
                        Ok(false)
                    } else {
                        Err(error)
                    }
                });
                busy |= failing.note(&shard, began, settled).unwrap_or(false);
            }
            failing.end_round("settle")?;
            metrics::watchdog_step("finals", started.elapsed());
            cx.beat();
            cx.pause(if busy {
                Duration::from_millis(1)
            } else {
                pause
            })
            .await;
        }
        Ok(())
    }

    /// Forgets some final records. Returns whether it was a full page.
    async fn settle(&mut self, shard: &ShardId) -> Result<bool, Error> {
        let most = self.settings.watchdog.batch_max;
        let queue::Finals { past_ends, ids } = self
            .queue
            .finals(shard, self.settings.watchdog.grace, most)
            .await?;
        if ids.is_empty() {
            return Ok(past_ends > 0);
        }
        // If SQL does not have a task, it was final for so long that it was removed.
        let mut open: HashSet<TaskId> = self
            .store
            .unfinished_among(&ids)
            .await?
            .into_iter()
            .collect();
        if !open.is_empty() {
            let cancelled = self.changing.adopt(shard, &open).await?;
            open.retain(|id| !cancelled.contains(id));
        }
        let lost = self.lost_reports.among(shard, &ids, &open).await?;
        let settled: Vec<_> = ids
            .iter()
            .map(|id| (*id, !open.contains(id) || lost.contains(id)))
            .collect();
        let _alone = self.forgets.lock().await;
        let forgotten = self
            .queue
            .forget(shard, self.settings.watchdog.grace, &settled)
            .await?;
        metrics::watchdog_handled(Watched::Settled, count(forgotten));
        Ok(count(past_ends + forgotten) == most)
    }
}
