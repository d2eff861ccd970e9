//! The error of the tasks service.

use crate::queue;

/// The reason why a call as a whole has no answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The request is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The session is over, or never was.
    #[error("there is no session {0}: it has ended; open another one")]
    NoSession(String),
    /// There is no room for it now.
    #[error("{0}")]
    Full(String),
    #[error("cannot reach the queue now: {0}")]
    Unavailable(#[from] queue::Error),
}
