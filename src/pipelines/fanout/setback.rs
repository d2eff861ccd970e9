//! Handles a bus or a Redis that was set back: the reader continues from where both agree.

use futures::{StreamExt, TryStreamExt, stream};

use super::{
    enqueue::is_of_shard,
    error::Error,
    held_shards::HeldShards,
    owned::Owned,
    reader::{AT_ONCE, Fanout},
};
use crate::{
    bus::{Reader, Topic},
    model::{Offset, ShardId},
    queue,
};

impl Fanout {
    /// Returns whether the shard's stored offset is beyond the end of its partition. Such a shard
    /// would take new records for known ones.
    pub(super) async fn has_read_beyond(&self, shard: &ShardId) -> Result<bool, Error> {
        let (stored, _) = self.0.queue.inspect(shard, &[]).await?;
        match stored.filter(|(topic, _)| topic == self.0.bus.generation()) {
            Some((_, offset)) => Ok(self
                .0
                .bus
                .lies_beyond(Topic::Pipeline, shard.number, offset)
                .await?),
            None => Ok(false),
        }
    }

    /// Rewinds the partition's shards, because the bus is assigning the same offsets a second time.
    ///
    /// The error ends this reader. The next one begins at the committed offset and reads the same
    /// records again.
    pub(super) async fn begin_anew(&self, partition: u32, epoch: u64) -> Error {
        match self.rewind(partition, epoch).await {
            Ok(()) => Error::MadeAnew { partition },
            Err(error) => error,
        }
    }

    async fn rewind(&self, partition: u32, epoch: u64) -> Result<(), Error> {
        for shard in self
            .0
            .queue
            .shards()
            .into_iter()
            .filter(|shard| shard.number == partition)
        {
            if self.has_read_beyond(&shard).await? {
                self.0.queue.enqueuer.rewind(&shard, epoch).await?;
            }
        }
        Ok(())
    }

    /// Reads the partition again from the point to which Redis was set back.
    pub(super) async fn seek_back(
        &self,
        partition: u32,
        reader: &mut dyn Reader,
        owned: &mut Owned,
        held: &mut HeldShards,
    ) -> Result<(), Error> {
        let mut stored = self.fell_back_to(partition, owned).await?;
        if let Some(first) = held.forget(partition) {
            stored = stored.min(before(first));
        }
        tracing::warn!(
            partition,
            "redis fell back: reading pipeline/{partition} again from {stored:?}"
        );
        reader.seek(partition, stored).await?;
        Ok(())
    }

    /// Returns the lowest stored offset of the partition's shards that were set back. All of them
    /// read the records after it again.
    async fn fell_back_to(
        &self,
        partition: u32,
        owned: &mut Owned,
    ) -> Result<Option<Offset>, Error> {
        let generation = self.0.bus.generation();
        let of_partition = owned
            .last
            .iter()
            .filter(|(shard, _)| shard.number == partition);
        let of_partition: Vec<(ShardId, Offset)> = of_partition
            .map(|(shard, last)| (shard.clone(), *last))
            .collect();
        let looks = of_partition.into_iter().map(|(shard, last)| async move {
            let stored = match self.0.queue.inspect(&shard, &[]).await {
                // The watchdog brings the shard back.
                Err(queue::Error::NoGeneration) => return Ok(None),
                // The shard will refuse its next records, too, once it answers.
                Err(cause) if is_of_shard(&cause) => return Ok(None),
                other => other?.0,
            };
            let stored = stored
                .filter(|(topic, _)| topic == generation)
                .map(|(_, offset)| offset);
            Ok::<_, Error>((stored < Some(last)).then_some((shard, stored)))
        });
        let looks: Vec<_> = stream::iter(looks)
            .buffer_unordered(AT_ONCE)
            .try_collect()
            .await?;
        let fell_back: Vec<_> = looks.into_iter().flatten().collect();
        for (shard, stored) in &fell_back {
            match stored {
                Some(stored) => drop(owned.last.insert(shard.clone(), *stored)),
                None => drop(owned.last.remove(shard)),
            }
        }
        // There may be no such shards besides those that are refused. Then the next reader
        // continues from the committed offset, as after a start.
        fell_back
            .into_iter()
            .map(|(_, stored)| stored)
            .min()
            .ok_or(Error::NotBehind { partition })
    }
}

/// Returns the last offset before this one, or `None` if this is the first.
fn before(Offset { major, minor }: Offset) -> Option<Offset> {
    match minor.checked_sub(1) {
        Some(minor) => Some(Offset { major, minor }),
        None => major.checked_sub(1).map(|major| Offset {
            major,
            minor: u64::MAX,
        }),
    }
}
