//! Hints for the pipeline that steps executions of workflows, within this process.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::sync::Notify;

/// Wakes the pipeline that steps executions. Clones share it. A hint that is lost only costs time:
/// the pipeline also looks by itself.
#[derive(Clone, Default)]
pub struct ExecutionWakes(Arc<Inner>);

#[derive(Default)]
struct Inner {
    notify: Notify,
    are_open: AtomicBool,
}

impl ExecutionWakes {
    /// An execution was started or cancelled, or a step of one may have ended.
    pub fn wake(&self) {
        self.0.are_open.store(true, Ordering::Relaxed);
        self.0.notify.notify_one();
    }

    /// Says whether any execution is open.
    pub fn set_open(&self, are_open: bool) {
        self.0.are_open.store(are_open, Ordering::Relaxed);
    }

    pub fn are_open(&self) -> bool {
        self.0.are_open.load(Ordering::Relaxed)
    }

    /// Waits for a hint.
    pub async fn woken(&self) {
        self.0.notify.notified().await;
    }
}
