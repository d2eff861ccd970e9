//! Changes of many tasks, and bulk changes.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

use super::{super::tally::Tally, AtMost, Nested, Unread, object, search::Filter, text::Instant};
use crate::model::{BulkChange, ChangeTasks, ItemAnswer, TaskCount, TasksChanged, to_rfc_3339};

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

/// The answers for ids, a count, or the bulk change that changes the tasks of a filter.
#[derive(JsonSchema, Serialize)]
#[serde(untagged)]
#[schemars(rename = "TasksChanged")]
pub(in crate::ingress) enum Changed<'a> {
    Items {
        results: &'a [ItemAnswer],
    },
    Counted {
        matched: u64,
        looked_at: u64,
        at_least: bool,
        /// With it in the filter, a change leaves out tasks that were inserted or changed since.
        #[serde(rename = "as_of", serialize_with = "time")]
        #[schemars(with = "Instant")]
        as_of_unix_ms: i64,
    },
    Started {
        bulk: &'a BulkChange,
    },
}

fn time<S: Serializer>(unix_ms: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&to_rfc_3339(*unix_ms))
}

impl<'a> From<&'a TasksChanged> for Changed<'a> {
    fn from(changed: &'a TasksChanged) -> Self {
        match changed {
            TasksChanged::Items(answers) => Self::Items { results: answers },
            TasksChanged::Counted(TaskCount {
                matched,
                looked_at,
                at_least,
                as_of_unix_ms,
            }) => Self::Counted {
                matched: *matched,
                looked_at: *looked_at,
                at_least: *at_least,
                as_of_unix_ms: *as_of_unix_ms,
            },
            TasksChanged::Started(bulk) => Self::Started { bulk },
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
