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
    known: Mutex<Known>,
    /// Who counts holds it, and others take the number of before: a count of a million takes a while.
    counting: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Known {
    /// When they were counted last.
    counted_at: Option<Instant>,
    open: u64,
    /// How many were started since a count began.
    added: u64,
}

impl OpenExecutions {
    /// About how many there are.
    pub(super) async fn count(&self, store: &dyn Store) -> Result<u64, Error> {
        if let Some(open) = self.known(COUNTED_FOR) {
            return Ok(open);
        }
        let _counting = match (self.0.counting.try_lock(), self.known(Duration::MAX)) {
            (Ok(counting), _) => counting,
            (Err(_), Some(open)) => return Ok(open),
            (Err(_), None) => self.0.counting.lock().await,
        };
        if let Some(open) = self.known(COUNTED_FOR) {
            return Ok(open);
        }
        self.0.known.lock().added = 0;
        let open = store.execution_counts().await?.open;
        let mut known = self.0.known.lock();
        known.counted_at = Some(Instant::now());
        known.open = open + known.added;
        Ok(known.open)
    }

    /// How many there are, if they were counted within this time.
    fn known(&self, within: Duration) -> Option<u64> {
        let known = self.0.known.lock();
        known
            .counted_at
            .is_some_and(|at| at.elapsed() < within)
            .then_some(known.open)
    }

    /// One was started.
    pub(super) fn add(&self) {
        let mut known = self.0.known.lock();
        known.open += 1;
        known.added += 1;
    }
}
