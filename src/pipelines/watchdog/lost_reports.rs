//! Final records whose report is lost.
//!
//! A bus may fall back: a master of a Redis Cluster that fails over has told its replica nearly
//! everything. So it may lose a report that its shard, on another master, has forwarded and
//! deleted. The record says that all is done, and SQL will never hear of it. Workers that SQL has
//! not credited do such a task again.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use super::error::Error;
use crate::{
    bus::{self, Bus, Topic},
    model::{Offset, ShardId, TaskId},
    pipelines::context::Context,
    queue::Upkeep,
    runtime::Clock,
    store::Tasks,
};

/// How long a task that was done again is not looked at. A report that SQL refuses is not lost, and
/// the next one would be refused too; but a report may also be lost twice.
const AGAIN_AFTER: Duration = Duration::from_secs(3600);
/// The number of such tasks that are remembered. Beyond it all are looked at again.
const MOST_REDONE: usize = 100_000;

/// How often to ask where the reports of a shard are.
const ASK_EVERY: Duration = Duration::from_millis(100);

#[derive(Clone)]
pub(super) struct LostReports {
    store: Arc<dyn Tasks>,
    bus: Arc<dyn Bus>,
    queue: Upkeep,
    clock: Clock,
    shards: HashMap<ShardId, Unsettled>,
    /// Tasks that were done again, and when.
    redone: HashMap<TaskId, Instant>,
}

/// Final records of a shard that SQL did not show final. Each comes round again behind the records
/// that ended before its last turn, so those of one page are followed until all their reports are
/// dealt with.
#[derive(Clone, Default)]
struct Unsettled {
    asked: Option<Asked>,
    /// No report of these is on its way any more.
    read: HashSet<TaskId>,
}

#[derive(Clone)]
struct Asked {
    ids: HashSet<TaskId>,
    reports: Reports,
    at: Instant,
}

/// Where reports are, if they are not lost.
#[derive(Clone)]
enum Reports {
    /// In the shard's outbox, up to this entry, or farther.
    InOutbox(Offset),
    /// Before these ends of all partitions: their number may have grown since the report.
    OnBus(Vec<Option<Offset>>),
    Read,
}

impl Unsettled {
    fn knows(&self, id: &TaskId) -> bool {
        self.read.contains(id)
            || self
                .asked
                .as_ref()
                .is_some_and(|asked| asked.ids.contains(id))
    }

    fn forget(&mut self, id: &TaskId) {
        self.read.remove(id);
        if let Some(asked) = &mut self.asked {
            asked.ids.remove(id);
        }
    }

    fn is_empty(&self) -> bool {
        self.read.is_empty() && self.asked.as_ref().is_none_or(|asked| asked.ids.is_empty())
    }
}

impl LostReports {
    pub(super) fn new(context: &Context) -> Self {
        let Context {
            store,
            bus,
            queue,
            clock,
            ..
        } = context.clone();
        Self {
            store,
            bus,
            queue: queue.upkeep,
            clock,
            shards: HashMap::new(),
            redone: HashMap::new(),
        }
    }

    /// Of a page of final records, those that SQL does not show final and never will. `open`: those
    /// that it does not show final now.
    ///
    /// A task needs two calls at least: all that was on the bus at the first must be dealt with at
    /// the second.
    pub(super) async fn among(
        &mut self,
        shard: &ShardId,
        page: &[TaskId],
        open: &HashSet<TaskId>,
    ) -> Result<HashSet<TaskId>, Error> {
        let now = self.clock.now();
        self.redone.retain(|_, at| now - *at < AGAIN_AFTER);
        // After an error the shard begins anew.
        let mut shard_has = self.shards.remove(shard).unwrap_or_default();
        page.iter()
            .filter(|id| !open.contains(id))
            .for_each(|id| shard_has.forget(id));
        self.follow(shard, &mut shard_has).await?;
        let unsettled: HashSet<_> = open
            .iter()
            .filter(|id| !self.redone.contains_key(id))
            .copied()
            .collect();
        let new: HashSet<_> = unsettled
            .iter()
            .filter(|id| !shard_has.knows(id))
            .copied()
            .collect();
        if shard_has.asked.is_none() && !new.is_empty() {
            let last = self.queue.outbox_extent(shard).await?.last;
            let reports = self.next(shard, Reports::InOutbox(last)).await?;
            shard_has.asked = Some(Asked {
                ids: new,
                reports,
                at: Instant::now(),
            });
        }
        // All reports that were on the bus are in SQL now.
        let lost: Vec<_> = unsettled.intersection(&shard_has.read).copied().collect();
        lost.iter().for_each(|id| shard_has.forget(id));
        if !shard_has.is_empty() {
            self.shards.insert(shard.clone(), shard_has);
        }
        let lost = self.store.unfinished_among(&lost).await?;
        if self.redone.len() > MOST_REDONE {
            self.redone.clear();
        }
        self.redone.extend(lost.iter().map(|id| (*id, now)));
        Ok(lost.into_iter().collect())
    }

    /// Finds out whether the reports that were asked for have gone farther.
    async fn follow(&self, shard: &ShardId, shard_has: &mut Unsettled) -> Result<(), Error> {
        let Some(Asked { ids, reports, at }) =
            shard_has.asked.take().filter(|asked| !asked.ids.is_empty())
        else {
            return Ok(());
        };
        if at.elapsed() < ASK_EVERY {
            shard_has.asked = Some(Asked { ids, reports, at });
            return Ok(());
        }
        match self.next(shard, reports).await? {
            Reports::Read => {
                if shard_has.read.len() > MOST_REDONE {
                    shard_has.read.clear();
                }
                shard_has.read.extend(ids);
            }
            reports => {
                shard_has.asked = Some(Asked {
                    ids,
                    reports,
                    at: Instant::now(),
                })
            }
        }
        Ok(())
    }

    async fn next(&self, shard: &ShardId, reports: Reports) -> Result<Reports, Error> {
        Ok(match reports {
            Reports::InOutbox(last) => match self.queue.outbox_extent(shard).await?.first {
                Some(first) if first <= last => reports,
                // In this order: a report that has left the shard's outbox stands before the end,
                // or in a partition that is younger than this opening of the bus.
                _ => {
                    self.bus.check_partitions().await?;
                    Reports::OnBus(self.bus.ends(Topic::TaskResults).await?)
                }
            },
            Reports::OnBus(ends)
                if bus::has_read(&*self.bus, Topic::TaskResults, &ends).await? =>
            {
                Reports::Read
            }
            reports => reports,
        })
    }
}
