//! The partitions that a reader owns.

use std::collections::HashMap;

use super::{error::Error, reader::Fanout};
use crate::model::{Offset, ShardId};

/// What a reader knows about its partitions.
#[derive(Default)]
pub(super) struct Owned {
    /// For each partition, its tenure and the epoch that was taken for that.
    epochs: HashMap<u32, (u64, u64)>,
    /// The last record that was enqueued, for each shard. If Redis was set back to before it, the
    /// reader seeks back.
    pub(super) last: HashMap<ShardId, Offset>,
}

impl Owned {
    pub(super) fn tenure(&self, partition: u32) -> u64 {
        self.epochs.get(&partition).map_or(0, |(tenure, _)| *tenure)
    }

    /// The epoch of the present tenure.
    pub(super) fn epoch(&self, partition: u32) -> u64 {
        self.epochs.get(&partition).map_or(0, |(_, epoch)| *epoch)
    }
}

impl Fanout {
    /// Takes an epoch at the first record of a tenure. From then on Redis refuses the previous
    /// owner, however long that was held up.
    pub(super) async fn take_epoch(
        &self,
        partition: u32,
        tenure: u64,
        owned: &mut Owned,
    ) -> Result<(), Error> {
        if owned
            .epochs
            .get(&partition)
            .is_none_or(|(of, _)| *of != tenure)
        {
            let epoch = self.0.coordination.take_epoch(partition).await?;
            owned.epochs.insert(partition, (tenure, epoch));
            // Other owners have enqueued since, and may have closed known shards.
            owned.last.retain(|shard, _| shard.number != partition);
        }
        Ok(())
    }

    /// Returns the error that ends a fenced reader. The next one joins the group again, and takes a
    /// higher epoch if it gets the partition.
    pub(super) async fn fenced(&self, partition: u32, epoch: u64, by: u64) -> Error {
        match self.0.coordination.epoch_is_at_least(partition, by).await {
            Ok(()) => Error::Fenced {
                partition,
                epoch,
                by,
            },
            Err(error) => error.into(),
        }
    }
}
