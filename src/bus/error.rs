//! Errors of the bus, by what a caller can do about them.

use super::topic::TopicName;
use crate::runtime::LoopError;

/// The underlying error of a backend.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to publish to {topic}: {cause}")]
    Publish {
        topic: TopicName,
        #[source]
        cause: Cause,
    },
    /// A record exceeds the size limit of the bus. The other records can still be published without
    /// it.
    #[error("failed to publish to {topic}: {cause}")]
    TooLarge {
        topic: TopicName,
        #[source]
        cause: Cause,
    },
    #[error("failed to read {topic}: {cause}")]
    Read {
        topic: TopicName,
        #[source]
        cause: Cause,
    },
    #[error("failed to acknowledge in {topic}: {cause}")]
    Commit {
        topic: TopicName,
        #[source]
        cause: Cause,
    },
    #[error("failed to trim {topic}: {cause}")]
    Trim {
        topic: TopicName,
        #[source]
        cause: Cause,
    },
    #[error("cannot set up the bus: {0}")]
    Setup(#[source] Cause),
    /// The server refuses to make a topic, of which nothing is there.
    #[error("{0}")]
    NotMade(#[source] Cause),
    /// Retrying does not help: the user has to change the configuration.
    #[error("{0}")]
    Misconfigured(#[source] Cause),
    /// Retrying does not help: the offsets are no longer valid, and the bus must be opened again.
    #[error("the bus has lost its records: generation {generation} is gone")]
    Lost { generation: String },
    /// A topic was deleted. Opening the bus again recreates it.
    #[error("topic {topic} is gone")]
    Gone { topic: TopicName },
    /// A topic has more partitions than before, or was recreated with fewer. The bus must be opened
    /// again to use the new number.
    #[error("topic {topic} has {found} partitions now, no longer {known}")]
    Resized {
        topic: TopicName,
        known: u32,
        found: u32,
    },
}

impl Error {
    /// True if the same call may succeed later without opening the bus again.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Publish { .. }
            | Self::Read { .. }
            | Self::Commit { .. }
            | Self::Trim { .. }
            | Self::Setup(_)
            | Self::NotMade(_) => true,
            Self::TooLarge { .. } | Self::Misconfigured(_) => false,
            Self::Lost { .. } | Self::Gone { .. } | Self::Resized { .. } => false,
        }
    }

    /// True if the bus must be opened again.
    pub fn is_lost(&self) -> bool {
        matches!(
            self,
            Self::Lost { .. } | Self::Gone { .. } | Self::Resized { .. }
        )
    }

    /// Wraps a backend error as a publish error.
    pub(super) fn publish<E: Into<Cause>>(topic: impl Into<TopicName>) -> impl Fn(E) -> Self {
        let topic = topic.into();
        move |cause| Self::Publish {
            topic: topic.clone(),
            cause: cause.into(),
        }
    }

    pub(super) fn read<E: Into<Cause>>(topic: impl Into<TopicName>) -> impl Fn(E) -> Self {
        let topic = topic.into();
        move |cause| Self::Read {
            topic: topic.clone(),
            cause: cause.into(),
        }
    }

    pub(super) fn commit<E: Into<Cause>>(topic: impl Into<TopicName>) -> impl Fn(E) -> Self {
        let topic = topic.into();
        move |cause| Self::Commit {
            topic: topic.clone(),
            cause: cause.into(),
        }
    }

    pub(super) fn trim<E: Into<Cause>>(topic: impl Into<TopicName>) -> impl Fn(E) -> Self {
        let topic = topic.into();
        move |cause| Self::Trim {
            topic: topic.clone(),
            cause: cause.into(),
        }
    }

    pub(super) fn setup<E: Into<Cause>>(cause: E) -> Self {
        Self::Setup(cause.into())
    }
}

impl LoopError for Error {
    fn ends_round(&self) -> bool {
        self.is_lost()
    }
}

/// A call named a partition that the topic does not have.
#[derive(Debug, thiserror::Error)]
#[error("no partition {partition}: there are {count}")]
pub(super) struct NoPartition {
    pub(super) partition: u32,
    pub(super) count: u32,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;
