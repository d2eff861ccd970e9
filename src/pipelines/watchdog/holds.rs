//! Stores long holds of limit keys, which workers reported, in SQL: a shard that Redis loses gets
//! them back when it is brought back.
//!
//! The script that took the report keeps the hold among those that SQL does not have. Crash windows:
//!
//! - Killed after SQL has them: they are read and stored again, as they are.
//! - Redis is lost before SQL has them: these holds are lost. They are seconds old, unless the database
//!   is away.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{error::Error, lead::Lead, shared::look_for};
use crate::{
    config::Settings,
    model::ShardId,
    pipelines::context::Context,
    queue::{Failing, Upkeep},
    runtime::{Clock, Loop},
    store::Operators,
    telemetry::metrics,
};

const EVERY: Duration = Duration::from_secs(1);
/// The reports of one exchange with SQL.
const AT_ONCE: usize = 200;

#[derive(Clone)]
pub(super) struct Holds {
    store: Arc<dyn Operators>,
    queue: Upkeep,
    settings: Arc<Settings>,
    clock: Clock,
    lead: Lead,
}

impl Holds {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        Self {
            store: context.store.clone(),
            queue: context.queue.upkeep.clone(),
            settings: Arc::clone(&context.settings),
            clock: context.clock.clone(),
            lead: lead.clone(),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        let mut failing = Failing::default();
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            let look_for = look_for(&self.settings.watchdog, 2 * EVERY);
            for (shard, look) in self.queue.look(look_for).await {
                // The loop of the leases says which shards do not answer.
                if look.is_ok_and(|look| look.long_holds > 0) && !failing.leaves_out(&shard) {
                    match self.store_holds(&shard).await {
                        Err(error @ Error::Store(_)) => return Err(error),
                        stored => drop(failing.note(&shard, started, stored)),
                    }
                    cx.beat();
                }
            }
            failing.end_part("store the holds of");
            metrics::watchdog_step("holds", started.elapsed());
            cx.beat();
            cx.idle(cx.pause(EVERY)).await;
        }
        Ok(())
    }

    async fn store_holds(&self, shard: &ShardId) -> Result<(), Error> {
        let mut stored = 0;
        loop {
            let (last, holds) = self.queue.long_holds(shard, stored, AT_ONCE).await?;
            if last == stored {
                return Ok(());
            }
            if !holds.is_empty() {
                let now = self.clock.now_unix_ms();
                self.store.keep_holds(&shard.queue, &holds, now).await?;
            }
            stored = last;
        }
    }
}
