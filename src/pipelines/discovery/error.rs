//! The errors of discovery.

use std::sync::Arc;

use crate::{bus, coordination, dedup, pipelines::publishing, runtime::LoopError, store};

/// Why an insert failed as a whole. The caller is promised nothing of it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// HTTP 429, gRPC RESOURCE_EXHAUSTED.
    #[error("{0}; try again later")]
    Busy(String),
    /// HTTP 503, gRPC UNAVAILABLE.
    #[error("cannot store tasks now: {0}")]
    Unavailable(#[from] Unavailable),
}

/// Why no task can be stored now.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Unavailable {
    #[error("the process is stopping")]
    Stopping,
    /// All callers of a batch share the error.
    #[error(transparent)]
    Store(Arc<store::Error>),
}

/// Why a loop of discovery ended.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Bus(#[from] bus::Error),
    #[error(transparent)]
    Publish(#[from] publishing::Error),
    #[error(transparent)]
    Filter(#[from] dedup::Error),
    #[error(transparent)]
    Coordination(#[from] coordination::Error),
}

impl LoopError for Failure {
    fn ends_round(&self) -> bool {
        match self {
            Self::Bus(error) => error.ends_round(),
            Self::Publish(error) => error.ends_round(),
            Self::Coordination(error) => error.ends_round(),
            Self::Store(_) | Self::Filter(_) => false,
        }
    }
}
