//! Tasks of records that may be read once more.
//!
//! A record's task is inserted before the position of its subscription moves past the record. Until
//! then only the task's row shows that it was inserted.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::{
    model::{Offset, SUBSCRIPTION_HEADERS, TaskId},
    store::{
        Result,
        sql::{
            rows::task_id,
            session::Session,
            statement::{Statement, lists},
        },
    },
};

/// Where the record of a task stands.
struct Place {
    subscription: String,
    topic: String,
    partition: i64,
    offset: Offset,
    replay: i64,
}

impl Place {
    /// Reads what the feeder has written into the headers of a task; `None` for other tasks.
    fn of(headers: &str) -> Option<Self> {
        let headers: Vec<(String, String)> = serde_json::from_str(headers).ok()?;
        let header = |wanted: &str| {
            headers
                .iter()
                .find(|(name, _)| name == wanted)
                .map(|(_, value)| value.as_str())
        };
        let [of_subscription, of_replay] = SUBSCRIPTION_HEADERS;
        Some(Self {
            subscription: header(of_subscription)?.to_owned(),
            topic: header("taskd-topic")?.to_owned(),
            partition: header("taskd-partition")?.parse().ok()?,
            offset: header("taskd-offset")?.parse().ok()?,
            replay: header(of_replay)?.parse().ok()?,
        })
    }
}

/// Returns those of the tasks whose records a subscription has not passed. Deleted subscriptions and
/// earlier replays read no more.
pub(super) async fn unread<S: Session>(session: &mut S, ids: &[TaskId]) -> Result<HashSet<TaskId>> {
    let mut places = Vec::new();
    for ids in lists(ids) {
        let headers = Statement::new("SELECT id, headers FROM tasks ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids);
        for (id, headers) in session.fetch::<(Vec<u8>, String)>(headers).await? {
            if let Some(place) = Place::of(&headers) {
                places.push((task_id(&id)?, place));
            }
        }
    }
    // A subscription may have positions in all topics, and the page tasks of some.
    let read: BTreeSet<(&str, &str)> = places
        .iter()
        .map(|(_, place)| (place.subscription.as_str(), place.topic.as_str()))
        .collect();
    let mut positions = HashMap::new();
    for (name, topic) in read {
        let select = Statement::new(
            "SELECT part, major, minor, replay FROM positions WHERE subscription = ? AND topic = ?",
        );
        type Columns = (i64, i64, i64, i64);
        let select = select.bind(name).bind(topic);
        for (partition, major, minor, replay) in session.fetch::<Columns>(select).await? {
            positions.insert((name, topic, partition), (major, minor, replay));
        }
    }
    let mut unread = HashSet::new();
    for (id, place) in &places {
        let key = (
            place.subscription.as_str(),
            place.topic.as_str(),
            place.partition,
        );
        let Some((major, minor, replay)) = positions.get(&key) else {
            continue;
        };
        let [of_major, of_minor] = [place.offset.major, place.offset.minor]
            .map(|number| i64::try_from(number).unwrap_or(i64::MAX));
        if *replay == place.replay && (*major, *minor) < (of_major, of_minor) {
            unread.insert(*id);
        }
    }
    Ok(unread)
}
