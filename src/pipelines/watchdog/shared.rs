//! Locks and steps that several loops share.

use std::{sync::Arc, time::Duration};

use super::error::Error;
use crate::{
    config,
    model::ShardId,
    pipelines::{changing::Changing, context::Context},
    queue::{LookFor, Upkeep},
};

impl Context {
    pub(super) fn changing(&self) -> Changing {
        let Self {
            store,
            queue,
            filter,
            bus,
            clock,
            settings,
            ..
        } = self.clone();
        Changing::new(
            store,
            queue.upkeep.changer(),
            filter,
            bus,
            clock,
            &settings.watchdog,
        )
    }
}

/// Held while a shard is closed or brought back.
pub(super) type MovesShards = Arc<tokio::sync::Mutex<()>>;

/// Held while the records of finished tasks are removed from Redis, and while parked tasks are put
/// into the queue by the shortcut, from reading the fences on: each removal moves a fence, and the
/// shortcut fails if a fence has moved since it was read.
pub(super) type Forgets = Arc<tokio::sync::Mutex<()>>;

/// The parameters of a snapshot at most `max_age` old.
pub(super) fn look_for(settings: &config::Watchdog, max_age: Duration) -> LookFor {
    LookFor {
        max_age,
        grace: settings.grace,
        horizon: settings.horizon,
    }
}

/// Converts a number for the metrics.
pub(super) fn count(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Returns those of these shards for which Redis has no generation.
pub(super) async fn without_generation(
    queue: &Upkeep,
    shards: Vec<ShardId>,
) -> Result<Vec<ShardId>, Error> {
    let generations = queue.generations(&shards).await?;
    let lost = shards
        .into_iter()
        .zip(generations)
        .filter(|(_, generation)| generation.is_none());
    Ok(lost.map(|(shard, _)| shard).collect())
}
