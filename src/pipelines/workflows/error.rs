//! Why the loop ended.

use crate::{coordination, pipelines::publishing, runtime::LoopError, store};

#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Publish(#[from] publishing::Error),
    #[error(transparent)]
    Coordination(#[from] coordination::Error),
    #[error("cannot step executions now: {0}")]
    Stack(String),
}

impl LoopError for Failure {
    fn ends_round(&self) -> bool {
        match self {
            Self::Publish(error) => error.ends_round(),
            Self::Coordination(error) => error.ends_round(),
            Self::Store(_) | Self::Stack(_) => false,
        }
    }
}
