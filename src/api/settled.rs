//! Waits until SQL has all reports that taskd has accepted.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::Mutex,
    time::{Instant, sleep},
};

use super::error::Error;
use crate::{
    bus::{self, Bus, Topic},
    model::{Offset, ShardId},
    queue::{self, Upkeep},
    store::Store,
};

/// How often to ask whether reports have gone farther.
const FOLLOW_EVERY: Duration = Duration::from_millis(20);

/// Waits until discovery has settled all reports that taskd had accepted.
pub struct SettledReports {
    store: Arc<dyn Store>,
    queue: Upkeep,
    bus: Arc<dyn Bus>,
    /// When the last successful wait began. Callers that had called before need not wait again.
    last: Mutex<Option<Instant>>,
}

impl SettledReports {
    pub fn new(store: Arc<dyn Store>, queue: Upkeep, bus: Arc<dyn Bus>) -> Self {
        Self {
            store,
            queue,
            bus,
            last: Mutex::default(),
        }
    }

    /// Returns when all reports are settled that were accepted before this call. It waits as long
    /// as they take: the caller bounds it, and may drop it.
    pub(super) async fn wait(&self) -> Result<(), Error> {
        let called = Instant::now();
        let mut last = self.last.lock().await;
        if last.is_some_and(|began| began >= called) {
            return Ok(());
        }
        let began = Instant::now();
        self.follow().await?;
        *last = Some(began);
        Ok(())
    }

    /// Follows the reports: an accepted one is in the outbox of its shard, then on the bus, and
    /// discovery commits it when SQL has it.
    async fn follow(&self) -> Result<(), Error> {
        for (shard, last) in self.outboxes().await? {
            while self.has_until(&shard, last).await? {
                sleep(FOLLOW_EVERY).await;
            }
        }
        // Read after the outboxes, so that a report that has left its outbox stands before the end
        // of its partition. `ends` lacks partitions that were added since the bus was opened: the
        // check fails if there are any.
        self.bus.check_partitions().await?;
        let ends = self.bus.ends(Topic::TaskResults).await?;
        while !bus::has_read(&*self.bus, Topic::TaskResults, &ends).await? {
            sleep(FOLLOW_EVERY).await;
        }
        Ok(())
    }

    /// The outboxes that have reports, each with its last entry. SQL names the shards, because
    /// this process may not know one yet that another process has just opened.
    async fn outboxes(&self) -> Result<Vec<(ShardId, Offset)>, Error> {
        let stored = self.store.shards(None).await?;
        let open = stored.into_iter().filter(|shard| shard.is_open);
        let shards: Vec<ShardId> = open.map(|shard| shard.id).collect();
        let holdings = self.queue.holdings(&shards).await?;
        let mut outboxes = Vec::new();
        for (shard, holding) in shards.into_iter().zip(holdings) {
            match holding {
                Ok(Some(holding)) if holding.outbox > 0 => {
                    let extent = self.queue.outbox_extent(&shard).await?;
                    outboxes.push((shard, extent.last));
                }
                // No reports. `None`: Redis has lost the shard, and its reports with it.
                Ok(_) => {}
                // The error does not name the shard, because the caller may not know its queue.
                Err(cause) => return Err(Error::Queue(cause)),
            }
        }
        Ok(outboxes)
    }

    /// Whether the outbox still has an entry up to this one.
    async fn has_until(&self, shard: &ShardId, last: Offset) -> Result<bool, Error> {
        match self.queue.outbox_extent(shard).await {
            Ok(extent) => Ok(extent.first.is_some_and(|first| first <= last)),
            Err(queue::Error::NoGeneration) => Ok(false),
            Err(cause) => Err(Error::Queue(cause)),
        }
    }
}
