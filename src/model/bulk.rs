//! Bulk changes: a change of all tasks that match a filter, applied page by page by the watchdog.

use std::{fmt, str::FromStr};

use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use uuid::Uuid;

use super::{
    Change, ItemAnswer, Priority, Requeue, Rfc3339, Scope, SecretHash, TaskCursor, TaskFilter,
    TaskStatus, Update, WorkerName, rfc_3339,
};

/// What a bulk change does to each of its tasks. SQL stores its text form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BulkAction {
    /// Send dead and cancelled tasks again.
    Retry,
    /// No worker is to do these unfinished tasks any more.
    Cancel,
    /// Give unfinished tasks another priority or NUM. A higher NUM reopens completed ones.
    Update(Update),
    /// Offer unfinished tasks again.
    Requeue(Requeue),
}

impl BulkAction {
    /// The change of live work, unless it is a retry.
    pub fn live(&self) -> Option<Change> {
        match self {
            Self::Retry => None,
            Self::Cancel => Some(Change::Cancel),
            Self::Update(update) => Some(Change::Update(*update)),
            Self::Requeue(requeue) => Some(Change::Requeue(requeue.clone())),
        }
    }

    /// The default statuses if the filter names none.
    pub fn statuses(&self) -> &'static [TaskStatus] {
        match self {
            Self::Retry => &[TaskStatus::Dead, TaskStatus::Cancelled],
            Self::Cancel | Self::Update(_) | Self::Requeue(_) => &TaskStatus::UNFINISHED,
        }
    }

    /// All statuses of tasks that the change can apply to.
    pub fn may_change(&self) -> Vec<TaskStatus> {
        let reopened = matches!(
            self,
            Self::Update(Update {
                replicas: Some(_),
                ..
            })
        )
        .then_some(TaskStatus::Completed);
        self.statuses().iter().copied().chain(reopened).collect()
    }

    /// The text of the act on a task.
    pub fn act(&self) -> String {
        self.live()
            .map_or_else(|| "retry task".to_owned(), |change| change.act())
    }

    /// The text of the act on many tasks.
    pub fn of_tasks(&self) -> String {
        self.act().replacen(" task", " tasks", 1)
    }

    /// The first word of [`Self::act`].
    pub fn verb(&self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Cancel => "cancel",
            Self::Update(_) => "change",
            Self::Requeue(_) => "requeue",
        }
    }

    /// The filter of the bulk change. If it names no status, it gets the default statuses. Returns
    /// an error if the change cannot apply to the tasks of the filter.
    pub fn filter(&self, filter: TaskFilter) -> Result<TaskFilter, String> {
        filter.check()?;
        let verb = self.verb();
        if filter.queue.is_none() && filter.tree.is_none() {
            return Err(format!("the filter of {verb} needs a queue or a tree"));
        }
        if filter.statuses.is_empty() {
            return Ok(TaskFilter {
                statuses: self.statuses().to_vec(),
                ..filter
            });
        }
        let may = self.may_change();
        if let Some(other) = filter.statuses.iter().find(|status| !may.contains(status)) {
            let may = may
                .iter()
                .map(|status| status.as_str())
                .collect::<Vec<_>>()
                .join(", ");
            return Err(format!(
                "{verb} is for tasks that are {may}, and the filter asks for {}",
                other.as_str()
            ));
        }
        if filter.asks_redis() {
            return Err(format!(
                "{verb} is for all unfinished tasks: write UNFINISHED, not some of its statuses"
            ));
        }
        Ok(filter)
    }
}

/// Names of workers come last, because they may contain spaces.
impl fmt::Display for BulkAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.verb())?;
        match self {
            Self::Retry | Self::Cancel | Self::Requeue(Requeue::All | Requeue::Free) => Ok(()),
            Self::Update(Update { priority, replicas }) => {
                priority.map_or(Ok(()), |priority| {
                    write!(f, " priority={}", priority.as_str())
                })?;
                replicas.map_or(Ok(()), |replicas| write!(f, " replicas={replicas}"))
            }
            Self::Requeue(Requeue::AwayFrom(worker)) => write!(f, " away_from={}", worker.as_str()),
            Self::Requeue(Requeue::To {
                worker,
                until_unix_ms,
            }) => {
                until_unix_ms.map_or(Ok(()), |until| write!(f, " until_unix_ms={until}"))?;
                write!(f, " to={}", worker.as_str())
            }
        }
    }
}

