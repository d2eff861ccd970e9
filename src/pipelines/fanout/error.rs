//! Why a reader of the fanout ended.

use crate::{
    bus, coordination, model::ShardId, pipelines::publishing, queue, runtime::LoopError, store,
};

/// Why a reader ended. The next one joins the group again, and begins at the committed offsets.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Bus(#[from] bus::Error),
    #[error(transparent)]
    Letters(#[from] publishing::Error),
    #[error(transparent)]
    Queue(#[from] queue::Error),
    #[error(transparent)]
    Coordination(#[from] coordination::Error),
    #[error("cannot enqueue to {shard}")]
    Enqueue {
        shard: ShardId,
        #[source]
        cause: queue::Error,
    },
    #[error("shard {0} has no keys in redis; waiting until the watchdog has brought it back")]
    ShardLost(ShardId),
    #[error(
        "pipeline/{partition} has another owner, with epoch {by} above our {epoch}: joining anew"
    )]
    Fenced { partition: u32, epoch: u64, by: u64 },
    #[error("pipeline/{partition} was made anew, or has lost records: reading it from there")]
    MadeAnew { partition: u32 },
    #[error("pipeline/{partition}: no shard is behind any more")]
    NotBehind { partition: u32 },
}

impl LoopError for Error {
    fn ends_round(&self) -> bool {
        match self {
            Self::Bus(error) => error.ends_round(),
            Self::Letters(error) => error.ends_round(),
            _ => false,
        }
    }
}
