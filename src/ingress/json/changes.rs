//! Changes of live work.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    super::tally::Tally,
    AtMost, Unread, object,
    text::{Priority, Time},
};
use crate::model::{RequeueTasks, Update};

/// The most tasks of a call.
const MAX_IDS: usize = 1000;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with ids")]
pub(in crate::ingress) struct Ids {
    ids: AtMost<String, MAX_IDS>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with ids, and priority or replicas")]
pub(in crate::ingress) struct UpdateTasks {
    ids: AtMost<String, MAX_IDS>,
    priority: Option<Priority>,
    replicas: Option<u32>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with ids")]
#[schemars(rename = "RequeueTasks")]
pub(in crate::ingress) struct Requeue {
    ids: AtMost<String, MAX_IDS>,
    #[serde(default)]
    to: String,
    #[serde(default)]
    away_from: String,
    reserved_for: Option<Time>,
}

/// The state of a queue behind a pause or a resume.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct Pausing<'a> {
    pub(in crate::ingress) queue: &'a str,
    pub(in crate::ingress) paused: bool,
    /// False: it was so before.
    pub(in crate::ingress) changed: bool,
}

fn counted(ids: AtMost<String, MAX_IDS>, tally: &mut Tally<'_>) -> Result<Vec<String>, Unread> {
    for _ in &ids.0 {
        tally.item()?;
    }
    Ok(ids.0)
}

/// Reads the ids of tasks.
pub(in crate::ingress) fn ids(body: &Bytes, tally: &mut Tally<'_>) -> Result<Vec<String>, Unread> {
    let Ids { ids } = object(body)?;
    counted(ids, tally)
}

/// Reads the ids of tasks, and their new values.
pub(in crate::ingress) fn update(body: &Bytes, tally: &mut Tally<'_>) -> Result<(Vec<String>, Update), Unread> {
    let UpdateTasks { ids, priority, replicas } = object(body)?;
    Ok((counted(ids, tally)?, Update { priority: priority.map(|priority| priority.0), replicas }))
}

/// Reads the ids of tasks, and for whom they are.
pub(in crate::ingress) fn requeue(
    body: &Bytes,
    tally: &mut Tally<'_>,
) -> Result<(Vec<String>, Result<RequeueTasks, String>), Unread> {
    let Requeue { ids, to, away_from, reserved_for } = object(body)?;
    let requeue = RequeueTasks::new(&to, &away_from, reserved_for.map(|time| time.0));
    Ok((counted(ids, tally)?, requeue))
}

#[cfg(test)]
mod tests {
    use super::{
        super::testing::{share, tally},
        *,
    };

    #[test]
    fn ids_are_a_list_and_nothing_else() {
        let read = |text: &'static str| ids(&Bytes::from(text), &mut tally(&share())).map_err(|e| e.to_string());
        assert_eq!(read(r#"{"ids":["a","b"]}"#).unwrap(), ["a", "b"]);
        for (text, why) in [
            (r#"{"ids":"a"}"#, "expected a list"),
            (r#"{"id":["a"]}"#, "unknown field `id`"),
            ("{}", "missing field `ids`"),
            (r#"["a"]"#, "expected a JSON object"),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(why), "{said:?} should say {why:?}");
        }
    }
}
