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
        Act, Attempt, BulkChange, Change, ChangeKind, ChangedLimits, ChangingTask, DeadLetter,
        FailedAttempt, KeyHash, LetterId, LetterKind, LetterPage, LetterPages, LimitHold,
        OwnLimits, PausedQueue, Priority, QueueName, StoredLetter, StoredStatus, TaskAct,
        TaskCursor, TaskId,
    },
};

/// The maximum number of bulk changes that run at a time.
pub const MOST_BULK_CHANGES: u32 = 100;

/// How long a bulk change is kept, counted from its start. A running one is kept longer.
pub const BULK_CHANGES_STAY: Duration = Duration::from_secs(30 * 24 * 3600);

/// Whether a bulk change was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddedBulk {
    Yes,
    /// [`MOST_BULK_CHANGES`] are running.
    NoRoom,
    /// The maximum number of bulk changes for this token are running.
    NoRoomForToken,
}

/// The outcome of requesting a change of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    Unknown,
    /// The task is final, so nothing was stored.
    Final(StoredStatus),
    /// The task had been completed, and now has more replicas.
    Reopened,
    /// SQL keeps the pending change until [`Operators::end_changes`].
    Kept(KeptChange),
}

/// A pending change, as stored in SQL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptChange {
    pub task: ChangingTask,
    pub kind: ChangeKind,
    /// A later pending change of the same task has another turn.
    pub turn: Turn,
    pub at_unix_ms: i64,
    /// It has replaced an earlier pending change, which a process may be applying right now.
    pub is_second: bool,
}

/// Which pending changes to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptPages {
    pub kind: ChangeKind,
    /// Only changes that were stored up to this time.
    pub upto_unix_ms: i64,
    pub after: Option<(i64, TaskId)>,
    pub limit: u32,
}

/// A page of pending changes, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptChanges {
    pub changes: Vec<KeptChange>,
    /// Where the next page begins.
    pub next: Option<(i64, TaskId)>,
}

/// The outcome of a pending change, which removes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedChange {
    pub id: TaskId,
    /// `None` if the queue has cancelled the task, and the turn of its pending change may be
    /// unknown.
    pub turn: Option<Turn>,
    pub end: Decided,
}

/// What the queue decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decided {
    /// The queue has cancelled the task. The epoch is the task's, the generation that of the shard
    /// whose record was cancelled.
    Cancelled { epoch: u32, generation: u64 },
    /// The queue has applied these values. If SQL has newer values by now, it stores a pending
    /// change so that the queue gets them. A task whose credits reach NUM becomes Completed.
    Updated { replicas: u32, priority: Priority },
    /// The queue had completed the task, in this epoch and with this many credits, before NUM was
    /// raised. The task is reopened if SQL has as many credits; otherwise the pending change stays.
    CompletedBefore { epoch: u32, credited: u32 },
    /// The queue ends the reservation at this time, so the pending change is moved to it.
    ReservedUntil(i64),
    /// Nothing is left to do.
    Over,
}

/// The state of a task after [`Operators::end_changes`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeEnd {
    /// `None` if there is no such task.
    pub status: Option<StoredStatus>,
    /// The key to remove from the filter, because the task is dead or cancelled.
    pub key: Option<(QueueName, KeyHash)>,
}

/// How many failed attempts of a task are kept. The oldest are removed first.
pub const FAILURES_STAY: u32 = 100;

/// The attempts of a task that have ended, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attempts {
    /// At most [`FAILURES_STAY`].
    pub failed: Vec<Attempt>,
    /// The last `limit` completed attempts.
    pub completed: Vec<Attempt>,
    /// The number of results of the task.
    pub results: u32,
}

/// The events of a transaction, or a part of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptEvents {
    pub number: i64,
    /// The time of the first of them.
    pub at_unix_ms: i64,
    /// Encoded; `wire` decodes them.
    pub events: Bytes,
}

/// Why an inserted or discovered task was not stored. SQL stores the discriminants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum TurnedAway {
    /// The queue has, or had, a task with this key.
    Duplicate = 1,
    /// The task is invalid, or could never be accepted.
    Rejected = 2,
}

