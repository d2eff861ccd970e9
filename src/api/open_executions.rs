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
pub struct OpenExecutions(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// When they were counted last, and how many there are.
    known: Mutex<Option<(Instant, u64)>>,
    /// Who counts holds it, and others take the number of before: a count of a million takes a while.
    counting: tokio::sync::Mutex<()>,
}

impl OpenExecutions {
    /// About how many there are.
    pub(super) async fn count(&self, store: &dyn Store) -> Result<u64, Error> {
        let known = *self.0.known.lock();
        let counting = self.0.counting.try_lock().ok();
        if let Some((counted_at, open)) = known
            && (counted_at.elapsed() < COUNTED_FOR || counting.is_none())
        {
            return Ok(open);
        }
        let open = store.execution_counts().await?.open;
        *self.0.known.lock() = Some((Instant::now(), open));
        Ok(open)
    }

    /// One was started.
    pub(super) fn add(&self) {
        if let Some((_, open)) = &mut *self.0.known.lock() {
            *open += 1;
        }
    }
}
