//! How many executions of workflows are open.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::error::Error;
use crate::store::Store;

/// For how long a count of open executions is good enough.
const COUNTED_FOR: Duration = Duration::from_secs(5);

/// How many executions are open, as this process knows it. Clones share it.
#[derive(Clone, Default)]
pub struct OpenExecutions(Arc<Mutex<Option<(Instant, u64)>>>);

impl OpenExecutions {
    /// About how many there are.
    pub(super) async fn count(&self, store: &dyn Store) -> Result<u64, Error> {
        let known = *self.0.lock();
        if let Some((counted_at, open)) = known
            && counted_at.elapsed() < COUNTED_FOR
        {
            return Ok(open);
        }
        let open = store.execution_counts().await?.open;
        *self.0.lock() = Some((Instant::now(), open));
        Ok(open)
    }

    /// One was started.
    pub(super) fn add(&self) {
        if let Some((_, open)) = &mut *self.0.lock() {
            *open += 1;
        }
    }
}