impl TurnedAway {
    pub const ALL: [Self; 2] = [Self::Duplicate, Self::Rejected];
}

/// How many tasks were turned away, by queue and reason. The queue is `None` if this process does
/// not know it.
pub type TurnedAwayCounts = BTreeMap<(Option<QueueName>, TurnedAway), u64>;

/// How many unfinished tasks are off the bus, by queue and reason.
pub type OffBusCounts = BTreeMap<(QueueName, Unpublished), u64>;

/// The maximum number of paused queues. Each process keeps their names in memory.
pub const MOST_PAUSED: u32 = 10_000;

/// The outcome of pausing or resuming a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pausing {
    Done,
    /// The queue was already paused, or was not paused.
    Already,
    /// There are [`MOST_PAUSED`] already.
    NoRoom,
}

/// The maximum number of limit keys with own limits. Each process keeps them in memory.
pub const MOST_OWN_LIMITS: u32 = 100_000;

/// How long a row of own limits stays after it was cleared, so that all processes learn of it.
pub const CLEARED_LIMITS_STAY: Duration = Duration::from_secs(24 * 3600);

/// The maximum number of holds of limit keys that are kept.
pub const MOST_HOLDS: u32 = 100_000;

/// The outcome of setting or clearing own limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitSetting {
    Done,
    /// There was nothing to clear.
    Already,
    /// There are [`MOST_OWN_LIMITS`] already.
    NoRoom,
}

/// A queue whose count of unfinished tasks is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongCount {
    pub queue: QueueName,
    pub kept: i64,
    /// The number of unfinished tasks that are on the bus or in the outbox.
    pub counted: i64,
    /// Both numbers are of those tasks only that wait behind others of their sequences.
    pub are_behind: bool,
}

/// What operators see and do, and what taskd stores for them.
///
/// Every method is one transaction and may be repeated: see [`super::Store`].
#[async_trait]
pub trait Operators: Send + Sync {
    /// Adds a bulk change, unless [`MOST_BULK_CHANGES`] are running, or `most_of_token` with its
    /// token. Records the act, and removes ended bulk changes that began [`BULK_CHANGES_STAY`] ago.
    async fn add_bulk_change(
        &self,
        bulk: &BulkChange,
        most_of_token: u32,
        act: &Act,
    ) -> Result<AddedBulk>;

    async fn bulk_change(&self, id: Uuid) -> Result<Option<BulkChange>>;

    /// Bulk changes before `before`, latest first. Leaves out those that a later version of taskd
    /// added.
    async fn bulk_changes(&self, before: Option<Uuid>, limit: u32) -> Result<Vec<BulkChange>>;

    /// The running bulk changes, oldest first. Leaves out those of a later version of taskd, which
    /// continue when a process of that version becomes the leader.
    async fn running_bulk_changes(&self) -> Result<Vec<BulkChange>>;

    /// Stores progress and state of a bulk change if it is running and its cursor is `from`.
    /// Returns whether it was stored.
    ///
    /// If two processes have changed the same page, only one of them stores its counts.
    async fn advance_bulk_change(
        &self,
        bulk: &BulkChange,
        from: Option<TaskCursor>,
    ) -> Result<bool>;

    /// Stops a running bulk change, and records the act. `why` becomes its last error. Returns the
    /// bulk change after that, or `None` if it does not exist.
    async fn stop_bulk_change(
        &self,
        id: Uuid,
        at_unix_ms: i64,
        why: Option<&str>,
        act: &Act,
    ) -> Result<Option<BulkChange>>;

    /// Sends dead and cancelled tasks again, removes their letters, and records an act for each.
    /// Returns those of `ids` that were dead or cancelled.
    ///
    /// The task becomes unfinished in its next epoch, has no failures, keeps its credits, and is
    /// put into the outbox as `Missing`. Completions that arrived after its end become credits;
    /// with NUM credits it becomes Completed.
    async fn retry_with_acts(
        &self,
        ids: &[TaskId],
        now_unix_ms: i64,
        who: &str,
        what: &str,
    ) -> Result<Vec<Retried>> {
        self.retry_as_of(ids, now_unix_ms, who, what, None).await
    }

