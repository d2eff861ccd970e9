//! A database that was set back: tasks that were stored are not, and the filter would call their keys duplicates of
//! nothing.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use super::Parts;
use crate::{
    dedup::{Filter, LastStored},
    model::{KeyHash, TaskId},
    runtime::{Beat, Supervisor},
    store::Store,
};

/// How often SQL is asked whether it has what was stored last.
const EVERY: Duration = Duration::from_secs(2);
/// Asked again before anything is dropped: a proxy may read from a replica that is behind.
const CONFIRM_AFTER: Duration = Duration::from_secs(1);

pub(super) fn start(parts: &Parts, supervisor: &Supervisor) {
    let (parts, stop) = (parts.clone(), supervisor.stop_token());
    let beat = Arc::new(supervisor.progress().register("discovery/filter"));
    supervisor.spawn("discovery/filter", move || watch(parts.clone(), Arc::clone(&beat), stop.clone()));
}

async fn watch(parts: Parts, beat: Arc<Beat>, stop: CancellationToken) -> anyhow::Result<()> {
    while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
        check(&*parts.outbox.store, &parts.filter).await?;
        beat.beat();
    }
    Ok(())
}

/// Drops the filter when SQL has not what was stored last; learns whether somebody else has.
pub async fn check(store: &dyn Store, filter: &Filter) -> anyhow::Result<()> {
    let last = filter.last_stored().await?;
    if missing(store, &last).await? == 0 {
        return Ok(());
    }
    tokio::time::sleep(CONFIRM_AFTER).await;
    let last = filter.last_stored().await?;
    let missing = missing(store, &last).await?;
    if missing > 0 && filter.drop_all(&last).await? {
        tracing::warn!(
            "the database was set back: {missing} of the last {} batches are not in it; \
             the filter of keys is dropped, and what was lost may be inserted again",
            last.tasks.len()
        );
    }
    Ok(())
}

/// How many of these tasks SQL does not have, nor had.
async fn missing(store: &dyn Store, last: &LastStored) -> anyhow::Result<usize> {
    let keys: Vec<KeyHash> = last.tasks.iter().map(|(key, _)| *key).collect();
    let owners: HashSet<(KeyHash, TaskId)> = store.owners(&keys).await?.into_iter().collect();
    Ok(last.tasks.iter().filter(|task| !owners.contains(task)).count())
}
