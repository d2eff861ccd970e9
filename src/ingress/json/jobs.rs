//! Changes of many tasks, and jobs.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    super::tally::Tally,
    AtMost, Unread, object,
    search::{Filter, ShownFilter},
    work::ItemAnswer,
};
use crate::{
    model::{self, ChangeTasks, TaskCount, TasksChanged},
    wire::time::to_rfc_3339,
};

/// The most tasks that a call names by id.
const MAX_IDS: usize = 1000;

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "an object with ids or a filter")]
struct Change {
    ids: AtMost<String, MAX_IDS>,
    filter: Option<Filter>,
    dry_run: bool,
    yes: bool,
}

/// Reads which tasks to change.
pub(in crate::ingress) fn change(body: &Bytes, tally: &mut Tally<'_>) -> Result<Result<ChangeTasks, String>, Unread> {
    let Change { ids, filter, dry_run, yes } = object(body)?;
    for _ in &ids.0 {
        tally.item()?;
    }
    let filter = filter.map(|filter| filter.read()).transpose();
    Ok(filter.and_then(|filter| ChangeTasks::new(ids.0, filter, dry_run, yes)))
}

/// The answer to a change.
#[derive(Serialize)]
#[serde(untagged)]
pub(in crate::ingress) enum Changed<'a> {
    Items { results: Vec<ItemAnswer<'a>> },
    Counted { matched: u64, looked_at: u64, at_least: bool },
    Started { job: Box<Job<'a>> },
}

impl<'a> From<&'a TasksChanged> for Changed<'a> {
    fn from(changed: &'a TasksChanged) -> Self {
        match changed {
            TasksChanged::Items(answers) => Self::Items { results: answers.iter().map(Into::into).collect() },
            TasksChanged::Counted(TaskCount { matched, looked_at, at_least }) => {
                Self::Counted { matched: *matched, looked_at: *looked_at, at_least: *at_least }
            }
            TasksChanged::Started(job) => Self::Started { job: Box::new((&**job).into()) },
        }
    }
}

/// A job with its progress.
#[derive(Serialize)]
pub(in crate::ingress) struct Job<'a> {
    id: Uuid,
    what: String,
    state: &'static str,
    filter: ShownFilter<'a>,
    who: &'a str,
    looked_at: u64,
    matched: u64,
    changed: u64,
    failed: u64,
    #[serde(skip_serializing_if = "str::is_empty")]
    last_error: &'a str,
    created_at: String,
    updated_at: String,
}

impl<'a> From<&'a model::Job> for Job<'a> {
    fn from(job: &'a model::Job) -> Self {
        let progress = &job.progress;
        Self {
            id: job.id,
            what: job.change.to_string(),
            state: job.state.as_str(),
            filter: (&job.filter).into(),
            who: &job.who,
            looked_at: progress.looked_at,
            matched: progress.matched,
            changed: progress.changed,
            failed: progress.failed,
            last_error: &progress.last_error,
            created_at: to_rfc_3339(job.created_unix_ms),
            updated_at: to_rfc_3339(job.updated_unix_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::testing::{share, tally},
        *,
    };
    use crate::model::{ChosenTasks, QueueName, TaskFilter, TaskStatus};

    #[test]
    fn a_change_names_ids_or_a_filter() {
        let read = |text: &'static str| change(&Bytes::from(text), &mut tally(&share())).unwrap();
        let ids = ChosenTasks::Ids(vec!["x".into()]);
        assert_eq!(read(r#"{"ids":["x"]}"#), Ok(ChangeTasks { chosen: ids, dry_run: false, yes: false }));
        let filter = TaskFilter {
            queue: QueueName::new("q").ok(),
            statuses: vec![TaskStatus::Dead],
            key_prefix: "a".into(),
            headers: vec![("h".into(), "v".into())],
            since_unix_ms: Some(1_000),
            ..Default::default()
        };
        let text = r#"{"filter":{"queue":"q","status":"dead","key_prefix":"a","headers":{"h":"v"},
                       "since":"1970-01-01T00:00:01Z"},"dry_run":true}"#;
        let chosen = ChosenTasks::Filter(Box::new(filter));
        assert_eq!(read(text), Ok(ChangeTasks { chosen, dry_run: true, yes: false }));
        assert_eq!(read("{}").unwrap_err(), "name tasks by ids or by a filter");
        assert_eq!(read(r#"{"ids":["x"],"filter":{}}"#).unwrap_err(), "ids and a filter are both given; use one");
        assert!(read(r#"{"filter":{"since":"monday"}}"#).unwrap_err().contains("\"monday\" is not a time"));
    }
}