    /// The same. With a time that a count began with, tasks that have changed since stay as they
    /// are.
    async fn retry_as_of(
        &self,
        ids: &[TaskId],
        now_unix_ms: i64,
        who: &str,
        what: &str,
        as_of_unix_ms: Option<i64>,
    ) -> Result<Vec<Retried>>;

    /// Stores letters about records and about tasks that are not stored. A letter that already
    /// exists stays unchanged.
    async fn keep_letters(&self, letters: &[DeadLetter]) -> Result<()>;

    /// A page of letters without payloads and values, newest first. It reads `limit` letters, and
    /// leaves out those whose reason does not match.
    async fn letters(&self, pages: &LetterPages) -> Result<LetterPage>;

    /// A letter with all its parts.
    async fn letter(&self, id: LetterId) -> Result<Option<StoredLetter>>;

    /// The letters among `ids`, in any order.
    async fn letter_kinds(&self, ids: &[LetterId]) -> Result<Vec<(LetterId, LetterKind)>>;

    /// Removes letters, and with them dead tasks, whose keys stay. Returns the number of letters.
    async fn purge(&self, ids: &[LetterId]) -> Result<u64>;

    /// Removes at most `limit` letters that are at least `age` old, except those of dead tasks.
    /// Returns how many.
    async fn remove_old_letters(&self, age: Duration, limit: u32) -> Result<u64>;

    /// Stores new values of tasks. For each unfinished task it stores a pending change, which
    /// replaces an earlier one of the same kind, and the act. Returns one outcome per id, in order.
    ///
    /// If there are two ends of a reservation, the earlier one stays, because the queue may have
    /// either. [`Decided::ReservedUntil`] moves it.
    async fn want(
        &self,
        ids: &[TaskId],
        change: &Change,
        at_unix_ms: i64,
        acts: &[TaskAct],
    ) -> Result<Vec<Wanted>> {
        self.want_as_of(ids, change, at_unix_ms, acts, None).await
    }

    /// The same. With a time that a count began with, tasks that have changed since count as
    /// unknown.
    async fn want_as_of(
        &self,
        ids: &[TaskId],
        change: &Change,
        at_unix_ms: i64,
        acts: &[TaskAct],
        as_of_unix_ms: Option<i64>,
    ) -> Result<Vec<Wanted>>;

    /// Reads pending changes of a kind. Removes those of tasks that are final or no longer exist.
    async fn kept_changes(&self, pages: &KeptPages) -> Result<KeptChanges>;

    /// Removes pending changes that still have the given turns. Returns one result per change, in
    /// order.
    ///
    /// A task becomes Cancelled if it is unfinished in the given epoch, and its shard still has the
    /// given generation: the tasks of a shard that has been rebuilt since are published again.
    /// Otherwise the pending change stays.
    async fn end_changes(&self, ended: &[EndedChange], at_unix_ms: i64) -> Result<Vec<ChangeEnd>>;

    /// Stores failed attempts of stored tasks. One that is already stored stays unchanged.
    async fn keep_failures(&self, failures: &[FailedAttempt]) -> Result<()>;

    /// The attempts of a task that have ended.
    async fn attempts(&self, id: TaskId, limit: u32) -> Result<Attempts>;

    /// Removes at most `limit` failed attempts that are at least `age` old by the database's clock.
    /// Returns how many.
    async fn remove_old_failures(&self, age: Duration, limit: u32) -> Result<u64>;

    /// Records acts that change no token. One that is already recorded stays unchanged.
    async fn keep_acts(&self, acts: &[Act]) -> Result<()>;

    /// The last acts with this target, oldest first.
    async fn acts_on(&self, target: &str, limit: u32) -> Result<Vec<Act>>;

