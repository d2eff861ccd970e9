//! Discovery: from the insert API and from `task-results` to new tasks in SQL and on the bus.

use tokio::sync::mpsc;

use crate::pb;

/// Why an insert was not answered per task. Nothing of it is promised.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// HTTP 429, gRPC RESOURCE_EXHAUSTED.
    #[error("{0}; try again later")]
    Busy(String),
    /// HTTP 503, gRPC UNAVAILABLE.
    #[error("cannot store tasks now: {0}")]
    Unavailable(String),
}

/// How callers reach the insert side. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    #[expect(dead_code)]
    sender: mpsc::Sender<()>,
}

impl Handle {
    /// Stores what is new and answers per task, in order. Waits at most for the batches before it.
    pub async fn insert(&self, tasks: Vec<pb::NewTask>) -> Result<Vec<pb::InsertResult>, Error> {
        drop(tasks);
        Err(Error::Unavailable("not built yet".into()))
    }
}
