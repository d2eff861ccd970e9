//! Shards that refuse a call, or do not answer: their tasks wait in SQL, and hold up no other queue.
//!
//! The watchdog releases the tasks when the shard answers again. Until then the reader tries the shard from time to
//! time. With the first call that succeeds, the shard stores the offset of its last parked task. So a call of before
//! that reaches Redis late finds its tasks passed.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    error::Error,
    groups::{Group, Groups},
    owned::{LeftOut, Owned},
    reader::Fanout,
};
use crate::{model::ShardId, queue, store::Unpublished, telemetry::metrics::FanoutBatch};

/// A group that is not in its shard, and why.
pub(super) struct Refused {
    pub(super) shard: ShardId,
    pub(super) group: Group,
    pub(super) cause: queue::Error,
}

/// How long a shard is left out at least, and at most. In between, as long as its failure took.
const AT_LEAST: Duration = Duration::from_secs(1);
const AT_MOST: Duration = Duration::from_secs(10);

impl Owned {
    pub(super) fn leaves_out(&self, shard: &ShardId) -> bool {
        self.left_out.get(shard).is_some_and(|left_out| Instant::now() < left_out.until)
    }

    /// Whether the shard has not passed its parked tasks.
    pub(super) fn has_to_pass(&self, shard: &ShardId) -> bool {
        self.left_out.get(shard).is_some_and(|left_out| left_out.upto.is_some())
    }

    /// Notes that the shard has answered.
    pub(super) fn answered(&mut self, shard: &ShardId, group: &Group) {
        match self.left_out.get_mut(shard) {
            Some(left_out) if group.tasks.is_empty() => left_out.upto = None,
            Some(_) => drop(self.left_out.remove(shard)),
            None => {}
        }
    }

    /// Adds an empty group for each shard that is to be tried again.
    pub(super) fn add_due(&self, groups: &mut Groups) {
        let now = Instant::now();
        for (shard, left_out) in self.left_out.iter().filter(|(_, left_out)| left_out.until <= now) {
            if let Some(upto) = left_out.upto {
                let group = groups.entry(shard.clone()).or_default();
                group.upto = group.upto.max(upto);
            }
        }
    }

    /// Waits until a shard is to be tried again; for ever where none is left out.
    pub(super) async fn is_due(&self) {
        let to_pass = self.left_out.values().filter(|left_out| left_out.upto.is_some());
        match to_pass.map(|left_out| left_out.until).min() {
            Some(until) => tokio::time::sleep_until(until).await,
            None => std::future::pending().await,
        }
    }
}

impl Fanout {
    /// Parks the groups of left-out shards.
    pub(super) async fn park(&self, groups: &Groups, owned: &mut Owned, done: &mut FanoutBatch) -> Result<(), Error> {
        let tasks = groups.values().flat_map(|group| &group.tasks);
        let ids: Vec<_> = tasks.map(|task| task.id).collect();
        if !ids.is_empty() {
            self.0.store.unpublish(&ids, Unpublished::Parked).await?;
        }
        done.parked += ids.len();
        for (shard, group) in groups {
            if let Some(left_out) = owned.left_out.get_mut(shard) {
                left_out.upto = left_out.upto.max(Some(group.upto));
            }
        }
        Ok(())
    }

    /// Parks refused groups, and leaves out their shards for a while. `has_done`: Redis took other groups of the batch.
    pub(super) async fn park_refused(
        &self,
        refused: Vec<Refused>,
        has_done: bool,
        began: Instant,
        owned: &mut Owned,
        done: &mut FanoutBatch,
    ) -> Result<(), Error> {
        let Some(first) = refused.first() else { return Ok(()) };
        // Does Redis take any write? If it does not, the shards are not the cause.
        if !has_done && self.renew_epoch(first.shard.number, owned).await.is_err() {
            return Err(Error::Enqueue { shard: first.shard.clone(), cause: first.cause.clone() });
        }
        let until = Instant::now() + began.elapsed().clamp(AT_LEAST, AT_MOST);
        let mut groups = Groups::new();
        for Refused { shard, group, cause } in refused {
            let upto = owned.left_out.get(&shard).and_then(|left_out| left_out.upto);
            if owned.left_out.insert(shard.clone(), LeftOut { until, upto }).is_none() {
                tracing::warn!(%shard, "cannot enqueue to {shard}: its tasks wait in SQL until it answers: {cause}");
            }
            groups.insert(shard, group);
        }
        self.park(&groups, owned, done).await
    }
}