/// Serialized as [`fmt::Display`] writes it.
impl Serialize for BulkAction {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for BulkAction {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("the change {text:?} is unknown");
        let (verb, rest) = text.split_once(' ').unwrap_or((text, ""));
        match (verb, rest) {
            ("retry", "") => Ok(Self::Retry),
            ("cancel", "") => Ok(Self::Cancel),
            ("change", values) => {
                let mut update = Update::default();
                for value in values.split(' ') {
                    match value.split_once('=') {
                        Some(("priority", name)) => {
                            update.priority = Some(priority(name).ok_or_else(unknown)?)
                        }
                        Some(("replicas", number)) => {
                            update.replicas = Some(number.parse().map_err(|_| unknown())?)
                        }
                        _ => return Err(unknown()),
                    }
                }
                update.check().map(|()| Self::Update(update))
            }
            ("requeue", "") => Ok(Self::Requeue(Requeue::All)),
            ("requeue", rest) => requeue(rest).map(Self::Requeue).ok_or_else(unknown),
            _ => Err(unknown()),
        }
    }
}

fn priority(name: &str) -> Option<Priority> {
    [Priority::High, Priority::Medium, Priority::Low]
        .into_iter()
        .find(|priority| priority.as_str() == name)
}

fn requeue(text: &str) -> Option<Requeue> {
    if let Some(worker) = text.strip_prefix("away_from=") {
        return Some(Requeue::AwayFrom(WorkerName::new(worker).ok()?));
    }
    let (until, rest) = match text.strip_prefix("until_unix_ms=") {
        Some(rest) => rest
            .split_once(' ')
            .map(|(until, rest)| (Some(until), rest))?,
        None => (None, text),
    };
    let worker = WorkerName::new(rest.strip_prefix("to=")?).ok()?;
    let until_unix_ms = until.map(str::parse).transpose().ok()?;
    Some(Requeue::To {
        worker,
        until_unix_ms,
    })
}

/// A change of all tasks that match a filter, with its progress.
#[derive(Clone, Debug, JsonSchema, PartialEq, Serialize)]
pub struct BulkChange {
    // A UUIDv7, so that bulk changes sort by their time.
    pub id: Uuid,
    /// The change, for example `retry`.
    #[serde(rename = "what")]
    #[schemars(with = "String")]
    pub change: BulkAction,
    pub state: BulkState,
    // Its time range ends when the bulk change was created.
    pub filter: TaskFilter,
    /// The token of its creator.
    pub who: String,
    #[serde(flatten)]
    pub progress: BulkProgress,
    #[serde(rename = "created_at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub created_unix_ms: i64,
    #[serde(rename = "updated_at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub updated_unix_ms: i64,
    /// The queues that its creator may access.
    #[serde(skip)]
    pub scope: Scope,
    /// The token that started the bulk change, or `None` if calls needed no token. The bulk change
    /// stops when the token is no longer valid.
    #[serde(skip)]
    pub token: Option<SecretHash>,
}

/// The progress of a bulk change. If a process was killed, more tasks may have been changed than
/// are counted.
#[derive(Clone, Debug, Default, JsonSchema, PartialEq, Eq, Serialize)]
pub struct BulkProgress {
    /// The last task that the bulk change looked at.
    #[serde(skip)]
    pub cursor: Option<TaskCursor>,
    pub looked_at: u64,
    /// The number of tasks so far that match the filter.
    pub matched: u64,
    pub changed: u64,
    /// Tasks that could not be changed. `last_error` is about the last of them.
    pub failed: u64,
    // Why the last of these tasks failed, or why the bulk change itself failed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub last_error: String,
}

/// The state of a bulk change. SQL stores the discriminants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BulkState {
    Running = 0,
    Done = 1,
    /// An operator stopped the bulk change.
    Stopped = 2,
    /// The bulk change cannot continue.
    Failed = 3,
}

impl BulkState {
    pub const ALL: [Self; 4] = [Self::Running, Self::Done, Self::Stopped, Self::Failed];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "RUNNING",
            Self::Done => "DONE",
            Self::Stopped => "STOPPED",
            Self::Failed => "FAILED",
        }
    }

    pub fn from_number(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as i64 == number)
    }
}

impl Serialize for BulkState {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl BulkChange {
    /// The maximum length of an error that a bulk change keeps, in characters.
    const LONGEST_ERROR: usize = 1000;

    pub fn set_error(&mut self, error: &str) {
        self.progress.last_error = error.chars().take(Self::LONGEST_ERROR).collect();
    }
}

/// The tasks that a call is to change.
#[derive(Clone, Debug, PartialEq)]
pub enum ChosenTasks {
    /// The ids as the caller sent them.
    Ids(Vec<String>),
    Filter(Box<TaskFilter>),
}

/// A request to change tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct ChangeTasks {
    pub chosen: ChosenTasks,
    /// Only count the tasks.
    pub dry_run: bool,
    /// The caller confirms the change, which is required for a filter.
    pub yes: bool,
}

