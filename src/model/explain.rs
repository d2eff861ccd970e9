//! Where a task is, and why a worker does not get it.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use super::{Failure, LetterId, Rfc3339, TaskId, TaskStatus, TaskView, rfc_3339, some_rfc_3339};

/// A question about one task, which is identified by `id`, or by `queue` and `key`. Empty fields
/// were not given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExplainTask {
    pub id: String,
    pub queue: String,
    pub key: Bytes,
    /// The worker to explain the task for, or empty.
    pub worker: String,
}

/// Where a task is on its way from the insert to its end.
#[derive(Clone, Copy, Debug, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TaskPlace {
    /// Completed, dead or cancelled.
    Finished,
    /// Stored in SQL, and about to be published to the bus.
    Outbox,
    /// In SQL, because its queue or Redis is full, or enough tasks of its limit key are in Redis.
    Parked,
    /// In SQL until shortly before it is due.
    Scheduled,
    /// In SQL, until those before it in its sequence have ended.
    Behind,
    /// On the bus, before the fanout.
    Bus,
    /// In a lane of the queue: a worker may claim it.
    Waiting,
    /// A worker holds it.
    Leased,
    /// In the queue, not due yet or in backoff.
    Delayed,
    /// Its end is decided, and the report has not reached SQL yet.
    Reported,
    /// Redis or the bus lost it, and taskd restores it.
    Lost,
}

/// What became of a record of a topic.
#[derive(Clone, Debug, JsonSchema, Serialize)]
pub struct RecordExplanation {
    pub topic: String,
    pub partition: u32,
    pub offset: String,
    // Absent if the topic does not have the record any more.
    #[serde(
        rename = "published_at",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub published_unix_ms: Option<i64>,
    // The subscriptions of the topic, by name.
    pub subscriptions: Vec<RecordOfSubscription>,
}

/// What became of a record in a subscription.
#[derive(Clone, Debug, JsonSchema, Serialize)]
pub struct RecordOfSubscription {
    pub subscription: String,
    pub queue: String,
    pub fate: RecordFate,
    // Its task since the subscription was last sent to another place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<TaskId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<TaskStatus>,
    // The dead letter of a record that was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub letter: Option<LetterId>,
    // The same in words; of a task, where it is.
    pub says: String,
}

/// What a subscription has made of a record.
#[derive(Clone, Copy, Debug, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum RecordFate {
    /// It became a task, or has the id of an earlier record that did.
    Task,
    /// `match` left it out.
    Filtered,
    /// The queue refused it.
    Refused,
    /// It is not read yet.
    Behind,
    /// Retention deleted it before it was read.
    Skipped,
    /// The subscription began after it, or its task was removed.
    NoTask,
}

/// Where a task is, what happens to it next, and why a worker may not get it.
#[derive(Clone, Debug, JsonSchema, Serialize)]
pub struct Explanation {
    pub task: TaskView,
    pub place: TaskPlace,
    // The place in words.
    pub says: String,
    // Since when it is there, as far as taskd knows. For a waiting task, this is when it was
    // inserted or became due.
    #[serde(
        rename = "since",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub since_unix_ms: Option<i64>,
    // The next event, in words.
    pub next: String,
    // The time of the next event, if it has one.
    #[serde(
        rename = "next_at",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub next_unix_ms: Option<i64>,
    pub leases: Vec<LeaseView>,
    // The workers with a credit.
    pub completed_by: Vec<String>,
    // The most recent failures, oldest first, while the task is in the queue.
    pub failures: Vec<Failure>,
    // Conditions that delay the task for every worker.
    pub notes: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<WorkerView>,
    // The time of this answer, by the clock of Redis.
    #[serde(rename = "now", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub now_unix_ms: i64,
}

/// A worker that holds the task.
#[derive(Clone, Debug, JsonSchema, PartialEq, Eq, Serialize)]
#[schemars(rename = "Lease")]
pub struct LeaseView {
    pub worker: String,
    #[serde(
        rename = "lease_expires_at",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub expires_unix_ms: Option<i64>,
    // taskd knows that the answer with the task reached the worker.
    #[serde(rename = "delivered")]
    pub is_delivered: bool,
}

/// Whether a worker may get the task, and why.
#[derive(Clone, Debug, JsonSchema, PartialEq, Eq, Serialize)]
#[schemars(rename = "WorkerChance")]
pub struct WorkerView {
    pub worker: String,
    #[serde(flatten, serialize_with = "chance")]
    #[schemars(with = "Chance")]
    pub reason: WorkerReason,
    // The reason in words.
    pub says: String,
    // When the reason may change by itself.
    #[serde(
        rename = "until",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub until_unix_ms: Option<i64>,
}

#[derive(JsonSchema, Serialize)]
struct Chance {
    may_get: bool,
    reason: WorkerReason,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn chance<S: Serializer>(reason: &WorkerReason, serializer: S) -> Result<S::Ok, S::Error> {
    Chance {
        may_get: *reason == WorkerReason::MayGet,
        reason: *reason,
    }
    .serialize(serializer)
}

/// Why a worker may get a task, or not.
#[derive(Clone, Copy, Debug, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum WorkerReason {
    MayGet,
    /// The worker has completed the task.
    CompletedIt,
    /// The worker holds a replica.
    HoldsIt,
    /// The worker has failed it as often as allowed, or an operator took it away from the worker.
    RefusedIt,
    /// It is reserved for another worker.
    ReservedForAnother,
    /// The task is not due yet.
    NotDue,
    /// All remaining replicas wait for their backoff.
    InBackoff,
    /// Other workers hold all remaining replicas.
    LeasedByOthers,
    /// The task is finished.
    Finished,
    /// The task is not in the queue yet, or no longer.
    NotInQueue,
    /// Its shard currently hands out no tasks.
    ClaimsPaused,
    /// Its limit key lets nothing more start now.
    LimitReached,
    /// An operator has paused its queue.
    QueuePaused,
}
