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

/// Held while finished tasks are forgotten, and from reading a fence until the release that uses
/// it, so that this process's own forgetting does not make its releases fail.
pub(super) type Forgets = Arc<tokio::sync::Mutex<()>>;

pub(super) fn look_for(settings: &config::Watchdog, max_age: Duration) -> LookFor {
    LookFor {
        max_age,
        grace: settings.grace,
        horizon: settings.horizon,
    }
}

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
