//! Why a change could not be carried out yet.

use std::time::Duration;

use crate::{model::ShardId, queue, store};

/// Why a change of live work could not be carried out yet.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Queue(#[from] queue::Error),
    #[error("shard {shard} did not answer within {within:?}")]
    Silent { shard: ShardId, within: Duration },
}

impl Error {
    /// Whether Redis lost the shard, or it is closed.
    pub fn is_without_generation(&self) -> bool {
        matches!(self, Self::Queue(queue::Error::NoGeneration))
    }
}
