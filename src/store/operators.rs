//! What operators see and do: bulk changes, letters, changes of live work, histories, events,
//! books, pauses and checks.

use std::{collections::BTreeMap, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use uuid::Uuid;

use super::{Result, Retried, Turn, Unpublished};
use crate::{
    config::EventQueues,
    model::{
        Act, Attempt, BulkChange, Change, ChangeKind, ChangingTask, DeadLetter, FailedAttempt,
        KeyHash, LetterId, LetterKind, LetterPage, LetterPages, PausedQueue, Priority, QueueName,
        StoredLetter, StoredStatus, TaskAct, TaskCursor, TaskId,
    },
};

/// The most bulk changes that run at a time.
pub const MOST_BULK_CHANGES: u32 = 100;

/// How long a bulk change can be read, from its start. A bulk change that runs stays.
pub const BULK_CHANGES_STAY: Duration = Duration::from_secs(30 * 24 * 3600);

/// Whether a bulk change was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddedBulk {
    Yes,
    /// [`MOST_BULK_CHANGES`] run.
    NoRoom,
    /// The token of the bulk change has as many as it may have.
    NoRoomForToken,
}

/// The answer to a wish to change a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    Unknown,
    /// The task is final: nothing was stored.
    Final(StoredStatus),
    /// The task was completed, and has more replicas now.
    Reopened,
    /// SQL keeps the wish until [`Operators::end_changes`].
    Kept(KeptChange),
}

/// A wish that SQL keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptChange {
    pub task: ChangingTask,
    pub kind: ChangeKind,
    /// A later wish about the task has another one.
    pub turn: Turn,
    pub at_unix_ms: i64,
    /// The wish has replaced an earlier one, which a process may be carrying out.
    pub is_second: bool,
}

/// Which wishes to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptPages {
    pub kind: ChangeKind,
    /// Only the wishes that were stored until then.
    pub upto_unix_ms: i64,
    pub after: Option<(i64, TaskId)>,
    pub limit: u32,
}

/// A part of the wishes that SQL keeps, the earliest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptChanges {
    pub changes: Vec<KeptChange>,
    /// Where the next page begins.
    pub next: Option<(i64, TaskId)>,
}

/// The end of a wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedChange {
    pub id: TaskId,
    /// `None`: the queue has cancelled the task, and perhaps nobody remembers the wish.
    pub turn: Option<Turn>,
    pub end: Decided,
}

/// A decision of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decided {
    /// The task is cancelled in this epoch of it, by a record of this generation of its shard.
    Cancelled { epoch: u32, generation: u64 },
    /// The queue has these values. If SQL has others since, it keeps a wish that the queue gets
    /// them. A task whose credits reach NUM becomes Completed.
    Updated { replicas: u32, priority: Priority },
    /// The queue had completed the task in this epoch of it, with so many credits, before it had a
    /// higher NUM. The task is reopened, if SQL has as many credits; otherwise the wish stays.
    CompletedBefore { epoch: u32, credited: u32 },
    /// The queue ends the reservation of the task at this time: the wish is for then.
    ReservedUntil(i64),
    /// Nothing is left to do.
    Over,
}

/// The state of a task behind [`Operators::end_changes`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeEnd {
    /// `None`: there is no such task.
    pub status: Option<StoredStatus>,
    /// The key that must leave the filter, because its task is dead or cancelled.
    pub key: Option<(QueueName, KeyHash)>,
}

/// How many failed attempts of a task stay; the earliest ones go first.
pub const FAILURES_STAY: u32 = 100;

/// The attempts of a task that are over, the earliest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attempts {
    /// At most [`FAILURES_STAY`].
    pub failed: Vec<Attempt>,
    /// The last `limit` attempts.
    pub completed: Vec<Attempt>,
    /// How many results the task has.
    pub results: u32,
}

/// Events of a transaction, or of a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptEvents {
    pub number: i64,
    /// When the first of them happened.
    pub at_unix_ms: i64,
    /// As `wire` reads them.
    pub events: Bytes,
}

/// The reason why a task that came in was not stored. SQL stores the discriminants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum TurnedAway {
    /// The queue has, or had, a task with this key.
    Duplicate = 1,
    /// The task is not valid, or will never have room.
    Rejected = 2,
}