    /// From now on, this process stores the events of these queues in its transactions. Initially
    /// it stores none.
    fn keep_events_of(&self, queues: EventQueues);

    /// The first stored events, sorted by number, in at most `limit` rows.
    ///
    /// A later change of a task has a higher number than an earlier one, and is never returned
    /// without it. For different tasks, a lower number may appear later.
    async fn kept_events(&self, limit: u32) -> Result<Vec<KeptEvents>>;

    /// Removes the events with these numbers.
    async fn remove_events(&self, numbers: &[i64]) -> Result<()>;

    /// Adds to the counts of tasks that were turned away. Not idempotent: a repeated call adds
    /// again.
    async fn add_turned_away(&self, counts: &TurnedAwayCounts) -> Result<()>;

    /// The counts of `queues`, and those of tasks whose queue is unknown.
    async fn turned_away(&self, queues: &[QueueName]) -> Result<TurnedAwayCounts>;

    /// Counts the unfinished tasks in the outbox and in unpublished batches.
    ///
    /// Reads the whole outbox in pages, so it is slow if millions of tasks are waiting. A row that
    /// moves in the meantime may be counted twice or not at all.
    async fn off_bus(&self) -> Result<OffBusCounts>;

    /// A number that increases with each pause and each resume.
    async fn pauses_version(&self) -> Result<u64>;

    /// The paused queues, by name. There are at most [`MOST_PAUSED`].
    async fn paused_queues(&self) -> Result<Vec<PausedQueue>>;

    /// Pauses a queue, even one that has no tasks yet, and records the act.
    async fn pause(&self, paused: &PausedQueue, act: &Act) -> Result<Pausing>;

    /// Resumes a queue, and records the act.
    async fn resume(&self, queue: &QueueName, act: &Act) -> Result<Pausing>;

    /// A number that increases with each change of own limits.
    async fn limits_version(&self) -> Result<u64>;

    /// The own limits that changed after this version, sorted by version, at most `limit`. Those
    /// that were cleared more than [`CLEARED_LIMITS_STAY`] ago may be missing.
    async fn changed_limits(&self, after: u64, limit: u32) -> Result<Vec<ChangedLimits>>;

    /// The own limits of a queue, by limit key, after the key `after`.
    async fn own_limits(
        &self,
        queue: &QueueName,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<OwnLimits>>;

    /// The own limits of one limit key.
    async fn own_limits_of(&self, queue: &QueueName, limit_key: &str) -> Result<Option<OwnLimits>>;

    /// Replaces the own limits of a limit key, and records the act.
    async fn set_limits(&self, limits: &OwnLimits, act: &Act) -> Result<LimitSetting>;

    /// Removes the own limits of a limit key, and records the act.
    async fn clear_limits(
        &self,
        queue: &QueueName,
        limit_key: &str,
        at_unix_ms: i64,
        act: &Act,
    ) -> Result<LimitSetting>;

    /// Keeps holds of limit keys of a queue, each in place of an earlier one, and removes those of
    /// all queues that are over. There are at most about [`MOST_HOLDS`]; what comes then is left
    /// out.
    async fn keep_holds(
        &self,
        queue: &QueueName,
        holds: &[LimitHold],
        now_unix_ms: i64,
    ) -> Result<()>;

    /// The holds of limit keys of a queue that are not over.
    async fn holds(&self, queue: &QueueName, now_unix_ms: i64) -> Result<Vec<LimitHold>>;

    /// Counts all unfinished tasks again, at one point in time. Reads all of them.
    async fn wrong_counts(&self) -> Result<Vec<WrongCount>>;

    /// Stores the correct count of a queue, even if none is stored. Concurrent changes of tasks
    /// wait for it, or are included.
    async fn correct_count(&self, queue: &QueueName) -> Result<()>;

    /// Checks a page of all tasks after `after` for unfinished ones that are neither on the bus nor
    /// in the outbox. Returns these, and where the next page begins.
    async fn stranded(
        &self,
        after: Option<TaskId>,
    ) -> Result<(Vec<(QueueName, TaskId)>, Option<TaskId>)>;
}
