//! Finds final records whose report is lost.
//!
//! A bus may be set back: a master of a Redis Cluster may fail over before its replica has
//! everything. So it may lose a report that its shard, on another master, has forwarded and
//! deleted. The record says that the task is done, and SQL will never learn of it. Such a task is
//! done again by workers that SQL has not credited.

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

/// For how long a task that is done again is not checked. A report that SQL refuses is not lost,
/// and the next one would be refused too; but a report may also be lost twice.
const AGAIN_AFTER: Duration = Duration::from_secs(3600);
/// The most such tasks to remember. Beyond that all are forgotten, and so checked again.
const MOST_REDONE: usize = 100_000;

/// How often to check how far the reports of a shard have come.
const ASK_EVERY: Duration = Duration::from_millis(100);

#[derive(Clone)]
pub(super) struct LostReports {
    store: Arc<dyn Tasks>,
    bus: Arc<dyn Bus>,
    queue: Upkeep,
    clock: Clock,
    shards: HashMap<ShardId, Unsettled>,
    /// Tasks that are done again, and since when.
    redone: HashMap<TaskId, Instant>,
}

/// Final records of a shard that SQL did not show as final. It takes a while until the same record
/// is on a page again, so those of one page are followed until all their reports have been handled.
#[derive(Clone, Default)]
struct Unsettled {
    asked: Option<Asked>,
    /// The reports of these are in SQL, or lost.
    read: HashSet<TaskId>,
}

#[derive(Clone)]
struct Asked {
    ids: HashSet<TaskId>,
    reports: Reports,
    at: Instant,
}

/// How far reports have come, if they are not lost.
#[derive(Clone)]
enum Reports {
    /// In the shard's outbox, up to this entry, or farther along.
    InOutbox(Offset),
    /// On the bus, before these ends of all partitions. All count, because the number of partitions
    /// may have grown since the report.
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

    /// Returns the tasks of a page of final records that SQL does not show as final and never will:
    /// their reports are lost, or they were sent again after the ends that the records show. `open`
    /// are those that it does not show as final now.
    ///
    /// A task needs at least two calls: everything that was on the bus at the first must have been
    /// handled at the second.
    pub(super) async fn among(
        &mut self,
        shard: &ShardId,
        page: &[TaskId],
        open: &HashSet<TaskId>,
    ) -> Result<HashSet<TaskId>, Error> {
        let now = self.clock.now();
        self.redone.retain(|_, at| now - *at < AGAIN_AFTER);
        // After an error the shard starts from the beginning.
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
        let sent_again = self.sent_again(shard, &lost).await?;
        let redone: Vec<TaskId> = lost
            .iter()
            .filter(|id| !sent_again.contains(id))
            .copied()
            .collect();
        if !redone.is_empty() {
            // Without a record these tasks count as missing, and are published again.
            tracing::warn!(%shard, "the reports of {} tasks of {shard} are lost: they are done again", redone.len());
        }
        self.redone.extend(redone.into_iter().map(|id| (id, now)));
        Ok(lost.into_iter().collect())
    }

    /// Those of these tasks whose records show how they ended before they were sent again. They
    /// wait in SQL: for their time, for room, or behind others of their sequences.
    async fn sent_again(&self, shard: &ShardId, ids: &[TaskId]) -> Result<HashSet<TaskId>, Error> {
        let mut sent_again = HashSet::new();
        if ids.is_empty() {
            return Ok(sent_again);
        }
        let (_, records) = self.queue.inspect(shard, ids).await?;
        let records: HashMap<_, _> = ids.iter().zip(records).collect();
        for state in self.store.states(ids).await? {
            let record = records.get(&state.id).and_then(Option::as_ref);
            if record.is_some_and(|record| record.is_past(state.epoch)) {
                sent_again.insert(state.id);
            }
        }
        Ok(sent_again)
    }

    /// Checks whether the reports that are being followed have come farther.
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
                // In this order: a report that has left the shard's outbox is before the end, or in
                // a partition that is newer than this process's connection to the bus.
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
