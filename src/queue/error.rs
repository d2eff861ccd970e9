//! The errors of the queue.

use std::sync::Arc;

use redis::RedisError;

use crate::{redis_pool::Shortfall, runtime::LoopError};

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The shard was never opened, or Redis lost it.
    #[error("the shard has no generation in Redis")]
    NoGeneration,
    #[error("too many callers wait for the queue")]
    Busy,
    /// The bus does not take reports, and the outbox has reached its limit.
    #[error("the outbox of the shard is full: the bus does not take reports")]
    OutboxFull,
    /// The shard has tasks with limit keys: nothing was changed, another row of the script does it.
    #[error("the shard has tasks with limit keys")]
    Limited,
    #[error("the process is stopping")]
    Stopped,
    /// A script's answer is not what its contract says.
    #[error("unexpected answer of Redis: {0}")]
    Answer(String),
    /// The queue does not know the task, and SQL could not be asked.
    #[error("cannot tell now: {0}")]
    Unsure(#[source] Arc<dyn std::error::Error + Send + Sync>),
    #[error("the wake channel was closed")]
    WakesClosed,
    #[error("no answer on the wake channel")]
    WakesSilent,
    #[error("Redis did not answer in time")]
    Silent,
    /// Redis has made the change, but not yet copied it as the settings require. Repeating the call
    /// waits again.
    #[error(transparent)]
    NotDurable(#[from] Shortfall),
    #[error(transparent)]
    Redis(RedisError),
}

impl From<RedisError> for Error {
    fn from(error: RedisError) -> Self {
        match error.code() {
            Some("NOGEN") => Self::NoGeneration,
            Some("FULL") => Self::OutboxFull,
            Some("LIMITED") => Self::Limited,
            _ => Self::Redis(error),
        }
    }
}

impl Error {
    /// Redis has reached its `maxmemory`.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Redis(error) if error.code() == Some("OOM"))
    }

    /// Returns whether Redis has answered that it cannot do the call with the keys of this shard.
    /// Other shards are not affected.
    pub fn is_of_shard(&self) -> bool {
        match self {
            Self::Answer(_) => true,
            Self::Redis(error) => matches!(error.code(), Some("WRONGTYPE" | "ERR")),
            _ => false,
        }
    }
}

impl LoopError for Error {}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A lease cannot outlive its shard: if Redis lost the shard, every token is void.
pub(super) fn lost_without_generation<T>(answer: Result<T>, lost: impl FnOnce() -> T) -> Result<T> {
    match answer {
        Err(Error::NoGeneration) => Ok(lost()),
        other => other,
    }
}
