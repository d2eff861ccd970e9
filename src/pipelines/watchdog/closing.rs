//! Frees what queues cost that have been empty for a long time: closes their shards and forgets
//! their filters.
//!
//! First `close.lua` removes all keys of the shard, then SQL records that it is closed. SQL keeps
//! its row, so that no generation is used twice. Other processes drop the shard half a second
//! later. Crash windows:
//!
//! - Between the two steps the shard looks lost: it is brought back empty, and closed another time.
//! - A fanout that knows the shard, or reads a task of it between the steps, finds no generation.
//!   It asks SQL, opens a closed shard in the next generation, and leaves a lost one to the
//!   watchdog.
//! - Two watchdogs: the second finds no generation, or another one in SQL, and changes nothing.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{error::Error, lead::Lead, shared::MovesShards};
use crate::{
    dedup::Filter,
    model::ShardId,
    pipelines::context::Context,
    queue::{self, Failing, Upkeep},
    runtime::Loop,
    store::Outbox,
};

/// How many times a shard is checked within the time after which it is closed; the interval is kept
/// within the bounds below.
const LOOKS: u32 = 24;
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(3600);

#[derive(Clone)]
pub(super) struct Closing {
    store: Arc<dyn Outbox>,
    queue: Upkeep,
    filter: Filter,
    after: Duration,
    moves_shards: MovesShards,
    lead: Lead,
}

impl Closing {
    pub(super) fn new(context: &Context, lead: &Lead, moves_shards: &MovesShards) -> Self {
        let Context {
            store,
            queue,
            filter,
            settings,
            ..
        } = context.clone();
        let after = settings.watchdog.forget_queues_after;
        let moves_shards = Arc::clone(moves_shards);
        Self {
            store,
            queue: queue.upkeep,
            filter,
            after,
            moves_shards,
            lead: lead.clone(),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        let every = (self.after / LOOKS).clamp(SHORTEST, LONGEST);
        let mut failing = Failing::default();
        while self.lead.wait(&cx).await {
            for shard in self.queue.shards() {
                let closed = self.close_if_idle(&shard, &cx).await;
                failing.note(&shard, Instant::now(), closed);
            }
            failing.end_round("close")?;
            if !cx.idle(cx.pause(every)).await {
                break;
            }
        }
        Ok(())
    }

    async fn close_if_idle(&self, shard: &ShardId, cx: &Loop) -> Result<(), Error> {
        let _alone = cx.idle(self.moves_shards.lock()).await;
        let generation = match self.queue.close_shard(shard, self.after).await {
            Ok(queue::Closing::Closed(generation)) => generation,
            Ok(queue::Closing::InUse | queue::Closing::In(_)) | Err(queue::Error::NoGeneration) => {
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        if !self.store.close_shard(shard, generation).await? {
            // Another process has brought the shard back, and SQL has a later generation.
            return Ok(());
        }
        self.queue.remove_shard(shard);
        tracing::info!(%shard, "closed shard {shard}: it has been empty for long");
        if self.queue.shards_of(&shard.queue).is_empty() {
            let forgotten = self.filter.forget_queue(&shard.queue).await;
            forgotten.map_err(|cause| Error::Filter {
                queue: shard.queue.clone(),
                cause,
            })?;
        }
        Ok(())
    }
}