impl ChangeTasks {
    /// Chooses tasks by ids or by a filter. Returns an error if both or neither are given.
    pub fn new(
        ids: Vec<String>,
        filter: Option<TaskFilter>,
        dry_run: bool,
        yes: bool,
    ) -> Result<Self, String> {
        let chosen = match filter {
            Some(_) if !ids.is_empty() => {
                return Err("ids and a filter are both given; use one".into());
            }
            Some(filter) => ChosenTasks::Filter(Box::new(filter)),
            None if ids.is_empty() => return Err("name tasks by ids or by a filter".into()),
            None => ChosenTasks::Ids(ids),
        };
        Ok(Self {
            chosen,
            dry_run,
            yes,
        })
    }
}

/// The answer to a request to change tasks.
#[derive(Clone, Debug, PartialEq)]
pub enum TasksChanged {
    /// One answer for each id, in order.
    Items(Vec<ItemAnswer>),
    Counted(TaskCount),
    /// A bulk change of the tasks of the filter was started.
    Started(Box<BulkChange>),
}

/// The number of tasks that match a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskCount {
    pub matched: u64,
    pub looked_at: u64,
    /// There may be more tasks, because the count stopped at its limit.
    pub at_least: bool,
    /// When the count began. A filter with this `as_of` matches the same tasks later, except those
    /// that have changed meanwhile.
    pub as_of_unix_ms: i64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::QueueName;

    #[test]
    fn a_change_is_for_its_statuses_only() {
        let of = |statuses: &str| {
            let statuses = TaskStatus::list(statuses).unwrap();
            let filter = TaskFilter {
                queue: QueueName::new("q").ok(),
                statuses,
                ..Default::default()
            };
            BulkAction::Retry
                .filter(filter)
                .map(|filter| filter.statuses)
        };
        assert_eq!(of(""), Ok(vec![TaskStatus::Dead, TaskStatus::Cancelled]));
        assert_eq!(of("cancelled"), Ok(vec![TaskStatus::Cancelled]));
        let said = of("dead,completed").unwrap_err();
        assert_eq!(
            said,
            "retry is for tasks that are DEAD, CANCELLED, and the filter asks for COMPLETED"
        );
        let cancel = |statuses: &str| {
            let statuses = TaskStatus::list(statuses).unwrap();
            BulkAction::Cancel.filter(TaskFilter {
                queue: QueueName::new("q").ok(),
                statuses,
                ..Default::default()
            })
        };
        assert_eq!(cancel("").unwrap().statuses, TaskStatus::UNFINISHED);
        assert!(cancel("queued").unwrap_err().contains("write UNFINISHED"));
        // Only a change of NUM can apply to completed tasks.
        let change = |update: Update, statuses: &str| {
            let statuses = TaskStatus::list(statuses).unwrap();
            let filter = TaskFilter {
                queue: QueueName::new("q").ok(),
                statuses,
                ..Default::default()
            };
            BulkAction::Update(update)
                .filter(filter)
                .map(|filter| filter.statuses)
        };
        let priority = Some(Priority::High);
        let replicas = Some(2);
        assert_eq!(
            change(
                Update {
                    priority: None,
                    replicas
                },
                "completed"
            ),
            Ok(vec![TaskStatus::Completed])
        );
        assert_eq!(
            change(
                Update {
                    priority: None,
                    replicas
                },
                ""
            )
            .unwrap(),
            TaskStatus::UNFINISHED
        );
        assert!(
            change(
                Update {
                    priority,
                    replicas: None
                },
                "completed"
            )
            .is_err()
        );
        assert_eq!(
            BulkAction::Retry.filter(TaskFilter::default()).unwrap_err(),
            "the filter of retry needs a queue or a tree"
        );
    }

    #[test]
    fn a_change_is_read_as_it_was_written() {
        let worker = || WorkerName::new(&format!("w to=x {}", "y".repeat(119))).expect("a name");
        let update = |priority, replicas| BulkAction::Update(Update { priority, replicas });
        for change in [
            BulkAction::Retry,
            BulkAction::Cancel,
            update(Some(Priority::High), None),
            update(None, Some(3)),
            update(Some(Priority::Low), Some(1)),
            BulkAction::Requeue(Requeue::All),
            BulkAction::Requeue(Requeue::AwayFrom(worker())),
            BulkAction::Requeue(Requeue::To {
                worker: worker(),
                until_unix_ms: None,
            }),
            BulkAction::Requeue(Requeue::To {
                worker: worker(),
                until_unix_ms: Some(i64::MAX),
            }),
        ] {
            let text = change.to_string();
            assert!(text.len() < 255, "the column has no more: {text}");
            assert_eq!(text.parse(), Ok(change));
        }
        for other in [
            "paint",
            "retry now",
            "change",
            "change colour=red",
            "change replicas=0",
            "requeue by=w",
            "requeue to=",
        ] {
            assert!(other.parse::<BulkAction>().is_err(), "{other}");
        }
    }
}
