//! The outbox: tasks to publish, the offsets of published tasks, and the shards that they go to.

use std::collections::{BTreeMap, HashSet};

use async_trait::async_trait;

use super::{OutboxRow, PublishedTask, Result, Turn, Unpublished};
use crate::model::{LimitHash, Offset, QueueName, ShardId, TaskId, TaskRow};

/// The total size of tasks at which a page of the outbox ends, because a thousand rows may have a
/// gigabyte.
pub const PAGE_BYTES: usize = 16 << 20;

/// How many due rows [`Outbox::oldest_waiting`] reads.
pub const DUE_LOOKED_AT: u64 = 1000;

/// Tasks that are now on the bus, at or before `offset` of their partition.
#[derive(Clone, Debug)]
pub struct Published {
    pub partition: u32,
    pub offset: Offset,
    pub tasks: Vec<(TaskId, Turn)>,
}

/// The outcome of [`Outbox::bring_forward`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BroughtForward {
    pub rows: u64,
    /// Where the next page begins.
    pub next: Option<(i64, TaskId)>,
}

/// A shard as stored in SQL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredShard {
    pub id: ShardId,
    /// The present generation of the shard, or its last one if it is closed.
    pub generation: u64,
    pub is_open: bool,
    /// The version at which it last changed.
    pub version: u64,
}

/// The outcome of [`Outbox::open_shards`] for one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    pub generation: u64,
    /// This call opened the shard, so Redis has nothing of this generation yet. Otherwise it was
    /// already open.
    pub is_new: bool,
}

/// The shards that are being rebuilt: Redis lost them, and not all of their tasks have been
/// published again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rebuilding {
    /// The shards, each with its present generation.
    pub shards: BTreeMap<ShardId, u64>,
    /// Their queues, each with the number of its unfinished tasks, smallest first, so that small
    /// queues need not wait for large ones.
    pub queues: Vec<(QueueName, u64)>,
    /// The greatest id of a task. Tasks that are stored later are published in any case.
    pub upto: Option<TaskId>,
}

/// A page of the tasks of shards that are being rebuilt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RebuildPage {
    /// Queue by queue, and by id within each queue.
    pub tasks: Vec<TaskRow>,
    /// The number of their credited replicas, which stay credited.
    pub credited: u64,
    /// Where the next page begins, or `None` if this is the last one.
    pub next: Option<Walked>,
}

/// A shard whose tasks have been published again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rebuilt {
    pub shard: ShardId,
    /// The generation of the shard for which they were published.
    pub generation: u64,
    /// The tasks are at or before this offset of the shard's partition. `None` if no task was
    /// published.
    pub offset: Option<Offset>,
}

/// How far a walk has got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Walked {
    pub queue: QueueName,
    pub id: TaskId,
}

impl Walked {
    /// The position before the first task of this queue.
    pub fn before(queue: &QueueName) -> Self {
        Self {
            queue: queue.clone(),
            id: TaskId::FIRST,
        }
    }
}

/// A range of the unfinished tasks.
#[derive(Clone, Copy, Debug)]
pub struct Stretch<'a> {
    /// Only this queue, or `None` for all queues, sorted by name.
    pub queue: Option<&'a QueueName>,
    pub after: Option<&'a Walked>,
    /// The greatest id to include. Without this limit, a walk might never end in a queue whose
    /// tasks come and go quickly.
    pub upto: TaskId,
}

impl Stretch<'_> {
    pub const ALL: Self = Self {
        queue: None,
        after: None,
        upto: TaskId::LAST,
    };
}

/// The tasks of one page of a walk that are on the bus.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WalkedPage {
    /// Sorted by id within each shard.
    pub tasks: BTreeMap<ShardId, Vec<TaskId>>,
    /// Where the next page begins, or `None` if this is the last one.
    pub next: Option<Walked>,
}

/// What is to be published, what has been published, and the shards that it goes to.
///
/// Every method is one transaction and may be repeated: see [`super::Store`].
#[async_trait]
pub trait Outbox: Send + Sync {
    /// Stores the offsets of `published`. Removes the outbox rows of these tasks unless their turn
    /// has changed. `generation` is the topic's.
    ///
    /// A batch that is published as a whole, in one call, costs one row. Otherwise each task gets
    /// its own offset.
    async fn mark_published(&self, generation: &str, published: &[Published]) -> Result<()>;

    /// Puts tasks back into the outbox, unless they are final. A task that is already there gets a
    /// new turn.
    async fn unpublish(&self, ids: &[TaskId], why: Unpublished) -> Result<()>;

    /// Puts tasks into the outbox as fresh tasks that are due later, unless they are final.
    async fn put_off(&self, ids: &[TaskId], until_unix_ms: i64) -> Result<()>;

    /// Due tasks of the outbox and of batches, without parked and crowded ones and those in `without`, earliest
    /// first.
    ///
    /// A page ends at `limit` rows or at [`PAGE_BYTES`]. Also removes rows whose task is final, and
    /// batches without waiting tasks, if it comes across them.
    async fn due(
        &self,
        now_unix_ms: i64,
        limit: usize,
        without: &HashSet<TaskId>,
    ) -> Result<Vec<OutboxRow>>;

