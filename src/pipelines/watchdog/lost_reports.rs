//! Final records whose report is lost.
//!
//! A bus may fall back: a master of a Redis Cluster that fails over has told its replica nearly everything. So it may
//! lose a report that its shard, on another master, has forwarded and deleted. The record says that all is done, and
//! SQL will never hear of it. Workers that SQL has not credited do such a task again.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{context::Context, error::Error};
use crate::{
    bus::{Bus, Topic},
    model::{Offset, ShardId, TaskId},
    queue::Upkeep,
    runtime::Clock,
    store::Store,
};

/// How long a task that was done again is not looked at. A report that SQL refuses is not lost, and the next one would
/// be refused too; but a report may also be lost twice.
const AGAIN_AFTER: Duration = Duration::from_secs(3600);
/// The number of such tasks that are remembered. Beyond it all are looked at again.
const MOST_REDONE: usize = 100_000;

#[derive(Clone)]
pub(super) struct LostReports {
    store: Arc<dyn Store>,
    bus: Arc<dyn Bus>,
    queue: Upkeep,
    clock: Clock,
    looks: HashMap<ShardId, Look>,
    /// Tasks that were done again, and when.
    redone: HashMap<TaskId, Instant>,
}

/// Final records without a final task in SQL. Their reports stood before `ends`, or were lost.
#[derive(Clone)]
struct Look {
    ids: HashSet<TaskId>,
    /// The ends of all partitions: their number may have grown since the report.
    ends: Vec<Option<Offset>>,
}

impl LostReports {
    pub(super) fn new(context: &Context) -> Self {
        let Context { store, bus, queue, clock, .. } = context.clone();
        Self { store, bus, queue, clock, looks: HashMap::new(), redone: HashMap::new() }
    }

    /// Of final records that SQL does not show final, those that it never will.
    ///
    /// A shard needs two calls at least: all that was on the bus at the first must be dealt with at the second.
    pub(super) async fn among(
        &mut self,
        shard: &ShardId,
        unsettled: &HashSet<TaskId>,
    ) -> Result<HashSet<TaskId>, Error> {
        let none = HashSet::new();
        let now = self.clock.now();
        self.redone.retain(|_, at| now - *at < AGAIN_AFTER);
        let unsettled: HashSet<_> = unsettled.iter().filter(|id| !self.redone.contains_key(id)).copied().collect();
        if unsettled.is_empty() {
            self.looks.remove(shard);
            return Ok(none);
        }
        let Some(look) = self.looks.get(shard) else {
            // In this order: a report that has left the shard's outbox stands before the end, or in a partition that
            // is younger than this opening of the bus.
            if self.queue.stats(shard).await?.outbox == 0 {
                self.bus.check_partitions().await?;
                let ends = self.bus.ends(Topic::TaskResults).await?;
                self.looks.insert(shard.clone(), Look { ids: unsettled, ends });
            }
            return Ok(none);
        };
        if !self.is_read(look).await? {
            return Ok(none);
        }
        // All reports that were on the bus are in SQL now.
        let mut lost: Vec<_> = unsettled.intersection(&look.ids).copied().collect();
        self.looks.remove(shard);
        let states = self.store.states(&lost).await?;
        let open: HashSet<_> = states.into_iter().filter(|s| !s.status.is_final()).map(|s| s.id).collect();
        lost.retain(|id| open.contains(id));
        if self.redone.len() > MOST_REDONE {
            self.redone.clear();
        }
        self.redone.extend(lost.iter().map(|id| (*id, now)));
        Ok(lost.into_iter().collect())
    }

    /// Whether discovery has read `task-results` to the ends of this look.
    async fn is_read(&self, look: &Look) -> Result<bool, Error> {
        // A bus that has fallen back meanwhile never reaches those ends, so its present ones count.
        let ends = self.bus.ends(Topic::TaskResults).await?;
        let committed = self.bus.committed(Topic::TaskResults).await?;
        let mut partitions = look.ends.iter().zip(ends).zip(committed);
        Ok(partitions.all(|((then, now), committed)| committed >= now.min(*then)))
    }
}
