//! Changes of live work: what an operator may request for unfinished tasks, and the outcome.

use std::time::Duration;

use super::{Act, MAX_REPLICAS, Priority, QueueName, ShardId, TaskId, WorkerName};

/// A change of unfinished tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// No worker is to do the task any more.
    Cancel,
    Update(Update),
    Requeue(Requeue),
}

/// New values for tasks. `None` keeps the value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Update {
    pub priority: Option<Priority>,
    /// NUM. Raising it reopens a completed task.
    pub replicas: Option<u32>,
}

/// Offers tasks again. Leases and backoffs end, without counting as failures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Requeue {
    /// Every worker may get the task.
    All,
    /// Only this worker's lease ends, and the worker does not get the task again.
    AwayFrom(WorkerName),
    /// Only this worker gets the task, until the given time or until the task is requeued again.
    To {
        worker: WorkerName,
        until_unix_ms: Option<i64>,
    },
    /// A reservation has expired.
    Free,
}

/// A request to offer tasks again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequeueTasks {
    All,
    AwayFrom(WorkerName),
    /// If `reserved_for` is `None`, the reservation lasts until somebody requeues the task again.
    To {
        worker: WorkerName,
        reserved_for: Option<Duration>,
    },
}

impl RequeueTasks {
    /// Builds the request from the names of workers. An empty name means that it was not given.
    pub fn new(to: &str, away_from: &str, reserved_for: Option<Duration>) -> Result<Self, String> {
        let worker = |name: &str| WorkerName::new(name).map_err(|error| error.to_string());
        match (to.is_empty(), away_from.is_empty(), reserved_for) {
            (true, _, Some(_)) => Err("a reservation needs the name of its worker (to)".into()),
            (_, _, Some(Duration::ZERO)) => Err("the reservation is for no time".into()),
            (false, false, _) => Err("to and away_from are both given; use one".into()),
            (false, true, reserved_for) => Ok(Self::To {
                worker: worker(to)?,
                reserved_for,
            }),
            (true, false, None) => Ok(Self::AwayFrom(worker(away_from)?)),
            (true, true, None) => Ok(Self::All),
        }
    }
}

impl Update {
    /// Returns an error if the update changes nothing, or if the NUM is out of range.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Self {
                priority: None,
                replicas: None,
            } => Err("name a priority or replicas".into()),
            Self {
                replicas: Some(replicas),
                ..
            } if !(1..=MAX_REPLICAS).contains(replicas) => Err(format!(
                "replicas is {replicas}; must be 1 to {MAX_REPLICAS}"
            )),
            _ => Ok(()),
        }
    }
}

impl Change {
    /// The text of the operator's act.
    pub fn act(&self) -> String {
        match self {
            Self::Cancel => "cancel task".to_owned(),
            Self::Update(Update { priority, replicas }) => {
                let priority = priority.map(|priority| format!(" priority {}", priority.as_str()));
                let replicas = replicas.map(|replicas| format!(" replicas {replicas}"));
                format!(
                    "change task:{}{}",
                    priority.unwrap_or_default(),
                    replicas.unwrap_or_default()
                )
            }
            Self::Requeue(Requeue::AwayFrom(worker)) => {
                format!("requeue task away from {}", worker.as_str())
            }
            Self::Requeue(Requeue::To { worker, .. }) => {
                format!("requeue task to {}", worker.as_str())
            }
            Self::Requeue(Requeue::All | Requeue::Free) => "requeue task".to_owned(),
        }
    }

    pub fn kind(&self) -> ChangeKind {
        match self {
            Self::Cancel => ChangeKind::Cancel,
            Self::Update(_) => ChangeKind::Update,
            Self::Requeue(Requeue::Free) => ChangeKind::Reservation,
            Self::Requeue(_) => ChangeKind::Requeue,
        }
    }
}

/// The kind of a change. SQL stores pending changes of the kinds in [`Self::KEPT`] under their
/// discriminants until the queue has applied them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ChangeKind {
    Cancel = 1,
    Update = 2,
    /// The end of a reservation at its expiry time.
    Reservation = 3,
    /// Never stored in SQL.
    Requeue = 4,
    /// The end of a task at its deadline. It is requested by the insert, not by an operator: see
    /// `store::Tasks`.
    Deadline = 5,
}

impl ChangeKind {
    pub const KEPT: [Self; 3] = [Self::Cancel, Self::Update, Self::Reservation];

    /// The name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Update => "update",
            Self::Reservation => "reservation",
            Self::Requeue => "requeue",
            Self::Deadline => "deadline",
        }
    }
}

/// The outcome of a change for one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Changed {
    Done,
    /// Workers had already completed the task.
    AlreadyCompleted,
    /// The task had already failed for good.
    Dead,
    /// The task had already been cancelled.
    Cancelled,
    /// The task is not in its queue, so no worker holds it.
    NotQueued,
    /// The task is not due yet, so no worker holds it.
    NotDue,
    /// The worker for whom the task was to be reserved has completed it.
    CompletedByWorker,
    /// The queue does not accept tasks with this many replicas.
    TooManyReplicas,
    /// There is no such task, or it finished so long ago that it was removed.
    Unknown,
    /// The change is stored in SQL, but a server does not respond at the moment. The watchdog will
    /// apply the change.
    Later,
}

impl Changed {
    /// The name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::AlreadyCompleted => "completed",
            Self::Dead => "dead",
            Self::Cancelled => "cancelled",
            Self::NotQueued => "not_queued",
            Self::NotDue => "not_due",
            Self::CompletedByWorker => "completed_by_worker",
            Self::TooManyReplicas => "too_many_replicas",
            Self::Unknown => "unknown",
            Self::Later => "later",
        }
    }
}

/// A task to be changed, as stored in SQL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangingTask {
    pub id: TaskId,
    pub shard: ShardId,
    pub replicas: u32,
    pub priority: Priority,
    /// How often the task was sent again.
    pub epoch: u32,
}

/// A queue whose tasks no worker gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PausedQueue {
    pub queue: QueueName,
    pub at_unix_ms: i64,
    /// The operator who paused it.
    pub who: String,
}

/// The id of a task, and its queue, which determines who may access it.
pub type OwnedTask = (TaskId, QueueName);

/// An operator's act on a task.
pub type TaskAct = (TaskId, Act);
