//! The context of the watchdog's loops.

use std::{sync::Arc, time::Duration};

use super::error::Error;
use crate::{
    bus::Bus,
    config::{self, Settings},
    coordination::Coordination,
    dedup::Filter,
    model::ShardId,
    pipelines::{
        admission::{Gates, Occupancy},
        changing::Changing,
        publishing::{DeadLetters, Publisher},
        shortcut::Shortcut,
    },
    queue::{LookFor, Upkeep},
    runtime::Clock,
    store::Store,
};

/// Everything that the loops use, each of them a part.
#[derive(Clone)]
pub struct Context {
    pub store: Arc<dyn Store>,
    pub bus: Arc<dyn Bus>,
    pub queue: Upkeep,
    pub coordination: Coordination,
    pub filter: Filter,
    pub publisher: Publisher,
    pub letters: DeadLetters,
    pub gates: Gates,
    pub shortcut: Option<Shortcut>,
    pub occupancy: Occupancy,
    pub clock: Clock,
    pub settings: Arc<Settings>,
}

impl Context {
    pub(super) fn changing(&self) -> Changing {
        let Self { store, queue, filter, bus, clock, settings, .. } = self.clone();
        Changing::new(store, queue.changer(), filter, bus, clock, &settings.watchdog)
    }
}

/// Held while a shard is closed or brought back.
pub(super) type MovesShards = Arc<tokio::sync::Mutex<()>>;

/// Held while finished tasks are forgotten, and from the look at a fence to the release behind it: what this process
/// forgets does not refuse what it releases.
pub(super) type Forgets = Arc<tokio::sync::Mutex<()>>;

pub(super) fn look_for(settings: &config::Watchdog, max_age: Duration) -> LookFor {
    LookFor { max_age, grace: settings.grace, horizon: settings.horizon }
}

pub(super) fn count(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// The shards among these that Redis has no generation for.
pub(super) async fn without_generation(queue: &Upkeep, shards: Vec<ShardId>) -> Result<Vec<ShardId>, Error> {
    let generations = queue.generations(&shards).await?;
    let lost = shards.into_iter().zip(generations).filter(|(_, generation)| generation.is_none());
    Ok(lost.map(|(shard, _)| shard).collect())
}
