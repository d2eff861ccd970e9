//! Removes tasks, trees and executions from SQL that ended long ago, old dead letters, and old failed
//! attempts.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{error::Error, lead::Lead, shared::count};
use crate::{
    config::Watchdog,
    model::{QueueName, TaskId, millis},
    pipelines::context::Context,
    runtime::Loop,
    store::{CompletedPage, Store},
    telemetry::metrics::{self, Watched},
};

/// How many tasks, letters or attempts one transaction removes: few, so that nobody waits long for
/// it; more if there are many and a page is quick, because a database on another machine needs
/// that.
const REMOVED_AT_ONCE: u32 = 256;
const REMOVED_AT_MOST: u32 = 2048;
const QUICK: Duration = Duration::from_millis(50);
/// The shortest pause, and the longest after a full and after any other page.
const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST_BUSY: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub(super) struct Retention {
    store: Arc<dyn Store>,
    retention: Duration,
    /// The queues whose completed tasks go earlier.
    of_queues: BTreeMap<QueueName, Duration>,
    letter_retention: Duration,
    history_retention: Duration,
    lead: Lead,
}

impl Retention {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        let Context {
            store, settings, ..
        } = context.clone();
        let Watchdog {
            retention,
            letter_retention,
            history_retention,
            ..
        } = settings.watchdog;
        let mut of_queues = BTreeMap::new();
        for (queue, own) in &settings.queues.named {
            if !own.retention.is_zero() {
                of_queues.insert(queue.clone(), own.retention);
            }
        }
        Self {
            store,
            retention,
            of_queues,
            letter_retention,
            history_retention,
            lead: lead.clone(),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        let mut most = REMOVED_AT_ONCE;
        // Where the next page of each queue begins.
        let mut positions: BTreeMap<&QueueName, TaskId> = BTreeMap::new();
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            // The database's clock decides, and does not know of the time that a test has skipped.
            let age = |retention: Duration| retention.saturating_sub(cx.clock().skipped());
            let mut is_full = false;
            if !self.retention.is_zero() {
                let removed = self
                    .store
                    .remove_finished(age(self.retention), most)
                    .await?;
                metrics::watchdog_handled(Watched::Removed, count(removed));
                is_full |= removed == u64::from(most);
                let trees = self
                    .store
                    .remove_ended_trees(age(self.retention), most)
                    .await?;
                is_full |= trees >= u64::from(most);
                let executions = self
                    .store
                    .remove_ended_executions(age(self.retention), most)
                    .await?;
                is_full |= executions >= u64::from(most);
            }
            for (queue, retention) in &self.of_queues {
                let created_before_ms = cx.clock().now_unix_ms() - millis(*retention);
                let page = CompletedPage {
                    queue: queue.clone(),
                    age: age(*retention),
                    after: positions.remove(queue).unwrap_or(TaskId::FIRST),
                    below: TaskId::first_of(created_before_ms),
                    limit: most,
                };
                let done = self.store.remove_completed(&page).await?;
                metrics::watchdog_handled(Watched::Removed, count(done.removed));
                if let Some(last) = done.last {
                    positions.insert(queue, last);
                    is_full = true;
                }
            }
            if !self.letter_retention.is_zero() {
                let letters = self
                    .store
                    .remove_old_letters(age(self.letter_retention), most)
                    .await?;
                is_full |= letters == u64::from(most);
            }
            if !self.history_retention.is_zero() {
                let attempts = self
                    .store
                    .remove_old_failures(age(self.history_retention), most)
                    .await?;
                metrics::history_removed(attempts);
                is_full |= attempts == u64::from(most);
            }
            metrics::watchdog_step("retention", started.elapsed());
            cx.beat();
            most = next_page(most, is_full, started.elapsed());
            // Work at most half of the time, so that others can use the database however much is
            // due.
            let wait = match is_full {
                true => started.elapsed().clamp(SHORTEST, LONGEST_BUSY),
                false => {
                    let kept = [
                        self.retention,
                        self.letter_retention,
                        self.history_retention,
                    ];
                    let of_queues = self.of_queues.values().copied();
                    (kept
                        .into_iter()
                        .chain(of_queues)
                        .filter(|kept| !kept.is_zero())
                        .min()
                        .unwrap_or_default()
                        / 10)
                        .clamp(SHORTEST, LONGEST)
                }
            };
            cx.idle(cx.pause(wait)).await;
        }
        Ok(())
    }
}

/// Returns the size of the page after one of `most` that took this long.
fn next_page(most: u32, is_full: bool, took: Duration) -> u32 {
    match is_full {
        true if took < QUICK => (2 * most).min(REMOVED_AT_MOST),
        true if took < 2 * QUICK => most,
        true => (most / 2).max(REMOVED_AT_ONCE),
        false => REMOVED_AT_ONCE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_grow_while_they_are_full_and_quick() {
        let quick = Duration::from_millis(10);
        let slow = Duration::from_millis(200);
        assert_eq!(next_page(256, true, quick), 512);
        assert_eq!(next_page(2048, true, quick), 2048);
        assert_eq!(next_page(512, true, QUICK), 512);
        assert_eq!(
            [next_page(512, true, slow), next_page(256, true, slow)],
            [256, 256]
        );
        assert_eq!(next_page(2048, false, quick), 256);
    }
}
