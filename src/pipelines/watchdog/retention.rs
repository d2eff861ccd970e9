//! Tasks that finished long ago leave SQL, and so do old dead letters and old failed attempts.

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
    config::Watchdog,
    runtime::Loop,
    store::Store,
    telemetry::metrics::{self, Watched},
};

/// Tasks, letters or attempts that one transaction removes: few, so that nobody waits long for it.
const REMOVED_AT_ONCE: u32 = 256;
/// The shortest pause, and the longest after a full and after any other page.
const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST_BUSY: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub(super) struct Retention {
    store: Arc<dyn Store>,
    retention: Duration,
    letter_retention: Duration,
    history_retention: Duration,
    lead: Lead,
}

impl Retention {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        let Context { store, settings, .. } = context.clone();
        let Watchdog { retention, letter_retention, history_retention, .. } = settings.watchdog;
        Self { store, retention, letter_retention, history_retention, lead: lead.clone() }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            // The database's clock decides, and does not know what a test has skipped.
            let age = |retention: Duration| retention.saturating_sub(cx.clock().skipped());
            let mut removed = 0;
            if !self.retention.is_zero() {
                removed = self.store.remove_finished(age(self.retention), REMOVED_AT_ONCE).await?;
            }
            if !self.letter_retention.is_zero() {
                let letters = self.store.remove_old_letters(age(self.letter_retention), REMOVED_AT_ONCE).await?;
                removed = removed.max(letters);
            }
            let mut is_full = removed == u64::from(REMOVED_AT_ONCE);
            if !self.history_retention.is_zero() {
                let attempts = self.store.remove_old_failures(age(self.history_retention), REMOVED_AT_ONCE).await?;
                metrics::history_removed(attempts);
                is_full |= attempts == u64::from(REMOVED_AT_ONCE);
            }
            metrics::watchdog_step("retention", started.elapsed());
            metrics::watchdog_handled(Watched::Removed, count(removed));
            cx.beat();
            // The loop works at most half of the time, so that others reach the database, however much is due.
            let wait = match is_full {
                true => started.elapsed().clamp(SHORTEST, LONGEST_BUSY),
                false => {
                    let kept = [self.retention, self.letter_retention, self.history_retention];
                    (kept.into_iter().filter(|kept| !kept.is_zero()).min().unwrap_or_default() / 10)
                        .clamp(SHORTEST, LONGEST)
                }
            };
            cx.idle(cx.pause(wait)).await;
        }
        Ok(())
    }
}
