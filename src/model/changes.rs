//! Changes of live work: what an operator may want of unfinished tasks, and what became of it.

use std::time::Duration;

use super::{Act, MAX_REPLICAS, Priority, QueueName, ShardId, TaskId, WorkerName};

/// A change of unfinished tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// No worker does the task any more.
    Cancel,
    Update(Update),
    Requeue(Requeue),
}

/// New values of tasks. `None`: as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Update {
    pub priority: Option<Priority>,
    /// NUM. A higher one reopens a completed task.
    pub replicas: Option<u32>,
}

/// Offers tasks anew: leases and backoffs end, at no cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Requeue {
    /// Every worker may get the task.
    All,
    /// Only this worker's lease ends, and it does not get the task again.
    AwayFrom(WorkerName),
    /// Only this worker gets the task, until then or until it is requeued again.
    To {
        worker: WorkerName,
        until_unix_ms: Option<i64>,
    },
    /// The time of a reservation is over.
    Free,
}

/// A request to offer tasks anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequeueTasks {
    All,
    AwayFrom(WorkerName),
    /// `None`: until somebody requeues it again.
    To {
        worker: WorkerName,
        reserved_for: Option<Duration>,
    },
}

impl RequeueTasks {
    /// A request by the names of workers; empty: not given.
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
    /// An error for a change of nothing, and for a NUM that no task may have.
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
    /// The words of the act of an operator.
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

/// The kind of a change. SQL keeps those of [`Self::KEPT`] as the discriminants, until the queue
/// has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ChangeKind {
    Cancel = 1,
    Update = 2,
    /// The end of a reservation, at its time.
    Reservation = 3,
    /// SQL keeps none.
    Requeue = 4,
    /// The end of a task at its deadline. Not an operator wants it, but the insert:
    /// `store::Tasks` has it.
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
    /// Workers had completed the task before.
    AlreadyCompleted,
    /// The task had failed for good before.
    Dead,
    /// Somebody had cancelled it before.
    Cancelled,
    /// The task is not in its queue: no worker holds it.
    NotQueued,
    /// The time of the task has not come: no worker holds it.
    NotDue,
    /// The worker for whom it should be reserved has completed it.
    CompletedByWorker,
    /// The queue takes no task with so many replicas.
    TooManyReplicas,
    /// There is no such task, or it finished so long ago that it was removed.
    Unknown,
    /// SQL has the wish, and a server does not answer now: the watchdog applies it.
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

/// A task that a change is about, as SQL has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangingTask {
    pub id: TaskId,
    pub shard: ShardId,
    pub replicas: u32,
    pub priority: Priority,
    /// How often the task was sent again.
    pub epoch: u32,
}

/// A queue of which no worker gets anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PausedQueue {
    pub queue: QueueName,
    pub at_unix_ms: i64,
    /// The operator.
    pub who: String,
}

/// A task by its id, and the queue that says who reaches it.
pub type OwnedTask = (TaskId, QueueName);

/// An act of an operator about a task.
pub type TaskAct = (TaskId, Act);
