//! Topologies.

use async_trait::async_trait;

use super::Result;
use crate::model::{Act, QueueName, SubscriptionName, TopologyName};

/// A topology, as SQL has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTopology {
    pub name: TopologyName,
    /// How often it was applied.
    pub version: u64,
    pub text: String,
    pub applied_by: String,
    pub applied_unix_ms: i64,
}

/// The outcome of applying or deleting a topology.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeptTopology {
    Yes,
    /// Somebody has changed it since it was read.
    Changed,
    /// These queues of removed stages have unfinished tasks.
    Unfinished(Vec<QueueName>),
    /// There are [`MOST_TOPOLOGIES`](crate::model::MOST_TOPOLOGIES) already.
    NoRoom,
}

/// What is no longer in the file of a topology, or goes with the topology.
#[derive(Clone, Debug, Default)]
pub struct Leaving {
    /// The queues of stages.
    pub queues: Vec<QueueName>,
    /// The subscriptions of feeds.
    pub subscriptions: Vec<SubscriptionName>,
}

/// Stores the files of topologies.
///
/// Every method is one transaction and may be repeated: see [`super::Store`].
#[async_trait]
pub trait Topologies: Send + Sync {
    /// A number that each change of topologies raises.
    async fn topologies_version(&self) -> Result<u64>;

    /// All topologies, by name.
    async fn topologies(&self) -> Result<Vec<StoredTopology>>;

    /// Applies a file, whose `version` is that of the topology as it was read; 0: there was none.
    /// If a queue that leaves has unfinished tasks, nothing changes. Deletes the subscriptions that
    /// leave, so that none outlives its feed. Records the act.
    async fn keep_topology(
        &self,
        topology: &StoredTopology,
        leaving: &Leaving,
        act: &Act,
    ) -> Result<KeptTopology>;

    /// Deletes a topology that was read with this version, and its subscriptions, unless one of its
    /// queues has unfinished tasks. Records the act.
    async fn delete_topology(
        &self,
        name: &TopologyName,
        version: u64,
        leaving: &Leaving,
        act: &Act,
    ) -> Result<KeptTopology>;
}
