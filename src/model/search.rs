//! Search for tasks: the filter, the page that a caller asks for, and the page that it gets.

use std::{collections::BTreeMap, fmt, str::FromStr};

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use super::{
    QueueName, Rfc3339, StoredStatus, TaskId, TaskStatus, TaskView, WorkerName, some_rfc_3339,
};

// Which tasks to choose. Empty fields match all. The doc comment is for the API, where answers
// about a bulk change show the filter:
/// The tasks of a bulk change.
#[derive(Clone, Debug, Default, JsonSchema, PartialEq, Serialize)]
#[schemars(rename = "BulkFilter")]
pub struct TaskFilter {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub queue: Option<QueueName>,
    // Any of these statuses.
    #[serde(
        rename = "status",
        serialize_with = "comma_list",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(with = "String")]
    pub statuses: Vec<TaskStatus>,
    // The whole key.
    #[serde(serialize_with = "some_text", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub key: Option<Bytes>,
    // The prefix of the key.
    #[serde(serialize_with = "text", skip_serializing_if = "Bytes::is_empty")]
    #[schemars(with = "String")]
    pub key_prefix: Bytes,
    // Headers that the task must have, all of them.
    #[serde(serialize_with = "map", skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "BTreeMap<String, String>")]
    pub headers: Vec<(String, String)>,
    // A worker that has a result of the task.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub worker: Option<WorkerName>,
    // The prefix of the reason why a task died.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    // The tree that the task is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub tree: Option<TaskId>,
    // Inserted at this time or later.
    #[serde(
        rename = "since",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub since_unix_ms: Option<i64>,
    // Inserted before this time.
    #[serde(
        rename = "until",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub until_unix_ms: Option<i64>,
    // Inserted at this time or before, and not changed since. A dry run answers such a time.
    #[serde(
        rename = "as_of",
        serialize_with = "some_rfc_3339",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<Rfc3339>")]
    pub as_of_unix_ms: Option<i64>,
}

fn comma_list<S: Serializer>(list: &[TaskStatus], serializer: S) -> Result<S::Ok, S::Error> {
    let names: Vec<_> = list.iter().map(|status| status.as_str()).collect();
    serializer.serialize_str(&names.join(","))
}

fn text<S: Serializer>(text: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&String::from_utf8_lossy(text))
}

fn some_text<S: Serializer>(text: &Option<Bytes>, serializer: S) -> Result<S::Ok, S::Error> {
    text.as_deref()
        .map(String::from_utf8_lossy)
        .serialize(serializer)
}

