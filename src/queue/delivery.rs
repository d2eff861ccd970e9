//! The answer to a claim, on its way to the worker.

use std::{sync::Arc, time::Duration};

use tokio::sync::mpsc;

use super::{
    shard_cache::ShardCache,
    types::{Leased, RejectMode, Rejection},
};
use crate::model::{LeaseToken, ShardId, TaskId, WorkerName};

/// Leases of a shard that were not delivered.
pub(super) type Undelivered = (ShardId, Vec<Rejection>);

/// The answer to a claim.
pub struct Granted {
    pub tasks: Vec<Leased>,
    /// The scan ended at its limit: ask again before waiting.
    pub more: bool,
    /// How many tasks were left out because their deadline has passed. There may be others after
    /// them.
    pub overdue: usize,
    /// Nothing wakes the caller when there is more for it, so ask again in a moment.
    pub again_soon: bool,
    pub delivery: Delivery,
}

impl Granted {
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    pub fn bytes(&self) -> usize {
        self.tasks.iter().map(|task| task.body.len()).sum()
    }

    /// Marks the tasks as delivered and returns them.
    pub fn deliver(self) -> Vec<Leased> {
        self.delivery.delivered();
        self.tasks
    }
}

/// Leases on their way to their worker.
///
/// If dropped before [`Delivery::delivered`], releases them at no cost, because no worker has seen
/// them. If the process dies in between, that costs nothing either: the lease runs out, and its
/// grant is known to be undelivered.
pub struct Delivery {
    pub(super) worker: WorkerName,
    pub(super) leases: Vec<(TaskId, LeaseToken)>,
    pub(super) shard: ShardId,
    pub(super) cache: Arc<ShardCache>,
    pub(super) release: mpsc::UnboundedSender<Undelivered>,
}

/// How long a task whose deadline has passed stays away from workers, unless the watchdog ends it
/// before.
const OVERDUE_FOR: Duration = Duration::from_secs(5);

impl Delivery {
    /// Gives back tasks of this grant whose deadline has passed, at no cost. The watchdog ends
    /// them.
    pub(super) fn put_off(&self, overdue: Vec<Leased>) {
        if overdue.is_empty() {
            return;
        }
        let back = overdue.into_iter().map(|Leased { id, token, .. }| {
            let mode = RejectMode::PutOff(OVERDUE_FOR);
            Rejection {
                id,
                token,
                worker: self.worker.clone(),
                mode,
                reason: String::new(),
                limit: Default::default(),
            }
        });
        drop(self.release.send((self.shard.clone(), back.collect())));
    }

    /// Records that the worker has the leases: their failures count from now on.
    pub fn delivered(mut self) {
        if let Some((_, token)) = self.leases.first() {
            self.cache.note_delivered(token.grant);
        }
        self.leases.clear();
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if self.leases.is_empty() {
            return;
        }
        let worker = &self.worker;
        let back = self.leases.drain(..).map(|(id, token)| {
            let mode = RejectMode::Release;
            Rejection {
                id,
                token,
                worker: worker.clone(),
                mode,
                reason: String::new(),
                limit: Default::default(),
            }
        });
        // The receiver is dropped last, when no call is in flight. Without it the leases run out.
        drop(self.release.send((self.shard.clone(), back.collect())));
    }
}
