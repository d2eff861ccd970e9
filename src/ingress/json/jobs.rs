//! Changes of many tasks, and jobs.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    super::tally::Tally,
    AtMost, Nested, Unread, object,
    search::{Filter, ShownFilter},
    text::Instant,
    work::ItemAnswer,
};
use crate::{
    model::{self, ChangeTasks, JobState, TaskCount, TasksChanged},
    wire::time::to_rfc_3339,
};

/// The most tasks that a call names by id.
pub(super) const MAX_IDS: usize = 1000;

/// Tasks by id, or by filter with `dry_run` or `yes`.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(
    default,
    deny_unknown_fields,
    expecting = "an object with ids or a filter"
)]
#[schemars(rename = "ChangeTasks")]
pub(in crate::ingress) struct Change {
    ids: AtMost<String, MAX_IDS>,
    filter: Option<Nested<Filter>>,
    /// Only count.
    dry_run: bool,
    yes: bool,
}

/// Reads which tasks to change.
pub(in crate::ingress) fn change(
    body: &Bytes,
    tally: &mut Tally<'_>,
) -> Result<Result<ChangeTasks, String>, Unread> {
    let Change {
        ids,
        filter,
        dry_run,
        yes,
    } = object(body)?;
    chosen(ids, filter, dry_run, yes, tally)
}

/// The tasks of a request.
pub(super) fn chosen(
    ids: AtMost<String, MAX_IDS>,
    filter: Option<Nested<Filter>>,
    dry_run: bool,
    yes: bool,
    tally: &mut Tally<'_>,
) -> Result<Result<ChangeTasks, String>, Unread> {
    for _ in &ids.0 {
        tally.item()?;
    }
    let filter = filter.map(|Nested(filter)| filter.read()).transpose();
    Ok(filter.and_then(|filter| ChangeTasks::new(ids.0, filter, dry_run, yes)))
}

/// The answers about ids, a count, or the job that changes the tasks of a filter.
#[derive(JsonSchema, Serialize)]
#[serde(untagged)]
#[schemars(rename = "TasksChanged")]
pub(in crate::ingress) enum Changed<'a> {
    Items {
        results: Vec<ItemAnswer<'a>>,
    },
    Counted {
        matched: u64,
        looked_at: u64,
        at_least: bool,
    },
    Started {
        job: Box<Job<'a>>,
    },
}

impl<'a> From<&'a TasksChanged> for Changed<'a> {
    fn from(changed: &'a TasksChanged) -> Self {
        match changed {
            TasksChanged::Items(answers) => Self::Items {
                results: answers.iter().map(Into::into).collect(),
            },
            TasksChanged::Counted(TaskCount {
                matched,
                looked_at,
                at_least,
            }) => Self::Counted {
                matched: *matched,
                looked_at: *looked_at,
                at_least: *at_least,
            },
            TasksChanged::Started(job) => Self::Started {
                job: Box::new((&**job).into()),
            },
        }
    }
}

/// A change of all tasks of a filter, with its progress.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct Job<'a> {
    id: Uuid,
    /// The change, for example `retry`.
    what: String,
    #[schemars(extend("enum" = JobState::ALL.map(JobState::as_str)))]
    state: &'static str,
    filter: ShownFilter<'a>,
    /// The token of its creator.
    who: &'a str,
    looked_at: u64,
    /// Tasks of the filter so far.
    matched: u64,
    changed: u64,
    /// Tasks that could not be changed; `last_error` is about the last of them.
    failed: u64,
    #[serde(skip_serializing_if = "str::is_empty")]
    last_error: &'a str,
    #[schemars(with = "Instant")]
    created_at: String,
    #[schemars(with = "Instant")]
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
        assert_eq!(
            read(r#"{"ids":["x"]}"#),
            Ok(ChangeTasks {
                chosen: ids,
                dry_run: false,
                yes: false
            })
        );
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
        assert_eq!(
            read(text),
            Ok(ChangeTasks {
                chosen,
                dry_run: true,
                yes: false
            })
        );
        assert_eq!(read("{}").unwrap_err(), "name tasks by ids or by a filter");
        assert_eq!(
            read(r#"{"ids":["x"],"filter":{}}"#).unwrap_err(),
            "ids and a filter are both given; use one"
        );
        assert!(
            read(r#"{"filter":{"since":"monday"}}"#)
                .unwrap_err()
                .contains("\"monday\" is not a time")
        );
    }
}
