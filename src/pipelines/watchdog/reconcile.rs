//! Compares SQL with Redis, and brings back what Redis lost, whole shards and single tasks.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{error::Error, lead::Lead, lost_shards::LostShards, shared::MovesShards};
use crate::{
    model::{TaskId, millis},
    pipelines::{
        checking::{self, Failed, Published},
        context::Context,
    },
    queue::{Failing, Upkeep},
    runtime::{Clock, Loop},
    store::{Outbox, Stretch, Turn, Unpublished, Walked},
    telemetry::metrics::{self, Watched},
};

/// How many tasks of SQL are compared with Redis at a time.
const PAGE: u32 = 10_000;
/// How many batches are checked at a time for removal, if no task needs them.
const BATCHES: u32 = 1000;
/// The pause after a page, as a multiple of the time that the page took. So comparing takes a tenth
/// of the time, however slow SQL is.
const SHARE: u32 = 9;
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// Tasks younger than this, or than `republish_after`, are not compared: most are done before that.
const YOUNG: Duration = Duration::from_secs(5);
/// How often to check all shards for a generation. Each round checks only those in which something
/// happens.
const ALL_EVERY: Duration = Duration::from_secs(30);
/// The most tasks in one transaction.
const AT_ONCE: usize = 1000;

#[derive(Clone)]
pub(super) struct Reconcile {
    store: Arc<dyn Outbox>,
    published: Published,
    queue: Upkeep,
    every: Duration,
    young: Duration,
    clock: Clock,
    lost_shards: LostShards,
    lead: Lead,
    place: Arc<Mutex<Place>>,
}

/// How far a walk has come. After an error the loop continues there.
#[derive(Default)]
struct Place {
    after: Option<Walked>,
    /// Where the walk ends, so that tasks that are added and finished in the meantime do not keep
    /// it in one queue.
    upto: Option<TaskId>,
    after_batch: Option<Turn>,
}

impl Reconcile {
    pub(super) fn new(context: &Context, lead: &Lead, moves_shards: &MovesShards) -> Self {
        let Context {
            store,
            bus,
            queue,
            settings,
            clock,
            ..
        } = context.clone();
        let lost_shards = LostShards::new(context, moves_shards);
        let published = Published::new(store.clone(), queue.shards, bus);
        let every = settings.watchdog.reconcile_every;
        let young = settings.watchdog.republish_after.min(YOUNG);
        let queue = queue.upkeep;
        let lead = lead.clone();
        let place = Arc::default();
        Self {
            store,
            published,
            queue,
            every,
            young,
            clock,
            lost_shards,
            lead,
            place,
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        let mut failing = Failing::default();
        let mut next_page = cx.clock().now();
        let mut all_asked = None::<Instant>;
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            let now = cx.clock().now();
            // An empty shard can lose nothing but its generation, so check it rarely.
            let all = all_asked.is_none_or(|at| now - at >= ALL_EVERY);
            let shards = if all {
                self.queue.shards()
            } else {
                self.queue.awake_shards()
            };
            self.lost_shards.bring_back(shards, &cx).await?;
            if all {
                all_asked = Some(now);
            }
            let compares = Instant::now();
            if next_page <= cx.clock().now() {
                self.compare_page(&mut failing).await?;
                let after_batch = self.place.lock().after_batch;
                let after_batch = self.store.remove_batches(after_batch, BATCHES).await?;
                self.place.lock().after_batch = after_batch;
                next_page = cx.clock().now() + (compares.elapsed() * SHARE).min(LONGEST_WAIT);
            }
            metrics::watchdog_step("reconcile", started.elapsed());
            cx.beat();
            cx.idle(cx.pause(self.every)).await;
        }
        Ok(())
    }

    /// Returns where a walk that begins now ends.
    async fn end_of_walk(&self) -> Result<Option<TaskId>, Error> {
        let last = self.store.last_id().await?;
        Ok(last.map(|last| end_of_walk(last, self.clock.now_unix_ms(), self.young)))
    }

    /// Compares the next page of SQL with Redis. A shard that does not answer does not hold up
    /// others.
    async fn compare_page(&self, failing: &mut Failing<checking::Error>) -> Result<(), Error> {
        let (after, upto) = {
            let place = self.place.lock();
            (place.after.clone(), place.upto)
        };
        let Some(upto) = (if upto.is_some() {
            upto
        } else {
            self.end_of_walk().await?
        }) else {
            return Ok(());
        };
        let stretch = Stretch {
            queue: None,
            after: after.as_ref(),
            upto,
        };
        let page = self
            .published
            .page(stretch, PAGE, &mut Failed::OfLoop(failing))
            .await?;
        let missing: Vec<TaskId> = page.missing.into_iter().map(|(_, id)| id).collect();
        if !missing.is_empty() {
            tracing::warn!(
                "{} tasks are in SQL and not in Redis: they go out again",
                missing.len()
            );
        }
        for missing in missing.chunks(AT_ONCE) {
            self.store.unpublish(missing, Unpublished::Missing).await?;
            metrics::watchdog_handled(Watched::Republished, missing.len());
        }
        // Redis has just said which shards have a generation, so the shards are the cause, even if
        // the page is of one queue and all of its shards fail.
        failing.end_part("compare with SQL");
        let mut place = self.place.lock();
        place.upto = page.next.as_ref().map(|_| upto);
        place.after = page.next;
        Ok(())
    }
}

/// Returns the last id that is old enough. `last` is the last of all ids.
fn end_of_walk(last: TaskId, now_unix_ms: i64, young: Duration) -> TaskId {
    let old = now_unix_ms.saturating_sub(millis(young));
    // An id with a time in the future comes from another clock, or this clock was set back. Then
    // age says nothing.
    if last.created_unix_ms() > now_unix_ms {
        last
    } else {
        TaskId::first_of(old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_ends_before_the_young_tasks() {
        let now = 1_700_000_000_000;
        let upto = |last: TaskId| end_of_walk(last, now, Duration::from_secs(5));
        let [old, young] = [now - 5001, now - 5000].map(|at| TaskId::at(at, 0));
        for last in [old, young, TaskId::at(now, 0)] {
            assert!(old < upto(last) && upto(last) < young);
        }
        let of_another_clock = TaskId::at(now + 1, 0);
        assert_eq!(upto(of_another_clock), of_another_clock);
    }
}
