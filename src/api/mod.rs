//! The operations, one function each. Every protocol calls them; spans and metrics are added here,
//! once.

mod access;
mod books;
mod books_snapshot;
mod bulk;
mod changes;
mod depth_history;
mod drained;
mod error;
mod executions;
mod explain;
mod facts;
mod fsck;
mod handle;
mod heard;
mod history;
mod insert;
mod items;
mod known_depths;
mod known_keys;
mod known_topics;
mod ledger;
mod letters;
mod limits;
mod open_executions;
mod pauses;
mod query;
mod queue_views;
mod reader;
mod record;
mod search;
mod sessions;
mod settled;
mod stream;
mod subscriptions;
mod tasks;
mod topic_stages;
mod topics;
mod topologies;
mod topology_feeds;
mod trees;
mod waiting;
mod waits;
mod watch;
mod watched;
mod watches;
mod watching;
mod workers;
mod workflow_documents;
mod workflow_queues;
mod workflows;

pub use self::{
    access::{Authentication, Denied, TokenSync},
    error::{Error, Kind},
    executions::HistoryPages,
    handle::Api,
    heard::HeardWorkers,
    known_depths::KnownDepths,
    known_keys::KnownKeys,
    known_topics::KnownTopics,
    ledger::Ledger,
    open_executions::OpenExecutions,
    queue_views::{HeldQueues, StoredQueues, merged as merged_queues},
    reader::Reader,
    settled::SettledReports,
    stream::{BytesPermit, OutgoingFrame, ReceivedFrame, ReserveBytes, StreamEnd},
    subscriptions::declare_subscription,
    topic_stages::publish_stages,
    topics::{Reading, declare_topic},
    trees::{NextOfTree, WatchingTree},
    waits::{Wait, Waits},
    watch::Watching,
    watches::{ExecutionWatches, TreeWatches},
    workers::WorkersLook,
    workflow_queues::WorkflowQueues,
};
pub(crate) use crate::model::{ECHO, shorten};
