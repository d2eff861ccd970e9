//! Changes of unfinished tasks, and pauses of queues.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    super::tally::Tally,
    AtMost, Nested, Unread,
    bulk::{MAX_IDS, chosen},
    object,
    search::Filter,
    text::{Priority, Time},
};
use crate::model::{ChangeTasks, RequeueTasks, Update};

/// Tasks by id, or by filter with `dry_run` or `yes`, and their new values.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(
    default,
    deny_unknown_fields,
    expecting = "an object with ids or a filter, and priority or replicas"
)]
pub(in crate::ingress) struct UpdateTasks {
    ids: AtMost<String, MAX_IDS>,
    filter: Option<Nested<Filter>>,
    /// Only count.
    dry_run: bool,
    yes: bool,
    priority: Option<Priority>,
    replicas: Option<u32>,
}

/// Tasks by id, or by filter with `dry_run` or `yes`, and for whom they are.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(
    default,
    deny_unknown_fields,
    expecting = "an object with ids or a filter"
)]
#[schemars(rename = "RequeueTasks")]
pub(in crate::ingress) struct Requeue {
    ids: AtMost<String, MAX_IDS>,
    filter: Option<Nested<Filter>>,
    /// Only count.
    dry_run: bool,
    yes: bool,
    to: String,
    away_from: String,
    reserved_for: Option<Time>,
}

/// The state of a queue after a pause or a resume.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct Pausing<'a> {
    pub(in crate::ingress) queue: &'a str,
    pub(in crate::ingress) paused: bool,
    /// False if the queue was in this state before.
    pub(in crate::ingress) changed: bool,
}

/// Which tasks to change, and how. Either may be invalid.
pub(in crate::ingress) type Asked<T> = (Result<ChangeTasks, String>, Result<T, String>);

/// Reads tasks, and their new values.
pub(in crate::ingress) fn update(
    body: &Bytes,
    tally: &mut Tally<'_>,
) -> Result<Asked<Update>, Unread> {
    let UpdateTasks {
        ids,
        filter,
        dry_run,
        yes,
        priority,
        replicas,
    } = object(body)?;
    let chosen = chosen(ids, filter, dry_run, yes, tally)?;
    Ok((
        chosen,
        Ok(Update {
            priority: priority.map(|priority| priority.0),
            replicas,
        }),
    ))
}

/// Reads tasks, and for whom they are.
pub(in crate::ingress) fn requeue(
    body: &Bytes,
    tally: &mut Tally<'_>,
) -> Result<Asked<RequeueTasks>, Unread> {
    let Requeue {
        ids,
        filter,
        dry_run,
        yes,
        to,
        away_from,
        reserved_for,
    } = object(body)?;
    let chosen = chosen(ids, filter, dry_run, yes, tally)?;
    Ok((
        chosen,
        RequeueTasks::new(&to, &away_from, reserved_for.map(|time| time.0)),
    ))
}

#[cfg(test)]
mod tests {
    use super::{
        super::testing::{share, tally},
        *,
    };
    use crate::model::ChosenTasks;

    #[test]
    fn tasks_are_named_by_ids_or_by_a_filter() {
        let read = |text: &'static str| {
            update(&Bytes::from(text), &mut tally(&share())).map_err(|e| e.to_string())
        };
        let (chosen, values) = read(r#"{"ids":["a","b"],"replicas":2}"#).unwrap();
        let ids = ChosenTasks::Ids(vec!["a".into(), "b".into()]);
        assert_eq!(
            chosen,
            Ok(ChangeTasks {
                chosen: ids,
                dry_run: false,
                yes: false
            })
        );
        assert_eq!(
            values,
            Ok(Update {
                priority: None,
                replicas: Some(2)
            })
        );
        let (chosen, _) = read(r#"{"filter":{"queue":"q"},"yes":true,"priority":"high"}"#).unwrap();
        assert!(matches!(
            chosen,
            Ok(ChangeTasks {
                chosen: ChosenTasks::Filter(_),
                dry_run: false,
                yes: true
            })
        ));
        assert_eq!(
            read("{}").unwrap().0.unwrap_err(),
            "name tasks by ids or by a filter"
        );
        for (text, why) in [
            (r#"{"ids":"a"}"#, "expected a list"),
            (r#"{"id":["a"]}"#, "unknown field `id`"),
            (r#"["a"]"#, "expected a JSON object"),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(why), "{said:?} should say {why:?}");
        }
    }
}
