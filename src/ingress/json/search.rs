//! Lists of tasks: reads filters from a query or a body.

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::Deserialize;

use super::{headers, query, text::Instant};
use crate::{
    api::{ECHO, shorten},
    model::{QueueName, TaskFilter, TaskPages, TaskStatus, WorkerName},
};

/// Reads the query of a list.
pub(in crate::ingress) fn pages_of_query(text: &str) -> Result<TaskPages, String> {
    let mut pages = TaskPages::default();
    for (name, value) in query::parameters(text)? {
        if let Some(header) = query::header(&name) {
            pages.filter.headers.push((header.to_owned(), value));
            continue;
        }
        // As in JSON, an empty value counts as absent.
        if value.is_empty() {
            continue;
        }
        match &*name {
            "limit" => {
                pages.limit = value
                    .parse()
                    .map_err(|_| query::not_a_number(&name, &value))?
            }
            "cursor" => pages.after = Some(value.parse()?),
            _ => set(&mut pages.filter, &name, &value)?,
        }
    }
    Ok(pages)
}

/// Which tasks: all parts must match.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, expecting = "a filter")]
#[schemars(rename = "TaskFilter")]
pub(super) struct Filter {
    queue: String,
    /// Statuses, separated by commas; `UNFINISHED` means the first four.
    status: String,
    /// The whole key.
    key: String,
    /// The beginning of the key.
    key_prefix: String,
    #[serde(deserialize_with = "headers::<_, { TaskFilter::MOST_HEADERS }>")]
    #[schemars(extend("maxProperties" = TaskFilter::MOST_HEADERS))]
    headers: HashMap<String, String>,
    /// A worker with a result of the task.
    worker: String,
    /// Inserted at this time or later; empty: any.
    since: String,
    /// Inserted before this time; empty: any.
    until: String,
    /// The beginning of the reason why a task died.
    reason: String,
    /// Inserted at this time or before, and not changed since: a dry run answers it; empty: any.
    as_of: String,
    /// Only of this tree; with it the other parts need no queue.
    tree: String,
}

impl Filter {
    pub(super) fn read(self) -> Result<TaskFilter, String> {
        let Self {
            queue,
            status,
            key,
            key_prefix,
            headers,
            worker,
            since,
            until,
            reason,
            as_of,
            tree,
        } = self;
        let mut filter = TaskFilter::default();
        for (name, value) in [
            ("queue", queue),
            ("status", status),
            ("key", key),
            ("key_prefix", key_prefix),
            ("worker", worker),
            ("since", since),
            ("until", until),
            ("reason", reason),
            ("as_of", as_of),
            ("tree", tree),
        ] {
            if !value.is_empty() {
                set(&mut filter, name, &value)?;
            }
        }
        filter.headers = headers.into_iter().collect();
        filter.headers.sort_unstable();
        Ok(filter)
    }
}

/// Sets a part of a filter. The route has refused other names.
fn set(filter: &mut TaskFilter, name: &str, value: &str) -> Result<(), String> {
    match name {
        "queue" => filter.queue = Some(QueueName::new(value).map_err(|error| error.to_string())?),
        "status" => filter.statuses = TaskStatus::list(value)?,
        "key" => filter.key = Some(value.to_owned().into()),
        "key_prefix" => filter.key_prefix = value.to_owned().into(),
        "worker" => {
            filter.worker = Some(WorkerName::new(value).map_err(|error| error.to_string())?)
        }
        "since" => filter.since_unix_ms = Some(value.parse::<Instant>()?.0),
        "until" => filter.until_unix_ms = Some(value.parse::<Instant>()?.0),
        "reason" => filter.reason = value.to_owned(),
        "as_of" => filter.as_of_unix_ms = Some(value.parse::<Instant>()?.0),
        "tree" => {
            let tree = value
                .parse()
                .map_err(|_| format!("tree {:?} is not the id of a tree", shorten(value, ECHO)))?;
            filter.tree = Some(tree);
        }
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{TaskCursor, TaskId};

    #[test]
    fn a_query_is_read_part_by_part() {
        let id = TaskId::new();
        let text = format!(
            "queue=q&status=dead,CANCELLED&key_prefix=https%3A%2F%2Fa&header.site=a+b&header.x=&worker=&\
             since=1970-01-01T00:00:01Z&until=1970-01-01T00:00:02Z&reason=time&as_of=1970-01-01T00:00:03Z&\
             limit=7&cursor={id}"
        );
        let filter = TaskFilter {
            queue: QueueName::new("q").ok(),
            statuses: vec![TaskStatus::Dead, TaskStatus::Cancelled],
            key: None,
            key_prefix: "https://a".into(),
            headers: vec![("site".into(), "a b".into()), ("x".into(), String::new())],
            worker: None,
            since_unix_ms: Some(1_000),
            until_unix_ms: Some(2_000),
            reason: "time".into(),
            as_of_unix_ms: Some(3_000),
            tree: None,
        };
        assert_eq!(
            pages_of_query(&text),
            Ok(TaskPages {
                filter,
                limit: 7,
                after: Some(TaskCursor(id))
            })
        );
        assert_eq!(pages_of_query(""), Ok(TaskPages::default()));
    }

    #[test]
    fn a_wrong_query_is_named() {
        for (text, why) in [
            ("queue=q&queue=r", "\"queue\" is given twice"),
            ("status=gone", "unknown status \"gone\""),
            ("since=monday", "\"monday\" is not a time"),
            ("limit=x", "limit \"x\" is not a whole number"),
            ("cursor=x", "the cursor is not one of an earlier answer"),
            ("queue=a%20b", "contains ' '"),
        ] {
            let said = pages_of_query(text).unwrap_err();
            assert!(said.contains(why), "{said:?} should say {why:?}");
        }
    }
}
