//! Shards, and how those that Redis lost are rebuilt.

use std::collections::BTreeMap;

use async_trait::async_trait;

use super::{Result, Walked};
use crate::model::{Offset, QueueName, ShardId, TaskId, TaskRow};

/// A shard as SQL remembers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredShard {
    pub id: ShardId,
    /// The present generation of the shard, or the last one if it is closed.
    pub generation: u64,
    pub is_open: bool,
    /// The version of its last change.
    pub version: u64,
}

/// The outcome of [`Shards::open_shards`] for one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    pub generation: u64,
    /// This call opened it: Redis has nothing of this generation yet. Otherwise it was open before.
    pub is_new: bool,
}

/// The shards that are being rebuilt: not all of their tasks are published again since Redis lost
/// them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rebuilding {
    /// Each with its present generation.
    pub shards: BTreeMap<ShardId, u64>,
    /// Their queues, each with the number of its unfinished tasks, the smallest first: it need not
    /// wait for the large.
    pub queues: Vec<(QueueName, u64)>,
    /// The greatest id of a task. A task that is stored later is published later, too.
    pub upto: Option<TaskId>,
}

/// A page of the tasks of shards that are being rebuilt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RebuildPage {
    /// Queue by queue, in each by id.
    pub tasks: Vec<TaskRow>,
    /// Their credited replicas, which stay credited.
    pub credited: u64,
    /// Where the next page begins; `None`: this is the last one.
    pub next: Option<Walked>,
}

/// A shard whose tasks are published again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rebuilt {
    pub shard: ShardId,
    /// The generation of the shard that they are published for.
    pub generation: u64,
    /// They are at or before this offset of the shard's partition; `None`: none was published.
    pub offset: Option<Offset>,
}

/// The part of the store that remembers shards.
#[async_trait]
pub trait Shards: Send + Sync {
    /// The open shards; or all shards with a change after that version, in the order of versions.
    async fn shards(&self, changed_after: Option<u64>) -> Result<Vec<StoredShard>>;

    /// Opens the shards that are not open, in their first or next generation. Answers per shard, in
    /// order.
    async fn open_shards(&self, shards: &[ShardId]) -> Result<Vec<Opening>>;

    /// Closes a shard that is in this generation, which it never has again. Answers whether it is
    /// closed in it now.
    async fn close_shard(&self, shard: &ShardId, generation: u64) -> Result<bool>;
}

/// The part of the store that rebuilds shards.
#[async_trait]
pub trait Rebuilds: Send + Sync {
    /// Begins to rebuild shards that Redis lost: raises each one's generation from the given one,
    /// and opens it.
    ///
    /// Answers the present generation per shard, in order, also when another process was first.
    async fn begin_rebuild(&self, lost: &[(ShardId, u64)]) -> Result<Vec<u64>>;

    /// The shards that are open and being rebuilt.
    async fn rebuilding(&self) -> Result<Rebuilding>;

    /// Unfinished tasks of these shards that are not in the outbox, among `limit` tasks behind
    /// `after`.
    ///
    /// A page ends at [`super::PAGE_BYTES`], too. It may be empty and have a next one.
    async fn rebuild_page(
        &self,
        of: &Rebuilding,
        after: Option<&Walked>,
        limit: u32,
    ) -> Result<RebuildPage>;

    /// Ends the rebuild of the shards that are in the given generation still. `generation` is the
    /// topic's.
    ///
    /// From now on every unfinished task of such a shard that is not in the outbox counts as
    /// published at the offset, or at its own one if that is later.
    async fn end_rebuild(&self, generation: &str, rebuilt: &[Rebuilt]) -> Result<()>;
}
