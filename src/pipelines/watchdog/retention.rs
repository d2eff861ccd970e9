//! Tasks that finished long ago leave SQL.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    context::{Context, count},
    error::Error,
    lead::Lead,
};
use crate::{
    runtime::Loop,
    store::Store,
    telemetry::metrics::{self, Watched},
};

/// Tasks that one transaction removes: few, so that nobody waits long for it.
const REMOVED_AT_ONCE: u32 = 256;
/// The shortest pause, and the longest after a full and after any other page.
const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST_BUSY: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub(super) struct Retention {
    store: Arc<dyn Store>,
    retention: Duration,
    lead: Lead,
}

impl Retention {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        let Context { store, settings, .. } = context.clone();
        Self { store, retention: settings.watchdog.retention, lead: lead.clone() }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            // The database's clock decides, and does not know what a test has skipped.
            let age = self.retention.saturating_sub(cx.clock().skipped());
            let removed = self.store.remove_finished(age, REMOVED_AT_ONCE).await?;
            metrics::watchdog_step("retention", started.elapsed());
            metrics::watchdog_handled(Watched::Removed, count(removed));
            cx.beat();
            // The loop works at most half of the time, so that others reach the database, however much is due.
            let wait = match removed == u64::from(REMOVED_AT_ONCE) {
                true => started.elapsed().clamp(SHORTEST, LONGEST_BUSY),
                false => (self.retention / 10).clamp(SHORTEST, LONGEST),
            };
            cx.idle(cx.pause(wait)).await;
        }
        Ok(())
    }
}
