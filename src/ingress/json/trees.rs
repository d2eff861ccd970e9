//! Trees: reads them from the JSON of an insert, and the queries about them.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, de};

use super::{
    query::{not_a_number, parameters},
    text::{Instant, Time},
};
use crate::model::{self, NewTree, QueueName, TaskTree, TreeOnDead, TreePages, TreeState};

/// The settings of a new tree.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(
    default,
    deny_unknown_fields,
    expecting = "\"new\", the id of a tree, or an object"
)]
#[schemars(rename = "NewTree")]
pub(in crate::ingress) struct Settings {
    /// The queue that gets one task when the tree has ended, with its counts. Empty: none.
    then: String,
    /// All tasks of the tree must have their completions within this time. Absent: no deadline.
    timeout: Option<Time>,
    /// What dead tasks mean for the end; if it is absent, what the topology says, or `count`.
    on_dead: Option<TreeOnDead>,
}

/// The tree of a task: `new`, the id of an open tree, or the settings of a new one.
#[derive(JsonSchema)]
#[schemars(untagged, rename = "TaskTree")]
#[allow(dead_code, reason = "only the document of the API has this type")]
pub(super) enum OfTask {
    NewOrId(String),
    New(Settings),
}

/// Reads the tree of a task.
pub(super) fn of_task<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Box<TaskTree>>, D::Error> {
    struct Visitor;

    impl<'de> de::Visitor<'de> for Visitor {
        type Value = Option<Box<TaskTree>>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("\"new\", the id of a tree, or an object")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
            if text.is_empty() {
                return Ok(None);
            }
            let tree = TaskTree::from_text(text).map_err(E::custom)?;
            Ok(Some(Box::new(tree)))
        }

        fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
            let Settings {
                then,
                timeout,
                on_dead,
            } = Settings::deserialize(de::value::MapAccessDeserializer::new(map))?;
            Ok(Some(Box::new(TaskTree::Root(NewTree {
                then,
                timeout: timeout.map(|time| time.0),
                on_dead,
                feed: None,
            }))))
        }
    }

    deserializer.deserialize_any(Visitor)
}

/// Reads the tree of tasks from a flag: `new`, the id of an open tree, or the settings of a new one
/// in JSON.
pub fn read(text: &str) -> Result<TaskTree, String> {
    if !text.trim_start().starts_with('{') {
        return TaskTree::from_text(text);
    }
    let Settings {
        then,
        timeout,
        on_dead,
    } = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Ok(TaskTree::Root(NewTree {
        then,
        timeout: timeout.map(|time| time.0),
        on_dead,
        feed: None,
    }))
}

/// Reads the query of a list of trees.
pub(in crate::ingress) fn pages_of_query(text: &str) -> Result<TreePages, String> {
    let mut pages = TreePages::default();
    for (name, value) in parameters(text)? {
        // As in JSON, an empty value counts as absent.
        if value.is_empty() {
            continue;
        }
        match &*name {
            "queue" => {
                pages.queue = Some(QueueName::new(&value).map_err(|error| error.to_string())?);
            }
            "state" => pages.state = Some(TreeState::parse(&value)?),
            "since" => pages.since_unix_ms = Some(value.parse::<Instant>()?.0),
            "limit" => pages.limit = value.parse().map_err(|_| not_a_number(&name, &value))?,
            "cursor" => pages.after = Some(value.parse::<model::TaskCursor>()?),
            // The route has refused other names.
            _ => {}
        }
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::TaskId;

    #[derive(Deserialize)]
    struct Holder {
        #[serde(default, deserialize_with = "of_task")]
        tree: Option<Box<TaskTree>>,
    }

    fn read(text: &str) -> Result<Option<TaskTree>, String> {
        let read: Result<Holder, _> = serde_json::from_str(text);
        read.map(|holder| holder.tree.map(|tree| *tree))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_task_begins_a_tree_or_joins_one() {
        assert_eq!(read("{}"), Ok(None));
        assert_eq!(read(r#"{"tree":null}"#), Ok(None));
        let new = TaskTree::Root(NewTree::default());
        assert_eq!(read(r#"{"tree":"new"}"#), Ok(Some(new.clone())));
        assert_eq!(read(r#"{"tree":{}}"#), Ok(Some(new)));
        let full = TaskTree::Root(NewTree {
            then: "reports".into(),
            timeout: Some(Duration::from_secs(3600)),
            on_dead: Some(TreeOnDead::Hold),
            feed: None,
        });
        let text = r#"{"tree":{"then":"reports","timeout":"1h","on_dead":"hold"}}"#;
        assert_eq!(read(text), Ok(Some(full)));
        let tree = TaskId::new();
        let joins = TaskTree::Joins {
            tree,
            deadline_unix_ms: 0,
        };
        assert_eq!(read(&format!(r#"{{"tree":"{tree}"}}"#)), Ok(Some(joins)));
        for (text, why) in [
            (r#"{"tree":"old"}"#, "neither \"new\" nor the id of a tree"),
            (r#"{"tree":7}"#, "expected \"new\", the id of a tree"),
            (r#"{"tree":{"queue":"q"}}"#, "unknown field `queue`"),
            (r#"{"tree":{"on_dead":"next"}}"#, "unknown variant `next`"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(why), "{error:?} should say {why:?}");
        }
    }

    #[test]
    fn queries_about_trees_are_read() {
        let id = TaskId::new();
        let text = format!("queue=q&state=failed&since=1970-01-01T00:00:01Z&limit=7&cursor={id}");
        assert_eq!(
            pages_of_query(&text),
            Ok(TreePages {
                queue: QueueName::new("q").ok(),
                state: Some(TreeState::Failed),
                since_unix_ms: Some(1_000),
                limit: 7,
                after: Some(model::TaskCursor(id)),
            })
        );
        assert!(pages_of_query("state=gone").unwrap_err().contains("OPEN"));
    }
}