    /// Makes fresh tasks due at `to_unix_ms`, because the clock was set back after they were
    /// stored.
    ///
    /// Reads a page of at most `limit` outbox rows that are due later than `later_than_unix_ms`,
    /// without parked ones. The page begins after `after`. The first page also includes all
    /// batches.
    async fn bring_forward(
        &self,
        later_than_unix_ms: i64,
        to_unix_ms: i64,
        after: Option<(i64, TaskId)>,
        limit: usize,
    ) -> Result<BroughtForward>;

    /// For each queue, the insert time of the oldest task that waits in SQL: parked, or due and not
    /// published.
    ///
    /// Reads the first [`DUE_LOOKED_AT`] due rows, and as many due tasks of batches.
    async fn oldest_waiting(&self, now_unix_ms: i64) -> Result<Vec<(QueueName, i64)>>;

    /// The queues with parked rows.
    async fn parked_queues(&self) -> Result<Vec<QueueName>>;

    /// Parked rows of a queue, sorted by priority, then by age. Otherwise like [`Self::due`].
    async fn parked(
        &self,
        queue: &QueueName,
        limit: usize,
        without: &HashSet<TaskId>,
    ) -> Result<Vec<OutboxRow>>;

    /// The queues with crowded rows.
    async fn crowded_queues(&self) -> Result<Vec<QueueName>>;

    /// The first limit keys of the queue after `after` that have crowded rows, sorted.
    async fn crowded_keys(
        &self,
        queue: &QueueName,
        after: Option<&LimitHash>,
        limit: usize,
    ) -> Result<Vec<LimitHash>>;

    /// Crowded rows of a limit key, sorted by priority, then by age. Otherwise like [`Self::due`].
    async fn crowded(
        &self,
        queue: &QueueName,
        key: &LimitHash,
        limit: usize,
        without: &HashSet<TaskId>,
    ) -> Result<Vec<OutboxRow>>;

    /// How many crowded rows a limit key has; `most` or more count as `most`.
    async fn count_crowded(&self, queue: &QueueName, key: &LimitHash, most: u64) -> Result<u64>;

    /// Removes the published batches that no task needs any more, among `limit` batches after
    /// `after`. Returns where the next page begins.
    ///
    /// A task needs its batch until it is final or in the outbox.
    async fn remove_batches(&self, after: Option<Turn>, limit: u32) -> Result<Option<Turn>>;

    /// All open shards, or all shards that changed after the given version, sorted by version.
    async fn shards(&self, changed_after: Option<u64>) -> Result<Vec<StoredShard>>;

    /// Opens those shards that are not open, in their first or next generation. Returns one result
    /// per shard, in order.
    async fn open_shards(&self, shards: &[ShardId]) -> Result<Vec<Opening>>;

    /// Closes a shard if it has this generation, which is never used again. Returns whether the
    /// shard is now closed in this generation.
    async fn close_shard(&self, shard: &ShardId, generation: u64) -> Result<bool>;

    /// Begins to rebuild shards that Redis lost: raises the generation of each from the given one,
    /// and opens it.
    ///
    /// Returns the present generation of each shard, in order, even if another process was faster.
    async fn begin_rebuild(&self, lost: &[(ShardId, u64)]) -> Result<Vec<u64>>;

    /// The open shards that are being rebuilt.
    async fn rebuilding(&self) -> Result<Rebuilding>;

    /// Unfinished tasks of these shards that are not in the outbox, among `limit` tasks after
    /// `after`.
    ///
    /// A page also ends at [`PAGE_BYTES`]. It may be empty although there is a next page.
    async fn rebuild_page(
        &self,
        of: &Rebuilding,
        after: Option<&Walked>,
        limit: u32,
    ) -> Result<RebuildPage>;

    /// Ends the rebuild of those shards that still have the given generation. `generation` is the
    /// topic's.
    ///
    /// From then on, every unfinished task of such a shard that is not in the outbox counts as
    /// published at the given offset, or at its own offset if that is later.
    async fn end_rebuild(&self, generation: &str, rebuilt: &[Rebuilt]) -> Result<()>;

    /// Those of `ids` that are published and unfinished, in any order. `generation` is the topic's.
    async fn published_among(&self, generation: &str, ids: &[TaskId])
    -> Result<Vec<PublishedTask>>;

    /// The tasks on the bus among the next `limit` unfinished ones of a stretch. This includes
    /// tasks whose batch is not published yet.
    ///
    /// A page may be empty although there is a next page. Queues whose count of unfinished tasks is
    /// zero are left out.
    async fn on_bus(&self, stretch: Stretch<'_>, limit: u32) -> Result<WalkedPage>;

    /// The greatest id of a stored task.
    async fn last_id(&self) -> Result<Option<TaskId>>;
}
