//! The outbox: tasks to publish, the offsets of those that were published, and the shards that they
//! go to.

use std::collections::{BTreeMap, HashSet};

use async_trait::async_trait;

use super::{PublishedTask, Result, Turn, Unpublished};
use crate::model::{Offset, QueueName, ShardId, TaskId, TaskRow};

/// The bytes of tasks at which a page of the outbox ends: a thousand rows may weigh a gigabyte.
pub const PAGE_BYTES: usize = 16 << 20;

/// How many due rows [`Outbox::oldest_waiting`] looks at.
pub const DUE_LOOKED_AT: u64 = 1000;

/// A row of the outbox, or a task of a batch that is not published.
#[derive(Clone, Debug, PartialEq)]
pub struct OutboxRow {
    pub task: TaskRow,
    /// No worker has completed it, and nobody has sent it again: for the queue it is as new.
    pub is_as_new: bool,
    pub unpublished: Unpublished,
    pub turn: Turn,
}

/// Tasks that are on the bus now, at or before `offset` of their partition.
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

/// The outcome of [`Outbox::open_shards`] for one shard.
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

/// How far a walk has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Walked {
    pub queue: QueueName,
    pub id: TaskId,
}

impl Walked {
    /// It has come to this queue, and has passed none of its tasks.
    pub fn before(queue: &QueueName) -> Self {
        Self {
            queue: queue.clone(),
            id: TaskId::FIRST,
        }
    }
}

/// A part of the unfinished tasks.
#[derive(Clone, Copy, Debug)]
pub struct Stretch<'a> {
    /// Of this queue; `None`: of all, in the order of their names.
    pub queue: Option<&'a QueueName>,
    pub after: Option<&'a Walked>,
    /// The greatest id. A walk without it may never end in a queue whose tasks come and go fast.
    pub upto: TaskId,
}

impl Stretch<'_> {
    pub const ALL: Self = Self {
        queue: None,
        after: None,
        upto: TaskId::LAST,
    };
}

/// The tasks on the bus in a page of a walk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WalkedPage {
    /// In the order of their ids.
    pub tasks: BTreeMap<ShardId, Vec<TaskId>>,
    /// Where the next page begins; `None`: this is the last one.
    pub next: Option<Walked>,
}

/// What is to be published, what was, and the shards that it goes to.
///
/// Every method is one transaction, and may be repeated as [`super::Store`] says.
#[async_trait]
pub trait Outbox: Send + Sync {
    /// Keeps the offsets of `published`. Removes their outbox rows, unless they have another turn
    /// by now. `generation` is the topic's.
    ///
    /// A batch that is published as a whole, in one call, costs one row. Of any other, each task
    /// gets an offset of its own.
    async fn mark_published(&self, generation: &str, published: &[Published]) -> Result<()>;

    /// Puts tasks into the outbox again, unless they are final. A task that is in it already gets a
    /// new turn.
    async fn unpublish(&self, ids: &[TaskId], why: Unpublished) -> Result<()>;

    /// Puts tasks into the outbox as fresh ones that are due later, unless they are final.
    async fn put_off(&self, ids: &[TaskId], until_unix_ms: i64) -> Result<()>;

    /// Due tasks of the outbox and of batches, without parked ones and those of `without`, the
    /// earliest first.
    ///
    /// A page ends at `limit` rows or at [`PAGE_BYTES`]. Removes the rows on its way whose task is
    /// final, and the batches in which no task waits.
    async fn due(
        &self,
        now_unix_ms: i64,
        limit: usize,
        without: &HashSet<TaskId>,
    ) -> Result<Vec<OutboxRow>>;

    /// Makes fresh tasks due at `to_unix_ms`, because the clock stepped back after they were
    /// stored.
    ///
    /// Looks at a page of at most `limit` outbox rows that are due later than `later_than_unix_ms`,
    /// without parked ones. The page begins behind `after`; the first one takes all batches with
    /// it.
    async fn bring_forward(
        &self,
        later_than_unix_ms: i64,
        to_unix_ms: i64,
        after: Option<(i64, TaskId)>,
        limit: usize,
    ) -> Result<BroughtForward>;

    /// The insert time of the oldest task per queue that waits in SQL: parked, or due and not
    /// published.
    ///
    /// Looks at the first [`DUE_LOOKED_AT`] due rows, and at as many due tasks of batches.
    async fn oldest_waiting(&self, now_unix_ms: i64) -> Result<Vec<(QueueName, i64)>>;

    /// The queues with parked rows.
    async fn parked_queues(&self) -> Result<Vec<QueueName>>;

    /// Parked rows of a queue by priority, then by age; otherwise as [`Self::due`].
    async fn parked(
        &self,
        queue: &QueueName,
        limit: usize,
        without: &HashSet<TaskId>,
    ) -> Result<Vec<OutboxRow>>;

    /// Removes the published batches that no task needs, among `limit` batches behind `after`.
    /// Answers where the next page begins.
    ///
    /// A task needs its batch until it is final or in the outbox.
    async fn remove_batches(&self, after: Option<Turn>, limit: u32) -> Result<Option<Turn>>;

    /// The open shards; or all shards with a change after that version, in the order of versions.
    async fn shards(&self, changed_after: Option<u64>) -> Result<Vec<StoredShard>>;

    /// Opens the shards that are not open, in their first or next generation. Answers per shard, in
    /// order.
    async fn open_shards(&self, shards: &[ShardId]) -> Result<Vec<Opening>>;

    /// Closes a shard that is in this generation, which it never has again. Answers whether it is
    /// closed in it now.
    async fn close_shard(&self, shard: &ShardId, generation: u64) -> Result<bool>;

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
    /// A page ends at [`PAGE_BYTES`], too. It may be empty and have a next one.
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

    /// The published, unfinished tasks among `ids`, in any order. `generation` is the topic's.
    async fn published_among(&self, generation: &str, ids: &[TaskId])
    -> Result<Vec<PublishedTask>>;

    /// The tasks on the bus among the next `limit` unfinished ones of a stretch. Those are among
    /// them that wait in their batch, and are not published yet.
    ///
    /// A page may be empty and have a next one. Queues whose count of unfinished tasks is zero are
    /// left out.
    async fn on_bus(&self, stretch: Stretch<'_>, limit: u32) -> Result<WalkedPage>;

    /// The greatest id of a stored task.
    async fn last_id(&self) -> Result<Option<TaskId>>;
}