fn map<S: Serializer>(entries: &[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
    let sorted: BTreeMap<_, _> = entries.iter().map(|(name, value)| (name, value)).collect();
    sorted.serialize(serializer)
}

/// The maximum length of a task's key.
const LONGEST_KEY: usize = 4096;

impl TaskFilter {
    /// The maximum number of headers in a filter.
    pub const MOST_HEADERS: usize = 16;

    /// Returns an error if no index can serve the filter, or if its parts contradict each other.
    pub fn check(&self) -> Result<(), String> {
        let of_queue = [
            (!self.statuses.is_empty(), "status"),
            (!self.key_prefix.is_empty(), "key_prefix"),
            (!self.headers.is_empty(), "header"),
            (!self.reason.is_empty(), "reason"),
        ];
        if self.queue.is_none()
            && self.tree.is_none()
            && let Some((_, name)) = of_queue.into_iter().find(|(is_given, _)| *is_given)
        {
            return Err(format!(
                "a filter by {name} needs a queue or a tree: nothing else has an index for it"
            ));
        }
        let is_alone = self.worker.is_none() && self.as_of_unix_ms.is_none() && self.tree.is_none();
        if self.is_key_alone() && !is_alone {
            return Err("a key without a queue takes no worker, no tree and no as_of".into());
        }
        if self.key.is_some() && !self.key_prefix.is_empty() {
            return Err("key and key_prefix are both given; use one".into());
        }
        if self.key.is_some() && self.worker.is_some() {
            return Err("key and worker are both given; use one".into());
        }
        if self.tree.is_some() && self.worker.is_some() {
            return Err("tree and worker are both given; use one".into());
        }
        if self.headers.len() > Self::MOST_HEADERS {
            return Err(format!(
                "{} headers are given; at most {}",
                self.headers.len(),
                Self::MOST_HEADERS
            ));
        }
        match self.key.as_ref().unwrap_or(&self.key_prefix).len() {
            ..=LONGEST_KEY => Ok(()),
            length => Err(format!("the key has {length} bytes; at most {LONGEST_KEY}")),
        }
    }

    /// True if the filter is a key without a queue, which is looked up in all queues.
    pub fn is_key_alone(&self) -> bool {
        self.queue.is_none() && self.key.is_some()
    }

    /// The corresponding statuses in SQL, without repetition. Empty means all.
    pub fn stored_statuses(&self) -> Vec<StoredStatus> {
        let of = |stored: &StoredStatus| {
            self.statuses
                .iter()
                .any(|status| status.stored() == *stored)
        };
        StoredStatus::ALL.into_iter().filter(of).collect()
    }

    /// True if only Redis knows which unfinished tasks match.
    pub fn asks_redis(&self) -> bool {
        let unfinished = self
            .statuses
            .iter()
            .filter(|status| status.stored() == StoredStatus::Unfinished);
        let mut distinct: Vec<_> = unfinished.collect();
        distinct.sort_unstable();
        distinct.dedup();
        !distinct.is_empty() && distinct.len() < TaskStatus::UNFINISHED.len()
    }

    /// True if no index serves the whole filter, so that a page may look at many tasks and find
    /// few.
    pub fn is_residual(&self) -> bool {
        let by_worker = self.worker.is_some() && self.queue.is_some();
        // The list of a tree has neither queues nor statuses.
        let by_tree = self.tree.is_some() && (self.queue.is_some() || !self.statuses.is_empty());
        self.asks_redis()
            || !self.key_prefix.is_empty()
            || !self.headers.is_empty()
            || !self.reason.is_empty()
            || self.as_of_unix_ms.is_some()
            || by_worker
            || by_tree
    }

    /// The range of ids for the time range: from the first id inclusive to the second id exclusive.
    pub fn ids(&self) -> (TaskId, TaskId) {
        let since = self.since_unix_ms;
        let as_of = self.as_of_unix_ms.map(|as_of| as_of.saturating_add(1));
        let until = match (self.until_unix_ms, as_of) {
            (Some(until), Some(as_of)) => Some(until.min(as_of)),
            (until, as_of) => until.or(as_of),
        };
        (
            since.map_or(TaskId::FIRST, TaskId::first_of),
            until.map_or(TaskId::LAST, TaskId::first_of),
        )
    }
}

impl TaskStatus {
    pub const ALL: [Self; 7] = [
        Self::Pending,
        Self::Queued,
        Self::Assigned,
        Self::Delayed,
        Self::Completed,
        Self::Dead,
        Self::Cancelled,
    ];

    /// The statuses that are a single status in SQL.
    pub const UNFINISHED: [Self; 4] = [Self::Pending, Self::Queued, Self::Assigned, Self::Delayed];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "PENDING",
            Self::Queued => "QUEUED",
            Self::Assigned => "ASSIGNED",
            Self::Delayed => "DELAYED",
            Self::Completed => "COMPLETED",
            Self::Dead => "DEAD",
            Self::Cancelled => "CANCELLED",
        }
    }

    /// The status that SQL stores for such a task.
    pub fn stored(self) -> StoredStatus {
        match self {
            Self::Pending | Self::Queued | Self::Assigned | Self::Delayed => {
                StoredStatus::Unfinished
            }
            Self::Completed => StoredStatus::Completed,
            Self::Dead => StoredStatus::Dead,
            Self::Cancelled => StoredStatus::Cancelled,
        }
    }

    /// Adds the status to the list unless it is already there.
    pub fn add_to(self, list: &mut Vec<Self>) {
        if !list.contains(&self) {
            list.push(self);
        }
    }

    /// Parses a comma-separated list and drops repetitions. UNFINISHED stands for the four
    /// unfinished statuses.
    pub fn list(text: &str) -> Result<Vec<Self>, String> {
        let mut list = Vec::new();
        for name in text
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
        {
            let known = Self::ALL
                .into_iter()
                .find(|status| status.as_str().eq_ignore_ascii_case(name));
            match known {
                Some(status) => status.add_to(&mut list),
                None if name.eq_ignore_ascii_case("UNFINISHED") => {
                    Self::UNFINISHED
                        .into_iter()
                        .for_each(|status| status.add_to(&mut list));
                }
                None => {
                    let name: String = name.chars().take(100).collect();
                    let known = Self::ALL.map(Self::as_str).join(", ");
                    return Err(format!(
                        "unknown status {name:?}; expected {known} or UNFINISHED"
                    ));
                }
            }
        }
        Ok(list)
    }
}

/// A position in the list of tasks, which is sorted newest first: the last task that a page has
/// looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskCursor(pub TaskId);

impl fmt::Display for TaskCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for TaskCursor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for TaskCursor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse()
            .map(Self)
            .map_err(|_| "the cursor is not one of an earlier answer".into())
    }
}

/// A page of the tasks that match a filter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TaskPages {
    pub filter: TaskFilter,
    /// The maximum number of tasks. 0 means the operation's default.
    pub limit: u32,
    /// Where the page begins, or `None` for the newest task.
    pub after: Option<TaskCursor>,
}

