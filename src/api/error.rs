//! The error of an operation.

use uuid::Uuid;

use super::access::Denied;
use crate::{
    bus, coordination,
    model::{
        LetterId, NoShare, QueueName, ShardId, SubscriptionName, TaskId, TopicName, TreeState,
    },
    pipelines::{changing, discovery, tasks},
    queue,
    store::{self, MOST_BULK_CHANGES, MOST_OWN_LIMITS},
    telemetry::metrics,
    workflow::definition::Mistake,
};

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("this process does not run the pipeline {0}")]
    NotRunHere(&'static str),
    #[error("{0:?} is not a task id; ids are UUIDs, as an insert answers them")]
    NotATaskId(String),
    #[error("{0}")]
    Invalid(String),
    #[error("{0:?} is not a letter's id")]
    NotALetterId(String),
    #[error("there is no letter {0}: it was sent again, purged or removed")]
    NoSuchLetter(LetterId),
    #[error("queue {queue} has, and had, no task with the key {key:?}")]
    NoSuchKey { queue: QueueName, key: String },
    #[error("there is no task {0}, or it finished so long ago that it was removed")]
    NoSuchTask(TaskId),
    #[error("queue {0} never had a task: check its name, or insert a task first")]
    NoSuchQueue(QueueName),
    #[error("there is no topic {name:?}{near}")]
    NoSuchTopic {
        name: String,
        /// Names a topic that is meant perhaps.
        near: String,
    },
    #[error("topic {0} is being deleted; try again in a minute")]
    TopicIsDeleted(TopicName),
    #[error("others are changing {0} at the same moment; look at it, and try again")]
    JustChanged(String),
    #[error("there is no subscription {name:?}{near}")]
    NoSuchSubscription {
        name: String,
        /// Names a subscription that is meant perhaps.
        near: String,
    },
    #[error("there is no topology {0:?}; `taskd topology list` shows them")]
    NoSuchTopology(String),
    #[error("there is no workflow {0}; `taskd workflow list` shows them")]
    NoSuchWorkflow(String),
    #[error("there is no execution {0:?}, or it ended so long ago that it was removed")]
    NoSuchExecution(String),
    /// All mistakes of a definition. Never empty.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    WrongDefinition(Vec<Mistake>),
    /// Something else has this name, or is in the way.
    #[error("{0}")]
    Conflict(String),
    #[error("{0}")]
    Full(String),
    /// Something of this process failed.
    #[error("{0}; try again later")]
    JustFailed(String),
    #[error("there is no tree {0}, or it ended so long ago that it was removed")]
    NoSuchTree(TaskId),
    #[error("tree {id} has ended: {state}")]
    TreeEnded { id: TaskId, state: TreeState },
    #[error("there is no bulk change {0}, or it began so long ago that it was removed")]
    NoSuchBulkChange(Uuid),
    #[error(
        "{MOST_BULK_CHANGES} bulk changes run, and there may be no more; wait for one, or stop one"
    )]
    ManyBulkChanges,
    #[error("{} bulk changes of this token run, which is half of all that may; wait for one, or stop one", MOST_BULK_CHANGES / 2)]
    ManyBulkChangesOfToken,
    #[error(
        "subscription {subscription} goes on at its new place, but not all of its tasks from before are cancelled: {cause}; start a bulk change of queue {queue} with the header taskd-subscription={subscription}, and taskd-replay below {replay}"
    )]
    NotCancelled {
        subscription: SubscriptionName,
        queue: QueueName,
        replay: u64,
        #[source]
        cause: Box<Error>,
    },
    #[error("{MOST_OWN_LIMITS} limit keys have own limits, and no more may; clear some before")]
    ManyOwnLimits,
    #[error("{0}")]
    ManyWaits(String),
    #[error("{} connections have called with this token, half of all (max_connections); use one for more calls", .0.most())]
    ManyConnections(NoShare),
    #[error(transparent)]
    Watchers(#[from] queue::Full),
    #[error("task {id} cannot be changed any more: {why}")]
    Final { id: TaskId, why: String },
    #[error(transparent)]
    Denied(Denied),
    #[error(transparent)]
    Insert(#[from] discovery::Error),
    #[error(transparent)]
    Tasks(#[from] tasks::Error),
    #[error("cannot change anything now: {0}")]
    Change(#[from] changing::Error),
    #[error("cannot read now: {0}")]
    Store(#[from] store::Error),
    #[error("cannot read now: {0}")]
    Queue(#[from] queue::Error),
    #[error("cannot read shard {shard} now: {cause}")]
    Shard {
        shard: ShardId,
        #[source]
        cause: queue::Error,
    },
    #[error("cannot read now: {0}")]
    Bus(#[from] bus::Error),
    #[error("cannot read now: {0}")]
    Coordination(#[from] coordination::Error),
}

/// The kind of an error, by what the caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong.
    Invalid,
    NotFound,
    /// The task has ended, or something else is in the way.
    Final,
    /// The call has no token, or one that is not valid.
    Unauthenticated,
    /// The token does not allow it.
    Forbidden,
    /// taskd is at a limit now: try again later.
    Busy,
    /// A server does not answer now: try again later.
    Unavailable,
    /// Another process may do it.
    NotRunHere,
}

/// A refused call. Metrics count it here, whatever refused it.
impl From<Denied> for Error {
    fn from(denied: Denied) -> Self {
        metrics::denied_call(denied.as_str());
        Self::Denied(denied)
    }
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::NotRunHere(_) => Kind::NotRunHere,
            Self::NotCancelled { cause, .. } => cause.kind(),
            Self::NotATaskId(_)
            | Self::NotALetterId(_)
            | Self::Invalid(_)
            | Self::WrongDefinition(_)
            | Self::Tasks(tasks::Error::Invalid(_)) => Kind::Invalid,
            Self::NoSuchTask(_)
            | Self::NoSuchLetter(_)
            | Self::NoSuchBulkChange(_)
            | Self::NoSuchTopology(_)
            | Self::NoSuchTree(_)
            | Self::NoSuchWorkflow(_)
            | Self::NoSuchExecution(_)
            | Self::NoSuchQueue(_)
            | Self::NoSuchTopic { .. }
            | Self::NoSuchSubscription { .. }
            | Self::NoSuchKey { .. } => Kind::NotFound,
            Self::Tasks(tasks::Error::NoSession(_)) => Kind::NotFound,
            Self::Final { .. } | Self::TreeEnded { .. } | Self::Conflict(_) => Kind::Final,
            Self::Denied(Denied::NoToken | Denied::Unknown | Denied::Expired(_)) => {
                Kind::Unauthenticated
            }
            Self::Denied(
                Denied::Role { .. }
                | Denied::Queue { .. }
                | Denied::Session(_)
                | Denied::Tree(_)
                | Denied::Worker { .. }
                | Denied::Scoped(_),
            ) => Kind::Forbidden,
            Self::Insert(discovery::Error::Busy(_))
            | Self::Tasks(tasks::Error::Full(_))
            | Self::Denied(Denied::TooFast { .. })
            | Self::Full(_)
            | Self::ManyBulkChanges
            | Self::ManyBulkChangesOfToken
            | Self::ManyOwnLimits
            | Self::TopicIsDeleted(_)
            | Self::JustChanged(_)
            | Self::ManyWaits(_)
            | Self::ManyConnections(_)
            | Self::Watchers(_) => Kind::Busy,
            Self::Insert(discovery::Error::Unavailable(_))
            | Self::Tasks(tasks::Error::Unavailable(_))
            | Self::JustFailed(_)
            | Self::Change(_)
            | Self::Store(_)
            | Self::Queue(_)
            | Self::Shard { .. }
            | Self::Bus(_)
            | Self::Coordination(_) => Kind::Unavailable,
        }
    }
}
