//! The rebuild of shards: one walk over their unfinished tasks in SQL, which publishes them again
//! and changes no row.
//!
//! Each shard is open in Redis, and reads `pipeline` from the end that it had before the walk
//! began. So a task may arrive twice: from the walk, and from its inserter, the outbox or another
//! walk. All records of the walk are flagged `again`: the fanout drops a task that SQL shows as
//! final and adds the credits of the others, and the queue ignores a task that has a record. The
//! walk may start from the beginning at any time, and only repeats work.
//!
//! In the end one row per shard says where its tasks were published (`Store::end_rebuild`). It is
//! written after the last record, because the reconciler would never find a task missing whose
//! offset no record has.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{error::Error, shared::without_generation};
use crate::{
    bus::{self, Bus, Topic},
    model::{TaskId, TaskRow},
    pipelines::{
        admission::Gates,
        context::Context,
        publishing::{self, Last, Publisher},
    },
    queue::Upkeep,
    runtime::Loop,
    store::{Outbox, RebuildPage, Rebuilding, Rebuilt, Unpublished, Walked},
    telemetry::metrics::{self, Watched},
};

/// How many tasks the walk reads in one page.
const PAGE: u32 = 2000;
/// How many published pages the fanout may have yet to read. The bus may be Redis, where memory is
/// scarce.
const PAGES_IN_FLIGHT: usize = 8;
/// How often the walk checks how far the fanout has read, and whether Redis has memory.
const ASK_EVERY: Duration = Duration::from_millis(10);
/// How often a walk that waits checks for other reasons that may hold up the fanout.
const DOUBT_EVERY: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub(super) struct Rebuild {
    store: Arc<dyn Outbox>,
    bus: Arc<dyn Bus>,
    queue: Upkeep,
    publisher: Publisher,
    gates: Gates,
}

/// The last offsets of the pages that are in flight.
type InFlight = VecDeque<Last>;

impl Rebuild {
    pub(super) fn new(context: &Context) -> Self {
        let Context {
            store,
            bus,
            queue,
            publisher,
            gates,
            ..
        } = context.clone();
        Self {
            store,
            bus,
            queue: queue.upkeep,
            publisher,
            gates,
        }
    }

    /// Publishes all tasks of these shards, and ends the rebuild.
    pub(super) async fn run(&self, rebuilding: &Rebuilding, cx: &Loop) -> Result<(), Error> {
        let mut last = Last::new();
        let mut in_flight = InFlight::new();
        let mut doubt_at = cx.clock().now() + DOUBT_EVERY;
        let mut tasks = 0;
        let mut credited = 0;
        let mut page = self.store.rebuild_page(rebuilding, None, PAGE).await?;
        loop {
            self.wait_for_room(&mut in_flight, &mut doubt_at, cx)
                .await?;
            let (published, next) = tokio::try_join!(
                self.publish(&page.tasks),
                self.page_behind(rebuilding, page.next.as_ref())
            )?;
            tasks += page.tasks.len() as u64;
            credited += page.credited;
            metrics::watchdog_handled(Watched::Republished, page.tasks.len());
            cx.beat();
            last.extend(&published);
            in_flight.push_back(published);
            match next {
                Some(next) => page = next,
                None => break,
            }
        }
        self.end(rebuilding, &last).await?;
        let shards = rebuilding.shards.len();
        tracing::info!(
            "{shards} shards are rebuilt: {tasks} unfinished tasks go out again, {credited} replicas of theirs stay \
             credited; what else was done on them is done again"
        );
        Ok(())
    }

    async fn page_behind(
        &self,
        rebuilding: &Rebuilding,
        after: Option<&Walked>,
    ) -> Result<Option<RebuildPage>, Error> {
        match after {
            Some(_) => Ok(Some(
                self.store.rebuild_page(rebuilding, after, PAGE).await?,
            )),
            None => Ok(None),
        }
    }

    /// Publishes tasks. Returns the last offset per partition.
    ///
    /// If a task is too large for the bus, moves the page to the outbox, which ends that task.
    async fn publish(&self, tasks: &[TaskRow]) -> Result<Last, Error> {
        match self.publisher.publish_again(tasks).await {
            Err(publishing::Error::Bus(bus::Error::TooLarge { .. })) => {
                let ids: Vec<TaskId> = tasks.iter().map(|task| task.id).collect();
                self.store.unpublish(&ids, Unpublished::Missing).await?;
                Ok(Last::new())
            }
            published => Ok(published?),
        }
    }

    /// Waits while too many pages are in flight, or Redis has little memory left, because the
    /// fanout would park every task then.
    ///
    /// From time to time checks for another lost shard, even if it need not wait, because nothing
    /// else does so during the walk.
    /// during the walk.
    async fn wait_for_room(
        &self,
        in_flight: &mut InFlight,
        doubt_at: &mut Instant,
        cx: &Loop,
    ) -> Result<(), Error> {
        loop {
            if cx.stop.is_cancelled() {
                return Err(Error::Stopping);
            }
            if in_flight.len() >= PAGES_IN_FLIGHT {
                let committed = self.bus.committed(Topic::Pipeline).await?;
                let read = |partition: u32| committed.get(partition as usize).copied().flatten();
                while in_flight.front().is_some_and(|page| {
                    page.iter()
                        .all(|(partition, at)| read(*partition) >= Some(*at))
                }) {
                    in_flight.pop_front();
                }
            }
            if *doubt_at <= cx.clock().now() {
                self.check_fanout(in_flight).await?;
                *doubt_at = cx.clock().now() + DOUBT_EVERY;
            }
            if in_flight.len() < PAGES_IN_FLIGHT && !self.gates.is_short() {
                return Ok(());
            }
            cx.beat();
            cx.pause(ASK_EVERY).await;
        }
    }

    /// Checks for reasons why the fanout would never read the pages in flight. Returns an error if
    /// there is one, after which the watchdog starts the rebuild again.
    async fn check_fanout(&self, in_flight: &InFlight) -> Result<(), Error> {
        // The fanout waits for every shard of its partitions.
        if !without_generation(&self.queue, self.queue.shards())
            .await?
            .is_empty()
        {
            return Err(Error::LostMeanwhile);
        }
        for (partition, at) in in_flight.front().into_iter().flatten() {
            if self
                .bus
                .lies_beyond(Topic::Pipeline, *partition, *at)
                .await?
            {
                return Err(Error::PipelineMadeAnew);
            }
        }
        Ok(())
    }

    async fn end(&self, rebuilding: &Rebuilding, last: &Last) -> Result<(), Error> {
        let rebuilt = rebuilding.shards.iter().map(|(shard, generation)| Rebuilt {
            shard: shard.clone(),
            generation: *generation,
            offset: last.get(&shard.number).copied(),
        });
        let rebuilt: Vec<Rebuilt> = rebuilt.collect();
        Ok(self
            .store
            .end_rebuild(self.bus.generation(), &rebuilt)
            .await?)
    }
}