/// Tasks, newest first.
#[derive(Clone, Debug, Default, JsonSchema, Serialize)]
pub struct TaskList {
    pub tasks: Vec<TaskView>,
    /// How many tasks taskd looked at. Few of them may match the filter.
    pub looked_at: u64,
    /// The cursor of the next page. Absent on the last page.
    #[serde(rename = "cursor", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub next: Option<TaskCursor>,
    /// True if the filter is a key without a queue, and the caller reaches more than 10,000 queues:
    /// then taskd looked only in those that are open.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_statuses_is_read_in_any_case() {
        assert_eq!(
            TaskStatus::list("dead, COMPLETED,"),
            Ok(vec![TaskStatus::Dead, TaskStatus::Completed])
        );
        assert_eq!(
            TaskStatus::list("unfinished"),
            Ok(TaskStatus::UNFINISHED.to_vec())
        );
        assert_eq!(
            TaskStatus::list("pending,unfinished,Pending"),
            Ok(TaskStatus::UNFINISHED.to_vec())
        );
        assert!(
            TaskStatus::list("gone")
                .unwrap_err()
                .contains("unknown status \"gone\"; expected PENDING, QUEUED")
        );
    }

    #[test]
    fn redis_is_asked_only_for_some_of_the_unfinished_statuses() {
        let of = |statuses: &str| {
            let statuses = TaskStatus::list(statuses).unwrap();
            let filter = TaskFilter {
                queue: QueueName::new("q").ok(),
                statuses,
                ..Default::default()
            };
            (filter.stored_statuses(), filter.asks_redis())
        };
        use StoredStatus::{Completed, Dead, Unfinished};
        assert_eq!(of(""), (vec![], false));
        assert_eq!(of("unfinished"), (vec![Unfinished], false));
        assert_eq!(of("queued,queued,dead"), (vec![Unfinished, Dead], true));
        assert_eq!(of("dead,completed"), (vec![Completed, Dead], false));
    }

    #[test]
    fn times_are_ranges_of_ids() {
        let filter = TaskFilter {
            since_unix_ms: Some(5_000),
            until_unix_ms: Some(6_000),
            ..Default::default()
        };
        let (from, below) = filter.ids();
        for (at, is_in) in [(4_999, false), (5_000, true), (5_999, true), (6_000, false)] {
            let id = TaskId::at(at, 0);
            assert_eq!(from <= id && id < below, is_in, "{at}");
        }
        let as_of = TaskFilter {
            as_of_unix_ms: Some(5_500),
            ..filter
        };
        let (_, below) = as_of.ids();
        assert!(TaskId::at(5_500, 0) < below && TaskId::at(5_501, 0) >= below);
        let (from, below) = TaskFilter::default().ids();
        assert!(from < TaskId::new() && TaskId::new() < below);
    }

    #[test]
    fn a_filter_without_an_index_is_refused() {
        let queue = QueueName::new("q").ok();
        let header = ("h".to_owned(), "v".to_owned());
        for (filter, name) in [
            (
                TaskFilter {
                    statuses: vec![TaskStatus::Dead],
                    ..Default::default()
                },
                "status",
            ),
            (
                TaskFilter {
                    key_prefix: "k".into(),
                    ..Default::default()
                },
                "key_prefix",
            ),
            (
                TaskFilter {
                    headers: vec![header.clone()],
                    ..Default::default()
                },
                "header",
            ),
            (
                TaskFilter {
                    reason: "r".into(),
                    ..Default::default()
                },
                "reason",
            ),
        ] {
            let why = filter.check().unwrap_err();
            assert!(
                why.starts_with(&format!("a filter by {name} needs a queue")),
                "{why}"
            );
            assert_eq!(
                TaskFilter {
                    queue: queue.clone(),
                    ..filter
                }
                .check(),
                Ok(())
            );
        }
        let key = TaskFilter {
            key: Some("k".into()),
            ..Default::default()
        };
        assert_eq!((key.check(), key.is_key_alone()), (Ok(()), true));
        let with_more = TaskFilter {
            worker: WorkerName::new("w").ok(),
            ..key.clone()
        };
        assert!(with_more.check().unwrap_err().contains("takes no worker"));
        let with_more = TaskFilter {
            statuses: vec![TaskStatus::Dead],
            ..key
        };
        assert!(with_more.check().unwrap_err().contains("by status needs"));
        let both = TaskFilter {
            queue,
            key: Some("k".into()),
            key_prefix: "k".into(),
            ..Default::default()
        };
        assert_eq!(
            both.check().unwrap_err(),
            "key and key_prefix are both given; use one"
        );
        let many = TaskFilter {
            headers: vec![header; 17],
            queue: both.queue.clone(),
            ..Default::default()
        };
        assert!(many.check().unwrap_err().contains("at most 16"));
        let long = TaskFilter {
            queue: both.queue,
            key: Some(vec![b'k'; 4097].into()),
            ..Default::default()
        };
        assert!(long.check().unwrap_err().contains("at most 4096"));
    }
}
