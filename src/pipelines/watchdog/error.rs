//! Why a loop of the watchdog ended.

use crate::{
    bus, coordination, dedup,
    model::{QueueName, ShardId},
    pipelines::{changing, checking, publishing},
    queue::{self, FailedRound},
    runtime::LoopError,
    store,
};

/// Why a loop of the watchdog ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Bus(#[from] bus::Error),
    #[error(transparent)]
    Queue(#[from] queue::Error),
    #[error(transparent)]
    Coordination(#[from] coordination::Error),
    #[error(transparent)]
    Change(#[from] changing::Error),
    #[error(transparent)]
    Publish(#[from] publishing::Error),
    #[error("cannot {step} {shard}")]
    Shard {
        step: &'static str,
        shard: ShardId,
        #[source]
        cause: Box<Error>,
    },
    #[error("cannot forget the filter of {queue}")]
    Filter {
        queue: QueueName,
        #[source]
        cause: dedup::Error,
    },
    #[error("task-results is not read to its end")]
    ReportsUnread,
    #[error("redis has lost shards while others were rebuilt")]
    LostMeanwhile,
    #[error("pipeline was made anew, or has lost records, while shards were rebuilt")]
    PipelineMadeAnew,
    #[error("a shard does not answer, so its tasks are not requeued yet")]
    NotRequeued,
    #[error("the process is stopping")]
    Stopping,
}

impl From<checking::Error> for Error {
    fn from(error: checking::Error) -> Self {
        match error {
            checking::Error::Store(error) => error.into(),
            checking::Error::Queue(error) => error.into(),
            checking::Error::Bus(error) => error.into(),
        }
    }
}

impl Error {
    /// SQL does not answer.
    pub(super) fn is_of_store(&self) -> bool {
        matches!(
            self,
            Self::Store(_) | Self::Change(changing::Error::Store(_))
        )
    }
}

impl LoopError for Error {
    fn ends_round(&self) -> bool {
        match self {
            Self::Bus(error) => error.ends_round(),
            Self::Publish(error) => error.ends_round(),
            Self::Shard { cause, .. } => cause.ends_round(),
            _ => false,
        }
    }
}

impl Error {
    /// Whether Redis lost the shard, or it is closed.
    pub(super) fn is_without_generation(&self) -> bool {
        match self {
            Self::Change(error) => error.is_without_generation(),
            other => matches!(other, Self::Queue(queue::Error::NoGeneration)),
        }
    }

    pub(super) fn of_shard(self, step: &'static str, shard: &ShardId) -> Self {
        Self::Shard {
            step,
            shard: shard.clone(),
            cause: Box::new(self),
        }
    }
}

impl<E: Into<Error>> From<FailedRound<E>> for Error {
    fn from(FailedRound { step, shard, cause }: FailedRound<E>) -> Self {
        cause.into().of_shard(step, &shard)
    }
}
