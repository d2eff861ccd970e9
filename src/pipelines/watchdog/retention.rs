//! Removes from SQL what finished long ago.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Watchdog, count};
use crate::{
    runtime::Beat,
    telemetry::metrics::{self, Watched},
};

/// Tasks removed in one transaction: so few that nobody waits long for it.
const REMOVED_AT_ONCE: u32 = 256;

impl Watchdog {
    pub(super) async fn remove_finished(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        let retention = self.settings.watchdog.retention;
        while self.lead.wait(&beat, &self.stop).await {
            let started = Instant::now();
            let removed = self.outbox.store.remove_finished(retention, REMOVED_AT_ONCE).await?;
            metrics::watchdog_step("retention", started.elapsed());
            metrics::watchdog_handled(Watched::Removed, count(removed));
            beat.beat();
            // At most half of the time, so that others get at the database, however much is due.
            let busy = removed == u64::from(REMOVED_AT_ONCE);
            let wait = if busy { started.elapsed() } else { retention / 10 };
            let most = if busy { Duration::from_secs(10) } else { Duration::from_secs(60) };
            beat.idle(self.pause(wait.clamp(Duration::from_millis(10), most))).await;
        }
        Ok(())
    }
}
