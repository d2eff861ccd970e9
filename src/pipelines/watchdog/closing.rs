//! A queue that has been empty for long gives back what it costs: each of its shards is closed, its filter forgotten.
//!
//! First `close.lua` removes all keys of the shard, then SQL notes that it is closed; its row stays, so that no life
//! comes twice. Processes that know the shard drop it half a second later. Crash windows:
//!
//! - between the two steps the shard looks lost: it is brought back, with nothing in it, and closed another time.
//! - a fanout that still knows the shard, or reads a task of it between the steps, is told that it has no generation.
//!   It asks SQL: what is closed it opens in the next life, what is not it leaves to the watchdog.
//! - two watchdogs: the second finds no generation, or SQL in another life, and changes nothing.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;

use super::Watchdog;
use crate::{
    model::ShardId,
    queue::{self, Closing, Failing},
    runtime::Beat,
};

/// A shard is looked at so often in the time after which it is closed, but within these bounds.
const LOOKS: u32 = 24;
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(3600);

impl Watchdog {
    pub(super) async fn close_idle(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        let every = (self.settings.watchdog.forget_queues_after / LOOKS).clamp(SHORTEST, LONGEST);
        let mut failing = Failing::default();
        while self.lead.wait(&beat, &self.stop).await {
            for shard in self.queue.shards() {
                let closed = self.close_if_idle(&shard, &beat).await;
                failing.note(&shard, Instant::now(), closed);
            }
            failing.end_round("close")?;
            if !beat.idle(self.pause(every)).await {
                break;
            }
        }
        Ok(())
    }

    async fn close_if_idle(&self, shard: &ShardId, beat: &Beat) -> anyhow::Result<()> {
        let _alone = beat.idle(self.shards.lock()).await;
        let life = match self.queue.close_shard(shard, self.settings.watchdog.forget_queues_after).await {
            Ok(Closing::Closed(life)) => life,
            Ok(Closing::InUse | Closing::In(_)) | Err(queue::Error::NoGeneration) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if !self.outbox.store.close_shard(shard, life).await? {
            // SQL is further: somebody has brought it back meanwhile.
            return Ok(());
        }
        self.queue.remove_shard(shard);
        tracing::info!(%shard, "closed shard {shard}: it has been empty for long");
        if self.queue.shards_of(&shard.queue).is_empty() {
            self.filter.forget_queue(&shard.queue).await.context("cannot forget its filter")?;
        }
        Ok(())
    }
}
