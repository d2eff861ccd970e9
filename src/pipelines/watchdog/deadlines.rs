//! Ends tasks whose deadline has passed.
//!
//! Crash windows:
//!
//! - Killed after SQL has returned the page: the page is returned again after [`AGAIN`].
//! - Killed after the script: the report is in the outbox of the shard, and the forwarder finds it.
//!   When the deadline is due again, SQL has the end, or the script says that the task is dead.
//! - Redis or the bus loses the report: the task is live again, and the deadline is due again.
//! - SQL is set back: it has the deadline, or does not have the task.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{error::Error, lead::Lead};
use crate::{
    model::millis,
    pipelines::{changing::Changing, context::Context},
    runtime::{Clock, LastSaid, Loop},
    store::Tasks,
    telemetry::metrics::{self, Watched},
};

/// How often the watchdog checks for deadlines.
const EVERY: Duration = Duration::from_millis(500);
/// After this time a deadline is due again, unless SQL shows the end of its task by then.
const AGAIN: Duration = Duration::from_secs(10);
/// The most deadlines of one page.
const PAGE: u32 = 500;

#[derive(Clone)]
pub(super) struct Deadlines {
    store: Arc<dyn Tasks>,
    changing: Changing,
    clock: Clock,
    lead: Lead,
}

impl Deadlines {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        let store = context.store.clone();
        let changing = context.changing();
        let clock = context.clock.clone();
        Self {
            store,
            changing,
            clock,
            lead: lead.clone(),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        let mut said = LastSaid::nothing();
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            let page = self.page(&mut said).await;
            metrics::watchdog_step("deadlines", started.elapsed());
            // If shards do not answer, that is no reason for another process to take over the
            // watchdog's work.
            cx.beat();
            if !cx.idle(cx.pause(page?)).await {
                break;
            }
        }
        Ok(())
    }

    /// Ends the tasks of a page. Returns the pause after it, which is short if there may be more:
    /// those of this page are due again later.
    ///
    /// A shard that does not answer does not hold up others, even if the page is full of its tasks.
    /// Returns an error only if no task of a page that was not full died.
    async fn page(&self, said: &mut LastSaid) -> Result<Duration, Error> {
        let began = Instant::now();
        let now = self.clock.now_unix_ms();
        let again = now + millis(AGAIN);
        let page = self.store.due_deadlines(now, again, PAGE).await?;
        let (dead, failed) = self.changing.end_overdue(page.overdue).await;
        metrics::watchdog_handled(Watched::Overdue, dead);
        match failed.filter(|error| !error.is_without_generation()) {
            Some(error) if dead == 0 && !page.is_full => return Err(error.into()),
            Some(error) if said.is_news(&error.to_string()) => {
                tracing::warn!("the deadlines of some tasks come again in {AGAIN:?}: {error}");
            }
            _ => {}
        }
        Ok(match (page.is_full, dead) {
            (false, _) => EVERY,
            // Leave half of the time to others who use the database.
            (true, 0) => began.elapsed(),
            (true, _) => Duration::ZERO,
        })
    }
}
