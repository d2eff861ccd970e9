//! Final records whose report is lost. A bus that falls back (a master of a Redis Cluster that fails over has told its replica nearly
//! everything) may lose a report that its shard, on another master, has forwarded and deleted: the record says that all is done, and SQL will
//! never hear of it. Such a task is done again, by whom SQL has not credited.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use crate::{
    bus::Topic,
    model::{Offset, ShardId, TaskId},
    pipelines::outbox::Outbox,
    queue::Upkeep,
};

/// What one process knows of it.
#[derive(Default)]
pub(super) struct Unreported {
    looks: HashMap<ShardId, Look>,
    /// When. A report that SQL refuses is not lost, and would be refused again at once; but one may also be lost twice.
    redone: HashMap<TaskId, Instant>,
}

const AGAIN_AFTER: Duration = Duration::from_secs(3600);
/// How many are remembered; then they are tried once more.
const MOST_REDONE: usize = 100_000;

/// All reports of these stood on the bus, up to `ends`, or were lost.
struct Look {
    ids: HashSet<TaskId>,
    /// By partition: all of them, for their number may have grown since the report.
    ends: Vec<Option<Offset>>,
}

impl Unreported {
    /// Of final records that SQL does not show final: those that it never will. Takes two calls at least, with everything that was on the bus
    /// at the first dealt with at the second.
    pub(super) async fn lost(
        &mut self,
        shard: &ShardId,
        unsettled: &HashSet<TaskId>,
        outbox: &Outbox,
        queue: &Upkeep,
    ) -> anyhow::Result<HashSet<TaskId>> {
        let none = HashSet::new();
        self.redone.retain(|_, at| at.elapsed() < AGAIN_AFTER);
        let unsettled: HashSet<_> = unsettled.iter().filter(|id| !self.redone.contains_key(id)).copied().collect();
        if unsettled.is_empty() {
            self.looks.remove(shard);
            return Ok(none);
        }
        let Some(look) = self.looks.get(shard) else {
            // Asked in this order: what is not in the shard's outbox any more stands before the end, or in a partition that is younger than
            // this opening of the bus.
            if queue.stats(shard).await?.outbox == 0 {
                outbox.bus.check_partitions().await?;
                let ends = outbox.bus.ends(Topic::TaskResults).await?;
                self.looks.insert(shard.clone(), Look { ids: unsettled, ends });
            }
            return Ok(none);
        };
        // A bus that has fallen back meanwhile does not come to those ends any more.
        let ends = outbox.bus.ends(Topic::TaskResults).await?;
        let committed = outbox.bus.committed(Topic::TaskResults).await?;
        let reached =
            look.ends.iter().zip(ends).zip(committed).all(|((then, now), committed)| committed >= now.min(*then));
        if !reached {
            return Ok(none);
        }
        // Read behind that: what was on the bus is in SQL.
        let mut lost: Vec<_> = unsettled.intersection(&look.ids).copied().collect();
        self.looks.remove(shard);
        let states = outbox.store.states(&lost).await?;
        let open: HashSet<_> = states.into_iter().filter(|s| !s.status.is_final()).map(|s| s.id).collect();
        lost.retain(|id| open.contains(id));
        if self.redone.len() > MOST_REDONE {
            self.redone.clear();
        }
        self.redone.extend(lost.iter().map(|id| (*id, Instant::now())));
        Ok(lost.into_iter().collect())
    }
}
