//! Removes idempotency keys whose window is over from SQL.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{error::Error, lead::Lead};
use crate::{
    config::Queues, pipelines::context::Context, runtime::Loop, store::Tasks, telemetry::metrics,
};

/// The most keys that one transaction removes: few, so that nobody waits long for it.
const REMOVED_AT_ONCE: u32 = 256;
/// The shortest pause, and the longest after a full and after any other page.
const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST_BUSY: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub(super) struct Idempotency {
    store: Arc<dyn Tasks>,
    /// The wait after a page that was not full.
    pause: Duration,
    lead: Lead,
}

impl Idempotency {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        let Context {
            store, settings, ..
        } = context.clone();
        let pause = (shortest_window(&settings.queues) / 10).clamp(SHORTEST, LONGEST);
        Self {
            store,
            pause,
            lead: lead.clone(),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            let removed = self
                .store
                .remove_expired_keys(cx.clock().now_unix_ms(), REMOVED_AT_ONCE)
                .await?;
            metrics::watchdog_step("idempotency", started.elapsed());
            cx.beat();
            // Work at most half of the time, so that others can use the database however much is
            // due.
            let wait = match removed == u64::from(REMOVED_AT_ONCE) {
                true => started.elapsed().clamp(SHORTEST, LONGEST_BUSY),
                false => self.pause,
            };
            cx.idle(cx.pause(wait)).await;
        }
        Ok(())
    }
}

fn shortest_window(queues: &Queues) -> Duration {
    let windows = queues.named.values().map(|queue| queue.idempotency_window);
    windows.fold(queues.default.idempotency_window, Duration::min)
}