impl TurnedAway {
    pub const ALL: [Self; 2] = [Self::Duplicate, Self::Rejected];
}

/// How many tasks were turned away, by queue and reason. `None`: their queue is not known here.
pub type TurnedAwayCounts = BTreeMap<(Option<QueueName>, TurnedAway), u64>;

/// How many unfinished tasks wait off the bus, by queue and reason.
pub type OffBusCounts = BTreeMap<(QueueName, Unpublished), u64>;

/// The most paused queues. Each process keeps their names in memory.
pub const MOST_PAUSED: u32 = 10_000;

/// The outcome of a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pausing {
    Done,
    /// The queue was paused, or not paused, before.
    Already,
    /// There are [`MOST_PAUSED`].
    NoRoom,
}

/// A queue whose count of unfinished tasks is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongCount {
    pub queue: QueueName,
    pub kept: i64,
    /// The unfinished tasks that are on the bus or in the outbox.
    pub counted: i64,
}

/// What operators see and do, and what taskd keeps for them.
///
/// Every method is one transaction, and may be repeated as [`super::Store`] says.
#[async_trait]
pub trait Operators: Send + Sync {
    /// Adds a bulk change, unless [`MOST_BULK_CHANGES`] run, or `most_of_token` of its token.
    /// Records its act, and removes bulk changes that ended and began [`BULK_CHANGES_STAY`] ago.
    async fn add_bulk_change(
        &self,
        bulk: &BulkChange,
        most_of_token: u32,
        act: &Act,
    ) -> Result<AddedBulk>;

    async fn bulk_change(&self, id: Uuid) -> Result<Option<BulkChange>>;

    /// Bulk changes before `before`, the latest first. Leaves out those that a later taskd has
    /// added.
    async fn bulk_changes(&self, before: Option<Uuid>, limit: u32) -> Result<Vec<BulkChange>>;

    /// The running bulk changes, the earliest first. Leaves out those of a later taskd, which go on
    /// when one leads.
    async fn running_bulk_changes(&self) -> Result<Vec<BulkChange>>;

    /// Stores progress and state of a bulk change that runs and stands at `from`. Answers whether
    /// it did.
    ///
    /// Of two that have changed the same page one stores its counts.
    async fn advance_bulk_change(
        &self,
        bulk: &BulkChange,
        from: Option<TaskCursor>,
    ) -> Result<bool>;

    /// Stops a running bulk change, and records the act. The reason, if there is one, becomes its
    /// last error. Answers the bulk change after that; `None`: there is no such bulk change.
    async fn stop_bulk_change(
        &self,
        id: Uuid,
        at_unix_ms: i64,
        why: Option<&str>,
        act: &Act,
    ) -> Result<Option<BulkChange>>;

    /// Sends dead and cancelled tasks again, removes their letters, and records an act for each.
    /// Answers those among `ids` that were one.
    ///
    /// The task is unfinished in its next epoch, has no failures, keeps its credits, and is in the
    /// outbox as `Missing`. Completions that came after its end become credits; with NUM of them it
    /// is Completed.
    async fn retry_with_acts(
        &self,
        ids: &[TaskId],
        now_unix_ms: i64,
        who: &str,
        what: &str,
    ) -> Result<Vec<Retried>>;

    /// Keeps letters about records, and about tasks that are not stored. One that is kept already
    /// stays as it is.
    async fn keep_letters(&self, letters: &[DeadLetter]) -> Result<()>;

    /// A page of letters without payloads and values, the newest first. It looks at `limit`
    /// letters, and leaves out those with another reason.
    async fn letters(&self, pages: &LetterPages) -> Result<LetterPage>;

    /// A letter with all that it has.
    async fn letter(&self, id: LetterId) -> Result<Option<StoredLetter>>;

    /// The letters among `ids`, in any order.
    async fn letter_kinds(&self, ids: &[LetterId]) -> Result<Vec<(LetterId, LetterKind)>>;

    /// Removes letters, and dead tasks with them: their keys stay. Answers how many letters.
    async fn purge(&self, ids: &[LetterId]) -> Result<u64>;

    /// Removes at most `limit` letters that are at least `age` old, except those of dead tasks.
    /// Answers how many.
    async fn remove_old_letters(&self, age: Duration, limit: u32) -> Result<u64>;

