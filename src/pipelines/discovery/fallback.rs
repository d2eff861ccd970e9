//! Detects a database that was set back. The filter still knows the keys of the tasks that are
//! gone, and would turn new inserts of them away as duplicates.

use std::{collections::HashSet, time::Duration};

use super::error::Failure;
use crate::{
    dedup::{Filter, LastStored},
    model::{KeyHash, TaskId},
    pipelines::context::Context,
    runtime::Supervisor,
    store::Tasks,
};

/// How often to check whether SQL has the tasks that were stored last.
const EVERY: Duration = Duration::from_secs(2);
/// The wait before a second check: the first may have been answered by a replica that lags behind.
const CONFIRM_AFTER: Duration = Duration::from_secs(1);

pub(super) fn start(context: &Context, supervisor: &Supervisor) {
    supervisor.spawn_loop(
        "discovery/filter",
        context.clone(),
        |context, cx| async move {
            cx.every(EVERY, || check(&*context.store, &context.filter))
                .await
        },
    );
}

/// Drops the filter when SQL lacks the tasks that were stored last. Also learns whether another
/// process dropped it.
pub async fn check(store: &dyn Tasks, filter: &Filter) -> Result<(), Failure> {
    let last = filter.last_stored().await?;
    if missing(store, &last).await? == 0 {
        return Ok(());
    }
    tokio::time::sleep(CONFIRM_AFTER).await;
    // Check the same tasks again: Redis may have forgotten them by now.
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

/// The number of these tasks that SQL neither has nor had.
async fn missing(store: &dyn Tasks, last: &LastStored) -> Result<usize, Failure> {
    let keys: Vec<KeyHash> = last.tasks.iter().map(|(key, _)| *key).collect();
    let owners = store
        .key_owners(&keys)
        .await?
        .into_iter()
        .map(|(key, id, _)| (key, id));
    let owners: HashSet<(KeyHash, TaskId)> = owners.collect();
    Ok(last
        .tasks
        .iter()
        .filter(|task| !owners.contains(task))
        .count())
}
