//! Jobs: a change of all tasks of a filter, which the watchdog makes page by page.

use std::{fmt, str::FromStr};

use uuid::Uuid;

use super::{ItemAnswer, Scope, TaskCursor, TaskFilter, TaskStatus};

/// The change that a job makes to each of its tasks. SQL keeps the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobChange {
    /// Send dead and cancelled tasks again.
    Retry,
}

impl JobChange {
    /// The statuses of the tasks that it can change.
    pub fn statuses(self) -> &'static [TaskStatus] {
        match self {
            Self::Retry => &[TaskStatus::Dead, TaskStatus::Cancelled],
        }
    }

    /// The words of the act about a task.
    pub fn act(self) -> &'static str {
        match self {
            Self::Retry => "retry task",
        }
    }

    /// The filter of a job: of all tasks that the change can be for. An error where there are none.
    pub fn filter(self, filter: TaskFilter) -> Result<TaskFilter, String> {
        filter.check()?;
        if filter.queue.is_none() {
            return Err(format!("the filter of {self} needs a queue"));
        }
        let may = self.statuses();
        if filter.statuses.is_empty() {
            return Ok(TaskFilter { statuses: may.to_vec(), ..filter });
        }
        if let Some(other) = filter.statuses.iter().find(|status| !may.contains(status)) {
            let may = may.iter().map(|status| status.as_str()).collect::<Vec<_>>().join(", ");
            return Err(format!("{self} is for tasks that are {may}, and the filter asks for {}", other.as_str()));
        }
        if filter.asks_redis() {
            return Err(format!("{self} is for all unfinished tasks: write UNFINISHED, not some of its statuses"));
        }
        Ok(filter)
    }
}

impl fmt::Display for JobChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Retry => "retry",
        })
    }
}

impl FromStr for JobChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "retry" => Ok(Self::Retry),
            other => Err(format!("the change {other:?} is unknown")),
        }
    }
}

/// A job with its progress.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// A UUIDv7, so that jobs sort by their time.
    pub id: Uuid,
    pub change: JobChange,
    /// Its times end at the job's creation.
    pub filter: TaskFilter,
    pub who: String,
    /// The queues that its creator reached.
    pub scope: Scope,
    pub state: JobState,
    pub progress: JobProgress,
    pub created_unix_ms: i64,
    pub updated_unix_ms: i64,
}

/// How far a job has come. A job that was killed may have changed more tasks than it counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    /// The last task that it looked at.
    pub cursor: Option<TaskCursor>,
    pub looked_at: u64,
    /// Tasks of the filter.
    pub matched: u64,
    pub changed: u64,
    /// Tasks of the filter that could not be changed.
    pub failed: u64,
    /// Why the last of these, or the job itself, failed.
    pub last_error: String,
}

/// The state of a job. SQL keeps the discriminants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum JobState {
    Running = 0,
    Done = 1,
    /// Somebody stopped it.
    Stopped = 2,
    /// It cannot go on.
    Failed = 3,
}

impl JobState {
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

impl Job {
    /// The longest error that a job keeps, in characters.
    const LONGEST_ERROR: usize = 1000;

    pub fn set_error(&mut self, error: &str) {
        self.progress.last_error = error.chars().take(Self::LONGEST_ERROR).collect();
    }
}

/// The tasks that a call changes.
#[derive(Clone, Debug, PartialEq)]
pub enum ChosenTasks {
    /// As the caller sent them.
    Ids(Vec<String>),
    Filter(Box<TaskFilter>),
}

/// A request to change tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct ChangeTasks {
    pub chosen: ChosenTasks,
    /// Only count.
    pub dry_run: bool,
    /// The caller is sure, which a filter needs.
    pub yes: bool,
}

impl ChangeTasks {
    /// The tasks of these ids, or those of a filter.
    pub fn new(ids: Vec<String>, filter: Option<TaskFilter>, dry_run: bool, yes: bool) -> Result<Self, String> {
        let chosen = match filter {
            Some(_) if !ids.is_empty() => return Err("ids and a filter are both given; use one".into()),
            Some(filter) => ChosenTasks::Filter(Box::new(filter)),
            None if ids.is_empty() => return Err("name tasks by ids or by a filter".into()),
            None => ChosenTasks::Ids(ids),
        };
        Ok(Self { chosen, dry_run, yes })
    }
}

/// The answer to a request to change tasks.
#[derive(Clone, Debug, PartialEq)]
pub enum TasksChanged {
    /// The tasks of ids, each in order.
    Items(Vec<ItemAnswer>),
    Counted(TaskCount),
    /// A job changes the tasks of a filter.
    Started(Box<Job>),
}

/// The number of tasks that a request names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskCount {
    pub matched: u64,
    pub looked_at: u64,
    /// There may be more: the count ended at its bound.
    pub at_least: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::QueueName;

    #[test]
    fn a_change_is_for_its_statuses_only() {
        let of = |statuses: &str| {
            let statuses = TaskStatus::list(statuses).unwrap();
            let filter = TaskFilter { queue: QueueName::new("q").ok(), statuses, ..Default::default() };
            JobChange::Retry.filter(filter).map(|filter| filter.statuses)
        };
        assert_eq!(of(""), Ok(vec![TaskStatus::Dead, TaskStatus::Cancelled]));
        assert_eq!(of("cancelled"), Ok(vec![TaskStatus::Cancelled]));
        let said = of("dead,completed").unwrap_err();
        assert_eq!(said, "retry is for tasks that are DEAD, CANCELLED, and the filter asks for COMPLETED");
        assert_eq!(JobChange::Retry.filter(TaskFilter::default()).unwrap_err(), "the filter of retry needs a queue");
    }

    #[test]
    fn a_change_is_read_as_it_was_written() {
        assert_eq!(JobChange::Retry.to_string().parse(), Ok(JobChange::Retry));
        assert!("paint".parse::<JobChange>().is_err());
    }
}
