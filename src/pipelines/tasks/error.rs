//! The error of the tasks service.

use crate::queue;

/// Why a call failed as a whole.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The request is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The session has ended, or never existed.
    #[error("there is no session {0}: it has ended; open another one")]
    NoSession(String),
    /// There is no capacity for it now.
    #[error("{0}")]
    Full(String),
    #[error("cannot reach the queue now: {0}")]
    Unavailable(#[from] queue::Error),
}