    /// Stores new values of tasks. Keeps a wish about each unfinished task, in place of an earlier
    /// one of its kind, and the acts about these. Answers per id, in order.
    ///
    /// Of two ends of a reservation the earlier one stays, because the queue may have either:
    /// [`Decided::ReservedUntil`] moves it.
    async fn want(
        &self,
        ids: &[TaskId],
        change: &Change,
        at_unix_ms: i64,
        acts: &[TaskAct],
    ) -> Result<Vec<Wanted>>;

    /// Wishes of a kind. Removes those about tasks that are final, or that are not there any more.
    async fn kept_changes(&self, pages: &KeptPages) -> Result<KeptChanges>;

    /// Removes wishes in their turns. Answers per change, in order.
    ///
    /// A task becomes Cancelled if it is unfinished in that epoch, and its shard is still in that
    /// generation: the tasks of a shard that was rebuilt since are published again. Otherwise its
    /// wish stays.
    async fn end_changes(&self, ended: &[EndedChange], at_unix_ms: i64) -> Result<Vec<ChangeEnd>>;

    /// Keeps failed attempts of stored tasks. One that is kept already stays as it is.
    async fn keep_failures(&self, failures: &[FailedAttempt]) -> Result<()>;

    /// The attempts of a task that are over.
    async fn attempts(&self, id: TaskId, limit: u32) -> Result<Attempts>;

    /// Removes at most `limit` failed attempts that are at least `age` old, by the database's
    /// clock. Answers how many.
    async fn remove_old_failures(&self, age: Duration, limit: u32) -> Result<u64>;

    /// Records acts that change no token. One that is recorded already stays as it is.
    async fn keep_acts(&self, acts: &[Act]) -> Result<()>;

    /// The last acts with this target, the earliest first.
    async fn acts_on(&self, target: &str, limit: u32) -> Result<Vec<Act>>;

    /// Keeps events of these queues from now on, in transactions of this process. At first of none.
    fn keep_events_of(&self, queues: EventQueues);

    /// The first kept events, in the order of their numbers, at most `limit` rows of them.
    ///
    /// A later change of a task has a later number than an earlier one, and is not here without it.
    /// Of different tasks an earlier number may come later.
    async fn kept_events(&self, limit: u32) -> Result<Vec<KeptEvents>>;

    /// Removes those with these numbers.
    async fn remove_events(&self, numbers: &[i64]) -> Result<()>;

    /// Adds to the counts of what was turned away. A repeat adds again.
    async fn add_turned_away(&self, counts: &TurnedAwayCounts) -> Result<()>;

    /// The counts of `queues`, and of tasks without a known queue.
    async fn turned_away(&self, queues: &[QueueName]) -> Result<TurnedAwayCounts>;

    /// The unfinished tasks in the outbox and in batches that are not published.
    ///
    /// Reads the whole outbox, in pieces, so it is slow where millions
    /// wait. A row that moves meanwhile may count twice or not at all.
    async fn off_bus(&self) -> Result<OffBusCounts>;

    /// A number that each pause and each resume raises.
    async fn pauses_version(&self) -> Result<u64>;

    /// The paused queues, by name. There are at most [`MOST_PAUSED`].
    async fn paused_queues(&self) -> Result<Vec<PausedQueue>>;

    /// Pauses a queue, also one that has no task yet, and records the act.
    async fn pause(&self, paused: &PausedQueue, act: &Act) -> Result<Pausing>;

    /// Resumes a queue, and records the act.
    async fn resume(&self, queue: &QueueName, act: &Act) -> Result<Pausing>;

    /// Counts all unfinished tasks again, as of one moment. Goes over all of them.
    async fn wrong_counts(&self) -> Result<Vec<WrongCount>>;

    /// Writes the right count of a queue, also where there is none. Other changes of tasks wait
    /// meanwhile, or are seen.
    async fn correct_count(&self, queue: &QueueName) -> Result<()>;

    /// A page of all tasks behind `after`: the unfinished ones that are neither on the bus nor in
    /// the outbox. Answers where the next page begins.
    async fn stranded(
        &self,
        after: Option<TaskId>,
    ) -> Result<(Vec<(QueueName, TaskId)>, Option<TaskId>)>;
}
