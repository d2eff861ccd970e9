//! The tasks service: workers get tasks and report what became of them.

use crate::pb;

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The request as a whole is wrong. HTTP 400, gRPC INVALID_ARGUMENT.
    #[error("{0}")]
    Invalid(String),
    /// HTTP 503, gRPC UNAVAILABLE.
    #[error("cannot reach the queue now: {0}")]
    Unavailable(String),
}

/// How callers reach the service. Cheap to clone.
#[derive(Clone)]
pub struct Handle {}

impl Handle {
    /// Leases tasks; waits only when there is nothing. Dropping the future gives back what was leased meanwhile.
    pub async fn get(&self, request: pb::GetTasksRequest) -> Result<pb::GetTasksResponse, Error> {
        drop(request);
        Err(Error::Unavailable("not built yet".into()))
    }

    pub async fn complete(&self, request: pb::CompleteTasksRequest) -> Result<pb::CompleteTasksResponse, Error> {
        drop(request);
        Err(Error::Unavailable("not built yet".into()))
    }

    pub async fn reject(&self, request: pb::RejectTasksRequest) -> Result<pb::RejectTasksResponse, Error> {
        drop(request);
        Err(Error::Unavailable("not built yet".into()))
    }

    pub async fn extend(&self, request: pb::ExtendTasksRequest) -> Result<pb::ExtendTasksResponse, Error> {
        drop(request);
        Err(Error::Unavailable("not built yet".into()))
    }
}
